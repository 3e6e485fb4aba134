"""Which graph and which function is being traced."""

import threading
from typing import Any

import tensorflow as tf


def can_merge() -> bool:
  """Returns whether a merge call works here.

  It works only in the graph in which the replica function began, and not in the
  graph of a `tf.cond` or of a nested function.
  """
  began_in = getattr(threading.current_thread(), "graph", None)
  return began_in is tf.compat.v1.get_default_graph()


def enclosing() -> list[Any]:
  """Returns the graphs being built, up to that of the replica function."""
  found = [tf.compat.v1.get_default_graph()]
  began_in = getattr(threading.current_thread(), "graph", None)
  while found[-1] is not began_in and hasattr(found[-1], "outer_graph"):
    found.append(found[-1].outer_graph)
  return found
