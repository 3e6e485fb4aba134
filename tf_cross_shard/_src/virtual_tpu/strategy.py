"""Data-parallel replicas as one program, which a TPU could run."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.vectorized import arguments
from tf_cross_shard._src.vectorized import strategy as strategy_lib
from tf_cross_shard._src.virtual_tpu import data_parallel, exchanges, lowering

# The programs that `run` traces for `compile_for`; None otherwise.
_recorded: Final = contextvars.ContextVar[Any]("programs", default=None)


class VirtualTPUExtended(data_parallel.DataParallelExtended):
  """Lowers each program before it runs."""

  _for_xla = True

  def _results(
    self, function: Any, structure: Any, given: arguments.Arguments
  ) -> Any:
    for leaf in given.shared:
      lowering.check_dense(leaf)
    program = lowering.Program(function, self.variables_of(function))
    recorded = _recorded.get()
    if recorded is not None:
      # Only `compile_for` wants the program: do not create stacks for it.
      recorded.append((program, self.num_copies))
      return tf.nest.map_structure(
        lambda leaf: None, structure, expand_composites=True
      )
    if program.has_known_shapes:
      program.lower()
    results = super()._results(function, structure, given)
    graph = function.graph.as_graph_def().SerializeToString()
    if exchanges.COMBINED.encode() not in graph:
      return results
    # tf_keras adds up what replicas return, but no tensors, which metrics of
    # all replicas are under MirroredStrategy.
    return tf.nest.map_structure(
      lambda x: x if getattr(x, "is_stacked", True) else x.tensor, results
    )


class VirtualTPUStrategy(strategy_lib.OneProgramStrategy):
  """Trains one model on n data-parallel replicas, as one program on one device.

  Use it like `tf.distribute.TPUStrategy`: the replicas share each batch and
  exchange gradients. The function that you pass to `run` is lowered to the XLA
  program that a TPU would run, so what a TPU refuses is refused here. Then all
  replicas run as one vectorized program on this machine.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import virtual_tpu
  >>> strategy = virtual_tpu.VirtualTPUStrategy(num_replicas=2)
  >>> with strategy.scope():
  ...   weight = tf.Variable(0.0)
  >>> def step(x):
  ...   context = tf.distribute.get_replica_context()
  ...   return weight.assign_add(context.all_reduce("SUM", x))
  >>> values = strategy.experimental_distribute_values_from_function(
  ...   lambda context: tf.constant(1.0 + context.replica_id_in_sync_group)
  ... )
  >>> result = strategy.run(step, args=(values,))  # 1 + 2
  >>> [float(x) for x in strategy.experimental_local_results(result)]
  [3.0, 3.0]
  >>> float(weight.numpy())
  3.0

  Where an argument has a dimension that is not known when the function is
  traced, the function is not lowered: a TPU would compile it for each size. The
  batches of a dataset must have one known size that the number of replicas
  divides: use `drop_remainder=True`.
  """

  _extended_class = VirtualTPUExtended

  def __init__(self, num_replicas: int = 8) -> None:
    """Creates the strategy.

    Args:
      num_replicas: The number of replicas, 8 by default.

    Raises:
      ValueError: If `num_replicas` is not a positive integer.
    """
    super().__init__(num_replicas)


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[lowering.Program, int]]]:
  """Collects programs and their numbers of replicas instead of running them."""
  programs: list[tuple[lowering.Program, int]] = []
  before = _recorded.set(programs)
  try:
    yield programs
  finally:
    _recorded.reset(before)
