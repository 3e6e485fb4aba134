"""`tf.distribute.MirroredStrategy`: all replicas in one process.

On CPUs the fastest sum is the plain one: meet in a merge call, add the
members' buffers, hand the sum to each of them. Where a merge call cannot be
made, inside `tf.cond` or a `tf.function` nested in the replica function, and
on GPUs, where copying everything to one device is slow, the replicas meet in
`CollectiveReduceV2` instead.

    replica 0 ──┐                      replica 2 ──┐
                ├─ add_n ─▶ group 0                ├─ add_n ─▶ group 1
    replica 1 ──┘                      replica 3 ──┘
"""

import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import base

# tf.distribute numbers its own groups from 1; a key used twice is an error.
_group_keys: Final = itertools.count(0x40000000)
_COLLECTIVE_DTYPES: Final = frozenset(
  (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
)


class Mirrored(base.Engine):
  """Sums over the devices of one process, grouped or not."""

  def __init__(
    self, strategy: tf.distribute.Strategy, prefer_merge: bool | None = None
  ) -> None:
    """Chooses the way that suits the devices.

    Args:
      strategy: A MirroredStrategy.
      prefer_merge: Meet in merge calls where that is possible. None means on
        CPUs only.
    """
    super().__init__(strategy)
    self._devices = tuple(strategy.extended.worker_devices)
    on_cpus = all("CPU" in device.upper() for device in self._devices)
    self._prefer_merge = on_cpus if prefer_merge is None else prefer_merge
    self._meeting = _meeting_of(strategy)

  def all_reduce_sum(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Sums over the group.

    Raises:
      RuntimeError: If neither a merge call nor a collective can be made here.
      TypeError: If a collective cannot sum a dtype.
    """
    if self._merges():
      return self._merge(tensors, groups, tf.add_n)
    return self._collective_sum(tensors, groups)

  def all_gather(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Joins over the group."""
    return self._merge(tensors, groups, lambda parts: tf.concat(parts, axis=0))

  @property
  def can_gather(self) -> bool:
    """Rows are joined in merge calls only."""
    return _can_merge()

  def _merges(self) -> bool:
    """Whether to meet in a merge call here."""
    # Eager replicas run one after the other, so that the first would wait for
    # ever in a collective.
    return _can_merge() and (self._prefer_merge or tf.executing_eagerly())

  def _merge(
    self,
    tensors: Sequence[tf.Tensor],
    groups: groups_lib.Groups,
    combine: Callable[[list[tf.Tensor]], tf.Tensor],
  ) -> list[tf.Tensor]:
    """Combines each tensor over the members of each group, once per group."""

    def combine_groups(
      strategy: tf.distribute.Strategy, *distributed: Any
    ) -> list[list[tf.Tensor]]:
      copies = [
        _one_per_replica(strategy, value, len(self._devices))
        for value in distributed
      ]
      return [
        [
          self._on_member(i, sorted(members), per_replica, combine)
          for i, per_replica in enumerate(copies)
        ]
        for members in groups
      ]

    # The result holds no per-replica values, so that every replica receives
    # the sums of all groups and takes those of its own.
    by_group = tf.distribute.get_replica_context().merge_call(
      combine_groups, args=tuple(tensors)
    )
    return list(by_group[groups.index_of(self._replica())])

  def _on_member(
    self,
    i: int,
    members: list[int],
    per_replica: Sequence[tf.Tensor],
    combine: Callable[[list[tf.Tensor]], tf.Tensor],
  ) -> tf.Tensor:
    """Combines the i-th tensor; members take turns so that all have work."""
    with tf.device(self._devices[members[i % len(members)]]):
      return combine([per_replica[replica] for replica in members])

  def _collective_sum(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Sums each tensor with `CollectiveReduceV2`."""
    _check_can_meet(tensors)
    replica = self._replica()
    if groups.group_size == 1:
      return list(tensors)
    return [
      tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=groups.group_size,
        group_key=self._meeting.group_key(groups, replica),
        instance_key=self._meeting.instance_key(tensor, replica),
        ordering_token=[self._meeting.token(replica, self._devices[replica])],
        merge_op="Add",
        final_op="Id",
        communication_hint="auto",
      )
      for tensor in tensors
    ]

  def _replica(self) -> int:
    """This replica's number."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


class _Meeting:
  """Keys and tokens by which the replicas of one strategy find each other.

  One per strategy, not per optimizer: two optimizers in one step must not
  use one key.
  """

  def __init__(self) -> None:
    """Starts with nothing handed out."""
    self._first_keys: dict[groups_lib.Groups, int] = {}
    self._tokens: dict[int, tf.Tensor] = {}
    self._ordinals: weakref.WeakKeyDictionary[Any, dict[int, int]] = (
      weakref.WeakKeyDictionary()
    )

  def group_key(self, groups: groups_lib.Groups, replica: int) -> int:
    """A number that the members of one group of one grouping share."""
    if groups not in self._first_keys:
      keys = [next(_group_keys) for _ in groups]
      self._first_keys[groups] = keys[0]
    return self._first_keys[groups] + groups.index_of(replica)

  def instance_key(self, tensor: tf.Tensor, replica: int) -> tf.Tensor:
    """A number that this reduction has on every member, in every step.

    It is a hash of what the members agree on. A fresh number per call would
    leak, since the runtime remembers each.
    """
    ordinals = self._ordinals.setdefault(_outermost_graph(), {})
    ordinal = ordinals[replica] = ordinals.get(replica, -1) + 1
    static = tensor.shape.as_list() if tensor.shape.is_fully_defined() else None
    text = repr((tensor.dtype.name, static, ordinal))
    key = zlib.crc32(text.encode()) & 0x3FFFFFFF
    if static is not None:
      return tf.constant(key)
    # The runtime holds one shape per key, so the shape goes into the key.
    shape = tf.shape(tensor)
    places = 1 + 2 * tf.range(tf.size(shape))
    return tf.bitwise.bitwise_and(
      tf.reduce_sum(shape * places) * 7919 + key, 0x3FFFFFFF
    )

  def token(self, replica: int, device: str) -> tf.Tensor:
    """A resource that orders the collectives of one replica.

    Without it the stateful operations of all replicas form one chain and the
    first collective waits for ever. Nothing is ever stored in the resource.
    """
    if replica not in self._tokens:
      with tf.init_scope(), tf.device(device):
        self._tokens[replica] = tf.raw_ops.VarHandleOp(
          dtype=tf.float32,
          shape=[],
          shared_name=f"tf_cross_shard_order_{id(self)}_{replica}",
        )
    return self._tokens[replica]


_meetings: "weakref.WeakKeyDictionary[tf.distribute.Strategy, _Meeting]" = (
  weakref.WeakKeyDictionary()
)


def _meeting_of(strategy: tf.distribute.Strategy) -> _Meeting:
  """The one meeting of `strategy`."""
  if strategy not in _meetings:
    _meetings[strategy] = _Meeting()
  return _meetings[strategy]


def _one_per_replica(
  strategy: tf.distribute.Strategy, value: Any, num_replicas: int
) -> Sequence[tf.Tensor]:
  """The replicas' values; one that all replicas share is not distributed."""
  values = strategy.experimental_local_results(value)
  return values if len(values) == num_replicas else values * num_replicas


def _can_merge() -> bool:
  """Whether a merge call would work: in the graph that the replica began in."""
  began_in = getattr(threading.current_thread(), "graph", None)
  return began_in is tf.compat.v1.get_default_graph()


def _check_can_meet(tensors: Sequence[tf.Tensor]) -> None:
  """Raises an error where a collective would hang or not run."""
  if getattr(threading.current_thread(), "in_eager", False):
    raise RuntimeError(
      "Gradients cannot be reduced in a tf.function or tf.cond that is called"
      " eagerly inside `strategy.run`: the replicas run one after the other."
      " Put `strategy.run` itself into a tf.function."
    )
  if _inside_while_loop():
    raise RuntimeError(
      "Gradients cannot be reduced in a tf.while_loop inside the function"
      " given to `strategy.run`. Put the loop around `strategy.run`, in one"
      " tf.function."
    )
  for tensor in tensors:
    if tensor.dtype not in _COLLECTIVE_DTYPES:
      names = sorted(dtype.name for dtype in _COLLECTIVE_DTYPES)
      raise TypeError(
        f"A gradient of dtype {tensor.dtype.name} cannot be summed by"
        f" CollectiveReduceV2, which takes {names}. Cast it, or call"
        " apply_gradients outside tf.cond."
      )


def _enclosing_graphs() -> list[Any]:
  """The graph being built and the function graphs around it."""
  graphs = [tf.compat.v1.get_default_graph()]
  began_in = getattr(threading.current_thread(), "graph", None)
  while graphs[-1] is not began_in and hasattr(graphs[-1], "outer_graph"):
    graphs.append(graphs[-1].outer_graph)
  return graphs


def _outermost_graph() -> Any:
  """The graph in which the replica began."""
  return _enclosing_graphs()[-1]


def _inside_while_loop() -> bool:
  """Whether a loop was opened since the replica began."""
  return any(
    "While" in type(graph).__name__ for graph in _enclosing_graphs()[:-1]
  )
