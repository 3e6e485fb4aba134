"""A tower in which no optimizer can update variables by itself.

An optimizer that is not made for towers would change the variables in the
first tower, before anything is known of the others. In eager execution that
cannot be undone. Every optimizer of either Keras asks the replica context to
reduce its gradients before it changes anything: there it is caught. So it is
while a tf.function is traced: another optimizer, beside one that is right,
would go unnoticed there.

Those of TensorFlow 1 ask nobody where there is no strategy. While towers run
they have an `apply_gradients` that looks where it is called; it is put back
afterwards, and does in other threads what it always did.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard.towers import gradient_collector, owners

_V1: Final[Any] = tf.compat.v1.train.Optimizer
_APPLY: Final = _V1.apply_gradients
_lock: Final = threading.Lock()
_users = 0  # Replicas may be threads, each with its towers.


@contextlib.contextmanager
def plain_optimizers(count: int) -> Iterator[None]:
  """Raises an error in optimizers that are called directly."""
  context = tf.distribute.get_replica_context()
  if count == 1 or context is None:
    yield
    return
  strategy = tf.distribute.get_strategy()
  with _guarding_version_1(), _TowerContext(strategy, context, count):
    yield


@contextlib.contextmanager
def _guarding_version_1() -> Iterator[None]:
  """Has version 1's optimizers look where they are called."""
  global _users
  with _lock:
    _users += 1
    _V1.apply_gradients = _guarded
  try:
    yield
  finally:
    with _lock:
      _users -= 1
      if not _users:
        _V1.apply_gradients = _APPLY


@functools.wraps(_APPLY)
def _guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
  """`apply_gradients`, but in a tower."""
  gradient_collector.check_outside(type(self).__name__)
  return _APPLY(self, *args, **kwargs)


class _TowerContext(tf.distribute.ReplicaContext):
  """The replica context of a tower: the replica's own, but for optimizers."""

  def __init__(
    self, strategy: tf.distribute.Strategy, outer: Any, count: int
  ) -> None:
    super().__init__(strategy, outer.replica_id_in_sync_group)
    self._outer = outer
    self._count = count

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Meets the other replicas, in the context that they know."""
    self._refuse()
    with self._outer:
      return self._outer.merge_call(merge_fn, args, kwargs)

  def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Reduces, in the context that the other replicas know."""
    self._refuse()
    with self._outer:
      return self._outer.all_reduce(reduce_op, value, options)

  def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
    """Gathers, in the context that the other replicas know."""
    with self._outer:
      return self._outer.all_gather(value, axis, options)

  def _refuse(self) -> None:
    """Raises `ValueError` if it is an optimizer that asks."""
    optimizer = owners.optimizer_calling()
    if optimizer is not None:
      raise ValueError(gradient_collector.not_a_tower(optimizer, self._count))
