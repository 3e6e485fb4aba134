"""Lowers both cross-replica sums for TPUs and compares what they become.

Run by tools/tpu_lowering.sh in an environment with tensorflow-tpu.
"""

import itertools
import re
import sys
from collections.abc import Callable

import tensorflow as tf

from tf_cross_shard import Groups
from tf_cross_shard.collectives import tpu
from tf_cross_shard.virtual_tpu import hlo, replica

DTYPES = [
  tf.bfloat16,
  tf.float16,
  tf.float32,
  tf.float64,
  tf.int32,
  tf.uint32,
]
GROUPINGS = [
  [[0, 1, 2, 3, 4, 5, 6, 7]],
  [[0, 1, 2, 3], [4, 5, 6, 7]],
  [[0, 2, 4, 6], [1, 3, 5, 7]],
  [[0, 7], [1, 6], [2, 5], [3, 4]],
  [[0], [1], [2], [3], [4], [5], [6], [7]],
]


def lower(fn: Callable[[tf.Tensor], tf.Tensor], dtype: tf.DType) -> hlo.Module:
  """The XLA module of a function of one tensor, lowered for TPUs."""
  function = tf.function(fn, jit_compile=True, autograph=False)
  lowering = function.experimental_get_compiler_ir(tf.TensorSpec([4, 3], dtype))
  module = hlo.Module(lowering(stage="hlo_serialized", platform_name="TPU"))
  # As the virtual TPU does; for all but float64 sums nothing changes here.
  return hlo.Module(module.portable(replica.FLOAT64_SUM))


def main() -> int:
  """Compares every dtype in every grouping; 1 if one differs."""
  engine = tpu.TPU(tf.distribute.get_strategy())
  differ = 0
  for dtype, table in itertools.product(DTYPES, GROUPINGS):
    groups = Groups(table)
    real = lower(lambda x: engine.all_reduce_sum([x], groups)[0], dtype)
    virtual = lower(lambda x: replica.cross_replica_sum(x, table), dtype)
    [mine] = real.collectives(8)
    [theirs] = virtual.collectives(8)
    same = mine == theirs and real.reductions() == virtual.reductions()
    right = mine.kind == "all-reduce" and mine.groups == groups.assignment
    differ += not (same and right)
    verdict = "same" if same and right else f"DIFFERS: {mine} {theirs}"
    print(f"{dtype.name:9}{re.sub(' ', '', str(table)):40}{verdict}")
  total = len(DTYPES) * len(GROUPINGS)
  print(
    f"{total - differ} of {total} the same (tensorflow-tpu {tf.__version__})"
  )
  return int(differ > 0)


if __name__ == "__main__":
  sys.exit(main())
