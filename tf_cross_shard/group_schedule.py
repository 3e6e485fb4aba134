"""A value for each group, in whichever replica asks for it.

    values, one row per group ─┐
    the replica's number ──────┴─ gather ─▶ the row of the replica's group

In engines whose replicas are one program, the number is a tensor of it.
"""

import contextlib
import contextvars
import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import settings, validation
from tf_cross_shard.collectives import replica_isolation
from tf_cross_shard.inner_optimizer import libraries, optimizer_state
from tf_cross_shard.replica_state import group_state

# Of each thread: replicas may be threads.
_outside: Final = contextvars.ContextVar[Any]("group", default=None)


@tf.autograph.experimental.do_not_convert
def per_group(values: Any, groups: Any) -> tf.Tensor:
  """The value of the group that the calling replica is in.

  For whatever groups are to differ in: a dropout rate, a temperature, how much
  to augment. Call it where a replica computes: in a function that
  `strategy.run` runs, in the `call` of a layer, in a `train_step`. Learning
  rates have `schedules.PerGroup`.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import per_group
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> rates = strategy.run(lambda: per_group([0.25, 0.5], [[0], [1]]))
  >>> [float(rate) for rate in strategy.experimental_local_results(rates)]
  [0.25, 0.5]

  Args:
    values: `[num_groups, ...]`: list, array, tensor or variable. Python floats
      become float32 and ints int32; everything else keeps its dtype.
    groups: A `Groups`, a `group_assignment`, or an optimizer, whose groups are
      taken.

  Returns:
    `[...]`, the row of the group. Outside of replicas, where Keras looks for
    the shapes of a model and where one group's model is evaluated, that of
    group 0, or of the group of `as_group`.

  Raises:
    ValueError: If there are not as many values as groups, or the groups hold
      other replicas than the strategy has.
  """
  if hasattr(groups, "apply_gradients"):
    groups = group_state.groups_of(groups, None)
  groups = settings.as_groups(groups) or groups_lib.Groups(groups)
  rows = tf.convert_to_tensor(values)
  if not rows.shape[:1].is_compatible_with([groups.num_groups]):
    raise ValueError(
      f"`values` must have one row for each of the {groups.num_groups} groups"
      f" {groups.to_lists()}; got shape {rows.shape}."
    )
  return _row(rows, groups)


@contextlib.contextmanager
def as_group(group: Any) -> Iterator[None]:
  """Makes a group's values those outside of replicas.

  For a model of one group, as `replica_state.load_group` returns it, whose
  layers or loss call `per_group`.

  >>> with as_group(1):
  ...   float(per_group([0.25, 0.5], [[0], [1]]))
  0.5

  Args:
    group: The number of the group, or a variable that holds it.
  """
  before = _outside.set(group)
  try:
    yield
  finally:
    _outside.reset(before)


class PerGroup:
  """A learning rate for each group, as a schedule of either Keras.

  It learns the groups from the `CrossShardOptimizer` that encapsulates its
  optimizer; another number of rates than groups is a `ValueError` there. In an
  update it is the rate of the replica's group, at the group's own step.
  Outside of replicas, as for `optimizer.learning_rate` and Keras' callbacks, it
  is that of replica 0's group; `values` has all.

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
  # What each group's rate is multiplied by, once something lowers rates.
  rate_factor: tf.Variable | None = None

  def __init__(self, rates: Iterable[Any]) -> None:
    """Keeps the rates; the groups come later.

    Args:
      rates: One for each group, in the order of the groups: a number, or a
        schedule of this Keras. Both may stand in one list.

    Raises:
      TypeError: If one is neither.
      ValueError: If there are none.
    """
    if not isinstance(rates, Iterable) or not (rates := list(rates)):
      raise ValueError(
        f"`rates` must be a list of one for each group; got {rates!r}. Use for"
        " example [0.1, 0.01]."
      )
    self.rates = [self._checked(rate) for rate in rates]

  def __repr__(self) -> str:
    """Shows the numbers, and the classes of the schedules."""
    shown = [type(r).__name__ if callable(r) else repr(r) for r in self.rates]
    return f"PerGroup([{', '.join(shown)}])"

  def _checked(self, rate: Any) -> Any:
    """Returns a schedule as it is, a number as a float, which JSON knows."""
    if isinstance(rate, _schedule_class(self._package)):
      return rate
    if not validation.is_number(rate):
      raise TypeError(
        "`rates` must hold numbers and schedules of"
        f" {self._package}.optimizers.schedules; got {rate!r}."
      )
    return float(rate)

  @tf.autograph.experimental.do_not_convert
  def __call__(self, step: Any) -> tf.Tensor:
    """The rate of the calling replica's group; outside, of replica 0's.

    Args:
      step: How many steps were applied, an integer tensor, variable or number.

    Returns:
      A scalar of Keras' `floatx`.

    Raises:
      RuntimeError: If no CrossShardOptimizer encapsulates the optimizer.
    """
    groups = self._groups
    if groups is None and not self._is_being_given():
      raise RuntimeError(
        "PerGroup has no groups, because no CrossShardOptimizer encapsulates"
        " its optimizer. Use CrossShardOptimizer(Adam(PerGroup(rates)),"
        " group_assignment=...)."
      )
    dtype = sys.modules[self._package].backend.floatx()
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
    else:  # It is read outside of replicas.
      rate = _row_outside(rows)
    if self.rate_factor is None:
      return rate
    return rate * tf.cast(self.rate_factor, dtype)

  def _is_being_given(self) -> bool:
    """Whether a constructor of Keras asks for the first rate."""
    return False

  def values(self, step: Any) -> list[float]:
    """All groups' rates at a step; call it outside of functions.

    They are those given; `callbacks.GroupReduceLROnPlateau` knows what it has
    lowered, as `learning_rates`.

    Args:
      step: How many steps were applied. Groups that skipped different numbers
        of steps are at different ones: see `replica_state.group_values` of
        `optimizer.iterations`.

    Returns:
      One number for each group.
    """
    return [
      float(rate(step)) if callable(rate) else rate for rate in self.rates
    ]

  def get_config(self) -> dict[str, Any]:
    """The rates, in serializable form."""
    serialize = sys.modules[self._package].saving.serialize_keras_object
    return {"rates": [serialize(r) if callable(r) else r for r in self.rates]}

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> "PerGroup":
    """Makes what `get_config` described; the groups come later again."""
    deserialize = sys.modules[cls._package].saving.deserialize_keras_object
    rates = copy.deepcopy(config["rates"])  # Keras changes what it is given.
    return cls(deserialize(r) if isinstance(r, dict) else r for r in rates)

  def check(self, groups: groups_lib.Groups) -> None:
    """Raises `ValueError` unless these can be the schedule's groups."""
    if len(self.rates) != groups.num_groups:
      raise ValueError(
        "`rates` of PerGroup must hold one for each of the"
        f" {groups.num_groups} groups {groups.to_lists()}; got"
        f" {len(self.rates)}: {self.rates}."
      )
    if self._groups is not None and self._groups != groups:
      raise ValueError(
        "One PerGroup cannot serve optimizers of different groups; got"
        f" {groups.to_lists()} after {self._groups.to_lists()}. Make one for"
        " each of them."
      )


