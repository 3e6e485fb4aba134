"""TPU replicas where there is no TPU."""

from tf_cross_shard.virtual_tpu.compiler import Report, compile_for
from tf_cross_shard.virtual_tpu.hlo import Collective
from tf_cross_shard.virtual_tpu.lowering import TPUCompileError
from tf_cross_shard.virtual_tpu.strategy import VirtualTPUStrategy
from tf_cross_shard.virtual_tpu.xla import coordinates

__all__ = [
  "Collective",
  "Report",
  "TPUCompileError",
  "VirtualTPUStrategy",
  "compile_for",
  "coordinates",
]
