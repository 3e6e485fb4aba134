"""Groups of replicas: which replicas sum their gradients with each other.

contiguous(4, 2)   [[0, 1],      strided(4, 2)   [[0, 2],
                    [2, 3]]                       [1, 3]]
"""

import collections
import dataclasses
import itertools
import operator
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_cross_shard._src.core import single_program, validation

__all__ = [
  "Groups",
  "by_host",
  "contiguous",
  "singletons",
  "strided",
]

_EXAMPLE: Final = "Pass, for example, 2."
_REMEDY: Final = (
  "Give one row of replica ids per group, all rows of one length, such as"
  " [[0, 1], [2, 3]]."
)


@dataclasses.dataclass(frozen=True)
class Groups:
  """Groups of replicas, checked and immutable.

  Pass it as `group_assignment` to a CrossShardOptimizer, which sums gradients
  within each group.

  >>> from tf_cross_shard.groups import Groups
  >>> groups = Groups([[0, 2], [1, 3]])
  >>> groups.num_groups, groups.group_size, groups.num_replicas
  (2, 2, 4)
  >>> groups.index_of(3)
  1
  >>> print(groups.draw())
  replica  0  1  2  3
  group 0  o-----o
  group 1     o-----o

  Two groupings are equal, and have the same hash, if their rows are equal.
  Names are ignored.

  Attributes:
    assignment: The groups, as tuples of replica ids. The constructor accepts
      nested lists or tuples, an array, a constant tensor or a `Groups`.
    num_replicas: The number of replicas. If you pass it to the constructor, the
      groups must cover that many replicas.
    names: A name for each group, which drawings and TensorBoard show, or None.
      By default, the names of `assignment` if it is a `Groups`.
  """

  assignment: tuple[tuple[int, ...], ...]
  num_replicas: int = -1
  names: tuple[str, ...] | None = dataclasses.field(
    default=None, kw_only=True, compare=False
  )
  _index: tuple[int, ...] = dataclasses.field(
    init=False, repr=False, compare=False, hash=False, default=()
  )

  if TYPE_CHECKING:  # The constructor accepts more types than the fields have.

    def __init__(
      self,
      assignment: "Groups | Sequence[Sequence[int]] | npt.NDArray[Any]",
      num_replicas: int = -1,
      *,
      names: Sequence[str] | None = None,
    ) -> None: ...

  def __post_init__(self) -> None:
    """Checks the rows and converts them to tuples."""
    value = self.assignment
    rows = value.assignment if isinstance(value, Groups) else _as_rows(value)
    expected = None
    if self.num_replicas != -1:
      validation.check_integer("num_replicas", self.num_replicas, _EXAMPLE)
      expected = self.num_replicas
    index = _group_index(rows, expected, value)
    object.__setattr__(
      self, "assignment", tuple(tuple(map(int, row)) for row in rows)
    )
    object.__setattr__(self, "num_replicas", len(index))
    object.__setattr__(self, "_index", tuple(index))
    names = getattr(value, "names", None) if self.names is None else self.names
    object.__setattr__(self, "names", _checked_names(names, len(rows)))

  @property
  def num_groups(self) -> int:
    """The number of groups."""
    return len(self.assignment)

  @property
  def group_size(self) -> int:
    """The number of replicas in each group."""
    return len(self.assignment[0])

  def __iter__(self) -> Iterator[tuple[int, ...]]:
    """Iterates over the groups, each a tuple of replica ids."""
    return iter(self.assignment)

  def index_of(self, replica: int) -> int:
    """Returns the number of the group that holds a replica.

    Args:
      replica: A number in `range(num_replicas)`.

    Returns:
      The index of the row, from 0.

    Raises:
      ValueError: If there is no such replica.
    """
    if not 0 <= replica < self.num_replicas:
      raise ValueError(
        f"`replica` must be in range({self.num_replicas}); got {replica}."
        " Replicas are numbered from 0."
      )
    return self._index[replica]

  def members_of(self, replica: int) -> tuple[int, ...]:
    """Returns all replicas of the group of a replica, in ascending order.

    Args:
      replica: A number in `range(num_replicas)`.

    Raises:
      ValueError: If there is no such replica.
    """
    return tuple(sorted(self.assignment[self.index_of(replica)]))

  def to_lists(self) -> list[list[int]]:
    """Returns the groups as lists, the form of TensorFlow's arguments."""
    return [list(row) for row in self.assignment]

  def draw(self, width: int = 80) -> str:
    """Draws the groups as text, with the replicas from left to right.

    Groups whose drawing would be wider than `width` columns are listed as
    ranges.

    >>> from tf_cross_shard.groups import strided
    >>> print(strided(64, 32).draw())
    group 0: 0-62 step 2
    group 1: 1-63 step 2

    Args:
      width: The maximum number of columns of the drawing.

    Returns:
      One line for each group, with a heading above a drawing.
    """
    cell = len(str(self.num_replicas - 1)) + 2
    names = self.names or [f"group {i}" for i in range(self.num_groups)]
    label = max(len("replica"), *map(len, names))
    named = list(zip(names, self.assignment, strict=True))
    if label + cell * self.num_replicas > width:
      return "\n".join(f"{name}: {_ranges(sorted(row))}" for name, row in named)
    ids = "".join(str(i).rjust(cell) for i in range(self.num_replicas))
    lines = ["replica".ljust(label) + ids]
    for name, row in named:
      line = name.ljust(label) + _line(row, self.num_replicas, cell)
      lines.append(line.rstrip())
    return "\n".join(lines)


