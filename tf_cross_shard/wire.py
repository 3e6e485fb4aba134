"""What travels between replicas in half precision.

    narrow -> all-reduce -> widen

Halves the bytes. Each replica's gradient is rounded once before the sum; the
engine rounds the sum at least once more. bfloat16 keeps the range of float32
with 8 bits of precision; float16 has 11 bits and overflows beyond 65,504.
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

DTYPES: Final = (tf.bfloat16, tf.float16)


def as_dtype(wire_dtype: Any) -> tf.DType | None:
  """The dtype that `wire_dtype` names.

  >>> as_dtype("bfloat16").name
  'bfloat16'
  >>> as_dtype(None)

  Args:
    wire_dtype: `"bfloat16"`, `"float16"`, the same as `tf.DType`, or None.

  Returns:
    The dtype; None for None, which leaves gradients as they are.

  Raises:
    ValueError: If it is anything else.
  """
  if wire_dtype is None:
    return None
  try:
    dtype = tf.as_dtype(wire_dtype)
  except TypeError:
    dtype = None
  if dtype not in DTYPES:
    names = ", ".join(f'"{known.name}"' for known in DTYPES)
    raise ValueError(
      f"`wire_dtype` must be one of {names} or None; got {wire_dtype!r}. Leave"
      " it None for exact sums."
    )
  return dtype


def narrow(
  tensors: Sequence[tf.Tensor], dtype: tf.DType | None
) -> list[tf.Tensor]:
  """Rounds wider floating tensors to `dtype`; leaves others as they are.

  >>> [narrowed] = narrow([tf.constant([1.0, 1.0001])], tf.bfloat16)
  >>> narrowed.dtype.name, tf.cast(narrowed, tf.float32).numpy().tolist()
  ('bfloat16', [1.0, 1.0])

  Args:
    tensors: Tensors of any dtypes and shapes.
    dtype: What travels; None for what there is.

  Returns:
    Tensors of the same shapes.
  """
  return [
    tf.cast(tensor, dtype) if _is_wider(tensor.dtype, dtype) else tensor
    for tensor in tensors
  ]


def widen(
  tensors: Sequence[tf.Tensor], like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Gives tensors that were narrowed their dtypes back.

  >>> [wide] = widen([tf.constant([1.5], tf.bfloat16)], [tf.constant([0.0])])
  >>> wide.dtype.name
  'float32'

  Args:
    tensors: Narrow tensors.
    like: What each was before `narrow`.

  Returns:
    Tensors of the dtypes of `like`.
  """
  return [
    tensor if tensor.dtype == wide.dtype else tf.cast(tensor, wide.dtype)
    for tensor, wide in zip(tensors, like, strict=True)
  ]


def _is_wider(dtype: tf.DType, wire_dtype: tf.DType | None) -> bool:
  """Whether anything is saved by narrowing."""
  return (
    wire_dtype is not None
    and dtype.is_floating
    and dtype.size > wire_dtype.size
  )
