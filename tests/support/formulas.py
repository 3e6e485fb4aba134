"""The optimizers' formulas in NumPy, as in the papers and with Keras' defaults.

Each function receives the settings (under Keras' names), the weights, the
gradients, the number of the step and the slots. It changes the slots and
returns the new weights. This module uses neither the package nor Keras.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

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


def amsgrad(s: Any, w: Numbers, g: Numbers, t: int, m: list[Numbers]) -> Any:
  m[0] = 0.9 * m[0] + 0.1 * g
  m[1] = 0.999 * m[1] + 0.001 * g * g
  m[2] = np.maximum(m[1], m[2])
  rate = s["learning_rate"] * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
  return w - rate * m[0] / (np.sqrt(m[2]) + 1e-7)


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
