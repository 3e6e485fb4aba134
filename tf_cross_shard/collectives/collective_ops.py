"""TensorFlow's collective operations, in one process or in several.

The runtime needs, as was measured, a key per group and per collective that all
members share and that is the same in every step, and a resource that orders the
collectives of each replica.
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

ALL_REDUCE: Final = "CollectiveReduceV2"
ALL_GATHER: Final = "CollectiveGatherV2"
ALL_TO_ALL: Final = "CollectiveAllToAllV2"
_ATTRIBUTES: Final = {ALL_REDUCE: {"merge_op": "Add", "final_op": "Id"}}

# What to ask the runtime for.
AUTO: Final = "auto"
RING: Final = "ring"
NCCL: Final = "nccl"
# Those that the runtime's NCCL adds; it took others for float32 (2.21, read).
_NCCL_DTYPES: Final = _DTYPES - {tf.bfloat16}

# With twelve members or more `CollectiveAllToAllV2` returns wrong rows.
MAX_ALL_TO_ALL: Final = 11


_local_strategies: Final = itertools.count()


class CollectiveOps:
  """The collectives of one strategy, with their keys and ordering tokens.

  One object per strategy, not per optimizer: two optimizers in one step must
  not use one key.
  """

  def __init__(
    self,
    identity: str | None = None,
    chains: int = 1,
    is_serial: bool = True,
    hint: str = AUTO,
  ) -> None:
    """Makes no keys yet.

    Args:
      identity: Text that all processes of the strategy, and no others, have;
        None for a strategy of this process alone.
      chains: How many collectives of one replica may run at once.
      is_serial: Whether eager replicas of this process run one after the other,
        so that several of them would wait for each other for ever.
      hint: From `hint_for`. NCCL has one chain: its kernels of two chains may
        start in another order on another device, and wait for ever.
    """
    self._is_local = identity is None
    self._identity = identity or f"local strategy {next(_local_strategies)}"
    self._hint = hint
    self._chains = 1 if hint == NCCL else chains
    self._is_serial = is_serial
    self._first_keys: dict[groups_lib.Groups, int] = {}
    self._tokens: dict[tuple[int, int], tf.Tensor] = {}
    self._others = 0
    self._numbers = itertools.count(1)
    self._functions: weakref.WeakKeyDictionary[
      Any, tuple[int, dict[int, int]]
    ] = weakref.WeakKeyDictionary()

  def beside(self) -> "CollectiveOps":
    """Returns another, whose collectives may run at the same time."""
    self._others += 1
    identity = f"{self._identity} {self._others}"
    return CollectiveOps(identity, self._chains, self._is_serial, self._hint)

  def run(
    self,
    name: str,
    tensors: Sequence[tf.Tensor],
    groups: groups_lib.Groups,
    replica: int,
    device: str,
  ) -> list[tf.Tensor]:
    """Runs one collective per tensor over the group of `replica`.

    Args:
      name: `ALL_REDUCE`, `ALL_GATHER` (joins along the first dimension, no
        tensor empty) or `ALL_TO_ALL` (row i goes to the i-th member).
      tensors: Of the same shapes and dtypes on all members.
      groups: The grouping.
      replica: The caller.
      device: The device of the caller.
    """
    self._check(tensors)
    results = []
    for tensor in tensors:
      function, ordinal = self._place_in_program(replica)
      results.append(
        getattr(tf.raw_ops, name)(
          input=tensor,
          group_size=groups.group_size,
          group_key=self.group_key(groups, replica),
          instance_key=instance_key(name, tensor, function, ordinal),
          ordering_token=[self.token(replica, ordinal % self._chains, device)],
          communication_hint=self._hint_of(name, tensor),
          **_ATTRIBUTES.get(name, {}),
        )
      )
    return results

  def _hint_of(self, name: str, tensor: tf.Tensor) -> str:
    """What to ask for; there is no other exchange than the runtime's own."""
    is_known = self._hint != NCCL or tensor.dtype in _NCCL_DTYPES
    return AUTO if name == ALL_TO_ALL or not is_known else self._hint

  def reduce_scatter(
    self, row: tf.Tensor, groups: groups_lib.Groups, replica: int, device: str
  ) -> tf.Tensor:
    """This member's part of a sum; `CollectiveReduceScatterV2` has no CPU.

    Each member receives one part of all members, and adds in float32 what is
    narrower.
    """
    rows = tf.reshape(row, [groups.group_size, -1])
    [received] = self.run(ALL_TO_ALL, [rows], groups, replica, device)
    wide = tf.cast(received, tf.float32) if row.dtype.size < 4 else received
    return tf.cast(tf.reduce_sum(wide, axis=0), row.dtype)

  def all_gather(
    self, part: tf.Tensor, groups: groups_lib.Groups, replica: int, device: str
  ) -> tf.Tensor:
    """All members' parts, of one shape, joined."""
    words = [as_words(part)]
    [joined] = self.run(ALL_GATHER, words, groups, replica, device)
    return from_words(joined, part)

  def join_rows(
    self,
    tensors: Sequence[tf.Tensor],
    groups: groups_lib.Groups,
    replica: int,
    device: str,
  ) -> list[tf.Tensor]:
    """Joins tensors whose first dimension may differ between replicas.

    Collectives take one shape on all members. So the rows are counted first and
    padded to the longest.
    """
    rows = tf.stack([tf.shape(tensor)[0] for tensor in tensors])[tf.newaxis]
    [counts] = self.run(ALL_GATHER, [rows], groups, replica, device)
    counts = tf.reshape(counts, [groups.group_size, len(tensors)])
    longest = tf.reduce_max(counts, axis=0)
    padded = [
      _pad_rows(as_words(tensor), _rounded_up(longest[i]))
      for i, tensor in enumerate(tensors)
    ]
    joined = self.run(ALL_GATHER, padded, groups, replica, device)
    return [
      from_words(
        _without_padding(all_rows, counts[:, i], groups.group_size), tensor
      )
      for i, (all_rows, tensor) in enumerate(zip(joined, tensors, strict=True))
    ]

  def _check(self, tensors: Sequence[tf.Tensor]) -> None:
    """Raises an error where a collective would hang or not run."""
    in_eager = getattr(threading.current_thread(), "in_eager", False)
    if self._is_serial and in_eager:
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

  def group_key(self, groups: groups_lib.Groups, replica: int) -> int:
    """A number that only the members of one group of one grouping have.

    It is a hash of values that all processes know, and so the same in all of
    them, whatever each has done before.
    """
    if groups not in self._first_keys:
      text = repr((self._identity, groups.to_lists()))
      room = _LAST_GROUP_KEY - _FIRST_GROUP_KEY - groups.num_groups
      hashed = zlib.crc32(text.encode()) % room
      self._first_keys[groups] = _FIRST_GROUP_KEY + hashed
    return self._first_keys[groups] + groups.index_of(replica)

  def _place_in_program(self, replica: int) -> tuple[int, int]:
    """The function being traced, and this replica's collectives in it so far.

    Functions that two threads run at once must not share keys. In several
    processes functions have no numbers: one worker alone may retrace.
    """
    if tf.executing_eagerly():  # It is the same in every step.
      return 0, 0
    graph = _outermost_graph()
    if graph not in self._functions:
      self._functions[graph] = next(self._numbers), {}
    number, ordinals = self._functions[graph]
    ordinal = ordinals[replica] = ordinals.get(replica, -1) + 1
    return number if self._is_local else 0, ordinal

  def token(self, replica: int, chain: int, device: str) -> tf.Tensor:
    """A resource that orders the collectives of one chain of one replica.

    Without it the stateful operations of all replicas form one chain and the
    first collective hangs. Nothing is ever stored in the resource.
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


def instance_key(
  name: str, tensor: tf.Tensor, function: int, ordinal: int
) -> tf.Tensor:
  """A number that a collective has on every member, in every step.

  It is a hash of values that the members have in common. A fresh number per
  call would leak, since the runtime remembers each.
  """
  static = tensor.shape.as_list() if tensor.shape.is_fully_defined() else None
  text = repr((name, tensor.dtype.name, static, function, ordinal))
  key = zlib.crc32(text.encode()) & 0x3FFFFFFF
  if static is not None:
    return tf.constant(key)
  # The runtime holds one shape per key, so the shape goes into the key.
  hashed = tf.constant(key)
  for size in tf.unstack(tf.shape(tensor), tensor.shape.rank):
    hashed = hashed * 1000003 + size  # int32 wraps around
  return tf.bitwise.bitwise_and(hashed, 0x3FFFFFFF)


_of_strategy: "weakref.WeakKeyDictionary[Any, CollectiveOps]" = (
  weakref.WeakKeyDictionary()
)


def of_strategy(
  strategy: tf.distribute.Strategy,
  identity: str | None = None,
  chains: int = 1,
  is_serial: bool = True,
  asked: str = AUTO,
) -> CollectiveOps:
  """The one object of a strategy; without `identity`, of a local one."""
  if strategy not in _of_strategy:
    hint = hint_for(
      strategy.extended.worker_devices,
      len(tf.config.list_physical_devices("GPU")),
      len(tf.config.list_logical_devices("GPU")),
      asked,
    )
    _of_strategy[strategy] = CollectiveOps(identity, chains, is_serial, hint)
  return _of_strategy[strategy]


def hint_for(
  devices: Sequence[str], physical: int, logical: int, asked: str = AUTO
) -> str:
  """What to ask the runtime for where replicas have these devices.

  As MirroredStrategy does it for its own sums: NCCL where each is a GPU of its
  own, the ring on CPUs and where a GPU is several logical ones.

  >>> hint_for(["/GPU:0", "/GPU:1"], physical=2, logical=2)
  'nccl'
  >>> hint_for(["/GPU:0", "/GPU:1"], physical=1, logical=2)
  'ring'

  Args:
    devices: Of this process.
    physical: How many GPUs it has.
    logical: As how many TensorFlow takes them.
    asked: What the user asked the strategy for.
  """
  if asked != AUTO:
    return asked
  on_gpus = all("GPU" in device.upper() for device in devices)
  return NCCL if on_gpus and logical <= physical else RING


def as_words(tensor: tf.Tensor) -> tf.Tensor:
  """The same bits in a dtype that collectives gather: bfloat16 is none."""
  if tensor.dtype == tf.bfloat16:
    return tf.bitcast(tensor, tf.float16)
  return tensor


def from_words(words: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
  """The reverse of `as_words`."""
  return tf.bitcast(words, like.dtype) if words.dtype != like.dtype else words


def keeps_order(groups: groups_lib.Groups) -> bool:
  """Whether members have the order of their numbers in collectives.

  There they are sorted by device names, "task:10" before "task:2".
  """
  return groups.num_replicas <= min(10, MAX_ALL_TO_ALL)


def can_merge() -> bool:
  """Whether a merge call works here: only in the graph the replica began in."""
  began_in = getattr(threading.current_thread(), "graph", None)
  return began_in is tf.compat.v1.get_default_graph()


def outermost_function() -> Any:
  """The graph being built; within functions that of the outermost one."""
  graph: Any = tf.compat.v1.get_default_graph()
  outer = getattr(graph, "outer_graph", None)
  while isinstance(outer, tf.__internal__.FuncGraph):
    graph, outer = outer, outer.outer_graph
  return graph


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


def _rounded_up(rows: tf.Tensor) -> tf.Tensor:
  """The next of few numbers, at most a quarter more, and at least one.

  The runtime keeps memory for each shape that was ever gathered, and fails if
  there are no rows.
  """
  rows = tf.maximum(rows, 1)
  bits = tf.cast(
    tf.math.floor(
      tf.math.log(tf.cast(rows, tf.float64))
      / tf.math.log(tf.constant(2.0, tf.float64))
    ),
    tf.int32,
  )
  step = tf.bitwise.left_shift(1, tf.maximum(bits - 2, 0))
  return (rows + step - 1) // step * step


def _pad_rows(tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
  """`tensor` with rows of zeros below, `rows` rows in all."""
  missing = rows - tf.shape(tensor)[0]
  padding = [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1)
  return tf.pad(tensor, padding)


def _without_padding(
  joined: tf.Tensor, counts: tf.Tensor, members: int
) -> tf.Tensor:
  """The rows that the members had, without the padding."""
  rows = tf.shape(joined)[0] // members
  is_real = tf.range(rows)[tf.newaxis, :] < counts[:, tf.newaxis]
  return tf.boolean_mask(joined, tf.reshape(is_real, [-1]))
