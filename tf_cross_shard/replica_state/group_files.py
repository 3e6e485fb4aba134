"""A file for each group, of which any group may go on.

    group         0        1        2
    file          a        b        a

Each is what `save` writes of an optimizer with one group.
"""

import pathlib
from collections.abc import Mapping, Sequence

from tf_cross_shard.replica_state import archive, checkpoint, group_state


def save(
  paths: Mapping[int, pathlib.Path], copies: group_state.GroupCopies
) -> None:
  """Writes the state of these groups, each to a file of its own."""
  topic = "saving groups"
  copies.agree(topic)
  arrays = copies.arrays(copies.apart(topic))
  about = {
    "format": group_state.FORMAT,
    "group_assignment": [list(range(copies.groups.group_size))],
    "names": [part.name for part in copies.parts],
  }
  with copies.together(topic):
    for group, path in paths.items() if copies.copies.is_first else ():
      archive.write(path, _renamed(arrays, group, 0), about)


def restore(
  paths: Sequence[pathlib.Path],
  copies: group_state.GroupCopies,
  model: object,
  scratch: pathlib.Path,
) -> None:
  """Gives group i what `save` wrote to path i; groups may share one.

  Args:
    paths: A file for each group.
    copies: The optimizer and the model in all groups.
    model: The model.
    scratch: A file that is written in between. All workers see it.
  """
  topic = "joining groups"
  copies.agree(topic)
  arrays: dict[str, archive.Array] = {}
  with copies.together(topic):
    for i, path in enumerate(paths) if copies.copies.is_first else ():
      with archive.reading(path) as file:
        arrays |= _renamed(file, 0, i)
  copies.write(scratch, topic, arrays)
  checkpoint.restore(scratch, copies.optimizer, model)


def _renamed(
  arrays: Mapping[str, archive.Array], group: int, to: int
) -> dict[str, archive.Array]:
  """Returns the arrays of one group, as those of another."""
  before, after = (group_state.key("", i) for i in (group, to))
  return {
    after + name.removeprefix(before): arrays[name]
    for name in arrays
    if name.startswith(before)
  }
