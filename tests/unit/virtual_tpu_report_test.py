"""What the TPU compiler says of a program, as values, table and JSON."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard.virtual_tpu import (
  compiler,
  hlo,
  lowering,
  replica_context,
  xla,
)

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def _report(*found: hlo.Collective, replicas: int = 8) -> compiler.Report:
  return compiler.Report(
    topology="v5e:4x2",
    device_kind="TPU v5 lite",
    num_replicas=replicas,
    coordinates=((0, 0, 0, 0),) * replicas,
    collectives=found,
    wire_bytes=sum(each.bytes for each in found),
    argument_bytes=4608,
    output_bytes=3584,
    temp_bytes=0,
    flops=1234567.0,
    compile_seconds=0.25,
    hlo_text="HloModule",
  )


def test_table() -> None:
  text = str(
    _report(
      hlo.Collective("all-reduce", "f32", ((4, 3), (4, 3), (3,)), 108, HALVES),
      hlo.Collective(
        "all-gather", "bf16", ((1000,),), 2000, (tuple(range(8)),)
      ),
    )
  )
  operands = "2 x [4, 3], 1 x [3]"
  assert text.splitlines() == [
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


def test_table_without_collectives() -> None:
  text = str(_report())
  assert "No collective: replicas exchange nothing." in text
  assert "wire bytes               0" in text


def test_long_groups_and_many_shapes() -> None:
  shapes = ((1,), (2,), (2,), (3,), (4,))
  wide = tuple(tuple(range(i, i + 16)) for i in (0, 16))
  text = str(
    _report(hlo.Collective("all-reduce", "f32", shapes, 48, wide), replicas=32)
  )
  assert "2 x [2], 1 x [1], 2 more" in text
  assert "2 of 16: [0, 1, ...], ..." in text


def test_json_holds_all_but_the_program() -> None:
  collective = hlo.Collective("all-reduce", "f32", ((4, 3),), 48, HALVES)
  found = json.loads(_report(collective).to_json())
  assert "hlo_text" not in found
  assert found["collectives"] == [
    {
      "kind": "all-reduce",
      "dtype": "f32",
      "shapes": [[4, 3]],
      "bytes": 48,
      "groups": [list(group) for group in HALVES],
    }
  ]
  assert (found["wire_bytes"], found["flops"]) == (48, 1234567.0)
  assert "HloModule" not in repr(_report(collective))


def test_made_of_what_the_compiler_answers() -> None:
  strategy = testbed.virtual(4)

  def fn(x: tf.Tensor) -> tf.Tensor:
    with strategy.scope(), replica_context.TracedReplicaContext(strategy):
      return replica_context.cross_replica_sum(x, [[0, 1], [2, 3]])

  spec = tf.TensorSpec([5], tf.float32)
  traced = lowering.trace(fn, [spec], list)
  module = lowering.lower(traced, [spec.shape]).module
  where: Any = SimpleNamespace(
    name="v5e:2x2", kind="TPU", coordinates=((0,),) * 4, devices=(None,) * 4
  )
  memory = SimpleNamespace(
    argument_size_in_bytes=20, output_size_in_bytes=24, temp_size_in_bytes=4
  )
  compiled = xla.Compiled(module, "text", memory, {"flops": 5.0}, 0.5)
  made = compiler.make_report(where, compiled)
  assert made.collectives == (
    hlo.Collective("all-reduce", "f32", ((5,),), 20, ((0, 1), (2, 3))),
  )
  assert (made.topology, made.device_kind) == ("v5e:2x2", "TPU")
  assert (made.num_replicas, made.wire_bytes) == (4, 20)
  assert (made.argument_bytes, made.output_bytes, made.temp_bytes) == (
    20,
    24,
    4,
  )
  assert (made.flops, made.compile_seconds) == (5.0, 0.5)
  assert made.hlo_text == "text"


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
