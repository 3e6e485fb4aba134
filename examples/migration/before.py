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

import argparse
import os

# TensorFlow reads these variables when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from collections.abc import Mapping
from typing import Any, NamedTuple

import digits_batches
import tensorflow.compat.v1 as tf


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
  optimizer = tf.train.AdamOptimizer(rate)
  if params["use_tpu"]:
    optimizer = tf.tpu.CrossShardOptimizer(optimizer)
  train_op = optimizer.minimize(loss, global_step=global_step)
  return EstimatorSpec(mode, loss, train_op)


def main() -> None:
  """Trains, prints the loss of each step, and saves a checkpoint."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--folder", required=True, help="Folder of checkpoints.")
  parser.add_argument("--steps", type=int, default=30, help="Train until here.")
  parser.add_argument("--use_tpu", action="store_true", help="Needs a TPU.")
  flags = parser.parse_args()
  tf.logging.set_verbosity(tf.logging.ERROR)
  tf.disable_v2_behavior()
  features = tf.placeholder(tf.float32, [None, digits_batches.NUM_FEATURES])
  labels = tf.placeholder(tf.int32, [None])
  params = {"units": 32, "rate": 0.01, "use_tpu": flags.use_tpu}
  spec = model_fn(features, labels, "train", params)
  global_step = tf.train.get_global_step()
  with tf.train.MonitoredTrainingSession(
    checkpoint_dir=flags.folder,
    hooks=[tf.train.StopAtStepHook(last_step=flags.steps)],
    save_checkpoint_steps=flags.steps,
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
  main()
