"""Values of replicas and groups: read, compared, averaged."""

from typing import Any

import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import optimizer_state
from tf_cross_shard.replica_state import archive, group_state, replica_values


def values(variable: Any) -> list[archive.Array]:
  """Returns each replica's value of a variable.

  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable([1.0, 2.0])
  >>> values(weight)
  [array([1., 2.], dtype=float32), array([1., 2.], dtype=float32)]

  Of a variable that is summed or averaged on reading, such as a metric, it is
  each replica's own part.

  Args:
    variable: A `tf.Variable`, a `keras.Variable` or a slot.

  Returns:
    One array per replica, in replica order; on several machines those of all
    workers. A single one for a variable that was made outside any scope.
  """
  strategy = replica_values.strategy_of(variable)
  copies = replica_values.Copies(strategy or tf.distribute.get_strategy())
  if strategy is None:
    return copies.here(variable)[:1]
  copies.agree(f"reading values of {_name(variable)}")
  return copies.read(variable, range(copies.engine.num_replicas))


def group_values(variable: Any, optimizer: Any) -> list[archive.Array]:
  """Returns each group's value of a variable: that of its first member.

  Args:
    variable: A `tf.Variable`, a `keras.Variable` or a slot.
    optimizer: An optimizer with groups; it need not be built.

  Returns:
    One array per group, in the order of `optimizer.groups`.

  Raises:
    ValueError: If the optimizer is for another number of replicas.
  """
  optimizer, variable = group_state.in_order(optimizer, variable)
  group_state.check_values(optimizer)
  strategy = replica_values.strategy_of(variable)
  if strategy is None:
    groups = group_state.groups_of(optimizer, None)
    return values(variable) * groups.num_groups
  copies = replica_values.Copies(strategy)
  groups = group_state.groups_of(optimizer, copies.engine.num_replicas)
  copies.agree(f"reading values of groups of {_name(variable)}")
  return copies.read(variable, [members[0] for members in groups])


def assert_in_sync(optimizer: Any, model: Any = None) -> None:
  """Raises an error unless members of each group are equal, to the bit.

  That is so as long as they start equal and only the optimizer changes them.
  Compared are the optimizer's variables and those that the model trains. What
  it does not train, say the statistics of batch normalization, is each
  replica's own. Without `model`, the optimizer's only.

  Raises:
    OutOfSyncError: If members differ; names the variable, the group and the
      largest difference. It is an AssertionError.
  """
  state = group_state.GroupCopies(optimizer, model)
  state.agree("assert_in_sync")
  state.apart("assert_in_sync")


def average(optimizer: Any, model: Any, slots: bool = False) -> None:
  """Gives every replica the mean over all replicas, of all groups.

      mean = (value of replica 0 + value of replica 1 + ...) / num_replicas

  added up in float64 in this order, so that all replicas have the same bits,
  under every strategy; where that sum overflows, the values are divided first.
  Averaged are the model's floating variables, the statistics of batch
  normalization among them; not integers, such as the states of random numbers.

  With `slots`, which need a CrossShardOptimizer, also what it keeps for each of
  these variables: `get_slot(variable, name)` for all of its slot names. Its
  iteration count, learning rate and loss scale stay each group's own.
  """
  state = group_state.GroupCopies(optimizer, model)
  chosen = [p.variable for p in state.parts if p.name.startswith("model/")]
  if slots:
    chosen += _slots(state.optimizer, chosen)
  state.agree("averaging with slots" if slots else "averaging")
  copies = state.copies
  for variable in filter(group_state.has_mean, chosen):
    all_values = copies.read(variable, range(state.groups.num_replicas))
    mean = group_state.mean(all_values)
    copies.write(variable, [mean] * len(copies.engine.replicas_here))
  group_state.accept_values(state.optimizer)


def _name(variable: Any) -> str:
  """Returns the name that a variable has on all workers."""
  return variables_lib.renumbered([variables_lib.path_of(variable)])[0]


def _slots(optimizer: Any, variables: list[Any]) -> list[Any]:
  """Returns what the optimizer keeps for each of the variables, each once."""
  layers = map(vars, optimizer_state.nested_optimizers(optimizer))
  inner = [layer["_inner"] for layer in layers if "_inner" in layer]
  if not inner:
    raise ValueError(
      "`slots` needs a CrossShardOptimizer, which knows its slots; got"
      f" {type(optimizer).__name__}. Leave `slots` False."
    )
  states = [i.unsharded_state for i in inner]
  slots = [s for v in variables for i in states for s in i.slots(v).values()]
  return list({id(slot): slot for slot in slots}.values())
