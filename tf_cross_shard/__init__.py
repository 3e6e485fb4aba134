"""Optimizers whose gradients are reduced over groups of replicas.

Glossary: a *replica* is one synchronous copy of a training step; a *group* is
a set of replicas that sum together; a *shard* is a slice of state; a *worker*
is a process; a *device* is hardware; a *tower* is one of several copies of a
model function in one program; the *wire* is what travels between replicas.
"""

import importlib
import importlib.util
import sys
from typing import Any

from tf_cross_shard import versions

# A program that imports this package may load a model with its optimizers, so
# they are registered with Keras at once. The command line alone waits until a
# command needs TensorFlow: `--help` is not to take seconds.
_IS_DEFERRED = "_IS_DEFERRED" not in globals() and versions.is_command_line()

if not _IS_DEFERRED:
  versions.check_installed()

  from tf_cross_shard import (
    callbacks,
    groups,
    layers,
    migration,
    replica_state,
    schedules,
  )
  from tf_cross_shard.group_schedule import per_group
  from tf_cross_shard.groups import Groups
  from tf_cross_shard.towers import (
    ModeKeys,
    TowerSpec,
    replicate_model_fn,
  )

  if versions.uses_tf_keras():
    from tf_cross_shard.tf_keras import CrossShardOptimizer, TowerOptimizer
  else:
    from tf_cross_shard.keras3 import CrossShardOptimizer, TowerOptimizer

__version__ = versions.own_version()

__all__ = [
  "CrossShardOptimizer",
  "Groups",
  "ModeKeys",
  "TowerOptimizer",
  "TowerSpec",
  "callbacks",
  "groups",
  "layers",
  "migration",
  "per_group",
  "replica_state",
  "replicate_model_fn",
  "schedules",
  "__version__",
]


def __getattr__(name: str) -> Any:
  """Imports modules that nothing has imported yet, such as `virtual_tpu`."""
  module = f"{__name__}.{name}"
  if not name.startswith("_") and importlib.util.find_spec(module):
    return importlib.import_module(module)
  if _IS_DEFERRED and name in __all__:
    importlib.reload(sys.modules[__name__])  # Which defers nothing.
    return globals()[name]
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  """The public names, and the public modules that are always there."""
  modules = {"keras3", "multi_worker", "tf_keras", "virtual_tpu"}
  absent = {"keras3", "tf_keras"} - set(globals())
  return sorted({*__all__, *modules} - absent)
