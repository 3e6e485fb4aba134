"""A `tf.distribute.Strategy` whose replicas are one vectorized program.

    strategy.run(fn) ─ trace ─▶ graph of one replica ─ vectorize ─▶ all replicas

`run` traces the replica's function as an ordinary `tf.function` and rewrites
the graph, so that every tensor that differs between replicas has a first axis
of N copies. The device runs one program with larger tensors.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tf_cross_shard._src.core import single_program, validation
from tf_cross_shard._src.vectorized import extended, replica_context


class NestedRunError(RuntimeError):
  """`strategy.run` was called inside a function that it is running."""

  ag_pass_through = True  # AutoGraph would replace the class of this error.


class _Scope:
  """The scope of a strategy; its errors say what helps."""

  def __init__(self, scope: Any, advise: Callable[[Any], None]) -> None:
    self._scope, self._advise = scope, advise

  def __enter__(self) -> Any:
    return self._scope.__enter__()

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
    self._scope.__exit__(kind, error, traceback)
    if isinstance(error, (RuntimeError, ValueError)):
      self._advise(error)


class OneProgramStrategy(tf.distribute.Strategy):
  """Runs all replicas as one vectorized program."""

  _extended_class = extended.ModelsExtended

  def __init__(self, num_replicas: int) -> None:
    """Creates the strategy.

    Args:
      num_replicas: The number of replicas.

    Raises:
      ValueError: If `num_replicas` is not a positive integer.
      NotImplementedError: If this version of TensorFlow cannot vectorize.
    """
    num_replicas = validation.check_integer(
      "num_replicas", num_replicas, "Pass, for example, 8."
    )
    super().__init__(self._extended_class(self, num_replicas))

  @property
  def single_program(self) -> single_program.SingleProgram:
    """What this package asks of the strategy."""
    program: single_program.SingleProgram = self.extended
    return program

  def scope(self) -> Any:
    """Returns a context in which variables are created for all replicas."""
    return _Scope(super().scope(), self.extended.advise)

  def run(
    self,
    fn: Callable[..., Any],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    options: Any = None,
  ) -> Any:
    """Runs `fn` on every replica.

    Args:
      fn: The function of one replica.
      args: Positional arguments. A `PerReplica` value gives each replica its
        own part; every other value goes to all replicas.
      kwargs: Keyword arguments, treated like `args`.
      options: Ignored, as in TensorFlow's strategies other than TPUStrategy.

    Returns:
      The structure that `fn` returns, with one value for each replica.

    Raises:
      NestedRunError: If called by a function that `run` is running.
      NotImplementedError: If an operation of `fn` cannot be vectorized.
    """
    if replica_context.in_replica_program():
      raise NestedRunError(
        "strategy.run was called inside a function that strategy.run is"
        " running. Call it outside."
      )
    self.extended.warn_of_predict(fn)
    self.extended.check_weights(fn, args)
    if tf.executing_eagerly():
      return self.extended.function_of(fn)(tuple(args), kwargs or {})
    return super().run(fn, args, kwargs, options)

  @tf.autograph.experimental.do_not_convert
  def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
    """Combines the replicas' values.

    The base class would run a second program to reduce over `axis`.

    Args:
      reduce_op: `"MEAN"` or `"SUM"`, or a `tf.distribute.ReduceOp`.
      value: A result of `run`, or a structure of such results.
      axis: The dimension to reduce in addition to the replicas, or None.

    Returns:
      The sum or mean, in the structure of `value`.

    Raises:
      RuntimeError: If called in a function that `run` is running.
    """
    operation = tf.distribute.ReduceOp(
      reduce_op.upper() if isinstance(reduce_op, str) else reduce_op
    )
    # No public function raises this error, which names the right method.
    distribute_lib._require_cross_replica_or_default_context_extended(  # noqa: SLF001
      self.extended
    )
    return tf.nest.map_structure(
      lambda x: self.extended.combine(operation, x, axis), value
    )


class VectorizedStrategy(OneProgramStrategy):
  """Trains n models on one device, as one vectorized program.

  Use it for ensembles, cross validation and hyperparameter searches on one CPU
  or GPU. Write the program of one model, and create it inside the scope: each
  replica is the program of one device, with its own copy of every variable. All
  models receive the whole batch. Every loss, metric, layer and optimizer of
  Keras gives each model the numbers of a `fit` of its own, up to rounding.

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import VectorizedStrategy, schedules
  >>> strategy = VectorizedStrategy(2)
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential([tf.keras.Input((1,))])
  ...   model.add(tf.keras.layers.Dense(1, kernel_initializer="zeros"))
  ...   sgd = tf.keras.optimizers.SGD(schedules.PerModel([0.5, 0.25]))
  ...   model.compile(sgd, "mse")
  >>> x = np.ones([4, 1], "float32")
  >>> _ = model.fit(x, x, epochs=1, verbose=0)
  >>> kernel = model.trainable_variables[0]
  >>> kernels = strategy.experimental_local_results(kernel.value)
  >>> [float(copy[0, 0]) for copy in kernels]
  [1.0, 0.5]

  The copies of a variable are stored as one tensor with a first axis: 16 small
  networks need 16 times the arithmetic of one network, but not 16 times the
  operations.

  - `num_replicas_in_sync` is 1: no gradient is aggregated over models. A
    collective in a replica, such as `all_reduce`, returns its input.
  - `replica_id_in_sync_group` of the replica context is the model's number.
  - To give models different data, use `dataset_per_model` and `per_model`;
    different initial weights, `Models.initialize`; different settings,
    `schedules.PerModel` and `per_model`; different numbers in the model,
    variables, which `Models.assign` sets.
  - If you read a variable outside of `run`, you get model 0's copy, or the mean
    over the models if the variable is aggregated on reading, as metrics are. An
    assignment outside of `run` sets all copies.
    `experimental_local_results(variable)` returns every model's copy, as
    tensors.

  Operations that TensorFlow cannot vectorize run once for each replica, with
  the same numbers; a line in the log, at level INFO of absl, names them.
  """
