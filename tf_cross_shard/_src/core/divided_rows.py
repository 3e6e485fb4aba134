"""Tables whose rows are divided among the members of a group.

With n members, the member at place p owns the rows p, p + n, p + 2n, ...:

    id       0  1  2  3  4           place 0: rows 0, 2, 4
    owner    0  1  0  1  0           place 1: rows 1, 3, and a row of padding

A mirrored variable holds the table. The copy on each replica is the part that
the replica owns. Its gradient is `tf.IndexedSlices` with indices into that
part, and contains the gradients of all members: it must not be summed again.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import variables as variables_lib

_ATTRIBUTE: Final = "_tf_cross_shard_divided_rows"


@dataclasses.dataclass(frozen=True)
class DividedRows:
  """How the rows of a table, or of its slots, are divided.

  Attributes:
    rows: The number of rows of the whole table.
    groups: The groups. The members of each group own one table together.
  """

  rows: int
  groups: groups_lib.Groups

  @property
  def part_rows(self) -> int:
    """The number of rows of each part, with padding."""
    return -(-self.rows // self.groups.group_size)


def mark(variable: Any, owned: DividedRows) -> None:
  """Declares that the copies of a variable are parts of one table."""
  setattr(variable, _ATTRIBUTE, owned)


def of(variable: Any) -> DividedRows | None:
  """Returns how a variable is divided; None for an ordinary variable."""
  found: DividedRows | None = getattr(variable, _ATTRIBUTE, None)
  if found is None and variables_lib.is_variable(variable):
    found = getattr(variables_lib.native(variable), _ATTRIBUTE, None)
    # A tape may report the copy of one replica.
    whole = variables_lib.distributed(variable)
    found = found or getattr(whole, _ATTRIBUTE, None)
  return found


def any_of(variables: Iterable[Any]) -> bool:
  """Returns whether one of the variables is divided."""
  return any(of(variable) is not None for variable in variables)


def join(parts: Sequence[np.ndarray[Any, Any]], rows: int) -> Any:
  """Returns the whole table, given the parts in the order of their places.

  >>> join([np.array([0, 2, 4]), np.array([1, 3, 0])], 5)
  array([0, 1, 2, 3, 4])
  """
  whole = np.empty([rows, *parts[0].shape[1:]], parts[0].dtype)
  for place, part in enumerate(parts):
    own = whole[place :: len(parts)]
    own[:] = part[: len(own)]
  return whole


def part_of(whole: np.ndarray[Any, Any], place: int, members: int) -> Any:
  """Returns the part of the member at a place, padded with zeros.

  >>> part_of(np.arange(5), 1, 2)
  array([1, 3, 0])
  """
  part = np.zeros([-(-len(whole) // members), *whole.shape[1:]], whole.dtype)
  own = whole[place::members]
  part[: len(own)] = own
  return part
