"""What every engine offers, and the engine for strategies of others."""

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import arguments, packing
from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import alone


class Engine(abc.ABC):
  """How one kind of `tf.distribute.Strategy` adds tensors across replicas.

  All methods are called in the replica context, by every replica alike.
  """

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    """Keeps the strategy whose replicas take part.

    Args:
      strategy: The strategy; not necessarily the current one.
    """
    self.strategy = strategy

  @property
  def num_replicas(self) -> int:
    """Synchronous replicas in the whole strategy."""
    return int(self.strategy.num_replicas_in_sync)

  @property
  def replicas_here(self) -> range:
    """The replicas of this process, in the order of its devices."""
    return range(self.num_replicas)

  @abc.abstractmethod
  def all_reduce_sum(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Sums each tensor over this replica's group.

        result[i] = sum over r in group of tensors_r[i]

    All members of a group receive the same bits.

    Args:
      tensors: Dense tensors, of the same shapes and dtypes on all members.
      groups: Who sums with whom.

    Returns:
      The sums, in the order of `tensors`.
    """

  def all_reduce_narrow(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Sums tensors of half precision, in float32 where the engine can.

    Args:
      tensors: As for `all_reduce_sum`.
      groups: Who sums with whom.

    Returns:
      The sums, in the dtypes of `tensors` or in float32.
    """
    return self.all_reduce_sum(tensors, groups)

  @abc.abstractmethod
  def all_gather(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Joins each tensor of this replica's group along the first dimension.

    Args:
      tensors: Tensors of one dimension or more. The first may differ between
        replicas.
      groups: Who gathers from whom.

    Returns:
      The members' tensors, joined in ascending order of replica.
    """

  def check_groups(self, groups: groups_lib.Groups) -> None:
    """Raises an error if this engine cannot sum in `groups`.

    Args:
      groups: Groups of all replicas of the strategy.
    """
    del groups

  def check_skipping(self) -> None:
    """Raises an error if one group cannot leave out a step by itself."""
    return

  @property
  def bucket_bytes(self) -> int | None:
    """How large buffers are best, where this is asked; None for no packing."""
    return packing.BUCKET_BYTES

  @property
  def can_gather(self) -> bool:
    """Whether `all_gather` can be used where this is asked."""
    return True

  @property
  def orders_graphs(self) -> bool:
    """Whether updates have an order in a version 1 graph."""
    return self.num_replicas == 1

  def updates_here(self, variable: Any) -> bool:
    """Whether this replica is to update `variable`.

    A variable made outside the strategy's scope exists once, so that one
    replica alone must update it.

    Args:
      variable: A `tf.Variable` or `keras.Variable`.

    Returns:
      False on all replicas but the first for a variable that exists once.
    """
    value = arguments.native(variable)
    copied = is_copied(variable)
    # What replicas count in one such variable is added up when it is read.
    is_summed = (
      copied
      and value.synchronization == tf.VariableSynchronization.ON_READ
      and value.aggregation == tf.VariableAggregation.SUM
    )
    return (copied and not is_summed) or alone.replica_id() in (0, None)

  def agree(
    self,
    topic: str,
    lines: Callable[[], Sequence[str]],
    state: Callable[[], Sequence[str]] = list,
  ) -> None:
    """Raises an error unless all processes are about to do the same.

    Nothing to compare where one process has all replicas.

    Args:
      topic: What is compared, for errors.
      lines: Answers what has to be alike, each as `name: value`. What was
        compared once is not compared again.
      state: Answers what has to be alike at that moment.
    """
    del topic, lines, state

  def all_or_nothing(
    self, sums: Sequence[Any]
  ) -> contextlib.AbstractContextManager[Any]:
    """A context in which nothing is updated before all sums are there.

    Args:
      sums: All sums of a step.

    Returns:
      By default one that does nothing: sums within one process do not fail.
    """
    del sums
    return contextlib.nullcontext()

  def alone(self) -> contextlib.AbstractContextManager[None]:
    """A context in which this replica updates its own variables only.

    Returns:
      What `tf_cross_shard.collectives.alone.alone` answers.
    """
    return alone.alone(self.strategy)


class AnyStrategy(Engine):
  """A strategy that this package has no engine of its own for.

  It reduces over all replicas through `tf.distribute.ReplicaContext`, the one
  public way; that way has no groups.
  """

  def all_reduce_sum(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Sums over all replicas."""
    self.check_groups(groups)
    context = tf.distribute.get_replica_context()
    # One by one: a list of mixed dtypes is rejected by some strategies. Copied:
    # one tensor that all replicas share would be taken for the sum itself.
    return [context.all_reduce("SUM", tf.identity(x)) for x in tensors]

  def all_gather(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Joins over all replicas."""
    self.check_groups(groups)
    context = tf.distribute.get_replica_context()
    return [context.all_gather(tensor, axis=0) for tensor in tensors]

  def alone(self) -> contextlib.AbstractContextManager[None]:
    """All that is sure to work: no second reduction."""
    return alone.not_reducing(self.strategy)

  def updates_here(self, variable: Any) -> bool:
    """Every replica takes part in an assignment that is aggregated."""
    aggregation = arguments.native(variable).aggregation
    is_aggregated = aggregation != tf.VariableAggregation.NONE
    return is_aggregated or super().updates_here(variable)

  def check_groups(self, groups: groups_lib.Groups) -> None:
    """Refuses groups, which no public call has.

    Raises:
      NotImplementedError: If there is more than one group.
    """
    if groups.num_groups > 1:
      raise NotImplementedError(
        f"`group_assignment` is not supported under"
        f" {type(self.strategy).__name__}; got {groups.to_lists()}. Leave it"
        " None, or use MirroredStrategy."
      )

  def check_skipping(self) -> None:
    """Refuses what takes an update inside `tf.cond`.

    Raises:
      NotImplementedError: Always.
    """
    raise NotImplementedError(
      f"`skip_nonfinite` is not supported under {type(self.strategy).__name__}."
      " Leave it False, or use MirroredStrategy."
    )


def is_copied(variable: Any) -> bool:
  """Whether each replica has a value of its own of a variable.

  >>> is_copied(tf.Variable(1.0))
  False

  Args:
    variable: A `tf.Variable` or `keras.Variable`.

  Returns:
    Whether it was made in a strategy's scope.
  """
  return isinstance(arguments.native(variable), tf.distribute.DistributedValues)
