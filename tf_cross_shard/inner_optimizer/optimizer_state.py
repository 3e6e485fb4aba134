"""All variables of an optimizer, whatever Keras it is of.

Keras' own lists are not complete: that of tf_keras leaves out the learning
rate and the loss scale. And Keras numbers the names in them by what a program
made before, so that they would not be found again by another one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tf_cross_shard.multi_worker import consistency

_LOSS_SCALE: Final = ("current_loss_scale", "counter")

# Keras 3 makes in it what layers without build() have waited with.
DEFERRED: Final = "_deferred_initialize"


def layers(optimizer: Any) -> Iterator[Any]:
  """An optimizer, the one that it encapsulates, and so on."""
  own = getattr(optimizer, "__dict__", {})
  around = getattr(own.get("_inner"), "around", None)
  optimizer = optimizer if around is None else around
  while optimizer is not None:
    yield optimizer
    optimizer = getattr(optimizer, "inner_optimizer", None)


def state_variables(optimizer: Any) -> list[tuple[str, Any]]:
  """Every variable of an optimizer and of those within, once, by name."""
  if not hasattr(optimizer, "variables") or not (
    hasattr(optimizer, "apply_gradients")
  ):
    raise TypeError(
      "`optimizer` must be a Keras optimizer; got"
      f" {type(optimizer).__name__}. Hand in the CrossShardOptimizer."
    )
  found: dict[int, Any] = {}
  innermost = optimizer
  for layer in layers(optimizer):
    innermost = layer
    for variable in (*_listed(layer), *_unlisted(layer)):
      found.setdefault(id(variable), variable)
  if not _is_built(innermost):
    raise ValueError(
      "`optimizer` is not built, and so has no state: got"
      f" {type(optimizer).__name__}. Call build(model.trainable_variables)"
      " inside `with strategy.scope():` first."
    )
  names = _names(list(found.values()), innermost)
  return list(zip(unique(names), found.values(), strict=True))


def unique(names: Sequence[str]) -> list[str]:
  """Names of which the second of a kind has a number."""
  counts: dict[str, int] = {}
  made = []
  for name in names:
    count = counts[name] = counts.get(name, 0) + 1
    made.append(name if count == 1 else f"{name}#{count}")
  return made


def path_of(variable: Any) -> str:
  """The name that Keras gave, with those of the layers around."""
  return str(getattr(variable, "path", None) or variable.name).split(":")[0]


def _listed(optimizer: Any) -> list[Any]:
  """What the optimizer says; a property in one Keras, a method in others."""
  variables = optimizer.variables
  return list(variables() if callable(variables) else variables)


def loss_scale_of(optimizer: Any) -> list[Any]:
  """The variables that tf_keras' loss scaling keeps apart from `variables`."""
  scale = getattr(optimizer, "_loss_scale", None)
  both = (getattr(scale, name, None) for name in _LOSS_SCALE)
  return [variable for variable in both if variable is not None]


def _unlisted(optimizer: Any) -> list[Any]:
  """What belongs to an optimizer besides."""
  others = [
    getattr(optimizer, "skipped_steps", None),
    getattr(optimizer, "_learning_rate", None),  # tf_keras
    *loss_scale_of(optimizer),
    # The learning rate and other settings of tf_keras' legacy optimizers.
    *getattr(optimizer, "_hyper", {}).values(),
  ]
  return [other for other in others if hasattr(other, "assign")]


def _is_built(optimizer: Any) -> bool:
  """Whether the slots are there."""
  flags = ("built", "_built", "_hypers_created")
  return any(getattr(optimizer, flag, False) for flag in flags)


def _names(variables: Sequence[Any], innermost: Any) -> list[str]:
  """Names without the numbers that depend on what a program made before.

  Keras 3 names a slot after its variable, "adam/dense_7_kernel_momentum" for
  the one of "dense_7/kernel".
  """
  trained = list(getattr(innermost, "_trainable_variables", ()))
  stable: dict[str, str] = {}
  for variable, name in zip(
    trained, consistency.renumbered(list(map(path_of, trained))), strict=True
  ):
    for given in (getattr(variable, "path", None), variable.name):
      if given:
        prefix = str(given).replace("/", "_").replace(":", "_")
        stable.setdefault(f"{prefix}_", name)
  paths = []
  for path in map(path_of, variables):
    head, slash, last = path.rpartition("/")
    owners = [prefix for prefix in stable if last.startswith(prefix)]
    if owners:
      longest = max(owners, key=len)
      last = f"{stable[longest]}/{last.removeprefix(longest)}"
    paths.append(f"{head}{slash}{last}")
  return consistency.renumbered(paths)


def holders(variable: Any, makers: Sequence[Any]) -> list[Any]:
  """Keras 3's objects within others of which a variable is a part."""
  found: list[Any] = []
  for maker in makers:
    for layer in getattr(maker, "_flatten_layers", list)():
      if any(variable is each for each in layer.variables):
        found.append(layer)
        seeds = getattr(layer, "_seed_generators", ())
        found += [each for each in seeds if each.state is variable]
    if found:
      break
  return found[::-1]
