"""Numbers that differ between models, and the one of the calling replica.

step ─ as_group(group_here(groups)) ─▶ PerModel          learning_rate[group]
PerModelSettings  weight_decay[group]
"""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.reduce import isolation

# An int, or a scalar tensor or variable. Each thread has its own value, because
# replicas may be threads.
_my_group: Final = contextvars.ContextVar[Any]("my_group", default=None)


def current_group() -> Any:
  """Returns the group of the replica that takes a step, or None."""
  return _my_group.get()


def group_here(groups: groups_lib.Groups) -> Any:
  """Returns the number of the calling replica's group; None outside of one."""
  replica = isolation.current_replica()
  if replica is None or isinstance(replica, int):
    return None if replica is None else groups.index_of(replica)
  group_of = [groups.index_of(r) for r in range(groups.num_replicas)]
  return tf.gather(group_of, replica)


@contextlib.contextmanager
def as_group(group: Any) -> Iterator[None]:
  """Sets the current group."""
  before = _my_group.set(group)
  try:
    yield
  finally:
    _my_group.reset(before)


class GroupVariable(tf.__internal__.tracking.Trackable):
  """One number for each group, in a float64 variable `[num_groups]`.

  Each step reads it, so that a number that changes takes effect in the next
  step, without a new trace. Keras' Python numbers are float64, too.
  """

  def __init__(self, name: str, numbers: Iterable[float]) -> None:
    self.name = name
    self.initial = tuple(map(float, numbers))
    self._numbers = self.initial
    self._variables: dict[Any, tf.Variable] = {}

  def __len__(self) -> int:
    return len(self._numbers)

  def create(self, strategy: tf.distribute.Strategy) -> None:
    """Creates the variable of a strategy, unless it exists."""
    if strategy in self._variables or not (
      tf.compat.v1.executing_eagerly_outside_functions()
    ):
      return
    numbers = self.read()
    # Models share one variable. A copy for each model would be another variable
    # of the strategy, for which it traces the step again.
    are_models = single_program.are_models(strategy)
    scope = contextlib.nullcontext() if are_models else strategy.scope()
    outside = variables_lib.outside_of_strategies()
    # Files contain the name, which must not depend on where a step is traced.
    with tf.init_scope(), outside, scope, tf.name_scope(""):
      variable = tf.Variable(
        numbers, trainable=False, dtype=tf.float64, name=self.name
      )
    if not self._variables:
      self._track_trackable(variable, "numbers", overwrite=True)
    self._variables[strategy] = variable

  def variable(self, strategy: tf.distribute.Strategy) -> tf.Variable | None:
    """Returns the variable that a strategy's replicas read, if there is one."""
    return self._variables.get(strategy)

  def as_tensor(self) -> tf.Tensor:
    """Returns the numbers as a tensor, `[num_groups]`, in a step or outside."""
    strategy = tf.distribute.get_strategy()
    variable = self._variables.get(strategy)
    if variable is None and self._variables:
      variable = next(iter(self._variables.values()))
    if variable is None:
      return tf.constant(self._numbers, tf.float64)
    return tf.convert_to_tensor(variable)

  def read(self) -> list[float]:
    """Returns the present numbers of all groups. Call it outside of steps."""
    for variable in self._variables.values():
      return [float(number) for number in variable.numpy()]
    return list(self._numbers)

  def assign(self, numbers: Iterable[float]) -> None:
    """Sets the numbers, eagerly and outside replicas. On all workers alike."""
    self._numbers = tuple(map(float, numbers))
    for variable in self._variables.values():
      variable.assign(self._numbers)
