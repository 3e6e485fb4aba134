"""Values that differ between groups: read, save, restore, average, compare.

Groups are trained apart, and TensorFlow reads and saves replica 0 of a
variable. Here every group has its say:

    replica        0    1    2    3
    group_values   └─ A ─┘  └─ B ─┘      [A, B]
    save           A, B, once each       restore gives each group its own again
    read_group(1)  B from that file, in a model without replicas
    average        every replica has the mean of all

Arguments have one order: a path, groups or a variable, then `optimizer`, then
`model`. An optimizer and a model that are swapped are told apart.

All functions are called eagerly, outside `strategy.run`, or raise a
RuntimeError; on several machines by all workers alike, or all of them raise a
MissingWorkerError or a DisagreementError. Something else than a path, a
variable, an optimizer or a model is a TypeError; an optimizer or a model that
is not built, a ValueError.
"""

from tf_cross_shard.replica_state.archive import CheckpointError
from tf_cross_shard.replica_state.checkpoint import read_group, restore, save
from tf_cross_shard.replica_state.group_models import (
  copy_group,
  ensemble,
  load_group,
)
from tf_cross_shard.replica_state.group_state import OutOfSyncError
from tf_cross_shard.replica_state.values import (
  assert_in_sync,
  average,
  group_values,
  values,
)

__all__ = [
  "CheckpointError",
  "OutOfSyncError",
  "assert_in_sync",
  "average",
  "copy_group",
  "ensemble",
  "group_values",
  "load_group",
  "read_group",
  "restore",
  "save",
  "values",
]


def __dir__() -> list[str]:
  """Returns the public names."""
  return sorted(__all__)
