"""Narrowing rounds to the nearest, widening gives the same numbers back."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard.gradients import packing

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

normal = st.floats(-(2.0**15), 2.0**15, width=32).filter(
  lambda x: x == 0 or abs(x) >= 2.0**-14
)
arrays = hnp.arrays(
  "float32", hnp.array_shapes(min_dims=0, max_dims=2), elements=normal
)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_names_and_dtypes(name: str) -> None:
  dtype = tf.as_dtype(name)
  assert packing.as_wire_dtype(name) == packing.as_wire_dtype(dtype) == dtype
  assert packing.as_wire_dtype(NUMPY[name]) == dtype


def test_none_is_none() -> None:
  assert packing.as_wire_dtype(None) is None


@pytest.mark.parametrize(
  "bad", ["float32", "float64", "int8", "half precision", "", 16, 0, True, []]
)
def test_what_is_no_wire_dtype(bad: object) -> None:
  with pytest.raises(ValueError, match="`wire_dtype` must be one of") as caught:
    packing.as_wire_dtype(bad)
  message = str(caught.value)
  assert f"got {bad!r}" in message
  assert '"bfloat16", "float16" or None' in message
  assert "Leave it None for exact sums" in message


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@hypothesis.given(arrays)
def test_rounds_as_numpy_does(name: str, values: np.ndarray) -> None:
  wide = tf.constant(values)
  [narrow] = packing.narrow([wide], tf.as_dtype(name))
  [again] = packing.widen([narrow], [wide])
  assert narrow.dtype == tf.as_dtype(name)
  assert again.dtype == tf.float32
  assert again.shape == wide.shape
  rounded = values.astype(NUMPY[name]).astype("float32")
  np.testing.assert_array_equal(again.numpy(), rounded)
  off = np.abs(again.numpy().astype("float64") - values)
  assert (off <= UNIT[name] * np.abs(values)).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize(
  "dtype", [tf.bfloat16, tf.float16, tf.int32, tf.int64, tf.bool]
)
def test_what_is_not_wider_is_left_alone(name: str, dtype: tf.DType) -> None:
  tensor = tf.cast([0, 1], dtype)
  assert packing.narrow([tensor], tf.as_dtype(name))[0] is tensor
  assert packing.widen([tensor], [tensor])[0] is tensor


def test_nothing_is_narrowed_by_default() -> None:
  tensors = [tf.constant([1.5]), tf.constant([1.5], tf.float64)]
  kept = packing.narrow(tensors, None)
  assert all(a is b for a, b in zip(kept, tensors, strict=True))


def test_each_tensor_gets_its_own_dtype_back() -> None:
  tensors = [
    tf.constant([1.5], tf.float64),
    tf.constant([2], tf.int32),
    tf.constant([2.5]),
  ]
  narrow = packing.narrow(tensors, tf.float16)
  assert [t.dtype for t in narrow] == [tf.float16, tf.int32, tf.float16]
  wide = packing.widen(narrow, tensors)
  assert [t.dtype for t in wide] == [t.dtype for t in tensors]
  assert [t.numpy().tolist() for t in wide] == [[1.5], [2], [2.5]]


def test_the_range_is_that_of_the_dtype() -> None:
  given = [tf.constant([65504.0, 70000.0, float("nan")])]
  [half] = packing.widen(packing.narrow(given, tf.float16), given)
  assert half.numpy()[:2].tolist() == [65504.0, float("inf")]
  [brain] = packing.widen(packing.narrow(given, tf.bfloat16), given)
  assert np.isfinite(brain.numpy()[:2]).all()
  assert np.isnan(half.numpy()[2])
  assert np.isnan(brain.numpy()[2])


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
