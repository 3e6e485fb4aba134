"""Gives each model the initial values that a seed gives to a plain model."""

# ruff: noqa: SLF001  # TensorFlow and Keras have no public random states.

import contextlib
import importlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from tensorflow.python.eager import context

from tf_cross_shard._src.core import optimizer_state, validation
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

_ASSIGNED: Final = "_tf_cross_shard_assigned"


def keep(variable: Any) -> None:
  """Makes `initialize` leave a variable as it is."""
  setattr(variable, _ASSIGNED, True)


def initialize(
  model: Any, build: Callable[[], Any], seeds: Sequence[int], optimizer: Any
) -> None:
  """Gives each model its own initial values; see `Models.initialize`."""
  keras = keras_private.keras_of(model)
  if not callable(build) or hasattr(build, "variables"):
    raise TypeError(
      "`build` must be a function that returns a new plain model; got"
      f" {type(build).__name__}. Pass the function without calling it."
    )
  state = group_state.GroupState(optimizer, model, with_optimizer=False)
  if not isinstance(seeds, Iterable):
    raise TypeError(
      "`seeds` must be a list with an integer for each model; got"
      f" {seeds!r}. Pass for example range({state.groups.num_groups})."
    )
  numbers = [
    validation.check_integer("seeds", seed, "Pass one for each model.", 0)
    for seed in seeds
  ]
  if len(numbers) != state.groups.num_groups:
    raise ValueError(
      f"`seeds` must have an integer for each of the {state.groups.num_groups}"
      f" models; got {len(numbers)}: {numbers}. A model created outside of"
      " VectorizedStrategy's scope is one."
    )
  state.compare_workers(f"initializing with the seeds {numbers}")
  optimizers = tracked.optimizers(optimizer, model)
  with _keeping_random_states(keras):
    # The values of each model, and the slots that begin as its weights do.
    built = [_build(keras, state, build, seed, optimizers) for seed in numbers]
    initial = _initial_state(optimizer, model)
    for path, each in optimizers.items():
      begins_otherwise = any(map(np.any, built[0][1][path].values()))
      if begins_otherwise and not nested_lib.is_built(each):
        *_, base = nested_lib.nested_optimizers(each)
        with keras_private.strategy(base).scope():
          each.build(model.trainable_variables)
  here = state.copies.engine.local_replicas
  models = [state.groups.index_of(replica) for replica in here]
  kept = _adapted(model)
  for entry in state.entries:
    native = replicas_lib.native(entry.variable)
    if id(native) not in kept and not hasattr(native, _ASSIGNED):
      arrays = [built[i][0][entry.key] for i in models]
      state.copies.write(entry.variable, arrays)
  replicas = range(state.groups.num_replicas)
  for variable, copy in initial:
    arrays = state.copies.read(copy, replicas)[here.start : here.stop]
    state.copies.write(variable, arrays)
  variables = {entry.key: entry.variable for entry in state.entries}
  for path, slots in built[0][1].items():
    if not (slots and nested_lib.is_built(optimizers[path])):
      continue
    for place, variable in tracked.slots(optimizers[path], variables).items():
      if place in slots:
        # Slots of 0 look like weights only where a model's are 0.
        others = (built[i][1][path] for i in models)
        arrays = [of_model.get(place, slots[place]) for of_model in others]
        state.copies.write(variable, arrays)
  group_state.accept_values(optimizer)


def _adapted(model: Any) -> set[int]:
  """Returns the `id`s of what layers with a method `adapt` have learned."""
  return {
    id(replicas_lib.native(variable))
    for layer in keras_private.layers(model)
    if hasattr(layer, "adapt")
    for variable in layer.variables
  }


def _build(
  keras: Any,
  state: group_state.GroupState,
  build: Callable[[], Any],
  seed: int,
  optimizers: dict[str, Any],
) -> tuple[dict[str, archive.Array], dict[str, dict[Any, archive.Array]]]:
  """Returns a new model's values, and by optimizer the slots that copy them."""
  with variables_lib.outside_of_strategies():
    keras.utils.set_random_seed(seed)
    made = build()
    if not isinstance(made, keras.Model):
      raise TypeError(
        f"`build` must return a {keras.__name__} model; got"
        f" {type(made).__name__}."
      )
    receivers = plain_models.receivers(
      state, made, what="`build` returns a model that", is_exact=True
    )
    return _values(receivers), {
      path: _slots(each, made, state, receivers)
      for path, each in optimizers.items()
    }


