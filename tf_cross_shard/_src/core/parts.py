"""What a wrapper of this package consists of, and how other modules find it."""

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from tf_cross_shard._src.core.keras_types import Optimizer

if TYPE_CHECKING:
  from tf_cross_shard._src.core import step as step_lib
  from tf_cross_shard._src.core.inner import inner as inner_lib

# The only attribute that this package adds to a wrapper. Its name is one that a
# user's optimizer class is unlikely to have.
_ATTRIBUTE: Final = "_tf_cross_shard_parts"


@dataclasses.dataclass
class Parts:
  """The objects that do the work of a wrapper.

  Attributes:
    inner: The user's optimizer.
    keras_package: "keras" or "tf_keras".
    step: The steps of a CrossShardOptimizer; None for towers, and while the
      optimizer is being created.
  """

  inner: "inner_lib.Inner"
  keras_package: str
  step: "step_lib.Step | None" = None


def attach(wrapper: Any, parts: Parts) -> None:
  """Stores parts; bypasses `__setattr__`, which forwards."""
  wrapper.__dict__[_ATTRIBUTE] = parts


def find(optimizer: Optimizer) -> Parts | None:
  """Returns a wrapper's parts; None for others, and during its creation."""
  return getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)


def find_step(optimizer: Optimizer) -> "step_lib.Step | None":
  """Returns a CrossShardOptimizer's steps; None where `find` returns None."""
  parts = find(optimizer)
  return None if parts is None else parts.step


def step_of(optimizer: Optimizer) -> "step_lib.Step":
  """Returns the steps of a CrossShardOptimizer; `TypeError` for others."""
  step = find_step(optimizer)
  if step is None:
    raise TypeError(
      "`optimizer` must be a CrossShardOptimizer; got"
      f" {type(optimizer).__name__}. Wrap it in a CrossShardOptimizer."
    )
  return step


def package_of(optimizer: Optimizer) -> str:
  """Returns "keras" or "tf_keras": the Keras of a CrossShardOptimizer."""
  parts = find(optimizer)
  assert parts is not None
  return parts.keras_package
