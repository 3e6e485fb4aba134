"""Two threads that train under one strategy do not share collectives."""

import threading
from typing import Any

import keras
import pytest
import tensorflow as tf

from tf_cross_shard import keras3

STEPS = 30


def make_step(strategy: Any, slope: float) -> tuple[Any, Any]:
  """A step whose reduction is inside `tf.cond`, where it is a collective."""
  with strategy.scope():
    weight = tf.Variable(0.0)
    optimizer = keras3.CrossShardOptimizer(
      keras.optimizers.SGD(1.0), loss_averaged_over="global"
    )
    optimizer.build([weight])

  @tf.function
  def step(always: tf.Tensor) -> None:
    def replica_step(always: tf.Tensor) -> None:
      replica = tf.distribute.get_replica_context().replica_id_in_sync_group
      grad = slope * (1.0 + tf.cast(replica, tf.float32))  # 1 and 2, sum 3

      def apply() -> tf.Tensor:
        return tf.cast(optimizer.apply_gradients([(grad, weight)]), tf.int32)

      tf.cond(always, apply, lambda: tf.constant(0))

    strategy.run(replica_step, args=(always,))

  return step, weight


@pytest.mark.timeout(120)
def test_gradients_of_two_threads_are_not_added_up() -> None:
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  assert strategy.num_replicas_in_sync == 2
  slopes = (1.0, 16.0)
  made = [make_step(strategy, slope) for slope in slopes]
  for step, _ in made:  # Traced one after the other.
    step(tf.constant(True))
  errors: list[Exception] = []

  def run(step: Any) -> None:
    try:
      for _ in range(STEPS - 1):
        step(tf.constant(True))
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=run, args=(step,)) for step, _ in made]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert errors == []
  for (_, weight), slope in zip(made, slopes, strict=True):
    copies = strategy.experimental_local_results(weight)
    assert [float(copy.numpy()) for copy in copies] == [
      -3.0 * slope * STEPS
    ] * 2


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
