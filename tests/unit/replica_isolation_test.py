"""A replica alone: what it sees, and that others see nothing of it."""

import threading
from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed, tpu_tasks
from tf_cross_shard import CrossShardOptimizer
from tf_cross_shard.collectives import replica_isolation

keras = tf.keras
optimizers = keras.optimizers


def _uses_merge_calls(strategy: tf.distribute.Strategy) -> bool:
  with strategy.scope():
    internal = tf.__internal__.distribute
    return not internal.strategy_supports_no_merge_call()


def _per_replica(strategy: tf.distribute.Strategy, result: Any) -> list[float]:
  values = strategy.experimental_local_results(result)
  return [float(value) for value in values]


@pytest.mark.parametrize("eager", [False, True])
def test_sums_merges_and_assignments_stay_here(eager: bool) -> None:
  strategy = testbed.mirrored()
  aggregation = tf.VariableAggregation
  with strategy.scope():
    variables = [
      tf.Variable(0.0, aggregation=kind)
      for kind in (
        aggregation.NONE,
        aggregation.ONLY_FIRST_REPLICA,
      )
    ]

  def replica_fn() -> Any:
    mark = tf.constant([1.0, 2.0, 4.0, 8.0])[testbed.replica_id()]
    with replica_isolation.alone(strategy):
      context = tf.distribute.get_replica_context()
      total = context.all_reduce("SUM", mark)
      merged = context.merge_call(lambda _, value: 10 * value, args=(mark,))
      for variable in variables:
        variable.assign_add(mark)
    return tf.identity(total), merged, context.all_reduce("SUM", mark)

  def run() -> Any:
    return strategy.run(replica_fn)

  total, merged, _ = run() if eager else tf.function(run, autograph=False)()
  assert _per_replica(strategy, total) == [1.0, 2.0, 4.0, 8.0]
  assert _per_replica(strategy, merged) == [10.0, 20.0, 40.0, 80.0]
  for variable in variables:
    assert testbed.copies(variable) == [1.0, 2.0, 4.0, 8.0]


def test_other_threads_are_not_alone() -> None:
  strategy = testbed.mirrored()
  inside, seen = threading.Event(), threading.Event()
  answers: list[bool] = []

  def other() -> None:
    inside.wait(60)
    answers.append(_uses_merge_calls(strategy))
    seen.set()

  thread = threading.Thread(target=other)
  thread.start()

  def replica_fn() -> None:
    with replica_isolation.alone(strategy):
      internal = tf.__internal__.distribute
      answers.append(internal.strategy_supports_no_merge_call())
      with replica_isolation.alone(strategy):
        inside.set()
        assert seen.wait(60)
      answers.append(internal.strategy_supports_no_merge_call())

  strategy.run(replica_fn)
  thread.join()
  assert answers[:3] == [True, True, True]
  assert "_use_merge_call" not in vars(strategy.extended)


def test_an_answer_that_was_there_is_put_back() -> None:
  strategy = testbed.mirrored(2)
  own = lambda: True  # noqa: E731  # an attribute, as TensorFlow's tests set
  strategy.extended._use_merge_call = own
  try:

    def replica_fn() -> None:
      with replica_isolation.alone(strategy):
        internal = tf.__internal__.distribute
        assert internal.strategy_supports_no_merge_call()

    strategy.run(replica_fn)
    assert strategy.extended._use_merge_call is own
  finally:
    del strategy.extended._use_merge_call


def test_the_strategy_is_left_as_it_was() -> None:
  strategy = testbed.mirrored()
  with strategy.scope():
    weight = keras.Variable(0.0)
    optimizer = CrossShardOptimizer(optimizers.SGD(1.0))
    optimizer.build([weight])
  before = dict(vars(strategy.extended))

  def failing(gradient: Any, variable: Any, rate: Any) -> None:
    raise ArithmeticError("no update")

  strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))
  optimizer.inner_optimizer.update_step = failing
  with pytest.raises(ArithmeticError):
    strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))
  assert vars(strategy.extended) == before
  with strategy.scope():
    assert not tf.__internal__.distribute.strategy_supports_no_merge_call()
  sums = strategy.run(
    lambda: tf.distribute.get_replica_context().all_reduce(
      "SUM", tf.constant(1.0)
    )
  )
  assert [float(s) for s in strategy.experimental_local_results(sums)] == [
    4.0
  ] * 4


@pytest.mark.parametrize("in_cond", [False, True])
def test_in_one_program_nothing_is_taken_from_others(in_cond: bool) -> None:
  """A counter of ONLY_FIRST_REPLICA stays the replica's own."""
  strategy = tpu_tasks.virtual(4)
  with strategy.scope():
    counter = tf.Variable(
      0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
    )

  def replica_fn() -> Any:
    mark = tf.constant([1.0, 2.0, 4.0, 8.0])[testbed.replica_id()]

    def update() -> tf.Tensor:
      with replica_isolation.in_one_program(strategy):
        context = tf.distribute.get_replica_context()
        counter.assign_add(mark)
        extended = []

        def merge(merged: Any, value: tf.Tensor) -> tf.Tensor:
          assert merged == strategy
          extended.append(merged.extended)
          return merged.extended.broadcast_to(value, counter) * 10

        result = context.merge_call(merge, args=(mark,))
        assert extended[0].worker_devices == strategy.extended.worker_devices
        return result + context.all_reduce("SUM", mark)

    if in_cond:
      result = tf.cond(mark > 0, update, lambda: mark)
    else:
      result = update()
    return result, tf.distribute.get_replica_context().all_reduce("SUM", mark)

  result, total = strategy.run(replica_fn)
  assert _per_replica(strategy, result) == [11.0, 22.0, 44.0, 88.0]
  assert _per_replica(strategy, total) == [15.0] * 4
  assert testbed.copies(counter) == [1.0, 2.0, 4.0, 8.0]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
