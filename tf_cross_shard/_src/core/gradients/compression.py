"""Compresses gradients for the wire: rounds them to half precision.

compress ▶ all-reduce ▶ decompress
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

# The half-precision dtypes in which gradients can be sent. Each replica rounds
# its gradients once before the sum, and the engine rounds the sum at least once
# more. bfloat16 has the range of float32 and 8 bits of precision. float16 has
# 11 bits of precision, and overflows beyond 65,504.
WIRE_DTYPES: Final = (tf.bfloat16, tf.float16)


def as_wire_dtype(wire_dtype: Any) -> tf.DType | None:
  """Returns the argument `wire_dtype` as a dtype; None stays None."""
  if wire_dtype is None:
    return None
  try:
    dtype = tf.as_dtype(wire_dtype)
  except TypeError:
    dtype = None
  if dtype not in WIRE_DTYPES:
    names = ", ".join(f'"{known.name}"' for known in WIRE_DTYPES)
    raise ValueError(
      f"`wire_dtype` must be one of {names} or None; got {wire_dtype!r}. Use"
      " None for exact sums."
    )
  return dtype


def compress(
  tensors: Sequence[tf.Tensor], dtype: tf.DType | None
) -> list[tf.Tensor]:
  """Rounds floating tensors that are wider than `dtype` to `dtype`."""
  return [
    tf.cast(tensor, dtype) if is_wider(tensor.dtype, dtype) else tensor
    for tensor in tensors
  ]


def decompress(
  tensors: Sequence[tf.Tensor], like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Casts tensors to the dtypes of `like`, which they had before `compress`."""
  return [
    tensor if tensor.dtype == wide.dtype else tf.cast(tensor, wide.dtype)
    for tensor, wide in zip(tensors, like, strict=True)
  ]


def is_wider(dtype: tf.DType, wire_dtype: tf.DType | None) -> bool:
  """Returns whether tensors of `dtype` become smaller in the wire's dtype."""
  return (
    wire_dtype is not None
    and dtype.is_floating
    and dtype.size > wire_dtype.size
  )
