"""Values that differ between groups: `per_group`, learning rates, settings.

Everything here asks one question: which group does the calling replica belong
to? `group_here` answers it. A step puts the answer into a context variable,
which `PerGroup` and `GroupSettings` read while the wrapped optimizer updates
the weights:

    step ─ as_group(group_here(groups)) ─▶ PerGroup       learning_rate[group]
                                           GroupSettings  weight_decay[group]

Where all replicas run one program, as on TPUs, the group is a tensor.
"""

import contextlib
import contextvars
import copy
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import single_program, validation
from tf_cross_shard._src.core.inner import keras_private, overriding
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.core.keras_types import Optimizer
from tf_cross_shard._src.core.reduce import isolation

# An int, or a scalar tensor or variable. Each thread has its own value, because
# replicas may be threads.
_my_group: Final = contextvars.ContextVar[Any]("my_group", default=None)


def group_here(groups: groups_lib.Groups) -> Any:
  """Returns the calling replica's group: an int, or a tensor in one program.

  Outside replicas, it returns None.
  """
  replica = isolation.current_replica()
  if replica is None or isinstance(replica, int):
    return None if replica is None else groups.index_of(replica)
  group_of = [groups.index_of(r) for r in range(groups.num_replicas)]
  return tf.gather(group_of, replica)


@tf.autograph.experimental.do_not_convert
def per_group(values: Any, groups: Any) -> tf.Tensor:
  """Returns the value of the group that the calling replica belongs to.

  Use it for anything in which groups should differ, such as a dropout rate, a
  temperature or the strength of data augmentation. Call it in code that
  replicas run: in a function that you pass to `strategy.run`, in the `call` of
  a layer or in a `train_step`. For learning rates, use `schedules.PerGroup`.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import per_group
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> rates = strategy.run(lambda: per_group([0.25, 0.5], [[0], [1]]))
  >>> [float(rate) for rate in strategy.experimental_local_results(rates)]
  [0.25, 0.5]

  Args:
    values: `[num_groups, ...]`: a list, array, tensor or variable with one row
      for each group. Python floats become float32 and ints become int32; other
      values keep their dtype.
    groups: A `Groups`, a `group_assignment`, or a `CrossShardOptimizer`.

  Returns:
    `[...]`: the row of the group. In the cross-replica context, it is the row
    of group 0: Keras calls a model there to find its shapes. Inside `as_group`,
    it is the row of the group that `as_group` sets.

  Raises:
    ValueError: If `values` does not hold one row for each group, or if the
      groups do not hold the replicas of the strategy. This includes calls
      without a strategy.
  """
  if hasattr(groups, "apply_gradients"):
    groups = names_lib.groups_of(groups)
  groups = settings_lib.required_groups(groups)
  rows = tf.convert_to_tensor(values)
  if not rows.shape[:1].is_compatible_with([groups.num_groups]):
    raise ValueError(
      "`values` must contain one row for each of the"
      f" {groups.num_groups} groups {groups.to_lists()}; got shape"
      f" {rows.shape}."
    )
  group = _my_group.get()
  if group is None and isolation.current_replica() is not None:
    _check_replicas(groups)
    group = group_here(groups)
  return tf.gather(rows, 0 if group is None else group)


@contextlib.contextmanager
def as_group(group: Any) -> Iterator[None]:
  """Sets the group whose values `per_group` returns outside replicas.

  Use it when you call the model of one group, such as the result of
  `replica_state.load_group`, if the model's layers or its loss call
  `per_group`.

  >>> from tf_cross_shard import per_group, schedules
  >>> with schedules.as_group(1):
  ...   float(per_group([0.25, 0.5], [[0], [1]]))
  0.5

  Args:
    group: The number of the group, or a variable that holds it.
  """
  before = _my_group.set(group)
  try:
    yield
  finally:
    _my_group.reset(before)


# The name of the variable by which callbacks change the rates of a PerGroup.
RATE_FACTOR: Final = "rate_factor"


