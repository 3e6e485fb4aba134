"""All variables of a Keras 3 or tf_keras optimizer, under stable names.

Keras' own lists are not complete: the list of tf_keras leaves out the learning
rate and the loss scale. And Keras puts numbers into names, such as `dense_7`.
These numbers depend on what a program has created before, so a different
program would not find the same names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import reduce, single_program, wrapper_state
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.keras_types import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import keras_private

if TYPE_CHECKING:
  from tf_cross_shard._src.core import pipeline as pipeline_lib
  from tf_cross_shard._src.core import warnings as warnings_lib


def nested_optimizers(optimizer: Optimizer) -> Iterator[Any]:
  """Yields an optimizer and all optimizers inside it, outermost first.

  If `compile` put a LossScaleOptimizer around the CrossShardOptimizer, the
  LossScaleOptimizer is the first. The optimizers of a MultiOptimizer follow the
  MultiOptimizer. A list stands for all of its optimizers.
  """
  if isinstance(optimizer, list):
    for each in optimizer:
      yield from nested_optimizers(each)
    return
  wrapper = wrapper_state.find(optimizer)
  outer_loss_scaler = (
    None if wrapper is None else wrapper.wrapped.outer_loss_scaler
  )
  optimizer = optimizer if outer_loss_scaler is None else outer_loss_scaler
  while optimizer is not None:
    yield optimizer
    for nested in keras_private.nested(optimizer):
      yield from nested_optimizers(nested)
    optimizer = getattr(optimizer, "inner_optimizer", None)


def state_variables(optimizer: Optimizer) -> list[tuple[str, Any]]:
  """Returns names and variables of an optimizer and of all optimizers inside.

  Raises `ValueError` if the optimizer is not built.
  """
  check_optimizer(optimizer)
  all_nested = list(nested_optimizers(optimizer))
  variables: list[Variable] = []
  trained: list[Variable] = []
  sharded = None
  for nested in all_nested:
    if sharded is None:
      variables += keras_private.listed(nested)
    sharded = sharded or _sharded_state_of(nested)
    variables += getattr(wrapper_state.find_pipeline(nested), "state", ())
    variables += [*_rate_variables(nested), *keras_private.unlisted(nested)]
    trained += keras_private.trained(nested)
  if not any(map(keras_private.is_built, all_nested)):
    raise ValueError(
      "`optimizer` is not built, so it has no state: got"
      f" {type(optimizer).__name__}. Call build(model.trainable_variables)"
      " inside `with strategy.scope():` first."
    )
  if sharded is not None:  # The optimizer is built on shards of the weights.
    trained = sharded.trainable_variables
  variables = _each_once(variables)
  names = _names(variables, _each_once(trained))
  return list(zip(unique(names), variables, strict=True))


def _each_once(variables: Iterable[Variable]) -> list[Variable]:
  """Returns the variables without repetitions; they cannot be in a set."""
  return list({id(variable): variable for variable in variables}.values())


def check_optimizer(optimizer: Optimizer) -> None:
  if not hasattr(optimizer, "variables") or not (
    hasattr(optimizer, "apply_gradients")
  ):
    raise TypeError(
      "`optimizer` must be a Keras optimizer; got"
      f" {type(optimizer).__name__}. Pass the CrossShardOptimizer."
    )


def unique(names: Sequence[str]) -> list[str]:
  """Returns the names, with numbers for repeated names: `weight#2`."""
  counts: dict[str, int] = {}
  numbered = []
  for name in names:
    count = counts[name] = counts.get(name, 0) + 1
    numbered.append(name if count == 1 else f"{name}#{count}")
  return numbered


def rate_variables(optimizer: Optimizer) -> list[Variable]:
  """Returns the variables of all learning rates that are in use.

  Keras 3's LossScaleOptimizer also has its own learning rate, but does not use
  it: it uses the learning rate of its wrapped optimizer.
  """
  return _each_once(
    variable
    for nested in nested_optimizers(optimizer)
    if not hasattr(nested, "inner_optimizer")
    for variable in _rate_variables(nested)
  )


def windows(optimizer: Optimizer) -> list[Variable]:
  """Returns the state of unfinished windows, which members do not share."""
  return [
    v for pipeline in pipelines_of(optimizer) for v in pipeline.window_state
  ]


def _rate_variables(optimizer: Optimizer) -> list[Variable]:
  """Returns the variables that set the learning rate of an optimizer."""
  rates = keras_private.rates_and_schedules(optimizer)
  return [v for rate in rates for v in _variables_of_rate(rate, optimizer)]


def _variables_of_rate(rate: Any, optimizer: Optimizer) -> Iterator[Variable]:
  """Yields the variables of a learning rate, a schedule, or one inside it."""
  if variables_lib.is_variable(rate):
    yield rate
    return
  numbers: Any = getattr(rate, "numbers", None)  # of a PerGroup
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


def sharded_state(optimizer: Optimizer) -> Any:
  """Returns the `PlainState` of an optimizer or of one inside it, or None."""
  states = map(_sharded_state_of, nested_optimizers(optimizer))
  return next(filter(None, states), None)


def _sharded_state_of(optimizer: Optimizer) -> Any:
  """Returns the `PlainState` of this optimizer, not of one inside it."""
  wrapper = wrapper_state.find(optimizer)
  return None if wrapper is None else wrapper.wrapped.sharded_state


def _names(
  variables: Sequence[Variable], trained: Sequence[Variable]
) -> list[str]:
  """Returns names without numbers that depend on earlier objects of a program.

  Keras 3 names a slot after its variable, which is among the trained ones:
  "adam/dense_7_kernel_momentum" is a slot of "dense_7/kernel". The result for
  this slot would be "adam/dense/kernel/momentum". Other variables have the
  whole path at the end: "gradient_sum/dense_7/kernel" becomes
  "gradient_sum/dense/kernel".
  """
  trained_paths = list(map(variables_lib.path_of, trained))
  stable_names = variables_lib.renumbered(trained_paths)
  stable_of_path = dict(zip(trained_paths, stable_names, strict=True))
  # Maps the prefix of a slot's name to the stable name of the trained variable.
  stable: dict[str, str] = {}
  for variable, name in zip(trained, stable_names, strict=True):
    for path in (getattr(variable, "path", None), variable.name):
      if path:
        prefix = str(path).replace("/", "_").replace(":", "_")
        stable.setdefault(f"{prefix}_", name)
  paths = []
  for path in map(variables_lib.path_of, variables):
    head, slash, last = path.rpartition("/")
    owners = [prefix for prefix in stable if last.startswith(prefix)]
    # A variable named exactly like a trained variable `kernel_1` is a copy of
    # it, not slot "1" of `kernel`.
    if owners and f"{last}_" not in stable:
      longest = max(owners, key=len)
      path = f"{head}{slash}{stable[longest]}/{last.removeprefix(longest)}"
    else:
      path = _with_stable_end(path, stable_of_path)
    paths.append(path)
  return variables_lib.renumbered(paths)


def _with_stable_end(path: str, stable_of_path: Mapping[str, str]) -> str:
  """Replaces a trained variable's path at the end of a path, if there is one.

  If several trained variables fit, the longest path is replaced.
  """
  parts_of_path = path.split("/")
  for start in range(len(parts_of_path)):
    stable = stable_of_path.get("/".join(parts_of_path[start:]))
    if stable is not None:
      return "/".join([*parts_of_path[:start], stable])
  return path


def groups_of(
  optimizer: Optimizer, strategy: tf.distribute.Strategy | None = None
) -> groups_lib.Groups:
  """Returns the groups of an optimizer.

  An optimizer that has no groups trains one group of all replicas, or each
  model by itself. `strategy` is the strategy of the variables; by default, that
  of the optimizer.
  """
  own = strategy
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
    own = own or keras_private.strategy(nested)
  return reduce.default_groups(own or tf.distribute.get_strategy())


def group_warnings_of(
  optimizer: Optimizer,
) -> "list[warnings_lib.GroupWarnings]":
  return [pipeline.warnings for pipeline in pipelines_of(optimizer)]


def pipelines_of(optimizer: Optimizer) -> "list[pipeline_lib.GradientPipeline]":
  all_nested = nested_optimizers(optimizer)
  return list(filter(None, map(wrapper_state.find_pipeline, all_nested)))
