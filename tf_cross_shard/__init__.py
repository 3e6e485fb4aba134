"""Optimizers whose gradients are reduced over groups of replicas.

Glossary: a *replica* is one synchronous copy of a training step; a *group* is
a set of replicas that sum together; a *shard* is a slice of state; a *worker*
is a process; a *device* is hardware; a *tower* is one of several copies of a
model function in one program; the *wire* is what travels between replicas.
"""

from tf_cross_shard import versions

versions.check_installed()

from tf_cross_shard import groups, layers, migration, replica_state  # noqa: E402
from tf_cross_shard.groups import Groups  # noqa: E402
from tf_cross_shard.towers import (  # noqa: E402
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
  "groups",
  "layers",
  "migration",
  "replica_state",
  "replicate_model_fn",
  "__version__",
]
