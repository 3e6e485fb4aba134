"""Access to private attributes of Keras models and optimizers.

Each function accepts objects of Keras 3 and of tf_keras, and returns an empty
value if one of them lacks an attribute.
"""

# ruff: noqa: SLF001  # This file is about private names of Keras.

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.variables import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import overriding

KERASES: Final = ("keras", "tf_keras")

# tf_keras' method that adds up rows of the same index.
_MERGE_ROWS: Final = "_deduplicate_sparse_grad"
# The methods that apply weight decay and clip, in both versions of Keras.
DECAY: Final = "_apply_weight_decay"
CLIP: Final = "_clip_gradients"


def keras_of(model: Any) -> Any:
  """Returns the module of the Keras that a model belongs to."""
  for cls in type(model).__mro__:
    root = cls.__module__.split(".")[0]
    if root in KERASES:
      return importlib.import_module(root)
  raise TypeError(f"`model` must be a Keras model; got {type(model).__name__}.")


def overrides(model: Any, methods: Sequence[str]) -> bool:
  """Returns whether the class of a model replaces or adds any methods."""
  base, kind = keras_of(model).Model, type(model)
  return any(
    getattr(kind, method, None) is not getattr(base, method, None)
    for method in methods
  )


def is_overridden(optimizer: Optimizer, method: str) -> bool:
  """Returns whether a method comes from a class that is not Keras' own."""
  home = getattr(type(optimizer), method).__module__
  return not home.startswith(("keras.src.", "tf_keras.src."))


def layers(model: Any) -> list[Any]:
  flatten = getattr(model, "_flatten_layers", None)
  return [model] if flatten is None else list(flatten())


def is_built(optimizer: Optimizer) -> bool:
  """Returns whether slots exist, in Keras 3 or tf_keras."""
  return any(getattr(optimizer, flag, False) for flag in ("built", "_built"))


def check_not_legacy(optimizer: Any, argument: str) -> None:
  """Raises `TypeError` for an optimizer of `tf_keras.optimizers.legacy`."""
  inside = getattr(optimizer, "inner_optimizer", optimizer)
  for kind in type(inside).__mro__:
    if kind.__module__.startswith("tf_keras.src.optimizers.legacy."):
      name = kind.__name__.replace("OptimizerV2", "Optimizer")
      raise TypeError(
        f"`{argument}` must not be an optimizer of tf_keras.optimizers.legacy;"
        f" got {type(inside).__name__}. Use a class without `.legacy`:"
        f" tf_keras.optimizers.{name}."
      )


def name(optimizer: Optimizer) -> str:
  """Returns an optimizer's name; a LossScaleOptimizer of tf_keras has none."""
  name = getattr(optimizer, "name", None) or getattr(optimizer, "_name", "")
  return str(name)


def key(optimizer: Optimizer, variable: Variable) -> Any:
  return optimizer._var_key(variable)


def decays(optimizer: Optimizer, variable: Variable) -> bool:
  return bool(optimizer._use_weight_decay(variable))


def nested(optimizer: Optimizer) -> Sequence[Any]:
  """Returns the optimizers of a MultiOptimizer; empty for other optimizers."""
  # Read `__dict__`, because a wrapper would forward the attribute.
  return getattr(optimizer, "__dict__", {}).get("_inner_optimizers", ())


def rates_and_schedules(optimizer: Optimizer) -> list[Any]:
  """Returns an optimizer's learning rates: variables, numbers or schedules."""
  rate = getattr(optimizer, "_learning_rate", None)
  return [] if rate is None else [rate]


def trained(optimizer: Optimizer) -> list[Variable]:
  """Returns Keras 3's own list of variables; tf_keras keeps none."""
  return getattr(optimizer, "_trainable_variables", [])


def indices(optimizer: Optimizer) -> dict[Any, int]:
  """Returns the index of each trained variable, by its key."""
  of_tf_keras = getattr(optimizer, "_index_dict", {})
  return getattr(optimizer, "_trainable_variables_indices", of_tf_keras)


