"""Makes some rows of a variable look like a variable to `update_step`.

    table [n, w]    ── gather ─▶ rows [k, w] ─┐
    slots [n, w]    ── gather ─▶ rows [k, w] ─┼─ opt.update_step ─▶ scatter back
    gradient's rows ──────────────────────────┘

Here, k of the n rows are in the batch. The update of an element must depend
only on that element.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.variables import Variable
from tf_cross_shard._src.core.wrapped import keras_private, overriding
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class Rows:
  """Rows of this replica's copy of a variable, until `write` stores them."""

  trainable = True

  def __init__(self, variable: Variable, indices: tf.Tensor) -> None:
    native = variables_lib.native(variable)
    self._handle = native.handle
    self._indices = indices
    self.name = str(variable.name)
    self.path = str(getattr(variable, "path", self.name))
    self.dtype = tf.as_dtype(getattr(native, "true_dtype", native.dtype))
    # Keras 3 and tf_keras find the slots of a variable by this attribute.
    whole = variables_lib.distributed(variable)
    self._unique_id = whole._unique_id  # noqa: SLF001
    self._value = tf.raw_ops.ResourceGather(
      resource=self._handle, indices=indices, dtype=self.dtype
    )
    self._value.set_shape([None, *variable.shape[1:]])

  @property
  def shape(self) -> tf.TensorShape:
    return self._value.shape

  def __tf_tensor__(
    self, dtype: tf.DType | None = None, name: str | None = None
  ) -> tf.Tensor:
    return tf.convert_to_tensor(self._value, dtype, name=name)

  def read_value(self) -> tf.Tensor:
    return self._value

  def assign(self, value: Any) -> None:
    self._value = tf.cast(value, self.dtype)

  def assign_add(self, value: Any) -> None:
    self.assign(self._value + tf.cast(value, self.dtype))

  def assign_sub(self, value: Any) -> None:
    self.assign(self._value - tf.cast(value, self.dtype))

  def scatter_add(self, slices: tf.IndexedSlices) -> None:
    """Adds to some of the rows, which may occur several times."""
    values = tf.cast(slices.values, self.dtype)
    indices = slices.indices[:, tf.newaxis]
    self.assign(tf.tensor_scatter_nd_add(self._value, indices, values))

  def scatter_sub(self, slices: tf.IndexedSlices) -> None:
    self.scatter_add(tf.IndexedSlices(-slices.values, slices.indices))

  def write(self) -> None:
    """Stores the rows in the variable. No other row is read or written."""
    tf.raw_ops.ResourceScatterUpdate(
      resource=self._handle, indices=self._indices, updates=self._value
    )


def _operator(name: str) -> Any:
  def operate(rows: Rows, *others: Any) -> Any:
    return getattr(rows.read_value(), name)(*others)

  return operate


_BINARY: Final = ("add", "sub", "mul", "truediv", "pow")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg"):
  setattr(Rows, f"__{_name}__", _operator(f"__{_name}__"))


@contextlib.contextmanager
def gathered(
  wrapped: wrapped_lib.WrappedOptimizer, variable: Variable, indices: tf.Tensor
) -> Iterator[Rows]:
  """Replaces slots with their rows; yields the variable's, and stores all."""
  optimizer = wrapped.base_optimizer
  index = wrapped.index(variable)
  count = len(keras_private.indices(optimizer))
  attributes = vars(optimizer)
  rows, replaced = [Rows(variable, indices)], {}
  for attribute, slot in wrapped_lib.slots_at(optimizer, index, count, ()):
    values = attributes[attribute]
    if not isinstance(values, list) or values[index] is not slot:
      raise ValueError(
        "`lazy_rows` needs each kind of slot in a list parallel to the"
        f" variables, but `{type(optimizer).__name__}.{attribute}` is not such"
        " a list. Remove `lazy_rows`."
      )
    # Replace a copy of the list: Keras tracks what is put into its own lists.
    replaced[attribute] = list(values)
    replaced[attribute][index] = Rows(slot, indices)
    rows.append(replaced[attribute][index])
  with overriding.overriding(optimizer, **replaced):
    yield rows[0]
  for part in rows:
    part.write()
