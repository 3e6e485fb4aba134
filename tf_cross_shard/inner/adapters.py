"""The adapter for any optimizer, ours or not, and what it is set to.

An optimizer is told by its Keras, which need not be the one that `tf.keras`
is, and neither is imported for an optimizer of the other.
"""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.inner import base, delegate, state

# Of a checkpoint of TensorFlow 2 only: which object has which value.
OBJECT_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"


def adapter_of(optimizer: Any) -> base.InnerOptimizer:
  """What reads the slots of an optimizer, whatever stands around it.

  >>> adapter_of(tf.keras.optimizers.SGD(momentum=0.9)).is_built
  False

  Args:
    optimizer: An optimizer of Keras 3 or tf_keras, of either kind; a
      CrossShardOptimizer; one that scales the loss, around or within.

  Returns:
    The adapter. That of a CrossShardOptimizer is its own.

  Raises:
    TypeError: If it is no such optimizer.
  """
  for layer in state.layers(optimizer):
    if isinstance(layer, delegate.Delegating):
      return layer._inner.encapsulated
  # Nobody has an optimizer of a Keras that is not loaded.
  for package, module in (("keras", "keras3"), ("tf_keras", "tf_keras")):
    optimizers = getattr(sys.modules.get(package), "optimizers", None)
    if optimizers is None:
      continue
    legacy = getattr(getattr(optimizers, "legacy", None), "Optimizer", ())
    if not isinstance(optimizer, (optimizers.Optimizer, legacy)):
      continue
    adapters: Any = importlib.import_module(f"tf_cross_shard.inner.{module}")
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
  """Makes the slots, of all that stand around each other, if they are not.

  >>> sgd = tf.keras.optimizers.SGD(momentum=0.9)
  >>> weight = tf.Variable(1.0)
  >>> build(sgd, [weight])
  >>> list(adapter_of(sgd).slots(weight))
  ['momentum']

  Args:
    optimizer: An optimizer.
    variables: What it trains.
    strategy: Whose variables they are; None for those made outside all scopes.
  """
  layers = list(state.layers(optimizer))
  ours = [a for a in layers if isinstance(a, delegate.Delegating)]
  with strategy.scope() if strategy else contextlib.nullcontext():
    if not ours:
      adapter_of(optimizer).build(variables)
      return
    # First ours, which keeps in its own adapter what it was built on.
    ours[0].build(list(variables))
    if not getattr(layers[0], "built", True):
      layers[0].build(list(variables))


def rate_of(optimizer: Any) -> float | None:
  """The learning rate, if it is the same in every step.

  >>> rate_of(tf.keras.optimizers.SGD(0.5))
  0.5
  >>> halved = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
  >>> rate_of(tf.keras.optimizers.SGD(halved)) is None
  True

  Args:
    optimizer: An optimizer.

  Returns:
    The number; None where it is a schedule or a function, or decays.
  """
  last = base.innermost(optimizer)
  hyper = getattr(last, "_hyper", None)
  if hyper is not None:  # of the older kind
    rate = hyper["learning_rate"]
    return None if callable(rate) or setting_of(last, "decay") else _float(rate)
  rate = getattr(last, "_learning_rate", None)
  if not hasattr(rate, "assign"):
    return None
  return _float(last.learning_rate)


def setting_of(optimizer: Any, name: str) -> float | None:
  """A number that an optimizer was made with.

  >>> setting_of(tf.keras.optimizers.SGD(momentum=0.5), "momentum")
  0.5

  Args:
    optimizer: An optimizer. Its `get_config` may be unable to tell, where the
      learning rate is a function.
    name: Of an argument of the constructor.

  Returns:
    The number; None if that optimizer has none.
  """
  value = getattr(base.innermost(optimizer), name, None)
  if value is None or isinstance(value, (int, float)):
    return value
  return _float(value)  # a variable, in the older kind


def trained_state(optimizer: Any) -> list[Any]:
  """The variables that training changes: neither settings nor loss scales.

  >>> [v.name for v in trained_state(tf.keras.optimizers.SGD())]
  ['iteration']

  Args:
    optimizer: An optimizer.

  Returns:
    The iteration count, the slots and what else the innermost one counts.
  """
  last = base.innermost(optimizer)
  variables = last.variables
  variables = list(variables() if callable(variables) else variables)
  rate = getattr(last, "_learning_rate", None)
  return [v for v in variables if v is not rate]


def _float(value: Any) -> float:
  """The number in a variable or tensor, or what is one."""
  return float(np.asarray(tf.convert_to_tensor(value)))