class PerGroup:
  """A learning rate schedule with a rate for each group.

  Pass it as the learning rate of the optimizer that a `CrossShardOptimizer`
  wraps, which raises a `ValueError` if there is not one rate for each of its
  groups. In an update, the schedule returns the rate of the replica's group, at
  the step that this group has reached. Outside replicas, for example for
  `optimizer.learning_rate` and Keras' callbacks, it returns the rate of group
  0. The method `values` returns the rates of all groups.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, schedules
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable(0.0)
  ...   rates = schedules.PerGroup([0.5, 0.25])
  ...   optimizer = CrossShardOptimizer(
  ...     tf.keras.optimizers.SGD(rates), group_assignment=[[0], [1]]
  ...   )
  ...   optimizer.build([weight])
  >>> grad = tf.constant(1.0)
  >>> _ = strategy.run(lambda: optimizer.apply_gradients([(grad, weight)]))
  >>> [float(w) for w in strategy.experimental_local_results(weight)]
  [-0.5, -0.25]
  >>> rates.values(step=1)
  [0.5, 0.25]
  """

  _package: str  # "keras" or "tf_keras"
  # A factor for each group's rate, and the groups; None until a callback sets
  # rates.
  rate_factor: tf.Variable | None = None
  factor_groups: groups_lib.Groups | None = None

  def __init__(self, rates: Iterable[Any]) -> None:
    """Sets the rates.

    Args:
      rates: One learning rate for each group, in the order of the groups. Each
        is a number or a schedule of the same Keras version. A list may hold
        both.

    Raises:
      TypeError: If a rate is neither a number nor a schedule.
      ValueError: If there are no rates.
    """
    if not isinstance(rates, Iterable) or not (rates := list(rates)):
      raise ValueError(
        "`rates` must be a list with one learning rate for each group; got"
        f" {rates!r}. Use for example [0.1, 0.01]."
      )
    self.rates = [self._checked(rate) for rate in rates]

  def __repr__(self) -> str:
    """Returns a text with the numbers, and the classes of the schedules."""
    shown = [type(r).__name__ if callable(r) else repr(r) for r in self.rates]
    return f"PerGroup([{', '.join(shown)}])"

  def _checked(self, rate: Any) -> Any:
    """Returns a schedule unchanged, and any number as a Python float.

    Unlike NumPy's numbers, a Python float can be written as JSON.
    """
    if isinstance(rate, schedule_class(self._package)):
      return rate
    if not validation.is_number(rate):
      raise TypeError(
        "`rates` must contain numbers and schedules of"
        f" {self._package}.optimizers.schedules; got {rate!r}."
      )
    return float(rate)

  @tf.autograph.experimental.do_not_convert
  def __call__(self, step: Any) -> tf.Tensor:
    """Returns the rate of the calling replica's group.

    Args:
      step: The number of applied steps: an integer tensor, variable or number.

    Returns:
      A scalar of Keras' `floatx`. Outside replicas, it is the rate of group 0,
      or of the group that `as_group` sets.

    Raises:
      RuntimeError: In a replica outside a step of a CrossShardOptimizer.
    """
    group = _my_group.get()
    replica = isolation.current_replica()
    is_replica, strategy = replica is not None, tf.distribute.get_strategy()
    if group is None and is_replica and single_program.are_models(strategy):
      group = replica
    if group is None and is_replica and strategy.num_replicas_in_sync > 1:
      raise RuntimeError(
        "PerGroup was called in a replica, but not by a CrossShardOptimizer,"
        " which knows the groups. Wrap the optimizer:"
        " CrossShardOptimizer(Adam(PerGroup(rates)), group_assignment=...)."
        " To read the rate, use `learning_rate` of the CrossShardOptimizer."
      )
    dtype = sys.modules[self._package].backend.floatx()
    if tf.executing_eagerly() and not is_replica and group:
      # Outside replicas, the variable `rate_factor` has the value of group 0.
      return tf.gather(tf.cast(self.values(step), dtype), group)
    chosen = self.rates
    if group is None or isinstance(group, int):
      chosen, group = [self.rates[group or 0]], 0
    at_step = [
      tf.cast(rate(step), dtype)
      if callable(rate)
      else tf.convert_to_tensor(rate, dtype)
      for rate in chosen
    ]
    rate = tf.gather(at_step, group)
    if self.rate_factor is None:
      return rate
    return rate * tf.cast(self.rate_factor, dtype)

  def values(self, step: Any) -> list[float]:
    """Returns the rates of all groups at a step.

    Call it eagerly, outside `tf.function`. The result includes what callbacks
    such as `GroupReduceLROnPlateau` have changed. On several machines, all
    workers call it.

    Args:
      step: The number of applied steps. Groups that skip steps may be at
        different steps: see `replica_state.group_values` of
        `optimizer.iterations`.

    Returns:
      One number for each group.
    """
    rates = [
      float(rate(step)) if callable(rate) else rate for rate in self.rates
    ]
    if self.rate_factor is None or self.factor_groups is None:
      return rates
    strategy = replicas_lib.strategy_of(self.rate_factor)
    copies = replicas_lib.Copies(strategy or tf.distribute.get_strategy())
    factors = copies.read(
      self.rate_factor, [members[0] for members in self.factor_groups]
    )
    return [rate * float(f) for rate, f in zip(rates, factors, strict=True)]

  def get_config(self) -> dict[str, Any]:
    """Returns the rates in serializable form."""
    serialize = sys.modules[self._package].saving.serialize_keras_object
    return {"rates": [serialize(r) if callable(r) else r for r in self.rates]}

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> "PerGroup":
    """Creates a schedule from what `get_config` returned, without groups."""
    deserialize = sys.modules[cls._package].saving.deserialize_keras_object
    rates = copy.deepcopy(config["rates"])  # Keras changes its argument.
    return cls(deserialize(r) if isinstance(r, dict) else r for r in rates)


