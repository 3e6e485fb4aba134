"""Converts optimizers and checkpoints of TensorFlow 1.

Call `from_v1` to turn an optimizer of `tf.compat.v1.train` into a
`CrossShardOptimizer` around the Keras class with the same formula:

>>> import tensorflow as tf
>>> from tf_cross_shard import migration
>>> optimizer = migration.from_v1(tf.compat.v1.train.AdamOptimizer(0.5))
>>> float(optimizer.learning_rate.numpy())
0.5

Call `convert_checkpoint` to continue a training run that began in TensorFlow
1. It finds weights, slots and the number of steps by their names, writes them
to a checkpoint of TensorFlow 2, and reports what it matched:

>>> import os, tempfile
>>> v1 = tf.compat.v1
>>> folder = tempfile.TemporaryDirectory()
>>> with tf.Graph().as_default(), v1.Session() as session:
...   _ = v1.get_variable("w", initializer=[1.0, 2.0])
...   _ = v1.train.create_global_step()
...   session.run(v1.global_variables_initializer())
...   old = v1.train.Saver().save(session, os.path.join(folder.name, "old"))
>>> w = tf.Variable([0.0, 0.0], name="w")
>>> done = migration.convert_checkpoint(
...   old, os.path.join(folder.name, "new"), [w], tf.keras.optimizers.SGD(0.5)
... )
>>> dict(done.matched), w.numpy().tolist()
({'w': 'w', 'iterations': 'global_step'}, [1.0, 2.0])
>>> folder.cleanup()

The guide, `docs/migration.md`, lists each old class, method and argument with
its replacement.
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.migration.checkpoints import (
  Conversion,
  convert_checkpoint,
)
from tf_cross_shard._src.migration.optimizers import from_v1

__all__ = ["Conversion", "convert_checkpoint", "from_v1"]
__dir__ = _catalogue.publish(globals())