def kind_of_slot(attribute: str, slot: Variable, paths: Sequence[str]) -> str:
  """Returns the kind of a slot, such as "momentum", from the slot's name."""
  if not paths:  # "m/dense/kernel:0" of tf_keras' Adam
    return str(slot.name).split("/")[0]
  # "dense_kernel_velocity". Adafactor names its row and column statistics after
  # the variable only.
  for path in paths:
    prefix = path.replace("/", "_").replace(":", "_") + "_"
    if slot.name.startswith(prefix):
      return str(slot.name).removeprefix(prefix)
  return attribute.strip("_")


def children(optimizer: Optimizer) -> dict[str, Any]:
  """Returns the objects that a checkpoint saves of an optimizer, by name."""
  # tf_keras caches its first answer, which lacks what `build` creates later. A
  # LossScaleOptimizer also has the children of the optimizer inside.
  for layer in (optimizer, getattr(optimizer, "inner_optimizer", None)):
    if layer is not None:
      layer.__dict__.pop("_coalesced_children", None)
  return optimizer._trackable_children()


def has_waiting(optimizer: Optimizer, name: str) -> bool:
  """Returns whether restored values wait for `build` to create an attribute."""
  optimizer._maybe_initialize_trackable()
  return name in optimizer._deferred_dependencies


def arguments_of_fit() -> Mapping[str, Any]:
  """Returns the local variables of the Keras `fit` that calls this package."""
  # Call frames decide what is logged and printed, and that monitoring the
  # validation of a `fit` without validation data is an error.
  frame: types.FrameType | None = sys._getframe(1)
  while frame is not None:
    names = {"validation_data", "epochs", "callbacks"}
    home = str(frame.f_globals.get("__name__")).split(".")[0]
    if home in KERASES and names <= frame.f_locals.keys():
      # `fit` sets `validation_data` itself if it splits the training data.
      return frame.f_locals
    frame = frame.f_back
  return {}


def callback_of_fit(name: str) -> Any:
  """Returns the callback of a class of Keras in `fit`; None without one."""
  callbacks = getattr(arguments_of_fit().get("callbacks"), "callbacks", ())
  return next((c for c in callbacks if type(c).__name__ == name), None)


# The attribute of a Keras optimizer that lists moving averages of the weights.
_AVERAGES: Final = "_model_variables_moving_average"


def copies_of_weights(optimizer: Optimizer) -> str:
  """Returns the attribute whose slots start as copies of the weights, or ""."""
  kinds = {kind.__name__ for kind in type(optimizer).__mro__}
  if "ScheduleFreeAdamW" in kinds:
    return "_momentums"
  return _AVERAGES if hasattr(optimizer, _MERGE_ROWS) else ""  # tf_keras


def averages(optimizer: Optimizer) -> list[Variable]:
  return list(getattr(optimizer, _AVERAGES, ()))


def show_averages(loss_scaler: Any, averages: list[Variable]) -> None:
  """Lists moving averages where Keras' SwapEMAWeights looks for them."""
  if averages:
    # Not `setattr`: Keras would track the list and save the averages twice.
    vars(loss_scaler)[_AVERAGES] = averages


def with_static_shapes(optimizer: Any) -> dict[str, Any]:
  """Returns methods that update by row-sparse gradients with static shapes."""
  if hasattr(optimizer, _MERGE_ROWS):
    # tf_keras' updates by dense gradients and by merged rows are the same.
    return {_MERGE_ROWS: lambda grads: list(map(tf.convert_to_tensor, grads))}
  update_step = getattr(type(optimizer), "update_step", None)
  if update_step is None or "update_step" in vars(optimizer):
    return {}
  names = update_step.__globals__
  # The same code, in which the name `ops` has another meaning.
  changed = types.FunctionType(
    update_step.__code__,
    {**names, "ops": _StaticOps(names.get("ops"))},
    argdefs=update_step.__defaults__,
    closure=update_step.__closure__,
  )
  return {"update_step": types.MethodType(changed, optimizer)}


