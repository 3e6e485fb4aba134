"""The real `tf.distribute.TPUStrategy` where there is no TPU, to trace with."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_HOST_DEVICES = 8


class Resolver(tf.distribute.cluster_resolver.ClusterResolver):
  """Says that there is a TPU slice of so many devices."""

  def __init__(self, num_devices: int) -> None:
    self._num_devices = num_devices
    self.task_type = "worker"
    self.task_id = 0

  def get_tpu_system_metadata(self) -> Any:
    """What TPUStrategy asks."""
    from tensorflow.python.client import session
    from tensorflow.python.tpu import tpu_system_metadata

    on_host = min(_HOST_DEVICES, self._num_devices)
    devices = [
      session._DeviceAttributes(
        f"/job:worker/replica:0/task:{i // on_host}/device:TPU:{i % on_host}",
        "TPU",
        1,
        1,
      )
      for i in range(self._num_devices)
    ]
    return tpu_system_metadata.TPUSystemMetadata(
      num_cores=self._num_devices,
      num_hosts=self._num_devices // on_host,
      num_of_cores_per_host=on_host,
      topology=None,
      devices=devices,
    )

  def cluster_spec(self) -> Any:
    return tf.train.ClusterSpec({})

  def master(self, *args: Any, **kwargs: Any) -> str:
    return ""

  @property
  def environment(self) -> str:
    return ""

  def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
    return {"TPU": self._num_devices}


def nodes(graph: tf.Graph) -> Iterator[tuple[Any, dict[str, Any]]]:
  """Every operation of a graph and its functions, and its neighbours."""
  definition = graph.as_graph_def()
  for each in (
    definition.node,
    *(function.node_def for function in definition.library.function),
  ):
    neighbours = {node.name: node for node in each}
    for node in each:
      yield node, neighbours


def cross_replica_sums(graph: tf.Graph) -> list[tuple[Any, list[list[int]]]]:
  """Dtype and groups of every cross-replica sum in a graph."""
  found = []
  for node, neighbours in nodes(graph):
    if node.op == "CrossReplicaSum":
      groups = neighbours[node.input[1].split(":")[0]]
      table: np.ndarray = tf.make_ndarray(groups.attr["value"].tensor)
      found.append((tf.as_dtype(node.attr["T"].type), table.tolist()))
  return found


def operations(graph: tf.Graph) -> set[str]:
  """The kinds of operation in a graph and its functions."""
  return {node.op for node, _ in nodes(graph)}
