"""Functions of a CrossShardOptimizer that satellites use."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tf_cross_shard._src.core import components
from tf_cross_shard._src.core.gradients import differentiate


def engine_of(optimizer: Any) -> Any:
  """Returns the `reduce.engine.Engine` of a CrossShardOptimizer."""
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
  options: differentiate.GraphOptions,
) -> differentiate.Pairs:
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
  """Creates a trainable variable of the wrapped optimizer's Keras."""
  return _components_of(optimizer).inner.make_variable(value, name)


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
  return None if own is None else own.inner.whole.slots


def state_of(optimizer: Any) -> Any:
  """Returns the `inner_lib.state.State` of any Keras optimizer."""
  modules = (kind.__module__ for kind in type(optimizer).__mro__)
  is_tf_keras = any(module.startswith("tf_keras.") for module in modules)
  # Import by name: a Keras 3 optimizer does not need tf_keras, nor the reverse.
  home = importlib.import_module(
    f"{__package__}.{'tf_keras' if is_tf_keras else 'keras3'}.adapter"
  )
  return home.adapter(optimizer).state


def package_of(optimizer: Any) -> str:
  """Returns "keras" or "tf_keras": the Keras of the wrapped optimizer."""
  return _components_of(optimizer).keras_package


def _components_of(optimizer: Any) -> components.Components:
  """Returns the components of a wrapper."""
  own = components.components_of(optimizer)
  if own is None:
    raise TypeError(
      "`optimizer` must be a CrossShardOptimizer; got"
      f" {type(optimizer).__name__}. Wrap it in a CrossShardOptimizer."
    )
  return own
