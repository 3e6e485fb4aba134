"""Values that differ between groups: `per_group` and learning rates.

Each replica selects the row of its group:

    values, one row for each group ─┐
    the replica's number ───────────┴─ gather ─▶ the row of the replica's group

On TPUs, where all replicas run one program, the replica's number is a tensor.
"""

import contextlib
import contextvars
import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import components, settings, validation
from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core.inner import keras_private
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.core.reduce import isolation

# The group that `as_group` sets, for code outside replicas. Each thread has
# its own value, because replicas may be threads.
_group_override: Final = contextvars.ContextVar[Any]("group", default=None)


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
    groups = names_lib.groups_of(groups, None)
  groups = settings.required_groups(groups)
  rows = tf.convert_to_tensor(values)
  if not rows.shape[:1].is_compatible_with([groups.num_groups]):
    raise ValueError(
      "`values` must contain one row for each of the"
      f" {groups.num_groups} groups {groups.to_lists()}; got shape"
      f" {rows.shape}."
    )
  return _row(rows, groups)


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
  before = _group_override.set(group)
  try:
    yield
  finally:
    _group_override.reset(before)


class PerGroup:
  """A learning rate schedule with a rate for each group.

  Pass it as the learning rate of the optimizer that a `CrossShardOptimizer`
  wraps. The CrossShardOptimizer tells the schedule its groups, and
  raises a `ValueError` if there is not one rate for each group. In an update,
  the schedule returns the rate of the replica's group, at the step that this
  group has reached. Outside replicas, for example for
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
  _groups: groups_lib.Groups | None = None
  # A factor for each group's rate; None until a callback lowers the rates.
  rate_factor: tf.Variable | None = None

  def __init__(self, rates: Iterable[Any]) -> None:
    """Sets the rates. The CrossShardOptimizer sets the groups later.

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
    if isinstance(rate, _schedule_class(self._package)):
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
      RuntimeError: If no CrossShardOptimizer wraps the optimizer.
    """
    groups = self._groups
    if groups is None and not self._is_called_by_constructor():
      raise RuntimeError(
        "PerGroup has no groups, because no CrossShardOptimizer wraps"
        " its optimizer. Use CrossShardOptimizer(Adam(PerGroup(rates)),"
        " group_assignment=...)."
      )
    dtype = sys.modules[self._package].backend.floatx()
    # The rates of all groups at this step. One of them is selected below.
    rows = [
      tf.cast(rate(step), dtype)
      if callable(rate)
      else tf.convert_to_tensor(rate, dtype)
      for rate in self.rates
    ]
    if groups is None:
      return rows[0]
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == groups.num_replicas:
      rate = _row(tf.stack(rows), groups)
    else:  # The schedule is called outside replicas.
      rate = _row_outside(rows)
    if self.rate_factor is None:
      return rate
    return rate * tf.cast(self.rate_factor, dtype)

  def _is_called_by_constructor(self) -> bool:
    """Returns whether a Keras optimizer's constructor is reading the rate.

    At that time, no CrossShardOptimizer can wrap the optimizer yet, so
    there are no groups.
    """
    return False

  def values(self, step: Any) -> list[float]:
    """Returns the rates of all groups at a step.

    Call it eagerly, outside `tf.function`. The result does not include the
    factors of `callbacks.GroupReduceLROnPlateau`; see its `learning_rates`.

    Args:
      step: The number of applied steps. Groups that skip steps may be at
        different steps: see `replica_state.group_values` of
        `optimizer.iterations`.

    Returns:
      One number for each group.
    """
    return [
      float(rate(step)) if callable(rate) else rate for rate in self.rates
    ]

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

  def check(self, groups: groups_lib.Groups) -> None:
    """Raises `ValueError` unless the schedule fits the groups.

    A `CrossShardOptimizer` calls this method.

    Args:
      groups: The groups of the optimizer.
    """
    if len(self.rates) != groups.num_groups:
      raise ValueError(
        "`rates` of PerGroup must contain one learning rate for each of the"
        f" {groups.num_groups} groups {groups.to_lists()}; got"
        f" {len(self.rates)}: {self.rates}."
      )
    if self._groups is not None and self._groups != groups:
      raise ValueError(
        "One PerGroup cannot be shared by optimizers with different groups: it"
        f" was used with {self._groups.to_lists()}, now with"
        f" {groups.to_lists()}. Create a PerGroup for each optimizer."
      )

  def set_groups(self, groups: groups_lib.Groups) -> None:
    """Sets the groups, which `check` has accepted.

    A `CrossShardOptimizer` calls this method.

    Args:
      groups: The groups of the optimizer.
    """
    self._groups = groups


def bind(optimizer: Any, groups: groups_lib.Groups, package: str) -> None:
  """Sets the groups of every `PerGroup` in an optimizer, however nested."""
  for nested in names_lib.nested_optimizers(optimizer):
    bind_rate(keras_private.learning_rates(nested), groups, package)


def check_settable(optimizer: Any) -> None:
  """Raises `TypeError` if a PerGroup is the learning rate of an optimizer."""
  if rates_of(optimizer) is not None:
    raise TypeError(
      "PerGroup holds a learning rate for each group, so one number cannot"
      " replace it. Instead of ReduceLROnPlateau, use"
      " callbacks.GroupReduceLROnPlateau; instead of LearningRateScheduler, use"
      " a PerGroup of schedules."
    )


def rates_of(optimizer: Any) -> PerGroup | None:
  """Returns the PerGroup that is the learning rate of an optimizer, or None."""
  for nested in names_lib.nested_optimizers(optimizer):
    for rate in keras_private.learning_rates(nested):
      if isinstance(rate, PerGroup):
        return rate
  return None


def bound(forwarded: property) -> property:
  """Returns the property `learning_rate` of a CrossShardOptimizer.

  When you assign a PerGroup, the property sets its groups. When you assign a
  number instead of a PerGroup, it raises an error. Otherwise it does what
  `forwarded` does.
  """

  def assign(optimizer: Any, value: Any) -> None:
    own = components.components_of(optimizer)
    if own is not None and own.checks is not None:
      if not callable(value):
        check_settable(optimizer.inner_optimizer)
      bind_rate(value, own.checks.engine.groups, own.keras_package)
    forwarded.__set__(optimizer, value)

  return forwarded.setter(assign)


def bind_rate(rate: Any, groups: groups_lib.Groups, package: str) -> None:
  """Sets the groups of every `PerGroup` in one learning rate or in a list."""
  schedules = list(_within(rate, _schedule_class(package)))
  # Check all of them before any is changed.
  for rates in schedules:
    rates.check(groups)
  for rates in schedules:
    rates.set_groups(groups)


def _within(value: Any, schedule: type[Any]) -> Iterator[PerGroup]:
  """Yields every PerGroup in a value.

  A schedule may be a PerGroup, or may call one, as a warm-up calls the schedule
  that follows it.
  """
  if isinstance(value, PerGroup):
    yield value
  if isinstance(value, schedule):
    value = list(vars(value).values())
  if isinstance(value, (list, tuple)):
    for part in value:
      yield from _within(part, schedule)


def _schedule_class(package: str) -> type[Any]:
  """Returns the base class of schedules in "keras" or "tf_keras"."""
  schedules = sys.modules[package].optimizers.schedules
  return schedules.LearningRateSchedule


def _row(rows: tf.Tensor, groups: groups_lib.Groups) -> tf.Tensor:
  """Returns the row of the calling replica's group."""
  strategy = tf.distribute.get_strategy()
  replica = isolation.current_replica()
  if replica is None or _group_override.get() is not None:
    return _row_outside(rows)
  replicas = strategy.num_replicas_in_sync
  if replicas != groups.num_replicas:
    raise ValueError(
      f"`groups` holds {groups.num_replicas} replicas, {groups.to_lists()}, but"
      " per_group was called under"
      f" {validation.strategy_in_words(strategy)}. Call it inside"
      " `strategy.run` of the groups' own strategy, or inside `with"
      " schedules.as_group(i):`."
    )
  group_of = [groups.index_of(number) for number in range(replicas)]
  # Not in Python: the replica's number may be a tensor.
  return tf.gather(rows, tf.gather(group_of, replica))


def _row_outside(rows: Any) -> tf.Tensor:
  """Returns the row of the group that `as_group` sets, by default group 0."""
  group = _group_override.get()
  return tf.gather(rows, 0 if group is None else group)
