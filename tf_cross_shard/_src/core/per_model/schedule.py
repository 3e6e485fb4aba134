"""The learning rate schedule `PerModel`, which has a rate for each model."""

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import (
  single_program,
  validation,
)
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.per_model import variable as variable_lib
from tf_cross_shard._src.core.reduce import isolation
from tf_cross_shard._src.core.variables import Optimizer
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib


class PerModel(tf.__internal__.tracking.Trackable):
  """A learning rate schedule with a rate for each model.

  Pass it as the learning rate of the optimizer that a `CrossShardOptimizer`
  wraps, which raises a `ValueError` if there is not one rate for each of its
  models. In an update, the schedule returns the rate of the replica's model, at
  the step that this model has reached. Outside replicas, for example for
  `optimizer.learning_rate` and Keras' callbacks, it returns the rate of model
  0. The method `values` returns the rates of all models.

  The numbers are variables that each step reads: `rates.assign([0.1, 0.2])`
  takes effect in the next step, and nothing is traced again. They are saved
  together with the optimizer. Under a `VectorizedStrategy`, a plain Keras
  optimizer can have a PerModel, too.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, schedules
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable(0.0)
  ...   rates = schedules.PerModel([0.5, 0.25])
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
  >>> rates.assign([0.125, 0.5])
  >>> _ = strategy.run(lambda: optimizer.apply_gradients([(grad, weight)]))
  >>> [float(w) for w in strategy.experimental_local_results(weight)]
  [-0.625, -0.75]
  """

  _package: str  # "keras" or "tf_keras"

  def __init__(self, rates: Iterable[Any]) -> None:
    """Sets the rates.

    Args:
      rates: One learning rate for each model, in their order. Each
        is a number or a schedule of the same Keras version. A list may hold
        both.

    Raises:
      TypeError: If a rate is neither a number nor a schedule.
      ValueError: If there are no rates.
    """
    if not isinstance(rates, Iterable) or not (rates := list(rates)):
      raise ValueError(
        "`rates` must be a list with one learning rate for each model; got"
        f" {rates!r}. Use for example [0.1, 0.01]."
      )
    checked = [self._checked(rate) for rate in rates]
    self._schedules = [rate if callable(rate) else None for rate in checked]
    # The places of schedules hold 0.
    self.numbers = variable_lib.GroupVariable(
      "learning_rates", [0.0 if callable(rate) else rate for rate in checked]
    )
    self._track_trackable(self.numbers, "numbers")

  def __reduce__(self) -> Any:
    # A copy has its own variables.
    return self.from_config, (self.get_config(),)

  @property
  def rates(self) -> list[Any]:
    """The present number, or the schedule, of each model."""
    return [
      number if schedule is None else schedule
      for number, schedule in zip(
        self.numbers.read(), self._schedules, strict=True
      )
    ]

  def assign(self, rates: Iterable[float]) -> None:
    """Sets the learning rates of all models, from the next step on.

    Nothing is traced again. Call it eagerly, between two steps; on several
    machines, all workers call it with the same numbers.

    Args:
      rates: A number for each model.

    Raises:
      TypeError: If a rate is not a number, or if this PerModel holds schedules.
      ValueError: If there is not one number for each model.
    """
    if any(self._schedules):
      raise TypeError(
        f"The learning rates of {self!r} cannot be assigned, because a schedule"
        " decides them. Create PerModel with numbers."
      )
    rates = list(rates)
    for rate in rates:
      if not validation.is_number(rate):
        raise TypeError(f"`rates` must contain numbers; got {rate!r}.")
    if len(rates) != len(self._schedules):
      raise ValueError(
        f"`rates` must contain {len(self._schedules)} numbers, one for each"
        f" model; got {rates}."
      )
    self.numbers.assign(rates)

  def create(self, strategy: tf.distribute.Strategy) -> None:
    """Creates the variable that steps under a strategy read."""
    if not all(self._schedules):
      self.numbers.create(strategy)

  def __repr__(self) -> str:
    """Returns a text with the numbers, and the classes of the schedules."""
    shown = [type(r).__name__ if callable(r) else repr(r) for r in self.rates]
    return f"PerModel([{', '.join(shown)}])"

  def _checked(self, rate: Any) -> Any:
    """Returns a schedule unchanged, and any number as a float, as in JSON."""
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
    """Returns the rate of the calling replica's model.

    Args:
      step: The number of applied steps: an integer tensor, variable or number.

    Returns:
      A scalar of Keras' `floatx`. Outside replicas, it is the rate of model 0.

    Raises:
      RuntimeError: In a replica outside a step of a CrossShardOptimizer.
    """
    group = self._group()
    if group is None:
      self._check_scope(step)
    dtype = sys.modules[self._package].backend.floatx()
    chosen = self._schedules
    numbers = tf.cast(self.numbers.as_tensor(), dtype)
    if group is None or isinstance(group, int):
      schedule = chosen[group or 0]
      if schedule is not None:
        return tf.cast(schedule(step), dtype)
      return numbers[group or 0]
    if not any(chosen):
      return tf.gather(numbers, group)
    at_step = [
      numbers[i] if schedule is None else tf.cast(schedule(step), dtype)
      for i, schedule in enumerate(chosen)
    ]
    return tf.gather(at_step, group)

  def _group(self) -> Any:
    """Returns the calling replica's group; None outside replicas."""
    group = variable_lib.current_group()
    replica = isolation.current_replica()
    strategy = tf.distribute.get_strategy()
    if group is not None or replica is None:
      return group
    if single_program.are_models(strategy):  # A plain optimizer.
      models = single_program.num_copies(strategy)
      if models != len(self._schedules):
        raise ValueError(
          "`rates` of PerModel must contain one learning rate for each of the"
          f" {models} models of {type(strategy).__name__}; got"
          f" {len(self._schedules)}: {self.rates}."
        )
      self.create(strategy)
      return replica
    if strategy.num_replicas_in_sync > 1:
      raise RuntimeError(
        "PerModel was called in a replica, but not by a CrossShardOptimizer,"
        " which knows the groups. Wrap the optimizer:"
        " CrossShardOptimizer(Adam(PerModel(rates)), group_assignment=...)."
        " To read the rate, use `learning_rate` of the CrossShardOptimizer."
      )
    return None

  def _check_scope(self, step: Any) -> None:
    """Raises `ValueError` if an optimizer's count of steps has one copy."""
    count = variables_lib.native(step)
    is_alone = getattr(count, "distribute_strategy", None) is None
    if (
      len(self._schedules) > 1 and variables_lib.is_variable(count) and is_alone
    ):
      raise ValueError(
        f"The learning rates are {self!r}, but the optimizer was created"
        " outside of the scope, where there is one model. Create the model and"
        " the optimizer, and call model.compile, inside `with"
        " strategy.scope():`."
      )

  def values(self, step: Any) -> list[float]:
    """Returns the rates of all models at a step.

    Call it eagerly, outside `tf.function`. The result includes what `assign`
    and callbacks such as `PerModelReduceLROnPlateau` have changed.

    Args:
      step: The number of applied steps. Models that skip steps may be at
        different steps: see `Models.values` of
        `optimizer.iterations`.

    Returns:
      One number for each model.
    """
    return [
      float(rate(step)) if callable(rate) else rate for rate in self.rates
    ]

  def get_config(self) -> dict[str, Any]:
    """Returns the rates in serializable form."""
    serialize = sys.modules[self._package].saving.serialize_keras_object
    return {"rates": [serialize(r) if callable(r) else r for r in self.rates]}

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> "PerModel":
    """Creates a schedule from what `get_config` returned, without groups."""
    deserialize = sys.modules[cls._package].saving.deserialize_keras_object
    rates = copy.deepcopy(config["rates"])  # Keras changes its argument.
    return cls(deserialize(r) if isinstance(r, dict) else r for r in rates)


