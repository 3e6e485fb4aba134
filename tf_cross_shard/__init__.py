"""Trains several models in one program, and reduces gradients within groups.

`VectorizedStrategy(n)` trains n models as one vectorized program on one device:
put its scope around the program of one model.

`CrossShardOptimizer` wraps an optimizer of Keras 3 or tf_keras. It sums or
averages the gradients over all replicas of a `tf.distribute` strategy, or
within groups of them:

>>> import tensorflow as tf
>>> import tf_cross_shard
>>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
>>> with strategy.scope():
...   optimizer = tf_cross_shard.CrossShardOptimizer(
...     tf.keras.optimizers.Adam(), group_assignment=[[0], [1]]
...   )
>>> print(optimizer.groups.draw())
replica  0  1
group 0  o
group 1     o
"""
# ruff: noqa: E402  # The check of versions comes before the other imports.

import importlib as _importlib
import typing as _typing

from tf_cross_shard._src.core import versions as _versions

_versions.check_installed()

from tf_cross_shard import (
  callbacks,
  groups,
  layers,
  migration,
  models,
  schedules,
)
from tf_cross_shard._src.local_strategy import local_strategy
from tf_cross_shard.groups import Groups
from tf_cross_shard.models import Models
from tf_cross_shard.towers import ModeKeys, TowerSpec, replicate_model_fn

if _typing.TYPE_CHECKING:  # For editors: the common base class.
  from tf_cross_shard._src.core.optimizer import CrossShardOptimizer
  from tf_cross_shard._src.towers.tower_optimizer import TowerOptimizer
  from tf_cross_shard._src.vectorized.arguments import per_model
  from tf_cross_shard._src.vectorized.rows_of_models import dataset_per_model
  from tf_cross_shard._src.vectorized.strategy import VectorizedStrategy
# Importing the classes also registers them with Keras, for programs that only
# load a model.
elif _versions.uses_tf_keras():
  from tf_cross_shard.tf_keras import CrossShardOptimizer, TowerOptimizer
else:
  from tf_cross_shard.keras3 import CrossShardOptimizer, TowerOptimizer

# `help` and the reference show the names that programs use.
for _public in (CrossShardOptimizer, TowerOptimizer, local_strategy):
  _public.__module__ = __name__

__version__ = _versions.own_version()

__all__ = [
  "CrossShardOptimizer",
  "Groups",
  "ModeKeys",
  "Models",
  "TowerOptimizer",
  "TowerSpec",
  "VectorizedStrategy",
  "callbacks",
  "dataset_per_model",
  "groups",
  "layers",
  "local_strategy",
  "migration",
  "models",
  "per_model",
  "replicate_model_fn",
  "schedules",
  "__version__",
]
# Modules that many programs do not need. They are imported on first use.
_LATER = ("keras3", "multi_worker", "tf_keras", "virtual_tpu")
# What needs private modules of TensorFlow, by the module that has it.
_VECTORIZED = {
  "VectorizedStrategy": "strategy",
  "dataset_per_model": "rows_of_models",
  "per_model": "arguments",
}


def __getattr__(name: str) -> _typing.Any:
  """Imports what a program needs when it first uses the name."""
  if name in _LATER:
    return _importlib.import_module(f"{__name__}.{name}")
  if name in _VECTORIZED:
    home = f"{__name__}._src.vectorized.{_VECTORIZED[name]}"
    with _versions.needing_private_modules(name):
      member = getattr(_importlib.import_module(home), name)
    member.__module__ = __name__
    globals()[name] = member
    return member
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  """Returns the public names; leaves out a Keras that is not imported."""
  of_a_keras = {"keras3", "tf_keras"} - globals().keys()
  return sorted({*__all__, *_LATER} - of_a_keras)
