"""The interface of engines, and the engines that need no collectives."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import replica_isolation
from tf_cross_shard.gradients import layout, packing


class Engine(abc.ABC):
  """How one kind of `tf.distribute.Strategy` adds tensors across replicas.

  All methods are called in the replica context, by every replica alike.

  Attributes:
    strategy: The strategy.
    groups: The replicas that sum together, for all methods.
    is_one_program: Whether no replica can do what others do not.
  """

  is_one_program = False  # in which all replicas do the same

  def __init__(
    self, strategy: tf.distribute.Strategy, groups: groups_lib.Groups
  ) -> None:
    self.strategy = strategy
    self.groups = groups

  @property
  def num_replicas(self) -> int:
    """Synchronous replicas in the whole strategy."""
    return int(self.strategy.num_replicas_in_sync)

  @property
  def replicas_here(self) -> range:
    """The replicas of this process, in the order of its devices."""
    return range(self.num_replicas)

  @abc.abstractmethod
  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor over this replica's group.

        result[i] = sum over r in group of tensors_r[i]

    All members of a group receive the same bits.
    """

  def all_reduce_narrow(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors of half precision, in float32 where the engine can."""
    return self.all_reduce_sum(tensors)

  @abc.abstractmethod
  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Joins each tensor of this replica's group along the first dimension."""

  @property
  def can_exchange(self) -> bool:
    """Whether `all_to_all` sends each member only what it receives."""
    return True

  def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
    """Gives row i to the i-th member; returns what all gave to this one.

    `rows` and the result are `[group_size, n]`.
    """
    everything = self.all_gather_part(tf.reshape(rows, [-1]))
    shape = [self.groups.group_size, *rows.shape]
    return tf.reshape(everything, shape)[:, self.position()]

  @property
  def bucket_bytes(self) -> int | None:
    """The best size of buffers at this place; None for no packing."""
    return packing.BUCKET_BYTES

  @property
  def row_bytes(self) -> int | None:
    """The best size of what is reduced and scattered; None for all at once."""
    return None

  @property
  def keeps_rows(self) -> bool:
    """Whether row-sparse gradients stay so at this place."""
    return True

  @property
  def orders_graphs(self) -> bool:
    """Whether updates have an order in a version 1 graph."""
    return self.num_replicas == 1

  def beside(self) -> "Engine":
    """Returns an engine for a thread beside the steps; itself where none may.

    All processes call it alike.
    """
    return self

  def reduce_part(
    self, tensors: Sequence[tf.Tensor], parts: layout.Layout
  ) -> tf.Tensor:
    """Returns this member's part of the sums over the group.

    Args:
      tensors: Flat ones of one dtype, of equal shapes on all members.
      parts: Which elements each member receives, in the order of `position`.
    """
    return self.reduce_scatter(self.row(tensors, parts))

  def gather_parts(
    self, part: tf.Tensor, parts: layout.Layout, like: Sequence[Any]
  ) -> list[tf.Tensor]:
    """The reverse of `reduce_part`: tensors in the shapes of `like`."""
    row = self.all_gather_part(part)
    joined = parts.join(tf.split(row, self.groups.group_size))
    return packing.reshape_like(joined, like)

  def own_part(self, values: Sequence[Any], parts: layout.Layout) -> tf.Tensor:
    """Returns this member's part of tensors or variables that all have."""
    place = self.position()
    if isinstance(place, int):  # Only what lies in the part is read and copied.
      return _pack(values, parts, place)
    row = self.row(values, parts)
    return tf.slice(row, [place * parts.part], [parts.part])

  def row(self, values: Sequence[Any], parts: layout.Layout) -> tf.Tensor:
    """Returns all members' parts behind each other."""
    members = range(self.groups.group_size)
    return tf.concat([_pack(values, parts, member) for member in members], 0)

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    """Returns this member's `[n]` of the sum of `[group_size * n]`."""
    [total] = self.all_reduce_narrow([row])
    part = total.shape[0] // self.groups.group_size
    return tf.slice(total, [self.position() * part], [part])

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    """The reverse of `reduce_scatter`: all members' `[n]`, in their order."""
    # Zeros in the others' places add nothing.
    return self.all_reduce_sum([self.place_among_zeros(part)])[0]

  def place_among_zeros(self, part: tf.Tensor) -> tf.Tensor:
    """`[group_size * n]`: `[n]` at this member's place among zeros."""
    places = tf.range(self.groups.group_size)[:, tf.newaxis]
    is_mine = places == self.position()
    return tf.reshape(tf.where(is_mine, part, tf.zeros_like(part)), [-1])

  def position(self) -> Any:
    """This replica's place among the sorted members of its group."""
    groups = self.groups
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

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors themselves."""
    return list(tensors)

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors themselves."""
    return list(tensors)

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    """Does nothing where a merge call is a plain call anyway."""
    if isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
      return super().isolate()
    return contextlib.nullcontext()


def is_copied(variable: Any) -> bool:
  """Whether each replica has a copy of a variable."""
  return isinstance(
    variables_lib.native(variable), tf.distribute.DistributedValues
  )


def _pack(
  values: Sequence[Any], parts: layout.Layout, member: int
) -> tf.Tensor:
  """Returns one member's part of tensors or variables."""
  return parts.pack(
    member, lambda cut: cut.of(values[cut.index]), values[0].dtype
  )
