"""What a wrapper of this package consists of, and how other modules find it."""

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from tf_cross_shard._src.core.keras_types import Optimizer

if TYPE_CHECKING:
  from tf_cross_shard._src.core import pipeline as pipeline_lib
  from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

# The only attribute that this package adds to a wrapper. Its name is one that a
# user's optimizer class is unlikely to have.
_ATTRIBUTE: Final = "_tf_cross_shard_state"


@dataclasses.dataclass
class WrapperState:
  """The objects that do the work of a wrapper.

  Attributes:
    wrapped: The user's optimizer.
    keras_package: "keras" or "tf_keras".
    pipeline: The gradient pipeline of a CrossShardOptimizer; None for towers,
      and while the optimizer is being created.
  """

  wrapped: "wrapped_lib.WrappedOptimizer"
  keras_package: str
  pipeline: "pipeline_lib.GradientPipeline | None" = None


def attach(wrapper: Any, state: WrapperState) -> None:
  """Stores the state; bypasses `__setattr__`, which forwards."""
  wrapper.__dict__[_ATTRIBUTE] = state


def find(optimizer: Optimizer) -> WrapperState | None:
  """Returns a wrapper's state; None for others, and during its creation."""
  return getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)


def find_pipeline(
  optimizer: Optimizer,
) -> "pipeline_lib.GradientPipeline | None":
  """Returns a CrossShardOptimizer's pipeline; None where `find` does."""
  state = find(optimizer)
  return None if state is None else state.pipeline


def pipeline_of(optimizer: Optimizer) -> "pipeline_lib.GradientPipeline":
  """Returns the pipeline of a CrossShardOptimizer; `TypeError` for others."""
  pipeline = find_pipeline(optimizer)
  if pipeline is None:
    raise TypeError(
      "`optimizer` must be a CrossShardOptimizer; got"
      f" {type(optimizer).__name__}. Wrap it in a CrossShardOptimizer."
    )
  return pipeline


def package_of(optimizer: Optimizer) -> str:
  """Returns "keras" or "tf_keras": the Keras of a CrossShardOptimizer."""
  state = find(optimizer)
  assert state is not None
  return state.keras_package
