"""TensorFlow's collective operations, in one process or in several.

    group key       names a group; it is the same on all members of the group
    instance key    names one collective of that group; it is the same in every
                    step and on every member
    ordering token  a resource handle for each replica; collectives that share
                    it run one after the other

A collective that fails makes every later collective of the process fail. So
everything that can be checked is checked before the first one runs.
"""

import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard._src.core import graphs
from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core.reduce import engine, isolation

# The first of our group keys. tf.distribute numbers its own groups from 1, and
# two groups with the same key raise an error.
_FIRST_GROUP_KEY: Final = 0x40000000
_LAST_GROUP_KEY: Final = 0x7FFFFFFF
_DTYPES: Final = frozenset(
  (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
)

# CollectiveReduceV3 does not support a `group_assignment` yet (2.21), and
# CollectiveReduceScatterV2 and CollectivePermute have no CPU kernel.
ALL_REDUCE: Final = "CollectiveReduceV2"
ALL_GATHER: Final = "CollectiveGatherV2"
ALL_TO_ALL: Final = "CollectiveAllToAllV2"
_ATTRIBUTES: Final = {ALL_REDUCE: {"merge_op": "Add", "final_op": "Id"}}

# With 12 members or more, `CollectiveAllToAllV2` fails or returns wrong rows.
MAX_ALL_TO_ALL: Final = 11
MAX_ORDERED: Final = 10

_local_strategies: Final = itertools.count()


class Caller(NamedTuple):
  """The replica that takes part in a collective."""

  groups: groups_lib.Groups
  replica: int
  device: str


class CollectiveOps:
  """The collectives of one strategy, with their keys and ordering tokens."""

  def __init__(
    self,
    identity: str | None = None,
    chains: int = 1,
    is_serial: bool = True,
    hint: str = "auto",
    run_watched: Callable[..., list[tf.Tensor]] | None = None,
  ) -> None:
    """Takes a text that is alike in all processes, or None for one process."""
    self._run_watched = run_watched
    self._is_local = identity is None
    self._identity = identity or f"local strategy {next(_local_strategies)}"
    self._hint = hint
    self._chains = chains  # How many collectives of a replica run at once.
    # Eager replicas of this process run one after the other.
    self._is_serial = is_serial
    self._first_keys: dict[groups_lib.Groups, int] = {}
    self._tokens: dict[tuple[int, int], tf.Tensor] = {}
    self._numbers = itertools.count(1)
    self._functions: weakref.WeakKeyDictionary[
      Any, tuple[int, dict[int, int]]
    ] = weakref.WeakKeyDictionary()

  def run(
    self, name: str, tensors: Sequence[tf.Tensor], caller: Caller
  ) -> list[tf.Tensor]:
    """Runs one collective for each tensor, over the caller's group."""
    groups, replica, device = caller
    self._check(tensors)

    def run() -> list[tf.Tensor]:
      results = []
      for tensor in tensors:
        function, ordinal = self._place_in_program(replica)
        chain = ordinal % self._chains  # Successive collectives take turns.
        results.append(
          getattr(tf.raw_ops, name)(
            input=tensor,
            group_size=groups.group_size,
            group_key=self.group_key(groups, replica),
            instance_key=instance_key(name, tensor, function, ordinal),
            ordering_token=[self.token(replica, chain, device)],
            communication_hint=self._hint,
            # No `timeout_seconds`: each operation would hold two threads until
            # the time has passed. A lost worker is noticed after about 9 s.
            **_ATTRIBUTES.get(name, {}),
          )
        )
      return results

    if self._run_watched is None:
      return run()
    return self._run_watched(tensors, run, replica)

  def reduce_scatter(self, row: tf.Tensor, caller: Caller) -> tf.Tensor:
    """Sums a vector over the group, and returns this member's part.

    part k of all members ─ all-to-all ─▶ member k sums its parts
    """
    rows = tf.reshape(row, [caller.groups.group_size, -1])
    [received] = self.run(ALL_TO_ALL, [rows], caller)
    # Adding locally allows half-precision parts to be added in float32.
    wide = tf.cast(received, tf.float32) if row.dtype.size < 4 else received
    return tf.cast(tf.reduce_sum(wide, axis=0), row.dtype)

  def all_gather(self, part: tf.Tensor, caller: Caller) -> tf.Tensor:
    """Concatenates the parts of all members, which have the same shape."""
    [joined] = self.run(ALL_GATHER, [_as_words(part)], caller)
    return _from_words(joined, part)

  def join_rows(
    self, tensors: Sequence[tf.Tensor], caller: Caller
  ) -> list[tf.Tensor]:
    """Concatenates tensors of which replicas may have different rows."""
    # A collective needs one shape on all members: pad to the longest tensor.
    # counts[m, i]: how many rows member m has of tensor i.
    rows = tf.stack([tf.shape(tensor)[0] for tensor in tensors])[tf.newaxis]
    [counts] = self.run(ALL_GATHER, [rows], caller)
    members = caller.groups.group_size
    counts = tf.reshape(counts, [members, len(tensors)])
    longest = tf.reduce_max(counts, axis=0)
    padded = [
      _pad_rows(_as_words(tensor), _rounded_up(longest[i]))
      for i, tensor in enumerate(tensors)
    ]
    joined = self.run(ALL_GATHER, padded, caller)
    results = []
    for i, (all_rows, tensor) in enumerate(zip(joined, tensors, strict=True)):
      # is_real[m, k]: whether row k of member m is not padding.
      rows_each = tf.shape(all_rows)[0] // members
      is_real = tf.range(rows_each) < counts[:, i, tf.newaxis]
      words = tf.boolean_mask(all_rows, tf.reshape(is_real, [-1]))
      results.append(_from_words(words, tensor))
    return results

  def _check(self, tensors: Sequence[tf.Tensor]) -> None:
    """Raises an error where a collective would hang or fail."""
    # MirroredStrategy marks the threads of its replicas.
    in_eager = getattr(threading.current_thread(), "in_eager", False)
    if self._is_serial and in_eager:
      raise RuntimeError(
        "Gradients cannot be reduced in a tf.function or tf.cond that is called"
        " eagerly inside `strategy.run`: the replicas run one after the other."
        " Call `strategy.run` itself inside a tf.function."
      )
    # The graphs of the replica function, without the graph in which it began.
    inside = graphs.enclosing()[:-1]
    if any("While" in type(graph).__name__ for graph in inside):
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
          f" CollectiveReduceV2, which supports {names}. Cast the gradient, or,"
          " under MirroredStrategy, call apply_gradients outside tf.cond."
        )

  def group_key(self, groups: groups_lib.Groups, replica: int) -> int:
    """Returns a number that names one group of one grouping."""
    if groups not in self._first_keys:
      # Not a counter: processes may have created different groupings before.
      text = repr((self._identity, groups.to_lists()))
      room = _LAST_GROUP_KEY - _FIRST_GROUP_KEY - groups.num_groups
      hashed = zlib.crc32(text.encode()) % room
      self._first_keys[groups] = _FIRST_GROUP_KEY + hashed
    return self._first_keys[groups] + groups.index_of(replica)

  def _place_in_program(self, replica: int) -> tuple[int, int]:
    """Returns the number of the traced function, and this replica's ordinal."""
    if tf.executing_eagerly():
      # Eager collectives of a replica run one at a time, so one key is enough.
      return 0, 0
    graph = graphs.enclosing()[-1]  # In which the replica function began.
    if graph not in self._functions:
      self._functions[graph] = next(self._numbers), {}
    number, ordinals = self._functions[graph]
    ordinal = ordinals[replica] = ordinals.get(replica, -1) + 1
    # Two threads of one process may run two functions at once. In several
    # processes, a worker that retraces would number its functions differently.
    return number if self._is_local else 0, ordinal

  def token(self, replica: int, chain: int, device: str) -> tf.Tensor:
    """Returns the handle that orders one chain of a replica's collectives."""
    # Without a token, all stateful operations of all replicas become one chain,
    # and the first collective waits for members that come later in it. Only the
    # name of the variable matters; it is never created.
    key = replica, chain
    if key not in self._tokens:
      # Create the handle outside the trace: all functions share it.
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
  """Returns the key of a collective, equal on all members and steps."""
  # Not a fresh key for each call: the runtime remembers every key, at 0.85 to
  # 1.5 kB each. Nor a counter in Python: if only one worker retraces, its keys
  # no longer match those of the others, and all workers hang.
  static = tensor.shape.as_list() if tensor.shape.is_fully_defined() else None
  text = repr((name, tensor.dtype.name, static, function, ordinal))
  key = zlib.crc32(text.encode()) & 0x3FFFFFFF
  if static is not None:
    return tf.constant(key)
  # The runtime remembers one shape for each key. Where the shape is not known
  # before the step runs, the step hashes it into the key.
  hashed = tf.constant(key)
  for size in tf.unstack(tf.shape(tensor), tensor.shape.rank):
    hashed = hashed * 1000003 + size  # int32 wraps around
  return tf.bitwise.bitwise_and(hashed, 0x3FFFFFFF)


