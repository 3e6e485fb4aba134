"""Data-parallel training of a model function on the devices of one machine.

Use towers if your program comes from TensorFlow 1 and calls
`replicate_model_fn` with a `TowerOptimizer`. A *tower* is one copy of your
model function on one device. All towers run in one program and share one set of
variables:

    batch ─▶ split ─▶ model_fn on each device ─▶ gradients are collected
                                                          │
         merged TowerSpec ◀─ applied once ◀─ summed ◀─────┘

Two towers, each with one row of the batch, train one weight `w`. With the sum
of the losses `w * 1` and `w * 2`, the gradient is 3:

>>> import tensorflow as tf
>>> from tf_cross_shard import ModeKeys, TowerOptimizer, TowerSpec
>>> from tf_cross_shard import replicate_model_fn
>>> w = tf.Variable(10.0)
>>> optimizer = TowerOptimizer(tf.keras.optimizers.SGD(1.0))
>>> def model_fn(features, mode):
...   loss = tf.reduce_sum(w * features)
...   train_op = None
...   if mode == ModeKeys.TRAIN:
...     train_op = optimizer.minimize(loss, var_list=[w])
...   return TowerSpec(mode, loss, train_op, predictions=w * features)
>>> step = replicate_model_fn(model_fn, "sum", devices=["CPU:0", "CPU:1"])
>>> spec = step(tf.constant([[1.0], [2.0]]), mode=ModeKeys.TRAIN)
>>> float(spec.loss), float(w.numpy())
(30.0, 7.0)
>>> spec = step(tf.constant([[1.0], [2.0]]), mode=ModeKeys.PREDICT)
>>> spec.predictions.numpy().tolist()
[[7.0], [14.0]]

`TowerOptimizer` itself is `tf_cross_shard.TowerOptimizer`, or the class in
`tf_cross_shard.keras3` or `tf_cross_shard.tf_keras`. Outside towers it
behaves like the optimizer that it wraps.
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.towers.replicated_model_fn import (
  ModeKeys,
  ReplicatedModelFn,
  TowerSpec,
  replicate_model_fn,
)

__all__ = ["ModeKeys", "ReplicatedModelFn", "TowerSpec", "replicate_model_fn"]
__dir__ = _catalogue.publish(globals())
