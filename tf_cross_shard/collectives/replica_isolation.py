"""A context in which a replica has no other replicas beside it.

Inside it a reduction returns this replica's value, a merge call runs at once,
and an assignment writes this replica's copy. So an optimizer that reduces
gradients by itself, as Keras 3 does, does not reduce them a second time, and it
may run inside `tf.cond`, where merge calls fail.

The obvious way, one merge call around the whole update, fails: Keras' own
conditionals (gradient accumulation, EMA) then merge inside `tf.cond`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

_lock: Final = threading.Lock()
# The methods of a strategy that return something else for an isolated replica.
_OVERRIDDEN: Final = ("_use_merge_call", "_replica_ctx_all_reduce")
_merging: Final = threading.local()


@contextlib.contextmanager
def isolate(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Makes the calling replica act as if it were the only one."""
  # A number where possible: tf.cond could not read a tensor.
  replica = replica_id()
  if replica is None:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
  with _overriding(strategy.extended), _IsolatedContext(strategy, replica):
    yield


def isolate_in_one_program(
  strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager[Any]:
  """Isolates a replica where all replicas are one program, as on TPUs.

  Merge calls run at once there, also in `tf.cond`. A variable that takes the
  first replica's value, as Keras' counters do, takes this replica's own: it is
  equal within a group, and must not come from another group.
  """
  return _OneProgramContext(strategy, tf.distribute.get_replica_context())


def replica_id() -> int | None:
  """This replica's number, if it is known when the program is built."""
  replica = current_replica()
  return replica if isinstance(replica, int) else None


def current_replica() -> Any:
  """This replica's number; a tensor where all replicas are one program.

  None outside of replicas. In such a program an isolated merge call, as Keras
  makes one for weight decay, is inside.
  """
  context = tf.distribute.get_replica_context()
  if context is None:
    return getattr(_merging, "replica", None)
  replica = context.replica_id_in_sync_group
  static = tf.get_static_value(replica)
  return replica if static is None else int(static)


@contextlib.contextmanager
def _overriding(extended: Any) -> Iterator[None]:
  """Lets a strategy work without merge calls for isolated replicas.

  MirroredStrategy can; its `_use_merge_call` decides. Without merge calls it
  aggregates assigned values by `_replica_ctx_all_reduce`. Both are overridden
  on the object while any thread is inside, and only isolated replicas see
  another result: other threads may be tracing under the same strategy.
  """
  with _lock:
    overrides = vars(extended).get("_tf_cross_shard_overrides")
    if overrides is None:
      overrides = extended._tf_cross_shard_overrides = _Overrides(extended)
    overrides.users += 1
  try:
    yield
  finally:
    with _lock:
      overrides.users -= 1
      if not overrides.users:
        overrides.remove()


class _Overrides:
  """Methods put on a strategy while some of its replicas may be isolated."""

  def __init__(self, extended: Any) -> None:
    self.users = 0
    self._extended = extended
    own = vars(extended)
    self._own = {name: own[name] for name in _OVERRIDDEN if name in own}
    use_merge_call = extended._use_merge_call
    all_reduce = extended._replica_ctx_all_reduce

    def override_use_merge_call() -> bool:
      return not _is_isolated() and use_merge_call()

    def override_all_reduce(
      reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
      return value if _is_isolated() else all_reduce(reduce_op, value, options)

    extended._use_merge_call = override_use_merge_call
    extended._replica_ctx_all_reduce = override_all_reduce

  def remove(self) -> None:
    """Gives the strategy its own methods back."""
    for name in _OVERRIDDEN:
      if name in self._own:
        setattr(self._extended, name, self._own[name])
      else:
        delattr(self._extended, name)
    del self._extended._tf_cross_shard_overrides


def _is_isolated() -> bool:
  """Whether the caller is an isolated replica."""
  return isinstance(tf.distribute.get_replica_context(), _IsolatedContext)


class _ReducedContext(tf.distribute.ReplicaContext):
  """A replica context in which every value is the whole sum already."""

  def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Returns the value."""
    del reduce_op, options
    return value


class _IsolatedContext(_ReducedContext):
  """The replica context of an isolated replica."""

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Calls `merge_fn` at once, with this replica's values."""
    return merge_fn(_IsolatedStrategy(), *args, **(kwargs or {}))


class _OneProgramContext(_ReducedContext):
  """A replica context whose merge calls take nothing from other replicas."""

  def __init__(self, strategy: tf.distribute.Strategy, outer: Any) -> None:
    super().__init__(strategy, outer.replica_id_in_sync_group)
    self._outer = outer

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Merges at once, in this thread; `current_replica` stays this one."""

    def merge(strategy: Any, *args: Any, **kwargs: Any) -> Any:
      return merge_fn(_OneProgramStrategy(strategy), *args, **kwargs)

    outside = getattr(_merging, "replica", None)
    _merging.replica = self.replica_id_in_sync_group
    try:
      with self._outer:
        return self._outer.merge_call(merge, args, kwargs)
    finally:
      _merging.replica = outside


class _OneProgramStrategy:
  """A strategy, or its `extended`, that changes nothing between replicas."""

  def __init__(self, real: Any) -> None:
    self._real = real

  @property
  def extended(self) -> "_OneProgramStrategy":
    """The object whose methods merged updates call."""
    return _OneProgramStrategy(self._real.extended)

  def batch_reduce_to(
    self, reduce_op: Any, pairs: Any, options: Any = None
  ) -> list[Any]:
    """Returns the values, which are sums already."""
    del reduce_op, options
    return [value for value, _ in pairs]

  def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
    """Returns the value, which is where it must be."""
    del destinations
    return tensor

  def __getattr__(self, name: str) -> Any:
    """Everything else is the strategy's own."""
    return getattr(self._real, name)

  def __eq__(self, other: object) -> bool:
    """Variables compare it with the strategy that they belong to."""
    return other is self._real

  def __hash__(self) -> int:
    """As the strategy's."""
    return hash(self._real)


class _IsolatedStrategy:
  """The few methods of a strategy that merged assignments call."""

  @property
  def extended(self) -> "_IsolatedStrategy":
    """Itself: strategy and `extended` share no method name here."""
    return self

  def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
    """Returns the value, which is where it must be."""
    del destinations
    return tensor

  def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
    """The one value there is."""
    return (value,)
