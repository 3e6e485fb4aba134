"""An oracle in NumPy: group sums and updates written out by hand.

It shares no code with the package or with Keras. Gradients are those of
`testbed.Regression`: `d/dW = x^T e / n`, `d/db = sum(e) / n` with the error
`e = x W + b - y` of `n` examples.
"""

from collections.abc import Sequence

import numpy as np


def gradient(
  kernel: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray
) -> list[np.ndarray]:
  """The gradient of one replica's mean loss, in float64."""
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
  first = [np.zeros_like(w) for w in weights]
  second = [np.zeros_like(w) for w in weights]
  for step in range(len(x)):
    total = [np.zeros_like(w) for w in weights]
    for replica in members:
      for part, g in zip(
        total,
        gradient(*weights, x[step, replica], y[step, replica]),
        strict=True,
      ):
        part += scale * (g / len(members) if reduction == "mean" else g)
    for i, g in enumerate(total):
      if update == "SGD":
        weights[i] = weights[i] - 0.125 * g
      elif update == "Momentum":
        first[i] = 0.5 * first[i] - 0.125 * g
        weights[i] = weights[i] + first[i]
      elif update == "Adam":
        t = step + 1
        first[i] = 0.9 * first[i] + 0.1 * g
        second[i] = 0.999 * second[i] + 0.001 * g * g
        rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        weights[i] = weights[i] - rate * first[i] / (np.sqrt(second[i]) + 1e-7)
      else:
        raise ValueError(update)
  return weights
