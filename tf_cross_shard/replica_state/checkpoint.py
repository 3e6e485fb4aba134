"""A file with the weights and the optimizer state of every group."""

import contextlib
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard.inner_optimizer import libraries, optimizer_state
from tf_cross_shard.replica_state import (
  archive,
  group_models,
  group_state,
  replica_values,
)
from tf_cross_shard.replica_state.archive import CheckpointError

_SHOWN: Final = 5  # names that an error lists

# Where each group is: in which file, and as which of the groups in it.
Places = Mapping[int, tuple[archive.Archive, int]]


class Restored(NamedTuple):
  """What `GroupCopies.write` was given beside the state.

  Attributes:
    values: Of a worker's own file, else None.
    arrays: Others than the groups'.
    is_exact: Whether groups and workers are as they were, so that nothing
      begins anew.
  """

  values: Any
  arrays: dict[str, archive.Array]
  is_exact: bool


def save(path: Any, optimizer: Any, model: Any = None) -> None:
  """Writes every group's weights and optimizer state to one file.

  Once per group, whatever the number of replicas. What the model does not
  train and members of a group differ in, say the statistics of batch
  normalization, is written once per replica. In the file are `model.variables`,
  states of random numbers among them and metrics not, and all variables of the
  optimizer: slots, iteration count, learning rate, loss scale.

  The file replaces an older one when it is whole: a crash leaves the older one.
  `np.load(path)` shows what is in it, as `group_0/model/...`. On several
  machines the first worker writes, and the others wait for it.

  >>> import tempfile
  >>> weight = tf.Variable(3.0)
  >>> optimizer = tf.keras.optimizers.SGD()
  >>> optimizer.build([weight])
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   save(f"{folder}/state", optimizer, [weight])
  ...   _ = weight.assign(0.0)
  ...   restore(f"{folder}/state", optimizer, [weight])
  ...   [plain] = read_group(f"{folder}/state", 0, [tf.Variable(0.0)])
  >>> float(weight.numpy()), float(plain.numpy())
  (3.0, 3.0)

  Args:
    path: A file in a folder that is there.
    optimizer: A built optimizer.
    model: A model, or a list of variables; None for the optimizer's only.

  Raises:
    OutOfSyncError: If members of a group differ in what is trained.
    OSError: If the file cannot be written; on all workers.
  """
  target = archive.as_path(path)
  state = group_state.GroupCopies(optimizer, model)
  topic = f"saving {target.name}"
  state.agree(topic)
  group_state.check_values(state.optimizer)
  state.write(target, topic, state.arrays(state.apart(topic)))


def restore(path: Any, optimizer: Any, model: Any = None) -> None:
  """Gives every group what `save` wrote of it.

  Group i of the file goes to group i of the optimizer, whichever replicas are
  in it: the groups may have other members, or another size, than when they
  were saved. Where members had values of their own, the j-th member receives
  those of the j-th. In groups of another size all members receive their mean,
  and the window of `accumulate_steps` and what `wire_dtype="int8"` has left
  begin anew.

  Everything is read and compared before anything is changed. Training goes on
  to the bit as if it had not stopped. On several machines each worker reads the
  file, which has to be the same one.

  Args:
    path: A file that `save` wrote.
    optimizer: An optimizer; one that is not built is built on what `model`
      trains.
    model: As for `save`.

  Raises:
    CheckpointError: If the file is damaged, or has another number of groups,
      other variables, shapes or dtypes; if workers read different files. It is
      a ValueError. The error of one worker is raised on all.
    OSError: If the file cannot be read.
  """
  restored = restore_file(archive.as_path(path), optimizer, model)
  if not restored.is_exact and any(optimizer_state.windows(optimizer)):
    logging.warning(
      "Windows, and what rounding left, begin anew: groups have another size"
      " than saved."
    )


def restore_file(
  target: pathlib.Path,
  optimizer: Any,
  model: Any,
  others: Sequence[pathlib.Path] = (),
) -> Restored:
  """Restores a file; groups that a worker's own file lacks, from others'."""
  optimizer, model = group_state.in_order(optimizer, model)
  if model is not None and hasattr(optimizer, "build"):
    _build(optimizer, model)
  state = group_state.GroupCopies(optimizer, model)
  topic = f"restoring {target.name}"
  with (
    state.together(topic) as outcomes,
    archive.naming_damage(target, OSError),
    contextlib.ExitStack() as stack,
  ):
    file = stack.enter_context(archive.reading(target))
    own_values = file.about.get("values")
    outcomes[0]["checksum"] = file.checksum if own_values is None else 0
    _check_groups(file, state)
    _check_names(file, state, file.about["names"])
    is_exact = _is_exact(file, state)
    files = _files_here(file, state, others, stack)
    plan = [
      values_here(files, state, part)
      if is_exact
      else _values_anew(files, state, part)
      for part in state.parts
    ]
    own_arrays = {n: file[n] for n in file if not n.startswith("group_")}
  checksums = [outcome["checksum"] for outcome in outcomes]
  for i, checksum in enumerate(checksums):
    if checksum != checksums[0] and state.copies.workers is not None:
      names = state.copies.workers.names
      raise CheckpointError(
        f"{names[i]} and {names[0]} read different checkpoints at {topic};"
        " nothing was changed. Name a file that all workers see, or copy it to"
        " each of them."
      )
  state.put(plan)
  return Restored(own_values, own_arrays, is_exact)


