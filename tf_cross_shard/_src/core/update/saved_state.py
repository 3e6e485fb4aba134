"""Presents sharded optimizer state as if the optimizer were not sharded.

Files that are saved with `shard_update` must load without it, and the other way
round. So everything that saves an optimizer (`optimizer.variables`, HDF5 and
`.keras` files, `tf.train.Checkpoint`) must find the variables of the *plain*
optimizer, in the order and under the names that Keras gives them when the
optimizer is built on the model's whole weights. Only Keras knows this order and
these names. So `of_shards` builds a second optimizer, the *template*, with the
same settings and on weights that have the same names, but one element each.
`PlainState` then replaces each slot of the template with a `WholeSlot`, which
reads and writes the shards:

    template.variables     iterations   learning_rate   momentum of a   ...
                               │              │               │
    PlainState.variables   opt's own      opt's own     WholeSlot(a) ─▶ shards

If each weight has an owner, the optimizer is built on the whole weights and is
its own template; see `of_owners`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import inner as inner_lib
from tf_cross_shard._src.core.inner import keras_private
from tf_cross_shard._src.core.keras_types import Optimizer, Variable
from tf_cross_shard._src.core.reduce import engine as engines
from tf_cross_shard._src.core.update import whole_slots

_Trackable: Final[Any] = tf.__internal__.tracking.Trackable


class CheckpointView(_Trackable):
  """The object that `tf.train.Checkpoint` sees instead of the optimizer.

  A checkpoint walks over named children. This view has the children of the
  plain optimizer, under the same names, but with whole slots in place of the
  slots. Values that are restored before the optimizer is built wait until
  `add`.

  Attributes:
    children: The children by name. A list of slots is a `CheckpointView`, too.
  """

  def __init__(
    self, children: dict[str, Any], optimizer: Optimizer = None
  ) -> None:
    """Creates a view of the `children` that are already known.

    It also contains the unsharded children (iteration count, learning rate,
    loss scale) of `optimizer`, if this is given.
    """
    self._maybe_initialize_trackable()
    self.children = children
    self._optimizer = optimizer
    nested = self._unsharded_children().get("inner_optimizer")
    if nested is not None:
      children["inner_optimizer"] = CheckpointView({}, nested)

  def add(self, built: "CheckpointView") -> None:
    """Adds the children of a built optimizer, and restores waiting values."""
    for name, child in built.children.items():
      known = self.children.setdefault(name, child)
      if known is not child:
        known.add(child)
    for name, child in self._trackable_children().items():
      self._handle_deferred_dependencies(name, child)

  @property
  def has_waiting_values(self) -> bool:
    """Whether restored values wait for the optimizer to be built."""
    nested = self.children.get("inner_optimizer")
    return bool(self._deferred_dependencies) or bool(
      nested and nested.has_waiting_values
    )

  def _unsharded_children(self) -> dict[str, Any]:
    """Returns the optimizer's counts, learning rates and loss scales."""
    if self._optimizer is None:
      return {}
    return {
      name: child
      for name, child in keras_private.children(self._optimizer).items()
      if not isinstance(child, (list, dict))
    }

  # The methods by which TensorFlow saves and restores an object.

  def _trackable_children(
    self, save_type: str = "checkpoint", **kwargs: Any
  ) -> dict[str, Any]:
    """Returns the children that a checkpoint or a SavedModel saves."""
    del kwargs
    children = {**self._unsharded_children(), **self.children}
    if save_type == "checkpoint":
      return children
    # tf.saved_model.save reads variables in a graph, and a graph cannot join
    # parts that are on several devices.
    return {
      name: child
      for name, child in children.items()
      if not isinstance(child, whole_slots.WholeSlot)
    }

  def _lookup_dependency(self, name: str, *args: Any) -> Any:
    del args
    return self._trackable_children().get(name)