def contiguous(
  num_replicas: int, group_size: int, names: Sequence[str] | None = None
) -> Groups:
  """Creates groups of neighbors: group g is `[g * size, (g + 1) * size)`.

  >>> from tf_cross_shard.groups import contiguous
  >>> contiguous(4, 2).to_lists()
  [[0, 1], [2, 3]]

  Args:
    num_replicas: The number of replicas of the strategy, at least 1.
    group_size: The number of replicas in each group, a divisor of
      `num_replicas`.
    names: A name for each group, or None.

  Returns:
    The grouping.

  Raises:
    ValueError: If `group_size` does not divide `num_replicas`.
  """
  _check_division(num_replicas, group_size)
  return Groups(np.arange(num_replicas).reshape(-1, group_size), names=names)


def strided(
  num_replicas: int, group_size: int, names: Sequence[str] | None = None
) -> Groups:
  """Creates groups of every n-th replica, where n is the number of groups.

  >>> from tf_cross_shard.groups import strided
  >>> strided(4, 2).to_lists()
  [[0, 2], [1, 3]]

  Args:
    num_replicas: The number of replicas of the strategy, at least 1.
    group_size: The number of replicas in each group, a divisor of
      `num_replicas`.
    names: A name for each group, or None.

  Returns:
    The grouping.

  Raises:
    ValueError: If `group_size` does not divide `num_replicas`.
  """
  _check_division(num_replicas, group_size)
  return Groups(np.arange(num_replicas).reshape(group_size, -1).T, names=names)


def singletons(num_replicas: int, names: Sequence[str] | None = None) -> Groups:
  """Creates a group for each replica, so that nothing is reduced.

  >>> from tf_cross_shard.groups import singletons
  >>> print(singletons(3, ["low", "mid", "high"]).draw())
  replica  0  1  2
  low      o
  mid         o
  high           o

  Args:
    num_replicas: The number of replicas of the strategy, at least 1.
    names: A name for each group, or None.

  Returns:
    The grouping.

  Raises:
    ValueError: If `num_replicas` is not a positive integer.
  """
  return contiguous(num_replicas, 1, names)


def by_host(strategy: Any) -> Groups:
  """Creates a group for each host (process), with all of its replicas.

  >>> import tensorflow as tf
  >>> from tf_cross_shard.groups import by_host
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> by_host(strategy).to_lists()
  [[0, 1]]

  Args:
    strategy: A `tf.distribute.Strategy` that numbers its replicas host by
      host, as TPUStrategy and MultiWorkerMirroredStrategy do.

  Returns:
    The grouping, one group per host.

  Raises:
    ValueError: If hosts have different numbers of replicas.
  """
  num_replicas = strategy.num_replicas_in_sync
  if num_replicas == 1:
    return singletons(1)
  devices = strategy.extended.worker_devices
  if len(devices) != num_replicas:
    # MultiWorkerMirroredStrategy lists the devices of this process only.
    return contiguous(num_replicas, len(devices))
  hosts: dict[str, list[int]] = {}
  for replica, device in enumerate(devices):
    host = re.sub(r"/device:.*$", "", str(device))
    hosts.setdefault(host, []).append(replica)
  return Groups(tuple(map(tuple, hosts.values())), num_replicas)