def read_group(path: Any, group: int, model: Any) -> Any:
  """Gives a plain model what `save` wrote of one group's weights.

  To serve or to look at a group on one device: no strategy, no optimizer and
  no other group is needed. What the model does not train is as `load_group`
  has it. All is read and compared before anything is changed.

  Args:
    path: A file that `save` or `GroupCheckpoint` wrote.
    group: Which group, counted from 0 in the order of the saved ones.
    model: A built model, made by the same code outside of any strategy, or a
      list of variables.

  Returns:
    `model`.

  Raises:
    CheckpointError: If the file is damaged, has no such group, or has other
      variables, shapes or dtypes. It is a ValueError.
    OSError: If the file cannot be read.
  """
  state = group_state.GroupCopies(None, model, is_whole=False)
  values = values_of_group(archive.as_path(path), group, state)
  count = len(state.copies.engine.replicas_here)
  for part, value in zip(state.parts, values, strict=True):
    state.copies.write(part.variable, [value] * count)
  group_models.finalize(model)
  return model


def values_of_group(
  target: pathlib.Path, group: int, state: group_state.GroupCopies
) -> list[archive.Array]:
  """Returns what a plain model receives of a saved group; see `read_group`."""
  with (
    archive.naming_damage(target, OSError),
    archive.reading(target) as file,
  ):
    saved = _saved_groups(file)
    if group not in range(len(saved)):
      raise CheckpointError(
        f"`group` must be an integer from 0 to {len(saved) - 1}; got {group!r}."
        f" The checkpoint {target} holds the groups {saved}."
      )
    names = [n for n in file.about["names"] if n.startswith("model/")]
    _check_names(file, state, names)
    return [
      group_models.merged(part, list(_arrays(file, part, group).values()))
      for part in state.parts
    ]


def _build(optimizer: Any, model: Any) -> None:
  """Builds an optimizer, unless it is, on what the model trains."""
  layers = list(optimizer_state.nested_optimizers(optimizer))
  if any(libraries.is_built(layer) for layer in layers):
    return
  listed = [v for v in group_state.variables_of(model) if v.trainable]
  variables = getattr(model, "trainable_variables", listed)
  strategies = filter(None, map(replica_values.strategy_of, variables))
  with next(strategies, tf.distribute.get_strategy()).scope():
    optimizer.build(variables)


def _check_groups(
  file: archive.Archive, state: group_state.GroupCopies
) -> None:
  """Raises `CheckpointError` unless the file has the groups in force."""
  saved, own = _saved_groups(file), state.groups.to_lists()
  if len(saved) != len(own):
    raise CheckpointError(
      f"The checkpoint {file.path} holds {len(saved)} groups, {saved}; the"
      f" optimizer has {len(own)}, {own}. Give it a `group_assignment` of as"
      " many groups, or call replica_state.average and save the model with"
      " TensorFlow to start others from it."
    )


def _saved_groups(file: archive.Archive) -> list[list[int]]:
  """Returns the groups in a file that `save` wrote."""
  kind = file.about.get("format")
  if kind != group_state.FORMAT:
    raise CheckpointError(
      f"The checkpoint {file.path} holds something else: {kind!r}. Name a file"
      " that replica_state.save wrote."
    )
  saved: list[list[int]] = file.about["group_assignment"]
  return saved


def _check_names(
  file: archive.Archive, state: group_state.GroupCopies, saved: Collection[str]
) -> None:
  """Raises `CheckpointError` unless file and program have the same names."""
  own = [part.name for part in state.parts]
  has_model = any(name.startswith("model/") for name in saved)
  for names, others, verb in (
    (own, saved, "lacks"),
    (saved, own, "has, and the program has not,"),
  ):
    absent = [name for name in names if name not in set(others)]
    if absent:
      more = f" and {len(absent) - _SHOWN} more" if absent[_SHOWN:] else ""
      raise CheckpointError(
        f"The checkpoint {file.path} {verb} {', '.join(absent[:_SHOWN])}{more}."
        " Restore with the same optimizer and model as were saved; `model` was"
        f" {'given' if has_model else 'None'} then."
      )


