"""Finds all optimizers that a model tracks, whatever holds them.

Keras knows `model.optimizer`. A GAN keeps its optimizers elsewhere.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib
from tf_cross_shard._src.models import archive


def optimizers(optimizer: Any, model: Any) -> dict[str, Any]:
  """Returns an optimizer, by "", and others that a model tracks, by place."""
  found: dict[str, Any] = {} if optimizer is None else {"": optimizer}
  known = set(map(id, nested_lib.nested_optimizers(optimizer)))
  for path, value in _walk(model, "model", set()):
    keras_private.check_not_legacy(value, path)
    inside = list(nested_lib.nested_optimizers(value))
    if not known.intersection(map(id, inside)):
      found[f"{path}/"] = value
    known.update(map(id, inside))
  return found


def with_state(optimizer: Any, model: Any) -> dict[str, Any]:
  """Returns the built ones of `optimizers`, or the only one."""
  every = optimizers(optimizer, model)
  built = {path: o for path, o in every.items() if nested_lib.is_built(o)}
  if len(every) == 1 or not built:
    return every if len(every) < 2 else {"": optimizer}
  groups = {
    path: nested_lib.groups_of(o).to_lists()
    for path, o in built.items()
    if any(
      isinstance(getattr(nested, "groups", None), groups_lib.Groups)
      for nested in nested_lib.nested_optimizers(o)
    )
  }
  if any(
    groups_of_one != next(iter(groups.values()))
    for groups_of_one in groups.values()
  ):
    raise ValueError(
      "The optimizers of a model must have the same groups for their state to"
      f" be saved or copied; got {groups}."
    )
  return built


def trained(
  optimizer: Any, model: Any, keys: dict[int, str]
) -> dict[str, list[str] | None]:
  """Returns which variables each built optimizer trains, if it tells."""
  every = optimizers(optimizer, model)
  if len(every) == 1:
    return {}
  found = {}
  for path, each in every.items():
    ids = [id(replicas_lib.native(v)) for v in trained_by(each)]
    if nested_lib.is_built(each):
      # Not every optimizer tells what it trains.
      is_known = bool(ids) and keys.keys() >= set(ids)
      found[path] = [keys[i] for i in ids] if is_known else None
  return found


def build(
  optimizer: Any,
  model: Any,
  saved: dict[str, list[str] | None],
  variables: dict[str, Any],
) -> None:
  """Builds the optimizers that were built when `trained` returned `saved`."""
  every = optimizers(optimizer, model)
  for path, names in saved.items():
    each = every.get(path)
    if each is None or nested_lib.is_built(each):
      continue
    if names is None or not variables.keys() >= set(names):
      raise archive.CheckpointError(
        f"The checkpoint has the state of {path[:-1] or 'the optimizer'},"
        " which is not built, and does not say what it trains. Call its"
        " build(variables) first, inside `with strategy.scope():`."
      )
    *_, base_optimizer = nested_lib.nested_optimizers(each)
    with keras_private.strategy(base_optimizer).scope():
      each.build([variables[name] for name in names])


def trained_by(optimizer: Any, variables: Sequence[Any] = ()) -> list[Any]:
  """Returns the whole variables that an optimizer is built on, if it tells.

  tf_keras keeps no list: then those among the given variables.
  """
  for nested in nested_lib.nested_optimizers(optimizer):
    wrapped = wrapped_lib.find(nested)
    trained = list(
      keras_private.trained(nested)
      if wrapped is None
      else wrapped.whole.trainable_variables
    )
    if trained:
      return trained
  indices = keras_private.indices(nested)
  by_index = {indices.get(keras_private.key(nested, v)): v for v in variables}
  return [by_index[i] for i in sorted(i for i in by_index if i is not None)]


def slots(optimizer: Any, variables: dict[str, Any]) -> dict[Any, Any]:
  """Returns the slots of an optimizer, by a variable's key and by name."""
  wrappers = map(wrapped_lib.find, nested_lib.nested_optimizers(optimizer))
  wrapped = next(filter(None, wrappers), None)
  whole = (wrapped or wrapped_lib.WrappedOptimizer(optimizer)).whole
  return {
    (key, name): slot
    for key, variable in variables.items()
    for name, slot in whole.slots(variable).items()
  }


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
  """Yields the optimizers in a model, a container or an object, and where."""
  if id(value) in seen:
    return
  if hasattr(type(value), "apply_gradients"):
    seen.add(id(value))
    yield path, value
    return
  parts_of_value: list[tuple[str, Any]] = []
  if isinstance(value, dict):
    parts_of_value = [(f"{path}[{k!r}]", v) for k, v in value.items()]
  elif isinstance(value, (list, tuple, set, frozenset)):
    parts_of_value = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
  elif (
    hasattr(value, "_flatten_layers")
    or isinstance(value, (tf.Module, tf.__internal__.tracking.AutoTrackable))
    or dataclasses.is_dataclass(value)
  ):
    attributes = getattr(value, "__dict__", {})
    # Attributes with an underscore repeat others, in lists of Keras.
    parts_of_value = sorted(
      ((f"{path}.{name}", v) for name, v in attributes.items()),
      key=lambda part: "._" in part[0],
    )
  if parts_of_value:
    seen.add(id(value))
  for part, inside in parts_of_value:
    yield from _walk(inside, part, seen)
