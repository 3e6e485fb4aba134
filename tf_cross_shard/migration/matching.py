"""Which variable receives which value of a checkpoint of TensorFlow 1.

Names decide, and nothing else: where they leave a choice, it is the user's.
Nothing is assigned here.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tf_cross_shard.inner_optimizer import optimizer_state

Names = Mapping[str, str] | Callable[[str], str | None] | None
Shapes = dict[str, tuple[int, ...]]


class Allowed:
  """What need not have a counterpart."""

  def __init__(self, allow_unmatched: bool | Collection[str]) -> None:
    """Checks the argument."""
    self.everything = allow_unmatched is True
    self._texts: list[str] = []
    if isinstance(allow_unmatched, bool):
      return
    if isinstance(allow_unmatched, Collection) and not (
      isinstance(allow_unmatched, (str, bytes))
    ):
      self._texts = list(allow_unmatched)
    if not self._texts or not all(isinstance(t, str) for t in self._texts):
      raise TypeError(
        "`allow_unmatched` must be True, False, or names and regular"
        f" expressions; got {allow_unmatched!r}. Write a list, such as"
        ' [".*/ExponentialMovingAverage"].'
      )

  def names(self, name: str) -> bool:
    """Whether the user spelt that this has no counterpart."""
    return any(text == name or _matches(text, name) for text in self._texts)

  def covers(self, name: str) -> bool:
    """Whether this may be left without a counterpart."""
    return self.everything or self.names(name)


def labels_of(variables: Sequence[Any]) -> list[str]:
  """The names by which users tell variables apart."""
  return optimizer_state.unique(list(map(optimizer_state.path_of, variables)))


def match_weights(
  model: Any, variables: Sequence[Any], shapes: Shapes, names: Names
) -> dict[str, str]:
  """The checkpoint's name of each variable that has one there."""
  labels = labels_of(variables)
  paths = list(map(optimizer_state.path_of, variables))
  asked = _asked(model, labels, shapes, names)
  found: dict[str, str] = {}
  for label, path in zip(labels, paths, strict=True):
    options = [o for o in (path, _short(model, path)) if o in shapes]
    options = list(dict.fromkeys(options))
    if label in asked:
      found[label] = asked[label]
    elif options and (paths.count(path) > 1 or len(options) > 1):
      raise ValueError(
        f"`{label}` of the model may be {_either(options)} of the checkpoint:"
        f" {paths.count(path)} variables have that name. Say which it is, as"
        f" `names={{{label!r}: ...}}`."
      )
    elif options:
      found[label] = options[0]
  sources = list(found.values())
  for source in sources:
    if sources.count(source) > 1:
      both = [label for label, other in found.items() if other == source]
      raise ValueError(
        f"`{source}` of the checkpoint would be the value of all of"
        f" {', '.join(both)}. Say which are which with `names`."
      )
  return found


def choose(
  what: str, options: Sequence[str], allowed: Allowed, is_optional: bool
) -> str | None:
  """The one that the user left."""
  left = list(options)
  if len(left) > 1:
    left = [name for name in left if not allowed.names(name)]
  if len(left) > 1 and not (allowed.everything and is_optional):
    raise ValueError(
      f"{what} may be {_either(left)} of the checkpoint. Name those that it is"
      f" not in `allow_unmatched`, as [{left[-1]!r}]."
    )
  return left[0] if len(left) == 1 else None


def check_unmatched(
  in_checkpoint: Shapes, in_model: Shapes, allowed: Allowed
) -> None:
  """Raises an error if something has no counterpart and is to have one."""
  lines: list[str] = []
  for where, shapes in (
    ("in the checkpoint", in_checkpoint),
    ("in model and optimizer", in_model),
  ):
    names = [name for name in sorted(shapes) if not allowed.covers(name)]
    if names:
      lines += [f"  {where} only:"]
      lines += [f"    {name} {list(shapes[name])}" for name in names]
  if lines:
    raise ValueError(
      "Not everything has a counterpart:\n" + "\n".join(lines) + "\nGive the"
      " model and the optimizer what they lack; say which layers were renamed"
      " with `names`; or list in `allow_unmatched` what may be left."
    )


def _asked(
  model: Any, labels: Sequence[str], shapes: Shapes, names: Names
) -> dict[str, str]:
  """What the user says, by label."""
  if names is None:
    return {}
  if callable(names):
    answers = {label: names(label) for label in labels}
    asked = {label: name for label, name in answers.items() if name is not None}
  elif isinstance(names, Mapping):
    full = {_short(model, label): label for label in labels}
    full |= {label: label for label in labels}
    unknown = sorted(set(map(str, names)) - set(full))
    if unknown:
      raise ValueError(
        f"`names` has keys that the model has not: {', '.join(unknown)}. Its"
        f" variables are {', '.join(sorted(labels))}."
      )
    asked = {full[key]: name for key, name in names.items()}
  else:
    raise TypeError(
      "`names` must be a dictionary from names in the model to names in the"
      f" checkpoint, or a function; got {names!r}."
    )
  absent = {k: n for k, n in asked.items() if n not in shapes}
  if absent:
    raise ValueError(
      f"`names` has values that the checkpoint has not: {absent}. It holds"
      f" {', '.join(sorted(shapes))}."
    )
  return asked


def _short(model: Any, path: str) -> str:
  """A variable's name without that of the model around it."""
  name = getattr(model, "name", None)
  return path.removeprefix(f"{name}/") if isinstance(name, str) else path


def _either(names: Sequence[str]) -> str:
  """A choice, in words."""
  return " or ".join(f"`{name}`" for name in names)


def _matches(text: str, name: str) -> bool:
  """Whether a regular expression, if it is one, matches the whole name."""
  try:
    return re.fullmatch(text, name) is not None
  except re.error:
    return False  # A name with brackets, say.
