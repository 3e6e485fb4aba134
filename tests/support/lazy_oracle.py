"""The lazy update of a table in NumPy: only rows that occur, in float64.

Formulas as in the papers and in Keras' documentation, with Keras' defaults; it
imports nothing of the package.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Batch = tuple[Array, Array]  # indices [k], rows [k, width]

# Keras' settings, by class: those that differ between classes.
RATE = 0.125
SLOTS = {
  "SGD": 1,
  "Adagrad": 1,
  "Adam": 2,
  "AdamW": 2,
  "Adamax": 2,
  "Nadam": 2,
  "RMSprop": 1,
  "Adadelta": 2,
  "Ftrl": 2,
  "Lion": 1,
}
STARTS = {"Adagrad": [0.1], "Ftrl": [0.1, 0.0]}


def _step(
  kind: str, w: Array, g: Array, slots: list[Array], t: int, product: float
) -> tuple[Array, list[Array]]:
  """One update of some rows in the t-th step; returns weights and slots."""
  b1, b2, eps, rate = 0.9, 0.999, 1e-7, RATE
  if kind == "SGD":  # momentum 0.5
    m = 0.5 * slots[0] - rate * g
    return w + m, [m]
  if kind == "Adagrad":
    a = slots[0] + g**2
    return w - rate * g / np.sqrt(a + eps), [a]
  if kind == "RMSprop":
    v = 0.9 * slots[0] + 0.1 * g**2
    return w - rate * g / np.sqrt(v + eps), [v]
  if kind == "Adadelta":
    a = 0.95 * slots[0] + 0.05 * g**2
    delta = -np.sqrt(slots[1] + eps) / np.sqrt(a + eps) * g
    return w + rate * delta, [a, 0.95 * slots[1] + 0.05 * delta**2]
  if kind == "Lion":
    sign = np.sign(0.9 * slots[0] + 0.1 * g)
    return w - rate * sign, [0.99 * slots[0] + 0.01 * g]
  if kind == "Ftrl":
    a = slots[0] + g**2
    linear = slots[1] + g - (np.sqrt(a) - np.sqrt(slots[0])) / rate * w
    return -linear / (np.sqrt(a) / rate), [a, linear]
  m = b1 * slots[0] + (1 - b1) * g
  if kind == "Adamax":
    u = np.maximum(b2 * slots[1], np.abs(g))
    return w - rate / (1 - b1**t) * m / (u + eps), [m, u]
  v = b2 * slots[1] + (1 - b2) * g**2
  if kind == "Nadam":
    u_now = b1 * (1 - 0.5 * 0.96**t)
    u_next = b1 * (1 - 0.5 * 0.96 ** (t + 1))
    now, after = product * u_now, product * u_now * u_next
    mean = u_next * m / (1 - after) + (1 - u_now) * g / (1 - now)
    root = np.sqrt(v / (1 - b2**t)) + eps
    return w - rate * mean / root, [m, v]
  if kind == "AdamW":  # weight_decay=0.25
    w = w * (1 - 0.25 * rate)
  alpha = rate * np.sqrt(1 - b2**t) / (1 - b1**t)
  return w - alpha * m / (np.sqrt(v) + eps), [m, v]


def train(kind: str, table: Array, batches: Sequence[Batch]) -> Array:
  """Returns the table after a step for each batch; rows of one index add up."""
  table = table.astype(np.float64)
  starts = STARTS.get(kind, [0.0] * SLOTS[kind])
  slots = [np.full_like(table, start) for start in starts]
  product = 1.0
  for t, (indices, rows) in enumerate(batches, 1):
    unique = np.unique(indices)
    grad = np.zeros([len(unique), table.shape[1]])
    np.add.at(grad, np.searchsorted(unique, indices), rows)
    table[unique], news = _step(
      kind, table[unique], grad, [s[unique] for s in slots], t, product
    )
    for slot, new in zip(slots, news, strict=True):
      slot[unique] = new
    product *= 0.9 * (1 - 0.5 * 0.96**t)
  return table