@dataclasses.dataclass(frozen=True)
class Template:
  """An optimizer whose variables have the plain optimizer's order and names.

  Attributes:
    optimizer: The optimizer, built.
    weights: The variables that it was built on.
    slots: For each weight, pairs of a slot and of the optimizer's attribute
      that holds the slot.
  """

  optimizer: Optimizer
  weights: Sequence[Variable]
  slots: Sequence[Sequence[tuple[str, Any]]]


# A function of the index of a weight, the attribute of a slot and the
# template's slot. It returns the wrapped optimizer's variable that holds
# the slot (or a part of it), and the whole slot, which savers see.
FindSlot = Callable[[int, str, Any], tuple[Any, Any]]


class PlainState:
  """Sharded state, presented in the form that it would have without sharding.

  This class has the members of `inner_lib.Inner` that savers need.

  Attributes:
    variables: The variables of the plain optimizer, in its order: whole slots,
      and the optimizer's own counts and learning rates.
    trainable_variables: The weights that the plain optimizer would be built on.
    checkpoint_view: The object that a checkpoint saves instead of the
      optimizer.
  """

  def __init__(
    self,
    inner: inner_lib.Inner,
    weights: Sequence[Variable],
    template: Template,
    find_slot: FindSlot,
  ) -> None:
    """Finds where `inner`, which is built, keeps the state of each weight."""
    self.trainable_variables = list(weights)
    self._indices = {
      id(variables_lib.native(weight)): i for i, weight in enumerate(weights)
    }
    # Maps the id of a variable of the template to the object that savers see
    # instead of this variable.
    self._replacements: dict[int, Any] = {
      id(tiny): weight
      for tiny, weight in zip(template.weights, weights, strict=True)
    }
    # Maps the id of a slot of `inner` to the slot's name.
    names = {
      id(slot): name
      for variable in inner.trainable_variables
      for name, slot in inner.slots(variable).items()
    }
    # Replace the template's slots by whole slots.
    self._slots: list[dict[str, Any]] = [{} for _ in weights]
    sharded: set[int] = set()
    for i, of_weight in enumerate(template.slots):
      for attribute, slot in of_weight:
        source, whole = find_slot(i, attribute, slot)
        sharded.add(id(source))
        self._replacements[id(slot)] = whole
        self._slots[i][names[id(source)]] = whole
    # Both optimizers have the same remaining variables (counts, learning rates)
    # in the same order. Replace those of the template with those of `inner`.
    listed = keras_private.listed(template.optimizer)
    remaining = [v for v in listed if id(v) not in self._replacements]
    of_inner = keras_private.listed(inner.optimizer)
    others = [v for v in of_inner if id(v) not in sharded]
    for variable, other in zip(remaining, others, strict=True):
      self._replacements[id(variable)] = other
    self.variables = [self._replacements[id(v)] for v in listed]
    self.checkpoint_view = self._make_checkpoint_view(template.optimizer)

  def index(self, variable: Variable) -> int | None:
    return self._indices.get(id(variables_lib.native(variable)))

  def slots(self, variable: Variable) -> dict[str, Variable]:
    index = self.index(variable)
    return {} if index is None else dict(self._slots[index])

  def view(self, variable: Variable, name: str) -> Any:
    """Returns a slot of a weight, read-only; None if there is no such slot."""
    slot = self.slots(variable).get(name)
    return slot.read_only() if isinstance(slot, whole_slots.WholeSlot) else slot

  def save_own_variables(self, store: Any) -> None:
    for i, variable in enumerate(self.variables):
      store[str(i)] = variable.numpy()

  def load_own_variables(self, store: Any) -> None:
    self.set_weights([store[str(i)] for i in range(len(store.keys()))])

  def set_weights(self, weights: Any) -> None:
    weights = list(weights)
    if len(weights) != len(self.variables):
      raise ValueError(
        f"The optimizer has {len(self.variables)} variables, but {len(weights)}"
        " values were given. Create the optimizer with the settings that it was"
        " saved with, and build it on the model's trainable variables."
      )
    for variable, value in zip(self.variables, weights, strict=True):
      variable.assign(value)

  def _make_checkpoint_view(self, template: Any) -> CheckpointView:
    """Returns the template's children, with the replacements."""
    children: dict[str, Any] = {}
    for name, child in keras_private.children(template).items():
      if isinstance(child, list):
        children[name] = CheckpointView(
          {
            str(i): self._replacements.get(id(part), part)
            for i, part in enumerate(child)
            if part is not None  # A weight may have no slot of this kind.
          }
        )
      elif name == "inner_optimizer":
        children[name] = self._make_checkpoint_view(child)
      elif isinstance(child, dict):
        children[name] = child
    return CheckpointView(children)


