"""The plan of successive halving: how many trials are trained how long."""

import math
from typing import NamedTuple


class Rung(NamedTuple):
  """The number of trials of a rung, and their last epoch."""

  trials: int
  epochs: int


def rungs(
  num_trials: int, num_groups: int, factor: int, epochs: int
) -> list[Rung]:
  """Returns the rungs; the last rung has no more trials than there are groups.

  No rung has fewer trials than groups, because groups without a trial would
  compute for nothing.

  >>> [tuple(rung) for rung in rungs(16, 4, 2, 9)]
  [(16, 2), (8, 4), (4, 9)]

  One in `factor` trials continues to the next rung. `epochs` is the last epoch
  of the last rung.
  """
  # Each rung has 1 / factor of the trials of the rung before.
  counts = [num_trials]
  while counts[-1] > num_groups:
    counts.append(max(num_groups, math.ceil(counts[-1] / factor)))
  last = len(counts) - 1
  if epochs < factor**last:
    raise ValueError(
      f"`epochs` must be at least {factor**last}, because {num_trials} trials"
      f" in {num_groups} groups take {last + 1} rungs with factor {factor}; got"
      f" {epochs}."
    )
  # Each rung ends at 1 / factor of the epochs of the rung after.
  return [
    Rung(count, epochs // factor ** (last - i))
    for i, count in enumerate(counts)
  ]
