"""Trains on handwritten digits in several processes, on one machine or many.

    python examples/multi_worker.py --workers=2
    python examples/multi_worker.py --workers=4 --groups=2 --wire_dtype=bfloat16

These commands start several workers on this machine. Each line that a worker
prints begins with the number of the worker, such as `[worker 1]`. If TF_CONFIG
is set, or if srun starts the program, the process is one worker of a cluster,
and `--workers` has no effect. See docs/multi_worker.md for how to start it.

At the end, a table shows a digest of the weights of each replica. The replicas
of a group have equal digests, because their weights are exactly equal.

With `--backup=FOLDER`, a killed worker costs at most one epoch. The other
workers end with an error that names the killed worker. The same command then
resumes from the last epoch that all workers have saved, and ends with the
digests of an uninterrupted run.
"""

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import command_line  # First: it makes TensorFlow quiet.
import digits_dataset
import numpy as np
import tensorflow as tf

from tf_cross_shard import CrossShardOptimizer, Models, multi_worker
from tf_cross_shard import groups as groups_lib
from tf_cross_shard_cli import launch

FLAGS = command_line.parse(
  __doc__,
  workers=(2, "Workers on this machine."),
  groups=(1, "Number of groups."),
  wire_dtype=(None, "bfloat16 or float16: how workers send gradients."),
  epochs=(15, "Number of epochs."),
  batch_size=(48, "Images in each step, for all replicas together."),
  backup=(None, "Folder for a backup after each epoch, to resume from."),
  seed=(0, "Seed of the weights and of the order of the images."),
  data_dir=(None, "Folder for the prepared data, instead of your cache."),
)


def slurm_resolver() -> Any:
  """Returns a resolver of the workers that srun started, on CPUs.

  TensorFlow's resolver asks nvidia-smi for GPUs and fails if there is none. So
  this function tells it that each task has a GPU, and uses only the addresses
  that it finds.
  """
  resolvers = tf.distribute.cluster_resolver
  slurm = resolvers.SlurmClusterResolver(
    gpus_per_node=int(os.environ["SLURM_STEP_NUM_TASKS"]),
    gpus_per_task=1,
    auto_set_gpu=False,
    # Each job has its own ports, because two jobs may share a machine.
    port_base=10000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 20000,
  )
  cluster = slurm.cluster_spec()  # This also sets task_type and task_id.
  return resolvers.SimpleClusterResolver(
    cluster, "", slurm.task_type, slurm.task_id, rpc_layer="grpc"
  )


def batches(images: Any, labels: Any, optimizer: Any) -> tf.data.Dataset:
  """Returns endless batches for `fit`, in a new order in each epoch.

  The order depends only on the seed and the epoch. The dataset starts with the
  epoch that the optimizer has reached when `fit` asks for the first batch. So a
  resumed run sees the same batches as an uninterrupted run.
  """
  steps = len(labels) // FLAGS.batch_size

  def orders() -> Iterator[np.ndarray]:
    for epoch in itertools.count(int(optimizer.iterations.numpy()) // steps):
      rng = np.random.default_rng([FLAGS.seed, epoch])
      yield rng.permutation(len(labels))[: steps * FLAGS.batch_size]

  indices = tf.data.Dataset.from_generator(
    orders, output_signature=tf.TensorSpec([None], tf.int64)
  )
  data = indices.unbatch().batch(FLAGS.batch_size, drop_remainder=True)
  data = data.map(lambda rows: [tf.gather(x, rows) for x in (images, labels)])
  # Each worker makes all batches and uses its own part of each batch.
  options = tf.data.Options()
  options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
  )
  return data.with_options(options)


def check_flags(num_replicas: int) -> None:
  """Exits unless groups and batches divide among the replicas."""
  if num_replicas % FLAGS.groups or FLAGS.batch_size % num_replicas:
    sys.exit(
      f"--groups must divide {num_replicas}, the replicas of all workers, and"
      f" {num_replicas} must divide --batch_size; got {FLAGS.groups} and"
      f" {FLAGS.batch_size}."
    )


def train(resolver: Any = None) -> None:
  """Trains as one worker. The first worker prints the results of all."""
  strategy = multi_worker.MultiWorkerStrategy(resolver)
  num_replicas = strategy.num_replicas_in_sync
  check_flags(num_replicas)
  groups = groups_lib.contiguous(num_replicas, num_replicas // FLAGS.groups)
  is_first = strategy.extended.should_checkpoint  # Only the first worker.

  train_data, test_data = digits_dataset.load(1, FLAGS.data_dir, FLAGS.seed)
  images, labels = next(iter(train_data.unbatch().batch(len(train_data))))
  # After the data, since preparing the data consumes random numbers.
  tf.keras.utils.set_random_seed(FLAGS.seed)
  tf.config.experimental.enable_op_determinism()
  with strategy.scope():
    model = digits_dataset.make_model()
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(0.002),
      group_assignment=groups,
      wire_dtype=FLAGS.wire_dtype,
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
  callbacks = []
  if FLAGS.backup:
    callbacks = [
      multi_worker.BackupAndRestore(FLAGS.backup, delete_checkpoint=False)
    ]
  start = time.perf_counter()
  with multi_worker.naming_lost_workers():
    model.fit(
      batches(images, labels, optimizer),
      epochs=FLAGS.epochs,
      steps_per_epoch=len(labels) // FLAGS.batch_size,
      shuffle=False,  # The dataset is shuffled already.
      verbose=2 if is_first else 0,
      callbacks=callbacks,
    )
  seconds = time.perf_counter() - start
  # All workers call `report`, because it collects their weights.
  rows = report(model, test_data, seconds)
  if is_first:
    print(f"\n{groups.draw()}\n\n" + "\n".join(rows), flush=True)


def report(model: Any, test: tf.data.Dataset, seconds: float) -> list[str]:
  """Returns a table with each group's test accuracy and digest of weights.

  Keras' `evaluate` would mix groups, and `model.get_weights` reads only this
  worker's first replica.
  """
  [(images, labels)] = test
  # Outside the scope of the strategy, so the model belongs to this process.
  twin = digits_dataset.make_model()
  rows = ["group  test accuracy  seconds  digest of the weights"]
  models = Models(model)
  values = [models.values(weight) for weight in model.weights]
  for i, weights in enumerate(zip(*values, strict=True)):
    twin.set_weights(weights)
    classes = np.argmax(twin(images, training=False), axis=-1)
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights))
    rows.append(
      f"{i:<5}  {np.mean(classes == labels.numpy()):>13.2%}"
      f"  {seconds:>7.1f}  {digest.hexdigest()[:8]}"
    )
  return rows


def main() -> None:
  """Runs one worker, or starts all workers."""
  if "TF_CONFIG" in os.environ:
    train()
  elif "SLURM_STEP_NUM_TASKS" in os.environ:
    train(slurm_resolver())
  else:
    # Check here, so that a mistake is reported once and not by each worker. A
    # worker has all GPUs, or one CPU.
    gpus = len(tf.config.list_physical_devices("GPU"))
    check_flags(FLAGS.workers * max(1, gpus))
    sys.exit(
      launch.launch([sys.executable, __file__, *sys.argv[1:]], FLAGS.workers)
    )


if __name__ == "__main__":
  main()
