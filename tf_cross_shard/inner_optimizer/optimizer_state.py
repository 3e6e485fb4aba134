"""All variables of an optimizer of either Keras, under stable names.

Keras' own lists are not complete: that of tf_keras leaves out the learning
rate and the loss scale. And Keras numbers names by how many of a kind a program
made before, so that another program would not find them again.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import libraries


def nested_optimizers(optimizer: Any) -> Iterator[Any]:
  """Yields an optimizer, the one that it encapsulates, and so on.

  A LossScaleOptimizer that `compile` put around ours is the first; those of a
  MultiOptimizer come after it.
  """
  own = getattr(optimizer, "__dict__", {})
  around = getattr(own.get("_inner"), "outer_loss_scaler", None)
  optimizer = optimizer if around is None else around
  while optimizer is not None:
    yield optimizer
    for nested in libraries.nested(optimizer):
      yield from nested_optimizers(nested)
    optimizer = getattr(optimizer, "inner_optimizer", None)


def state_variables(optimizer: Any) -> list[tuple[str, Any]]:
  """Every variable of an optimizer and of those it encapsulates, by name."""
  if not hasattr(optimizer, "variables") or not (
    hasattr(optimizer, "apply_gradients")
  ):
    raise TypeError(
      "`optimizer` must be a Keras optimizer; got"
      f" {type(optimizer).__name__}. Hand in the CrossShardOptimizer."
    )
  found: dict[int, Any] = {}
  trained: dict[int, Any] = {}
  is_built, sharded = False, None
  for layer in nested_optimizers(optimizer):
    is_built = is_built or libraries.is_built(layer)
    own = listed(layer) if sharded is None else []
    sharded = sharded or _sharded_state_of(layer)
    own += getattr(step_of(layer), "state", ())
    own += [*_rate_variables(layer), *libraries.unlisted(layer)]
    for variable in own:
      found.setdefault(id(variable), variable)
    for variable in libraries.trained(layer):
      trained.setdefault(id(variable), variable)
  if not is_built:
    raise ValueError(
      "`optimizer` is not built, and so has no state: got"
      f" {type(optimizer).__name__}. Call build(model.trainable_variables)"
      " inside `with strategy.scope():` first."
    )
  if sharded is not None:  # The optimizer is built on parts of these.
    trained = dict(enumerate(sharded.trainable_variables))
  names = _names(list(found.values()), list(trained.values()))
  return list(zip(unique(names), found.values(), strict=True))


def unique(names: Sequence[str]) -> list[str]:
  """Numbers the second and later of equal names: `weight#2`."""
  counts: dict[str, int] = {}
  made = []
  for name in names:
    count = counts[name] = counts.get(name, 0) + 1
    made.append(name if count == 1 else f"{name}#{count}")
  return made


def listed(optimizer: Any) -> list[Any]:
  """The list of an optimizer, which is a method in legacy ones."""
  variables = optimizer.variables
  return list(variables() if callable(variables) else variables)


def learning_rates(optimizer: Any) -> list[Any]:
  """The variables of all learning rates that are read.

  Keras 3's LossScaleOptimizer has one more, and reads that of its inner one.
  """
  layers = nested_optimizers(optimizer)
  own = [layer for layer in layers if not hasattr(layer, "inner_optimizer")]
  rates = itertools.chain(*map(_rate_variables, own))
  return list({id(rate): rate for rate in rates}.values())


def member_state(optimizer: Any) -> list[Any]:
  """The state that members of a group may have each for themselves.

  The variables that gradients are added up in, for one.
  """
  return [
    variable
    for layer in nested_optimizers(optimizer)
    for variable in (
      *getattr(step_of(layer), "member_state", ()),
      *libraries.accumulated(layer),
    )
  ]


def windows(optimizer: Any) -> tuple[list[Any], list[tuple[Any, int]]]:
  """Returns what members have added up for a later step.

  First variables that begin as zeros; then those that are multiples of a
  number when a window begins.
  """
  sums: list[Any] = []
  counts = []
  for layer in nested_optimizers(optimizer):
    sums += getattr(step_of(layer), "window_state", ())
    if of_keras := libraries.accumulated(layer):
      sums += of_keras
      steps = layer.gradient_accumulation_steps
      counts.append((libraries.calls(layer), steps))
  return sums, counts


def _rate_variables(optimizer: Any) -> list[Any]:
  """The variable of a learning rate; the schedule PerGroup may have one."""
  rates = libraries.learning_rates(optimizer)
  factors = [getattr(rate, "rate_factor", None) for rate in rates]
  return [rate for rate in (*rates, *factors) if hasattr(rate, "assign")]


def step_of(optimizer: Any) -> Any:
  """The stages of a CrossShardOptimizer, which have variables; else None."""
  return getattr(optimizer, "__dict__", {}).get("_step")


def sharded_state(optimizer: Any) -> Any:
  """The whole state of one that keeps parts, also within others; or None."""
  states = map(_sharded_state_of, nested_optimizers(optimizer))
  return next(filter(None, states), None)


def _sharded_state_of(optimizer: Any) -> Any:
  """That of an optimizer itself."""
  return getattr(vars(optimizer).get("_inner"), "whole_state", None)


def _names(variables: Sequence[Any], trained: Sequence[Any]) -> list[str]:
  """Names without the numbers that depend on what a program made before.

  Keras 3 names a slot after its variable, "adam/dense_7_kernel_momentum" for
  the one of "dense_7/kernel".
  """
  stable: dict[str, str] = {}
  for variable, name in zip(
    trained,
    variables_lib.renumbered(list(map(variables_lib.path_of, trained))),
    strict=True,
  ):
    for given in (getattr(variable, "path", None), variable.name):
      if given:
        prefix = str(given).replace("/", "_").replace(":", "_")
        stable.setdefault(f"{prefix}_", name)
  paths = []
  for path in map(variables_lib.path_of, variables):
    head, slash, last = path.rpartition("/")
    owners = [prefix for prefix in stable if last.startswith(prefix)]
    # Not of a copy that has a variable's whole name, `kernel_1` of `kernel_1`.
    if owners and f"{last}_" not in stable:
      longest = max(owners, key=len)
      last = f"{stable[longest]}/{last.removeprefix(longest)}"
    paths.append(f"{head}{slash}{last}")
  return variables_lib.renumbered(paths)
