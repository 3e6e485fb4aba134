"""An oracle in NumPy: sums over groups and updates, written by hand.

It shares no code with the package or with Keras. Gradients are those of
`training.Regression`: `d/dW = x^T e / n`, `d/db = sum(e) / n` with the error
`e = x W + b - y` of `n` examples.
"""

from collections.abc import Sequence

import numpy as np

from tests.support import formulas, testbed


def gradient(
  kernel: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray
) -> list[np.ndarray]:
  """Returns the gradient of one replica's mean loss, in float64."""
  error = x.astype(np.float64) @ kernel + bias - y
  return [x.T @ error / len(x), error.sum(axis=0) / len(x)]


def train(
  x: np.ndarray,
  y: np.ndarray,
  initial: Sequence[np.ndarray],
  members: Sequence[int],
  reduction: str,
  update: str,
  scale: float = 1.0,
) -> list[np.ndarray]:
  """Trains one group on `scale` times the loss.

  `x` is [steps, replicas, examples, features].
  """
  weights = [value.astype(np.float64) for value in initial]
  formula = formulas.adam if update == "Adam" else formulas.sgd
  slots = [formulas.first_slots(formula, weight) for weight in weights]
  for step in range(len(x)):
    total = [np.zeros_like(w) for w in weights]
    for replica in members:
      for part, g in zip(
        total,
        gradient(*weights, x[step, replica], y[step, replica]),
        strict=True,
      ):
        part += scale * (g / len(members) if reduction == "mean" else g)
    weights = [
      formula(testbed.RATES[update], weight, grad, step + 1, own)
      for weight, grad, own in zip(weights, total, slots, strict=True)
    ]
  return weights
