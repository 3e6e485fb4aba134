"""The optimizers inside an optimizer, and their groups and learning rates."""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.variables import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


def nested_optimizers(optimizer: Optimizer) -> Iterator[Any]:
  """Yields an optimizer, or a list's, and all inside it, outermost first."""
  if isinstance(optimizer, list):
    for each in optimizer:
      yield from nested_optimizers(each)
    return
  while optimizer is not None:
    yield optimizer
    for nested in keras_private.nested(optimizer):
      yield from nested_optimizers(nested)
    optimizer = getattr(optimizer, "inner_optimizer", None)


def is_built(optimizer: Optimizer) -> bool:
  """Returns whether an optimizer, or one inside it, has its slots."""
  return any(map(keras_private.is_built, nested_optimizers(optimizer)))


def sharded_state(optimizer: Optimizer) -> Any:
  """Returns the `PlainState` of an optimizer or of one inside it, or None."""
  wrappers = filter(None, map(wrapped_lib.find, nested_optimizers(optimizer)))
  return next(filter(None, (w.sharded_state for w in wrappers)), None)


def groups_of(
  optimizer: Optimizer, strategy: tf.distribute.Strategy | None = None
) -> groups_lib.Groups:
  """Returns the groups of an optimizer; `strategy` is the variables'."""
  made_in = strategy
  for nested in nested_optimizers(optimizer):
    groups = getattr(nested, "groups", None)
    if isinstance(groups, groups_lib.Groups):
      copies = strategy and single_program.num_copies(strategy)
      if copies not in (None, groups.num_replicas):
        raise ValueError(
          f"`optimizer` has groups of {groups.num_replicas} replicas,"
          f" {groups.to_lists()}, but its variables have {copies}"
          " replicas. Create both inside the scope of one strategy."
        )
      return groups
    made_in = made_in or keras_private.strategy(nested)
  return groups_lib.default_groups(made_in or tf.distribute.get_strategy())


def rate_variables(optimizer: Optimizer) -> list[Variable]:
  """Returns the variables of all learning rates that are in use."""
  # Keras 3's LossScaleOptimizer does not use its own learning rate.
  return variables_lib.each_once(
    variable
    for nested in nested_optimizers(optimizer)
    if not hasattr(nested, "inner_optimizer")
    for variable in own_rate_variables(nested)
  )


def own_rate_variables(optimizer: Optimizer) -> list[Variable]:
  """Returns the variables of the learning rate of this optimizer alone."""
  rates = keras_private.rates_and_schedules(optimizer)
  return [v for rate in rates for v in _variables_of_rate(rate, optimizer)]


def _variables_of_rate(rate: Any, optimizer: Optimizer) -> Iterator[Variable]:
  """Yields the variables of a learning rate, a schedule, or one inside it."""
  if variables_lib.is_variable(rate):
    yield rate
    return
  numbers: Any = getattr(rate, "numbers", None)  # of a PerModel
  if hasattr(numbers, "variable"):
    strategy = keras_private.strategy(optimizer)
    if single_program.are_models(strategy):
      rate.create(strategy)  # The `build` of a plain optimizer does not.
    variable = numbers.variable(strategy)
    if variable is not None:
      yield variable
    return
  if isinstance(rate, (list, tuple)):
    values: Iterable[Any] = rate
  elif hasattr(rate, "get_config"):
    values = vars(rate).values()
  else:
    return
  for value in values:
    if isinstance(value, (list, tuple)) or hasattr(value, "get_config"):
      yield from _variables_of_rate(value, optimizer)


def check_optimizer(optimizer: Optimizer) -> None:
  keras_private.check_not_legacy(optimizer, "optimizer")
  # Optimizers of TensorFlow 1 have no `build`.
  if not (
    hasattr(optimizer, "build") and hasattr(optimizer, "apply_gradients")
  ):
    raise TypeError(
      "`optimizer` must be a Keras optimizer; got"
      f" {type(optimizer).__name__}. Pass an object such as model.optimizer."
    )
