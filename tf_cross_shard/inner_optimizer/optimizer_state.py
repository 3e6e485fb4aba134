"""All variables of an optimizer of either Keras, under stable names.

Keras' own lists are not complete: that of tf_keras leaves out the learning
rate and the loss scale. And Keras numbers names by how many of a kind a program
made before, so that another program would not find them again.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import base, libraries


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
    for nested in libraries.of(optimizer).nested(optimizer):
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
    library = libraries.of(layer)
    is_built = is_built or library.is_built(layer)
    own = listed(layer) if sharded is None else []
    sharded = sharded or _sharded_state_of(layer)
    own += getattr(_step_of(layer), "state", ())
    for rate in library.learning_rates(layer):
      factor = getattr(rate, "rate_factor", None)  # of a PerGroup
      own += [] if factor is None else [factor]
    for variable in (*own, *library.unlisted(layer)):
      found.setdefault(id(variable), variable)
    for variable in library.trained(layer):
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
  """The variables of learning rates; of schedules PerGroup may have one."""
  rates = [
    rate
    for layer in nested_optimizers(optimizer)
    for given in libraries.of(layer).learning_rates(layer)
    for rate in (given, getattr(given, "rate_factor", None))
  ]
  unique_rates = {id(rate): rate for rate in rates if hasattr(rate, "assign")}
  return list(unique_rates.values())


def member_state(optimizer: Any) -> list[Any]:
  """The state that members of a group may have each for themselves.

  The variables that gradients are added up in, for one.
  """
  return [
    variable
    for layer in nested_optimizers(optimizer)
    for variable in (
      *getattr(_step_of(layer), "member_state", ()),
      *libraries.of(layer).accumulated(layer),
    )
  ]


def _step_of(optimizer: Any) -> Any:
  """The stages of a CrossShardOptimizer, which have variables; else None."""
  return getattr(optimizer, "__dict__", {}).get("_step")


def _sharded_state_of(optimizer: Any) -> Any:
  """The whole state of an optimizer that keeps parts of it, or None."""
  state = getattr(vars(optimizer).get("_inner"), "unsharded_state", None)
  return None if isinstance(state, base.WholeState) else state


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
    if owners:
      longest = max(owners, key=len)
      last = f"{stable[longest]}/{last.removeprefix(longest)}"
    paths.append(f"{head}{slash}{last}")
  return variables_lib.renumbered(paths)
