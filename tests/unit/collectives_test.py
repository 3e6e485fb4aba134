"""The engine for each strategy, and those without one of their own."""

import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, collectives
from tf_cross_shard import groups as groups_lib
from tf_cross_shard.collectives import base, mirrored


def test_for_strategy() -> None:
  for strategy, engine in (
    (tf.distribute.get_strategy(), base.OneDevice),
    (tf.distribute.OneDeviceStrategy("CPU:0"), base.OneDevice),
    (testbed.mirrored(), mirrored.Mirrored),
    (tf.distribute.MirroredStrategy(["CPU:0"]), mirrored.Mirrored),
    (
      tf.compat.v1.distribute.experimental.CentralStorageStrategy(
        ["CPU:0", "CPU:1"], "CPU:0"
      ),
      base.AnyStrategy,
    ),
  ):
    found = collectives.for_strategy(strategy)
    assert type(found) is engine
    assert found.num_replicas == strategy.num_replicas_in_sync


class TestAnyStrategy:
  """MirroredStrategy stands in for a strategy that nobody knows."""

  @pytest.mark.parametrize("eager", [False, True])
  def test_sums_and_joins_over_all_replicas(self, eager: bool) -> None:
    """And a tensor that replicas share counts for each of them."""
    engine = base.AnyStrategy(testbed.mirrored())
    everyone = groups_lib.Groups([[0, 1, 2, 3]])
    shared = tf.constant(1)

    def replica_fn() -> tuple[tf.Tensor, ...]:
      mark = tf.constant([1.0, 2.0, 4.0, 8.0])[testbed.replica_id()]
      total, count = engine.all_reduce_sum([mark, shared], everyone)
      [rows] = engine.all_gather([mark[tf.newaxis]], everyone)
      return tf.identity(total), tf.identity(count), tf.reduce_sum(rows)

    def run() -> tuple[tf.Tensor, ...]:
      return engine.strategy.run(replica_fn)

    results = run() if eager else tf.function(run, autograph=False)()
    for result, expected in zip(results, (15, 4, 15), strict=True):
      copies = engine.strategy.experimental_local_results(result)
      assert [float(copy) for copy in copies] == [expected] * 4

  def test_refuses_groups(self) -> None:
    engine = base.AnyStrategy(testbed.mirrored())
    groups = groups_lib.Groups([[0, 1], [2, 3]])
    for call in (engine.all_reduce_sum, engine.all_gather):
      with pytest.raises(
        NotImplementedError,
        match=r"`group_assignment`.*MirroredStrategy.*\[\[0, 1\], \[2, 3\]\]",
      ):
        call([tf.constant([1.0])], groups)


class TestCentralStorage:
  """One variable for all replicas, and no engine of its own."""

  def test_trains_and_counts(self) -> None:
    strategy = tf.compat.v1.distribute.experimental.CentralStorageStrategy(
      ["CPU:0", "CPU:1"], "CPU:0"
    )
    with strategy.scope():
      weight = tf.Variable(0.0)
      first = tf.VariableAggregation.ONLY_FIRST_REPLICA
      step = tf.Variable(0, dtype=tf.int64, aggregation=first)
      optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(1.0))
      optimizer.build([weight])

    def replica_step() -> None:
      mark = tf.constant([1.0, 2.0])[testbed.replica_id()]
      optimizer.apply_gradients([(mark, weight)], step)

    for run in (strategy.run, tf.function(strategy.run, autograph=False)):
      run(replica_step)
    assert (float(weight.numpy()), int(step.numpy())) == (-6.0, 2)

  def test_refuses_groups_when_made(self) -> None:
    strategy = tf.compat.v1.distribute.experimental.CentralStorageStrategy(
      ["CPU:0", "CPU:1"], "CPU:0"
    )
    with (
      strategy.scope(),
      pytest.raises(NotImplementedError, match=r"\[\[0\], \[1\]\]"),
    ):
      CrossShardOptimizer("sgd", group_assignment=[[0], [1]])


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


def test_one_replica_of_a_mirrored_strategy() -> None:
  strategy = tf.distribute.MirroredStrategy(["CPU:0"])
  with strategy.scope():
    weight = tf.Variable(1.0)
    optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.build([weight])
  for run in (strategy.run, tf.function(strategy.run, autograph=False)):
    run(lambda: optimizer.minimize(lambda: 2.0 * weight, var_list=[weight]))
  assert float(weight.numpy()) == -3.0


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
