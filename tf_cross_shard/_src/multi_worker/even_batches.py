"""Gives every worker the same number of batches.

Otherwise, workers would wait forever for one whose data has ended. A `0` is a
batch whose examples have the weight 0:

    data of              mode="stop"        mode="pad"
    worker 0   b b b           b b b              b b b 0 0
    worker 1   b b b b b       b b b              b b b b b
"""

from typing import Any, Literal

import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import workers as workers_lib


def even(
  dataset: tf.data.Dataset,
  strategy: tf.distribute.Strategy,
  mode: Literal["stop", "pad"] = "stop",
) -> tf.data.Dataset:
  """Gives every worker the same number of batches.

  Call it on all workers, each with its own data. This example has one worker:

  >>> import tensorflow as tf
  >>> from tf_cross_shard.multi_worker import even
  >>> batches = tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [3.0, 4.0]))
  >>> strategy = tf.distribute.get_strategy()
  >>> [(x, y, weights)] = even(batches.batch(2), strategy, mode="pad")
  >>> weights.numpy().tolist()
  [1.0, 1.0]

  Args:
    dataset: The batches of this worker, already sharded. If TensorFlow does not
      know the cardinality of the dataset, `even` counts the batches, which
      reads all of them once. To avoid this, set the cardinality with
      `tf.data.experimental.assert_cardinality`.
    strategy: The strategy of the workers.
    mode: `"stop"` (the default) ends every worker's data after as many batches
      as the shortest has. `"pad"` continues to the end of the longest: a worker
      whose data has ended repeats its first batch with sample weights of 0. Its
      replicas then contribute zeros, but still count in the mean over all
      replicas, so the mean becomes smaller. Elements must be `(x, y)` or
      `(x, y, sample_weight)`, and all of them get sample weights of shape
      `[batch]`.

  Returns:
    A dataset with a known `len`, which TensorFlow does not shard again. Pass
    `strategy.distribute_datasets_from_function(lambda _: data.repeat())` to
    `fit`, with `steps_per_epoch=len(data)`.

  Raises:
    ValueError: If `mode` is unknown or differs between workers, or if a worker
      has no batch or endless batches. All workers raise the error.
    MissingWorkerError: If another worker does not call `even` in time.
  """
  if mode not in ("stop", "pad"):
    raise ValueError(f"`mode` must be 'stop' or 'pad'; got {mode!r}.")
  # The number of batches; -1 for an endless dataset.
  length = int(dataset.cardinality())
  if length == tf.data.UNKNOWN_CARDINALITY:
    length = int(dataset.reduce(tf.constant(0, tf.int64), lambda n, _: n + 1))
  # Every worker learns the mode and the length of every other worker.
  workers = workers_lib.of_strategy(strategy)
  texts = [f"{mode} {length}"]
  if workers is not None:
    texts = workers_lib.exchange(workers, "even()", texts[0])
  modes, counts = zip(*(text.split() for text in texts), strict=True)
  if len(set(modes)) > 1:
    raise ValueError(f"`mode` must be the same on all workers; got {modes}.")
  lengths = list(map(int, counts))
  if min(lengths) < 1:
    raise ValueError(
      f"`dataset` must have an end and a batch on each worker; got {lengths}"
      " batches (-1 is endless). Use take() or repeat()."
    )
  common = min(lengths) if mode == "stop" else max(lengths)
  if len(set(lengths)) > 1:
    logging.warning("Workers have %s batches; all run %d.", lengths, common)
  # Repeat, because a dataset that drops examples at random may be shorter in
  # the next epoch than it was when it was counted.
  batches = dataset.repeat()
  if mode == "pad":
    # This worker's batches, then its first batch repeated forever with sample
    # weights of 0.
    more = dataset.take(1).cache().repeat().map(_weighted(0.0))
    batches = batches.take(length).map(_weighted(1.0)).concatenate(more)
  # Cut to the common length, which `len` then knows without reading.
  known = tf.data.experimental.assert_cardinality(common)
  options = tf.data.Options()
  options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.OFF
  )
  return batches.take(common).apply(known).with_options(options)


def _weighted(weight: float) -> Any:
  """Returns a function that multiplies the sample weights of a batch."""

  def weigh(x: Any, y: Any, sample_weight: Any = None) -> Any:
    if sample_weight is None:
      sample_weight = tf.ones(tf.shape(tf.nest.flatten(x)[0])[:1])
    return x, y, sample_weight * tf.cast(weight, sample_weight.dtype)

  return weigh
