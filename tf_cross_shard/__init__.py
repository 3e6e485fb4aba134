"""Optimizers whose gradients are reduced over groups of replicas.

Glossary: a *replica* is one synchronous copy of a training step; a *group* is
a set of replicas that sum together; a *shard* is a slice of state; a *worker*
is a process; a *device* is hardware; a *tower* is one of several copies of a
model function in one program; the *wire* is what travels between replicas.
"""
# ruff: noqa: E402  # Versions are checked first.

import importlib
from typing import TYPE_CHECKING, Any

from tf_cross_shard import versions

versions.check_installed()

from tf_cross_shard import (
  callbacks,
  groups,
  layers,
  migration,
  replica_state,
  schedules,
  trials,
)
from tf_cross_shard.group_schedule import per_group
from tf_cross_shard.groups import Groups
from tf_cross_shard.towers import ModeKeys, TowerSpec, replicate_model_fn

if TYPE_CHECKING:  # What editors show, and what both Kerases' classes are.
  from tf_cross_shard.optimizer import CrossShard as CrossShardOptimizer
  from tf_cross_shard.towers.tower_optimizer import Tower as TowerOptimizer
# Also registers them with Keras, for programs that only load a model.
elif versions.uses_tf_keras():
  from tf_cross_shard.tf_keras import CrossShardOptimizer, TowerOptimizer
else:
  from tf_cross_shard.keras3 import CrossShardOptimizer, TowerOptimizer

# In `help` and in the reference they are what programs call them.
for _class in (CrossShardOptimizer, TowerOptimizer):
  _class.__module__ = __name__

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
  "trials",
  "__version__",
]
_LATER = ("keras3", "multi_worker", "tf_keras", "tuners", "virtual_tpu")


def __getattr__(name: str) -> Any:
  """Imports what a program may do without when it is asked for."""
  if name in _LATER:
    return importlib.import_module(f"{__name__}.{name}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  """Returns the public names, and the public modules that are there."""
  of_a_keras = {"keras3", "tf_keras"} - globals().keys()
  return sorted({*__all__, *_LATER} - of_a_keras)
