"""Lowers both cross-replica sums for TPUs and compares what they become.

Run by tools/tpu_lowering.sh in an environment with tensorflow-tpu.
"""

import itertools
import re
import sys
from collections.abc import Callable

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from tf_cross_shard import Groups
from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core.reduce import one_program
from tf_cross_shard._src.virtual_tpu import exchanges, hlo

GROUPINGS = [
  [[0, 1, 2, 3, 4, 5, 6, 7]],
  [[0, 1, 2, 3], [4, 5, 6, 7]],
  [[0, 2, 4, 6], [1, 3, 5, 7]],
  [[0, 7], [1, 6], [2, 5], [3, 4]],
  [[0], [1], [2], [3], [4], [5], [6], [7]],
]


def lower(fn: Callable[[tf.Tensor], tf.Tensor], dtype: tf.DType) -> bytes:
  """The XLA module of a function of one tensor, lowered for TPUs."""
  function = tf.function(fn, jit_compile=True, autograph=False)
  lowering = function.experimental_get_compiler_ir(tf.TensorSpec([4, 3], dtype))
  module = hlo.Module(lowering(stage="hlo_serialized", platform_name="TPU"))
  return module.portable()


def reductions(module: bytes) -> list[tuple[str, int]]:
  """Returns the operation and the dtype of each all-reduce."""
  computations = hlo_pb2.HloModuleProto.FromString(module).computations
  roots = {
    computation.id: instruction
    for computation in computations
    for instruction in computation.instructions
    if instruction.id == computation.root_id
  }
  called = [
    roots[instruction.called_computation_ids[0]]
    for computation in computations
    for instruction in computation.instructions
    if instruction.opcode == "all-reduce"
  ]
  return [(root.opcode, root.shape.element_type) for root in called]


def compare(dtype: tf.DType, groups: Groups) -> str:
  """The word "same", or both operations."""
  strategy = tf.distribute.get_strategy()
  program = single_program.TPUProgram(strategy)
  engine = one_program.OneProgram(strategy, groups, program)
  table = groups.to_lists()
  real = lower(lambda x: engine.all_reduce_sum([x])[0], dtype)
  virtual = lower(lambda x: exchanges.cross_replica_sum(x, table), dtype)
  [mine], [theirs] = (
    hlo.Module(module).collectives(8) for module in (real, virtual)
  )
  same = mine == theirs and reductions(real) == reductions(virtual)
  right = mine.kind == "all-reduce" and mine.groups == groups.assignment
  return "same" if same and right else f"DIFFERS: {mine} {theirs}"


def main() -> int:
  """Compares every dtype in every grouping; 1 if one differs."""
  verdicts = []
  # Of float64 the virtual TPU gathers all terms: its operation takes none.
  dtypes = [dtype for dtype in one_program.DTYPES if dtype != tf.float64]
  for dtype, table in itertools.product(dtypes, GROUPINGS):
    verdicts.append(compare(dtype, Groups(table)))
    print(f"{dtype.name:9}{re.sub(' ', '', str(table)):40}{verdicts[-1]}")
  same = verdicts.count("same")
  print(f"{same} of {len(verdicts)} the same (TensorFlow {tf.__version__})")
  return int(same < len(verdicts))


if __name__ == "__main__":
  sys.exit(main())
