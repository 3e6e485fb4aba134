"""Reads and writes each replica's copy of a variable, on the host.

worker 0   [ words of its replicas ] ─┐
                                      ├─ all-gather ─▶ all words, on every
worker 1   [ words of its replicas ] ─┘                worker
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import reduce
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.core.variables import Variable

Array = np.ndarray[Any, Any]

# The maximum number of int32 words in one all-gather: 16 MiB.
_MOST_WORDS: Final = 1 << 22
_DIGEST: Final = 16  # The size of a digest, in bytes.


def native(variable: Variable) -> Variable:
  """Returns the `tf.Variable` of a `tf.Variable` or `keras.Variable`."""
  value = variables_lib.native(variable)
  if not hasattr(value, "assign") or not hasattr(value, "read_value"):
    raise TypeError(
      "`variable` must be a tf.Variable, a keras.Variable or a slot; got"
      f" {type(variable).__name__}. Pass the variable, not its value."
    )
  if value.dtype == tf.string:
    raise TypeError(
      f"`variable` must contain numbers; {value.name} is of dtype string."
    )
  return value


def strategy_of(variable: Variable) -> tf.distribute.Strategy | None:
  """Returns the strategy whose replicas have copies of a variable."""
  return getattr(native(variable), "distribute_strategy", None)


def is_between_steps() -> bool:
  """Returns whether this code can read the values of all replicas."""
  return tf.executing_eagerly() and (
    not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context()
  )


def check_between_steps() -> None:
  """Raises `RuntimeError` where replicas' values cannot be read."""
  if not is_between_steps():
    raise RuntimeError(
      "Values of replicas can be read and set only eagerly, between two steps;"
      " this call is inside a tf.function or a replica. Make the call outside"
      " `strategy.run`."
    )


def are_alike(arrays: Iterable[Array]) -> bool:
  """Returns whether arrays have the same bits."""
  return len({array.tobytes() for array in arrays}) == 1


class Copies:
  """Reads and writes the copies that a strategy's replicas have of variables.

  All workers call each method alike, except `here` and `write`.
  """

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    check_between_steps()
    self.engine = reduce.for_strategy(strategy)
    self.workers = workers_lib.of_strategy(strategy)

  @property
  def is_first(self) -> bool:
    """Whether this process is the first worker, or the only one."""
    return self.workers is None or self.workers.index == 0

  def compare_workers(self, topic: str, lines: Sequence[str] = ()) -> None:
    """Raises an error unless all workers call this with equal `lines`."""
    workers_lib.compare_workers(self.workers, topic, lines)

  def here(
    self, variable: Variable, places: Iterable[int] | None = None
  ) -> list[Array]:
    """Returns the copies of this process's replicas, or those at `places`."""
    whole_copies = getattr(native(variable), "whole_copies", None)
    if whole_copies is not None:  # A sharded slot, or a stack of all copies.
      arrays = whole_copies()
      places = range(len(arrays)) if places is None else places
      return [np.array(arrays[i]) for i in places]
    copies = list(self._copies(variable))
    if len(copies) == 1:  # All replicas share one variable.
      copies *= len(self.engine.local_replicas)
    if places is not None:
      copies = [copies[i] for i in places]
    return [np.array(copy.numpy()) for copy in copies]

  def write(self, variable: Variable, arrays: Sequence[Array]) -> None:
    """Sets the copy of each replica of this process to the replica's array."""
    set_copies = getattr(native(variable), "set_copies", None)
    if set_copies is not None:
      # A sharded slot and a stack receive all values in one call. Assigning one
      # replica's value at a time would copy the whole slot for each replica.
      set_copies(arrays)
      return
    for copy, array in zip(self._copies(variable), arrays, strict=False):
      copy.assign(array)

  def read(self, variable: Variable, replicas: Sequence[int]) -> list[Array]:
    """Returns the copies that the given replicas have."""
    if len(self.engine.local_replicas) == self.engine.num_replicas:
      return self.here(variable, replicas)
    here = self.here(variable)
    if tf.TensorShape(native(variable).shape).is_fully_defined():
      copies = self.gather(here)
    else:
      # Copies may have different numbers of rows: pad them with rows of zeros,
      # gather, and remove the padding.
      counts = [int(n) for n in self.gather([np.array(len(a)) for a in here])]
      copies = self.gather([_pad_rows(array, max(counts)) for array in here])
      copies = [a[:count] for a, count in zip(copies, counts, strict=True)]
    return [copies[replica] for replica in replicas]

  def digests(self, variables: Sequence[Variable]) -> list[list[bytes]]:
    """Returns a hash of each copy: for each variable, one for each replica."""
    digests_here = [
      [
        hashlib.blake2b(array.tobytes(), digest_size=_DIGEST).digest()
        for array in self.here(variable)
      ]
      for variable in variables
    ]
    # One gather for all variables: each replica sends its digests in a row.
    rows = [
      np.frombuffer(b"".join(of_replica), np.uint8)
      for of_replica in zip(*digests_here, strict=True)
    ]
    digests = [row.tobytes() for row in self.gather(rows)]
    return [
      [row[start : start + _DIGEST] for row in digests]
      for start in range(0, _DIGEST * len(variables), _DIGEST)
    ]

  def gather(self, here: Sequence[Array]) -> list[Array]:
    """Returns the arrays, alike in shape, of all replicas."""
    engine = self.engine
    if len(engine.local_replicas) == engine.num_replicas:
      return list(here)
    words = _to_words(here)  # int32, so that all dtypes arrive with their bits.
    chunks = [np.zeros([engine.num_replicas, 0], np.int32)]
    for start in range(0, words.shape[1], _MOST_WORDS):
      chunk = tf.constant(words[:, start : start + _MOST_WORDS])
      try:
        joined = _gather_words(engine.strategy, chunk)
        [first, *_] = engine.strategy.experimental_local_results(joined)
        chunks.append(first.numpy().reshape([engine.num_replicas, -1]))
      except tf.errors.OpError as error:
        raise workers_lib.from_message(str(error.message)) or error from error
    return [_from_words(row, here[0]) for row in np.concatenate(chunks, axis=1)]

  def _copies(self, variable: Variable) -> Sequence[Any]:
    return self.engine.strategy.experimental_local_results(native(variable))


def _to_words(arrays: Sequence[Array]) -> Array:
  padding = bytes(-arrays[0].nbytes % 4)
  return np.stack(
    [np.frombuffer(array.tobytes() + padding, np.int32) for array in arrays]
  )


def _from_words(words: Array, like: Array) -> Array:
  """Reverses `_to_words` for one row; `like` has the dtype and the shape."""
  data = bytearray(words.tobytes()[: like.nbytes])
  return np.frombuffer(data, like.dtype).reshape(like.shape)


def _pad_rows(array: Array, rows: int) -> Array:
  missing = [rows - len(array), *array.shape[1:]]
  return np.concatenate([array, np.zeros(missing, array.dtype)])


# At module level, so that it is traced once and not in every call.
@tf.function(autograph=False, reduce_retracing=True)
def _gather_words(strategy: tf.distribute.Strategy, words: tf.Tensor) -> Any:
  """Gathers rows; each replica returns the rows of all, concatenated."""
  engine = reduce.for_strategy(strategy)

  def gather_own() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    row = words[context.replica_id_in_sync_group - engine.local_replicas.start]
    return engine.all_gather([row])[0]

  return strategy.run(gather_own)
