"""The optimizer's and the model's variables, with their values in every group.

Members of a group have exactly equal weights and optimizer state. Variables
that the model does not train, such as the statistics of batch normalization,
may have a different value in each replica.
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from etils import epath

from tf_cross_shard._src.core import optimizer_state
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.models import archive, tracked

FORMAT: Final = "tf_cross_shard.Models"
# By key, the values that the replicas of this process have of a variable.
Values: TypeAlias = dict[str, list[archive.Array]]
# After these errors, the workers can no longer exchange messages.
_LOST: Final = (
  workers_lib.MissingWorkerError,
  workers_lib.WorkerLostError,
  tf.errors.OpError,
)
# The speed, in bytes per second, of the slowest disk for which workers wait
# long enough.
_SLOWEST: Final = 1e6


class OutOfSyncError(AssertionError):
  """Raised if members of a group differ in values that have to be equal."""


class Entry(NamedTuple):
  """A variable, and whether members of a group share it.

  The key is the variable's number, as in Keras' files: `model/3`.
  """

  key: str
  name: str
  variable: Any
  is_shared: bool

  @property
  def shape(self) -> tf.TensorShape:
    return tf.TensorShape(self.variable.shape)

  @property
  def kind(self) -> str:
    """Dtype and shape as text, such as `float32 [2, 3]`."""
    dtype = tf.as_dtype(self.variable.dtype).name
    return f"{dtype} {self.shape.as_list()}"


class GroupState:
  """The variables of an optimizer and a model, in all groups.

  `rates` has the place of each `TunableDropout`, by the key of its weight.
  """

  def __init__(
    self, optimizer: Any, model: Any = None, with_optimizer: bool = True
  ) -> None:
    """Takes a model, a list of variables, or None for the optimizer alone."""
    if optimizer is not None:
      nested_lib.check_optimizer(optimizer)
    self.optimizer = optimizer
    self.entries: list[Entry] = []
    if with_optimizer:
      every = tracked.with_state(optimizer, model)
      if list(every) != [""]:
        self.optimizer = list(every.values())
      # Optimizer state in which members of a group may differ.
      windows = set(map(id, optimizer_state.windows(self.optimizer)))
      self.entries = [
        _entry(f"optimizer/{path}{i}", v, id(v) not in windows)
        for path, each in every.items()
        for i, v in enumerate(optimizer_state.state_variables(each))
      ]
    # A variable that the optimizer and the model share is listed once.
    known = {id(replicas_lib.native(e.variable)) for e in self.entries}
    by_id = {id(replicas_lib.native(v)): v for v in variables_of(model)}
    self.entries += [
      _entry(f"model/{i}", variable, bool(variable.trainable))
      for i, (key, variable) in enumerate(by_id.items())
      if key not in known
    ]
    self.copies = replicas_lib.Copies(_strategy_of(self.entries))
    self.groups = nested_lib.groups_of(
      self.optimizer, self.copies.engine.strategy
    )
    keys = {id(replicas_lib.native(e.variable)): e.key for e in self.entries}
    self._trained = {}
    if with_optimizer:
      self._trained = tracked.trained(optimizer, model, keys)
    self.rates = {
      keys[id(replicas_lib.native(layer.rate))]: i
      for i, layer in enumerate(keras_private.layers(model))
      if type(layer).__name__ == "TunableDropout" and layer.built
    }

  @property
  def names(self) -> dict[str, str]:
    """The names of all variables, by key."""
    return {entry.key: entry.name for entry in self.entries}

  @property
  def num_seeds(self) -> int:
    """The number of states of random number generators."""
    return sum(map(variables_lib.is_seed, self.names.values()))

  def leave_out_seeds(self) -> None:
    seeds = variables_lib.is_seed
    self.entries = [entry for entry in self.entries if not seeds(entry.name)]

  def compare_workers(self, topic: str) -> None:
    """Raises an error on all workers unless all of them call this alike."""
    lines = workers_lib.setting_lines(group_assignment=self.groups.to_lists())
    lines += [f"{entry.key}: {entry.kind}" for entry in self.entries]
    self.copies.compare_workers(topic, lines)

  def keys_that_differ(self, topic: str) -> set[str]:
    """Returns the keys of variables whose values differ within a group."""
    if self.groups.group_size == 1:
      return set()
    # A group, its first member and a member that differs, by key.
    differing: dict[str, tuple[Entry, int, int, int]] = {}
    digests = self.copies.digests([entry.variable for entry in self.entries])
    for entry, of_replica in zip(self.entries, digests, strict=True):
      for group, (first, *others) in enumerate(self.groups):
        for other in others:
          if of_replica[other] != of_replica[first]:
            differing.setdefault(entry.key, (entry, group, first, other))
    wrong = [pair for pair in differing.values() if pair[0].is_shared]
    if wrong:
      raise OutOfSyncError(self._difference(topic, len(wrong) - 1, *wrong[0]))
    return set(differing)

  def member(self, replica: int) -> int:
    """Returns the number of a replica among the members of its group."""
    members = self.groups.assignment[self.groups.index_of(replica)]
    return members.index(replica)

  def arrays(self, topic: str) -> dict[str, archive.Array]:
    """Returns the values of all groups as a file has them, on worker 0 only."""
    self.compare_workers(topic)
    differing = self.keys_that_differ(topic)
    warn_if_collapsed(self.optimizer)
    arrays: dict[str, archive.Array] = {}
    for entry in self.entries:
      members = self.groups.to_lists()
      if entry.key not in differing:
        members = [[min(group)] for group in members]
      replicas = [replica for group in members for replica in group]
      if max(replicas) < len(self.copies.engine.local_replicas):
        # The first worker has all of these replicas.
        here = self.copies.here(entry.variable)
        values = [here[replica] for replica in replicas]
      else:
        values = self.copies.read(entry.variable, replicas)
      for replica, array in zip(replicas, values, strict=True):
        index = self.groups.index_of(replica)
        member: int | None = self.member(replica)
        if entry.key not in differing:
          member = None
        arrays[key_in_file(entry.key, index, member)] = array
    return arrays if self.copies.is_first else {}

  def write(
    self,
    path: epath.Path,
    topic: str,
    arrays: Mapping[str, archive.Array],
    values: Mapping[str, Any] | None = None,
  ) -> None:
    """Writes a checkpoint on the first worker, with JSON `values` if given."""
    with self.raising_on_all(topic):
      if self.copies.is_first:
        about: dict[str, Any] = {
          "format": FORMAT,
          "group_assignment": self.groups.to_lists(),
          "names": self.names,
          "trained": self._trained,
          "rates": self.rates,
        }
        if values is not None:
          about["values"] = values
        archive.write(path, arrays, about)

  def read(self) -> Values:
    return {e.key: self.copies.here(e.variable) for e in self.entries}

  def take(self, models: Collection[int], kept: Values) -> Values:
    """Returns what is kept of all models, with some models' present values."""
    return self._joined(models, self.read(), kept)

  def put(self, values: Values, models: Collection[int] | None = None) -> None:
    """Assigns the values of all models, or of some of them."""
    if models is not None:
      values = self._joined(models, values, self.read())
    for entry in self.entries:
      self.copies.write(entry.variable, values[entry.key])
    accept_values(self.optimizer)

  def _joined(
    self, models: Collection[int], values: Values, others: Values
  ) -> Values:
    """Returns `values` of some models, and those of the other models."""
    replicas = self.copies.engine.local_replicas
    takes = [self.groups.index_of(replica) in models for replica in replicas]
    return {
      name: [
        new if take else old
        for new, old, take in zip(values[name], of_others, takes, strict=True)
      ]
      for name, of_others in (others or values).items()
    }

  def raising_on_all(
    self, topic: str
  ) -> contextlib.AbstractContextManager[list[dict[str, Any]]]:
    """Returns `raising_on_all`, with time for a slow disk to write all."""
    nbytes = sum(
      (entry.shape.num_elements() or 0) * tf.as_dtype(entry.variable.dtype).size
      for entry in self.entries
    )
    return raising_on_all(
      self.copies.workers, topic, nbytes * self.groups.num_groups
    )

  def _difference(
    self,
    topic: str,
    more: int,
    entry: Entry,
    group: int,
    first: int,
    other: int,
  ) -> str:
    """Describes how a variable differs between two members of a group."""
    pair = self.copies.read(entry.variable, [first, other])
    others = f" {more} more variables differ, too." if more else ""
    return (
      f"`{entry.name}` differs within group {group}"
      f" {list(self.groups.assignment[group])} at {topic}: replicas {first} and"
      f" {other} {_difference_in_words(*pair)}.{others} Members stay equal if"
      " they start equal and only the optimizer changes them. Find what else"
      " assigns the variable, or call Models.average() to make all replicas"
      " equal again."
    )


