"""All models of a program: `Models`, and the errors of its methods.

- `Models`: reads, sets, saves and restores the values of every model
- `CheckpointError`: a file is damaged or does not match the program
- `OutOfSyncError`: members of a group have different values
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.models.archive import CheckpointError
from tf_cross_shard._src.models.group_state import OutOfSyncError
from tf_cross_shard._src.models.models import Models

__all__ = ["CheckpointError", "Models", "OutOfSyncError"]
__dir__ = _catalogue.publish(globals())
