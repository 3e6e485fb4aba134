"""Drawings of a grouping."""

import itertools
from collections.abc import Sequence


def as_text(assignment: Sequence[Sequence[int]], width: int = 80) -> str:
  """Draws a grouping, replicas from left to right, one line per group.

  >>> print(as_text([[0, 2], [1, 3]]))
  replica  0  1  2  3
  group 0  o-----o
  group 1     o-----o

  Args:
    assignment: The groups, `[num_groups, group_size]`.
    width: Columns that the drawing may take. A wider one becomes a list of
      ranges.

  Returns:
    The lines, with a heading when there is room for a drawing.
  """
  num_replicas = sum(len(row) for row in assignment)
  cell = len(str(num_replicas - 1)) + 2
  label = len(f"group {len(assignment) - 1}")
  if label + cell * num_replicas > width:
    return "\n".join(
      f"group {i}: {_ranges(sorted(row))}" for i, row in enumerate(assignment)
    )
  ids = "".join(str(replica).rjust(cell) for replica in range(num_replicas))
  lines = ["replica".ljust(label) + ids]
  for i, row in enumerate(assignment):
    line = f"group {i}".ljust(label) + _line(row, num_replicas, cell)
    lines.append(line.rstrip())
  return "\n".join(lines)


def _line(row: Sequence[int], num_replicas: int, cell: int) -> str:
  """One group: a mark per member, joined from the first to the last."""
  first, last = min(row), max(row)
  parts = []
  for replica in range(num_replicas):
    mark = "o" if replica in row else "-" if first < replica < last else " "
    parts.append(mark.rjust(cell, "-" if first < replica <= last else " "))
  return "".join(parts)


def _ranges(ids: Sequence[int]) -> str:
  """Ascending ids in short: `0-3`, `0-62 step 2`, or a plain list."""
  steps = {b - a for a, b in itertools.pairwise(ids)}
  if len(ids) > 2 and len(steps) == 1:
    step = steps.pop()
    suffix = f" step {step}" if step > 1 else ""
    return f"{ids[0]}-{ids[-1]}{suffix}"
  return " ".join(map(str, ids))
