"""Optimizers whose gradients are reduced over groups of replicas.

Glossary: a *replica* is one synchronous copy of a training step; a *group* is
a set of replicas that sum together; a *worker* is a process; a *device* is
hardware; the *wire* is what travels between replicas.
"""

from tf_cross_shard import requirements

requirements.check_installed()

from tf_cross_shard import groups, replica_state  # noqa: E402  # checked above
from tf_cross_shard.groups import Groups  # noqa: E402

if requirements.uses_tf_keras():
  from tf_cross_shard.tf_keras import CrossShardOptimizer
else:
  from tf_cross_shard.keras3 import CrossShardOptimizer

__version__ = requirements.own_version()

__all__ = [
  "CrossShardOptimizer",
  "Groups",
  "groups",
  "replica_state",
  "__version__",
]
