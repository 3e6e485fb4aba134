"""The context in which a replica has no peers.

Inside it a reduction answers this replica's value, a merge call runs at once
and an assignment writes this replica's copy. An optimizer that reduces
gradients within itself therefore does not reduce them again, and it may stand
inside `tf.cond`, where merge calls fail.

The obvious way, one merge call around the whole update, fails inside tf.cond,
and Keras' own conditionals (gradient accumulation, EMA) then merge within it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

_lock: Final = threading.Lock()


@contextlib.contextmanager
def alone(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Makes the calling replica act as if it were the only one.

  Args:
    strategy: The strategy in whose replica context this is called.

  Yields:
    None.
  """
  context = tf.distribute.get_replica_context()
  with _answering(strategy.extended):
    with _AloneContext(strategy, context.replica_id_in_sync_group):
      yield


@contextlib.contextmanager
def not_reducing(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Turns reductions off and leaves merge calls and assignments as they are.

  For strategies that nobody knows to do without merge calls. In it an update
  fails inside `tf.cond`, as it does in plain Keras.

  Args:
    strategy: The strategy in whose replica context this is called.

  Yields:
    None.
  """
  context = tf.distribute.get_replica_context()
  with _NotReducingContext(strategy, context):
    yield


@contextlib.contextmanager
def _answering(extended: Any) -> Iterator[None]:
  """Lets a strategy do without merge calls for replicas that are alone.

  MirroredStrategy can; it asks its `_use_merge_call` whether to. The answer
  is put on the object while any thread is inside, and is changed for replicas
  that are alone only: other threads may be tracing under the same strategy.
  """
  with _lock:
    answer = vars(extended).get("_use_merge_call")
    if not isinstance(answer, _Answer):
      answer = _Answer(extended)
      extended._use_merge_call = answer
    answer.users += 1
  try:
    yield
  finally:
    with _lock:
      answer.users -= 1
      if not answer.users:
        answer.restore(extended)


class _Answer:
  """Whether to use merge calls: not where the caller is alone."""

  def __init__(self, extended: Any) -> None:
    self.users = 0
    self._was_own = "_use_merge_call" in vars(extended)
    self._original = extended._use_merge_call

  def __call__(self) -> bool:
    context = tf.distribute.get_replica_context()
    return not isinstance(context, _AloneContext) and self._original()

  def restore(self, extended: Any) -> None:
    """Takes the answer away again."""
    if self._was_own:
      extended._use_merge_call = self._original
    else:
      del extended._use_merge_call


class _AloneContext(tf.distribute.ReplicaContext):
  """A replica context whose replica has no peers."""

  def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """This replica's value is the whole sum."""
    del reduce_op, options
    return value

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Calls `merge_fn` at once, with this replica's values."""
    return merge_fn(_AloneStrategy(), *args, **(kwargs or {}))


class _NotReducingContext(tf.distribute.ReplicaContext):
  """A replica context in which sums are taken already."""

  def __init__(self, strategy: tf.distribute.Strategy, outer: Any) -> None:
    super().__init__(strategy, outer.replica_id_in_sync_group)
    self._outer = outer

  def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """The value is the sum."""
    del reduce_op, options
    return value

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Meets the other replicas, in the context that they know."""
    with self._outer:
      return self._outer.merge_call(merge_fn, args, kwargs)


class _AloneStrategy:
  """The little of a strategy that merged assignments ask for."""

  @property
  def extended(self) -> "_AloneStrategy":
    """Itself: the two share no method name here."""
    return self

  def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
    """The value, which is where it has to be."""
    del destinations
    return tensor

  def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
    """The one value there is."""
    return (value,)