def _is_exact(file: archive.Archive, state: group_state.GroupCopies) -> bool:
  """Returns whether each replica finds all that it had."""
  saved, own = _saved_groups(file), state.groups.to_lists()
  if "values" not in file.about:
    return len(saved[0]) == len(own[0])
  workers = file.about.get("workers", state.num_workers)
  return saved == own and bool(workers == state.num_workers)


def _files_here(
  file: archive.Archive,
  state: group_state.GroupCopies,
  others: Sequence[pathlib.Path],
  stack: contextlib.ExitStack,
) -> Places:
  """Returns where each group of this process is: in other files if need be.

  Raises `CheckpointError` if it is nowhere.
  """
  here = {state.groups.index_of(r) for r in state.copies.engine.replicas_here}
  if "values" not in file.about:
    return {i: (file, i) for i in here}
  files: dict[int, tuple[archive.Archive, int]] = {}
  paths = iter(others)
  while True:
    held = {name.split("/")[0] for name in file}
    new = here - set(files)
    files |= {i: (file, i) for i in new if f"group_{i}" in held}
    lacking = sorted(here - set(files))
    if not lacking:
      return files
    path = next(paths, None)
    if path is None:
      raise CheckpointError(
        f"The backup {file.path.name} of the groups {_saved_groups(file)} has"
        f" group {lacking[0]} in a file of another worker, which is not at"
        f" {file.path.parent.parent}. Let all workers see one folder, or copy"
        " all workers' files to each; or start as many workers with these"
        " groups."
      )
    file = stack.enter_context(archive.reading(path))


def _values_anew(
  files: Places,
  state: group_state.GroupCopies,
  part: group_state.Part,
) -> list[archive.Array]:
  """Returns a variable's values for replicas that were others.

  A window begins: sums of other members would count twice, or not at all. So
  would what rounding has left of their gradients.
  """
  sums, counts = optimizer_state.windows(state.optimizer)
  if any(part.variable is variable for variable in sums):
    # Of any number of rows the first, which is none.
    shape = [n or 1 for n in tf.TensorShape(part.variable.shape).as_list()]
    zeros = np.zeros(shape, tf.as_dtype(part.variable.dtype).as_numpy_dtype)
    return [zeros] * len(state.copies.engine.replicas_here)
  values = values_here(files, state, part, has_means=True)
  for variable, steps in counts:
    if part.variable is variable:
      values = [array - array % steps for array in values]
  return values


def values_here(
  files: Places,
  state: group_state.GroupCopies,
  part: group_state.Part,
  has_means: bool = False,
) -> list[archive.Array]:
  """Returns a variable's values for the replicas of this process.

  Members' own ones, or their mean. Raises `CheckpointError` unless they fit.
  """
  saved: dict[int, dict[int, archive.Array]] = {}
  values = []
  for replica in state.copies.engine.replicas_here:
    index = state.groups.index_of(replica)
    member = state.groups.assignment[index].index(replica)
    if index not in saved:
      file, group = files[index]
      saved[index] = _arrays(file, part, group)
    arrays = saved[index]
    if has_means and group_state.has_mean(part.variable):
      values.append(group_models.merged(part, list(arrays.values())))
      continue
    other = list(arrays)[member % len(arrays)]
    values.append(arrays.get(member, arrays[other]))
  exists_once = replica_values.strategy_of(part.variable) is None
  if exists_once and not replica_values.are_alike(values):
    raise CheckpointError(
      f"The checkpoint {file.path} holds other values of `{part.name}` for each"
      " group; here it exists once. Make it inside `with strategy.scope():`."
    )
  return values


def _arrays(
  file: archive.Archive, part: group_state.Part, group: int
) -> dict[int, archive.Array]:
  """Returns a group's values of a variable, by member; one where all agree.

  Raises `CheckpointError` unless they fit.
  """
  size = len(file.about["group_assignment"][0])
  keys = {j: group_state.key(part.name, group, j) for j in range(size)}
  arrays = {j: file[key] for j, key in keys.items() if key in file}
  arrays = arrays or {0: file[group_state.key(part.name, group)]}
  for array in arrays.values():
    kind = f"{array.dtype.name} {list(array.shape)}"
    # A window of rows has any number of them.
    fits = tf.TensorShape(part.variable.shape).is_compatible_with(array.shape)
    if not fits or array.dtype.name != tf.as_dtype(part.variable.dtype).name:
      raise CheckpointError(
        f"The checkpoint {file.path} holds `{part.name}` as {kind}; the program"
        f" has {part.kind}. Restore with the same model."
      )
  return arrays
