"""The real TPU compiler, on steps of both forms, and its report."""

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, virtual_tpu

TOPOLOGY = "v5e:2x2"
N = 4
PAIRS = ((0, 1), (2, 3))


def _sum_over(groups: Any) -> Any:
  return (virtual_tpu.Collective("all-reduce", "f32", ((6, 3),), 72, groups),)


class TestCompileFor:
  def test_forms_of_a_step(self) -> None:
    """`compile_for` accepts functions for a replica and for the host.

    The first function has not run before, and the second function has.
    """
    strategy = testbed.virtual(N)
    with strategy.scope():
      weights = tf.Variable(tf.ones([6, 3]))
      optimizer = CrossShardOptimizer(
        tf.keras.optimizers.SGD(0.1), group_assignment=PAIRS
      )
      optimizer.build([weights])

    def step(x: tf.Tensor) -> None:
      optimizer.minimize(
        lambda: tf.reduce_mean((x @ weights) ** 2), var_list=[weights]
      )

    on_host = tf.function(lambda x: strategy.run(step, (x,)))
    on_host(
      testbed.per_replica(
        strategy, [np.full([2, 6], i, np.float32) for i in range(N)]
      )
    )
    trained = testbed.copies(weights)
    assert not np.array_equal(trained[0], trained[2])
    x = np.ones([2, 6], np.float32)
    for fn, arg in ((tf.function(step), tf.constant(x)), (on_host, x)):
      report = virtual_tpu.compile_for(TOPOLOGY, fn, [arg], strategy=strategy)
      assert report.collectives == _sum_over(PAIRS)
      assert report.wire_bytes == 72
      assert (report.topology, report.num_replicas) == (TOPOLOGY, N)
    assert report.coordinates == virtual_tpu.coordinates(TOPOLOGY)
    assert report.device_kind.startswith("TPU")
    # The weights and x, in tiles of a TPU's size, and the iteration count.
    assert report.argument_bytes >= 4 * (6 * 3 + 2 * 6)
    assert report.argument_bytes > report.output_bytes > 0
    assert report.flops > 0
    assert report.compile_seconds > 0
    assert "all-reduce" in report.hlo_text
    np.testing.assert_array_equal(testbed.copies(weights), trained)

  def test_where_the_strategy_comes_from(self) -> None:
    def total(x: tf.Tensor, factor: float) -> tf.Tensor:
      return factor * tf.distribute.get_replica_context().all_reduce("SUM", x)

    args = [tf.TensorSpec([6, 3]), 2.0]
    strategy = testbed.virtual(N)
    compile_for = functools.partial(virtual_tpu.compile_for, TOPOLOGY)
    with strategy.scope():
      inside = compile_for(total, args)
    called = compile_for(lambda x: strategy.run(total, (x, 2.0)), args[:1])
    new = compile_for(total, args, num_replicas=N)
    for report in (inside, called, new):
      assert report.collectives == _sum_over(((0, 1, 2, 3),))

  def test_errors(self) -> None:
    two, four = testbed.virtual(2), testbed.virtual(N)
    unknown = [tf.TensorSpec([None, 2])]

    def fails(words: str, fn: Any = tf.abs, **options: Any) -> None:
      options = {"args": [tf.TensorSpec([2])], "strategy": four, **options}
      topology = options.pop("topology", TOPOLOGY)
      kind = options.pop("kind", ValueError)
      with pytest.raises(kind, match=words):
        virtual_tpu.compile_for(topology, fn, **options)

    fails(r"'v5e:2x4' has 8 .*`strategy` has 4 replicas", topology="v5e:2x4")
    fails(r"4 devices.*`num_replicas` has 2", num_replicas=2)
    fails(
      r"4 devices.*`fn` has 2", lambda x: two.run(tf.abs, (x,)), strategy=None
    )
    fails(
      r"one step.*called it 2 times",
      lambda x: [four.run(tf.abs, (x,)) for _ in range(2)],
    )
    fails(r"`args` must have known shapes", args=unknown)
    kind = virtual_tpu.TPUCompileError
    fails("strings, files.*AsString", tf.strings.as_string, kind=kind)
