"""Times the checks of groups of 65,536 replicas.

    python benchmarks/groups.py

The goal is less than 100 ms.
"""

import numpy as np
import timing

from tf_cross_shard import groups

_REPLICAS = 65_536
_ROUNDS = 20


def main() -> None:
  """Measures every way to a grouping, for few large groups and many small."""
  for size in (2, 256, _REPLICAS):
    lists = groups.contiguous(_REPLICAS, size).to_lists()
    array = np.array(lists, np.int32)
    taken = timing.interleave(
      {
        "Groups(lists)": lambda lists=lists: groups.Groups(lists),
        "Groups(array)": lambda array=array: groups.Groups(array),
        "contiguous": lambda size=size: groups.contiguous(_REPLICAS, size),
        "strided": lambda size=size: groups.strided(_REPLICAS, size),
      },
      _ROUNDS,
    )
    part = f"{_REPLICAS // size} groups of {size}"
    timing.show(timing.compare(part, taken, baselines=["contiguous"]))


if __name__ == "__main__":
  main()
