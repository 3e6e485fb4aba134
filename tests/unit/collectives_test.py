"""The engine for each strategy, and those without one of their own."""

import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, collectives
from tf_cross_shard.collectives import base, mirrored


def test_for_strategy() -> None:
  for strategy, engine in (
    (tf.distribute.get_strategy(), base.OneDevice),
    (tf.distribute.OneDeviceStrategy("CPU:0"), base.OneDevice),
    (testbed.mirrored(), mirrored.Mirrored),
    (tf.distribute.MirroredStrategy(["CPU:0"]), mirrored.Mirrored),
  ):
    found = collectives.for_strategy(strategy)
    assert type(found) is engine
    assert found.num_replicas == strategy.num_replicas_in_sync


def test_strategies_without_synchronous_replicas_are_refused() -> None:
  strategy = tf.compat.v1.distribute.experimental.CentralStorageStrategy(
    ["CPU:0", "CPU:1"], "CPU:0"
  )
  with (
    strategy.scope(),
    pytest.raises(NotImplementedError, match=r"CentralStorage.*not known"),
  ):
    CrossShardOptimizer("sgd")


def test_one_worker_of_a_multi_worker_strategy_accumulates() -> None:
  strategy = tf.distribute.MultiWorkerMirroredStrategy()
  assert strategy.num_replicas_in_sync == 1
  with strategy.scope():
    weight = tf.Variable(0.0)
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    )
    optimizer.build([weight])

  @tf.function(autograph=False)
  def step() -> None:
    strategy.run(lambda: optimizer.apply([tf.constant(2.0)], [weight]))

  for expected in (0.0, -2.0, -2.0, -4.0):
    step()
    assert float(weight.numpy()) == expected


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
