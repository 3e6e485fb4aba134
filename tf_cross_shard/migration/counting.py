"""How many steps TensorFlow 1 had made, by what Adam multiplied meanwhile.

Version 1 kept the powers of Adam's betas and multiplied them after each step:

    beta1_power = beta_1 ** (steps + 1)        in float32, factor by factor

The same product, multiplied again here, meets the stored one to the bit.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import numpy as np

from tf_cross_shard.replica_state import archive

# Below, float32 soon has no more than a few bits, and then none.
SMALLEST: Final = 1e-30
_MOST_STEPS: Final = 10**7


class Power(NamedTuple):
  """A power that a checkpoint holds."""

  name: str
  value: Any
  beta: float

  @property
  def is_useful(self) -> bool:
    """Whether it still tells one step from the next."""
    return bool(self.value > SMALLEST) and len(self._products) > 0

  def steps(self) -> int | None:
    """The number of steps after which version 1 has this power."""
    if not self.is_useful:
      return None
    steps = int(np.abs(self._products - self.value).argmin())
    # Where errors may have grown as large as a step, only the same bits count.
    error = self._error(steps)
    if error > (1 - self.beta) / 4:
      error = 0.0
    return steps if self._distance(steps) <= error else None

  def fits(self, steps: int) -> bool:
    """Whether this is the power after so many steps."""
    products = self._products
    if not len(products):
      return True  # A beta of 0 or 1 tells nothing.
    if not self.is_useful:
      return steps >= len(products)
    if not 0 <= steps < len(products):
      return False
    exactly = self.steps()
    if exactly is not None:
      return exactly == steps
    return self._distance(steps) <= self._error(steps)

  @property
  def _products(self) -> archive.Array:
    """The power after each number of steps, while it is useful."""
    return _products(self.beta, np.asarray(self.value).dtype)

  def _distance(self, steps: int) -> float:
    """How far it is from what it should be, relative to that."""
    product = float(self._products[steps])
    return abs(float(self.value) - product) / product

  def _error(self, steps: int) -> float:
    """What rounding each product may have added up to, relative."""
    epsilon = float(np.finfo(np.asarray(self.value).dtype).eps)
    return (steps + 1) * epsilon / 2


@functools.lru_cache(maxsize=4)
def _products(beta: float, dtype: np.dtype[Any]) -> archive.Array:
  """A number, its square, and so on, each rounded, while they are useful."""
  factor = dtype.type(beta)
  if not 0 < factor < 1:
    return np.zeros(0, dtype)
  count = math.ceil(math.log(SMALLEST) / math.log(float(factor)))
  if count > _MOST_STEPS:
    return np.zeros(0, dtype)
  products = np.multiply.accumulate(np.full(count, factor, dtype))
  return np.asarray(products[products > SMALLEST])
