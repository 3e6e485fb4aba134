"""How replicas meet in `CollectiveReduceV2`, in one process or in many.

What the runtime asks for was measured: a key per group and per reduction that
all members share, the same in every step, and a resource that orders the
reductions of each replica.
"""

import itertools
import threading
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import groups as groups_lib

# tf.distribute numbers its own groups from 1; a key used twice is an error.
_FIRST_GROUP_KEY: Final = 0x40000000
_LAST_GROUP_KEY: Final = 0x7FFFFFFF
_DTYPES: Final = frozenset(
  (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
)

# With twelve members and more `CollectiveAllToAllV2` mixes up whose is whose.
MOST_IN_ALL_TO_ALL: Final = 11


class Meeting:
  """Keys and tokens by which the replicas of one strategy find each other.

  One per strategy, not per optimizer: two optimizers in one step must not
  use one key.
  """

  def __init__(
    self, place: str, chains: int = 1, one_by_one: bool = True
  ) -> None:
    """Starts with nothing handed out."""
    self._place = place
    self._chains = chains
    self._one_by_one = one_by_one
    self._first_keys: dict[groups_lib.Groups, int] = {}
    self._tokens: dict[tuple[int, int], tf.Tensor] = {}
    self._ordinals: weakref.WeakKeyDictionary[Any, dict[int, int]] = (
      weakref.WeakKeyDictionary()
    )

  def all_reduce_sum(
    self,
    tensors: Sequence[tf.Tensor],
    groups: groups_lib.Groups,
    replica: int,
    device: str,
  ) -> list[tf.Tensor]:
    """Sums each tensor over the group of `replica`."""
    return self._meet(
      "CollectiveReduceV2",
      tensors,
      groups,
      replica,
      device,
      merge_op="Add",
      final_op="Id",
    )

  def all_gather(
    self,
    tensors: Sequence[tf.Tensor],
    groups: groups_lib.Groups,
    replica: int,
    device: str,
  ) -> list[tf.Tensor]:
    """Joins each tensor over the group of `replica` by its first dimension."""
    return self._meet("CollectiveGatherV2", tensors, groups, replica, device)

  def all_to_all(
    self,
    tensors: Sequence[tf.Tensor],
    groups: groups_lib.Groups,
    replica: int,
    device: str,
  ) -> list[tf.Tensor]:
    """Gives each member of a group its row of every member's tensor."""
    return self._meet("CollectiveAllToAllV2", tensors, groups, replica, device)

  def _check_can_meet(self, tensors: Sequence[tf.Tensor]) -> None:
    """Raises an error where a collective would hang or not run."""
    in_eager = getattr(threading.current_thread(), "in_eager", False)
    if self._one_by_one and in_eager:
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
      if tensor.dtype not in _DTYPES:
        names = sorted(dtype.name for dtype in _DTYPES)
        raise TypeError(
          f"A gradient of dtype {tensor.dtype.name} cannot be summed by"
          f" CollectiveReduceV2, which takes {names}. Cast it, or, under"
          " MirroredStrategy, call apply_gradients outside tf.cond."
        )

  def _meet(
    self,
    collective: str,
    tensors: Sequence[tf.Tensor],
    groups: groups_lib.Groups,
    replica: int,
    device: str,
    **attributes: str,
  ) -> list[tf.Tensor]:
    """One collective for each tensor, in which the members find each other."""
    self._check_can_meet(tensors)
    results = []
    for tensor in tensors:
      ordinal = self._next_ordinal(replica)
      results.append(
        getattr(tf.raw_ops, collective)(
          input=tensor,
          group_size=groups.group_size,
          group_key=self.group_key(groups, replica),
          instance_key=instance_key(collective, tensor, ordinal),
          ordering_token=[self.token(replica, ordinal % self._chains, device)],
          communication_hint="auto",
          **attributes,
        )
      )
    return results

  def group_key(self, groups: groups_lib.Groups, replica: int) -> int:
    """A number that the members of one group of one grouping share.

    It is a hash of what all processes know, and so the same in all of them,
    whatever else each has done before.
    """
    if groups not in self._first_keys:
      text = repr((self._place, groups.to_lists()))
      room = _LAST_GROUP_KEY - _FIRST_GROUP_KEY - groups.num_groups
      hashed = zlib.crc32(text.encode()) % room
      self._first_keys[groups] = _FIRST_GROUP_KEY + hashed
    return self._first_keys[groups] + groups.index_of(replica)

  def _next_ordinal(self, replica: int) -> int:
    """How many collectives this replica had before in the graph being built."""
    # The same in every step where each is a new one.
    if tf.executing_eagerly():
      return 0
    ordinals = self._ordinals.setdefault(_outermost_graph(), {})
    ordinal = ordinals[replica] = ordinals.get(replica, -1) + 1
    return ordinal

  def token(self, replica: int, chain: int, device: str) -> tf.Tensor:
    """A resource that orders the collectives of one chain of one replica.

    Without it the stateful operations of all replicas form one chain and the
    first collective waits for ever. Nothing is ever stored in the resource.
    """
    key = replica, chain
    if key not in self._tokens:
      with tf.init_scope(), tf.device(device):
        self._tokens[key] = tf.raw_ops.VarHandleOp(
          dtype=tf.float32,
          shape=[],
          shared_name=f"tf_cross_shard_order_{id(self)}_{replica}_{chain}",
        )
    return self._tokens[key]


def instance_key(collective: str, tensor: tf.Tensor, ordinal: int) -> tf.Tensor:
  """A number that a collective has on every member, in every step.

  It is a hash of what the members agree on. A fresh number per call would
  leak, since the runtime remembers each.
  """
  static = tensor.shape.as_list() if tensor.shape.is_fully_defined() else None
  text = repr((collective, tensor.dtype.name, static, ordinal))
  key = zlib.crc32(text.encode()) & 0x3FFFFFFF
  if static is not None:
    return tf.constant(key)
  # The runtime holds one shape per key, so the shape goes into the key.
  hashed = tf.constant(key)
  for size in tf.unstack(tf.shape(tensor), tensor.shape.rank):
    hashed = hashed * 1000003 + size  # int32 wraps around
  return tf.bitwise.bitwise_and(hashed, 0x3FFFFFFF)


_places: Final = itertools.count()
_meetings: "weakref.WeakKeyDictionary[tf.distribute.Strategy, Meeting]" = (
  weakref.WeakKeyDictionary()
)


def of_strategy(
  strategy: tf.distribute.Strategy,
  place: str | None = None,
  chains: int = 1,
  one_by_one: bool = True,
) -> Meeting:
  """The one meeting of a strategy."""
  if strategy not in _meetings:
    place = place or f"meeting {next(_places)}"
    _meetings[strategy] = Meeting(place, chains, one_by_one)
  return _meetings[strategy]


def can_merge() -> bool:
  """Whether a merge call would work: in the graph that the replica began in."""
  began_in = getattr(threading.current_thread(), "graph", None)
  return began_in is tf.compat.v1.get_default_graph()


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
