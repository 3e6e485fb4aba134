"""Keras callbacks for training several groups of replicas in one `fit`.

Keras' own callbacks see one model: they read the weights of replica 0 and
metrics that are averaged over all groups. The callbacks of this module treat
every group as a separate model.

- `PerModelMetrics`: evaluates each group; writes `val_loss/model_0`, ...
- `PerModelEarlyStopping`: stops `fit` once no group is improving
- `PerModelReduceLROnPlateau`: lowers each group's own learning rate
- `PerModelCheckpoint`: keeps each group's best weights in one file
- `PerModelTensorBoard`: writes one TensorBoard run for each group
- `OptunaSearch`: trains the trials of an Optuna study in the groups
- `OuterOptimizer`: synchronizes the groups every few steps (DiLoCo)
- `BackupAndRestore`: resumes `fit` after a crash

Put `PerModelMetrics` first in the list of callbacks: the callbacks after it
read the metrics that it writes, and put `BackupAndRestore` last.
`OuterOptimizer` and `BackupAndRestore` need no `PerModelMetrics`.

Train two groups with two learning rates. Each group gets back the weights of
its own best epoch (group 0 diverges, because its learning rate is too large):

>>> import numpy as np
>>> import tensorflow as tf
>>> from tf_cross_shard import CrossShardOptimizer, callbacks, schedules
>>> with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
...   model = tf.keras.Sequential(
...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
...   )
...   sgd = tf.keras.optimizers.SGD(schedules.PerModel([2.0, 0.01]))
...   model.compile(
...     CrossShardOptimizer(sgd, group_assignment=[[0], [1]]), "mse"
...   )
>>> x = np.ones([4, 1], "float32")
>>> stop = callbacks.PerModelEarlyStopping(patience=2)
>>> _ = model.fit(
...   *(x, 5 * x),
...   epochs=4,
...   verbose=0,
...   callbacks=[callbacks.PerModelMetrics((x, 5 * x)), stop],
... )
>>> stop.best_epoch
[0, 3]

In your own training loop, compile the model and call the methods yourself:
`set_model(model)` and `on_train_begin()` before the first step,
`on_epoch_end(epoch, logs)` after each epoch, with the same `logs` dictionary
for every callback, and `on_train_end()`. On several machines, all workers make
these calls.
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.backup.backup import BackupAndRestore
from tf_cross_shard._src.fit.per_model_checkpoint import PerModelCheckpoint
from tf_cross_shard._src.fit.per_model_early_stopping import (
  PerModelEarlyStopping,
)
from tf_cross_shard._src.fit.per_model_metrics import PerModelMetrics
from tf_cross_shard._src.fit.per_model_reduce_lr import (
  PerModelReduceLROnPlateau,
)
from tf_cross_shard._src.fit.per_model_tensorboard import PerModelTensorBoard
from tf_cross_shard._src.islands.outer_optimizer import OuterOptimizer
from tf_cross_shard._src.search.optuna_search import OptunaSearch

__all__ = [
  "BackupAndRestore",
  "PerModelCheckpoint",
  "PerModelEarlyStopping",
  "PerModelMetrics",
  "PerModelReduceLROnPlateau",
  "PerModelTensorBoard",
  "OptunaSearch",
  "OuterOptimizer",
]
__dir__ = _catalogue.publish(globals())
