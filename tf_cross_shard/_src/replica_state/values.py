"""Reads, compares and averages the values of replicas and groups."""

from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib
from tf_cross_shard._src.replica_state import archive, group_state


def values(variable: Any) -> list[archive.Array]:
  """Returns the value of a variable in each replica.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import replica_state
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable([1.0, 2.0])
  >>> replica_state.values(weight)
  [array([1., 2.], dtype=float32), array([1., 2.], dtype=float32)]

  For variables that TensorFlow aggregates when read, such as metrics, you get
  each replica's own contribution.

  Args:
    variable: A `tf.Variable`, a `keras.Variable` or a slot.

  Returns:
    One array per replica, in replica order, of the variable's dtype and shape;
    on several machines, the values of all workers. For a variable that was
    created outside any scope, a list with one array.
  """
  strategy = replicas_lib.strategy_of(variable)
  copies = replicas_lib.Copies(strategy or tf.distribute.get_strategy())
  if strategy is None:
    return copies.here(variable)[:1]
  copies.compare_workers(f"reading values of {_name(variable)}")
  return copies.read(variable, range(copies.engine.num_replicas))


def group_values(variable: Any, optimizer: Any) -> list[archive.Array]:
  """Returns the value of a variable in each group, read from its first member.

  Args:
    variable: A `tf.Variable`, a `keras.Variable` or a slot.
    optimizer: An optimizer with groups. It may be unbuilt.

  Returns:
    One array per group, in the order of `optimizer.groups`, of the variable's
    dtype and shape.

  Raises:
    ValueError: If the optimizer's groups have another number of replicas than
      the variable.
  """
  nested_lib.check_optimizer(optimizer)
  group_state.warn_if_collapsed(optimizer)
  strategy = replicas_lib.strategy_of(variable)
  if strategy is None:
    groups = nested_lib.groups_of(optimizer)
    return values(variable) * groups.num_groups
  copies = replicas_lib.Copies(strategy)
  groups = nested_lib.groups_of(optimizer, copies.engine.strategy)
  copies.compare_workers(f"reading values of groups of {_name(variable)}")
  return copies.read(variable, [members[0] for members in groups])


def assert_in_sync(optimizer: Any, model: Any = None) -> None:
  """Raises an error unless all members of each group have exactly equal values.

  Members of a group stay equal as long as they start equal and only the
  optimizer changes them. The function compares the optimizer's variables and
  the trainable variables of the model. Other variables of the model, such as
  the statistics of batch normalization, may differ between members.

  Args:
    optimizer: A built optimizer.
    model: A model, or a list of variables. None compares the optimizer's
      variables only.

  Raises:
    OutOfSyncError: If members differ. The error names the variable, the group
      and the largest difference. It is an AssertionError.
  """
  state = group_state.GroupState(optimizer, model)
  state.compare_workers("assert_in_sync")
  state.names_that_differ("assert_in_sync")  # Raises the error.


def average(optimizer: Any, model: Any, slots: bool = False) -> None:
  """Gives every replica the mean over all replicas of all groups.

      mean = (value of replica 0 + value of replica 1 + ...) / num_replicas

  The sum is computed in float64 and in this order, so that all replicas receive
  the same bits under every strategy. If the sum overflows, the values are
  divided before they are added.

  The function averages the model's floating-point variables, including the
  statistics of batch normalization. Integer variables, such as the states of
  random number generators, do not change.

  Args:
    optimizer: A built optimizer.
    model: A model, or a list of variables.
    slots: Whether to average the optimizer's slots as well: for each averaged
      variable, `get_slot(variable, name)` for all slot names. This needs a
      CrossShardOptimizer. The iteration count, the learning rate and the loss
      scale of each group do not change.

  Raises:
    ValueError: If `slots` is True and there is no CrossShardOptimizer.
  """
  state = group_state.GroupState(optimizer, model)
  chosen = [p.variable for p in state.entries if p.name.startswith("model/")]
  if slots:
    chosen += _slots(state.optimizer, chosen)
  state.compare_workers("averaging with slots" if slots else "averaging")
  copies = state.copies
  for variable in filter(group_state.has_mean, chosen):
    all_values = copies.read(variable, range(state.groups.num_replicas))
    mean = group_state.mean(all_values)
    copies.write(variable, [mean] * len(copies.engine.local_replicas))
  group_state.accept_values(state.optimizer)


def _name(variable: Any) -> str:
  """Returns the name of a variable, which is the same on all workers."""
  return variables_lib.renumbered([variables_lib.path_of(variable)])[0]


def _slots(optimizer: Any, variables: list[Any]) -> list[Any]:
  """Returns the optimizer's slots of the variables, each slot once."""
  layers = nested_lib.nested_optimizers(optimizer)
  wrappers = filter(None, map(wrapped_lib.find, layers))
  states = [wrapped.whole.slots for wrapped in wrappers]
  if not states:
    raise ValueError(
      "`slots` needs a CrossShardOptimizer, which lists its slots; got"
      f" {type(optimizer).__name__}. Leave `slots` False."
    )
  slots = [s for v in variables for i in states for s in i(v).values()]
  return list({id(slot): slot for slot in slots}.values())
