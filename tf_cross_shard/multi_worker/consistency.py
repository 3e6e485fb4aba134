"""What all workers have to have alike, as lines that can be compared.

Collectives are paired by their order alone: the first gradient of one worker
with the first of the other. Whatever differs here would wait for ever, or add
what does not belong together.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.gradients.clipping import Gradient

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


def settings(**values: object) -> list[str]:
  """Settings by name."""
  return [f"{name}: {value}" for name, value in values.items()]


def variables(trained: Iterable[Any]) -> list[str]:
  """Names, dtypes and shapes."""
  trained = list(trained)
  names = renumbered(
    [str(getattr(v, "path", None) or v.name).split(":")[0] for v in trained]
  )
  lines = [
    f"variable {i}: {name} {tf.as_dtype(variable.dtype).name}"
    f" {list(variable.shape)}"
    for i, (name, variable) in enumerate(zip(names, trained, strict=True))
  ]
  return [*lines, f"variables: {len(trained)}"]


def gradients(grads: Sequence[Gradient]) -> list[str]:
  """Which gradients there are, and of what kind."""
  return [f"gradient {i}: {_kind(grad)}" for i, grad in enumerate(grads)]


def _kind(grad: Gradient) -> str:
  """How a gradient travels."""
  if grad is None:
    return "None"
  rows = " rows" if isinstance(grad, tf.IndexedSlices) else ""
  return f"{grad.dtype.name}{rows}"


def renumbered(names: Sequence[str]) -> list[str]:
  """Names whose numbers tell the order only.

  Keras numbers layers by how many of a kind the program made before, which may
  differ between workers that train the same: a chief that evaluates, say.
  """
  numbers: dict[str, set[int]] = {}
  for name in names:
    for base, number in map(_split, name.split("/")):
      numbers.setdefault(base, set()).add(number)
  ranks = {
    base: {number: rank for rank, number in enumerate(sorted(found))}
    for base, found in numbers.items()
  }
  return [
    "/".join(
      f"{base}_{ranks[base][number]}" if ranks[base][number] else base
      for base, number in map(_split, name.split("/"))
    )
    for name in names
  ]


def _split(part: str) -> tuple[str, int]:
  """A name and the number behind it, 0 for none."""
  match = _NUMBERED.fullmatch(part)
  assert match is not None  # the expression takes any text of one line
  return match[1], int(match[2] or 0)
