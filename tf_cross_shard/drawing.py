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


def as_picture(
  assignment: Sequence[Sequence[int]],
  path: str,
  coordinates: Sequence[Sequence[int]] | None = None,
) -> None:
  """Draws a grouping as an image, each group in a colour.

  Args:
    assignment: The groups, `[num_groups, group_size]`.
    path: The file; its ending chooses the format.
    coordinates: Where each replica's device is: x, y and, if there are any, z
      and the core on the chip. Layers of z stand side by side. None draws one
      row of replicas per group.

  Raises:
    ImportError: If matplotlib is missing.
  """
  try:
    from matplotlib import figure
  except ImportError:
    raise ImportError(
      "Drawing a picture needs matplotlib. Install it with: pip install"
      " matplotlib."
    ) from None
  group_of = {replica: i for i, row in enumerate(assignment) for replica in row}
  if coordinates is None:
    places = {
      replica: (float(column), float(i))
      for i, row in enumerate(assignment)
      for column, replica in enumerate(row)
    }
  else:
    places = _on_grid(coordinates)
  columns = max(x for x, _ in places.values()) + 1
  rows = max(y for _, y in places.values()) + 1
  size = (min(24.0, 1 + columns / 2), min(24.0, 1 + rows / 2))
  axes = (drawn := figure.Figure(figsize=size)).subplots()
  ids = sorted(places)
  axes.scatter(
    [places[i][0] for i in ids],
    [places[i][1] for i in ids],
    s=300,
    c=[group_of[i] % 20 for i in ids],
    cmap="tab20",
    vmin=0,
    vmax=19,
  )
  for replica in ids:
    axes.annotate(
      str(replica), places[replica], ha="center", va="center", fontsize=7
    )
  axes.set_title(f"{len(assignment)} groups of {len(assignment[0])}")
  axes.set_xlim(-1, columns)
  axes.set_ylim(rows, -1)
  axes.set_axis_off()
  drawn.savefig(path, dpi=100, bbox_inches="tight")


def _on_grid(
  coordinates: Sequence[Sequence[int]],
) -> dict[int, tuple[float, float]]:
  """Where each replica is drawn: layers of z side by side."""
  width = max(place[0] for place in coordinates) + 1
  places = {}
  for replica, place in enumerate(coordinates):
    x, y, z, core = (*place, 0, 0)[:4]
    places[replica] = (x + z * (width + 1) + 0.45 * core, float(y))
  return places


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
