"""Variables of removed features, which older checkpoints contain.

A checkpoint holds every variable by name, and normally `restore` raises an
error for a name that the program does not have. Names that match a pattern of
this module are skipped instead, with one warning.

To remove a feature that has state, add one line to `_REMOVED`.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from absl import logging

from tf_cross_shard._src.core import variables as variables_lib

_SUMS: Final = "optimizer/gradient_sum/"
# Pattern of a variable's full name in a checkpoint, and what the variable held.
_REMOVED: Final = (
  (
    r"optimizer/(noise_averages|noise_scale|gradient_norm|noise_steps)",
    "measurements of `noise_scale`",
  ),
  (
    r"optimizer/window_length",
    "the length of windows that AdaptiveAccumulation changed",
  ),
  (
    r"optimizer/wire_residual/.*",
    'rounding errors that wire_dtype="int8" carried over',
  ),
  (
    r"optimizer/gradient_sum/.*/(rows|indices)",
    "row sums of an accumulation window, which starts again",
  ),
  (
    r"optimizer/(outer_sent|fragment\d+_sent\d+)",
    "outer gradients that OuterOptimizer(delay=...) had not applied yet",
  ),
  (
    r"optimizer/fragment\d+_kept\d+",
    'rounding errors that OuterOptimizer(wire_dtype="int8") carried over',
  ),
  (
    r"optimizer/fragment\d+_state\d+",
    "update counts that OuterOptimizer(fragments=...) kept for each fragment",
  ),
)


def left_out(saved: Iterable[str], own: Collection[str]) -> dict[str, str]:
  """Returns the saved names to leave out, and a description of each variable.

  >>> list(left_out(["optimizer/anchor0", "optimizer/outer_sent"], []))
  ['optimizer/outer_sent']

  Args:
    saved: Names of variables in a checkpoint.
    own: Names of the program's variables, which are never left out.
  """
  known = set(own)
  return {
    name: held
    for name in saved
    for pattern, held in _REMOVED
    if name not in known and re.fullmatch(pattern, name)
  }


def older_sums(saved: Iterable[str], own: Iterable[str]) -> dict[str, str]:
  """Returns the names that older files have for gradient sums.

  Until version 0.2.0, these names contained the numbers that Keras gave to
  layers in the program that saved the file.

  >>> older_sums(["optimizer/gradient_sum/w"], ["optimizer/gradient_sum/w"])
  {}

  Args:
    saved: Names of variables in a checkpoint.
    own: Names of the program's variables.

  Returns:
    The saved names by the program's own names; empty for a newer file.
  """
  # The two parts of a row sum count as one sum: see `row_sums`.
  older = list(
    dict.fromkeys(
      re.sub("/(rows|indices)$", "", name)
      for name in saved
      if name.startswith(_SUMS)
    )
  )
  present = [name for name in own if name.startswith(_SUMS)]
  stable = variables_lib.renumbered(older)
  if set(older) == set(present) or set(stable) != set(present):
    return {}
  return dict(zip(stable, older, strict=True))


def row_sums(found: Iterable[str]) -> list[str]:
  """Maps older names of row sums to the current names of the dense sums.

  >>> row_sums(["optimizer/gradient_sum/embeddings/rows"])
  ['optimizer/gradient_sum/embeddings']

  Args:
    found: Names from `left_out`.
  """
  suffix = "/rows"
  return [
    name.removesuffix(suffix)
    for name in found
    if name.startswith(_SUMS) and name.endswith(suffix)
  ]


def without_new(
  path: Any, own: Sequence[Any], saved: Collection[str]
) -> list[Any]:
  """Returns the program's variables without new variables that the file lacks.

  Args:
    path: The file, for a warning.
    own: The `group_state.Entry`s of the program.
    saved: The names in the file.
  """
  lacking = [p.name for p in own if p.is_new and p.name not in saved]
  if lacking:
    logging.warning(
      "The checkpoint %s is of an older version, which did not save %s. The"
      " value in the program stays; everything else was restored.",
      path,
      _shown(lacking),
    )
  return [entry for entry in own if entry.name not in lacking]


def warn(path: Any, found: dict[str, str]) -> None:
  """Logs one warning if a restored checkpoint had variables to leave out."""
  if not found:
    return
  names: dict[str, list[str]] = {}
  for name, held in found.items():
    names.setdefault(held, []).append(name.removeprefix("optimizer/"))
  logging.warning(
    "The checkpoint %s holds state of features that were removed: %s. That"
    " state was left out; everything else was restored.",
    path,
    "; ".join(f"{held} ({_shown(own)})" for held, own in names.items()),
  )


def _shown(names: Sequence[str]) -> str:
  """Returns the first name, and how many others there are."""
  return (
    names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
  )