def check_rates(
  rate: Any, groups: groups_lib.Groups, schedule: type[Any]
) -> None:
  """Raises `ValueError` for a `PerGroup` that does not fit the groups.

  `rate` is one learning rate, or a list. A schedule (of the class `schedule`)
  may be a PerGroup, or call one, as a warm-up calls what follows it.
  """
  if isinstance(rate, PerGroup) and len(rate.rates) != groups.num_groups:
    raise ValueError(
      "`rates` of PerGroup must contain one learning rate for each of the"
      f" {groups.num_groups} groups {groups.to_lists()}; got"
      f" {len(rate.rates)}: {rate.rates}. Change `rates` or `group_assignment`."
    )
  if isinstance(rate, schedule):
    rate = list(vars(rate).values())
  if isinstance(rate, (list, tuple)):
    for part in rate:
      check_rates(part, groups, schedule)


def check_rates_of(
  optimizer: Optimizer, groups: groups_lib.Groups, package: str
) -> None:
  """Raises `ValueError` for a `PerGroup` in `optimizer` that does not fit."""
  for nested in names_lib.nested_optimizers(optimizer):
    rates = keras_private.rates_and_schedules(nested)
    check_rates(rates, groups, schedule_class(package))


def rates_of(optimizer: Optimizer) -> PerGroup | None:
  """Returns the PerGroup that is the learning rate of an optimizer, or None."""
  for nested in names_lib.nested_optimizers(optimizer):
    for rate in keras_private.rates_and_schedules(nested):
      if isinstance(rate, PerGroup):
        return rate
  return None


def create_rate_factor(optimizer: Optimizer) -> bool:
  """Creates the variable by which callbacks change the rates of a PerGroup.

  Each group multiplies its rate by it. Returns False if there is no PerGroup or
  if the variable exists. Steps that were traced earlier do not read it.
  """
  rates = rates_of(optimizer)
  if rates is None or rates.rate_factor is not None:
    return False
  rates.factor_groups = names_lib.groups_of(optimizer)
  with keras_private.strategy(optimizer).scope():
    rates.rate_factor = tf.Variable(1.0, trainable=False, name=RATE_FACTOR)
  return True


def schedule_class(package: str) -> type[Any]:
  """Returns the base class of schedules in "keras" or "tf_keras"."""
  schedules = sys.modules[package].optimizers.schedules
  return schedules.LearningRateSchedule


def _check_replicas(groups: groups_lib.Groups) -> None:
  strategy = tf.distribute.get_strategy()
  if single_program.num_copies(strategy) != groups.num_replicas:
    raise ValueError(
      f"`groups` holds {groups.num_replicas} replicas, {groups.to_lists()}, but"
      " per_group was called under"
      f" {validation.strategy_in_words(strategy)}. Call it inside"
      " `strategy.run` of the groups' own strategy, or inside `with"
      " schedules.as_group(i):`."
    )


class GroupNumber(float):
  """A setting whose value is a tensor: the number of the replica's group.

  Where all replicas run one program, the group is a tensor. Keras computes with
  this object as with a tensor, and compares it as a number, to decide whether
  there is momentum or weight decay.
  """

  numbers: Sequence[float]  # Of all groups.
  group: Any
  dtype = float  # For Keras, which asks for it or takes the class.

  def __new__(cls, numbers: Sequence[float], group: Any) -> "GroupNumber":
    """Returns row `group` of `numbers`, compared as the first nonzero one."""
    made = super().__new__(cls, next(filter(None, numbers), 0.0))
    made.numbers, made.group = numbers, group
    return made

  def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
    rows = tf.constant(self.numbers, dtype or tf.float32)
    return tf.gather(rows, self.group, name=name)


def _operator(name: str) -> Any:
  def operate(number: GroupNumber, *others: Any) -> Any:
    dtypes = [other.dtype for other in others if tf.is_tensor(other)]
    tensor = tf.convert_to_tensor(number, *dtypes)
    return getattr(tensor, name)(*others)

  return operate


for _name in ("add", "sub", "mul", "truediv", "pow"):
  setattr(GroupNumber, f"__{_name}__", _operator(f"__{_name}__"))
  setattr(GroupNumber, f"__r{_name}__", _operator(f"__r{_name}__"))
