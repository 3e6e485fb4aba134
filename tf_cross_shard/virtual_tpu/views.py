"""One replica's copy of a variable, for the host to read and assign."""

from typing import Any

import numpy as np
import tensorflow as tf


class ReplicaView:
  """One replica's copy of a variable, seen from the host."""

  def __init__(self, variable: Any, replica: int) -> None:
    """A view of one copy."""
    self._variable = variable
    self._replica = replica

  @property
  def handle(self) -> Any:
    """The variable's: what a tape records when this is read in a scope."""
    return self._variable.handle

  @property
  def trainable(self) -> bool:
    """The variable's."""
    return bool(self._variable.trainable)

  @property
  def dtype(self) -> tf.DType:
    """The variable's."""
    return self._variable.dtype

  @property
  def shape(self) -> tf.TensorShape:
    """The variable's."""
    return self._variable.shape

  @property
  def name(self) -> str:
    """The variable's name and the replica's number."""
    return f"{self._variable.name}/replica_{self._replica}"

  def numpy(self) -> np.ndarray:
    """The value."""
    return self._variable.copy(self._replica)

  def read_value(self) -> tf.Tensor:
    """The value, as a tensor."""
    return tf.constant(self.numpy(), self.dtype)

  def assign(self, value: Any) -> "ReplicaView":
    """Sets this copy and leaves those of other replicas."""
    array = np.array(value)
    expected = self.dtype.as_numpy_dtype
    if not np.can_cast(array.dtype, expected, "same_kind"):
      raise TypeError(
        f"`value` must be of dtype {self.dtype.name} like {self.name}; got"
        f" {array.dtype}. Cast it first."
      )
    if array.shape != tuple(self.shape):
      raise ValueError(
        f"`value` must have the shape {tuple(self.shape)} of {self.name}; got"
        f" {array.shape}."
      )
    views = self._variable.views()
    with self._variable.distribute_strategy.extended.lock:
      values = [view.numpy() for view in views]
      values[self._replica] = array
      self._variable.set_copies(values)
    return self

  def assign_add(self, delta: Any) -> "ReplicaView":
    """Adds to this copy."""
    return self.assign(self + delta)

  def assign_sub(self, delta: Any) -> "ReplicaView":
    """Subtracts from this copy."""
    return self.assign(self - delta)

  def __add__(self, other: Any) -> tf.Tensor:
    """The sum, as a tensor."""
    return self.read_value() + tf.convert_to_tensor(other, self.dtype)

  def __sub__(self, other: Any) -> tf.Tensor:
    """The difference, as a tensor."""
    return self.read_value() - tf.convert_to_tensor(other, self.dtype)

  def __mul__(self, other: Any) -> tf.Tensor:
    """The product, as a tensor."""
    return self.read_value() * tf.convert_to_tensor(other, self.dtype)

  __radd__, __rmul__ = __add__, __mul__

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    """The value, for NumPy."""
    del copy
    return self.numpy() if dtype is None else self.numpy().astype(dtype)

  def __repr__(self) -> str:
    """Name and value."""
    return f"<ReplicaView {self.name}, numpy={self.numpy()}>"


tf.register_tensor_conversion_function(
  ReplicaView,
  lambda view, dtype=None, name=None, as_ref=False: tf.convert_to_tensor(
    view.numpy(), dtype=dtype or view.dtype, name=name
  ),
)
