"""Which variables a program read, as users know them.

Graphs and tapes may report one replica's copy of a variable. Optimizers know
the distributed variable that the copy belongs to.
"""

from typing import Any

import tensorflow as tf

from tf_cross_shard import converting


def whole(variable: Any) -> Any:
  """The distributed variable that `variable` is a copy in, or itself.

  Args:
    variable: A variable that a graph or a tape reported.

  Returns:
    The variable as its maker knows it.
  """
  if isinstance(variable, tf.distribute.DistributedValues):
    return variable
  # TensorFlow puts it on the handle of a copy that has one.
  for holder in (variable, getattr(variable, "handle", None)):
    container = getattr(holder, "_distributed_container", None)
    if container is not None:
      found = container()
      return variable if found is None else found
  return variable


@converting.not_ours
def read_by_graph() -> list[Any]:
  """Trainable variables that the graph being built has read so far.

  All replicas answer them in one order: gradients are summed by position. It is
  the order in which they were made, as a tape has it: slots and moving averages
  are made and found by position too.

  Returns:
    Variables or replicas' copies of them, those of other replicas included.
  """
  if not tf.inside_function():
    return list(tf.compat.v1.trainable_variables())
  # While a function is traced its `trainable_variables` is still empty.
  watched = tf.compat.v1.get_default_graph()._watched_variables
  trainable = [variable for variable in watched if variable.trainable]
  return sorted(trainable, key=_made)


def _made(variable: Any) -> tuple[int, str]:
  """By what variables are sorted: the number that TensorFlow counted up."""
  name = whole(variable)._unique_id
  number = name.rpartition("_")[2]
  return (int(number) if number.isdigit() else 0, name)
