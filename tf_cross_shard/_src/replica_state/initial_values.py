"""Gives each group the initial values that a seed gives to a plain model."""

# ruff: noqa: SLF001  # TensorFlow and Keras have no public random states.

import contextlib
import importlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tensorflow.python.eager import context

from tf_cross_shard._src.core import group_context, optimizer_state, validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.replica_state import (
  archive,
  group_models,
  group_state,
  tracked,
)


def initialize(
  model: Any,
  build: Callable[[], Any],
  seeds: Sequence[int],
  optimizer: Any = None,
) -> None:
  """Gives each group the initial values that its seed gives to a plain model.

  Group i starts as a plain model starts after

      keras.utils.set_random_seed(seeds[i])
      build()

  with the weights, the other variables and the states of random number
  generators, such as those of dropout. So an ensemble trains as separate fits
  do. If the optimizer is built, its slots and its count of steps get their
  initial values in all groups; learning rates do not change. The random states
  of the program (of Python, NumPy, TensorFlow and Keras) are as before.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import VectorizedStrategy, replica_state
  >>> def build():
  ...   return tf.keras.Sequential(
  ...     [tf.keras.Input((2,)), tf.keras.layers.Dense(1)]
  ...   )
  >>> strategy = VectorizedStrategy(2)
  >>> with strategy.scope():
  ...   model = build()
  ...   model.compile("adam", "mse")
  >>> replica_state.initialize(model, build, seeds=[0, 1])
  >>> tf.keras.utils.set_random_seed(1)
  >>> kernel = replica_state.values(model.trainable_variables[0])[1]
  >>> bool((kernel == build().get_weights()[0]).all())
  True

  Args:
    model: A built Keras model.
    build: A function without arguments that returns a new, built model with the
      same variables. It is called outside of the strategy, once for each group.
    seeds: An integer for each group. Groups with the same seed start alike.
    optimizer: The optimizer with the groups; None for the optimizer that the
      model is compiled with, if it is.

  Raises:
    TypeError: If `build` does not return a Keras model, or `seeds` is no list.
    ValueError: If there is not one seed for each group, or if `build` makes
      other variables. Nothing is changed in that case.
  """
  keras = keras_private.keras_of(model)
  if optimizer is None:
    optimizer = getattr(model, "optimizer", None)
  state = group_state.GroupState(optimizer, model, with_optimizer=False)
  if not isinstance(seeds, Iterable):
    raise TypeError(
      "`seeds` must be a list with an integer for each group; got"
      f" {seeds!r}. Pass for example range({state.groups.num_groups})."
    )
  numbers = [
    validation.check_integer("seeds", seed, "Pass one for each group.", 0)
    for seed in seeds
  ]
  if len(numbers) != state.groups.num_groups:
    raise ValueError(
      f"`seeds` must have an integer for each of the {state.groups.num_groups}"
      f" groups; got {len(numbers)}: {numbers}."
    )
  state.compare_workers(f"initializing with the seeds {numbers}")
  with _keeping_random_states(keras):
    values = [
      _values_of_seed(state, build, i, seed, keras)
      for i, seed in enumerate(numbers)
    ]
    initial = _initial_state(optimizer, model)
  here = state.copies.engine.local_replicas
  for entry in state.entries:
    arrays = [values[state.groups.index_of(r)][entry.name] for r in here]
    state.copies.write(entry.variable, arrays)
  replicas = range(state.groups.num_replicas)
  for variable, copy in initial:
    arrays = state.copies.read(copy, replicas)[here.start : here.stop]
    state.copies.write(variable, arrays)
  if optimizer is not None:
    group_state.accept_values(optimizer)


def _values_of_seed(
  state: group_state.GroupState,
  build: Callable[[], Any],
  group: int,
  seed: int,
  keras: Any,
) -> dict[str, archive.Array]:
  """Returns the values of a new model, by the names of those in `state`."""
  with variables_lib.outside_of_strategies(), group_context.as_group(group):
    keras.utils.set_random_seed(seed)
    made = build()
    if not isinstance(made, keras.Model):
      raise TypeError(
        f"`build` must return a {keras.__name__} model; got"
        f" {type(made).__name__}."
      )
    return {
      name: np.array(variable.numpy())
      for name, variable in group_models.receivers(
        state, made, what="`build` returns a model that", is_exact=True
      ).items()
    }


def _initial_state(optimizer: Any, model: Any) -> list[tuple[Any, Any]]:
  """Returns each variable of the built optimizers, with an initial copy.

  The copies are those of new optimizers, made from the configurations.
  """
  if optimizer is None:
    return []
  pairs = []
  for each in tracked.with_state(optimizer, model).values():
    if not nested_lib.is_built(each):
      continue
    outermost, *_ = nested = list(nested_lib.nested_optimizers(each))
    # Not all optimizers of tf_keras tell what they train.
    trained = tracked.trained_by(each) or model.trainable_variables
    with keras_private.strategy(nested[-1]).scope():
      copy = type(outermost).from_config(outermost.get_config())
      copy.build(trained)
    kept = set(map(id, nested_lib.rate_variables(each)))
    initial = dict(optimizer_state.state_variables(copy))
    for name, variable in optimizer_state.state_variables(each):
      if id(variable) in kept:
        continue
      if name not in initial:
        raise ValueError(
          f"`optimizer` has {name}, which a new one of its configuration lacks."
          " Pass an optimizer that is not built."
        )
      pairs.append((variable, initial[name]))
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
