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

from collections.abc import Sequence
from typing import Any, Final

import command_line
import digits_batches
import tensorflow as tf
from absl import app, flags, logging

from tf_cross_shard import local_strategy, migration, virtual_tpu

_FOLDER = flags.DEFINE_string(
  "folder", None, "Folder of checkpoints.", required=True
)
_STEPS = flags.DEFINE_integer("steps", 60, "Train until this step.", 1)
_STRATEGY = flags.DEFINE_enum(
  "strategy", "mirrored", ["one", "mirrored", "virtual_tpu", "tpu"], "Strategy."
)
_REPLICAS = flags.DEFINE_integer(
  "replicas", 4, "For mirrored and virtual_tpu.", 1
)
_COMPARE = flags.DEFINE_bool("compare", True, "Also run before.py.")
# Several replicas add float32 numbers in a different order.
_ROUNDING: Final = 2e-5
flags.register_validator(
  "replicas",
  lambda count: digits_batches.BATCH_SIZE % count == 0,
  f"must divide a batch of {digits_batches.BATCH_SIZE}",
)


def make_strategy() -> tf.distribute.Strategy:
  """Returns the strategy of the flags."""
  if _STRATEGY.value == "tpu":
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)
  if _STRATEGY.value == "virtual_tpu":
    return virtual_tpu.VirtualTPUStrategy(_REPLICAS.value)
  if _STRATEGY.value == "one":
    return tf.distribute.OneDeviceStrategy("CPU:0")
  return local_strategy(_REPLICAS.value)


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
  rate = v1.train.exponential_decay(0.2, step, decay_steps=20, decay_rate=0.5)
  optimizer = v1.train.MomentumOptimizer(rate, momentum=0.9)
  optimizer = v1.tpu.CrossShardOptimizer(optimizer)
  return model, migration.from_v1(optimizer, loss_averaged_over="replica")


def losses_of_before() -> dict[int, float]:
  """Runs `before.py` on a copy of its checkpoint; returns losses by step."""
  before = Path(__file__).with_name("before.py")
  with tempfile.TemporaryDirectory() as copy:
    shutil.copytree(_FOLDER.value, copy, dirs_exist_ok=True)
    # This file contains the name of the folder that was copied.
    newest = Path(copy, "checkpoint")
    paths = newest.read_text(encoding="utf-8").replace(_FOLDER.value, copy)
    newest.write_text(paths, encoding="utf-8")
    done = subprocess.run(
      [sys.executable, before, f"--folder={copy}", f"--steps={_STEPS.value}"],
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
  lines = re.findall(r"(?m)^step (\d+): loss ([\d.]+)$", done.stdout)
  return {int(step): float(loss) for step, loss in lines}


def compare(losses: dict[int, float]) -> str:
  """Compares the losses with `before.py`; returns the result as text.

  Exits the program if they differ by more than rounding.
  """
  expected = losses_of_before()
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


def main(argv: Sequence[str]) -> None:
  """Converts the checkpoint, trains, and prints the loss of each step."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  logging.set_verbosity(logging.ERROR)
  strategy = make_strategy()
  converted = os.path.join(_FOLDER.value, "converted")
  with strategy.scope():
    model, optimizer = program()
    if tf.io.gfile.exists(f"{converted}.index"):
      optimizer.build(model.trainable_variables)
      tf.train.Checkpoint(model=model, optimizer=optimizer).read(converted)
    else:
      done = migration.convert_checkpoint(
        _FOLDER.value, converted, model, optimizer
      )
      print(done)

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
  for step in range(int(optimizer.iterations.numpy()), _STEPS.value):
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
  if _COMPARE.value and losses:
    print(compare(losses))


if __name__ == "__main__":
  command_line.run(main)
