"""Each replica's copy of a variable, read and written on the host.

In one process copies are read directly. Those of other processes are gathered
as int32 words, so that any dtype travels, to the bit:

    worker 0   [ words of its replicas ] ─┐
                                          ├─ all-gather ─▶ all, on every worker
    worker 1   [ words of its replicas ] ─┘
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard import collectives
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.coordination import agreement, errors

Array = np.ndarray[Any, Any]

# What travels at once, in int32 words: 16 MiB.
_MOST_WORDS: Final = 1 << 22
_DIGEST: Final = 16  # bytes


def native(variable: Any) -> Any:
  """Returns the `tf.Variable` of a `tf.Variable` or `keras.Variable`."""
  value = variables_lib.native(variable)
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
  """Returns the strategy whose replicas have copies of a variable."""
  return getattr(native(variable), "distribute_strategy", None)


def is_between_steps() -> bool:
  """Whether values of all replicas can be read here."""
  return tf.executing_eagerly() and (
    not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context()
  )


def check_between_steps() -> None:
  """Raises `RuntimeError` where values of all replicas cannot be read."""
  if not is_between_steps():
    raise RuntimeError(
      "Values of replicas are read and set eagerly, between two steps; this is"
      " inside a tf.function, or one of several replicas. Call it outside"
      " `strategy.run`."
    )


def are_alike(arrays: Iterable[Array]) -> bool:
  """Whether arrays have the same bits."""
  return len({array.tobytes() for array in arrays}) == 1


class Copies:
  """The copies that the replicas of a strategy have of its variables.

  On several machines every method but `here` and `write` is called by all
  workers, with the same arguments.
  """

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    """Looks at nothing yet."""
    check_between_steps()
    self.engine = collectives.for_strategy(strategy)
    self.workers = agreement.of_strategy(strategy)

  @property
  def is_first(self) -> bool:
    """Whether this process is the first worker, or the only one."""
    return self.workers is None or self.workers.index == 0

  def agree(self, topic: str, lines: Sequence[str] = ()) -> None:
    """Raises the same error on all workers unless all are about to do this."""
    if self.workers is not None:
      agreement.agree(self.workers, topic, lines)

  def here(self, variable: Any) -> list[Array]:
    """Returns the copies of this process' replicas."""
    whole_copies = getattr(native(variable), "whole_copies", None)
    if whole_copies is not None:  # of a slot that is kept in shards
      whole: list[Array] = whole_copies()
      return whole
    copies = list(self._copies(variable))
    if len(copies) == 1:  # all replicas share it
      copies *= len(self.engine.replicas_here)
    return [np.array(copy.numpy()) for copy in copies]

  def write(self, variable: Any, arrays: Sequence[Array]) -> None:
    """Gives each replica of this process its own value."""
    set_copies = getattr(native(variable), "set_copies", None)
    if set_copies is not None:  # each view would copy all of them
      set_copies(arrays)
      return
    for copy, array in zip(self._copies(variable), arrays, strict=False):
      copy.assign(array)

  def read(self, variable: Any, replicas: Sequence[int]) -> list[Array]:
    """Returns the copies of any replicas."""
    own = self.here(variable)
    if tf.TensorShape(native(variable).shape).is_fully_defined():
      copies = self.gather(own)
    else:  # Any number of rows: of each replica another.
      counts = [int(n) for n in self.gather([np.array(len(a)) for a in own])]
      copies = self.gather([_pad_rows(array, max(counts)) for array in own])
      copies = [a[:count] for a, count in zip(copies, counts, strict=True)]
    return [copies[replica] for replica in replicas]

  def digests(self, variables: Sequence[Any]) -> list[list[bytes]]:
    """Returns what tells equal copies from different ones, to the bit.

    One list for each variable, with one digest for each replica.
    """
    own = [
      [
        hashlib.blake2b(array.tobytes(), digest_size=_DIGEST).digest()
        for array in self.here(variable)
      ]
      for variable in variables
    ]
    rows = [
      np.frombuffer(b"".join(of_replica), np.uint8)
      for of_replica in zip(*own, strict=True)
    ]
    digests = [row.tobytes() for row in self.gather(rows)]
    return [
      [row[start : start + _DIGEST] for row in digests]
      for start in range(0, _DIGEST * len(own), _DIGEST)
    ]

  def gather(self, own: Sequence[Array]) -> list[Array]:
    """Returns the arrays of all replicas; all have one dtype and shape."""
    engine = self.engine
    if len(engine.replicas_here) == engine.num_replicas:
      return list(own)
    dtype, shape, size = own[0].dtype, own[0].shape, own[0].nbytes
    words = np.stack(
      [
        np.frombuffer(array.tobytes() + bytes(-size % 4), np.int32)
        for array in own
      ]
    )
    parts = [np.zeros([engine.num_replicas, 0], np.int32)]
    for start in range(0, words.shape[1], _MOST_WORDS):
      part = tf.constant(words[:, start : start + _MOST_WORDS])
      try:
        joined = _gather_words(engine.strategy, part)
        [flat, *_] = engine.strategy.experimental_local_results(joined)
        parts.append(flat.numpy().reshape([engine.num_replicas, -1]))
      except tf.errors.OpError as error:
        raise errors.from_message(str(error.message)) or error from error
    rows = np.concatenate(parts, axis=1)
    return [
      np.frombuffer(bytearray(row.tobytes()[:size]), dtype).reshape(shape)
      for row in rows
    ]

  def _copies(self, variable: Any) -> Sequence[Any]:
    """Returns what has a value each; one object where all replicas share it."""
    copies: Sequence[Any] = self.engine.strategy.experimental_local_results(
      native(variable)
    )
    return copies


def _pad_rows(array: Array, rows: int) -> Array:
  """Returns an array with rows of zeros below."""
  missing = [rows - len(array), *array.shape[1:]]
  return np.concatenate([array, np.zeros(missing, array.dtype)])


# One for all calls, which the runtime would trace again.
@tf.function(autograph=False, reduce_retracing=True)
def _gather_words(strategy: tf.distribute.Strategy, words: tf.Tensor) -> Any:
  """Returns the rows of all replicas, one after the other, in each of them."""
  engine = collectives.for_strategy(strategy)

  def gather_own() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    row = words[context.replica_id_in_sync_group - engine.replicas_here.start]
    return engine.all_gather([row])[0]

  return strategy.run(gather_own)
