"""`compress` rounds each number to half precision, and only once."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard._src.core.gradients import compression

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

normal = st.floats(-(2.0**15), 2.0**15, width=32).filter(
  lambda x: x == 0 or abs(x) >= 2.0**-14
)
arrays = hnp.arrays(
  "float32", hnp.array_shapes(min_dims=0, max_dims=2), elements=normal
)


@pytest.mark.parametrize("name", NUMPY)
@hypothesis.given(arrays)
def test_rounds_as_numpy_does(name: str, values: np.ndarray) -> None:
  wide = tf.constant(values)
  [narrow] = compression.compress([wide], tf.as_dtype(name))
  [again] = compression.decompress([narrow], [wide])
  assert narrow.dtype == tf.as_dtype(name)
  assert again.dtype == tf.float32
  assert again.shape == wide.shape
  rounded = values.astype(NUMPY[name]).astype("float32")
  np.testing.assert_array_equal(again.numpy(), rounded)
  off = np.abs(again.numpy().astype("float64") - values)
  assert (off <= UNIT[name] * np.abs(values)).all()


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize(
  "dtype", [tf.bfloat16, tf.float16, tf.int32, tf.int64, tf.bool]
)
def test_tensors_not_wider_than_wire_dtype_are_unchanged(
  name: str, dtype: tf.DType
) -> None:
  tensor = tf.cast([0, 1], dtype)
  assert compression.compress([tensor], tf.as_dtype(name))[0] is tensor
  assert compression.decompress([tensor], [tensor])[0] is tensor
