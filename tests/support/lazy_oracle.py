"""The lazy update of a table in NumPy: only rows in the batch change.

All numbers are float64.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support import formulas

Array = np.ndarray[Any, Any]
Batch = tuple[Array, Array]  # indices [k], rows [k, width]

RATE = 0.125
# For each class, the formula, and settings that differ from Keras' defaults.
KINDS: dict[str, tuple[formulas.Formula, dict[str, float]]] = {
  "SGD": (formulas.sgd, {"momentum": 0.5}),
  "Adagrad": (formulas.adagrad, {}),
  "Adam": (formulas.adam, {}),
  "AdamW": (formulas.adam, {"weight_decay": 0.25}),
  "Adamax": (formulas.adamax, {}),
  "Nadam": (formulas.nadam, {}),
  "RMSprop": (formulas.rmsprop, {}),
  "Adadelta": (formulas.adadelta, {}),
  "Ftrl": (formulas.ftrl, {}),
  "Lion": (formulas.lion, {}),
}


def train(kind: str, table: Array, batches: Sequence[Batch]) -> Array:
  """Takes a step for each batch, and returns the table.

  Rows with the same index are added up.
  """
  table = table.astype(np.float64)
  formula, settings = KINDS[kind]
  settings = {"learning_rate": RATE, **settings}
  slots = formulas.first_slots(formula, table)
  for t, (indices, rows) in enumerate(batches, 1):
    unique = np.unique(indices)
    grad = np.zeros([len(unique), table.shape[1]])
    np.add.at(grad, np.searchsorted(unique, indices), rows)
    own = [slot[unique] for slot in slots]
    table[unique] = formula(settings, table[unique], grad, t, own)
    for slot, new in zip(slots, own, strict=True):
      slot[unique] = new
  return table
