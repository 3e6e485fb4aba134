"""Runs TensorFlow 1's CrossShardOptimizer on the virtual TPU.

The original sums gradients by an operation that stock TensorFlow can neither
run nor lower to XLA, and it asks `tpu_function` for the number of replicas.
While a step is traced, both are replaced: the virtual TPU's strategy sums, and
provides the number. Nothing else of the original is replaced.

The original is older than `tf.distribute`. Under a strategy, the optimizer that
it wraps sums over all replicas a second time, so that a mean becomes a
sum and groups have no effect. The argument `skip_gradients_aggregation=True`
prevents that. The original does not pass it; this module does.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.tpu import tpu_function
from tensorflow.python.tpu.ops import tpu_ops


class Original:
  """`tf.compat.v1.tpu.CrossShardOptimizer` for one model."""

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    opt: tf.compat.v1.train.Optimizer,
    variables: Sequence[Any],
    **kwargs: Any,
  ) -> None:
    """Creates the optimizer, its slots and a `global_step`.

    It has dtype int64, like the iteration count of Keras optimizers.
    """
    opt.apply_gradients = functools.partial(
      opt.apply_gradients, skip_gradients_aggregation=True
    )
    self.optimizer = tf.compat.v1.tpu.CrossShardOptimizer(opt, **kwargs)
    self._strategy = strategy
    self._variables = [native(variable) for variable in variables]
    with strategy.scope():
      # Otherwise the first step would create them, inside the TPU program.
      opt._create_slots(self._variables)
      self._step = tf.Variable(0, dtype=tf.int64, trainable=False)

  def minimize(self, loss: tf.Tensor) -> None:
    """Scales the loss, sums the gradients over replicas and applies them."""
    with replaced(self._strategy):
      pairs = self.optimizer.compute_gradients(loss, self._variables)
      self.optimizer.apply_gradients(pairs, self._step)


@contextlib.contextmanager
def replaced(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Replaces the TPU operations of the original with those of a strategy."""
  count = strategy.num_replicas_in_sync

  def cross_replica_sum(
    x: Any, group_assignment: Any = None, name: str | None = None
  ) -> tf.Tensor:
    del name
    groups = group_assignment or [list(range(count))]
    # `tf.IndexedSlices` become dense, as in any operation of TensorFlow.
    return strategy.extended.cross_replica_sum(tf.convert_to_tensor(x), groups)

  with (
    mock.patch.object(tpu_ops, "cross_replica_sum", cross_replica_sum),
    tpu_function.tpu_shard_context(count),
  ):
    yield


def native(variable: Any) -> tf.Variable:
  """Returns the `tf.Variable` of a Keras variable or of a `tf.Variable`."""
  return variable.value if isinstance(variable, tf.keras.Variable) else variable
