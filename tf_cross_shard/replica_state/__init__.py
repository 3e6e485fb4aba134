"""Values that differ between groups: read, save, restore, average, compare.

Groups are trained apart, and TensorFlow reads and saves replica 0 of a
variable. Here every group has its say:

    replica        0    1    2    3
    group_values   └─ A ─┘  └─ B ─┘      [A, B]
    save           A, B, once each       restore gives each group its own again
    read_group(1)  B from that file, in a model without replicas
    average        every replica has the mean of all

Arguments have one order: a path, groups or a variable; then `optimizer`, which
is built; then `model`, a built model or a list of variables. An optimizer and a
model that are swapped are told apart. An optimizer without groups has one of
all replicas.

>>> import tensorflow as tf
>>> from tf_cross_shard import CrossShardOptimizer
>>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
>>> with strategy.scope():
...   model = tf.keras.Sequential(
...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1, use_bias=False)]
...   )
...   optimizer = CrossShardOptimizer("sgd", group_assignment=[[0], [1]])
...   optimizer.build(model.trainable_variables)
>>> kernel = model.trainable_variables[0]
>>> tensors = getattr(kernel, "value", kernel)  # tf_keras has tf.Variables
>>> for i, copy in enumerate(strategy.experimental_local_results(tensors)):
...   _ = copy.assign([[10.0 * i]])
>>> [float(value[0, 0]) for value in group_values(kernel, optimizer)]
[0.0, 10.0]
>>> x = tf.constant([[2.0]])
>>> float(load_group(1, optimizer, model)(x)[0, 0])
20.0
>>> float(ensemble(optimizer, model)(x)[0, 0])
10.0
>>> assert_in_sync(optimizer, model)
>>> average(optimizer, model)
>>> [float(value[0, 0]) for value in values(kernel)]
[5.0, 5.0]
>>> copy_group(1, 0, optimizer, model)

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
