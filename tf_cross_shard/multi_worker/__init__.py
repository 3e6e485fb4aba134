"""Training on several machines: workers that agree, or say why not.

`MultiWorkerStrategy` is TensorFlow's MultiWorkerMirroredStrategy with checks,
and with timeouts in the place of hangs.
"""

from tf_cross_shard.callbacks.backup import BackupAndRestore
from tf_cross_shard.callbacks.backup_files import newest_common
from tf_cross_shard.coordination.errors import (
  DisagreementError,
  MissingWorkerError,
  WorkerLostError,
  naming_lost_workers,
)
from tf_cross_shard.multi_worker.strategy import MultiWorkerStrategy
from tf_cross_shard.multi_worker.uneven import even

__all__ = [
  "BackupAndRestore",
  "DisagreementError",
  "MissingWorkerError",
  "MultiWorkerStrategy",
  "WorkerLostError",
  "even",
  "naming_lost_workers",
  "newest_common",
]


def __dir__() -> list[str]:
  """Returns the public names."""
  return __all__
