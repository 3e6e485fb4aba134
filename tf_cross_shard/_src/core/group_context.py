"""The group of the calling replica, and the groups of a strategy.

A step puts the number of the calling replica's group into a context variable.
`PerModel` and `PerModelSettings` read it while the wrapped optimizer updates
the weights:

    step ─ as_group(group_here(groups)) ─▶ PerModel       learning_rate[group]
                                           PerModelSettings  weight_decay[group]

Layers, which run before the step, look up the groups of the strategy that runs
them: see `groups_of_strategy`. Where all replicas run one program, as on TPUs,
the number of the group is a tensor.
"""

import contextlib
import contextvars
import gc
import weakref
from collections.abc import Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import reduce, single_program, validation
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.reduce import isolation
from tf_cross_shard._src.core.wrapped import nested

# An int, or a scalar tensor or variable. Each thread has its own value, because
# replicas may be threads.
_my_group: Final = contextvars.ContextVar[Any]("my_group", default=None)
# The engines of all CrossShardOptimizers, by their strategies. MirroredStrategy
# never forgets a `tf.function` that its `run` was given, so the optimizer of
# such a step lives as long as the strategy.
_engines: Final[
  "weakref.WeakKeyDictionary[Any, weakref.WeakSet[engine_lib.Engine]]"
] = weakref.WeakKeyDictionary()


def current_group() -> Any:
  """Returns the number of the group whose values are read now, or None.

  A step sets it to the calling replica's group, and `as_group` to its argument.
  """
  return _my_group.get()


def group_here(groups: groups_lib.Groups) -> Any:
  """Returns the calling replica's group: an int, or a tensor in one program.

  Outside replicas, it returns None.
  """
  replica = isolation.current_replica()
  if replica is None or isinstance(replica, int):
    return None if replica is None else groups.index_of(replica)
  group_of = [groups.index_of(r) for r in range(groups.num_replicas)]
  return tf.gather(group_of, replica)


@contextlib.contextmanager
def as_group(group: Any) -> Iterator[None]:
  """Sets the group whose values `per_group` returns outside replicas.

  Use it when you call the model of one group, such as the result of
  `Models(model)[i]`, if the model's layers or its loss call
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


# The groups of a strategy.


def register(engine: engine_lib.Engine) -> None:
  """Notes that an optimizer has the groups of an engine, while both live."""
  _engines.setdefault(engine.strategy, weakref.WeakSet()).add(engine)


def _registered(strategy: tf.distribute.Strategy) -> list[groups_lib.Groups]:
  """Returns the different groups of the optimizers of a strategy."""
  found: dict[Any, groups_lib.Groups] = {}
  for engine in _engines.get(strategy, ()):
    found[engine.groups.assignment] = engine.groups
  return list(found.values())


def groups_of_strategy(
  strategy: tf.distribute.Strategy,
) -> groups_lib.Groups | None:
  """Returns the groups of the CrossShardOptimizers of a strategy.

  Without such an optimizer, each model of a VectorizedStrategy is a group. The
  result is None if nothing tells the groups.

  Raises:
    ValueError: If optimizers of the strategy have different groups.
  """
  registered = _registered(strategy)
  if len(registered) > 1:
    gc.collect()  # An optimizer that is no longer used may be in a cycle.
    registered = _registered(strategy)
  if len(registered) > 1:
    both = " and ".join(str(g.to_lists()) for g in registered[:2])
    raise ValueError(
      "`groups` is None, but optimizers of this strategy have different"
      f" groups: {both}. Pass `groups`."
    )
  if registered:
    return registered[0]
  if single_program.are_models(strategy):
    return reduce.default_groups(strategy)
  return None


def check_groups(
  groups: groups_lib.Groups, strategy: tf.distribute.Strategy
) -> None:
  """Raises `ValueError` unless groups are those of a strategy's optimizer."""
  if single_program.num_copies(strategy) != groups.num_replicas:
    raise ValueError(
      f"`groups` holds {groups.num_replicas} replicas, {groups.to_lists()}, but"
      " per_group was called under"
      f" {validation.strategy_in_words(strategy)}. Call it inside"
      " `strategy.run` of the groups' own strategy, or inside `with"
      " schedules.as_group(i):`."
    )
  for is_second in (False, True):
    registered = _registered(strategy)
    if not registered or groups.assignment in [
      other.assignment for other in registered
    ]:
      return
    if not is_second:
      gc.collect()  # An optimizer that is no longer used may be in a cycle.
  raise ValueError(
    f"`groups` is {groups.to_lists()}, but the CrossShardOptimizer of this"
    f" strategy has the groups {registered[0].to_lists()}. Remove `groups`,"
    " which are then those of the optimizer."
  )


@tf.autograph.experimental.do_not_convert
def per_group(values: Any, groups: Any = None) -> tf.Tensor:
  """Returns the value of the group that the calling replica belongs to.

  Use it for anything in which groups should differ, such as a dropout rate, a
  temperature or the strength of data augmentation. Call it in code that
  replicas run: in a function that you pass to `strategy.run`, in the `call` of
  a layer or in a `train_step`. For learning rates, use `schedules.PerModel`.

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
    groups: A `Groups`, a `group_assignment`, or a `CrossShardOptimizer`. None
      stands for the groups of the strategy's CrossShardOptimizer; without such
      an optimizer, each model of a `VectorizedStrategy` is a group.

  Returns:
    `[...]`: the row of the group. In the cross-replica context, it is the row
    of group 0: Keras calls a model there to find its shapes. Inside `as_group`,
    it is the row of the group that `as_group` sets.

  Raises:
    ValueError: If `values` does not hold one row for each group; if `groups`
      are not those of the strategy's CrossShardOptimizer, or do not hold the
      replicas of the strategy; or if `groups` is None and nothing tells the
      groups.
  """
  return row_of_group(values, groups, "values")


def row_of_group(values: Any, groups: Any, argument: str) -> tf.Tensor:
  """Does what `per_group` does; errors name the caller's `argument`."""
  rows = tf.convert_to_tensor(values)
  group = _my_group.get()
  is_replica = group is None and isolation.current_replica() is not None
  groups = _resolved(groups, is_replica)
  if groups is not None:
    if not rows.shape[:1].is_compatible_with([groups.num_groups]):
      raise ValueError(
        f"`{argument}` must contain one row for each of the"
        f" {groups.num_groups} groups {groups.to_lists()}; got shape"
        f" {rows.shape}."
      )
    if is_replica:
      check_groups(groups, tf.distribute.get_strategy())
      group = group_here(groups)
  return tf.gather(rows, 0 if group is None else group)


def _resolved(groups: Any, is_replica: bool) -> groups_lib.Groups | None:
  """Returns the groups of an argument; None if no replica needs them."""
  if hasattr(groups, "apply_gradients"):
    return nested.groups_of(groups)
  if groups is not None:
    return settings_lib.required_groups(groups)
  if not is_replica:
    return None
  strategy = tf.distribute.get_strategy()
  found = groups_of_strategy(strategy)
  if found is None:
    raise ValueError(
      "`groups` is None, but no CrossShardOptimizer was created under"
      f" {validation.strategy_in_words(strategy)}. Pass `groups`, create the"
      " optimizer inside `with strategy.scope():`, or use `with"
      " schedules.as_group(i):`."
    )
  return found