def _values(variables: dict[Any, Any]) -> dict[Any, archive.Array]:
  return {key: np.array(v.numpy()) for key, v in variables.items()}


def _slots(
  optimizer: Any,
  made: Any,
  state: group_state.GroupState,
  receivers: dict[str, Any],
) -> dict[Any, archive.Array]:
  """Returns the slots that begin as the weights of a plain model do."""
  *_, base = nested_lib.nested_optimizers(optimizer)
  weights = {e.key: replicas_lib.native(e.variable) for e in state.entries}
  trained_by = tracked.trained_by(optimizer, [*weights.values()])
  trained = set(map(id, map(replicas_lib.native, trained_by)))
  by_id = {id(replicas_lib.native(v)): v for v in made.variables}
  variables = {
    key: by_id[id(receivers[key])]
    for key, weight in weights.items()
    if (id(weight) in trained if trained else weight.trainable)
  }
  config = base.get_config()
  if "learning_rate" in config:
    config["learning_rate"] = 0.0  # tf_keras would ask PerModel for a model's.
  try:
    copy = type(base).from_config(config)
  except Exception:
    if trained or type(base).__module__.split(".")[0] in keras_private.KERASES:
      raise
    return {}  # The configuration of a class of one's own may not be enough.
  copy.build(list(variables.values()))
  initial = _values(variables).values()
  return {
    place: slot
    for place, slot in _values(tracked.slots(copy, variables)).items()
    if slot.size
    and (
      slot.min() != slot.max()
      or (slot.ndim and any(np.array_equal(slot, w) for w in initial))
    )
  }


def _initial_state(optimizer: Any, model: Any) -> list[tuple[Any, Any]]:
  """Returns the variables of built optimizers, each with one of a new one."""
  if optimizer is None:
    return []
  pairs = []
  for each in tracked.with_state(optimizer, model).values():
    if not nested_lib.is_built(each):
      continue
    outermost, *_ = nested = list(nested_lib.nested_optimizers(each))
    with keras_private.strategy(nested[-1]).scope():
      copy = type(outermost).from_config(outermost.get_config())
      trained = tracked.trained_by(each, model.variables)
      copy.build(trained or model.trainable_variables)
    kept = set(map(id, nested_lib.rate_variables(each)))
    variables, initial = map(optimizer_state.state_variables, (each, copy))
    if len(variables) != len(initial):
      raise ValueError(
        f"`optimizer` has {len(variables)} variables, but a new one of its"
        f" configuration has {len(initial)}. Pass an optimizer that is not"
        " built."
      )
    both = zip(variables, initial, strict=True)
    pairs += [(v, new) for v, new in both if id(v) not in kept]
  return pairs


@contextlib.contextmanager
def _keeping_random_states(keras: Any) -> Iterator[None]:
  """Restores the random states of Python, NumPy, TensorFlow and Keras."""
  of_python, of_numpy = random.getstate(), np.random.get_state()
  eager = context.context()
  # TensorFlow has no generator before the first seed is set.
  of_tensorflow = eager._seed, getattr(eager, "_rng", None)
  with _keeping_keras_states(keras):
    try:
      yield
    finally:
      random.setstate(of_python)
      np.random.set_state(of_numpy)
      eager._seed, eager._rng = of_tensorflow
      if eager._rng is None:
        del eager._rng


@contextlib.contextmanager
def _keeping_keras_states(keras: Any) -> Iterator[None]:
  """Restores the random states that Keras itself has."""
  if keras.__name__ == "tf_keras":
    generators = importlib.import_module("tf_keras.src.backend")._SEED_GENERATOR
    generator = getattr(generators, "generator", None)
    try:
      yield
    finally:
      generators.generator = generator
    return
  attributes = importlib.import_module("keras.src.backend.common.global_state")
  names = "global_random_seed", "global_seed_generator"
  before = {name: attributes.get_global_attribute(name) for name in names}
  try:
    yield
  finally:
    for name, value in before.items():
      attributes.set_global_attribute(name, value)