def _schedules_in(rate: Any, schedule: type[Any]) -> Iterator[PerModel]:
  """Yields every PerModel in a learning rate, also inside another schedule."""
  if isinstance(rate, PerModel):
    yield rate
  if isinstance(rate, schedule):
    rate = [part for part in vars(rate).values() if part is not rate]
  if isinstance(rate, (list, tuple)):
    for part in rate:
      yield from _schedules_in(part, schedule)


def prepare(
  rate: Any,
  strategy: tf.distribute.Strategy,
  groups: groups_lib.Groups,
  package: str,
) -> None:
  """Checks every `PerModel` in a learning rate, and creates its variable."""
  for found in _schedules_in(rate, schedule_class(package)):
    if len(found.rates) != groups.num_groups:
      raise ValueError(
        "`rates` of PerModel must contain one learning rate for each of the"
        f" {groups.num_groups} models (groups {groups.to_lists()}); got"
        f" {len(found.rates)}: {found.rates}. Create the optimizer inside `with"
        " strategy.scope():`, or change `rates` or `group_assignment`."
      )
    found.create(strategy)


def prepare_all(
  optimizer: Optimizer, groups: groups_lib.Groups, package: str
) -> None:
  for nested in nested_lib.nested_optimizers(optimizer):
    rates = keras_private.rates_and_schedules(nested)
    prepare(rates, keras_private.strategy(nested), groups, package)


def rates_of(optimizer: Optimizer) -> PerModel | None:
  """Returns the PerModel that is the learning rate of an optimizer, or None."""
  for nested in nested_lib.nested_optimizers(optimizer):
    for rate in keras_private.rates_and_schedules(nested):
      if isinstance(rate, PerModel):
        return rate
  return None


def schedule_class(package: str) -> type[Any]:
  """Returns the base class of schedules in "keras" or "tf_keras"."""
  schedules = sys.modules[package].optimizers.schedules
  return schedules.LearningRateSchedule
