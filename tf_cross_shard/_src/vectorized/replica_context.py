"""The replica context while a replica's function is traced.

The number of the replica is an operation in the graph being traced.
`converters` gives each replica its own.
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.core.framework import attr_value_pb2

# The attribute of an identity operation whose input all replicas have.
SAME: Final = "_same_on_all_replicas"
# The attribute of an identity operation that returns the value of another
# replica: for each replica, the number of that replica.
TAKEN_FROM: Final = "_taken_from_replica"
_MARK: Final = "tf_cross_shard_replica_program"


def mark_replica_program() -> None:
  """Marks the graph being built as a replica's program."""
  setattr(tf.compat.v1.get_default_graph(), _MARK, True)


def in_replica_program() -> bool:
  """Returns whether a replica's program is being traced."""
  # The replica context cannot tell: inside a merge call there is none.
  if tf.executing_eagerly():
    return False
  graph = tf.compat.v1.get_default_graph()
  while graph is not None and not hasattr(graph, _MARK):
    graph = getattr(graph, "outer_graph", None)
  return graph is not None


def same_on_all_replicas(tensor: tf.Tensor) -> tf.Tensor:
  """Marks a value that all replicas have: conditions on it take one branch."""
  return _marked(tensor, SAME, attr_value_pb2.AttrValue(b=True))


def taken_from(tensor: tf.Tensor, replicas: Sequence[int]) -> tf.Tensor:
  """Returns the value that replica `replicas[i]` has, on replica i."""
  numbers = attr_value_pb2.AttrValue.ListValue(i=replicas)
  return _marked(tensor, TAKEN_FROM, attr_value_pb2.AttrValue(list=numbers))


def _marked(tensor: tf.Tensor, name: str, value: Any) -> tf.Tensor:
  marked = tf.identity(tensor)
  marked.op._set_attr(name, value)  # noqa: SLF001  # There is no public way.
  return marked


class TracedReplicaContext(tf.distribute.ReplicaContext):
  """The replica context while a replica's function is traced."""

  @property
  def replica_id_in_sync_group(self) -> tf.Tensor:
    """This replica's number, as an operation in the graph being traced."""
    return replica_id()


class ModelContext(TracedReplicaContext):
  """The context of a model, which is alone: an exchange returns its input."""

  def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Returns `value`: the sum, and the mean, over one replica."""
    del reduce_op, options
    return value

  def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
    """Returns `value`: what one replica has."""
    del axis, options
    return value


def replica_id() -> tf.Tensor:
  """Returns the number of the replica that runs the program."""
  return tf.cast(gen_xla_ops.xla_replica_id(), tf.int32)
