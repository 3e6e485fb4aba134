"""Clipping against its formulas, for dense and sparse gradients alike.

nonfinite_test.py tests that clipping does not hide infinities.
"""

from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer

INF, NAN = float("inf"), float("nan")
KINDS = ("clipnorm", "global_clipnorm", "clipvalue")

finite = st.floats(-1e3, 1e3, width=32)
arrays = st.lists(finite, min_size=1, max_size=5).map(
  lambda values: np.array(values, np.float32)
)
limits = st.floats(0.125, 100, width=32)


def clip(grads: Sequence[Any], **limit: Any) -> list[np.ndarray]:
  """Returns what a step with learning rate 1 subtracts from zeros."""
  variables = []
  for grad in grads:
    is_sparse = isinstance(grad, tf.IndexedSlices)
    shape = grad.dense_shape if is_sparse else getattr(grad, "shape", [])
    dtype = tf.float32 if grad is None else grad.dtype
    variables.append(tf.Variable(tf.zeros(shape, dtype)))
  optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(1.0), "sum", **limit)
  optimizer.build(variables)
  optimizer.apply_gradients(zip(grads, variables, strict=True))
  return [0.0 - variable.numpy() for variable in variables]


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


def dense_of(grad: tf.IndexedSlices) -> np.ndarray:
  """Returns the dense value of rows, of which some may have one index."""
  dense = np.zeros(grad.dense_shape, np.float32)
  np.add.at(dense, grad.indices.numpy(), grad.values.numpy())
  return dense


def clip_one(values: list[float], kind: str, dtype: Any = tf.float32) -> Any:
  """Returns one gradient, clipped to 1."""
  [clipped] = clip([tf.constant(values, dtype)], **{kind: 1.0})
  return clipped.tolist()


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=40)
@hypothesis.given(grads=st.lists(arrays, min_size=1, max_size=4), limit=limits)
def test_dense_gradients_follow_the_formula(
  kind: str, grads: list[np.ndarray], limit: float
) -> None:
  """A gradient that is None stays None."""
  clipped = clip([None, *map(tf.constant, grads)], **{kind: limit})
  wanted = [np.zeros([]), *expected(grads, kind, limit)]
  for grad, want in zip(clipped, wanted, strict=True):
    np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=40)
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
  other = rng.normal(size=3).astype(np.float32)
  clipped = clip([slices, tf.constant(other)], **{kind: limit})
  wanted = expected([dense_of(slices), other], kind, limit)
  for grad, want in zip(clipped, wanted, strict=True):
    np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-6)


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
  """A norm never makes a number that is not finite look finite."""
  np.testing.assert_equal(clip_one(values, kind), clipped)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_dtypes(kind: str) -> None:
  dtypes = [tf.float32, tf.float16, tf.bfloat16, tf.float64]
  clipped = clip([tf.constant([4.0], d) for d in dtypes], **{kind: 1.0})
  wanted = 0.5 if kind == "global_clipnorm" else 1.0
  assert [float(grad[0]) for grad in clipped] == [wanted] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_has_the_dtype_of_the_gradient(kind: str) -> None:
  """Float32 cannot represent 0.1 as exactly as float64."""
  [clipped] = clip([tf.constant([4.0], tf.float64)], **{kind: 0.1})
  np.testing.assert_allclose(clipped, [0.1], rtol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_float16_norm_whose_square_overflows(kind: str) -> None:
  """The norm 300 fits into float16, and its square does not.

  The result must contain neither 0 nor NaN.
  """
  assert clip_one([300.0, 0.0], kind, tf.float16) == [1.0, 0.0]


@training.in_both
def test_ours_clips_before_the_sum_and_opt_after(which: str) -> None:
  """And so does a user, between `compute_gradients` and `apply_gradients`."""
  library, package = training.KERASES[which]
  strategy = testbed.mirrored(2)
  for ours, opt, own, total in (
    (None, None, None, 9.0),
    (0.0, None, None, 9.0),  # As in Keras, 0 does not clip.
    (2.0, None, None, 3.0),
    (None, 2.5, None, 2.5),
    (4.0, 3.5, None, 3.5),
    (None, None, 6.0, 7.0),
  ):
    with strategy.scope():
      weight = testbed.variable(0.0, library=library)
      optimizer = package.CrossShardOptimizer(
        library.optimizers.SGD(1.0, clipvalue=opt), "sum", clipvalue=ours
      )
      optimizer.build([weight])

    def step(
      slope: Any,
      optimizer: Any = optimizer,
      weight: Any = weight,
      own: Any = own,
    ) -> None:
      [(grad, _)] = optimizer.compute_gradients(
        lambda: slope * weight, [weight]
      )
      if own:
        grad = tf.minimum(grad, own)
      optimizer.apply_gradients([(grad, weight)])

    training.on_rows(strategy, step, eager=True)([1.0, 8.0])
    assert testbed.copies(weight) == [-total, -total]
