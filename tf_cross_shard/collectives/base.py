"""The interface of engines, and the engines that need no collectives."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import replica_isolation
from tf_cross_shard.gradients import packing


class Engine(abc.ABC):
  """How one kind of `tf.distribute.Strategy` adds tensors across replicas.

  All methods are called in the replica context, by every replica alike.
  """

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
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
    """

  def all_reduce_narrow(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Sums tensors of half precision, in float32 where the engine can."""
    return self.all_reduce_sum(tensors, groups)

  @abc.abstractmethod
  def all_gather(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Joins each tensor of this replica's group along the first dimension."""

  def check_groups(self, groups: groups_lib.Groups) -> None:
    """Raises an error if this engine cannot sum in `groups`."""
    del groups

  @property
  def bucket_bytes(self) -> int | None:
    """The best size of buffers at this place; None for no packing."""
    return packing.BUCKET_BYTES

  def keeps_rows(self, groups: groups_lib.Groups) -> bool:
    """Whether row-sparse gradients stay so at this place."""
    del groups
    return True

  @property
  def orders_graphs(self) -> bool:
    """Whether updates have an order in a version 1 graph."""
    return self.num_replicas == 1

  def reduce_scatter(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """This member's part of each sum over the group.

    Args:
      tensors: `[group_size * n]`, of equal shapes on all members.
      groups: The grouping.

    Returns:
      `[n]` each: of the member at place i of `position`, the i-th part.
    """
    place = self.position(groups)
    parts = []
    for total in self.all_reduce_narrow(tensors, groups):
      part = total.shape[0] // groups.group_size
      parts.append(tf.slice(total, [place * part], [part]))
    return parts

  def all_gather_parts(
    self, parts: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """The reverse of `reduce_scatter`: all members' `[n]`, in their order."""
    # Zeros in the others' places add nothing.
    spread = [self.spread(part, groups) for part in parts]
    return self.all_reduce_sum(spread, groups)

  def spread(self, part: tf.Tensor, groups: groups_lib.Groups) -> tf.Tensor:
    """`[group_size * n]`: `[n]` at this member's place among zeros."""
    places = tf.range(groups.group_size)[:, tf.newaxis]
    is_mine = places == self.position(groups)
    return tf.reshape(tf.where(is_mine, part, tf.zeros_like(part)), [-1])

  def position(self, groups: groups_lib.Groups) -> Any:
    """This replica's place among the sorted members of its group."""
    replica = replica_isolation.replica_id()
    if replica is not None:
      return groups.members_of(replica).index(replica)
    places = [groups.members_of(r).index(r) for r in range(groups.num_replicas)]
    context = tf.distribute.get_replica_context()
    return tf.constant(places)[context.replica_id_in_sync_group]

  @contextlib.contextmanager
  def making_variables(self) -> Iterator[None]:
    """A context whose variables have a copy on each replica.

    It lifts them out of a trace. Replicas may make them too: tf_keras builds
    optimizers in their first step.
    """
    with tf.init_scope():
      if tf.distribute.in_cross_replica_context() or (
        tf.distribute.get_strategy() is not self.strategy
      ):
        with self.strategy.scope():
          yield
      else:
        yield

  @property
  def updates_in_cond(self) -> bool:
    """Whether one replica's variables can be updated inside `tf.cond`."""
    return True

  def check_conditional(self, argument: str) -> None:
    """Raises `NotImplementedError` if they cannot be."""
    if not self.updates_in_cond:
      raise NotImplementedError(
        f"`{argument}` is not supported under {type(self.strategy).__name__}."
        " Leave it out, or use MirroredStrategy."
      )

  def updates_here(self, variable: Any) -> bool:
    """Whether this replica must update `variable`.

    A variable made outside the strategy's scope exists once, so one replica
    alone updates it.
    """
    value = variables_lib.native(variable)
    copied = is_copied(variable)
    # The counts of all replicas are added up when such a variable is read.
    is_summed = (
      copied
      and value.synchronization == tf.VariableSynchronization.ON_READ
      and value.aggregation == tf.VariableAggregation.SUM
    )
    is_first = replica_isolation.replica_id() in (0, None)
    return is_first or (copied and not is_summed)

  def agree(
    self,
    topic: str,
    lines: Callable[[], Sequence[str]],
    state: Callable[[], Sequence[str]] = list,
  ) -> None:
    """Raises an error unless all processes are about to do the same.

    There is nothing to compare where one process has all replicas.

    Args:
      topic: What is compared, for errors.
      lines: Returns lines that must be equal, each as `name: value`. They are
        compared once.
      state: Returns lines that must be equal at that moment.
    """
    del topic, lines, state

  def all_or_nothing(
    self, sums: Sequence[Any]
  ) -> contextlib.AbstractContextManager[Any]:
    """A context in which no variable is updated before all sums exist."""
    del sums
    return contextlib.nullcontext()

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    """A context in which this replica updates its own variables only."""
    return replica_isolation.isolate(self.strategy)


class OneDevice(Engine):
  """The sum over one replica is its own value."""

  def all_reduce_sum(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """The tensors themselves."""
    del groups
    return list(tensors)

  def all_gather(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """The tensors themselves."""
    del groups
    return list(tensors)

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    """Does nothing where a merge call is a plain call anyway."""
    if isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
      return super().isolate()
    return contextlib.nullcontext()


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
    # One by one: some strategies reject a list of mixed dtypes. Copied: a
    # tensor that all replicas share would be taken for the sum itself.
    return [context.all_reduce("SUM", tf.identity(x)) for x in tensors]

  def all_gather(
    self, tensors: Sequence[tf.Tensor], groups: groups_lib.Groups
  ) -> list[tf.Tensor]:
    """Joins over all replicas."""
    self.check_groups(groups)
    context = tf.distribute.get_replica_context()
    return [context.all_gather(tensor, axis=0) for tensor in tensors]

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    """Prevents a second reduction; nothing more is sure to work."""
    return replica_isolation.isolate_reductions(self.strategy)

  def updates_here(self, variable: Any) -> bool:
    """Every replica takes part in an assignment that is aggregated."""
    aggregation = variables_lib.native(variable).aggregation
    is_aggregated = aggregation != tf.VariableAggregation.NONE
    return is_aggregated or super().updates_here(variable)

  def check_groups(self, groups: groups_lib.Groups) -> None:
    """Refuses groups, which no public method supports."""
    if groups.num_groups > 1:
      raise NotImplementedError(
        f"`group_assignment` is not supported under"
        f" {type(self.strategy).__name__}; got {groups.to_lists()}. Leave it"
        " None, or use MirroredStrategy."
      )

  @property
  def updates_in_cond(self) -> bool:
    """False: nothing is known of it."""
    return False


def is_copied(variable: Any) -> bool:
  """Whether each replica has a copy of a variable."""
  return isinstance(
    variables_lib.native(variable), tf.distribute.DistributedValues
  )
