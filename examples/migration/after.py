"""Continues the training of `before.py` in TensorFlow 2.

    python examples/migration/before.py --folder=/tmp/digits --steps=30
    python examples/migration/after.py --folder=/tmp/digits --steps=60

At the end, this program also runs `before.py` on a copy of the checkpoint, and
compares the losses. They are equal except for rounding, and the last line says
so. `--strategy=tpu` needs a TPU; the other strategies run on any machine.

    TensorFlow 1       here
    model_fn           a Keras model, whose variables have the same names
    optimizer          the same lines, and from_v1
    TPUEstimator       a strategy and a loop
    checkpoint         one call of convert_checkpoint
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# TensorFlow reads these variables when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from typing import Any, Final

import digits_batches
import tensorflow as tf

from tf_cross_shard import local_strategy, migration, virtual_tpu

# Several replicas add float32 numbers in a different order.
_ROUNDING: Final = 2e-5


def make_strategy(name: str, num_replicas: int) -> tf.distribute.Strategy:
  """Returns the strategy of the flags."""
  if name == "tpu":
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)
  if name == "virtual_tpu":
    return virtual_tpu.VirtualTPUStrategy(num_replicas)
  return local_strategy(num_replicas)


def program() -> tuple[Any, Any]:
  """Returns the model and the optimizer.

  `tf-cross-shard convert-checkpoint --program after:program` also calls this.
  """
  layers = tf.keras.layers
  model = tf.keras.Sequential(
    [
      tf.keras.Input([digits_batches.NUM_FEATURES]),
      layers.Dense(32, "relu", name="hidden"),  # The name of the old scope.
      layers.Dense(digits_batches.NUM_CLASSES, name="logits"),
    ]
  )
  v1 = tf.compat.v1
  step = tf.Variable(0, trainable=False)  # `iterations` takes its place.
  rate = v1.train.exponential_decay(0.01, step, decay_steps=20, decay_rate=0.5)
  optimizer = v1.train.AdamOptimizer(rate)
  optimizer = v1.tpu.CrossShardOptimizer(optimizer)
  return model, migration.from_v1(optimizer, loss_averaged_over="replica")


def losses_of_before(folder: str, steps: int) -> dict[int, float]:
  """Runs `before.py` on a copy of its checkpoint; returns losses by step."""
  before = Path(__file__).with_name("before.py")
  with tempfile.TemporaryDirectory() as copy:
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    # This file contains the name of the folder that was copied.
    newest = Path(copy, "checkpoint")
    newest.write_text(newest.read_text().replace(folder, copy))
    done = subprocess.run(
      [sys.executable, before, f"--folder={copy}", f"--steps={steps}"],
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
  lines = re.findall(r"(?m)^step (\d+): loss ([\d.]+)$", done.stdout)
  return {int(step): float(loss) for step, loss in lines}


def compare(losses: dict[int, float], expected: dict[int, float]) -> str:
  """Compares the losses with those of `before.py`; returns the result as text.

  Exits the program if they differ by more than rounding.
  """
  steps = losses.keys() & expected.keys()
  if not steps:
    return "before.py has already trained further: there is nothing to compare"
  furthest = max(abs(losses[step] - expected[step]) for step in steps)
  if furthest > _ROUNDING:
    sys.exit(f"the losses differ from before.py's, by up to {furthest:.6f}")
  return (
    f"these are the losses of before.py: {len(steps)} steps, largest"
    f" difference {furthest:.6f}"
  )


def main() -> None:
  """Converts the checkpoint, trains, and prints the loss of each step."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--folder", required=True, help="Folder of checkpoints.")
  parser.add_argument("--steps", type=int, default=60, help="Train until here.")
  kinds = ["mirrored", "virtual_tpu", "tpu"]
  parser.add_argument("--strategy", default="mirrored", choices=kinds)
  parser.add_argument(
    "--replicas",
    type=int,
    default=4,
    choices=[1, 2, 4, 8, 16, 32, 64],
    help="Replicas of a mirrored strategy or a virtual TPU.",
  )
  flags = parser.parse_args()
  strategy = make_strategy(flags.strategy, flags.replicas)
  converted = os.path.join(flags.folder, "converted")
  with strategy.scope():
    model, optimizer = program()
    if tf.io.gfile.exists(f"{converted}.index"):
      optimizer.build(model.trainable_variables)
      tf.train.Checkpoint(model=model, optimizer=optimizer).read(converted)
    else:
      print(
        migration.convert_checkpoint(flags.folder, converted, model, optimizer)
      )

  def replica_step(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Runs a step on one replica; returns the mean loss of its examples."""
    logits = model(features, training=True)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
    optimizer.minimize(loss, var_list=model.trainable_variables)
    return loss

  @tf.function
  def train_step(features: Any, labels: Any) -> tf.Tensor:
    """Runs a step on all replicas; returns the mean loss of the batch."""
    losses = strategy.run(replica_step, (features, labels))
    return strategy.reduce("MEAN", losses, axis=None)

  losses = {}
  for step in range(int(optimizer.iterations.numpy()), flags.steps):
    whole = digits_batches.batch(step)
    parts = [tf.split(each, strategy.num_replicas_in_sync) for each in whole]
    shares = [
      strategy.experimental_distribute_values_from_function(
        lambda context, part=part: part[context.replica_id_in_sync_group]
      )
      for part in parts
    ]
    losses[step] = float(train_step(*shares))
    print(f"step {step}: loss {losses[step]:.6f}", flush=True)
  if losses:
    print(compare(losses, losses_of_before(flags.folder, flags.steps)))


if __name__ == "__main__":
  main()
