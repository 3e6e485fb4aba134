"""The validated arguments of a CrossShardOptimizer, except `opt`.

All settings are in one frozen object. The constructor creates the object,
`get_config` and `repr` read it, workers compare it, and every stage of a step
reads its settings from it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import loss_factor, validation
from tf_cross_shard._src.core.gradients import clipping, compression

_Class = TypeVar("_Class", bound=type[Any])

LIMITS: Final = clipping.LIMITS
# What the user can assign. Steps that are traced afterwards use the new value.
MUTABLE: Final = (*LIMITS, "per_model")
# The docstrings of the optimizer's properties.
_DOCS: Final = {
  "reduction": '`"mean"` or `"sum"`.',
  "group_assignment": (
    "The groups as lists; None for one group of all replicas."
  ),
  "loss_averaged_over": (
    '`"replica"`, `"global"`, or None to choose by the method you call.'
  ),
  "clipnorm": "Limit of the norm of each gradient, before the sum.",
  "global_clipnorm": (
    "Limit of the norm of all gradients together, before the sum."
  ),
  "clipvalue": "Limit of each element of a gradient, before the sum.",
  "wire_dtype": (
    "The dtype of gradients while they travel; None for exact sums."
  ),
  "skip_nonfinite": (
    "Whether steps with a NaN or an infinity are skipped and counted."
  ),
  "scale_gradients": (
    "Whether the loss factor multiplies gradients instead of the loss."
  ),
  "fused_update": (
    "Whether kernels perform the update; None where there are any."
  ),
  "accumulate_steps": "How many calls make one step; None for one.",
  "shard_update": (
    "Whether each member of a group updates one part of the weights."
  ),
  "lazy_rows": (
    "Whether row-sparse gradients update only the rows in the batch."
  ),
  "per_model": "A number for each group, by the name of a setting; or None.",
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The arguments of a CrossShardOptimizer, without `opt`.

  The configuration and the comparison between workers follow from the fields,
  which the constructor's docstring explains.
  """

  reduction: str = loss_factor.MEAN
  name: str = "CrossShardOptimizer"
  # The constructor accepts any form of groups. The field is `Groups` or None.
  group_assignment: Any = None
  loss_averaged_over: str | None = None
  clipnorm: float | None = None
  global_clipnorm: float | None = None
  clipvalue: float | None = None
  wire_dtype: tf.DType | None = None
  skip_nonfinite: bool = False
  scale_gradients: bool = False
  fused_update: bool | None = None
  accumulate_steps: int | None = None
  shard_update: bool | str = False
  lazy_rows: bool | str = False
  # The field is {name: [a number for each group]} or None.
  per_model: Any = None

  def __post_init__(self) -> None:
    for name, convert in (
      ("reduction", loss_factor.canonical_reduction),
      ("loss_averaged_over", loss_factor.check_averaged_over),
      ("wire_dtype", compression.as_wire_dtype),
      ("group_assignment", as_groups),
      ("per_model", _as_per_model),
    ):
      object.__setattr__(self, name, convert(getattr(self, name)))
    for name in ("skip_nonfinite", "scale_gradients"):
      if not isinstance(getattr(self, name), bool):
        raise TypeError(
          f"`{name}` must be True or False; got {getattr(self, name)!r}."
        )
    if self.fused_update not in (None, True, False):
      raise TypeError(
        "`fused_update` must be None, True or False; got"
        f" {self.fused_update!r}. None uses kernels where there are any."
      )
    for name in LIMITS:
      _check_limit(name, getattr(self, name))
    limits = {name: c for name, c in self.limits.items() if c is not None}
    if len(limits) > 1:
      raise ValueError(
        f"At most one of {list(LIMITS)} can be set; got {limits}. Set the"
        " others to None first."
      )
    for name in ("shard_update", "lazy_rows"):
      if getattr(self, name) not in (True, False, None, "elementwise"):
        raise ValueError(
          f'`{name}` must be True, False or "elementwise"; got'
          f" {getattr(self, name)!r}."
        )
    steps = self.accumulate_steps
    if steps is not None:
      remedy = "Use None to apply gradients in every call."
      steps = validation.check_integer("accumulate_steps", steps, remedy)
      object.__setattr__(self, "accumulate_steps", steps)
    if self.lazy_rows and (steps or 1) > 1:
      raise ValueError(
        f"`lazy_rows` is {self.lazy_rows!r} and `accumulate_steps` is {steps},"
        " but accumulated gradients are dense. Set only one of these arguments."
      )

  @classmethod
  def of(cls, arguments: Mapping[str, Any]) -> "Settings":
    """Returns the settings among a constructor's arguments, by their names."""
    return cls(**{f.name: arguments[f.name] for f in dataclasses.fields(cls)})

  @property
  def is_mean(self) -> bool:
    return self.reduction == loss_factor.MEAN

  @property
  def limits(self) -> dict[str, Any]:
    return {name: getattr(self, name) for name in LIMITS}

  def read(self, name: str) -> Any:
    """Returns a setting as a built-in Python type."""
    value = getattr(self, name)
    if isinstance(value, groups_lib.Groups):
      return value.to_lists()
    return value.name if isinstance(value, tf.DType) else value

  def to_config(self) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(self)]
    config = {name: self.read(name) for name in names}
    groups = self.group_assignment
    if groups is not None and groups.names is not None:
      config["group_assignment"] = {
        "assignment": config["group_assignment"],
        "names": list(groups.names),
      }
    return config

  def non_default(self) -> dict[str, Any]:
    defaults = Settings().to_config()
    config = self.to_config().items()
    return {name: value for name, value in config if value != defaults[name]}


