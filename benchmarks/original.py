"""TensorFlow 1's CrossShardOptimizer, in programs of the virtual TPU.

The original sums by an operation that stock TensorFlow can neither run nor
lower to XLA, and asks `tpu_function` how many replicas there are. While a step
is traced, the strategy does both. Nothing else of it is replaced.

It dates from before strategies. Under one, the optimizer that it encapsulates
sums over all replicas once more (a mean becomes a sum, and groups are undone)
unless told not to, which the original does not do.
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
    *,
    counts_steps: bool = True,
    **kwargs: Any,
  ) -> None:
    """Makes the optimizer and its slots.

    `counts_steps` makes a `global_step`, int64 as that of Keras optimizers.
    """
    opt.apply_gradients = functools.partial(
      opt.apply_gradients, skip_gradients_aggregation=True
    )
    self.optimizer = tf.compat.v1.tpu.CrossShardOptimizer(opt, **kwargs)
    self._strategy = strategy
    self._variables = [native(variable) for variable in variables]
    with strategy.scope():
      # The original would make them in its first step, inside the program.
      opt._create_slots(self._variables)
      self._step = (
        tf.Variable(0, dtype=tf.int64, trainable=False)
        if counts_steps
        else None
      )

  @property
  def variables(self) -> list[tf.Variable]:
    """Slots, powers of Adam and the step count."""
    steps = [] if self._step is None else [self._step]
    return [*self.optimizer.variables(), *steps]

  def minimize(self, loss: tf.Tensor) -> None:
    """Scales the loss, sums the gradients and applies them."""
    with replaced(self._strategy):
      pairs = self.optimizer.compute_gradients(loss, self._variables)
      self.optimizer.apply_gradients(pairs, self._step)

  def apply(self, grads: Sequence[tf.Tensor]) -> None:
    """Sums gradients, one per variable, and applies them."""
    pairs = list(zip(grads, self._variables, strict=True))
    with replaced(self._strategy):
      self.optimizer.apply_gradients(pairs, self._step)


@contextlib.contextmanager
def replaced(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Lets a strategy do what the original asks of a TPU."""
  count = strategy.num_replicas_in_sync

  def cross_replica_sum(
    x: Any, group_assignment: Any = None, name: str | None = None
  ) -> tf.Tensor:
    del name
    groups = group_assignment or [list(range(count))]
    # Rows become dense, as any operation of TensorFlow makes them.
    return strategy.extended.cross_replica_sum(tf.convert_to_tensor(x), groups)

  with (
    mock.patch.object(tpu_ops, "cross_replica_sum", cross_replica_sum),
    tpu_function.tpu_shard_context(count),
  ):
    yield


def native(variable: Any) -> tf.Variable:
  """Returns the `tf.Variable` of a Keras variable or of a `tf.Variable`."""
  return variable.value if isinstance(variable, tf.keras.Variable) else variable
