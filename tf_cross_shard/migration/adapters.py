"""The adapter for any optimizer, ours or not, and what it is set to.

An optimizer is told by its Keras, which need not be the one that `tf.keras`
is, and neither is imported for an optimizer of the other.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from tf_cross_shard.inner_optimizer import base, optimizer_state, wrapper

# Of a checkpoint of TensorFlow 2 only: which object has which value.
OBJECT_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"


class Form(NamedTuple):
  """What a variable will be, of an optimizer that is not built."""

  name: str
  shape: tuple[int, ...]
  dtype: Any


class Kept(NamedTuple):
  """What an optimizer keeps, or will: variables, or their forms."""

  slots: Mapping[int, Mapping[str, Any]]
  others: Sequence[Any]


def adapter_of(optimizer: Any) -> base.InnerOptimizer:
  """What reads the slots of an optimizer, whatever stands around it."""
  for layer in optimizer_state.layers(optimizer):
    if isinstance(layer, wrapper.OptimizerWrapper):
      return layer._inner
  # Nobody has an optimizer of a Keras that is not loaded.
  for package, module in (("keras", "keras3"), ("tf_keras", "tf_keras")):
    optimizers = getattr(sys.modules.get(package), "optimizers", None)
    if optimizers is None:
      continue
    legacy = getattr(getattr(optimizers, "legacy", None), "Optimizer", ())
    if not isinstance(optimizer, (optimizers.Optimizer, legacy)):
      continue
    adapters: Any = importlib.import_module(
      f"tf_cross_shard.inner_optimizer.{module}"
    )
    if module == "keras3":
      return adapters.Keras3Optimizer(optimizer)
    if isinstance(base.innermost(optimizer), legacy):
      return adapters.LegacyOptimizer(optimizer)
    return adapters.TfKerasOptimizer(optimizer)
  raise TypeError(
    "`optimizer` must be a Keras optimizer; got"
    f" {type(optimizer).__name__}. Hand in the one that trains the model."
  )


def build(
  optimizer: Any,
  variables: Sequence[Any],
  strategy: tf.distribute.Strategy | None = None,
) -> None:
  """Makes the slots, of all that stand around each other, if they are not."""
  layers = list(optimizer_state.layers(optimizer))
  ours = [a for a in layers if isinstance(a, wrapper.OptimizerWrapper)]
  with strategy.scope() if strategy else contextlib.nullcontext():
    if not ours:
      adapter_of(optimizer).build(variables)
      return
    # First ours, which keeps in its own adapter what it was built on.
    ours[0].build(list(variables))
    if not getattr(layers[0], "built", True):
      layers[0].build(list(variables))


def kept(optimizer: Any, variables: Sequence[Any]) -> Kept:
  """What a built optimizer keeps."""
  adapter = adapter_of(optimizer)
  slots = {id(v): adapter.slots(v) for v in variables}
  known = {id(base.innermost(optimizer).iterations)}
  known.update(id(slot) for own in slots.values() for slot in own.values())
  others = [v for v in trained_state(optimizer) if id(v) not in known]
  return Kept(slots, others)


def foreseen(
  optimizer: Any, variables: Sequence[Any], is_alike: bool
) -> Kept | None:
  """The slots that an optimizer will have once it is built."""
  specimen = _specimen(base.innermost(optimizer))
  if specimen is None:
    return None
  stands_in: dict[Any, Any] = {}
  keys = [
    (() if is_alike else tuple(v.shape), tf.as_dtype(v.dtype))
    for v in variables
  ]
  for shape, dtype in keys:
    if (shape, dtype) not in stands_in:
      zeros = tf.zeros(shape, dtype)
      stands_in[shape, dtype] = tf.Variable(zeros, name="weight")
  build(specimen, list(stands_in.values()))
  found = kept(specimen, list(stands_in.values()))
  slots = {
    id(variable): {
      name: Form(
        name, tuple((variable if is_alike else slot).shape), slot.dtype
      )
      for name, slot in found.slots[id(stands_in[key])].items()
    }
    for variable, key in zip(variables, keys, strict=True)
  }
  # Others have names that Keras counts on; none depends on the variables.
  return Kept(slots, ())


def rate_of(optimizer: Any) -> float | None:
  """The learning rate, if it is the same in every step."""
  last = base.innermost(optimizer)
  hyper = getattr(last, "_hyper", None)
  if hyper is not None:  # of the older kind
    rate = hyper["learning_rate"]
    return None if callable(rate) or setting_of(last, "decay") else _float(rate)
  rate = getattr(last, "_learning_rate", None)
  if not hasattr(rate, "assign"):
    return None
  return _float(last.learning_rate)


def rate_after(optimizer: Any, steps: int) -> tuple[Any, np.ndarray] | None:
  """What an optimizer shows as its learning rate, and what it has to be.

  tf_keras keeps what a schedule gave at the last update in a variable.
  """
  last = base.innermost(optimizer)
  shown = getattr(last, "_current_learning_rate", None)
  rate = getattr(last, "_learning_rate", None)
  if shown is None or not callable(rate) or hasattr(rate, "assign"):
    return None
  value = tf.cast(rate(tf.constant(steps, last.iterations.dtype)), shown.dtype)
  return shown, value.numpy()


def setting_of(optimizer: Any, name: str) -> float | None:
  """A number that an optimizer was made with."""
  value = getattr(base.innermost(optimizer), name, None)
  if value is None or isinstance(value, (int, float)):
    return value
  return _float(value)  # a variable, in the older kind


def trained_state(optimizer: Any) -> list[Any]:
  """The variables that training changes: neither settings nor loss scales."""
  last = base.innermost(optimizer)
  variables = last.variables
  variables = list(variables() if callable(variables) else variables)
  rate = getattr(last, "_learning_rate", None)
  return [v for v in variables if v is not rate]


def _specimen(optimizer: Any) -> Any:
  """A new optimizer of the same settings; None if there is no way to it."""
  kind = type(optimizer)
  # Classes of users may raise anything here.
  with contextlib.suppress(Exception):
    return kind.from_config(optimizer.get_config())
  # A rate that is a function has no config, and makes no difference to slots.
  names = set(inspect.signature(kind).parameters) - {"learning_rate"}
  with contextlib.suppress(Exception):
    return kind(**{n: getattr(optimizer, n) for n in names - {"kwargs"}})
  return None


def _float(value: Any) -> float:
  """The number in a variable or tensor, or what is one."""
  return float(np.asarray(tf.convert_to_tensor(value)))
