"""All variables of an optimizer of either Keras, under stable names.

Keras' own lists are not complete: that of tf_keras leaves out the learning
rate and the loss scale. And Keras numbers names by how many of a kind a program
made before, so that another program would not find them again.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tf_cross_shard import variables as variables_lib

_LOSS_SCALE: Final = ("current_loss_scale", "counter")


def nested_optimizers(optimizer: Any) -> Iterator[Any]:
  """Yields an optimizer, the one that it encapsulates, and so on.

  A LossScaleOptimizer that `compile` put around ours is the first; those of a
  MultiOptimizer come after it.
  """
  own = getattr(optimizer, "__dict__", {})
  around = getattr(own.get("_inner"), "around", None)
  optimizer = optimizer if around is None else around
  while optimizer is not None:
    yield optimizer
    for each in getattr(optimizer, "__dict__", {}).get("_inner_optimizers", ()):
      yield from nested_optimizers(each)
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
  is_built, plain = False, None
  for layer in nested_optimizers(optimizer):
    is_built = is_built or _is_built(layer)
    own = listed(layer) if plain is None else []
    plain = plain or _plain_of(layer)
    for variable in (*own, *_unlisted(layer)):
      found.setdefault(id(variable), variable)
    for variable in getattr(layer, "_trainable_variables", ()):
      trained.setdefault(id(variable), variable)
  if not is_built:
    raise ValueError(
      "`optimizer` is not built, and so has no state: got"
      f" {type(optimizer).__name__}. Call build(model.trainable_variables)"
      " inside `with strategy.scope():` first."
    )
  if plain is not None:  # Sharded: the plain optimizer is built on these.
    trained = dict(enumerate(plain.trainable_variables))
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


def loss_scale_of(optimizer: Any) -> list[Any]:
  """The variables that tf_keras' loss scaling keeps apart from `variables`."""
  scale = getattr(optimizer, "_loss_scale", None)
  both = (getattr(scale, name, None) for name in _LOSS_SCALE)
  return [variable for variable in both if variable is not None]


def learning_rates(optimizer: Any) -> list[Any]:
  """The variables of learning rates; of schedules PerGroup may have one."""
  rates = [
    rate
    for layer in nested_optimizers(optimizer)
    for given in given_rates(layer)
    for rate in (given, getattr(given, "rate_factor", None))
  ]
  unique_rates = {id(rate): rate for rate in rates if hasattr(rate, "assign")}
  return list(unique_rates.values())


def given_rates(optimizer: Any) -> list[Any]:
  """The learning rates of one layer: variables and schedules."""
  rates = (
    getattr(optimizer, "_learning_rate", None),
    getattr(optimizer, "_hyper", {}).get("learning_rate"),  # legacy
  )
  return [rate for rate in rates if rate is not None]


def member_state(optimizer: Any) -> list[Any]:
  """What members of a group may have each for themselves.

  What gradients are added up in, for one.
  """
  return [
    variable
    for layer in nested_optimizers(optimizer)
    for name in ("_member_state", "_accumulated_gradients")
    for variable in getattr(layer, name, ())
  ]


def _plain_of(optimizer: Any) -> Any:
  """What stands for all variables of one that keeps its state in shards."""
  return getattr(vars(optimizer).get("_inner"), "plain", None)


def _unlisted(optimizer: Any) -> list[Any]:
  """The variables of an optimizer that its own list leaves out."""
  others = [
    getattr(optimizer, "_learning_rate", None),  # tf_keras
    *(getattr(r, "rate_factor", None) for r in given_rates(optimizer)),
    *loss_scale_of(optimizer),
    *getattr(optimizer, "_own_state", ()),
    # The learning rate and other settings of tf_keras' legacy optimizers.
    *getattr(optimizer, "_hyper", {}).values(),
  ]
  return [other for other in others if hasattr(other, "assign")]


def _is_built(optimizer: Any) -> bool:
  """Whether the slots exist."""
  flags = ("built", "_built", "_hypers_created")
  return any(getattr(optimizer, flag, False) for flag in flags)


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
