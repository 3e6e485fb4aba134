"""The arguments of a CrossShardOptimizer beside `opt`, checked.

One frozen object: the constructor makes it, `get_config` and `repr` read it,
workers compare it, and the stages of a step take from it what is theirs.
"""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.gradients import loss_factor, packing

LIMITS: Final = ("clipnorm", "global_clipnorm", "clipvalue")


@dataclasses.dataclass(frozen=True)
class Settings:
  """The attributes are the constructor's arguments, which documents them."""

  reduction: str = loss_factor.MEAN
  name: str = "CrossShardOptimizer"
  group_assignment: Any = None  # Groups, or None, once it is made.
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
  noise_scale: bool | int = False
  lazy_rows: bool | str = False
  group_settings: Any = None  # {name: [a number for each group]}, or None.
  has_backup: bool = False

  def __post_init__(self) -> None:
    """Raises an error for an argument without a valid value."""
    for name, convert in (
      ("reduction", loss_factor.canonical_reduction),
      ("loss_averaged_over", loss_factor.check_averaged_over),
      ("wire_dtype", packing.as_wire_dtype),
      ("group_assignment", as_groups),
      ("group_settings", _as_group_settings),
    ):
      object.__setattr__(self, name, convert(getattr(self, name)))
    for name in ("skip_nonfinite", "scale_gradients", "has_backup"):
      if not isinstance(getattr(self, name), bool):
        raise TypeError(
          f"`{name}` must be True or False; got {getattr(self, name)!r}."
        )
    for name in LIMITS:
      _check_limit(name, getattr(self, name))
    for name, ways in (
      ("shard_update", ("elementwise", "by_variable")),
      ("lazy_rows", ("elementwise",)),
    ):
      if getattr(self, name) not in (True, False, None, *ways):
        raise ValueError(
          f"`{name}` must be True, False or one of {list(ways)}; got"
          f" {getattr(self, name)!r}."
        )
    steps = self.accumulate_steps
    if steps is not None and not (_is_integer(steps) and steps > 0):
      raise ValueError(
        "`accumulate_steps` must be a positive integer; got"
        f" {steps!r}. Leave it None to apply gradients in every call."
      )
    if not isinstance(self.noise_scale, int) or self.noise_scale < 0:
      raise ValueError(
        "`noise_scale` must be True, False or the number of steps from one"
        f" measurement to the next; got {self.noise_scale!r}."
      )

  @classmethod
  def of(cls, arguments: Mapping[str, Any]) -> "Settings":
    """Returns the settings among a constructor's arguments, by their names."""
    return cls(**{f.name: arguments[f.name] for f in dataclasses.fields(cls)})

  @property
  def is_mean(self) -> bool:
    """Whether gradients are averaged over the group."""
    return self.reduction == loss_factor.MEAN

  @property
  def limits(self) -> dict[str, Any]:
    """The clipping limits, by their names."""
    return {name: getattr(self, name) for name in LIMITS}

  def to_config(self) -> dict[str, Any]:
    """Returns the arguments in serializable form."""
    config = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
    }
    groups = self.group_assignment
    if groups is not None:
      config["group_assignment"] = rows = groups.to_lists()
      if groups.names is not None:
        names = list(groups.names)
        config["group_assignment"] = {"assignment": rows, "names": names}
    if self.wire_dtype is not None:
      config["wire_dtype"] = self.wire_dtype.name
    return config

  def differing(self) -> dict[str, Any]:
    """Returns the arguments that are not at their defaults."""
    defaults = Settings().to_config()
    config = self.to_config().items()
    return {name: value for name, value in config if value != defaults[name]}


class Setting:
  """A property of the optimizer: the setting of its name, which a step has."""

  def __init__(self, doc: str) -> None:
    self.__doc__ = doc

  def __set_name__(self, owner: type[Any], name: str) -> None:
    """Learns the name."""
    self._name = name

  def __get__(self, optimizer: Any, owner: Any = None) -> Any:
    """Returns the setting; None while the optimizer is being made."""
    if optimizer is None:
      return self
    step = vars(optimizer).get("_step")
    return None if step is None else self._of(step.settings)

  def _of(self, settings: Settings) -> Any:
    """Returns the setting of this name."""
    return settings.to_config()[self._name]

  def __set__(self, optimizer: Any, value: Any) -> None:
    """Refuses: what was made by the setting would not change."""
    raise AttributeError(
      f"`{self._name}` cannot be set; got {value!r}. Make a new optimizer with"
      f" {self._name}={value!r}."
    )


class Assignment(Setting):
  """The groups as lists; `optimizer.groups` has their names."""

  def _of(self, settings: Settings) -> Any:
    """Returns the lists."""
    groups = settings.group_assignment
    return None if groups is None else groups.to_lists()


class Replaceable(Setting):
  """One that can be set: steps that are traced afterwards have the new value.

  In `fit`, `model.make_train_function(force=True)` has them traced again.
  """

  def __set__(self, optimizer: Any, value: Any) -> None:
    """Replaces the settings by others with this value."""
    step = vars(optimizer).get("_step")
    if step is not None:  # Keras' constructor sets its defaults before.
      step.replace(**{self._name: value})


class Arguments:
  """The settings as properties of the optimizer, which has a step."""

  reduction = Setting('`"mean"` or `"sum"`.')
  group_assignment = Assignment(
    "Groups as lists; None for one of all replicas."
  )
  loss_averaged_over = Setting('`"replica"`, `"global"`; None: by the call.')
  clipnorm = Replaceable("Limit of each gradient's norm, before the sum.")
  global_clipnorm = Replaceable("The same for all gradients together.")
  clipvalue = Replaceable("Limit of each element, before the sum.")
  wire_dtype = Setting("The dtype on the wire; None for exact sums.")
  skip_nonfinite = Setting("Whether steps with a NaN are skipped and counted.")
  scale_gradients = Setting("Whether gradients are scaled, not the loss.")
  fused_update = Setting("Whether kernels or XLA update; None: where faster.")
  accumulate_steps = Setting("How many calls make one step; None for one.")
  shard_update = Setting("Whether each member keeps one part of the state.")
  lazy_rows = Setting("Whether only rows that occur are updated.")
  group_settings = Replaceable("A number for each group, by name; or None.")
  has_backup = Setting("Whether a crash may leave half a step applied.")


def as_groups(group_assignment: Any) -> groups_lib.Groups | None:
  """Returns any accepted form of `group_assignment`, checked."""
  if group_assignment is None or isinstance(
    group_assignment, groups_lib.Groups
  ):
    return group_assignment
  if isinstance(group_assignment, dict):  # of a configuration
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
  """Raises `ValueError` unless a limit is None or a number of at least 0."""
  # A comparison that NaN fails.
  is_number = hasattr(limit, "__float__") and float(limit) >= 0
  if limit is not None and not is_number:
    raise ValueError(
      f"`{name}` must be a number of at least 0, or None; got {limit!r}. None"
      " or 0 does not clip."
    )


def _as_group_settings(numbers: Any) -> dict[str, list[float]] | None:
  """Returns a number for each group, by the names of settings."""
  try:
    found = {str(k): list(map(float, v)) for k, v in (numbers or {}).items()}
  except (AttributeError, TypeError, ValueError) as error:
    raise ValueError(
      "`group_settings` must be a dictionary of names to a number for each"
      f' group, such as {{"weight_decay": [0.0, 0.1]}}; got {numbers!r}.'
    ) from error
  for name in LIMITS:
    for limit in found.get(name, ()):
      _check_limit(name, limit)
  return found or None


def _is_integer(value: Any) -> bool:
  """Whether a value is an integer and no truth value."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)
