"""What the first step of many replicas or variables takes: time and memory.

    python benchmarks/first_step.py --replicas=64 --variables=4
    python benchmarks/first_step.py --variables=1000 --shard_update
    python benchmarks/first_step.py --variables=1000 --plain

Adam on weights of 16 by 16 under MirroredStrategy, whose replicas are logical
CPUs. Python builds the optimizer and traces the step; in the first call
TensorFlow optimizes the graph, and divides it among devices. `--as_traced`
leaves the optimizing out. A process each, since memory is the most that the
process ever had. It needs Linux.
"""
# bazel: deps=:timing

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import timing
from absl import app, flags

from tf_cross_shard import CrossShardOptimizer

_REPLICAS = flags.DEFINE_integer("replicas", 4, "Logical CPUs.", 1)
_VARIABLES = flags.DEFINE_integer("variables", 500, "Of 16 by 16 each.", 1)
_PLAIN = flags.DEFINE_bool("plain", False, "Plain Keras in place of ours.")
_SHARD = flags.DEFINE_bool("shard_update", False, "Updates in parts.")
_AS_TRACED = flags.DEFINE_bool("as_traced", False, "No graph optimizations.")


def show(name: str, work: Callable[[], Any]) -> Any:
  """Prints how long some work takes; returns its result."""
  start, start_cpu = time.monotonic(), time.process_time()
  result = work()
  seconds, cpu = time.monotonic() - start, time.process_time() - start_cpu
  print(f"{name}: {seconds:.1f} s, {cpu:.1f} s of CPU time", flush=True)
  return result


def main(argv: Sequence[str]) -> None:
  """Prints a line for each part, and the memory."""
  del argv
  strategy = timing.mirrored(_REPLICAS.value)
  if _AS_TRACED.value:
    tf.config.optimizer.set_experimental_options(
      {"disable_meta_optimizer": True}
    )
  with strategy.scope():
    weights = [tf.Variable(tf.ones([16, 16])) for _ in range(_VARIABLES.value)]
    optimizer = tf.keras.optimizers.Adam(0.001)
    if not _PLAIN.value:
      optimizer = CrossShardOptimizer(
        optimizer, "sum", shard_update=_SHARD.value
      )
    show("build", lambda: optimizer.build(weights))

  def replica_step() -> None:
    gradients = [0.001 * weight for weight in weights]
    optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))

  step = tf.function(lambda: strategy.run(replica_step), autograph=False)
  traced = show("trace", step.get_concrete_function)
  show("first call", step)
  print(
    f"{len(traced.graph.get_operations())} operations; at most"
    f" {timing.peak_megabytes() * 1024 / 1e6:.2f} GB"
  )


if __name__ == "__main__":
  app.run(main)
