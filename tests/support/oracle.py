"""An oracle in NumPy: the optimizers' formulas, sums over groups, and rows.

It shares no code with the package or with Keras. The formulas are those of the
papers, with Keras' defaults. Each receives the settings (under Keras' names),
the weights, the gradients, the number of the step and the slots. It changes the
slots and returns the new weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support import testbed

Numbers = np.ndarray[Any, Any]
Formula = Callable[[Any, Numbers, Numbers, int, list[Numbers]], Numbers]


def sgd(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Numbers:
  momentum = s.get("momentum", 0.0)
  m[0] = momentum * m[0] - s["learning_rate"] * g
  if s.get("nesterov"):
    return w + momentum * m[0] - s["learning_rate"] * g
  return w + m[0]


def adam(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Numbers:
  w = w - w * s.get("weight_decay", 0.0) * s["learning_rate"]
  m[0] = 0.9 * m[0] + 0.1 * g
  m[1] = 0.999 * m[1] + 0.001 * g * g
  rate = s["learning_rate"] * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
  return w - rate * m[0] / (np.sqrt(m[1]) + 1e-7)


def adamax(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Any:
  m[0] = 0.9 * m[0] + 0.1 * g
  m[1] = np.maximum(0.999 * m[1], np.abs(g))
  return w - s["learning_rate"] * m[0] / ((1 - 0.9**t) * (m[1] + 1e-7))


def rmsprop(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Any:
  m[0] = 0.9 * m[0] + 0.1 * g * g
  m[1] = 0.9 * m[1] + 0.1 * g
  spread = m[0] - (m[1] ** 2 if s.get("centered") else 0)
  step = s["learning_rate"] * g / np.sqrt(spread + 1e-7)
  m[2] = s.get("momentum", 0.0) * m[2] + step
  return w - m[2]


def adadelta(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Any:
  m[0] = 0.95 * m[0] + 0.05 * g * g
  change = -np.sqrt(m[1] + 1e-7) * g / np.sqrt(m[0] + 1e-7)
  m[1] = 0.95 * m[1] + 0.05 * change * change
  return w + s["learning_rate"] * change


def ftrl(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Any:
  rate, l1 = s["learning_rate"], s.get("l1_regularization_strength", 0.0)
  power = -s.get("learning_rate_power", -0.5)
  before = m[0]
  shrinkage = s.get("l2_shrinkage_regularization_strength", 0.0)
  m[0] = before + g * g
  m[1] = m[1] + g + 2 * shrinkage * w
  m[1] = m[1] - (m[0] ** power - before**power) / rate * w
  l2 = s.get("l2_regularization_strength", 0.0) + s.get("beta", 0) / (2 * rate)
  return (np.clip(m[1], -l1, l1) - m[1]) / (m[0] ** power / rate + 2 * l2)


def nadam(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Any:
  u, u_next = (0.9 * (1 - 0.5 * 0.96**k) for k in (t, t + 1))
  m[0] = 0.9 * m[0] + 0.1 * g
  m[1] = 0.999 * m[1] + 0.001 * g * g
  product = np.prod([0.9 * (1 - 0.5 * 0.96**k) for k in range(1, t + 1)])
  mean = u_next * m[0] / (1 - u_next * product) + (1 - u) * g / (1 - product)
  square = m[1] / (1 - 0.999**t)
  return w - s["learning_rate"] * mean / (np.sqrt(square) + 1e-7)


def adagrad(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Any:
  m[0] = m[0] + g * g
  return w - s["learning_rate"] * g / np.sqrt(m[0] + 1e-7)


def lion(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Any:
  sign = np.sign(0.9 * m[0] + 0.1 * g)
  m[0] = 0.99 * m[0] + 0.01 * g
  return w - s["learning_rate"] * sign


def first_slots(formula: Formula, like: Numbers) -> list[Numbers]:
  """Returns the slots of a formula before the first step."""
  first = 0.1 if formula in (adagrad, ftrl) else 0.0
  return [np.full_like(like, first), np.zeros_like(like), np.zeros_like(like)]


def gradient(
  kernel: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray
) -> list[np.ndarray]:
  """Returns the gradient of the mean loss of `training.Regression`, in float64.

  For n examples with the error `e = x W + b - y`, the gradients are
  `d/dW = x^T e / n` and `d/db = sum(e) / n`.
  """
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
  formula = adam if update == "Adam" else sgd
  slots = [first_slots(formula, weight) for weight in weights]
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


Batch = tuple[Numbers, Numbers]  # indices [k], rows [k, width]
RATE = 0.125  # of `train_rows`
# For each class, the formula, and settings that differ from Keras' defaults.
KINDS: dict[str, tuple[Formula, dict[str, float]]] = {
  "SGD": (sgd, {"momentum": 0.5}),
  "Adagrad": (adagrad, {}),
  "Adam": (adam, {}),
  "AdamW": (adam, {"weight_decay": 0.25}),
  "Adamax": (adamax, {}),
  "Nadam": (nadam, {}),
  "RMSprop": (rmsprop, {}),
  "Adadelta": (adadelta, {}),
  "Ftrl": (ftrl, {}),
  "Lion": (lion, {}),
}


def train_rows(kind: str, table: Numbers, batches: Sequence[Batch]) -> Numbers:
  """Trains a table in float64, where only rows in the batch change.

  Rows with the same index are added up.
  """
  table = table.astype(np.float64)
  formula, settings = KINDS[kind]
  settings = {"learning_rate": RATE, **settings}
  slots = first_slots(formula, table)
  for t, (indices, rows) in enumerate(batches, 1):
    unique = np.unique(indices)
    grad = np.zeros([len(unique), table.shape[1]])
    np.add.at(grad, np.searchsorted(unique, indices), rows)
    own = [slot[unique] for slot in slots]
    table[unique] = formula(settings, table[unique], grad, t, own)
    for slot, new in zip(slots, own, strict=True):
      slot[unique] = new
  return table
