"""Clipping against its formulas, for dense and sparse gradients alike."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard._src.core.gradients import clipping

INF, NAN = float("inf"), float("nan")
KINDS = ("clipnorm", "global_clipnorm", "clipvalue")

finite = st.floats(-1e3, 1e3, width=32)
arrays = st.lists(finite, min_size=1, max_size=5).map(
  lambda values: np.array(values, np.float32)
)
limits = st.floats(0.125, 100, width=32)


def expected(
  grads: list[np.ndarray], kind: str, limit: float
) -> list[np.ndarray]:
  """The formulas of the docstring, in float64."""
  wide = [grad.astype(np.float64) for grad in grads]
  if kind == "clipvalue":
    return [np.minimum(np.maximum(grad, -limit), limit) for grad in wide]
  norms = [np.sqrt(np.sum(grad**2)) for grad in wide]
  if kind == "global_clipnorm":
    norms = [np.sqrt(np.sum(np.square(norms)))] * len(norms)
  return [
    grad * min(1.0, limit / norm) if norm else grad
    for grad, norm in zip(wide, norms, strict=True)
  ]


def dense_of(grad: Any, rows: int) -> np.ndarray:
  """The dense value of a gradient of either kind."""
  if not isinstance(grad, tf.IndexedSlices):
    return grad.numpy()
  dense = np.zeros([rows, *grad.values.shape[1:]], np.float32)
  np.add.at(dense, grad.indices.numpy(), grad.values.numpy())
  return dense


def clip_one(values: list[float], kind: str, dtype: Any = tf.float32) -> Any:
  """Returns one gradient, clipped to 1."""
  [clipped] = clipping.clip([tf.constant(values, dtype)], **{kind: 1.0})
  return clipped.numpy().tolist()


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=50)
@hypothesis.given(grads=st.lists(arrays, min_size=1, max_size=4), limit=limits)
def test_dense_gradients_follow_the_formula(
  kind: str, grads: list[np.ndarray], limit: float
) -> None:
  clipped = clipping.clip([tf.constant(g) for g in grads], **{kind: limit})
  wanted = expected(grads, kind, limit)
  for grad, want in zip(clipped, wanted, strict=True):
    assert grad.dtype == tf.float32
    np.testing.assert_allclose(grad.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=50)
@hypothesis.given(
  indices=st.lists(st.integers(0, 3), min_size=1, max_size=8),
  seed=st.integers(0, 99),
  limit=limits,
)
def test_sparse_gradients_are_clipped_as_the_dense_ones_they_stand_for(
  kind: str, indices: list[int], seed: int, limit: float
) -> None:
  rng = np.random.default_rng(seed)
  values = rng.integers(-20, 20, [len(indices), 2]).astype(np.float32)
  slices = tf.IndexedSlices(
    tf.constant(values), tf.constant(indices), tf.constant([4, 2])
  )
  other = tf.constant(rng.normal(size=3), tf.float32)
  table = tf.constant(dense_of(slices, 4))
  clipped = clipping.clip([slices, other], **{kind: limit})
  wanted = clipping.clip([table, other], **{kind: limit})
  assert isinstance(clipped[0], tf.IndexedSlices)
  assert clipped[0].dense_shape is slices.dense_shape
  for grad, want in zip(clipped, wanted, strict=True):
    np.testing.assert_allclose(dense_of(grad, 4), want.numpy(), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_none_passes_and_the_order_stays(kind: str) -> None:
  first, last = tf.constant([3.0, 4.0]), tf.constant([0.5])
  clipped = clipping.clip([None, first, None, last], **{kind: 100.0})
  assert clipped[0] is clipped[2] is None
  np.testing.assert_allclose(clipped[1].numpy(), [3.0, 4.0], rtol=1e-6)
  np.testing.assert_allclose(clipped[3].numpy(), [0.5], rtol=1e-6)
  assert clipping.clip([None, None], **{kind: 1.0}) == [None, None]
  assert clipping.clip([], **{kind: 1.0}) == []


def test_without_a_limit_clip_returns_the_same_objects() -> None:
  """This holds for gradients with duplicate rows, too."""
  slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([1, 1]))
  grads = [tf.constant([1e9]), None, slices]
  clipped = clipping.clip(grads)
  assert clipped is not grads
  assert all(a is b for a, b in zip(clipped, grads, strict=True))


# What is not finite is not made to look finite, but for a value's limit.


@pytest.mark.parametrize(
  ("kind", "values", "clipped"),
  [
    ("clipnorm", [NAN, 1.0], [NAN, NAN]),
    ("global_clipnorm", [NAN, 1.0], [NAN, NAN]),
    ("clipvalue", [NAN, 2.0], [NAN, 1.0]),
    # An infinite norm leaves nothing of the finite elements.
    ("clipnorm", [INF, 1.0], [NAN, 0.0]),
    ("global_clipnorm", [INF, 1.0], [NAN, NAN]),
    ("clipvalue", [INF, -INF], [1.0, -1.0]),
    ("clipvalue", [0.25, -0.5], [0.25, -0.5]),
    ("clipnorm", [0.0, 0.0], [0.0, 0.0]),
  ],
)
def test_infinity_and_nan(
  kind: str, values: list[float], clipped: list[float]
) -> None:
  np.testing.assert_equal(clip_one(values, kind), clipped)


def test_keep_infinite_does_not_clip_infinity() -> None:
  grads = [tf.constant([INF, -2.0])]
  [kept] = clipping.clip(grads, clipvalue=1.0, keep_infinite=True)
  assert kept.numpy().tolist() == [INF, -1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_gradient_keeps_its_dtype(kind: str) -> None:
  dtypes = [tf.float32, tf.float16, tf.bfloat16, tf.float64]
  grads = [tf.constant([4.0], dtype) for dtype in dtypes]
  clipped = clipping.clip(grads, **{kind: 1.0})
  assert [g.dtype for g in clipped] == dtypes
  wanted = 0.5 if kind == "global_clipnorm" else 1.0
  assert [float(g[0]) for g in clipped] == [wanted] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_has_the_dtype_of_the_gradient(kind: str) -> None:
  """The limit is computed in the gradient's dtype.

  A loss scale is a float32 tensor, which cannot represent 0.1 as exactly as
  float64.
  """
  grad = tf.constant([4.0], tf.float64)
  for limit, wanted in ((0.1, 0.1), (tf.constant(0.5), 0.5)):
    [clipped] = clipping.clip([grad], **{kind: limit})
    np.testing.assert_allclose(clipped.numpy(), [wanted], rtol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_float16_norm_whose_square_overflows(kind: str) -> None:
  """The norm 300 fits into float16, and its square does not.

  The result must contain neither 0 nor NaN.
  """
  assert clip_one([300.0, 0.0], kind, tf.float16) == [1.0, 0.0]