# If each optimizer had its own object, two optimizers in one step would use the
# same instance keys.
_of_strategy: "weakref.WeakKeyDictionary[Any, CollectiveOps]" = (
  weakref.WeakKeyDictionary()
)


def of_strategy(
  strategy: tf.distribute.Strategy,
  identity: str | None = None,
  chains: int = 1,
  is_serial: bool = True,
  hint: str = "auto",
) -> CollectiveOps:
  """Returns a strategy's `CollectiveOps`, which the first call creates."""
  if strategy not in _of_strategy:
    _of_strategy[strategy] = CollectiveOps(
      *(identity, chains, is_serial, hint),
      # Only `multi_worker.MultiWorkerStrategy` has it.
      getattr(strategy, "run_watched", None),
    )
  return _of_strategy[strategy]


class CollectiveEngine(engine.Engine):
  """An engine that sums and gathers by collective operations."""

  # The operations, which all optimizers of the strategy share.
  _collectives: CollectiveOps

  def __init__(
    self, strategy: tf.distribute.Strategy, groups: groups_lib.Groups
  ) -> None:
    super().__init__(strategy, groups)
    self._devices = tuple(strategy.extended.worker_devices)
    self._on_cpus = all("CPU" in device.upper() for device in self._devices)

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return self._collectives.run(ALL_REDUCE, tensors, self._caller())

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return self._collectives.join_rows(tensors, self._caller())

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    if not _keeps_order(self.groups):
      return super().reduce_scatter(row)
    return self._collectives.reduce_scatter(row, self._caller())

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    if not _keeps_order(self.groups):
      return super().all_gather_part(part)
    return self._collectives.all_gather(part, self._caller())

  def _caller(self) -> Caller:
    replica = isolation.replica_id()
    assert replica is not None  # These strategies know it while tracing.
    device = self._devices[replica - self.local_replicas.start]
    return Caller(self.groups, replica, device)


def _as_words(tensor: tf.Tensor) -> tf.Tensor:
  """Bitcasts bfloat16, which cannot be gathered, to float16."""
  if tensor.dtype == tf.bfloat16:
    return tf.bitcast(tensor, tf.float16)
  return tensor


def _from_words(words: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
  """Reverses `_as_words`; `like` has the original dtype."""
  return tf.bitcast(words, like.dtype) if words.dtype != like.dtype else words


def _keeps_order(groups: groups_lib.Groups) -> bool:
  """Returns whether gathering and all-to-all see members in replica order."""
  # The runtime sorts device names as text: "task:10" comes before "task:2".
  return groups.num_replicas <= MAX_ORDERED


def _rounded_up(rows: tf.Tensor) -> tf.Tensor:
  """Rounds a number of rows up, by at most a quarter, to at least one."""
  # The runtime keeps memory for each shape that was ever gathered, and crashes
  # on a tensor without rows.
  rows = tf.maximum(rows, 1)
  # With 2**bits <= rows, round up to a multiple of a quarter of 2**bits.
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
  missing = rows - tf.shape(tensor)[0]
  padding = [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1)
  return tf.pad(tensor, padding)
