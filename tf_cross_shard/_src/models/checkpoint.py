"""Checkpoints with the weights and the optimizer state of every group.

    save       variables ─▶ arrays of all groups ─▶ one file (first worker)
    restore    file ─▶ check names, shapes, dtypes ─▶ plan ─▶ assign

`restore` plans all values before it assigns the first one, so that an error
leaves the program unchanged.
"""

import collections
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging
from etils import epath

from tf_cross_shard._src.core import optimizer_state, single_program, validation
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.models import (
  archive,
  group_state,
  plain_models,
  tracked,
)
from tf_cross_shard._src.models.archive import CheckpointError

_SHOWN: Final = 5  # the number of names that an error lists


class Restored(NamedTuple):
  """What a file has besides the values of groups.

  If `is_exact`, every replica resumes with exactly its own values.
  """

  values: Any
  arrays: dict[str, archive.Array]
  is_exact: bool


def restore(target: epath.Path, optimizer: Any, model: Any) -> None:
  """Gives each model the values in a file; see `Models.restore`."""
  restored = restore_file(target, optimizer, model)
  if not restored.is_exact and optimizer_state.windows(optimizer):
    logging.warning(
      "Accumulation windows start again: the groups in the file have another"
      " size."
    )


def restore_file(target: epath.Path, optimizer: Any, model: Any) -> Restored:
  """Restores a file that `save` or `BackupAndRestore` wrote; see `restore`."""
  topic = f"restoring {target.name}"
  if len(tracked.optimizers(optimizer, model)) > 1:
    _build_saved(target, optimizer, model)
  else:
    build(optimizer, model)
  state = group_state.GroupState(optimizer, model)
  with (
    state.raising_on_all(topic) as outcomes,
    archive.naming_damage(target, OSError),
    archive.reading(target) as file,
  ):
    outcomes[0]["checksum"] = file.checksum
    _check_groups(file, state)
    _check_names(file, state, list(file.about["names"].values()))
    group_size = len(_saved_groups(file)[0])
    is_exact = group_size == state.groups.group_size
    sources = {i: (file, i) for i in range(state.groups.num_groups)}
    values = plan(sources, state, is_exact)
    other_arrays = {n: file[n] for n in file if not n.startswith("model_")}
  checksums = [outcome["checksum"] for outcome in outcomes]
  for i, checksum in enumerate(checksums):
    if checksum != checksums[0] and state.copies.workers is not None:
      names = state.copies.workers.names
      raise CheckpointError(
        f"{names[i]} and {names[0]} read different checkpoints ({topic});"
        " nothing was changed. Pass a file that all workers can read, or copy"
        " it to each of them."
      )
  state.put(values)
  return Restored(file.about.get("values", {}), other_arrays, is_exact)


def read(target: epath.Path, i: int, model: Any) -> Any:
  """Gives a plain model the weights of model i in a file; see `Models.read`."""
  state = group_state.GroupState(None, model, with_optimizer=False)
  with archive.naming_damage(target, OSError), archive.reading(target) as file:
    saved = _saved_groups(file)
    if i not in range(len(saved)):
      raise CheckpointError(
        f"`i` must be an integer from 0 to {len(saved) - 1}; got {i!r}."
        f" The checkpoint {target} holds {len(saved)} models."
      )
    names = file.about["names"]
    dropouts = plain_models.dropouts(file.about.get("rates", {}), model)
    keys = [k for k in names if k.startswith("model/") and k not in dropouts]
    # Random states are read only if the file and the model have as many.
    if sum(variables_lib.is_seed(names[k]) for k in keys) != state.num_seeds:
      keys = [key for key in keys if not variables_lib.is_seed(names[key])]
      state.leave_out_seeds()
    # The keys of a model without TunableDropouts would be other numbers.
    _check_names(file, state, [names[key] for key in keys])
    count = len(state.copies.engine.local_replicas)
    values = {}
    for key, entry in zip(keys, state.entries, strict=True):
      of_members = _saved_values(file, i, entry, key)
      values[entry.key] = [plain_models.merged(entry, of_members)] * count
    rates = {key: file[group_state.key_in_file(key, i)] for key in dropouts}
  state.put(values)
  plain_models.finalize(model)
  plain_models.set_rates(dropouts, rates)
  return model


