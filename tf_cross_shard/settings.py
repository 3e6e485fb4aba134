"""The arguments of a CrossShardOptimizer, checked."""

from typing import Any

import tensorflow as tf

from tf_cross_shard import groups as groups_lib


def as_groups(group_assignment: Any) -> groups_lib.Groups | None:
  """Any accepted form of `group_assignment`, checked."""
  if group_assignment is None or isinstance(
    group_assignment, groups_lib.Groups
  ):
    return group_assignment
  if tf.is_tensor(group_assignment) and not hasattr(group_assignment, "numpy"):
    static = tf.get_static_value(group_assignment)
    if static is None:
      raise ValueError(
        "`group_assignment` must be known when the program is built; got the"
        f" symbolic tensor {group_assignment!r}. Use a list."
      )
    group_assignment = static
  return groups_lib.Groups(group_assignment)
