"""The real TPU compiler, on steps of both forms, and its report."""

import functools
import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, virtual_tpu

TOPOLOGY = "v5e:2x2"
N = 4
PAIRS = ((0, 1), (2, 3))
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def _sum_over(groups: Any) -> Any:
  return (virtual_tpu.Collective("all-reduce", "f32", ((6, 3),), 72, groups),)


class TestCompileFor:
  def test_forms_of_a_step(self) -> None:
    """Before and after it ran, the function for replicas or for the host."""
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
    for fn, arg in (
      (tf.function(step), tf.constant(x)),
      (on_host, x),
    ):
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
      with pytest.raises(Exception, match=words) as error:
        virtual_tpu.compile_for(topology, fn, **options)
      assert type(error.value) in kinds

    kinds: tuple[type, ...] = (ValueError,)
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
    kinds = (virtual_tpu.TPUCompileError,)
    fails("strings, files.*AsString", tf.strings.as_string)


class TestReport:
  def _report(self, *collectives: virtual_tpu.Collective) -> virtual_tpu.Report:
    return virtual_tpu.Report(
      topology="v5e:4x2",
      device_kind="TPU v5 lite",
      num_replicas=8,
      coordinates=((0, 0, 0, 0),) * 8,
      collectives=collectives,
      wire_bytes=2108,
      argument_bytes=4608,
      output_bytes=3584,
      temp_bytes=0,
      flops=1234567.0,
      compile_seconds=0.25,
      hlo_text="HloModule",
    )

  def test_table(self) -> None:
    sum_, gather = (
      virtual_tpu.Collective(
        "all-reduce", "f32", ((4, 3), (4, 3), (3,)), 108, HALVES
      ),
      virtual_tpu.Collective(
        "all-gather", "bf16", ((1000,),), 2000, (tuple(range(8)),)
      ),
    )
    operands = "2 x [4, 3], 1 x [3]"
    assert str(self._report(sum_, gather)).splitlines() == [
      "v5e:4x2: 8 replicas on TPU v5 lite",
      "",
      "collective  dtype  bytes  operands             groups",
      f"all-reduce  f32      108  {operands}  2 of 4: [0, 1, 2, 3], ...",
      "all-gather  bf16   2,000  1 x [1000]           all 8",
      "",
      "collectives              2",
      "wire bytes           2,108",
      "argument bytes       4,608",
      "output bytes         3,584",
      "temporary bytes          0",
      "flops            1,234,567",
      "compile seconds       0.25",
    ]

  def test_no_collective_long_groups_and_many_shapes(self) -> None:
    assert "No collective: replicas exchange nothing." in str(self._report())
    shapes = ((1,), (2,), (2,), (3,), (4,))
    wide = tuple(tuple(range(i, i + 16)) for i in (0, 16))
    text = str(
      self._report(
        virtual_tpu.Collective("all-reduce", "f32", shapes, 48, wide)
      )
    )
    assert "2 x [2], 1 x [1], 2 more" in text
    assert "2 of 16: [0, 1, ...], ..." in text

  def test_json_holds_all_but_the_program(self) -> None:
    report = self._report(*_sum_over(HALVES))
    fields = json.loads(report.to_json())
    assert "hlo_text" not in fields
    assert fields["collectives"][0]["groups"] == [list(g) for g in HALVES]
    assert (fields["wire_bytes"], fields["flops"]) == (2108, 1234567.0)
    assert "HloModule" not in repr(report)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
