"""The attributes that this package adds to a wrapper."""

import dataclasses
from typing import Any, Final

# The only attribute that this package adds to a wrapper. Its name is one that a
# user's optimizer class is unlikely to have.
_ATTRIBUTE: Final = "_tf_cross_shard_parts"


@dataclasses.dataclass
class Components:
  """The objects that do the work of a wrapper.

  Attributes:
    inner: The `wrapped.Inner` around the user's optimizer.
    keras_package: "keras" or "tf_keras".
    checks: The `step.step_checks.StepChecks`; None for towers.
    step: The `step.flow.StepPipeline`; None for towers, and while it is being
      created.
    unrestored: Pickled (path, value) pairs. `build` assigns them after it has
      created the slots, and sets each assigned value to None.
    unrestored_attributes: The same for variables that only an attribute of the
      optimizer holds: pickled values, by the name of the attribute.
    excluded: The `exclusions.Exclusions` of the optimizer, from its pickle or
      from `build`; None if it was neither unpickled nor built.
  """

  inner: Any
  keras_package: str
  checks: Any = None
  step: Any = None
  unrestored: list[Any] = dataclasses.field(default_factory=list)
  unrestored_attributes: dict[str, Any] = dataclasses.field(
    default_factory=dict
  )
  excluded: Any = None


def set_components(wrapper: Any, components: Components) -> None:
  """Stores components; bypasses `__setattr__`, which forwards."""
  wrapper.__dict__[_ATTRIBUTE] = components


def components_of(optimizer: Any) -> Components | None:
  """Returns the components of a wrapper.

  None for any other object, and for a wrapper whose Keras constructor is
  running.
  """
  return getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)


def step_of(optimizer: Any) -> Any:
  """Returns the `step.flow.StepPipeline` of a CrossShardOptimizer.

  None for any other object, and while the optimizer is being created.
  """
  own = components_of(optimizer)
  return None if own is None else own.step
