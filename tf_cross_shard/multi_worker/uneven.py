"""The same number of batches on all workers.

In a step all workers wait for each other; a worker whose data has ended leaves
the others waiting. The lengths are compared once, before the training:

    worker 0   b b b         "stop"   b b b      "pad"   b b b 0 0
    worker 1   b b b b b              b b b              b b b b b
"""

from typing import Any

import tensorflow as tf
from absl import logging

from tf_cross_shard.coordination import agreement


def even(
  dataset: tf.data.Dataset,
  strategy: tf.distribute.Strategy,
  mode: str = "stop",
) -> tf.data.Dataset:
  """Returns a dataset that has as many batches on each worker.

  All workers call it, with the data of their own. On one worker:

  >>> import tensorflow as tf
  >>> batches = tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [3.0, 4.0]))
  >>> strategy = tf.distribute.get_strategy()
  >>> [(x, y, weights)] = even(batches.batch(2), strategy, mode="pad")
  >>> weights.numpy().tolist()
  [1.0, 1.0]

  Args:
    dataset: This worker's batches, not sharded any more. Its cardinality is its
      length; where TensorFlow does not know it, the batches are counted, which
      reads all once, so that they must have an end:
      `tf.data.experimental.assert_cardinality` saves that.
    strategy: The strategy of the workers.
    mode: `"stop"` ends all with the shortest. `"pad"` goes on to the end of the
      longest: elements, which are `(x, y)` or `(x, y, sample_weight)`, all get
      weights, one per example, and a worker whose data has ended repeats its
      first batch with weights of 0. So it adds nothing to the sums, and a mean
      is still that over all replicas.

  Returns:
    The dataset, of known `len`, which is not sharded again. To `fit` hand in
    `strategy.distribute_datasets_from_function(lambda _: data.repeat())` with
    `steps_per_epoch=len(data)`.

  Raises:
    ValueError: If `mode` is unknown or not the same everywhere, or a worker has
      no batch or endless ones. On all workers alike.
    MissingWorkerError: If another worker does not call it.
  """
  if mode not in ("stop", "pad"):
    raise ValueError(f"`mode` must be 'stop' or 'pad'; got {mode!r}.")
  length = int(dataset.cardinality())
  if length == tf.data.UNKNOWN_CARDINALITY:
    length = int(dataset.reduce(tf.constant(0, tf.int64), lambda n, _: n + 1))
  workers = agreement.of_strategy(strategy)
  texts = [f"{mode} {length}"]
  if workers is not None:
    texts = agreement.exchange(workers, "even()", texts[0])
  modes, counts = zip(*(text.split() for text in texts), strict=True)
  if len(set(modes)) > 1:
    raise ValueError(f"`mode` must be the same on all workers; got {modes}.")
  lengths = list(map(int, counts))
  if min(lengths) < 1:  # An endless dataset has a cardinality of -1.
    raise ValueError(
      f"`dataset` must have an end and a batch on each worker; got {lengths}"
      " batches (-1 is endless). Use take() or repeat()."
    )
  common = min(lengths) if mode == "stop" else max(lengths)
  if len(set(lengths)) > 1:
    logging.warning("Workers have %s batches; all run %d.", lengths, common)
  # Repeated, as a dataset that drops examples at random may be shorter then.
  own = dataset.repeat()
  if mode == "pad":
    more = dataset.take(1).cache().repeat().map(_weighted(0.0))
    own = own.take(length).map(_weighted(1.0)).concatenate(more)
  known = tf.data.experimental.assert_cardinality(common)
  options = tf.data.Options()
  options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.OFF
  )
  return own.take(common).apply(known).with_options(options)


def _weighted(weight: float) -> Any:
  """Returns a function that multiplies the weights of examples."""

  def weigh(x: Any, y: Any, sample_weight: Any = None) -> Any:
    if sample_weight is None:
      sample_weight = tf.ones(tf.shape(tf.nest.flatten(x)[0])[:1])
    return x, y, sample_weight * tf.cast(weight, sample_weight.dtype)

  return weigh
