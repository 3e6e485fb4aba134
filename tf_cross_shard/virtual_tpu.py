"""Runs and compiles TPU programs on a machine without a TPU.

    step ─▶ a replica's program ─┬▶ VirtualTPUStrategy: checks it with XLA, and
                                 │    runs N replicas as one vectorized program
                                 └▶ compile_for: calls the real TPU compiler

`VirtualTPUStrategy` is used like `tf.distribute.TPUStrategy`. Every replica has
its own copy of every variable, so that you can develop and test TPU training,
including groups of replicas, on your own machine:

>>> import tensorflow as tf
>>> from tf_cross_shard import CrossShardOptimizer, virtual_tpu
>>> strategy = virtual_tpu.VirtualTPUStrategy(num_replicas=4)
>>> with strategy.scope():
...   weight = tf.Variable(1.0)
...   optimizer = CrossShardOptimizer(
...     tf.keras.optimizers.SGD(1.0), "sum", group_assignment=[[0, 1], [2, 3]]
...   )
...   optimizer.build([weight])
>>> gradients = strategy.experimental_distribute_values_from_function(
...   lambda context: tf.constant(float(context.replica_id_in_sync_group))
... )
>>> _ = strategy.run(
...   lambda g: optimizer.apply_gradients([(g, weight)]), args=(gradients,)
... )
>>> copies = strategy.experimental_local_results(weight)
>>> [float(copy.numpy()) for copy in copies]  # 1 - (0 + 1) and 1 - (2 + 3)
[0.0, 0.0, -4.0, -4.0]

`compile_for` passes the same program to the real TPU compiler, which needs no
TPU. Its `Report` lists every `Collective`, the bytes that replicas exchange,
memory and floating point operations. `coordinates` returns where the replicas
of a slice are:

>>> virtual_tpu.coordinates("v5e:2x2")
((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0))

A step that a TPU could not run raises `TPUCompileError`, for example if a shape
depends on data.

`VirtualTPUStrategy` needs TensorFlow alone. `compile_for` and `coordinates`
need jax and libtpu (`pip install '.[tpu-compiler]'` in a clone).
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.virtual_tpu.compiler import Report, compile_for
from tf_cross_shard._src.virtual_tpu.hlo import Collective
from tf_cross_shard._src.virtual_tpu.lowering import TPUCompileError
from tf_cross_shard._src.virtual_tpu.strategy import VirtualTPUStrategy
from tf_cross_shard._src.virtual_tpu.xla import coordinates

__all__ = [
  "Collective",
  "Report",
  "TPUCompileError",
  "VirtualTPUStrategy",
  "compile_for",
  "coordinates",
]
__dir__ = _catalogue.publish(globals())
