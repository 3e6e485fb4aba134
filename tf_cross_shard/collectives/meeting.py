"""How replicas of one process meet in `CollectiveReduceV2`.

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
_group_keys: Final = itertools.count(0x40000000)
_DTYPES: Final = frozenset(
  (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
)


class Meeting:
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

  def all_reduce_sum(
    self,
    tensors: Sequence[tf.Tensor],
    groups: groups_lib.Groups,
    replica: int,
    device: str,
  ) -> list[tf.Tensor]:
    """Sums each tensor over the group of `replica`.

    Args:
      tensors: Dense tensors, alike on all members.
      groups: Who sums with whom.
      replica: Who calls.
      device: Where that replica runs.

    Returns:
      The sums, in the order of `tensors`.

    Raises:
      RuntimeError: If the replicas could not meet from where this is called.
      TypeError: If the runtime cannot sum a dtype.
    """
    _check_can_meet(tensors)
    return [
      tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=groups.group_size,
        group_key=self.group_key(groups, replica),
        instance_key=self.instance_key(tensor, replica),
        ordering_token=[self.token(replica, device)],
        merge_op="Add",
        final_op="Id",
        communication_hint="auto",
      )
      for tensor in tensors
    ]

  def group_key(self, groups: groups_lib.Groups, replica: int) -> int:
    """A number that the members of one group of one grouping share.

    Args:
      groups: The grouping.
      replica: A member of the group.

    Returns:
      A number that no other group of this process has.
    """
    if groups not in self._first_keys:
      keys = [next(_group_keys) for _ in groups]
      self._first_keys[groups] = keys[0]
    return self._first_keys[groups] + groups.index_of(replica)

  def instance_key(self, tensor: tf.Tensor, replica: int) -> tf.Tensor:
    """A number that this reduction has on every member, in every step.

    It is a hash of what the members agree on. A fresh number per call would
    leak, since the runtime remembers each.

    Args:
      tensor: What is reduced.
      replica: Who reduces it.

    Returns:
      An int32 scalar.
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

    Args:
      replica: Whose collectives are to be ordered.
      device: Where that replica runs.

    Returns:
      A resource handle.
    """
    if replica not in self._tokens:
      with tf.init_scope(), tf.device(device):
        self._tokens[replica] = tf.raw_ops.VarHandleOp(
          dtype=tf.float32,
          shape=[],
          shared_name=f"tf_cross_shard_order_{id(self)}_{replica}",
        )
    return self._tokens[replica]


_meetings: "weakref.WeakKeyDictionary[tf.distribute.Strategy, Meeting]" = (
  weakref.WeakKeyDictionary()
)


def of_strategy(strategy: tf.distribute.Strategy) -> Meeting:
  """The one meeting of a strategy.

  Args:
    strategy: A strategy all of whose replicas are in this process.

  Returns:
    The same object for the same strategy.
  """
  if strategy not in _meetings:
    _meetings[strategy] = Meeting()
  return _meetings[strategy]


def can_merge() -> bool:
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
    if tensor.dtype not in _DTYPES:
      names = sorted(dtype.name for dtype in _DTYPES)
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
