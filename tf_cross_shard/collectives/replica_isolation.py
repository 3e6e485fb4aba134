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
# What a strategy is asked, and answers differently for a replica alone.
_ANSWERED: Final = ("_use_merge_call", "_replica_ctx_all_reduce")


@contextlib.contextmanager
def alone(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Makes the calling replica act as if it were the only one."""
  # As a number where it is one: a tensor could not be read in tf.cond.
  replica = replica_id()
  if replica is None:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
  with _answering(strategy.extended):
    with _AloneContext(strategy, replica):
      yield


def replica_id() -> int | None:
  """This replica's number, where it is known when the program is built."""
  context = tf.distribute.get_replica_context()
  static = tf.get_static_value(context.replica_id_in_sync_group)
  return None if static is None else int(static)


@contextlib.contextmanager
def not_reducing(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Turns reductions off and leaves merge calls and assignments as they are.

  For strategies that nobody knows to do without merge calls. In it an update
  fails inside `tf.cond`, as it does in plain Keras.
  """
  context = tf.distribute.get_replica_context()
  with _NotReducingContext(strategy, context):
    yield


@contextlib.contextmanager
def in_one_program(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """The same where all replicas are one program, as on TPUs.

  Merge calls run at once there, also in `tf.cond`. In them a value that all
  replicas are to take from the first is this replica's own: counters, which
  Keras' optimizers have such, are equal within a group, and should not be taken
  from another group.
  """
  context = tf.distribute.get_replica_context()
  with _OneProgramContext(strategy, context):
    yield


@contextlib.contextmanager
def _answering(extended: Any) -> Iterator[None]:
  """Lets a strategy do without merge calls for replicas that are alone.

  MirroredStrategy can; it asks its `_use_merge_call` whether to. Then it
  aggregates what is assigned to a variable by `_replica_ctx_all_reduce`. Both
  are answered on the object while any thread is inside, and otherwise for
  replicas that are alone only: other threads may be tracing under the same
  strategy.
  """
  with _lock:
    answers = vars(extended).get("_tf_cross_shard_answers")
    if answers is None:
      answers = extended._tf_cross_shard_answers = _Answers(extended)
    answers.users += 1
  try:
    yield
  finally:
    with _lock:
      answers.users -= 1
      if not answers.users:
        answers.restore()


class _Answers:
  """What a strategy answers while some of its replicas may be alone."""

  def __init__(self, extended: Any) -> None:
    self.users = 0
    self._extended = extended
    own = vars(extended)
    self._own = {name: own[name] for name in _ANSWERED if name in own}
    use_merge_call = extended._use_merge_call
    all_reduce = extended._replica_ctx_all_reduce

    def answer_use_merge_call() -> bool:
      return not _is_alone() and use_merge_call()

    def answer_all_reduce(
      reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
      return value if _is_alone() else all_reduce(reduce_op, value, options)

    extended._use_merge_call = answer_use_merge_call
    extended._replica_ctx_all_reduce = answer_all_reduce

  def restore(self) -> None:
    """Takes the answers away again."""
    for name in _ANSWERED:
      if name in self._own:
        setattr(self._extended, name, self._own[name])
      else:
        delattr(self._extended, name)
    del self._extended._tf_cross_shard_answers


def _is_alone() -> bool:
  """Whether the caller is a replica that acts alone."""
  return isinstance(tf.distribute.get_replica_context(), _AloneContext)


class _ReducedContext(tf.distribute.ReplicaContext):
  """A replica context in which every value is the whole sum already."""

  def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """The value."""
    del reduce_op, options
    return value


class _AloneContext(_ReducedContext):
  """A replica context whose replica has no peers."""

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Calls `merge_fn` at once, with this replica's values."""
    return merge_fn(_AloneStrategy(), *args, **(kwargs or {}))


class _NotReducingContext(_ReducedContext):
  """A replica context whose replica still meets its peers."""

  def __init__(self, strategy: tf.distribute.Strategy, outer: Any) -> None:
    super().__init__(strategy, outer.replica_id_in_sync_group)
    self._outer = outer

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Meets the other replicas, in the context that they know."""
    with self._outer:
      return self._outer.merge_call(merge_fn, args, kwargs)


class _OneProgramContext(_NotReducingContext):
  """A replica context whose merge calls take nothing from other replicas."""

  def merge_call(
    self,
    merge_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
  ) -> Any:
    """Calls `merge_fn` with a strategy that does not broadcast."""

    def merge(strategy: Any, *args: Any, **kwargs: Any) -> Any:
      return merge_fn(_NotBroadcasting(strategy), *args, **kwargs)

    return super().merge_call(merge, args, kwargs)


class _NotBroadcasting:
  """A strategy, or what extends it, whose broadcast changes nothing."""

  def __init__(self, real: Any) -> None:
    self._real = real

  @property
  def extended(self) -> "_NotBroadcasting":
    """What merged updates call."""
    return _NotBroadcasting(self._real.extended)

  def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
    """The value, which is where it has to be."""
    del destinations
    return tensor

  def __getattr__(self, name: str) -> Any:
    """All else is the strategy's own."""
    return getattr(self._real, name)

  def __eq__(self, other: object) -> bool:
    """Variables compare it with the strategy that they belong to."""
    return other is self._real

  def __hash__(self) -> int:
    """As the strategy's."""
    return hash(self._real)


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
