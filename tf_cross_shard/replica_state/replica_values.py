"""Each replica's copy of a variable, read and written on the host.

Copies of other processes come as bytes, in one sum of integers to which their
owner adds what it has and everyone else zeros:

    worker 0   [ its copies | 0 0 0 0 0  ]
    worker 1   [ 0 0 0 0 0  | its copies ]
               ───────── sum ─────────────▶ all copies, to the bit, everywhere

So any dtype travels, and no more than what is asked for.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard import collectives, validation
from tf_cross_shard import groups as groups_lib
from tf_cross_shard.multi_worker import coordination, errors

Array = np.ndarray[Any, Any]

# What travels at once, in int32 words: 16 MiB.
_MOST_WORDS: Final = 1 << 22
_LEAST_WORDS: Final = 1 << 8
_DIGEST: Final = 16  # bytes


def native(variable: Any) -> Any:
  """The `tf.Variable` of a `tf.Variable` or `keras.Variable`."""
  value = validation.native(variable)
  if not hasattr(value, "assign") or not hasattr(value, "read_value"):
    raise TypeError(
      "`variable` must be a tf.Variable, a keras.Variable or a slot; got"
      f" {type(variable).__name__}. Hand in the variable, not its value."
    )
  if value.dtype == tf.string:
    raise TypeError(
      f"`variable` must hold numbers; {value.name} is of dtype string."
    )
  return value


def strategy_of(variable: Any) -> tf.distribute.Strategy | None:
  """Whose replicas have copies of a variable."""
  return getattr(native(variable), "distribute_strategy", None)


class Copies:
  """The copies that the replicas of a strategy have of its variables.

  On several machines every method but `here` and `write` is called by all
  workers, with the same arguments.
  """

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    """Looks at nothing yet."""
    if not tf.executing_eagerly():
      raise RuntimeError(
        "Values of replicas are read and set eagerly; this is inside a"
        " tf.function or a graph. Call it between two steps."
      )
    if tf.distribute.has_strategy() and (
      not tf.distribute.in_cross_replica_context()
    ):
      raise RuntimeError(
        "Values of all replicas cannot be read or set by one of them. Call it"
        " outside `strategy.run`."
      )
    self.engine = collectives.for_strategy(strategy)
    self.workers = coordination.of_strategy(strategy)
    self._add: Any = None

  @property
  def is_first(self) -> bool:
    """Whether this process is the first worker, or the only one."""
    return self.workers is None or self.workers.is_first

  def agree(self, topic: str, lines: Sequence[str] = ()) -> None:
    """Raises the same error on all workers unless all are about to do this."""
    if self.workers is None:
      return
    # The store keeps for ever what is told: all lines only where they differ.
    text = "\n".join([topic, *lines])
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(coordination.tell(self.workers, topic, digest))) > 1:
      coordination.agree(self.workers, topic, lines)

  def here(self, variable: Any) -> list[Array]:
    """The copies of this process' replicas."""
    return [self._copy(variable, r) for r in self.engine.replicas_here]

  def write(self, variable: Any, arrays: Sequence[Array]) -> None:
    """Gives each replica of this process its own value."""
    set_copies = getattr(native(variable), "set_copies", None)
    if set_copies is not None:  # each view would copy all of them
      set_copies(arrays)
      return
    for copy, array in zip(self._copies(variable), arrays, strict=False):
      copy.assign(array)

  def read(self, wanted: Sequence[tuple[Any, int]]) -> Iterator[Array]:
    """Copies of any replicas."""
    if self._has_all:
      yield from (self._copy(variable, r) for variable, r in wanted)
      return
    forms = [_form(variable) for variable, _ in wanted]
    shared = self.share(
      [replica for _, replica in wanted],
      [math.prod(shape) * dtype.itemsize for dtype, shape in forms],
      lambda i: self._copy(*wanted[i]).tobytes(),
    )
    for blob, (dtype, shape) in zip(shared, forms, strict=True):
      yield np.frombuffer(bytearray(blob), dtype).reshape(shape)

  def digests(self, variables: Sequence[Any]) -> list[list[bytes]]:
    """What tells equal copies from different ones, to the bit."""
    mine = [
      [
        hashlib.blake2b(array.tobytes(), digest_size=_DIGEST).digest()
        for array in self.here(variable)
      ]
      for variable in variables
    ]
    replicas = self.engine.num_replicas
    first = self.engine.replicas_here.start
    found = list(
      self.share(
        list(range(replicas)) * len(mine),
        [_DIGEST] * (replicas * len(mine)),
        lambda i: mine[i // replicas][i % replicas - first],
      )
    )
    return [
      found[i * replicas : (i + 1) * replicas] for i in range(len(variables))
    ]

  def share(
    self,
    owners: Sequence[int],
    sizes: Sequence[int],
    own: Callable[[int], bytes],
  ) -> Iterator[bytes]:
    """Bytes that one replica each has, for all workers."""
    if self._has_all:
      yield from map(own, range(len(owners)))
      return
    here = self.engine.replicas_here
    for batch in _batches(sizes):
      ends = list(itertools.accumulate(_words(sizes[i]) for i in batch))
      places = [0, *ends[:-1]]
      buffer = np.zeros(ends[-1], np.int32)
      for i, place in zip(batch, places, strict=True):
        if owners[i] in here:
          data = buffer[place:].view(np.uint8)[: sizes[i]]
          data[:] = np.frombuffer(own(i), np.uint8)
      total = self._sum(buffer).view(np.uint8)
      for i, place in zip(batch, places, strict=True):
        yield total[4 * place : 4 * place + sizes[i]].tobytes()

  def _sum(self, words: Array) -> Array:
    """The sum over all workers, in parts that are not too large."""
    parts = []
    for start in range(0, len(words), _MOST_WORDS):
      part = words[start : start + _MOST_WORDS]
      # Few sizes: the runtime keeps something for each that was ever added.
      size = max(_LEAST_WORDS, 1 << (len(part) - 1).bit_length())
      padded = np.zeros(size, np.int32)
      padded[: len(part)] = part
      parts.append(self._sum_of(padded)[: len(part)])
    return np.concatenate(parts) if parts else words

  def _sum_of(self, words: Array) -> Array:
    """The sum over all workers of what each of them has."""
    engine, strategy = self.engine, self.engine.strategy
    first = engine.replicas_here.start
    everyone = groups_lib.contiguous(engine.num_replicas, engine.num_replicas)
    if self._add is None:

      def add(each: Any) -> Any:
        return strategy.run(
          lambda x: engine.all_reduce_sum([x], everyone)[0], args=(each,)
        )

      self._add = tf.function(add, autograph=False)

    # A process counts once, however many replicas it has.
    each = strategy.experimental_distribute_values_from_function(
      lambda context: tf.constant(
        words
        if context.replica_id_in_sync_group == first
        else np.zeros_like(words)
      )
    )
    try:
      total = strategy.experimental_local_results(self._add(each))[0]
      return np.array(total.numpy())
    except tf.errors.OpError as error:
      raise errors.of_message(str(error.message)) or error from error

  @property
  def _has_all(self) -> bool:
    """Whether this process has all replicas."""
    return len(self.engine.replicas_here) == self.engine.num_replicas

  def _copies(self, variable: Any) -> Sequence[Any]:
    """What has a value each; one object where all replicas share it."""
    copies: Sequence[Any] = self.engine.strategy.experimental_local_results(
      native(variable)
    )
    return copies

  def _copy(self, variable: Any, replica: int) -> Array:
    """What a replica of this process has."""
    copies = self._copies(variable)
    place = replica - self.engine.replicas_here.start
    return np.array(copies[place if len(copies) > 1 else 0].numpy())


def _form(variable: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
  """Dtype and shape of an array that holds the value."""
  value = native(variable)
  dtype = tf.as_dtype(value.dtype).as_numpy_dtype
  return np.dtype(dtype), tuple(map(int, value.shape))


def _batches(sizes: Sequence[int]) -> Iterator[range]:
  """Numbers of what travels together; what is larger than that, alone."""
  start = words = 0
  for i, size in enumerate(sizes):
    if i > start and words + _words(size) > _MOST_WORDS:
      yield range(start, i)
      start, words = i, 0
    words += _words(size)
  if sizes:
    yield range(start, len(sizes))


def _words(size: int) -> int:
  """How many words hold so many bytes."""
  return -(-size // 4)
