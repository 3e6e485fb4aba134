"""Keras callbacks for training n models in one `fit`.

Keras' own callbacks see one model: they read the weights of replica 0 and
metrics that are averaged over all models. The callbacks of this module treat
each model separately.

- `PerModelMetrics`: evaluates each model; writes `val_loss/model_0`, ...
- `PerModelEarlyStopping`: stops `fit` once no model is improving
- `PerModelReduceLROnPlateau`: lowers each model's own learning rate
- `PerModelCheckpoint`: keeps each model's best weights in one file
- `PerModelTensorBoard`: writes one TensorBoard run for each model
- `OptunaSearch`: trains the trials of an Optuna study in the models
- `OuterOptimizer`: synchronizes the models every few steps (DiLoCo)
- `BackupAndRestore`: resumes `fit` after a crash; put it last

Under VectorizedStrategy, each callback reads the metrics of `fit` of each model
itself. Under other strategies, and for metrics of data of its own, put
`PerModelMetrics(data)` before the callbacks that need its metrics.

Train two models with two learning rates. Each model gets back the weights of
its own best epoch (model 0 diverges, because its learning rate is too large):

>>> import numpy as np
>>> import tensorflow as tf
>>> from tf_cross_shard import VectorizedStrategy, callbacks, schedules
>>> with VectorizedStrategy(2).scope():
...   model = tf.keras.Sequential(
...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
...   )
...   sgd = tf.keras.optimizers.SGD(schedules.PerModel([2.0, 0.01]))
...   model.compile(sgd, "mse")
>>> x = np.ones([4, 1], "float32")
>>> stop = callbacks.PerModelEarlyStopping(patience=2)
>>> data = (x, 5 * x)
>>> _ = model.fit(
...   *data, validation_data=data, epochs=4, verbose=0, callbacks=[stop]
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
