"""Trains on handwritten digits in a session, as a TensorFlow 1 program did.

    python examples/migration/before.py --folder=/tmp/digits --steps=30
    python examples/migration/before.py --folder=/tmp/digits --steps=60

The second command resumes from the checkpoint of the first. `after.py` is the
same program in TensorFlow 2, and resumes from that checkpoint, too.

This program runs in TensorFlow 2.21, which lacks two parts of TensorFlow 1. It
replaces them with its own code: `main` has the loop in which TPUEstimator
called `model_fn`, and `dense` makes variables of the same names as
tf.layers.dense.
"""

import os

# TensorFlow reads these variables when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import command_line
import digits_batches
import tensorflow.compat.v1 as tf
from absl import app, flags, logging

_FOLDER = flags.DEFINE_string(
  "folder", None, "Folder of checkpoints.", required=True
)
_STEPS = flags.DEFINE_integer("steps", 30, "Train until this step.", 1)
_USE_TPU = flags.DEFINE_bool(
  "use_tpu", False, "Sum gradients over the shards of a TPU. Needs a TPU."
)


class EstimatorSpec(NamedTuple):
  """The result of a model function."""

  mode: str
  loss: Any
  train_op: Any


def dense(x: Any, units: int, name: str) -> Any:
  """Makes a dense layer with the variables of tf.layers.dense."""
  with tf.variable_scope(name):
    kernel = tf.get_variable(
      "kernel",
      [x.shape[1], units],
      initializer=tf.glorot_uniform_initializer(seed=units),
    )
    bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
  return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def model_fn(
  features: Any, labels: Any, mode: str, params: Mapping[str, Any]
) -> EstimatorSpec:
  """Makes the network, the loss and the optimizer."""
  hidden = tf.nn.relu(dense(features, params["units"], "hidden"))
  logits = dense(hidden, digits_batches.NUM_CLASSES, "logits")
  loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
  global_step = tf.train.get_or_create_global_step()
  rate = tf.train.exponential_decay(
    params["rate"], global_step, decay_steps=20, decay_rate=0.5
  )
  optimizer = tf.train.MomentumOptimizer(rate, momentum=0.9)
  if _USE_TPU.value:
    optimizer = tf.tpu.CrossShardOptimizer(optimizer)
  train_op = optimizer.minimize(loss, global_step=global_step)
  return EstimatorSpec(mode, loss, train_op)


def main(argv: Sequence[str]) -> None:
  """Trains, prints the loss of each step, and saves a checkpoint."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}")
  logging.set_verbosity(logging.ERROR)
  tf.disable_v2_behavior()
  features = tf.placeholder(tf.float32, [None, digits_batches.NUM_FEATURES])
  labels = tf.placeholder(tf.int32, [None])
  params = {"units": 32, "rate": 0.2}
  spec = model_fn(features, labels, "train", params)
  global_step = tf.train.get_global_step()
  with tf.train.MonitoredTrainingSession(
    checkpoint_dir=_FOLDER.value,
    hooks=[tf.train.StopAtStepHook(last_step=_STEPS.value)],
    save_checkpoint_steps=_STEPS.value,
    save_summaries_steps=None,
    save_summaries_secs=None,
    log_step_count_steps=None,
  ) as session:
    step = session.run(global_step)  # From the checkpoint, if there is one.
    while not session.should_stop():
      pixels, answers = digits_batches.batch(step)
      loss, _ = session.run(
        [spec.loss, spec.train_op], {features: pixels, labels: answers}
      )
      print(f"step {step}: loss {loss:.6f}")
      step += 1


if __name__ == "__main__":
  command_line.run(main)
