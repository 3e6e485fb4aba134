"""Gradients in eight bits with error feedback, written out in NumPy.

It shares no code with the package.
"""

from collections.abc import Sequence

import numpy as np

BLOCK = 256


def rounded(numbers: np.ndarray) -> np.ndarray:
  """Float32 numbers in int8, in blocks of 256, and back."""
  flat = np.zeros(-(-numbers.size // BLOCK) * BLOCK, "f")
  flat[: numbers.size] = numbers.ravel()
  rows = flat.reshape(-1, BLOCK)
  scale = np.abs(rows).max(1, keepdims=True) / np.float32(127)
  whole = np.rint(np.divide(rows, scale, out=0 * rows, where=scale > 0))
  return (whole.astype("i1").astype("f") * scale).ravel()[: numbers.size]


class Wire:
  """Sums in groups, and what is left on each replica.

  Attributes:
    left: [replicas, size].
  """

  def __init__(self, groups: Sequence[Sequence[int]], size: int) -> None:
    self._groups = [sorted(members) for members in groups]
    self.left = np.zeros([sum(map(len, groups)), size], "f")

  def sum(self, grads: np.ndarray, in_parts: bool = False) -> np.ndarray:
    """The sum that each replica receives of gradients [replicas, size].

    With `in_parts` each member has the sum of its part as it is, and nobody
    else has it; else parts are whole blocks, and all are sent to all.
    """
    sums = np.zeros_like(self.left)
    for members in self._groups:
      values = grads[members].astype("f") + self.left[members]
      count, size = values.shape
      part = -(-size // count)
      if not in_parts:
        part = -(-part // BLOCK) * BLOCK
      for k in range(count):
        at = slice(min(size, k * part), min(size, (k + 1) * part))
        others = [(k + i) % count for i in range(1, count)]
        travelled = np.zeros([count, at.stop - at.start], "f")
        for i in others:
          travelled[i] = rounded(values[i, at])
          self.left[members[i], at] = values[i, at] - travelled[i]
        total = values[k, at] + travelled[others].sum(0)
        result = total if in_parts else rounded(total)
        self.left[members[k], at] = total - result
        sums[members, at] = result
    return sums