def build(optimizer: Any, model: Any) -> None:
  """Builds the one optimizer on the trainable variables, unless it is built."""
  is_only = len(tracked.optimizers(optimizer, model)) == 1
  if is_only and model is not None and optimizer is not None:
    build_optimizer(optimizer, model)


def build_optimizer(optimizer: Any, model: Any) -> None:
  """Creates the slots for a model's trainable variables, unless they exist."""
  layers = list(nested_lib.nested_optimizers(optimizer))
  # The outermost optimizer builds all the others. A LossScaleOptimizer may not
  # be built although the optimizer inside is; if built twice, it starts anew.
  outermost = layers[0]
  if keras_private.is_built(outermost):
    return
  listed = [v for v in group_state.variables_of(model) if v.trainable]
  variables = getattr(model, "trainable_variables", listed)
  # Do not use the strategy of the variables: variables of OneDeviceStrategy do
  # not store it.
  strategy = keras_private.strategy(layers[-1])
  for other in filter(None, map(replicas_lib.strategy_of, variables)):
    if not _can_train(strategy, optimizer, other):
      raise CheckpointError(
        "`optimizer` was created under"
        f" {validation.strategy_in_words(strategy)}, but `model` under"
        f" {validation.strategy_in_words(other)}. Create both inside the scope"
        " of one strategy; nothing was changed."
      )
  with strategy.scope():
    outermost.build(variables)


def _build_saved(target: epath.Path, optimizer: Any, model: Any) -> None:
  """Builds the optimizers that were built when a file was written."""
  state = group_state.GroupState(optimizer, model, with_optimizer=False)
  with (
    state.raising_on_all(f"reading {target.name}"),
    archive.naming_damage(target, OSError),
    archive.reading(target) as file,
  ):
    saved = file.about.get("trained", {})
  variables = {entry.key: entry.variable for entry in state.entries}
  if not saved:  # There was one optimizer.
    build_optimizer(optimizer, model)
  tracked.build(optimizer, model, saved, variables)


def _can_train(
  strategy: tf.distribute.Strategy,
  optimizer: Any,
  other: tf.distribute.Strategy,
) -> bool:
  """Returns whether an optimizer of a strategy can train another's weights."""
  copies = map(single_program.num_copies, (strategy, other))
  # Do not look at `iterations`, which is a tensor if Keras 3 accumulates
  # gradients.
  owners = map(replicas_lib.strategy_of, keras_private.listed(optimizer))
  has_owner = any(owner is not None for owner in owners)
  return other is strategy or not (has_owner or max(copies) > 1)


def _check_groups(file: archive.Archive, state: group_state.GroupState) -> None:
  saved, groups = _saved_groups(file), state.groups.to_lists()
  strategy = state.copies.engine.strategy
  if len(saved) != len(groups) and single_program.are_models(strategy):
    raise CheckpointError(
      f"The checkpoint {file.path} holds {len(saved)} models, but the program"
      f" has a {validation.strategy_in_words(strategy)}. Create the model and"
      f" the optimizer under VectorizedStrategy({len(saved)}); for one of the"
      " models, use Models.read."
    )
  if len(saved) != len(groups):
    raise CheckpointError(
      f"The checkpoint {file.path} holds {len(saved)} groups, {saved},"
      f" but the optimizer has {len(groups)}, {groups}. Use a"
      f" `group_assignment` with {len(saved)} groups; or, in the program that"
      " saved, call Models.average, save with tf.train.Checkpoint, and"
      " restore that here."
    )


def _saved_groups(file: archive.Archive) -> list[list[int]]:
  file_format = file.about.get("format")
  if file_format != group_state.FORMAT:
    raise CheckpointError(
      f"The checkpoint {file.path} was not written by Models.save"
      f" (kind: {file_format!r}). Pass a file that Models.save wrote."
    )
  saved: list[list[int]] = file.about["group_assignment"]
  return saved


