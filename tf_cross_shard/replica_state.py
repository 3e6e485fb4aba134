"""Read, save, restore, average and compare values that differ between groups.

Each group of replicas trains its own weights and optimizer state.
TensorFlow reads and saves the values of replica 0 only. The functions of this
module handle the values of all groups:

- `values`: returns the value of each replica
- `group_values`: returns the value of each group
- `save`, `restore`: write and read a checkpoint with all groups
- `read_group`: loads one group of a checkpoint into a plain model
- `load_group`: returns a plain Keras model with one group's weights
- `ensemble`: returns a model that averages the groups' predictions
- `predict`: returns the predictions of all groups
- `initialize`: gives each group the initial values of its own seed
- `copy_group`: overwrites one group with a copy of a different group
- `average`: overwrites the weights of all groups with their mean
- `assert_in_sync`: raises an error if members of a group differ

For example, with groups of two replicas that have the weights A and B::

    replica        0    1    2    3
    weights        A    A    B    B
    group_values   [A, B]
    save           writes A and B, each once
    read_group(1)  loads B from that file into a model without replicas
    average        all replicas receive (A + B) / 2

`optimizer` must be built, except for `restore`, which builds it, and for
`group_values`, `load_group`, `ensemble`, `predict` and `initialize`. `model` is
a built model or a list of variables. Without `group_assignment`, all replicas
form one group; under a VectorizedStrategy, each model is a group.

>>> import tensorflow as tf
>>> from tf_cross_shard import CrossShardOptimizer, replica_state
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
>>> kernels = replica_state.group_values(kernel, optimizer)
>>> [float(value[0, 0]) for value in kernels]
[0.0, 10.0]
>>> x = tf.constant([[2.0]])
>>> float(replica_state.load_group(model, 1, optimizer)(x)[0, 0])
20.0
>>> float(replica_state.ensemble(model, optimizer)(x)[0, 0])
10.0
>>> replica_state.assert_in_sync(optimizer, model)
>>> replica_state.average(optimizer, model)
>>> [float(value[0, 0]) for value in replica_state.values(kernel)]
[5.0, 5.0]
>>> replica_state.copy_group(1, 0, optimizer, model)

Call the functions eagerly and outside `strategy.run`; elsewhere they raise a
RuntimeError. On several machines, call them on all workers and with the same
arguments; otherwise all workers raise a MissingWorkerError or a
DisagreementError. An argument that is not a path, variable, optimizer or model
raises a TypeError. An optimizer that must be built and is not, and a
model that is not built, raise a ValueError.
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.replica_state.archive import CheckpointError
from tf_cross_shard._src.replica_state.checkpoint import (
  read_group,
  restore,
  save,
)
from tf_cross_shard._src.replica_state.group_models import (
  copy_group,
  ensemble,
  load_group,
)
from tf_cross_shard._src.replica_state.group_state import OutOfSyncError
from tf_cross_shard._src.replica_state.initial_values import initialize
from tf_cross_shard._src.replica_state.predictions import predict
from tf_cross_shard._src.replica_state.values import (
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
  "initialize",
  "load_group",
  "predict",
  "read_group",
  "restore",
  "save",
  "values",
]
__dir__ = _catalogue.publish(globals())