class _StaticOps:
  """Keras' `ops`, with another division of row-sparse gradients.

  Keras' own division has a shape that depends on zeros and NaN in the divisor.
  """

  def __init__(self, ops: Any) -> None:
    self._ops = ops

  def __getattr__(self, name: str) -> Any:
    return getattr(self._ops, name)

  def divide(self, x1: Any, x2: Any) -> Any:
    """Divides, with Keras' gather of the divisor's rows for slices."""
    is_tensor = len(getattr(x2, "shape", ())) > 0
    if not (isinstance(x1, tf.IndexedSlices) and is_tensor):
      return self._ops.divide(x1, x2)
    values = self._ops.divide(x1.values, tf.gather(x2, x1.indices))
    return tf.IndexedSlices(values, x1.indices, x1.dense_shape)


def loss_scale(optimizer: Optimizer) -> list[Variable]:
  """Returns the loss scale of tf_keras and the count of its good steps."""
  scale = getattr(optimizer, "_loss_scale", None)
  names = ("current_loss_scale", "counter")
  both = (getattr(scale, name, None) for name in names)
  return [variable for variable in both if variable is not None]


# tf_keras stores a schedule's value here in each step, and does not read it in
# the next step.
_OF_SCHEDULE: Final = "_current_learning_rate"


def listed(optimizer: Optimizer) -> list[Variable]:
  return list(getattr(optimizer, "variables", ()))


def unlisted(optimizer: Optimizer) -> list[Variable]:
  """Returns variables, but no rates, that an optimizer does not list."""
  # tf_keras does not list the loss scale, and what is created without
  # `add_variable`, such as Nadam's product of momentums. Keras 3 lists all,
  # except while a LossScaleOptimizer builds the optimizer.
  rates = rates_and_schedules(optimizer)
  known = {id(value) for value in (*listed(optimizer), *rates)}
  return [
    *loss_scale(optimizer),
    *(
      value
      for name, value in vars(optimizer).items()
      if variables_lib.is_variable(value)
      and id(value) not in known
      and name != _OF_SCHEDULE
    ),
  ]


def strategy(optimizer: Optimizer) -> tf.distribute.Strategy:
  """Returns the strategy whose scope an optimizer was created in."""
  made_in = getattr(optimizer, "_distribution_strategy", None)
  # tf_keras' LossScaleOptimizer does not keep it.
  return made_in or tf.distribute.get_strategy()


@contextlib.contextmanager
def counting_once(optimizer: Optimizer) -> Iterator[None]:
  """Lets tf_keras' Nadam multiply its product of momentums once per step."""
  counter = "_u_product_counter"
  # Without isolation, replicas are threads that share one update of all copies,
  # so only the first thread replaces the counter.
  if isinstance(getattr(optimizer, counter, None), int):
    with overriding.overriding(optimizer, **{counter: _OncePerStep()}):
      yield
  else:
    yield


class _OncePerStep:
  """Replaces Nadam's `_u_product_counter` during one step.

  Nadam multiplies its product of momentums when it updates the first variable
  of a step. It finds the first variable by an attribute that counts updates in
  Python: wrong in a function, which is traced once, on several replicas, which
  all count, and in a resumed program, which starts at 1. Nadam compares
  this object once for each variable. `__eq__` returns False for the first
  variable of a step and True for the rest, on each replica.
  """

  __hash__ = None  # type: ignore[assignment]

  def __init__(self) -> None:
    self._replicas: set[Any] = set()

  def __eq__(self, other: object) -> Any:
    """Returns, as a tensor, whether this step has multiplied the product."""
    # The replica whose copies Keras is updating; None in isolation. With one
    # replica it is the variable.
    replica = distribute_lib.get_update_replica_id()
    replica = replica if isinstance(replica, int) else None
    is_multiplied = replica in self._replicas
    self._replicas.add(replica)
    return tf.constant(is_multiplied)

  def __add__(self, other: int) -> "_OncePerStep":
    return self