def of_shards(
  inner: inner_lib.Inner,
  weights: Sequence[Variable],
  places: Sequence[tuple[int, int | None]],
  engine: engines.Engine,
) -> PlainState:
  """Returns the state of an optimizer that is built on shards and on tables.

  For each weight, `places` has two numbers: the index of the variable of
  `inner` that holds the weight, and the position of the weight's first element
  within the joined shards. The position is None for a table, which is not
  sharded.
  """
  # One copy of the template is enough: creating a copy for each replica takes
  # four times as long.
  with variables_lib.outside_of_strategies():
    plain = _new(inner.optimizer)
    tiny = [inner.make_tiny(weight) for weight in weights]
    plain.build(tiny)
  template = Template(
    plain, tiny, _slots_of_all(inner_lib.innermost(plain), len(weights))
  )
  count = len(inner.trainable_variables)
  flat_slots = list(map(dict, _slots_of_all(inner.innermost, count)))

  def find_slot(i: int, attribute: str, named: Any) -> tuple[Any, Any]:
    index, start = places[i]
    slot = flat_slots[index][attribute]
    if start is None:
      return slot, slot
    shape = tf.TensorShape(weights[i].shape)
    return slot, whole_slots.WholeSlot(named, slot, start, shape, engine)

  return PlainState(inner, weights, template, find_slot)


def of_owners(
  inner: inner_lib.Inner,
  weights: Sequence[Variable],
  owners: Sequence[int | None],
  engine: engines.Engine,
) -> PlainState:
  """Returns the state of an optimizer whose weights each have an owner.

  `owners` has, for each weight, the owner's position among the members of a
  group; None if all members update the weight. Raises `ValueError` if the owner
  of a slot is not known.
  """
  slots = [list(inner.slots(weight).items()) for weight in weights]
  known = {id(slot) for of_weight in slots for _, slot in of_weight}
  for variable in keras_private.listed(inner.optimizer):
    # Scalars, such as counts, are equal on all members.
    if id(variable) not in known and len(variable.shape):
      kind = type(inner.innermost).__name__
      raise ValueError(
        f"{variable.name} of {kind} cannot be matched to exactly one weight."
        " Store slots in a list parallel to the variables or in a dict keyed by"
        " variable path, or remove `shard_update`."
      )

  def find_slot(i: int, attribute: str, slot: Any) -> tuple[Any, Any]:
    del attribute
    owner = owners[i]
    if owner is None:
      return slot, slot
    return slot, whole_slots.ByVariableSlot(slot, owner, engine)

  # The optimizer already has whole slots under the plain optimizer's names.
  template = Template(inner.optimizer, weights, slots)
  return PlainState(inner, weights, template, find_slot)


def _new(optimizer: Optimizer) -> Optimizer:
  config = optimizer.get_config()
  nested = getattr(optimizer, "inner_optimizer", None)
  if nested is None:
    return type(optimizer).from_config(config)
  # Not `from_config`: in a LossScaleOptimizer of tf_keras, it makes a Lion of
  # Keras 3 from the configuration of tf_keras' Lion.
  return type(optimizer)(**{**config, "inner_optimizer": _new(nested)})


def _slots_of_all(
  optimizer: Optimizer, count: int
) -> list[list[tuple[str, Any]]]:
  return [
    list(inner_lib.slots_at(optimizer, index, count, ()))
    for index in range(count)
  ]