def _check_names(
  file: archive.Archive, state: group_state.GroupState, saved: Sequence[str]
) -> None:
  """Raises an error if the program has other variables than those saved."""
  has_model = any(key.startswith("model/") for key in file.about["names"])
  how = "with a" if has_model else "without a"
  current = [entry.name for entry in state.entries]
  kinds, own_kinds = (
    collections.Counter(map(_kind, names)) for names in (saved, current)
  )
  for names, absent, verb, end in (
    (current, own_kinds - kinds, "does not contain", ""),
    (saved, kinds - own_kinds, "contains", ", which the program does not have"),
  ):
    if absent:
      shown = [name for name in names if _kind(name) in absent][:_SHOWN]
      raise CheckpointError(
        f"The checkpoint {file.path} {verb} {', '.join(shown)}{end}. Restore"
        f" with the same optimizer and model that you saved; it was saved {how}"
        " `model`."
      )
  of_model = [entry.key.startswith("model/") for entry in state.entries]
  saved, current = (
    list(itertools.compress(names, of_model)) for names in (saved, current)
  )
  place = variables_lib.misplaced(saved, current)
  if place is not None:
    raise CheckpointError(
      f"The checkpoint {file.path} holds {saved[place]} where the program has"
      f" {current[place]}: their order differs. Create the layers in the same"
      " order."
    )


def _kind(name: str) -> str:
  """Returns the end of a variable's name, without the numbers of Keras."""
  return re.sub(r"_?\d+", "", name.rpartition("/")[2])


def plan(
  sources: Mapping[int, tuple[archive.Archive, int]],
  state: group_state.GroupState,
  is_exact: bool = True,
) -> group_state.Values:
  """Returns the values of each variable for the replicas of this process.

  A file has one value of a variable for each group or, if the members of a
  group had different values, one for each member:

      saved by a group       x             x0, x1, x2     x0, x1, x2
      group of the program   any size      3 members      2 members
      member 0, 1, ... gets  x, x, ...     x0, x1, x2     mean, mean

  Integers have no mean: the two members get x0 and x1. More than three members
  get x0, x1, x2, x0, x1, ... `sources` has, for each group of the program, a
  file and a group in it. Unless `is_exact`, an unfinished window starts again:
  the sums of other members would be counted twice or not at all.
  """
  replicas = state.copies.engine.local_replicas
  groups = {replica: state.groups.index_of(replica) for replica in replicas}
  windows = set(map(id, optimizer_state.windows(state.optimizer)))
  planned = {}
  for entry in state.entries:
    saved: dict[int, list[archive.Array]] = {}
    for group in set(groups.values()):
      saved[group] = _saved_values(*sources[group], entry, entry.key)
      if not is_exact and id(entry.variable) in windows:
        saved[group] = [np.zeros_like(saved[group][0])]
      elif not is_exact and group_state.has_mean(entry.variable):
        saved[group] = [plain_models.merged(entry, saved[group])]
    values = [
      saved[group][state.member(replica) % len(saved[group])]
      for replica, group in groups.items()
    ]
    exists_once = replicas_lib.strategy_of(entry.variable) is None
    if exists_once and not replicas_lib.are_alike(values):
      file, _ = sources[groups[replicas[0]]]
      raise CheckpointError(
        f"The checkpoint {file.path} holds one value of `{entry.name}` for each"
        " group, but in the program the variable exists once. Create the"
        " variable inside `with strategy.scope():`."
      )
    planned[entry.key] = values
  return planned


def _saved_values(
  file: archive.Archive, group: int, entry: group_state.Entry, key: str
) -> list[archive.Array]:
  """Returns a saved group's values by member; one value if all are equal."""
  members = range(len(file.about["group_assignment"][0]))
  keys = [group_state.key_in_file(key, group, member) for member in members]
  if keys[0] not in file:
    keys = [group_state.key_in_file(key, group)]
  values = [file[key] for key in keys]
  for value in values:
    fits = entry.shape.is_compatible_with(value.shape)
    if not fits or value.dtype.name != tf.as_dtype(entry.variable.dtype).name:
      raise CheckpointError(
        f"The checkpoint {file.path} holds `{file.about['names'][key]}` as"
        f" {value.dtype.name} {list(value.shape)}; the program has"
        f" {entry.kind}. Restore with the same model."
      )
  return values
