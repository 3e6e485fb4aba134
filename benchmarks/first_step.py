"""What the first step of many replicas or variables takes: time and memory.

    python benchmarks/first_step.py --replicas=64 --variables=4
    python benchmarks/first_step.py --replicas=64 --variables=4 --plain

Adam on weights of 16 by 16 under MirroredStrategy, whose replicas are logical
CPUs. A process each, since memory is the most that the process ever had. It
needs Linux.
"""
# bazel: deps=:timing

import time
from collections.abc import Sequence

import tensorflow as tf
import timing
from absl import app, flags

from tf_cross_shard import CrossShardOptimizer

_REPLICAS = flags.DEFINE_integer("replicas", 4, "Logical CPUs.", 1)
_VARIABLES = flags.DEFINE_integer("variables", 500, "Of 16 by 16 each.", 1)
_PLAIN = flags.DEFINE_bool("plain", False, "Plain Keras in place of ours.")


def main(argv: Sequence[str]) -> None:
  """Prints one line."""
  del argv
  strategy = timing.mirrored(_REPLICAS.value)
  with strategy.scope():
    weights = [tf.Variable(tf.ones([16, 16])) for _ in range(_VARIABLES.value)]
    optimizer = tf.keras.optimizers.Adam(0.001)
    if not _PLAIN.value:
      optimizer = CrossShardOptimizer(optimizer, "sum")
    optimizer.build(weights)

  def replica_step() -> None:
    gradients = [0.001 * weight for weight in weights]
    optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))

  step = tf.function(lambda: strategy.run(replica_step), autograph=False)
  start, start_cpu = time.monotonic(), time.process_time()
  step()
  seconds, cpu = time.monotonic() - start, time.process_time() - start_cpu
  print(
    f"first step: {seconds:.1f} s, {cpu:.1f} s of CPU time; at most"
    f" {timing.peak_megabytes() * 1024 / 1e6:.2f} GB"
  )


if __name__ == "__main__":
  app.run(main)