class Setting:
  """A property of the optimizer that returns the setting of the same name."""

  def __init__(self, name: str) -> None:
    self._name = name
    self.__doc__ = _DOCS[name]

  def __get__(self, optimizer: Any, owner: Any = None) -> Any:
    """Returns the setting; None while the optimizer is being created."""
    if optimizer is None:
      return self
    pipeline = vars(optimizer).get("_pipeline")
    if pipeline is None:
      return None
    settings = pipeline.settings
    if self._name == "per_model":
      settings = pipeline.current_settings()
    return settings.read(self._name)

  def __set__(self, optimizer: Any, value: Any) -> None:
    """Replaces the setting, or raises `AttributeError` if it is fixed."""
    pipeline = vars(optimizer).get("_pipeline")
    if self._name in MUTABLE:
      # It is None while Keras' constructor assigns its own defaults.
      if pipeline is not None:
        pipeline.replace(**{self._name: value})
      return
    raise AttributeError(
      f"`{self._name}` cannot be changed after construction. Create a new"
      f" optimizer with {self._name}={value!r}."
    )


def with_properties(cls: _Class) -> _Class:
  """Gives the optimizer's class a property for each setting except `name`."""
  for name in _DOCS:
    setattr(cls, name, Setting(name))
  return cls


def as_groups(group_assignment: Any) -> groups_lib.Groups | None:
  """Returns the `Groups` of any accepted form of `group_assignment`."""
  if group_assignment is None or isinstance(
    group_assignment, groups_lib.Groups
  ):
    return group_assignment
  if isinstance(group_assignment, dict):  # from a configuration
    return groups_lib.Groups(**group_assignment)
  if tf.is_tensor(group_assignment) and not hasattr(group_assignment, "numpy"):
    static = tf.get_static_value(group_assignment)
    if static is None:
      raise ValueError(
        "`group_assignment` must be known when the program is built; got the"
        f" symbolic tensor {group_assignment!r}. Use a list."
      )
    group_assignment = static
  return groups_lib.Groups(group_assignment)


def _check_limit(name: str, limit: Any) -> None:
  # This comparison is also False for NaN.
  is_number = hasattr(limit, "__float__") and float(limit) >= 0
  if limit is not None and not is_number:
    raise ValueError(
      f"`{name}` must be a number of at least 0, or None; got {limit!r}. None"
      " or 0 does not clip."
    )


def _as_per_model(numbers: Any) -> dict[str, list[float]] | None:
  """Returns lists with a number for each model, by the names of settings."""
  try:
    found = {str(k): list(map(float, v)) for k, v in (numbers or {}).items()}
  except (AttributeError, TypeError, ValueError) as error:
    raise ValueError(
      "`per_model` must map each setting name to a list with one number"
      f' per model, such as {{"weight_decay": [0.0, 0.1]}}; got {numbers!r}.'
    ) from error
  for name, values in found.items():
    if any(map(math.isnan, values)):
      raise ValueError(
        f"`per_model` must contain numbers; {name!r} is {values}."
        " Replace the NaN with a number."
      )
  for name in LIMITS:
    for limit in found.get(name, ()):
      _check_limit(name, limit)
  return found or None
