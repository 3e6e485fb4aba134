"""Rows of a variable, which an optimizer's update step takes for a whole one.

    table [n, w]    ── gather ─▶ rows [k, w] ─┐
    slots [n, w]    ── gather ─▶ rows [k, w] ─┼─ opt.update_step ─▶ scatter back
    gradient's rows ──────────────────────────┘

So the formula is the optimizer's own, of whichever class, and costs what the
rows cost. It must look at each element by itself.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import base


class Rows:
  """Rows of this replica's copy of a variable, assigned like a variable."""

  trainable = True

  def __init__(self, variable: Any, indices: tf.Tensor) -> None:
    """Gathers rows; the indices are unique."""
    native = variables_lib.native(variable)
    self._handle = native.handle
    self._indices = indices
    self.name = str(variable.name)
    self.path = str(getattr(variable, "path", self.name))
    self.dtype = tf.as_dtype(getattr(native, "true_dtype", native.dtype))
    # By this id both Kerases find the slots of a variable.
    self._unique_id = variables_lib.distributed(variable)._unique_id
    self._value = tf.raw_ops.ResourceGather(
      resource=self._handle, indices=indices, dtype=self.dtype
    )
    self._value.set_shape([None, *variable.shape[1:]])

  @property
  def shape(self) -> tf.TensorShape:
    """The shape of the rows."""
    return self._value.shape

  def __tf_tensor__(
    self, dtype: tf.DType | None = None, name: str | None = None
  ) -> tf.Tensor:
    """Reads the rows; TensorFlow converts by this method."""
    return tf.convert_to_tensor(self._value, dtype, name=name)

  def read_value(self) -> tf.Tensor:
    """Reads the rows."""
    return self._value

  def assign(self, value: Any) -> None:
    """Takes other values, which `write` will scatter."""
    self._value = tf.cast(value, self.dtype)

  def assign_add(self, value: Any) -> None:
    """Adds to the rows."""
    self.assign(self._value + tf.cast(value, self.dtype))

  def assign_sub(self, value: Any) -> None:
    """Subtracts from the rows."""
    self.assign(self._value - tf.cast(value, self.dtype))

  def write(self) -> None:
    """Writes the rows back; no other row is read or written."""
    tf.raw_ops.ResourceScatterUpdate(
      resource=self._handle, indices=self._indices, updates=self._value
    )


def _operator(name: str) -> Any:
  """Returns the operator of a tensor, for rows."""

  def operate(rows: Rows, *others: Any) -> Any:
    return getattr(rows.read_value(), name)(*others)

  return operate


_BINARY: Final = ("add", "sub", "mul", "truediv", "pow")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg"):
  setattr(Rows, f"__{_name}__", _operator(f"__{_name}__"))


@contextlib.contextmanager
def gathered(
  inner: base.InnerOptimizer, variable: Any, indices: tf.Tensor
) -> Iterator[Rows]:
  """Puts rows in the place of a variable's slots; writes all back in the end.

  Yields the rows of the variable itself.
  """
  optimizer = base.innermost(inner.optimizer)
  index, count = inner.place_of(variable)
  attributes = vars(optimizer)
  rows, before = [Rows(variable, indices)], {}
  for attribute, slot in base.slots_at(optimizer, index, count, ()):
    values = attributes[attribute]
    if not isinstance(values, list) or values[index] is not slot:
      raise ValueError(
        f"`lazy_rows` needs slots in lists along the variables; `{attribute}`"
        f" of {type(optimizer).__name__} has them otherwise. Leave it out."
      )
    before[attribute] = attributes[attribute]
    # A list of its own: Keras tracks what is put into its lists.
    slots = list(attributes[attribute])
    slots[index] = Rows(slot, indices)
    rows.append(slots[index])
    attributes[attribute] = slots
  try:
    yield rows[0]
  finally:
    attributes.update(before)
  for part in rows:
    part.write()
