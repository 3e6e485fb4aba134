"""Tests that an isolated update neither reads nor changes other replicas.

Seen from inside: a wrapped optimizer whose update does what Keras' own
updates do, and more.
"""

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer

keras = tf.keras
MARKS = [1.0, 2.0, 4.0, 8.0]
_internal = tf.__internal__.distribute


class Probing(keras.optimizers.SGD):  # type: ignore[misc,name-defined]
  """An optimizer whose update is a function of the test's."""

  def __init__(self, probe: Callable[[], None]) -> None:
    super().__init__(1.0)
    self._probe = probe

  def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
    self._probe()


def _counter(strategy: Any, **options: Any) -> tf.Variable:
  with strategy.scope():
    return tf.Variable(0.0, **options)


def _update(
  strategy: Any, probe: Callable[[], None], eager: bool = True, **options: Any
) -> None:
  """One step whose update is `probe`."""
  with strategy.scope():
    weight = keras.Variable(0.0)
    optimizer = CrossShardOptimizer(Probing(probe), **options)
    optimizer.build([weight])

  def step() -> None:
    strategy.run(lambda: optimizer.apply_gradients([(testbed.mark(), weight)]))

  (step if eager else tf.function(step, autograph=False))()
  assert int(optimizer.iterations.numpy()) == 1


def _assert_sums_again(strategy: Any) -> None:
  """Outside of an update, replicas can still exchange values."""
  sums = strategy.run(
    lambda: tf.distribute.get_replica_context().all_reduce(
      "SUM", testbed.mark()
    )
  )
  results = strategy.experimental_local_results(sums)
  assert [float(s) for s in results] == [sum(MARKS)] * 4


@pytest.mark.parametrize(
  ("engine", "eager", "options"),
  [
    ("mirrored", False, {}),
    ("mirrored", True, {}),
    ("virtual", True, {}),
    ("virtual", True, {"skip_nonfinite": True}),
  ],
)
def test_isolated_replica_changes_only_its_own_copy(
  engine: str, eager: bool, options: dict[str, Any]
) -> None:
  """On TPUs, a step that may be skipped runs inside a conditional."""
  strategy = testbed.STRATEGIES[engine]()
  only_first = tf.VariableAggregation.ONLY_FIRST_REPLICA
  summed, merged = _counter(strategy), _counter(strategy)
  counted = _counter(strategy, aggregation=only_first)

  def merge(merging: Any, value: tf.Tensor) -> tf.Tensor:
    if engine == "virtual":
      devices = strategy.extended.worker_devices
      assert merging.extended.worker_devices == devices
      value = merging.extended.broadcast_to(value, counted)
    return 10 * value

  def probe() -> None:
    context = tf.distribute.get_replica_context()
    summed.assign(context.all_reduce("SUM", testbed.mark()))
    merged.assign(context.merge_call(merge, args=(testbed.mark(),)))
    counted.assign_add(testbed.mark())

  _update(strategy, probe, eager, **options)
  assert testbed.copies(summed) == MARKS
  assert testbed.copies(merged) == [10 * mark for mark in MARKS]
  assert testbed.copies(counted) == MARKS
  _assert_sums_again(strategy)


def test_summaries_are_recorded_after_a_merge_call(
  tmp_path: pathlib.Path,
) -> None:
  """TensorFlow's contexts restore whether summaries are recorded."""
  strategy = testbed.virtual(2)

  def probe() -> None:
    context = tf.distribute.get_replica_context()
    context.merge_call(lambda _: None)

  _update(strategy, probe)
  with tf.summary.create_file_writer(str(tmp_path)).as_default(step=0):
    assert bool(tf.summary.should_record_summaries())


def test_other_threads_continue_merging() -> None:
  strategy = testbed.mirrored()
  inside, seen = threading.Event(), threading.Event()
  isolated: list[bool] = []
  elsewhere: list[bool] = []

  def other() -> None:
    inside.wait(60)
    with strategy.scope():
      elsewhere.append(_internal.strategy_supports_no_merge_call())
    seen.set()

  def probe() -> None:
    isolated.append(_internal.strategy_supports_no_merge_call())
    inside.set()
    assert seen.wait(60)

  thread = threading.Thread(target=other)
  thread.start()
  _update(strategy, probe)
  thread.join()
  assert isolated == [True] * 4
  assert elsewhere == [False]


def test_strategy_is_unchanged_after_isolation() -> None:
  strategy = testbed.mirrored()
  before = dict(vars(strategy.extended))
  _update(strategy, lambda: None)

  def fail() -> None:
    raise ArithmeticError("no update")

  with pytest.raises(ArithmeticError):
    _update(strategy, fail)
  assert vars(strategy.extended) == before
  own = lambda: False  # noqa: E731  # an attribute, as TensorFlow's tests set
  strategy.extended._use_merge_call = own
  try:
    _update(strategy, lambda: None)
    assert strategy.extended._use_merge_call is own
  finally:
    del strategy.extended._use_merge_call
  _assert_sums_again(strategy)
