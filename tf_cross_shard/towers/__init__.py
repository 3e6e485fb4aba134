"""Several copies of one model function in one program, on one machine.

batch -> split -> model_fn on each device -> gradients collected
                                                    |
  merged TowerSpec <- applied once <- summed <------+

The towers share one set of variables. This package knows no optimizer: one
that collects here says itself how a sum is applied.
"""

from tf_cross_shard.towers.replicated_model_fn import (
  ModeKeys,
  ReplicatedModelFn,
  TowerSpec,
  replicate_model_fn,
)

__all__ = ["ModeKeys", "ReplicatedModelFn", "TowerSpec", "replicate_model_fn"]
