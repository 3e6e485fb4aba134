"""Trains on handwritten digits on a TPU, or on a virtual TPU on this CPU.

    python examples/tpu.py --virtual=8 --groups=2
    python examples/tpu.py --tpu=local --groups=2    # on the machine of a TPU

Both run the replicas as one XLA program. Before the training, the TPU compiler
reports what the replicas exchange in a step. This report needs no TPU.
"""

from typing import Any

import command_line  # First: it makes TensorFlow quiet.
import digits_dataset
import replicas
import tensorflow as tf

from tf_cross_shard import CrossShardOptimizer, callbacks, groups, virtual_tpu

FLAGS = command_line.parse(
  __doc__,
  tpu=(None, "Name or address of a TPU; 'local' on the machine of the TPU."),
  virtual=(8, "Replicas of a virtual TPU, without --tpu."),
  groups=(1, "Number of groups; divides the number of replicas."),
  topology=("v5e:4x2", "TPU slice of the report, one device for each replica."),
  epochs=(15, "Number of epochs."),
  data_dir=(None, "Folder for the prepared data, instead of your cache."),
)


def make_strategy() -> tf.distribute.Strategy:
  """Returns a strategy on the TPU of the flags, or on a virtual TPU."""
  if FLAGS.tpu is None:
    return virtual_tpu.VirtualTPUStrategy(FLAGS.virtual)
  resolver = tf.distribute.cluster_resolver.TPUClusterResolver(FLAGS.tpu)
  tf.config.experimental_connect_to_cluster(resolver)
  tf.tpu.experimental.initialize_tpu_system(resolver)
  return tf.distribute.TPUStrategy(resolver)


def make_model(strategy: tf.distribute.Strategy, steps: int) -> Any:
  """Returns a compiled model, with the same initial weights in each call."""
  tf.keras.utils.set_random_seed(0)
  count = strategy.num_replicas_in_sync
  with strategy.scope():
    model = digits_dataset.make_model()
    rate = tf.keras.optimizers.schedules.CosineDecay(0.002, steps)
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(rate),
      group_assignment=groups.contiguous(count, count // FLAGS.groups),
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
  return model


def report(num_replicas: int, batch: Any) -> Any:
  """Returns the TPU compiler's report on a step, or why there is no report."""
  # Compile the step of a separate model, on a virtual TPU.
  strategy = virtual_tpu.VirtualTPUStrategy(num_replicas)
  step = make_model(strategy, 1).train_step
  try:
    return virtual_tpu.compile_for(
      FLAGS.topology, step, [batch], strategy=strategy
    )
  except (ImportError, ValueError) as error:  # It says what to install or pass.
    return f"No report: {error}"


def main() -> None:
  """Prints the compiler's report, and trains."""
  strategy = make_strategy()
  count = strategy.num_replicas_in_sync
  batch_size = replicas.divisible(64, count)
  train, test = digits_dataset.load(batch_size, FLAGS.data_dir)
  share = train.unbatch().batch(batch_size // count, drop_remainder=True)
  print(f"{report(count, share.element_spec)}\n")

  model = make_model(strategy, FLAGS.epochs * len(train))
  print(f"{model.optimizer.groups.draw()}\n")
  history = model.fit(
    train.repeat(),
    epochs=FLAGS.epochs,
    steps_per_epoch=len(train),
    shuffle=False,  # The dataset is shuffled already.
    verbose=0,
    callbacks=[callbacks.PerModelMetrics(test)],
  ).history
  for name, values in history.items():
    if name.startswith("val_accuracy/"):  # Of each group, and of their mean.
      print(f"{name} {values[-1]:.2%}")


if __name__ == "__main__":
  main()
