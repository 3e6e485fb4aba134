"""The interface for collectives under one strategy, and the one-replica case.

An engine has to provide `all_reduce_sum` and `all_gather`. The other methods
call them, unless an engine has an operation that sends less.
"""

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import packing
from tf_cross_shard._src.core.reduce import isolation
from tf_cross_shard._src.core.reduce import layout as layouts
from tf_cross_shard._src.core.variables import Gradient, Variable


class Engine(abc.ABC):
  """Collectives within groups, under one kind of `tf.distribute.Strategy`.

  All replicas make the same calls, with tensors of the same shapes and dtypes.
  """

  is_single_program = False  # Whether all replicas run one program (SPMD).
  is_compiled = False  # Whether XLA compiles every program of the strategy.
  supports_sparse = True  # Whether row-sparse gradients stay row-sparse.
  scatter_bytes: int | None = None  # Of a reduce-scatter's buffer.
  method = "by the engine's own collectives"

  def __init__(
    self, strategy: tf.distribute.Strategy, groups: groups_lib.Groups
  ) -> None:
    self.strategy = strategy
    self.groups = groups

  @property
  def num_replicas(self) -> int:
    """The number of synchronous replicas in the whole strategy."""
    return int(self.strategy.num_replicas_in_sync)

  @property
  def local_replicas(self) -> range:
    """The numbers of the replicas in this process, in device order."""
    return range(self.num_replicas)

  @abc.abstractmethod
  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor over the group; all members get the same bits."""

  def all_reduce_accumulate_f32(
    self, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Sums tensors, half precision in float32 if the engine can."""
    return self.all_reduce_sum(tensors)

  def same_on_all_replicas(self, value: tf.Tensor) -> tf.Tensor:
    """Declares that all replicas have this value, so they take one branch."""
    return value

  def broadcast_from_first(self, variables: Iterable[Variable]) -> None:
    """Gives members the variables of the first one, if they round unalike."""
    del variables

  @abc.abstractmethod
  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenates each tensor over this replica's group along axis 0."""

  @property
  def bucket_bytes(self) -> int | None:
    """The best size of an all-reduce buffer here; None for no packing."""
    return packing.BUCKET_BYTES

  def reduce_part(
    self, tensors: Sequence[tf.Tensor], layout: layouts.Layout
  ) -> tf.Tensor:
    """Sums flat tensors; returns this member's shard `[layout.part_size]`."""
    return self.reduce_scatter(layout.row(tensors))

  def gather_parts(
    self, part: tf.Tensor, layout: layouts.Layout, like: Sequence[Any]
  ) -> list[tf.Tensor]:
    """Gathers the parts of all members into tensors with shapes of `like`."""
    flat = layout.split(self.all_gather_part(part))
    return packing.reshape_like(flat, like)

  def cut_part(
    self, values: Sequence[Any], layout: layouts.Layout
  ) -> tf.Tensor:
    """Cuts this member's shard out of local values. Does not communicate."""
    place = self.position()
    if isinstance(place, int):
      # This member's index is known while tracing: read only its elements.
      return layout.pack(
        place, lambda cut: cut.of(values[cut.index]), values[0].dtype
      )
    # If all replicas run one program, the index is a tensor. So concatenate the
    # shards of all members, and take this member's slice at run time.
    row = layout.row(values)
    return tf.slice(row, [place * layout.part_size], [layout.part_size])

  def reduce_scatter(self, row: tf.Tensor) -> tf.Tensor:
    """Sums a vector over the group; returns this member's part."""
    [total] = self.all_reduce_accumulate_f32([row])
    part = total.shape[0] // self.groups.group_size
    return tf.slice(total, [self.position() * part], [part])

  def all_gather_part(self, part: tf.Tensor) -> tf.Tensor:
    """Concatenates the parts of all members, in the order of `position`."""
    # Each member contributes zeros except for its own shard, so the sum
    # concatenates the shards.
    places = tf.range(self.groups.group_size)[:, tf.newaxis]
    is_mine = places == self.position()
    among_zeros = tf.where(is_mine, part, tf.zeros_like(part))
    return self.all_reduce_sum([tf.reshape(among_zeros, [-1])])[0]

  def position(self) -> Any:
    """Returns this replica's place in its sorted group, an int or a tensor."""
    groups = self.groups
    replica = isolation.replica_id()
    if replica is not None:
      return groups.members_of(replica).index(replica)
    # One program for all replicas: look the place up when the program runs.
    places = [groups.members_of(r).index(r) for r in range(groups.num_replicas)]
    context = tf.distribute.get_replica_context()
    return tf.constant(places)[context.replica_id_in_sync_group]

  @contextlib.contextmanager
  def making_variables(self) -> Iterator[None]:
    """Enters the strategy's scope, unless it is already entered."""
    # tf_keras builds an optimizer while its first step is traced.
    with tf.init_scope():
      if tf.distribute.in_cross_replica_context() or (
        tf.distribute.get_strategy() is not self.strategy
      ):
        with self.strategy.scope():
          yield
      else:
        yield

  def should_update(self, variable: Variable) -> bool:
    """Returns whether this replica must update `variable`."""
    value = variables_lib.native(variable)
    copied = is_copied(variable)
    # TensorFlow adds up all copies of such a variable when it is read. If every
    # replica counted a step, the sum would count it once for each replica.
    is_summed = (
      copied
      and value.synchronization == tf.VariableSynchronization.ON_READ
      and value.aggregation == tf.VariableAggregation.SUM
    )
    # A variable from outside the strategy's scope exists once.
    is_first = isolation.replica_id() in (0, None)
    return is_first or (copied and not is_summed)

  def compare_workers(
    self,
    topic: str,
    variables: Sequence[Variable],
    grads: Sequence[Gradient],
    lines: Callable[[], Sequence[str]],
  ) -> None:
    """Raises an error that names the topic unless all processes do the same."""
    del topic, variables, grads, lines

  def after_all_sums(
    self, sums: Sequence[Any]
  ) -> contextlib.AbstractContextManager[Any]:
    """Delays changes of variables in the context until sums are complete."""
    del sums
    return contextlib.nullcontext()

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    """A context in which this replica acts as if it were the only one."""
    return isolation.isolate(self.strategy)


class OneDevice(Engine):
  """The engine of a strategy with one replica: a sum is the value itself."""

  method = "nothing to sum"

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(tensors)

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(tensors)

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    if isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
      return super().isolate()
    return contextlib.nullcontext()


def is_copied(variable: Variable) -> bool:
  """Returns whether each replica has its own copy of a variable."""
  return isinstance(
    variables_lib.native(variable), tf.distribute.DistributedValues
  )