def bind(optimizer: Any, groups: groups_lib.Groups, package: str) -> None:
  """Tells each `PerGroup` of an optimizer, or of those within, the groups."""
  for layer in optimizer_state.nested_optimizers(optimizer):
    bind_rate(libraries.learning_rates(layer), groups, package)


def check_settable(optimizer: Any) -> None:
  """Raises `TypeError` where a PerGroup decides about the learning rate."""
  if rates_of(optimizer) is not None:
    raise TypeError(
      "PerGroup has a learning rate for each group; one number cannot take"
      " their place. Use callbacks.GroupReduceLROnPlateau for"
      " ReduceLROnPlateau, and a PerGroup of schedules for"
      " LearningRateScheduler."
    )


def rates_of(optimizer: Any) -> PerGroup | None:
  """Returns the PerGroup that is an optimizer's learning rate, if one is."""
  for layer in optimizer_state.nested_optimizers(optimizer):
    for rate in libraries.learning_rates(layer):
      if isinstance(rate, PerGroup):
        return rate
  return None


def bound(forwarded: property) -> property:
  """Returns a learning rate whose assignment tells a PerGroup of the groups."""

  def assign(optimizer: Any, value: Any) -> None:
    if "_checks" in vars(optimizer):  # Keras' constructor is done.
      if not callable(value):
        check_settable(optimizer.inner_optimizer)
      bind_rate(value, optimizer.groups, optimizer._package)
    forwarded.__set__(optimizer, value)

  return forwarded.setter(assign)


def bind_rate(rate: Any, groups: groups_lib.Groups, package: str) -> None:
  """The same for a learning rate, or a list of them."""
  schedules = list(_within(rate, _schedule_class(package)))
  for rates in schedules:
    rates.check(groups)
  for rates in schedules:
    rates._groups = groups


def _within(value: Any, schedule: type[Any]) -> Iterator[PerGroup]:
  """Yields those that a schedule is or, say for a warmup, calls."""
  if isinstance(value, PerGroup):
    yield value
  if isinstance(value, schedule):
    value = list(vars(value).values())
  if isinstance(value, (list, tuple)):
    for part in value:
      yield from _within(part, schedule)


def _schedule_class(package: str) -> type[Any]:
  """Returns the base class of a Keras' schedules."""
  schedules = sys.modules[package].optimizers.schedules
  kind: type[Any] = schedules.LearningRateSchedule
  return kind


def _row(rows: tf.Tensor, groups: groups_lib.Groups) -> tf.Tensor:
  """Returns the row of the calling replica's group; outside, `as_group`'s."""
  strategy = tf.distribute.get_strategy()
  replica = replica_isolation.current_replica()
  if replica is None or _outside.get() is not None:
    return _row_outside(rows)
  replicas = strategy.num_replicas_in_sync
  if replicas != groups.num_replicas:
    raise ValueError(
      f"`groups` must hold the {replicas} replicas of"
      f" {type(strategy).__name__}; it holds {groups.num_replicas}:"
      f" {groups.to_lists()}. Call per_group inside `strategy.run` of the"
      " strategy that it is for, or inside `with schedules.as_group(i):`."
    )
  group_of = [groups.index_of(number) for number in range(replicas)]
  # The replica's number may be a tensor.
  return tf.gather(rows, tf.gather(group_of, replica))


def _row_outside(rows: Any) -> tf.Tensor:
  """Returns the row of `as_group`'s group; without, of group 0."""
  group = _outside.get()
  return tf.gather(rows, 0 if group is None else group)
