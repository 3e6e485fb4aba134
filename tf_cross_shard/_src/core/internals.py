"""The interface of the core for the other folders of `_src` (satellites).

A satellite imports this module and no other module of the core. The only
exceptions are `towers/keras3.py` and `towers/tf_keras.py`, which also import
the core's classes for their Keras.

The interface has two parts: the modules in `__all__`, with their public names,
and functions that take a CrossShardOptimizer and return objects that are
private to its class.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tf_cross_shard._src.core import (
  collectives,
  components,
  divided_rows,
  group_schedule,
  groups,
  settings,
  validation,
  variables,
  versions,
)
from tf_cross_shard._src.core.collectives import (
  collective_ops,
  is_tpu,
  replica_values,
  wire,
)
from tf_cross_shard._src.core.coordination import (
  agreement,
  errors,
  key_value_store,
  stall_watch,
)
from tf_cross_shard._src.core.encapsulated import (
  encapsulated,
  keras_private,
  kernels,
  optimizer_state,
  overriding,
  v1_conversion,
  v1_update,
)
from tf_cross_shard._src.core.gradients import (
  clipping,
  differentiation,
  finite,
  indexed_slices,
  loss_factor,
  packing,
)
from tf_cross_shard._src.core.optimizer import CrossShardOptimizer
from tf_cross_shard._src.core.wrapper import forwarding

__all__ = [
  # Arguments and their validation.
  "groups",
  "settings",
  "validation",
  "versions",
  # Variables of TensorFlow and Keras, their names and their values on replicas.
  "variables",
  "optimizer_state",
  "replica_values",
  "divided_rows",
  # A value for each group.
  "group_schedule",
  # Several workers.
  "agreement",
  "collective_ops",
  "errors",
  "is_tpu",
  "key_value_store",
  "stall_watch",
  # Collectives, and reading rows of a table.
  "collectives",
  "wire",
  # Gradients.
  "clipping",
  "differentiation",
  "finite",
  "indexed_slices",
  "loss_factor",
  "packing",
  # Optimizers of Keras and of TensorFlow 1, and their private parts.
  "CrossShardOptimizer",
  "encapsulated",
  "forwarding",
  "keras_private",
  "kernels",
  "overriding",
  "v1_conversion",
  "v1_update",
  # Functions of a CrossShardOptimizer.
  "attach",
  "calls_per_step",
  "check_place",
  "engine_of",
  "gradients",
  "make_variable",
  "package_of",
  "slots_of",
  "state_of",
]


def engine_of(optimizer: Any) -> Any:
  """Returns the `collectives.engine.Engine` of a CrossShardOptimizer."""
  return _components_of(optimizer).step.context.engine


def check_place(optimizer: Any) -> None:
  """Raises an error if the optimizer cannot reduce gradients here.

  Raises:
    RuntimeError: In the cross-replica context, or under a strategy other than
      the optimizer's.
  """
  _components_of(optimizer).checks.check_place()


def gradients(
  optimizer: Any,
  loss: Any,
  var_list: Any,
  tape: Any,
  default: str,
  options: differentiation.GraphOptions,
) -> differentiation.Pairs:
  """Returns this replica's gradients of the scaled loss, not reduced yet.

  Args:
    optimizer: The CrossShardOptimizer.
    loss: As in `compute_gradients`.
    var_list: As in `compute_gradients`.
    tape: As in `compute_gradients`.
    default: What the loss is averaged over if the user did not choose:
      `"replica"` or `"global"`.
    options: Options for gradients in graphs.
  """
  own = _components_of(optimizer)
  own.checks.check_place()
  return own.step.differentiate(loss, var_list, tape, default, options)


def make_variable(optimizer: Any, value: Any, name: str) -> Any:
  """Creates a trainable variable of the encapsulated optimizer's Keras."""
  return _components_of(optimizer).encapsulated.make_variable(value, name)


def attach(optimizer: Any, variables: Sequence[Any]) -> None:
  """Adds variables to the optimizer's state that `replica_state` saves."""
  _components_of(optimizer).step.attached = tuple(variables)


def calls_per_step(optimizer: Any) -> int:
  """Returns how many calls of `apply_gradients` make one step."""
  return int(_components_of(optimizer).step.calls)


def slots_of(optimizer: Any) -> Callable[[Any], dict[str, Any]] | None:
  """Returns a function that maps a variable to its slots by name.

  None for an optimizer that is not a wrapper of this package.
  """
  own = components.components_of(optimizer)
  return None if own is None else own.encapsulated.state.unsharded.slots


def state_of(optimizer: Any) -> Any:
  """Returns the `encapsulated.state.State` of any Keras optimizer."""
  modules = (kind.__module__ for kind in type(optimizer).__mro__)
  is_tf_keras = any(module.startswith("tf_keras.") for module in modules)
  # Import by name: a Keras 3 optimizer does not need tf_keras, nor the reverse.
  home = importlib.import_module(
    f"{__package__}.{'tf_keras' if is_tf_keras else 'keras3'}.adapter"
  )
  return home.adapter(optimizer).state


def package_of(optimizer: Any) -> str:
  """Returns "keras" or "tf_keras": the Keras of the encapsulated optimizer."""
  return _components_of(optimizer).keras_package


def _components_of(optimizer: Any) -> components.Components:
  """Returns the components of a wrapper."""
  own = components.components_of(optimizer)
  if own is None:
    raise TypeError(
      "`optimizer` must be a CrossShardOptimizer; got"
      f" {type(optimizer).__name__}. Encapsulate it in a CrossShardOptimizer."
    )
  return own