@contextlib.contextmanager
def raising_on_all(
  workers: workers_lib.Workers | None, topic: str, nbytes: int = 0
) -> Iterator[list[dict[str, Any]]]:
  """Raises an error of one worker on all, which would wait for it forever."""
  # This worker puts JSON values into it; at the end, it has those of each.
  outcomes: list[dict[str, Any]] = [{}]
  error: Exception | None = None
  try:
    yield outcomes
  except Exception as failure:
    if workers is None or isinstance(failure, _LOST):
      raise
    error = failure  # Raised below, after the other workers know of it.
  if workers is None:
    return
  words = error and str(getattr(error, "strerror", None) or error)
  number = getattr(error, "errno", None)
  text = json.dumps({"error": words, "errno": number, **outcomes[0]})
  texts = workers_lib.exchange(workers, topic, text, nbytes / _SLOWEST)
  if error is not None:
    raise error
  outcomes[:] = map(json.loads, texts)
  for name, other in zip(workers.names, outcomes, strict=True):
    if other["error"] and other["errno"]:
      raise OSError(other["errno"], f"On {name}: {other['error']}")
    if other["error"]:
      raise archive.CheckpointError(f"On {name}: {other['error']}")


def key_in_file(key: str, group: int, member: int | None = None) -> str:
  """Returns the name of an array of a group, or of one member, in a file."""
  of_member = "" if member is None else f"member_{member}/"
  return f"model_{group}/{of_member}{key}"


