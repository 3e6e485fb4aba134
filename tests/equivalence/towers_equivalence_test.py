"""Towers over k devices are one device on the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, towers_bed
from tests.support.towers_bed import FOUR, caller
from tf_cross_shard import TowerOptimizer, TowerSpec, replicate_model_fn

STEPS = 3
SHAPES = {"kernel": (3, 2), "bias": (2,), "last": (2, 2), "table": (16, 2)}
REDUCE = {"sum": tf.reduce_sum, "mean": tf.reduce_mean}


# Each returns one number for each example.
def _quadratic(kernel: Any, bias: Any, *, x: Any) -> Any:
  return tf.reduce_sum((tf.matmul(x["x"], kernel) + bias - x["y"]) ** 2, axis=1)


def _network(kernel: Any, bias: Any, last: Any, *, x: Any) -> Any:
  hidden = tf.tanh(tf.matmul(x["x"], kernel) + bias)
  return tf.reduce_sum((tf.matmul(hidden, last) - x["y"]) ** 2, axis=1)


def _lookup(table: Any, *, x: Any) -> Any:
  return tf.reduce_sum((tf.gather(table, x["ids"]) - x["y"]) ** 2, axis=1)


LOSSES: dict[str, tuple[Callable[..., Any], Sequence[str]]] = {
  "quadratic": (_quadratic, ["kernel", "bias"]),
  "network": (_network, ["kernel", "bias", "last"]),
  "lookup": (_lookup, ["table"]),
}


# Whole numbers and SGD, whose means over 1, 2 and 4 are exact, come first.
@pytest.mark.parametrize(
  ("loss", "reduction", "count", "rows", "name", "mode", "tolerance"),
  [
    ("quadratic", "sum", 4, 4, "SGD", "eager", 0.0),
    ("quadratic", "mean", 2, 2, "SGD", "function", 0.0),
    ("lookup", "mean", 2, 4, "SGD", "function", 0.0),
    ("lookup", "sum", 4, 8, "SGD", "eager", 0.0),
    ("network", "mean", 4, 12, "Adam", "eager", 2e-4),
    ("lookup", "mean", 3, 9, "Adam", "function", 2e-4),
    ("quadratic", "sum", 4, 4, "RMSprop", "eager", 2e-4),
    ("network", "mean", 2, 6, "Ftrl", "function", 2e-4),
  ],
)
def test_towers_are_one_device(
  loss: str,
  reduction: str,
  count: int,
  rows: int,
  name: str,
  mode: str,
  tolerance: float,
) -> None:
  rng = np.random.default_rng([count, rows])

  def numbers(*shape: int) -> np.ndarray:
    drawn = rng.normal(size=shape)
    return (drawn if tolerance else np.round(2 * drawn)).astype("float32")

  function, names = LOSSES[loss]
  start = {v: numbers(*SHAPES[v]) for v in names}
  batches = [
    {
      "x": numbers(rows, 3),
      "y": numbers(rows, 2),
      # Of a row that comes twice plain Keras' Adam adds up the squares.
      "ids": rng.permutation(16)[:rows].astype("int32"),
    }
    for _ in range(STEPS)
  ]
  parts = np.split(np.hstack([batches[0]["x"], batches[0]["y"]]), count)
  assert not any(np.array_equal(parts[0], part) for part in parts[1:])

  def total(variables: Sequence[Any], x: Any) -> Any:
    return REDUCE[reduction](function(*map(towers_bed.native, variables), x=x))

  plain, towers = ([testbed.variable(start[v], v) for v in names] for _ in "12")
  alone = testbed.OPTIMIZERS[name]()
  optimizer = TowerOptimizer(testbed.OPTIMIZERS[name]())
  testbed.build(alone, plain)
  testbed.build(optimizer, towers)
  kinds: list[Any] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = total(towers, features)
    pairs = optimizer.compute_gradients(loss, towers)
    kinds.extend(type(grad) for grad, _ in pairs)
    return TowerSpec(mode, loss, optimizer.apply_gradients(pairs))

  replicated = replicate_model_fn(model_fn, reduction, FOUR[:count])
  step = caller(lambda x: replicated(x).loss, mode)
  for x in batches:
    with tf.GradientTape() as tape:
      expected = total(plain, x)
    grads = tape.gradient(expected, [towers_bed.native(v) for v in plain])
    alone.apply_gradients(zip(grads, plain, strict=True))
    np.testing.assert_allclose(step(x), expected, rtol=1e-4, atol=tolerance)
  assert int(optimizer.iterations) == STEPS
  assert (tf.IndexedSlices in kinds) == (loss == "lookup")
  for tower, other, first in zip(towers, plain, start.values(), strict=True):
    assert np.any(first != tower.numpy())
    np.testing.assert_allclose(
      tower.numpy(), other.numpy(), rtol=tolerance, atol=tolerance
    )


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
