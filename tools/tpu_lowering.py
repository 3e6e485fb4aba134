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


def compare(dtype: tf.DType, groups: Groups) -> str:
  """The word "same", or both operations."""
  engine = tpu.TPU(tf.distribute.get_strategy())
  table = groups.to_lists()
  real = lower(lambda x: engine.all_reduce_sum([x], groups)[0], dtype)
  virtual = lower(lambda x: replica.cross_replica_sum(x, table), dtype)
  [mine], [theirs] = real.collectives(8), virtual.collectives(8)
  same = mine == theirs and real.reductions() == virtual.reductions()
  right = mine.kind == "all-reduce" and mine.groups == groups.assignment
  return "same" if same and right else f"DIFFERS: {mine} {theirs}"


def main() -> int:
  """Compares every dtype in every grouping; 1 if one differs."""
  verdicts = []
  for dtype, table in itertools.product(tpu.DTYPES, GROUPINGS):
    verdicts.append(compare(dtype, Groups(table)))
    print(f"{dtype.name:9}{re.sub(' ', '', str(table)):40}{verdicts[-1]}")
  same = verdicts.count("same")
  print(f"{same} of {len(verdicts)} the same (TensorFlow {tf.__version__})")
  return int(same < len(verdicts))


if __name__ == "__main__":
  sys.exit(main())
