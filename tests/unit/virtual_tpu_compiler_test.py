"""The real TPU compiler, on steps of both forms."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, virtual_tpu
from tf_cross_shard.virtual_tpu import hlo

TOPOLOGY = "v5e:2x2"
N = 4
PAIRS = [[0, 1], [2, 3]]


def _step(grouping: Any = None) -> tuple[Any, Any]:
  """A training step's function for one replica, and its weights."""
  with testbed.virtual(N).scope():
    weights = tf.Variable(tf.ones([6, 3]))
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(0.1), group_assignment=grouping
    )
    optimizer.build([weights])

  def step(x: tf.Tensor) -> None:
    optimizer.minimize(
      lambda: tf.reduce_mean((x @ weights) ** 2), var_list=[weights]
    )

  return step, weights


def _sum_of(*groups: tuple[int, ...]) -> tuple[hlo.Collective, ...]:
  return (hlo.Collective("all-reduce", "f32", ((6, 3),), 72, groups),)


@pytest.mark.parametrize(
  ("grouping", "groups"),
  [(None, [(0, 1, 2, 3)]), (PAIRS, [(0, 1), (2, 3)])],
)
def test_both_forms_of_a_step(grouping: Any, groups: Any) -> None:
  strategy = testbed.virtual(N)
  step, weights = _step(grouping)

  def on_host(x: tf.Tensor) -> None:
    strategy.run(step, (x,))

  x = np.ones([2, 6], np.float32)
  for fn, arg in (
    (step, tf.TensorSpec([2, 6], tf.float32)),
    (on_host, x),
    (tf.function(step), tf.constant(x)),
    (tf.function(on_host), x),
  ):
    report = virtual_tpu.compile_for(TOPOLOGY, fn, [arg], strategy=strategy)
    assert report.collectives == _sum_of(*groups)
    assert report.wire_bytes == 72
    assert (report.topology, report.num_replicas) == (TOPOLOGY, N)
  assert report.flops > 0
  assert "all-reduce" in report.hlo_text
  # Nothing ran.
  assert [copy.tolist() for copy in testbed.copies(weights)] == [
    [[1.0] * 3] * 6
  ] * N


def test_where_the_strategy_comes_from() -> None:
  strategy = testbed.virtual(N)
  step, _ = _step()
  spec = tf.TensorSpec([2, 6], tf.float32)
  with strategy.scope():
    inside = virtual_tpu.compile_for(TOPOLOGY, step, [spec])
  called = virtual_tpu.compile_for(
    TOPOLOGY, lambda x: strategy.run(step, (x,)), [spec]
  )
  assert inside.collectives == called.collectives == _sum_of((0, 1, 2, 3))

  def total(x: tf.Tensor, factor: float) -> tf.Tensor:
    return factor * tf.distribute.get_replica_context().all_reduce("SUM", x)

  new = virtual_tpu.compile_for(
    TOPOLOGY, total, [tf.TensorSpec([6, 3]), 2.0], num_replicas=N
  )
  assert new.collectives == _sum_of((0, 1, 2, 3))


def test_compiled_again_after_it_ran() -> None:
  strategy = testbed.virtual(N)
  step, weights = _step(PAIRS)
  on_host = tf.function(lambda x: strategy.run(step, (x,)))
  x = testbed.per_replica(
    strategy, [np.full([2, 6], i, np.float32) for i in range(N)]
  )
  on_host(x)
  trained = testbed.copies(weights)
  assert not np.array_equal(trained[0], trained[2])
  spec = tf.TensorSpec([2, 6], tf.float32)
  report = virtual_tpu.compile_for(TOPOLOGY, step, [spec], strategy=strategy)
  assert report.collectives == _sum_of((0, 1), (2, 3))
  np.testing.assert_array_equal(testbed.copies(weights), trained)


class TestErrors:
  def _compile(self, fn: Any, *args: Any, **options: Any) -> Any:
    options = {"topology": TOPOLOGY, "strategy": testbed.virtual(N), **options}
    return virtual_tpu.compile_for(options.pop("topology"), fn, args, **options)

  def test_not_a_function(self) -> None:
    with pytest.raises(TypeError, match=r"`fn` must be a function; got 3"):
      self._compile(3)

  def test_another_strategy(self) -> None:
    with pytest.raises(TypeError, match=r"`strategy`.*MirroredStrategy"):
      self._compile(tf.abs, 1.0, strategy=testbed.mirrored())

  def test_sizes(self) -> None:
    with pytest.raises(
      ValueError, match=r"'v5e:2x4' has 8 devices.*`strategy` has 4 replicas"
    ):
      self._compile(tf.abs, 1.0, topology="v5e:2x4")
    with pytest.raises(ValueError, match=r"4 devices.*`num_replicas` has 2"):
      self._compile(tf.abs, 1.0, num_replicas=2)
    with pytest.raises(ValueError, match=r"4 devices.*`fn` has 2 replicas"):
      self._compile(
        lambda x: testbed.virtual(2).run(tf.abs, (x,)),
        tf.TensorSpec([2]),
        strategy=None,
      )

  def test_unknown_topology(self) -> None:
    with pytest.raises(ValueError, match=r"`topology` must be.*got 'moon'"):
      self._compile(tf.abs, 1.0, topology="moon")

  def test_unknown_shape(self) -> None:
    with pytest.raises(ValueError, match=r"`args` must have known shapes"):
      self._compile(tf.abs, tf.TensorSpec([None, 2]))

  def test_two_runs(self) -> None:
    def twice(x: tf.Tensor) -> None:
      for _ in range(2):
        testbed.virtual(N).run(tf.abs, (x,))

    with pytest.raises(ValueError, match=r"one step.*called it 2 times"):
      self._compile(twice, tf.TensorSpec([2]))

  def test_what_no_tpu_runs(self) -> None:
    for fn, words in (
      (tf.strings.as_string, "no dtype string"),
      (lambda x: tf.boolean_mask(x, x > 0), "must not depend on data"),
    ):
      with pytest.raises(virtual_tpu.TPUCompileError, match=words):
        self._compile(fn, tf.TensorSpec([2]))


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
