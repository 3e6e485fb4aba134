"""State in shards, seen as the plain optimizer's: whole slots by its names.

What saves an optimizer asks it for its variables, in an order and under names
that depend on the weights it was built on. So a second optimizer of the same
settings is built on tiny weights of the same names, and in the place of each of
its slots stands a `WholeSlot`, which reads and writes the members' parts.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.inner_optimizer import base, libraries, optimizer_state
from tf_cross_shard.replica_state import group_models, replica_values

_Trackable: Final[Any] = tf.__internal__.tracking.Trackable


class WholeSlot(_Trackable):
  """A slot of one weight whose parts the members of each group have.

  It reads and is assigned like a variable, eagerly and outside `strategy.run`:
  group 0 is read, as of a variable, and all groups are assigned.

  Attributes:
    parts: The variable whose copies are the parts, also of other weights.
  """

  trainable = False

  def __init__(
    self,
    named: Any,
    slot: Any,
    start: int,
    shape: Sequence[int],
    engine: engines.Engine,
  ) -> None:
    """Stands for `named`, in the members' copies of `slot` from `start` on."""
    self.name = str(named.name)
    self.path = str(getattr(named, "path", named.name))
    self.shape = tf.TensorShape(shape)
    self.dtype = tf.as_dtype(slot.dtype)
    self.distribute_strategy = engine.strategy
    self.parts = slot
    self._start = start
    self._groups = engine.groups
    self._is_view = False

  def view(self) -> "WholeSlot":
    """Returns this slot for reading, as `get_slot` does."""
    view = copy.copy(self)
    view._is_view = True
    return view

  def numpy(self) -> np.ndarray[Any, Any]:
    """The first group's value."""
    return self._join(
      self._copies().read(
        self.parts, self._groups.members_of(self._groups.assignment[0][0])
      )
    )

  def read_value(self) -> tf.Tensor:
    """The first group's value, as a tensor."""
    return tf.constant(self.numpy())

  def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
    """The first group's value, for what NumPy, Keras and TensorFlow read."""
    del copy  # It is one always.
    return self.numpy().astype(dtype or self.dtype.as_numpy_dtype)

  def assign(self, value: Any) -> None:
    """Gives all groups one value.

    Raises:
      TypeError: If it is a view: a loop of the user's that assigns slots would
        write parts of all replicas.
    """
    if self._is_view:
      raise TypeError(
        f"The slot {self.path} is read only under `shard_update`: its parts are"
        " on the members of each group. Assign the variable of this name in"
        " optimizer.variables, which gives all groups one value."
      )
    value = np.asarray(value, self.dtype.as_numpy_dtype)
    if value.shape != tuple(self.shape):
      raise ValueError(
        f"{self.path} has shape {tuple(self.shape)}; got a value of shape"
        f" {value.shape}. Load the state of the same model."
      )
    self.set_copies([value] * len(self._copies().engine.replicas_here))

  def whole_copies(self) -> list[np.ndarray[Any, Any]]:
    """The values that the replicas of this process take part in."""
    copies = self._copies()
    parts = copies.read(self.parts, range(self._groups.num_replicas))
    return [
      self._join([parts[member] for member in self._groups.members_of(replica)])
      for replica in copies.engine.replicas_here
    ]

  def set_copies(self, values: Sequence[np.ndarray[Any, Any]]) -> None:
    """Gives each replica of this process its part of its own value."""
    copies = self._copies()
    parts = copies.here(self.parts)
    for replica, part, value in zip(
      copies.engine.replicas_here, parts, values, strict=True
    ):
      size = len(part)
      offset = self._groups.members_of(replica).index(replica) * size
      low = max(self._start, offset)
      high = min(self._start + value.size, offset + size)
      if low < high:
        own = value.reshape(-1)[low - self._start : high - self._start]
        part[low - offset : high - offset] = own
    copies.write(self.parts, parts)

  def _join(self, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
    """This slot in the parts of all members of a group."""
    shape = tuple(self.shape)
    end = self._start + int(np.prod(shape))
    return np.concatenate(parts)[self._start : end].reshape(shape)

  def _copies(self) -> replica_values.Copies:
    return replica_values.Copies(self.distribute_strategy)

  # What tf.train.Checkpoint asks for.

  def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
    return {"VARIABLE_VALUE": self.read_value()}

  def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
    self.assign(restored["VARIABLE_VALUE"].numpy())


class OwnedSlot(WholeSlot):
  """A slot of which one member's copy is in force: its owner's."""

  def __init__(self, slot: Any, owner: int, engine: engines.Engine) -> None:
    """Stands for a slot of the weight that the owner-th member updates."""
    super().__init__(slot, slot, 0, tuple(slot.shape), engine)
    self._owner = owner

  def set_copies(self, values: Sequence[np.ndarray[Any, Any]]) -> None:
    """Gives each replica of this process its own value."""
    self._copies().write(self.parts, list(values))

  def _join(self, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
    return parts[self._owner]


class Children(_Trackable):
  """The object that a checkpoint sees in the place of a sharded optimizer.

  What is restored before the optimizer is built waits for `add`.
  """

  def __init__(self, children: dict[str, Any], optimizer: Any = None) -> None:
    """Also has the children of `optimizer` that are not in parts."""
    self._maybe_initialize_trackable()
    self._children = children
    self._optimizer = optimizer
    within = self._own().get("inner_optimizer")
    if within is not None:
      children["inner_optimizer"] = Children({}, within)

  def add(self, built: "Children") -> None:
    """Adds what there is when it is built, and gives it what waits."""
    for name, child in built._children.items():
      known = self._children.setdefault(name, child)
      if known is not child:
        known.add(child)
    for name, child in self._trackable_children().items():
      self._handle_deferred_dependencies(name, child)

  @property
  def waits(self) -> bool:
    """Whether something that was restored waits."""
    within = self._children.get("inner_optimizer")
    return bool(self._deferred_dependencies) or bool(within and within.waits)

  def _own(self) -> dict[str, Any]:
    """Counts, rates and scales of the optimizer itself."""
    if self._optimizer is None:
      return {}
    return {
      name: child
      for name, child in libraries.children(self._optimizer).items()
      if not isinstance(child, (list, dict))
    }

  def _trackable_children(
    self, save_type: str = "checkpoint", **kwargs: Any
  ) -> dict[str, Any]:
    del kwargs
    children = {**self._own(), **self._children}
    if save_type == "checkpoint":
      return children
    # tf.saved_model.save reads in a graph, where parts cannot be joined.
    return {k: v for k, v in children.items() if not isinstance(v, WholeSlot)}

  def _lookup_dependency(self, name: str, *args: Any) -> Any:
    del args
    return self._trackable_children().get(name)


class PlainState:
  """The plain optimizer's view of state in shards.

  Attributes:
    variables: Those of the plain optimizer, in its order: whole slots, and the
      optimizer's own counts and rates.
    trainable_variables: What the plain optimizer would be built on.
    children: What a checkpoint saves in the optimizer's place.
  """

  def __init__(
    self,
    inner: base.InnerOptimizer,
    weights: Sequence[Any],
    plain: Any,
    built_on: Sequence[Any],
    slots: Sequence[Sequence[tuple[str, Any]]],
    replace: Callable[[int, str, Any], tuple[Any, Any]],
  ) -> None:
    """Finds the state of each of `weights`.

    Args:
      inner: The encapsulated optimizer, built.
      weights: What the plain one would be built on.
      plain: An optimizer that has the plain one's variables, or such as have
        their names.
      built_on: For each weight, what `plain` was built on.
      slots: For each weight, the slots of `plain`, and where they are.
      replace: For the number of a weight, where a slot of `plain` is, and the
        slot: the variable of `inner` that has it, and what stands
        for the slot.
    """
    optimizer = inner.optimizer
    self.trainable_variables = list(weights)
    self._places = {
      id(variables_lib.native(weight)): i for i, weight in enumerate(weights)
    }
    self._found: dict[int, Any] = {
      id(built): weight for built, weight in zip(built_on, weights, strict=True)
    }
    names = {
      id(slot): name
      for variable in inner.trainable_variables
      for name, slot in inner.slots(variable).items()
    }
    self._slots: list[dict[str, Any]] = [{} for _ in weights]
    replaced: set[int] = set()
    for i, of_weight in enumerate(slots):
      for attribute, slot in of_weight:
        own, stands = replace(i, attribute, slot)
        replaced.add(id(own))
        self._found[id(slot)] = stands
        self._slots[i][names[id(own)]] = stands
    others = [
      v for v in optimizer_state.listed(optimizer) if id(v) not in replaced
    ]
    listed = optimizer_state.listed(plain)
    of_plain = [v for v in listed if id(v) not in self._found]
    for variable, other in zip(of_plain, others, strict=True):
      self._found[id(variable)] = other
    self.variables = [self._found[id(v)] for v in listed]
    self.children = self._children(plain)

  def index(self, variable: Any) -> int | None:
    """The place of a variable among those that are trained."""
    return self._places.get(id(variables_lib.native(variable)))

  def slots(self, variable: Any) -> dict[str, Any]:
    """The slots of a weight, by name."""
    index = self.index(variable)
    return {} if index is None else dict(self._slots[index])

  def view(self, variable: Any, name: str) -> Any:
    """A slot of a weight for the user; None where there is none."""
    slot = self.slots(variable).get(name)
    return slot.view() if isinstance(slot, WholeSlot) else slot

  def save_own_variables(self, store: Any) -> None:
    """Saves what the plain optimizer would save."""
    for i, variable in enumerate(self.variables):
      store[str(i)] = variable.numpy()

  def load_own_variables(self, store: Any) -> None:
    """Loads what the plain optimizer saved."""
    self.set_weights([store[str(i)] for i in range(len(store.keys()))])

  def set_weights(self, weights: Any) -> None:
    """Assigns values in the order of `variables`."""
    weights = list(weights)
    if len(weights) != len(self.variables):
      raise ValueError(
        f"The optimizer has {len(self.variables)} variables, and {len(weights)}"
        " were given. Build it on the model's trainable variables, with the"
        " settings that they were saved with."
      )
    for variable, value in zip(self.variables, weights, strict=True):
      variable.assign(value)

  def _children(self, plain: Any) -> Children:
    """The plain optimizer's lists, with state in the place of its slots."""
    children: dict[str, Any] = {}
    for name, child in plain._trackable_children().items():
      if isinstance(child, list):
        children[name] = Children(
          {
            str(i): self._found.get(id(part), part)
            for i, part in enumerate(child)
            if part is not None  # a slot that a variable has none of
          }
        )
      elif name == "inner_optimizer":
        children[name] = self._children(child)
      elif isinstance(child, dict):
        children[name] = child
    return Children(children)


def of_parts(
  inner: base.InnerOptimizer,
  weights: Sequence[Any],
  places: Sequence[tuple[int, int | None]],
  built_on: Sequence[Any],
  engine: engines.Engine,
) -> PlainState:
  """Returns the state of an optimizer that is built on parts of weights.

  Args:
    inner: The encapsulated optimizer.
    weights: What the plain one would be built on.
    places: For each of them which variable of `built_on` has a part of it, and
      where the weight begins in all parts; None for a weight itself.
    built_on: What the optimizer is built on.
    engine: The engine, which knows the groups and the strategy.
  """
  optimizer = inner.optimizer
  config = optimizer.get_config()
  # Without copies for all replicas, which take four times as long to make.
  with group_models.outside_of_strategies():
    plain = type(optimizer).from_config(config)
    tiny = [inner.make_tiny(weight) for weight in weights]
    plain.build(tiny)
  slots = [
    dict(base.slots_at(base.innermost(optimizer), i, len(built_on), ()))
    for i in range(len(built_on))
  ]

  def replace(i: int, attribute: str, named: Any) -> tuple[Any, Any]:
    index, start = places[i]
    slot = slots[index][attribute]
    if start is None:
      return slot, slot
    shape = tuple(weights[i].shape)
    return slot, WholeSlot(named, slot, start, shape, engine)

  last, count = base.innermost(plain), len(weights)
  of_plain = [list(base.slots_at(last, i, count, ())) for i in range(count)]
  return PlainState(inner, weights, plain, tiny, of_plain, replace)


def of_owners(
  inner: base.InnerOptimizer,
  weights: Sequence[Any],
  owners: Sequence[int | None],
  engine: engines.Engine,
) -> PlainState:
  """Returns the state of an optimizer whose members update a weight each.

  Args:
    inner: The encapsulated optimizer, built on the weights.
    weights: These.
    owners: The place of each one's owner in a group; None for all members.
    engine: The engine, which knows the groups and the strategy.

  Raises:
    ValueError: If it is not known whose a variable of the optimizer is.
  """
  slots = [list(inner.slots(weight).items()) for weight in weights]
  known = {id(slot) for of_weight in slots for _, slot in of_weight}
  for variable in optimizer_state.listed(inner.optimizer):
    if id(variable) not in known and len(variable.shape):
      kind = type(base.innermost(inner.optimizer)).__name__
      raise ValueError(
        f"{variable.name} of {kind} belongs to no variable, or not to one"
        " alone, so that it has no owner. Keep slots in lists along the"
        " variables or in dicts by their paths, or leave `shard_update` out."
      )

  def replace(i: int, attribute: str, slot: Any) -> tuple[Any, Any]:
    del attribute
    owner = owners[i]
    return slot, slot if owner is None else OwnedSlot(slot, owner, engine)

  return PlainState(inner, weights, inner.optimizer, weights, slots, replace)
