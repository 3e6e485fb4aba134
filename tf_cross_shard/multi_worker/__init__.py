"""Training on several machines: workers that agree, or say why not.

`MultiWorkerStrategy` is TensorFlow's MultiWorkerMirroredStrategy with checks,
and with timeouts in the place of hangs.
"""

import typing
from typing import Any

if typing.TYPE_CHECKING:
  from tf_cross_shard.callbacks.backup import BackupAndRestore, newest_common
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


def __getattr__(name: str) -> Any:
  """Imports a public name when it is used: `launch` needs no TensorFlow."""
  if name in __all__:
    from tf_cross_shard.callbacks import backup
    from tf_cross_shard.coordination import errors
    from tf_cross_shard.multi_worker import strategy, uneven

    homes = (backup, errors, strategy, uneven)
    return next(getattr(home, name) for home in homes if hasattr(home, name))
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  """Returns the public names."""
  return __all__
