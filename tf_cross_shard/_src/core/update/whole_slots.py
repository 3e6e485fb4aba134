"""Whole optimizer slots that are backed by the shards of a group's members.

Under `shard_update`, every member keeps one part of the flat state. The parts
of all members, joined, contain a slot, such as Adam's momentum of a weight:

    member 0        member 1
    [a a a b b]     [b b c c 0]      slot of b = b b b b

A whole slot reads and writes these parts and looks like a variable. Savers,
`get_weights` and `Models` use it instead of the slot.
"""

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core.reduce import engine as engines

_Trackable: Final[Any] = tf.__internal__.tracking.Trackable


class WholeSlot(_Trackable):
  """The slot of one weight: group 0's is read, all groups' are assigned."""

  trainable = False

  def __init__(
    self,
    named: Any,
    parts: Any,
    start: int,
    shape: tf.TensorShape,
    engine: engines.Engine,
  ) -> None:
    """Takes the plain optimizer's slot, and the start in the joined parts."""
    self.name = str(named.name)
    self.path = str(getattr(named, "path", named.name))
    self.shape = shape
    self.dtype = tf.as_dtype(parts.dtype)
    self.distribute_strategy = engine.strategy
    self.parts = parts  # A member's may hold elements of other weights, too.
    self._start, self._stop = start, start + shape.num_elements()
    self._groups = engine.groups
    self._is_read_only = False

  def read_only(self) -> "WholeSlot":
    slot = copy.copy(self)
    slot.__dict__["_is_read_only"] = True
    return slot

  def numpy(self) -> np.ndarray[Any, Any]:
    first_group = self._groups.members_of(self._groups.assignment[0][0])
    return self._join(self._copies().read(self.parts, first_group))

  def read_value(self) -> tf.Tensor:
    return tf.constant(self.numpy())

  def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
    """Returns the value of group 0 to NumPy, Keras and TensorFlow."""
    del copy  # The array is always a copy.
    return self.numpy().astype(dtype or self.dtype.as_numpy_dtype)

  def assign(self, value: Any) -> None:
    """Gives all groups the same value."""
    # A user's loop that assigns to slots on each replica would write the parts
    # of all replicas, so what `get_slot` returned cannot be assigned.
    if self._is_read_only:
      raise TypeError(
        f"The slot {self.path} is read-only under `shard_update`, because each"
        " member of a group stores a part of it. Assign to the variable of the"
        " same name in optimizer.variables, which gives all groups one value."
      )
    value = np.asarray(value, self.dtype.as_numpy_dtype)
    if value.shape != tuple(self.shape):
      raise ValueError(
        f"{self.path} has shape {tuple(self.shape)}; got a value of shape"
        f" {value.shape}. Load the state of the same model."
      )
    self.set_copies([value] * len(self._copies().engine.local_replicas))

  def whole_copies(self) -> list[np.ndarray[Any, Any]]:
    """Returns, for each replica of this process, the value of its group."""
    copies = self._copies()
    parts = copies.read(self.parts, range(self._groups.num_replicas))
    return [
      self._join([parts[member] for member in self._groups.members_of(replica)])
      for replica in copies.engine.local_replicas
    ]

  def set_copies(self, values: Sequence[np.ndarray[Any, Any]]) -> None:
    """Writes, for each replica of this process, its part of a whole value."""
    copies = self._copies()
    parts = copies.here(self.parts)
    start, stop = self._start, self._stop
    for replica, part, value in zip(
      copies.engine.local_replicas, parts, values, strict=True
    ):
      # This member's part holds the elements from `begin` up to, but not
      # including, `end` of all members' joined parts.
      size = len(part)
      begin = self._groups.members_of(replica).index(replica) * size
      end = begin + size
      # Overwrite the elements that are both in the part and in this slot.
      low, high = max(start, begin), min(stop, end)
      if low < high:
        cut = value.reshape(-1)[low - start : high - start]
        part[low - begin : high - begin] = cut
    copies.write(self.parts, parts)

  def _join(self, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Returns this slot's value, from the parts of all members of a group."""
    flat = np.concatenate(parts)[self._start : self._stop]
    return flat.reshape(tuple(self.shape))

  def _copies(self) -> replicas_lib.Copies:
    return replicas_lib.Copies(self.distribute_strategy)

  # The two methods by which tf.train.Checkpoint saves and restores a variable.

  def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
    """Returns the value to save, under the key of a plain variable."""
    return {"VARIABLE_VALUE": self.read_value()}

  def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
    self.assign(restored["VARIABLE_VALUE"].numpy())
