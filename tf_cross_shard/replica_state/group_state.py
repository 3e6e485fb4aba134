"""The state of each group of replicas: of the optimizer, and of the model.

Members of a group have the same weights and optimizer state, to the bit. What
is not trained, say the statistics of batch normalization, may be each
replica's own.
"""

import contextlib
import json
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.coordination import agreement, errors
from tf_cross_shard.inner_optimizer import optimizer_state
from tf_cross_shard.replica_state import archive, replica_values

FORMAT: Final = "tf_cross_shard.replica_state"
# After these the workers cannot tell each other anything.
_LOST: Final = (
  errors.MissingWorkerError,
  errors.WorkerLostError,
  tf.errors.OpError,
)
_SLOWEST: Final = 1e6  # bytes per second that a disk is waited for


class OutOfSyncError(AssertionError):
  """Members of a group have different values where they have to be equal."""


class Part(NamedTuple):
  """A variable of the state."""

  name: str
  variable: Any
  is_shared: bool

  @property
  def kind(self) -> str:
    """Dtype and shape, in words."""
    dtype = tf.as_dtype(self.variable.dtype).name
    return f"{dtype} {tf.TensorShape(self.variable.shape).as_list()}"


class GroupCopies:
  """The state of an optimizer and a model, in all groups.

  On several machines all workers call the methods alike.

  Attributes:
    optimizer: The optimizer, which may be given in the place of the model.
  """

  def __init__(
    self, optimizer: Any, model: Any = None, is_whole: bool = True
  ) -> None:
    """Finds the variables, the strategy and the groups.

    Of the optimizer only the groups unless `is_whole`; it need not be built.
    """
    optimizer, model = in_order(optimizer, model)
    self.optimizer = optimizer
    own = set(map(id, optimizer_state.member_state(optimizer)))
    state = optimizer_state.state_variables(optimizer) if is_whole else []
    self.parts = [
      Part(f"optimizer/{name}", variable, id(variable) not in own)
      for name, variable in state
    ]
    known = {id(replica_values.native(part.variable)) for part in self.parts}
    by_id = {id(replica_values.native(v)): v for v in variables_of(model)}
    variables = [v for key, v in by_id.items() if key not in known]
    paths = variables_lib.renumbered(
      list(map(variables_lib.path_of, variables))
    )
    self.parts += [
      Part(f"model/{name}", variable, bool(variable.trainable))
      for name, variable in zip(
        optimizer_state.unique(paths), variables, strict=True
      )
    ]
    self.copies = replica_values.Copies(_strategy_of(self.parts))
    self.groups = groups_of(optimizer, self.copies.engine.num_replicas)

  @property
  def num_workers(self) -> int:
    """How many workers train together."""
    workers = self.copies.workers
    return 1 if workers is None else len(workers.names)

  def agree(self, topic: str) -> None:
    """Raises the same error on all workers unless all do this."""
    lines = agreement.settings(group_assignment=self.groups.to_lists())
    lines += [f"{part.name}: {part.kind}" for part in self.parts]
    self.copies.agree(topic, lines)

  def apart(self, topic: str) -> set[str]:
    """Names of the variables of which members of a group have their own."""
    if self.groups.group_size == 1:
      return set()
    differing = []
    digests = self.copies.digests([part.variable for part in self.parts])
    for part, of_replica in zip(self.parts, digests, strict=True):
      for index, members in enumerate(self.groups):
        first = of_replica[members[0]]
        odd = [r for r in members if of_replica[r] != first]
        if odd:
          differing.append((part, index, members[0], odd[0]))
          break
    wrong = [difference for difference in differing if difference[0].is_shared]
    if wrong:
      raise OutOfSyncError(self._difference(topic, wrong))
    return {part.name for part, *_ in differing}

  def arrays(
    self, apart: Collection[str], own: bool = False
  ) -> dict[str, archive.Array]:
    """Returns every group's values: of `apart` once per member of the group.

    On several machines the first worker has them; others only take part. Each
    has its own replicas' if `own`, and nothing travels.
    """
    engine = self.copies.engine
    arrays: dict[str, archive.Array] = {}
    replicas = engine.replicas_here if own else range(engine.num_replicas)
    for part in self.parts:
      values = (
        self.copies.here(part.variable)
        if own
        else self.copies.read(part.variable, replicas)
      )
      for replica, array in zip(replicas, values, strict=True):
        index = self.groups.index_of(replica)
        member = self.groups.assignment[index].index(replica)
        name = key(part.name, index, member if part.name in apart else None)
        if own or self.copies.is_first:
          arrays.setdefault(name, array)
    return arrays

  def write(
    self,
    path: pathlib.Path,
    topic: str,
    arrays: Mapping[str, archive.Array],
  ) -> None:
    """Writes a checkpoint; an error of one worker is raised on all."""
    with self.together(topic):
      if self.copies.is_first:
        archive.write(path, arrays, self.about())

  def put(self, plan: Iterable[Sequence[archive.Array]]) -> None:
    """Gives this process' replicas the values of each variable."""
    for part, arrays in zip(self.parts, plan, strict=True):
      self.copies.write(part.variable, arrays)
    accept_values(self.optimizer)

  def about(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns what a checkpoint says of itself.

    With `values`, which JSON knows, it is a worker's own.
    """
    own = {"values": values, "workers": self.num_workers}
    return {
      "format": FORMAT,
      "group_assignment": self.groups.to_lists(),
      "names": [part.name for part in self.parts],
      **({} if values is None else own),
    }

  def together(
    self, topic: str
  ) -> contextlib.AbstractContextManager[list[dict[str, Any]]]:
    """As the function, for as long as a disk may take for all groups."""
    nbytes = sum(
      (tf.TensorShape(part.variable.shape).num_elements() or 0)
      * tf.as_dtype(part.variable.dtype).size
      for part in self.parts
    )
    patience = nbytes * self.groups.num_groups / _SLOWEST
    return together(self.copies.workers, topic, patience)

  def _difference(
    self, topic: str, differing: Sequence[tuple[Part, int, int, int]]
  ) -> str:
    """Returns the error for members that differ, with the first variable."""
    part, index, first, odd = differing[0]
    pair = self.copies.read(part.variable, [first, odd])
    others = len(differing) - 1
    more = f" So do {others} more variables." if others else ""
    return (
      f"`{part.name}` differs within group {index}"
      f" {list(self.groups.assignment[index])} at {topic}: replicas {first} and"
      f" {odd} {_apart_by(*pair)}.{more} Members of a group are equal as"
      " long as they start equal and only the optimizer changes them. Look with"
      " replica_state.values() for what else assigns it; average() makes all"
      " replicas equal again."
    )


@contextlib.contextmanager
def together(
  workers: agreement.Workers | None, topic: str, patience: float = 0.0
) -> Iterator[list[dict[str, Any]]]:
  """A context at whose end all workers raise what one of them has raised.

  It is a list with what this worker tells, in JSON; afterwards with what all of
  them do.
  """
  outcomes: list[dict[str, Any]] = [{}]
  error: Exception | None = None
  try:
    yield outcomes
  except Exception as failure:
    if workers is None or isinstance(failure, _LOST):
      raise
    error = failure
  if workers is None:
    return
  words = error and str(getattr(error, "strerror", None) or error)
  own = {"error": words, "errno": getattr(error, "errno", None), **outcomes[0]}
  texts = agreement.exchange(workers, topic, json.dumps(own), patience)
  if error is not None:
    raise error
  outcomes[:] = map(json.loads, texts)
  for name, other in zip(workers.names, outcomes, strict=True):
    if other["error"] and other["errno"]:
      raise OSError(other["errno"], f"On {name}: {other['error']}")
    if other["error"]:
      raise archive.CheckpointError(f"On {name}: {other['error']}")


def key(name: str, group: int, member: int | None = None) -> str:
  """Returns the name of a group's array in a checkpoint."""
  own = "" if member is None else f"member_{member}/"
  return f"group_{group}/{own}{name}"


def in_order(optimizer: Any, other: Any) -> tuple[Any, Any]:
  """Returns the optimizer first, where it was given second."""
  if hasattr(other, "apply_gradients") and not (
    hasattr(optimizer, "apply_gradients")
  ):
    return other, optimizer
  return optimizer, other


def groups_of(optimizer: Any, num_replicas: int | None) -> groups_lib.Groups:
  """Returns the groups in force: the optimizer's, or one of all replicas."""
  for layer in optimizer_state.nested_optimizers(optimizer):
    groups = getattr(layer, "groups", None)
    if isinstance(groups, groups_lib.Groups):
      if num_replicas not in (None, groups.num_replicas):
        raise ValueError(
          f"`optimizer` has groups of {groups.num_replicas} replicas,"
          f" {groups.to_lists()}; the variables have {num_replicas}. Make"
          " both inside the scope of one strategy."
        )
      return groups
  return groups_lib.contiguous(num_replicas or 1, num_replicas or 1)


def watches_of(optimizer: Any) -> list[Any]:
  """Returns the watches for something else that makes groups equal."""
  return [step.watch for step in steps_of(optimizer)]


def steps_of(optimizer: Any) -> list[Any]:
  """Returns the steps of the CrossShardOptimizer among nested optimizers."""
  layers = optimizer_state.nested_optimizers(optimizer)
  return list(filter(None, map(optimizer_state.step_of, layers)))


def check_values(optimizer: Any) -> None:
  """Warns if others than the optimizer made groups equal."""
  for watch in watches_of(optimizer):
    watch.check()


def accept_values(optimizer: Any) -> None:
  """Has no warning follow of the values that groups have now."""
  for watch in watches_of(optimizer):
    watch.accept()


def has_mean(variable: Any) -> bool:
  """Whether it has a mean: not integers, such as states of random numbers."""
  dtype = tf.as_dtype(variable.dtype)
  return bool(dtype.is_floating or dtype.is_complex)


def mean(arrays: Sequence[archive.Array]) -> archive.Array:
  """Returns the mean, added up in 64 bits; divided before it overflows."""
  count, dtype = len(arrays), arrays[0].dtype
  wide = np.complex128 if dtype.kind == "c" else np.float64
  with np.errstate(over="ignore", invalid="ignore"):
    total = sum(array.astype(wide) for array in arrays) / count
    parts = sum(array.astype(wide) / count for array in arrays)
  return np.asarray(np.where(np.isfinite(total), total, parts)).astype(dtype)


def variables_of(model: Any) -> list[Any]:
  """Returns the variables of a model, or those in a list."""
  if model is None:
    return []
  variables = getattr(model, "variables", model)
  variables = variables() if callable(variables) else variables
  # tf_keras lists vocabularies among them.
  numbers = [v for v in variables if not hasattr(v, "get_tensors")]
  if not numbers:
    raise ValueError(
      "`model` has no variables yet. Build it first: call it on a batch, or"
      " give it a tf.keras.Input."
    )
  return numbers


def _strategy_of(parts: Sequence[Part]) -> tf.distribute.Strategy:
  """Returns the one strategy whose replicas have the variables."""
  owned = [(p.name, replica_values.strategy_of(p.variable)) for p in parts]
  owned = [pair for pair in owned if pair[1] is not None]
  for name, strategy in owned:
    if strategy is not owned[0][1]:
      raise ValueError(
        f"`{name}` and `{owned[0][0]}` belong to different strategies. Make"
        " model and optimizer inside the scope of one."
      )
  return owned[0][1] if owned else tf.distribute.get_strategy()


def _apart_by(a: archive.Array, b: archive.Array) -> str:
  """Returns how far two arrays are apart, in words."""
  wide = np.complex128 if np.iscomplexobj(a) else np.float64
  with np.errstate(all="ignore"):
    differences = np.abs(a.astype(wide) - b.astype(wide))
  largest = float(np.max(differences, initial=0.0, where=differences > 0))
  if not largest:
    return "differ in bits only (NaN, or the sign of a zero)"
  return f"differ by up to {largest:.9g}"
