"""One file for each group, which any group can restore.

Successive halving stores each trial in its own file. Later, a group
restores the file of the trial that it continues with; several groups may
restore the same file:

    group     0          1          2
    saves     trial_0    trial_1    trial_2
    restores  trial_1    trial_2    trial_1

Each file has the form that `save` writes for an optimizer with one group.
"""

import contextlib
from collections.abc import Mapping, Sequence

from etils import epath

from tf_cross_shard._src.replica_state import archive, checkpoint, group_state


def save(
  paths: Mapping[int, epath.Path], state: group_state.GroupState
) -> None:
  """Writes the state of the groups in `paths`, each to its own file.

  All workers call this function; the first worker writes.
  """
  topic = "saving groups"
  arrays = state.arrays(topic)
  about = {
    "format": group_state.FORMAT,
    "group_assignment": [list(range(state.groups.group_size))],
    "names": [entry.name for entry in state.entries],
  }
  with state.raising_on_all(topic):
    for group, path in paths.items() if state.copies.is_first else ():
      # In its own file, the group is number 0.
      prefix = group_state.key("", group)
      renamed = {
        group_state.key(name.removeprefix(prefix), 0): array
        for name, array in arrays.items()
        if name.startswith(prefix)
      }
      archive.write(path, renamed, about)


def restore(paths: Sequence[epath.Path], state: group_state.GroupState) -> None:
  """Restores group i from the file `paths[i]`; groups may share a file.

  On several machines, each worker reads the files of its own groups only.
  """
  topic = "joining groups"
  state.compare_workers(topic)
  replicas = state.copies.engine.replicas_here
  here = {i: paths[i] for i in map(state.groups.index_of, replicas)}
  with (
    state.raising_on_all(topic),
    archive.naming_damage(paths[0].parent, OSError),
    contextlib.ExitStack() as stack,
  ):
    files = {
      path: stack.enter_context(archive.reading(path))
      for path in set(here.values())
    }
    sources = {i: (files[path], 0) for i, path in here.items()}
    values = checkpoint.plan(sources, state)
  state.assign(values)
