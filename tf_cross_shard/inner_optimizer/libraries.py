"""Keras' models and optimizers, asked for what no public method tells.

Each function takes an object of any Keras. What an object lacks by name, such
as a loss scale in Keras 3, it does not have.
"""

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

KERASES: Final = ("keras", "tf_keras")

# Keras 3's update of all variables, which calls `update_step` for each.
UPDATE_ALL: Final = "_distributed_tf_update_step"


def keras_of(model: Any) -> Any:
  """Returns the Keras whose model it is."""
  for kind in type(model).__mro__:
    root = kind.__module__.split(".")[0]
    if root in KERASES:
      return importlib.import_module(root)
  raise TypeError(f"`model` must be a Keras model; got {type(model).__name__}.")


def layers(model: Any) -> list[Any]:
  """Returns a model and all layers within it, nested ones too."""
  flatten = getattr(model, "_flatten_layers", None)
  return [model] if flatten is None else list(flatten())


def compile_arguments(model: Any) -> dict[str, Any] | None:
  """Returns what a model was compiled with; None if it was not."""
  compiled = getattr(model, "_compile_config", None)
  return None if compiled is None else dict(compiled.config)


def batches_per_call(model: Any) -> int:
  """Returns `steps_per_execution`, or less in tf_keras where an epoch ends."""
  if keras_of(model).__name__ == "keras":
    return int(model.steps_per_execution)
  return int(model._steps_per_execution.numpy())


def begin_at(model: Any, epoch: int | None) -> None:
  """Makes `fit` begin at an epoch, once its callbacks have been called.

  None leaves it to `initial_epoch`.
  """
  if keras_of(model).__name__ == "keras":
    model._initial_epoch = epoch
  elif epoch is None:
    model._training_state = None
  else:
    model._training_state = types.SimpleNamespace(
      maybe_load_initial_counters_from_ckpt=lambda *_, **__: (epoch, 0)
    )


def is_built(optimizer: Any) -> bool:
  """Whether the slots exist, in Keras 3, tf_keras or its legacy optimizers."""
  flags = ("built", "_built", "_hypers_created")
  return any(getattr(optimizer, flag, False) for flag in flags)


def name(optimizer: Any) -> str:
  """Returns the name, which legacy optimizers keep to themselves."""
  return str(getattr(optimizer, "name", None) or optimizer._name)


def key(optimizer: Any, variable: Any) -> Any:
  """Returns what an optimizer knows a variable by."""
  return optimizer._var_key(variable)


def decays(optimizer: Any, variable: Any) -> bool:
  """Whether a variable has weight decay, should there be any."""
  return bool(optimizer._use_weight_decay(variable))


def nested(optimizer: Any) -> Sequence[Any]:
  """Returns the optimizers of a MultiOptimizer."""
  # A wrapper would forward the attribute.
  own: Sequence[Any] = getattr(optimizer, "__dict__", {}).get(
    "_inner_optimizers", ()
  )
  return own


def learning_rates(optimizer: Any) -> list[Any]:
  """Returns what an optimizer keeps as its rate: variables and schedules."""
  settings = getattr(optimizer, "_hyper", {})  # of a legacy optimizer
  own = getattr(optimizer, "_learning_rate", None)
  rates = own, settings.get("learning_rate")
  return [rate for rate in rates if rate is not None]


def trained(optimizer: Any) -> list[Any]:
  """Returns the variables that slots of Keras 3 are named after."""
  return list(getattr(optimizer, "_trainable_variables", ()))


def children(optimizer: Any) -> dict[str, Any]:
  """What a checkpoint finds in an optimizer now.

  tf_keras' notes what it was first asked for, and misses what `build` makes.
  """
  vars(optimizer).pop("_coalesced_children", None)
  found: dict[str, Any] = optimizer._trackable_children()
  return found


def accumulated(optimizer: Any) -> list[Any]:
  """Returns the variables in which Keras 3 adds gradients up."""
  return list(getattr(optimizer, "_accumulated_gradients", ()))


def calls(optimizer: Any) -> Any:
  """Returns Keras 3's count of calls, several of which may be an iteration."""
  return optimizer._iterations


def averages(optimizer: Any) -> list[Any]:
  """Returns the moving averages of the weights."""
  return list(getattr(optimizer, "_model_variables_moving_average", ()))


def loss_scale(optimizer: Any) -> list[Any]:
  """Returns the loss scale of tf_keras, which it lists nowhere, and its count.

  The two are variables.
  """
  scale = getattr(optimizer, "_loss_scale", None)
  names = ("current_loss_scale", "counter")
  both = (getattr(scale, name, None) for name in names)
  return [variable for variable in both if variable is not None]


def unlisted(optimizer: Any) -> list[Any]:
  """Returns state of tf_keras, beside rates, that no list of it has."""
  settings = getattr(optimizer, "_hyper", {}).values()  # of a legacy optimizer
  variables = [value for value in settings if hasattr(value, "assign")]
  return [*loss_scale(optimizer), *variables]


@contextlib.contextmanager
def replacing(
  optimizer: Any, method: str, function: Callable[..., Any]
) -> Iterator[None]:
  """Calls a function, given an optimizer's method, in the method's place."""
  before = vars(optimizer).get(method)
  vars(optimizer)[method] = functools.partial(
    function, getattr(optimizer, method)
  )
  try:
    yield
  finally:
    del vars(optimizer)[method]
    if before is not None:
      vars(optimizer)[method] = before