GroupNumber.__neg__ = _operator("__neg__")  # type: ignore[method-assign]


def is_nonzero(number: float) -> tf.Tensor | bool:
  """Returns whether a number is not 0: a tensor, if only in some groups."""
  numbers = getattr(number, "numbers", (number,))
  if all(numbers) or not any(numbers):
    return any(numbers)
  return tf.not_equal(tf.convert_to_tensor(number), 0.0)


class GroupSettings:
  """Settings of the wrapped optimizer that differ between groups.

      groups              0      1      2
      weight_decay      0.0    0.01    0.1

  While a replica applies sums, the attribute of the wrapped optimizer (such as
  `weight_decay`) is the number of the replica's group. So every optimizer
  class, kernel and kind of update reads this number.

  Attributes:
    numbers: A number for each group, by the name of a setting.
  """

  def __init__(
    self,
    numbers: Mapping[str, Sequence[float]] | None,
    optimizer: Optimizer,
    groups: groups_lib.Groups,
  ) -> None:
    """Raises `ValueError` for numbers that do not fit.

    `optimizer` is the one that keeps the slots.
    """
    self._optimizer = optimizer
    self._groups = groups
    self.numbers: Mapping[str, Sequence[float]] = {}
    self.replace(numbers)

  def replace(self, numbers: Mapping[str, Sequence[float]] | None) -> None:
    """Sets the numbers, unless one does not fit: then raises `ValueError`."""
    for name, values in (numbers or {}).items():
      if len(values) != self._groups.num_groups:
        raise ValueError(
          "`group_settings` must have a number for each of the"
          f" {self._groups.num_groups} groups {self._groups.to_lists()};"
          f" {name!r} is {values}."
        )
      if name not in settings_lib.LIMITS:
        _check_setting(self._optimizer, name, values)
    self.numbers = numbers or {}

  def limits(self, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns clipping limits, those of this replica's group if they differ."""
    return {name: self._number(name, limit) for name, limit in limits.items()}

  def in_force(self) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which the optimizer has this group's numbers."""
    names = set(self.numbers) - {*settings_lib.LIMITS}
    numbers = {name: self._number(name) for name in names}
    return overriding.overriding(self._optimizer, **numbers)

  def _number(self, name: str, default: Any = None) -> Any:
    """Returns the number of the calling replica's group."""
    if name not in self.numbers:
      return default
    values, group = self.numbers[name], _my_group.get()
    if isinstance(group, int):
      return values[group]
    return GroupNumber(values, group)


# Numbers that an optimizer does not read in its update, but when it is built,
# when it scales the loss, or when it counts calls.
_NOT_IN_UPDATE: Final = (
  "ema_overwrite_frequency",
  "gradient_accumulation_steps",
  "initial_accumulator_value",
  "loss_scale_factor",
)


def _check_setting(
  optimizer: Optimizer, name: str, values: Sequence[float]
) -> None:
  """Raises `ValueError` unless the optimizer's setting can be replaced."""
  kind = type(optimizer).__name__
  if name == "learning_rate":
    raise ValueError(
      "`group_settings` contains 'learning_rate', which may be a schedule. Use"
      f" {kind}(schedules.PerGroup({values}))."
    )
  if name in _NOT_IN_UPDATE:
    raise ValueError(
      f"`group_settings` contains {name!r}: {values}, but only settings that"
      f" {kind} reads in its update can differ between groups. Pass"
      f" {kind}({name}=...): this setting has one value for all groups."
    )
  if name not in vars(optimizer):
    known = [
      *(x for x in vars(optimizer) if not x.startswith("_")),
      *settings_lib.LIMITS,
    ]
    close = difflib.get_close_matches(name, known, 1)
    remedy = f"Did you mean {close[0]!r}?" if close else f"Use one of {known}."
    raise ValueError(
      f"`group_settings` contains {name!r}, but {kind} has no such setting."
      f" {remedy}"
    )
  own = vars(optimizer)[name]
  if isinstance(own, bool) or not isinstance(own, (int, float)):
    raise ValueError(
      f"`group_settings` contains {name!r}, but {kind}.{name} is {own!r}, and"
      " only numeric settings of `opt` can differ between groups. Set"
      f" {kind}({name}=...) to one of the numbers in `group_settings`."
    )
  # If the setting is 0, Keras creates no slot (momentum), or traces no
  # operation (weight decay).
  if not own and any(values):
    raise ValueError(
      f"`group_settings` contains {name!r}: {values}, but {kind}.{name} is"
      f" {own!r}. With 0, Keras does not create the slots or operations that"
      " the other values need. Create `opt` with one of the nonzero numbers."
    )
