"""What a conversion will assign: found, read and checked, and not yet done."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from tf_cross_shard.inner_optimizer import base
from tf_cross_shard.migration import (
  adapters,
  matching,
  models,
  slot_names,
  steps_in,
  v1_file,
)
from tf_cross_shard.replica_state import archive

ITERATIONS: Final = "iterations"
_MOMENTUM_REMEDY: Final = (
  "Hand in the optimizer that tf_cross_shard.migration.from_v1 makes of"
  " version 1's, which keeps momentum as version 1 did."
)


class Assignment(NamedTuple):
  """A variable, and the value that it is to receive."""

  name: str
  variable: Any
  source: str
  value: archive.Array


class Plan:
  """Finds the counterpart of everything."""

  def __init__(
    self,
    file: v1_file.V1File,
    model: Any,
    optimizer: Any,
    kept: adapters.Kept | None,
    names: matching.Names,
    allowed: matching.Allowed,
    slots: str | None = None,
  ) -> None:
    """Compares names, shapes and dtypes, and then reads the values."""
    self._file = file
    self._allowed = allowed
    self._optimizer = base.innermost(optimizer)
    self._kind = slot_names.kind_of(self._optimizer)
    self._found: list[tuple[str, Any, str, Any]] = []
    self._used: set[str] = set()
    self._wanted: dict[str, Any] = {}

    weights = models.weights_of(model)
    labels = matching.labels_of(weights)
    self._wanted.update(zip(labels, weights, strict=True))
    step: str | None = None
    if isinstance(names, Mapping) and ITERATIONS not in labels:
      step = names.get(ITERATIONS)
      names = {key: name for key, name in names.items() if key != ITERATIONS}
    sources = matching.match_weights(model, weights, file.shapes, names)
    for label, source in sources.items():
      self._take(label, self._wanted[label], source)
    if kept is not None:
      own = {
        label: kept.slots.get(id(weight), {})
        for label, weight in zip(labels, weights, strict=True)
      }
      self._match_slots(own, kept.others, sources, slots)
      self._match_iterations(step)

    matched = {name for name, *_ in self._found}
    self.unmatched_in_checkpoint: matching.Shapes = {
      n: shape
      for n, shape in file.shapes.items()
      if n not in self._used and kept is not None
    }
    self.unmatched_in_model: matching.Shapes = {
      name: tuple(self._wanted[name].shape)
      for name in sorted(set(self._wanted) - matched)
    }
    matching.check_unmatched(
      self.unmatched_in_checkpoint, self.unmatched_in_model, allowed
    )
    if not sources:
      raise ValueError(
        f"`src` has no value for any weight of `model`: {file.path} holds"
        f" {', '.join(file.shapes) or 'nothing'}. Name the checkpoint of this"
        " model, or say with `names` which variables belong together."
      )
    self._check_forms()
    self.assignments = [
      Assignment(name, variable, source, self._value(variable, source, value))
      for name, variable, source, value in self._found
    ]

  @property
  def steps(self) -> int:
    """The count of steps that the optimizer is to have."""
    count = self._optimizer.iterations
    values = [a.value for a in self.assignments if a.variable is count]
    return int(values[0] if values else count.numpy())

  def _take(
    self, name: str, variable: Any, source: str, value: Any = None
  ) -> None:
    """Notes a counterpart; its value if it is not simply what is stored."""
    self._found.append((name, variable, source, value))
    self._used.add(source)

  def _want(self, name: str, variable: Any) -> None:
    """Notes a variable of the optimizer, whatever the model's are called."""
    while name in self._wanted:
      name = f"optimizer/{name}"
    self._wanted[name] = variable

  def _name_of(self, variable: Any) -> str:
    """The name under which a variable was noted."""
    return next(n for n, other in self._wanted.items() if other is variable)

  def _match_slots(
    self,
    slots: dict[str, Mapping[str, Any]],
    others: Sequence[Any],
    sources: dict[str, str],
    asked: str | None,
  ) -> None:
    """Finds what version 1's optimizer kept for each weight."""
    # tf_keras makes a momentum even where it is 0, and then forgets it.
    is_idle = self._kind == "SGD" and not (
      adapters.setting_of(self._optimizer, "momentum")
    )
    # Version 1 makes one too; a plain SGD may be meant to replace something
    # that had one, and one of `from_v1` has what version 1's had.
    is_as_v1 = getattr(self._optimizer, "slots_as_v1", False)
    drops = is_idle and is_as_v1
    if is_idle:
      slots = {label: {} for label in slots}
    for label, own in slots.items():
      for name, slot in own.items():
        self._want(f"{label}/{name}", slot)
    for path, other in zip(matching.labels_of(others), others, strict=True):
      self._want(path, other)
    owners = {source: label for label, source in sources.items()}
    trained = [s for s, label in owners.items() if drops or slots[label]]
    free = [name for name in self._file.shapes if name not in self._used]
    found: slot_names.Families = {}
    if self._kind is not None:
      found = slot_names.families(
        self._kind,
        trained,
        free,
        asked,
        known=self._known_names(self._kind),
        size=slot_names.size_of(self._kind, self._optimizer),
        is_left_out=self._allowed.names,
      )
    if asked is not None and not found:
      raise ValueError(
        f"`slots` is {asked!r}, and beside no weight does the checkpoint hold"
        f" slots of that name, as many as {type(self._optimizer).__name__}"
        f" has. It holds {', '.join(free) or 'nothing else'}."
      )
    family = self._choose_family(found, asked, must_ask=not drops)
    if family is None or self._kind is None:
      return
    for owner, count in found[family].items():
      label = owners[owner]
      order = slot_names.order_of(self._kind, count)
      for number, possible in enumerate(order):
        source = family.slot(owner, number)
        names = [name for name in slots[label] if name in possible]
        if names:
          slot = slots[label][names[0]]
          value = self._momentum(source) if self._kind == "SGD" else None
          self._take(self._name_of(slot), slot, source, value)
        elif drops or (
          is_as_v1 and slot_names.is_dropped(self._kind, possible)
        ):
          self._used.add(source)

  def _known_names(self, kind: str) -> tuple[str, str]:
    """Version 1's usual name, and the optimizer's own."""
    # `from_v1` keeps the name that version 1's optimizer had.
    own = adapters.adapter_of(self._optimizer).name
    return slot_names.default_of(kind), own

  def _choose_family(
    self, found: slot_names.Families, asked: str | None, must_ask: bool
  ) -> slot_names.Family | None:
    """The optimizer of version 1 whose slots these are."""
    # Named by the first slot of the first variable, so that users may name
    # those that it is not as they name anything.
    options = {
      family.slot(next(iter(counts)), 0): family
      for family, counts in found.items()
    }
    if self._kind is None or not options:
      return None
    left = list(options)
    if len(left) > 1:
      left = [name for name in left if not self._allowed.names(name)]
    # Averages look like slots, and only names tell them apart.
    usual, own = known = self._known_names(self._kind)
    sure = [n for n in left if asked is not None or options[n].name in known]
    what = "The optimizer's first slot"
    calls = list(dict.fromkeys(options[name].called for name in sure))
    if len(calls) > 1:
      other = options[sure[-1]]
      [owner, count], *_ = found[other].items()
      raise ValueError(
        f"{what} may be {' or '.join(f'`{name}`' for name in sure)} of the"
        f" checkpoint. Say {' or '.join(f'`slots={c!r}`' for c in calls)}, or"
        " list in `allow_unmatched` the slots of the others, as"
        f" {[other.slot(owner, number) for number in range(count)]}."
      )
    if sure:
      name = matching.choose(what, sure, self._allowed, False)
      return None if name is None else options[name]
    unsure = [name for name in left if not self._allowed.names(name)]
    if unsure and must_ask:
      raise ValueError(
        f"{what} may be {' or '.join(f'`{name}`' for name in unsure)} of the"
        f" checkpoint, and the name tells not: it is neither {usual!r} nor this"
        f" optimizer's own, {own!r}. Say"
        f" `slots={options[unsure[0]].called!r}` if these are its slots, or"
        " list in `allow_unmatched` what is not."
      )
    return None

  def _momentum(self, source: str) -> Any:
    """Version 1's momentum, as this optimizer keeps it."""
    if getattr(self._optimizer, "slots_as_v1", False):
      return None
    rate = adapters.rate_of(self._optimizer)
    if not rate:
      found = "a schedule" if rate is None else "0"
      raise ValueError(
        f"`optimizer` is {type(self._optimizer).__name__}, whose momentum has"
        " the learning rate of each step in it, where version 1's has none:"
        f" {source} cannot be converted for a learning rate that is {found}."
        f" {_MOMENTUM_REMEDY}"
      )
    # Keras: momentum = -rate * accumulator, variable += momentum.
    value = self._file.read(source)
    return (-value.dtype.type(rate) * value).astype(value.dtype)

  def _match_iterations(self, asked: str | None) -> None:
    """Finds the number of steps."""
    count = self._optimizer.iterations
    self._want(ITERATIONS, count)
    free = [name for name in self._file.shapes if name not in self._used]
    betas = [
      adapters.setting_of(self._optimizer, f"beta_{number}")
      for number in (1, 2)
      if self._kind == "Adam"
    ]
    steps = steps_in.find(self._file, free, betas, self._allowed, asked)
    if steps is not None:
      value = np.array(steps.number)
      self._take(self._name_of(count), count, steps.source, value)
      self._used.update(steps.confirmed_by)

  def _check_forms(self) -> None:
    """Raises an error unless shapes and dtypes are alike."""
    lines = []
    for name, variable, source, _ in self._found:
      shape, dtype = self._file.shapes[source], self._file.dtypes[source]
      if variable is self._optimizer.iterations:
        continue  # From what may be a power.
      if (shape, dtype) != (tuple(variable.shape), _dtype(variable)):
        lines.append(
          f"  {name} is {_dtype(variable).name} {list(variable.shape)};"
          f" {source} in the checkpoint is {dtype.name} {list(shape)}"
        )
    if lines:
      raise ValueError(
        "Shapes or dtypes differ:\n" + "\n".join(sorted(lines)) + "\nBuild the"
        " model as it was in version 1, or say with `names` which variables"
        " belong together."
      )

  def _value(self, variable: Any, source: str, value: Any) -> archive.Array:
    """The value to assign."""
    value = self._file.read(source) if value is None else value
    numpy_dtype = _dtype(variable).as_numpy_dtype
    return np.asarray(value, numpy_dtype).reshape(tuple(variable.shape))


def foreseen(optimizer: Any, trained: Sequence[Any]) -> adapters.Kept | None:
  """What an optimizer that is not built will keep."""
  # Those that version 1 had as well have slots as large as the variables.
  is_alike = slot_names.kind_of(base.innermost(optimizer)) is not None
  return adapters.foreseen(optimizer, trained, is_alike)


def _dtype(variable: Any) -> tf.DType:
  """The dtype of a variable of either Keras."""
  return tf.as_dtype(variable.dtype)
