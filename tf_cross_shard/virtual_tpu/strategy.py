"""A `tf.distribute.Strategy` whose replicas are one XLA program."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_cross_shard.virtual_tpu import extended, tracing


class NestedRunError(RuntimeError):
  """`strategy.run` was called inside a function that it is running."""

  ag_pass_through = True  # AutoGraph would raise a class of its own instead.


class VirtualTPUStrategy(tf.distribute.Strategy):
  """`num_replicas` TPU replicas on this machine's CPU.

  It is used like `tf.distribute.TPUStrategy`. The function given to `run` is
  lowered to the XLA program that a TPU would run, compiled for CPUs, and run
  as `num_replicas` replicas. Each replica has its own copy of every variable.

  >>> strategy = VirtualTPUStrategy(num_replicas=2)
  >>> with strategy.scope():
  ...   weight = tf.Variable(0.0)
  >>> def step(x):
  ...   context = tf.distribute.get_replica_context()
  ...   return weight.assign_add(context.all_reduce("SUM", x))
  >>> mine = strategy.experimental_distribute_values_from_function(
  ...   lambda context: tf.constant(1.0 + context.replica_id_in_sync_group)
  ... )
  >>> result = strategy.run(step, args=(mine,))  # 1 + 2
  >>> [float(x) for x in strategy.experimental_local_results(result)]
  [3.0, 3.0]
  >>> float(weight.numpy())
  3.0

  Reading a variable on the host answers replica 0's copy, or the sum or mean of
  all copies where the variable asks for that on reading. Assigning it there
  sets all copies. `experimental_local_results(variable)` answers each of them.
  """

  def __init__(self, num_replicas: int = 8) -> None:
    """Makes the strategy; devices are made by the first step.

    Args:
      num_replicas: How many replicas.

    Raises:
      ValueError: If that is no positive integer.
    """
    if (
      isinstance(num_replicas, bool)
      or not isinstance(num_replicas, int)
      or num_replicas < 1
    ):
      raise ValueError(
        f"`num_replicas` must be a positive integer; got {num_replicas!r}."
      )
    super().__init__(extended.VirtualTPUExtended(self, num_replicas))

  def run(
    self,
    fn: Callable[..., Any],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    options: Any = None,
  ) -> Any:
    """Runs `fn` on every replica.

    Args:
      fn: A function of tensors. It is traced once per kind of arguments.
      args: Its arguments. A `PerReplica` value gives each replica its own; all
        else is given to all of them.
      kwargs: Its keyword arguments.
      options: Not used.

    Returns:
      What `fn` returned, with one value per replica.

    Raises:
      NestedRunError: If called by a function that is being run so.
      TPUCompileError: If a TPU could not run `fn`.
    """
    if tracing.in_replica_program():
      raise NestedRunError(
        "strategy.run was called inside a function that strategy.run is"
        " running. Call it outside."
      )
    if not tf.executing_eagerly():
      return super().run(fn, args, kwargs, options)
    # As it is: the base class would wrap it anew at each call, and what was
    # traced could not be found again.
    with self.scope():
      return self.extended.call_for_each_replica(fn, args, kwargs)

  @tf.autograph.experimental.do_not_convert
  def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
    """Combines the replicas' values on the host.

    Args:
      reduce_op: "SUM" or "MEAN".
      value: What `run` returned.
      axis: Dimensions of each replica's value that are reduced too, or None.

    Returns:
      One tensor, in the structure of `value`.

    Raises:
      RuntimeError: If called by a replica.
    """
    operation = tf.distribute.ReduceOp(
      reduce_op.upper() if isinstance(reduce_op, str) else reduce_op
    )
    context = tf.distribute.get_replica_context()
    if context is not None and context.strategy is self:
      raise RuntimeError(
        "strategy.reduce was called in the replica context. Use"
        " tf.distribute.get_replica_context().all_reduce there."
      )
    reduce = functools.partial(self.extended.combine, operation, axis=axis)
    return tf.nest.map_structure(reduce, value)
