"""Trains on several machines, with clear errors instead of hangs.

Each machine runs the same program as one *worker*. `MultiWorkerStrategy` is
TensorFlow's MultiWorkerMirroredStrategy with checks: workers compare what they
are about to do, and you get an error if they differ or if a worker does not
answer in time.

- `MultiWorkerStrategy` starts this worker and waits for the others.
- `even` gives every worker the same number of batches. Without it, a worker
  that runs out of data would leave the others waiting.
- `naming_lost_workers` turns TensorFlow's errors about a lost worker into one
  `WorkerLostError` that names the worker.
- `BackupAndRestore` is a Keras callback that lets `fit` resume after a crash.

The environment variable TF_CONFIG lists the workers. Without it, the program is
the only worker, as in this example:

>>> import tensorflow as tf
>>> from tf_cross_shard import multi_worker
>>> strategy = multi_worker.MultiWorkerStrategy(timeout=60)
>>> with strategy.scope():
...   weight = tf.Variable(1.0)
>>> data = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0]).batch(2)
>>> data = multi_worker.even(data, strategy)
>>> len(data)
2
>>> with multi_worker.naming_lost_workers():
...   for x in data:
...     _ = strategy.run(lambda x: weight.assign_add(tf.reduce_sum(x)), (x,))
>>> float(weight.numpy())
7.0

The command `python -m tf_cross_shard launch` starts several workers on one
machine.
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.backup.backup import BackupAndRestore
from tf_cross_shard._src.core.workers import (
  DisagreementError,
  MissingWorkerError,
  WorkerLostError,
  naming_lost_workers,
)
from tf_cross_shard._src.multi_worker.even_batches import even
from tf_cross_shard._src.multi_worker.strategy import MultiWorkerStrategy
from tf_cross_shard_cli import launch

__all__ = [
  "BackupAndRestore",
  "DisagreementError",
  "MissingWorkerError",
  "MultiWorkerStrategy",
  "WorkerLostError",
  "even",
  "launch",
  "naming_lost_workers",
]
__dir__ = _catalogue.publish(globals())
