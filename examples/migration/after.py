"""`before.py` in TensorFlow 2: goes on where its checkpoint ends.

    python examples/migration/before.py --folder=/tmp/digits --steps=30
    python examples/migration/after.py --folder=/tmp/digits --steps=60

At the end `before.py` goes on from a copy of its checkpoint, and the losses are
compared: they are the same but for rounding, and the last line says so.
`--strategy=tpu` is for a TPU; the others run anywhere. What became of what:

    model_fn           a Keras model, whose variables have the same names
    optimizer          from_v1 around the same lines
    TPUEstimator       a strategy and a loop
    checkpoint         convert_checkpoint, once
"""
# bazel: deps=:before,:command_line,:digits_batches

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before the imports.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Sequence
from typing import Any, Final

import command_line
import digits_batches
import tensorflow as tf
from absl import app, flags, logging

from tf_cross_shard import migration, virtual_tpu

_FOLDER = flags.DEFINE_string("folder", None, "Of checkpoints.", required=True)
_STEPS = flags.DEFINE_integer("steps", 60, "To have made at the end.", 1)
_STRATEGY = flags.DEFINE_enum(
  "strategy", "mirrored", ["one", "mirrored", "virtual_tpu", "tpu"], "Replicas."
)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Of mirrored, virtual_tpu.", 1)
_COMPARE = flags.DEFINE_bool("compare", True, "Run before.py, too.")
# Replicas add float32 in another order than one session does.
_ROUNDING: Final = 2e-5
flags.register_validator(
  "replicas",
  lambda count: digits_batches.BATCH_SIZE % count == 0,
  f"must divide a batch of {digits_batches.BATCH_SIZE}",
)


def make_strategy() -> tf.distribute.Strategy:
  """What runs the replicas."""
  if _STRATEGY.value == "tpu":
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)
  if _STRATEGY.value == "virtual_tpu":
    return virtual_tpu.VirtualTPUStrategy(_REPLICAS.value)
  cpus = [f"CPU:{i}" for i in range(_REPLICAS.value)]
  tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * len(cpus),
  )
  if _STRATEGY.value == "one":
    return tf.distribute.OneDeviceStrategy(cpus[0])
  return tf.distribute.MirroredStrategy(cpus)


def program() -> tuple[Any, Any]:
  """Model and optimizer: `convert-checkpoint --program after:program`."""
  layers = tf.keras.layers
  model = tf.keras.Sequential(
    [
      tf.keras.Input([digits_batches.NUM_FEATURES]),
      layers.Dense(32, "relu", name="hidden"),  # Names of the scopes.
      layers.Dense(digits_batches.NUM_CLASSES, name="logits"),
    ]
  )
  v1 = tf.compat.v1
  step = tf.Variable(0, trainable=False)  # From now on it is `iterations`.
  rate = v1.train.exponential_decay(0.2, step, decay_steps=20, decay_rate=0.5)
  optimizer = v1.train.MomentumOptimizer(rate, momentum=0.9)
  optimizer = v1.tpu.CrossShardOptimizer(optimizer)
  return model, migration.from_v1(optimizer, loss_averaged_over="replica")


def losses_of_before() -> dict[int, float]:
  """Returns what `before.py` prints when it goes on itself, by step."""
  before = Path(__file__).with_name("before.py")
  with tempfile.TemporaryDirectory() as copy:
    shutil.copytree(_FOLDER.value, copy, dirs_exist_ok=True)
    newest = Path(copy, "checkpoint")  # It names the folder that it lay in.
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
  """Returns how far the losses are from those of `before.py`, if not far."""
  expected = losses_of_before()
  steps = losses.keys() & expected.keys()
  if not steps:
    return "before.py has gone further itself: there is nothing to compare"
  furthest = max(abs(losses[step] - expected[step]) for step in steps)
  if furthest > _ROUNDING:
    sys.exit(f"the losses differ from before.py's, by up to {furthest:.6f}")
  return (
    f"these are the losses of before.py: {len(steps)} steps, the largest"
    f" difference is {furthest:.6f}"
  )


def main(argv: Sequence[str]) -> None:
  """Converts, trains, and prints the loss of every step."""
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
    """One replica's part of a step, with the mean loss of its own examples."""
    logits = model(features, training=True)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
    optimizer.minimize(loss, var_list=model.trainable_variables)
    return loss

  @tf.function
  def train_step(features: Any, labels: Any) -> tf.Tensor:
    """A step of all replicas; answers the loss of the whole batch."""
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
