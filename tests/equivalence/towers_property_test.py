"""Towers over k devices are one device on the whole batch, whatever is drawn.

Losses, data, numbers of towers, reductions and optimizers are drawn; a seed is
the name of a case.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, towers_bed
from tests.support.towers_bed import FOUR, MODES, caller
from tf_cross_shard import TowerOptimizer, TowerSpec, replicate_model_fn

STEPS = 3
WHOLE, ANY = range(6), range(4, 12)  # seeds
Loss = Callable[[Sequence[Any], Any], Any]


def _linear(weights: Sequence[Any], x: Any) -> Any:
  """One number for each example."""
  return tf.reduce_sum(tf.matmul(x["x"], weights[0]) * x["y"], axis=1)


def _quadratic(weights: Sequence[Any], x: Any) -> Any:
  error = tf.matmul(x["x"], weights[0]) + weights[1] - x["y"]
  return tf.reduce_sum(error * error, axis=1)


def _network(weights: Sequence[Any], x: Any) -> Any:
  hidden = tf.tanh(tf.matmul(x["x"], weights[0]) + weights[1])
  error = tf.matmul(hidden, weights[2]) - x["y"]
  return tf.reduce_sum(error * error, axis=1)


def _lookup(weights: Sequence[Any], x: Any) -> Any:
  error = tf.gather(weights[3], x["ids"]) - x["y"]
  return tf.reduce_sum(error * error, axis=1)


LOSSES: dict[str, tuple[Loss, list[int]]] = {
  "linear": (_linear, [0]),
  "quadratic": (_quadratic, [0, 1]),
  "network": (_network, [0, 1, 2]),
  "lookup": (_lookup, [3]),
}
REDUCE = {"sum": tf.reduce_sum, "mean": tf.reduce_mean}


@dataclasses.dataclass
class Case:
  """What is drawn."""

  loss: str
  reduction: str
  count: int
  optimizer: str
  start: list[np.ndarray]
  batches: list[dict[str, np.ndarray]]

  def variables(self) -> list[Any]:
    """New weights, those that the loss has."""
    _, used = LOSSES[self.loss]
    return [testbed.variable(self.start[i], f"weight_{i}") for i in used]

  def total(self, variables: Sequence[Any], x: Any) -> Any:
    """The loss over the examples handed in."""
    loss, used = LOSSES[self.loss]
    weights: list[Any] = [None] * len(self.start)
    for i, variable in zip(used, variables, strict=True):
      weights[i] = towers_bed.native(variable)
    return REDUCE[self.reduction](loss(weights, x))


def _draw(seed: int, optimizers: Sequence[str], whole: bool) -> Case:
  """A case; of whole numbers, and then of means that are exact."""
  rng = np.random.default_rng([seed, whole])
  count = int(rng.choice([1, 2, 4] if whole else [1, 2, 3, 4]))
  rows = count * int(rng.choice([1, 2] if whole else [1, 2, 3]))

  def numbers(*shape: int) -> np.ndarray:
    drawn = rng.integers(-2, 3, shape) if whole else rng.normal(size=shape)
    return drawn.astype("float32")

  losses = ("linear", "quadratic", "lookup") if whole else tuple(LOSSES)
  return Case(
    loss=str(rng.choice(losses)),
    reduction=str(rng.choice(["sum", "mean"])),
    count=count,
    optimizer=str(rng.choice(list(optimizers))),
    start=[numbers(3, 2), numbers(2), numbers(2, 2), numbers(16, 2)],
    batches=[
      {
        "x": numbers(rows, 3),
        "y": numbers(rows, 2),
        # Of a row that comes twice plain Keras' Adam adds up the squares.
        "ids": rng.permutation(16)[:rows].astype("int32"),
      }
      for _ in range(STEPS)
    ],
  )


def _train_plain(case: Case, optimizer: Any) -> tuple[list[Any], list[float]]:
  """One device, the whole batch."""
  variables, losses = case.variables(), []
  testbed.build(optimizer, variables)
  for x in case.batches:
    with tf.GradientTape() as tape:
      loss = case.total(variables, x)
    grads = tape.gradient(loss, [towers_bed.native(v) for v in variables])
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    losses.append(float(loss))
  return variables, losses


def _train_towers(
  case: Case, opt: Any, mode: str
) -> tuple[list[Any], list[float], list[Any]]:
  """As many towers as were drawn."""
  variables, losses = case.variables(), []
  optimizer = TowerOptimizer(opt)
  testbed.build(optimizer, variables)
  kinds: list[Any] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = case.total(variables, features)
    pairs = optimizer.compute_gradients(loss, variables)
    kinds.extend(type(grad) for grad, _ in pairs)
    return TowerSpec(mode, loss, optimizer.apply_gradients(pairs))

  replicated = replicate_model_fn(model_fn, case.reduction, FOUR[: case.count])
  step = caller(lambda x: replicated(x).loss, mode)
  for x in case.batches:
    losses.append(float(step(x)))
  assert int(optimizer.iterations) == STEPS
  return variables, losses, kinds


def _check(case: Case, mode: str, tolerance: float) -> None:
  """Compares both."""
  make = testbed.OPTIMIZERS[case.optimizer]
  expected, losses = _train_plain(case, make())
  found, tower_losses, kinds = _train_towers(case, make(), mode)
  assert (tf.IndexedSlices in kinds) == (case.loss == "lookup")
  np.testing.assert_allclose(tower_losses, losses, rtol=1e-4, atol=tolerance)
  for one, other in zip(found, expected, strict=True):
    start = [s for s in case.start if s.shape == tuple(one.shape)]
    assert all(np.any(s != one.numpy()) for s in start)
    if tolerance:
      np.testing.assert_allclose(
        one.numpy(), other.numpy(), rtol=tolerance, atol=tolerance
      )
    else:
      np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("seed", WHOLE)
def test_exact_on_whole_numbers(seed: int) -> None:
  case = _draw(seed, ["SGD"], whole=True)
  _check(case, MODES[seed % 4 == 0], 0.0)


_FAVOURITES = ("SGD", "Momentum", "Adam")
_OTHERS = ("RMSprop", "Ftrl", "Lamb")


@pytest.mark.parametrize("name", _OTHERS)
def test_other_optimizers(name: str) -> None:
  seed = list(testbed.OPTIMIZERS).index(name)
  case = _draw(100 + seed, [name], whole=False)
  _check(case, MODES[seed % 3 == 0], 2e-4)


@pytest.mark.parametrize("seed", ANY)
def test_close_on_any_numbers(seed: int) -> None:
  case = _draw(seed, _FAVOURITES, whole=False)
  _check(case, MODES[seed % 4 == 0], 2e-4)


def test_what_is_drawn_is_of_every_kind() -> None:
  cases = [_draw(seed, _FAVOURITES, whole=False) for seed in ANY]
  whole = [_draw(seed, ["SGD"], whole=True) for seed in WHOLE]
  assert {case.loss for case in cases} == set(LOSSES)
  assert {case.count for case in cases} == {1, 2, 3, 4}
  assert {case.optimizer for case in cases} == set(_FAVOURITES)
  for each in (cases, whole):
    assert {case.reduction for case in each} == set(REDUCE)
    several = [case for case in each if case.count > 1]
    assert {case.reduction for case in several} == set(REDUCE)
    assert "lookup" in {case.loss for case in several}
  for case in cases:
    for x in case.batches:
      parts = np.split(x["y"], case.count)
      assert not any(np.array_equal(parts[0], part) for part in parts[1:])


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
