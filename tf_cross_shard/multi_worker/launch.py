"""Starts several processes on this machine that train together.

`tf_cross_shard_cli` has the functions: the command line needs no TensorFlow.
"""

from tf_cross_shard_cli.launch import (
  cluster,
  free_ports,
  killed_at_end,
  launch,
  wait,
)

__all__ = ["cluster", "free_ports", "killed_at_end", "launch", "wait"]