def _check_division(num_replicas: int, group_size: int) -> None:
  validation.check_integer("num_replicas", num_replicas, _EXAMPLE)
  validation.check_integer("group_size", group_size, _EXAMPLE)
  if num_replicas % group_size:
    raise ValueError(
      f"`group_size` must divide `num_replicas`; {group_size} does not divide"
      f" {num_replicas}. All groups have the same size."
    )


def _checked_names(names: Any, num_groups: int) -> tuple[str, ...] | None:
  """Returns names as a tuple; raises `ValueError` unless all groups differ."""
  if names is None:
    return None
  checked = () if isinstance(names, str) else tuple(names)
  if len(checked) != num_groups or len(set(map(str, checked))) < num_groups:
    raise ValueError(
      "`names` must contain a different name for each of the"
      f" {num_groups} groups; got {names!r}."
    )
  return tuple(map(str, checked))


def _shown(value: object) -> str:
  tolist = getattr(value, "tolist", None)
  text = str(tolist() if callable(tolist) else value)
  return textwrap.shorten(text, 100, placeholder=" ...")


def _as_rows(value: Any) -> Sequence[Sequence[Any]]:
  """Converts any accepted form of a table to a sequence of sequences."""
  if hasattr(value, "numpy"):
    value = value.numpy()
  if isinstance(value, np.ndarray):
    value = value.tolist()
  if not isinstance(value, (list, tuple)) or not all(
    isinstance(row, (list, tuple)) or np.ndim(row) == 1 for row in value
  ):
    raise ValueError(
      "`group_assignment` must be two-dimensional, [num_groups, group_size],"
      f" as nested lists, an array or a constant tensor; got {_shown(value)}."
      f" {_REMEDY}"
    )
  return value


def _group_index(
  rows: Sequence[Sequence[Any]], num_replicas: int | None, shown: object
) -> list[int]:
  """Returns the row of each replica; raises `ValueError` for a bad table."""
  sizes = sorted(set(map(len, rows)))
  if sizes in ([], [0]):
    raise ValueError(
      f"`group_assignment` must not be empty; got {_shown(shown)}. {_REMEDY}"
    )
  if len(sizes) > 1:
    raise ValueError(
      "`group_assignment` must have groups of one size (uneven groups are not"
      f" supported); got groups of {sizes}: {_shown(shown)}. {_REMEDY}"
    )
  ids = [_as_id(replica, shown) for row in rows for replica in row]
  total = len(ids) if num_replicas is None else num_replicas
  times = collections.Counter(ids)
  faults = {
    "out of range": [i for i in ids if not 0 <= i < total],
    "in it twice": [i for i in ids if times[i] > 1],
    "missing": [i for i in range(total) if i not in times],
  }
  for fault, replicas in faults.items():
    if replicas:
      raise ValueError(
        f"`group_assignment` must cover each replica in range({total}) exactly"
        f" once; replica {replicas[0]} is {fault}: {_shown(shown)}. {_REMEDY}"
      )
  # `ids` is a permutation of all replicas. argsort inverts it, which gives the
  # position of each replica in the flat table.
  return (np.argsort(ids) // sizes[0]).tolist()


def _as_id(replica: Any, shown: object) -> int:
  try:
    if isinstance(replica, bool):
      raise TypeError
    return operator.index(replica)
  except TypeError:
    raise ValueError(
      f"`group_assignment` must contain integers; {replica!r} in"
      f" {_shown(shown)} is not an integer. {_REMEDY}"
    ) from None


def _line(row: Sequence[int], num_replicas: int, cell: int) -> str:
  """Draws a group: an o for each member, joined from first to last."""
  first, last = min(row), max(row)
  parts = []
  for replica in range(num_replicas):
    mark = "o" if replica in row else "-" if first < replica < last else " "
    parts.append(mark.rjust(cell, "-" if first < replica <= last else " "))
  return "".join(parts)


def _ranges(ids: Sequence[int]) -> str:
  """Formats ascending ids briefly: `0-3`, `0-62 step 2`, or a list."""
  steps = {b - a for a, b in itertools.pairwise(ids)}
  if len(ids) > 2 and len(steps) == 1:
    step = steps.pop()
    suffix = f" step {step}" if step > 1 else ""
    return f"{ids[0]}-{ids[-1]}{suffix}"
  return " ".join(map(str, ids))


def default_groups(strategy: tf.distribute.Strategy) -> Groups:
  """Returns one group of all replicas, or of each model alone."""
  copies = single_program.num_copies(strategy)
  if single_program.are_models(strategy):
    return singletons(copies)
  return contiguous(copies, copies)
