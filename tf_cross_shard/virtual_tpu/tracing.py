"""Which function is being built: a replica's program, or the host's."""

from typing import Final

import tensorflow as tf

_MARK: Final = "tf_cross_shard_replica_program"


def mark_replica_program() -> None:
  """Makes the function being built known as a replica's program."""
  setattr(tf.compat.v1.get_default_graph(), _MARK, True)


def in_replica_program() -> bool:
  """Whether what is built now becomes part of a replica's program.

  Not asked of the replica context: in a merge call there is none.
  """
  if tf.executing_eagerly():
    return False
  graph = tf.compat.v1.get_default_graph()
  while graph is not None:
    if getattr(graph, _MARK, False):
      return True
    graph = getattr(graph, "outer_graph", None)
  return False
