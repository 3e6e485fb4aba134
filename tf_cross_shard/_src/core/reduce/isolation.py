"""A context in which a replica acts as if it were the only replica.

Keras 3 reduces gradients in `apply_gradients`. Gradients that were reduced over
the group must not be reduced a second time, over all replicas.
"""
# ruff: noqa: SLF001  # tf.distribute has no public way to isolate a replica.

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

_lock: Final = threading.Lock()
# The methods of `strategy.extended` that are overridden for isolated replicas.
_OVERRIDDEN: Final = ("_use_merge_call", "_replica_ctx_all_reduce")
# Maps an `extended` object to the overrides that are active on it.
_overrides_of: "Final[dict[Any, _Overrides]]" = {}
# In each thread, the replica whose merge call is running.
_merging: Final = threading.local()


# One merge call around the whole update would fail: Keras' own conditionals
# (gradient accumulation, EMA) then make merge calls inside `tf.cond`.
@contextlib.contextmanager
def isolate(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Makes the calling replica act as if it were the only one."""
  # Prefer a Python number: a tensor of this graph cannot be used in the graph
  # of a tf.cond.
  replica = replica_id()
  if replica is None:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
  with _overriding(strategy.extended), _IsolatedContext(strategy, replica):
    yield


def replica_id() -> int | None:
  """Returns this replica's number if it is known while tracing, else None."""
  replica = current_replica()
  return replica if isinstance(replica, int) else None


def current_replica() -> Any:
  """Returns this replica's number, int or tensor; None outside replicas."""
  context = tf.distribute.get_replica_context()
  if context is None:  # Keras makes merge calls for weight decay.
    return getattr(_merging, "replica", None)
  replica = context.replica_id_in_sync_group
  static = tf.get_static_value(replica)
  return replica if static is None else int(static)


@contextlib.contextmanager
def _overriding(extended: Any) -> Iterator[None]:
  """Makes a strategy work without merge calls for isolated replicas."""
  # MirroredStrategy asks `_use_merge_call`. Without merge calls, it aggregates
  # assigned values in `_replica_ctx_all_reduce`. Other threads may be tracing
  # under the same strategy, and get its own results.
  with _lock:
    overrides = _overrides_of.get(extended)
    if overrides is None:
      overrides = _overrides_of[extended] = _Overrides(extended)
    overrides.users += 1
  try:
    yield
  finally:
    with _lock:
      overrides.users -= 1
      if not overrides.users:
        del _overrides_of[extended]
        overrides.remove()


class _Overrides:
  """The overriding methods of a strategy's `extended`; `users` are threads."""

  def __init__(self, extended: Any) -> None:
    self.users = 0
    self._extended = extended
    # Usually only the class has these methods. Remember the methods that the
    # object itself has, so that `remove` can restore them.
    attributes = vars(extended)
    self._replaced = {
      name: attributes[name] for name in _OVERRIDDEN if name in attributes
    }
    use_merge_call = extended._use_merge_call
    all_reduce = extended._replica_ctx_all_reduce
    extended._use_merge_call = lambda: not _is_isolated() and use_merge_call()
    extended._replica_ctx_all_reduce = lambda reduce_op, value, options=None: (
      value if _is_isolated() else all_reduce(reduce_op, value, options)
    )

  def remove(self) -> None:
    for name in _OVERRIDDEN:
      if name in self._replaced:
        setattr(self._extended, name, self._replaced[name])
      else:
        delattr(self._extended, name)


def _is_isolated() -> bool:
  return isinstance(tf.distribute.get_replica_context(), _IsolatedContext)


class _ReducedContext(tf.distribute.ReplicaContext):
  """A replica context whose `all_reduce` returns its input."""

  def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
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
    return merge_fn(_IsolatedStrategy(), *args, **(kwargs or {}))


class OneProgramContext(_ReducedContext):
  """The context of an isolated replica where all replicas run one program."""

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    self._outer = tf.distribute.get_replica_context()
    super().__init__(strategy, self._outer.replica_id_in_sync_group)

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Calls `merge_fn` immediately; `current_replica` is still this replica."""

    # A variable of ONLY_FIRST_REPLICA, such as Keras' counters, would receive
    # the value of replica 0, which may belong to a different group.
    def merge(strategy: Any, *args: Any, **kwargs: Any) -> Any:
      return merge_fn(_OneProgramStrategy(strategy), *args, **kwargs)

    outside = getattr(_merging, "replica", None)
    _merging.replica = self.replica_id_in_sync_group
    try:
      # A context can be entered only once, and the replica is in `_outer`
      # already. So enter a copy.
      with copy.copy(self._outer):
        return self._outer.merge_call(merge, args, kwargs)
    finally:
      _merging.replica = outside


class _OneProgramStrategy:
  """Proxy for a strategy, or its `extended`, that moves no values."""

  def __init__(self, real: Any) -> None:
    self._real = real

  @property
  def extended(self) -> "_OneProgramStrategy":
    return _OneProgramStrategy(self._real.extended)

  def batch_reduce_to(
    self, reduce_op: Any, pairs: Any, options: Any = None
  ) -> list[Any]:
    del reduce_op, options
    return [value for value, _ in pairs]

  def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
    del destinations
    return tensor

  def __getattr__(self, name: str) -> Any:
    return getattr(self._real, name)

  def __eq__(self, other: object) -> bool:
    """Returns whether `other` is the strategy; variables compare strategies."""
    return other is self._real

  def __hash__(self) -> int:
    return hash(self._real)


class _IsolatedStrategy:
  """The few methods of a strategy that assignments in a merge call use."""

  @property
  def extended(self) -> "_IsolatedStrategy":
    return self

  def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
    del destinations
    return tensor

  def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
    return (value,)
