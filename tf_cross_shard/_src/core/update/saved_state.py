"""Presents sharded optimizer state as if the optimizer were not sharded.

Files that are saved with `shard_update` must load without it, and the other way
round. So everything that saves an optimizer (`optimizer.variables`, HDF5 and
`.keras` files, `tf.train.Checkpoint`) must find the variables of the *plain*
optimizer, in the order and under the names that Keras gives them when the
optimizer is built on the model's whole weights. Only Keras knows this order and
these names. So `PlainState` builds a second optimizer, the *template*, with the
same settings and on weights that have the same names, but one element each. It
replaces each slot of the template with a `WholeSlot`, which reads and writes
the shards:

    template.variables     iterations   learning_rate   momentum of a   ...
                               │              │               │
    PlainState.variables   opt's own      opt's own     WholeSlot(a) ─▶ shards
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.reduce import engine as engines
from tf_cross_shard._src.core.update import whole_slots
from tf_cross_shard._src.core.variables import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

_Trackable: Final[Any] = tf.__internal__.tracking.Trackable


class CheckpointView(_Trackable):
  """The object that `tf.train.Checkpoint` sees instead of the optimizer.

  It has the plain optimizer's children (a list of slots is a view, too), with
  whole slots. Values that are restored before the build wait until `add`.
  """

  def __init__(
    self, children: dict[str, Any], optimizer: Optimizer = None
  ) -> None:
    """Takes known children, and an optimizer whose other children it has."""
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


class PlainState:
  """Sharded state, presented in the form that it would have without sharding.

  This class has the members of `WrappedOptimizer` that savers need.
  """

  def __init__(
    self,
    wrapped: wrapped_lib.WrappedOptimizer,
    weights: Sequence[Variable],
    places: Sequence[tuple[int, int | None]],
    engine: engines.Engine,
  ) -> None:
    """Finds where `wrapped`, which is built, keeps the state of each weight."""
    # A place is the index of the variable of `wrapped` that holds the weight,
    # and the weight's first element in the joined shards, or None for a table.
    # One copy of the template is enough: creating a copy for each replica takes
    # four times as long.
    with variables_lib.outside_of_strategies():
      template = _new(wrapped.optimizer)
      tiny = [wrapped.make_tiny(weight) for weight in weights]
      template.build(tiny)
    self.trainable_variables = list(weights)
    self._indices = {
      id(variables_lib.native(weight)): i for i, weight in enumerate(weights)
    }
    # Maps the id of a variable of the template to the object that savers see
    # instead of this variable.
    self._replacements: dict[int, Any] = {
      id(small): weight for small, weight in zip(tiny, weights, strict=True)
    }
    # Maps the id of a slot of `wrapped` to the slot's name.
    names = {
      id(slot): name
      for variable in wrapped.trainable_variables
      for name, slot in wrapped.slots(variable).items()
    }
    # Replace the template's slots by whole slots.
    named_slots = _slots_of_all(
      wrapped_lib.base_optimizer(template), len(weights)
    )
    count = len(wrapped.trainable_variables)
    sources = list(map(dict, _slots_of_all(wrapped.base_optimizer, count)))
    self._slots: list[dict[str, Any]] = [{} for _ in weights]
    sharded: set[int] = set()
    for i, (index, start) in enumerate(places):
      shape = tf.TensorShape(weights[i].shape)
      for attribute, named in named_slots[i]:
        source = whole = sources[index][attribute]
        if start is not None:
          whole = whole_slots.WholeSlot(named, source, start, shape, engine)
        sharded.add(id(source))
        self._replacements[id(named)] = whole
        self._slots[i][names[id(source)]] = whole
    # Both optimizers have the same remaining variables (counts, learning rates)
    # in the same order. Replace those of the template with those of `wrapped`.
    listed = keras_private.listed(template)
    remaining = [v for v in listed if id(v) not in self._replacements]
    of_wrapped = keras_private.listed(wrapped.optimizer)
    others = [v for v in of_wrapped if id(v) not in sharded]
    for variable, other in zip(remaining, others, strict=True):
      self._replacements[id(variable)] = other
    self.variables = [self._replacements[id(v)] for v in listed]
    self.checkpoint_view = self._make_checkpoint_view(template)

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
    list(wrapped_lib.slots_at(optimizer, index, count, ()))
    for index in range(count)
  ]
