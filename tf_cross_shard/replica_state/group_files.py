"""A file for each group, of which any group may go on.

    group         0        1        2
    file          a        b        a

Each is what `save` writes of an optimizer with one group.
"""

import contextlib
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
      own = group_state.key("", group)
      renamed = {
        group_state.key(name.removeprefix(own), 0): array
        for name, array in arrays.items()
        if name.startswith(own)
      }
      archive.write(path, renamed, about)


def restore(
  paths: Sequence[pathlib.Path], copies: group_state.GroupCopies
) -> None:
  """Gives group i what `save` wrote to path i; groups may share one.

  On several machines each worker reads what its groups go on from.
  """
  topic = "joining groups"
  copies.agree(topic)
  replicas = copies.copies.engine.replicas_here
  here = {i: paths[i] for i in map(copies.groups.index_of, replicas)}
  with (
    copies.together(topic),
    archive.naming_damage(paths[0].parent, OSError),
    contextlib.ExitStack() as stack,
  ):
    files = {
      path: stack.enter_context(archive.reading(path))
      for path in set(here.values())
    }
    places = {i: (files[path], 0) for i, path in here.items()}
    plan = [
      checkpoint.values_here(places, copies, part) for part in copies.parts
    ]
  copies.put(plan)