def _entry(key: str, variable: Any, is_shared: bool) -> Entry:
  return Entry(key, variables_lib.path_of(variable), variable, is_shared)


def warn_if_collapsed(optimizer: Any) -> None:
  """Warns if something other than the optimizer made the groups equal."""
  for warnings in optimizer_state.group_warnings_of(optimizer):
    warnings.check()


def accept_values(optimizer: Any) -> None:
  """Marks the current values as intended, so that no warning is given."""
  for warnings in optimizer_state.group_warnings_of(optimizer):
    warnings.accept()


def has_mean(variable: Any) -> bool:
  """Returns whether values may be averaged, as integers may not."""
  dtype = tf.as_dtype(variable.dtype)
  return bool(dtype.is_floating or dtype.is_complex)


def mean(arrays: Sequence[archive.Array]) -> archive.Array:
  """Returns the mean of arrays, computed in float64 or complex128."""
  count, dtype = len(arrays), arrays[0].dtype
  wide = np.complex128 if dtype.kind == "c" else np.float64
  with np.errstate(over="ignore", invalid="ignore"):  # The sum may overflow.
    total = sum(array.astype(wide) for array in arrays) / count
    parts = sum(array.astype(wide) / count for array in arrays)
  return np.asarray(np.where(np.isfinite(total), total, parts)).astype(dtype)


def variables_of(model: Any) -> list[Any]:
  """Returns the variables of a model, or those in a list."""
  if model is None:
    return []
  variables = getattr(model, "variables", model)
  variables = variables() if callable(variables) else variables
  if isinstance(variables, str) or not isinstance(variables, Iterable):
    raise TypeError(
      "`model` must be a built model or a list of its variables; got"
      f" {type(model).__name__}."
    )
  # tf_keras lists vocabularies, which have no numbers, among the variables.
  numbers = [v for v in variables if not hasattr(v, "get_tensors")]
  if not numbers:
    raise ValueError(
      "`model` has no variables yet. Build it first: call it on a batch, or"
      " give it a tf.keras.Input."
    )
  return numbers


def _strategy_of(entries: Sequence[Entry]) -> tf.distribute.Strategy:
  """Returns the strategy that all variables were created in."""
  owned = [(p.name, replicas_lib.strategy_of(p.variable)) for p in entries]
  owned = [pair for pair in owned if pair[1] is not None]
  for name, strategy in owned:
    if strategy is not owned[0][1]:
      raise ValueError(
        f"`{name}` and `{owned[0][0]}` belong to different strategies. Create"
        " the model and the optimizer inside the scope of one strategy."
      )
  return owned[0][1] if owned else tf.distribute.get_strategy()


def _difference_in_words(a: archive.Array, b: archive.Array) -> str:
  """Returns a phrase that says how far two arrays differ."""
  wide = np.complex128 if np.iscomplexobj(a) else np.float64
  with np.errstate(all="ignore"):
    differences = np.abs(a.astype(wide) - b.astype(wide))
  largest = float(np.max(differences, initial=0.0, where=differences > 0))
  if not largest:
    return "differ in bits only (NaN, or the sign of a zero)"
  return f"differ by up to {largest:.9g}"
