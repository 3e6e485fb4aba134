"""The programs of workers: each process runs one of `TASKS`.

python tests/multi_worker_tasks.py NAME PLACE reads its arguments from PLACE.in
and leaves what the task returns in PLACE.out.
"""

import os
import pathlib
import pickle
import sys
import time
import types
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
  # Keras imports them for no other reason than that they are installed, and
  # that takes a third of the time in which a worker starts.
  sys.modules.update(dict.fromkeys(["jax", "matplotlib", "sklearn"]))

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from tests.support import (
  multi_worker_cases,
  multi_worker_faults,
  replica_state_workers,
)
from tf_cross_shard import multi_worker
from tf_cross_shard.multi_worker import coordination


class SlurmOnCPUs(tf.distribute.cluster_resolver.SlurmClusterResolver):
  """TensorFlow's, which cannot do without GPUs: it counts tasks by them."""

  def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
    """None."""
    return {}


class PodsOnOneMachine(
  tf.distribute.cluster_resolver.KubernetesClusterResolver
):
  """TensorFlow's, with a port for each pod: pods have an address each."""

  ports: Sequence[int] = ()

  def cluster_spec(self) -> Any:
    """The running pods."""
    [addresses] = super().cluster_spec().as_dict().values()
    hosts = [address.rpartition(":")[0] for address in addresses]
    return tf.train.ClusterSpec(
      {"worker": [f"{h}:{p}" for h, p in zip(hosts, self.ports, strict=True)]}
    )


def _kubernetes(ports: Sequence[int], index: int) -> Any:
  """A resolver whose client knows one running pod for each port."""
  pods = [
    types.SimpleNamespace(
      metadata=types.SimpleNamespace(name=f"pod-{i}"),
      status=types.SimpleNamespace(phase="Running", host_ip="localhost"),
    )
    for i in range(len(ports))
  ]
  client = types.SimpleNamespace(
    list_pod_for_all_namespaces=lambda label_selector: types.SimpleNamespace(
      items=pods
    )
  )
  resolver = PodsOnOneMachine(
    {"worker": ["job-name=training"]}, override_client=client
  )
  resolver.ports = ports
  resolver.task_type, resolver.task_id = "worker", index
  return resolver


def resolver_of(starter: str) -> Any:
  """A cluster resolver, by the name of what starts the workers."""
  if starter == "TF_CONFIG":
    return None
  if starter == "Slurm":
    return SlurmOnCPUs(
      port_base=int(os.environ["TEST_PORT"]),
      gpus_per_node=int(os.environ["SLURM_STEP_NUM_TASKS"]),
      gpus_per_task=1,
      auto_set_gpu=False,
    )
  ports = [int(port) for port in os.environ["TEST_PORTS"].split(",")]
  index = int(os.environ["TEST_INDEX"])
  if starter == "Kubernetes":
    return _kubernetes(ports, index)
  return tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec({"worker": [f"localhost:{port}" for port in ports]}),
    task_type="worker",
    task_id=index,
    rpc_layer="grpc",
  )


def strategy_of(kind: str, **options: Any) -> tf.distribute.Strategy:
  """TensorFlow's strategy, or ours."""
  if kind == "tensorflow":
    return tf.distribute.MultiWorkerMirroredStrategy(**options)
  return multi_worker.MultiWorkerStrategy(**options)


def numbers(kind: str, folder: pathlib.Path, starter: str) -> dict[Any, Any]:
  """Everything that is compared with plain Keras and with NumPy."""
  strategy = strategy_of(kind, cluster_resolver=resolver_of(starter))
  replicas = strategy.num_replicas_in_sync
  assert replicas > 1
  wanted = multi_worker_cases.cases(replicas)
  if kind != "tensorflow":
    wanted |= multi_worker_cases.fit_cases(replicas)
  return {
    "replicas": replicas,
    "state": multi_worker_cases.state(folder, strategy),
    **{key: _timed(key, case, strategy) for key, case in wanted.items()},
  }


def _timed(key: Any, case: Callable[..., Any], strategy: Any) -> Any:
  """What a case answers; the log says how long it took."""
  begin = time.monotonic()
  answer = case(strategy)
  print(f"{time.monotonic() - begin:.2f} s: {' '.join(key)}", flush=True)
  return answer


def start(
  starter: str = "TF_CONFIG",
  older: bool = False,
  timeout: float | None = None,
) -> dict[str, Any]:
  """Starts a worker, sums one gradient, and says what came of it."""
  if older:
    mine = coordination.library_versions()[1:]
    coordination.library_versions = lambda: ["tf_cross_shard: 0.0.1", *mine]
  sums = []

  def sum_once() -> None:
    strategy = multi_worker.MultiWorkerStrategy(
      resolver_of(starter), timeout=timeout
    )
    assert strategy.num_replicas_in_sync > 1
    found = multi_worker_cases.dense_sum(
      "small", "ungrouped", "function", strategy
    )
    sums.extend(found)

  return {**multi_worker_faults.attempt(sum_once), "sums": sums}


def faults(kind: str, what: str, odd: bool) -> dict[str, Any]:
  """What a worker reports where one of them does something else."""
  strategy = strategy_of(kind)
  if what == "disagree":
    return multi_worker_faults.disagree(odd, strategy)
  return multi_worker_faults.make_others(what, odd, strategy)


def lose(kind: str, killed: int) -> dict[str, Any]:
  """What a worker reports when another one is killed."""
  strategy = strategy_of(kind)
  mine = multi_worker_cases.place_of(strategy)
  return multi_worker_faults.lose(killed, mine, strategy)


def two_replicas_each() -> tf.distribute.Strategy:
  """Two replicas in each process, as with GPUs; of CPUs it would be one."""
  cpu = tf.config.list_physical_devices("CPU")[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
  )
  with unittest.mock.patch.object(
    collective_all_reduce_strategy.CollectiveAllReduceExtended,
    "_initialize_local_devices",
    lambda extended, resolver, worker: (
      tuple(f"{worker}/device:CPU:{i}" for i in range(2)),
      "CPU",
    ),
  ):
    strategy = multi_worker.MultiWorkerStrategy()
  assert len(strategy.extended.worker_devices) == 2
  assert strategy.num_replicas_in_sync == 4
  return strategy


def local_replicas(steps: int) -> dict[str, Any]:
  """What two replicas of one process have."""
  strategy = two_replicas_each()
  return {
    (grouping, wire_dtype): multi_worker_cases.powers_of_two(
      grouping, wire_dtype, steps, strategy
    )
    for grouping in multi_worker_cases.GROUPINGS[4]
    for wire_dtype in (None, "bfloat16")
  }


def one_after_the_other(delay: float) -> list[Any]:
  """Sums under several strategies; what each broadcasts first differs."""
  found = []
  for dtype, grouping in (
    ("float32", "ungrouped"),
    ("int64", "singletons"),
    ("float64", "ungrouped"),
  ):
    time.sleep(delay)
    strategy = multi_worker.MultiWorkerStrategy()
    with strategy.scope():
      first = tf.Variable([strategy.num_replicas_in_sync], dtype=dtype)
    sums = multi_worker_cases.dense_sum("small", grouping, "function", strategy)
    found.append((grouping, first.numpy().tolist(), sums))
  return found


def replica_states(kind: str, folder: pathlib.Path) -> dict[str, Any]:
  """What `tf_cross_shard.replica_state` does on each worker."""
  if kind == "two replicas each":
    return replica_state_workers.run(two_replicas_each(), folder)
  return replica_state_workers.run(strategy_of(kind), folder)


def interplay(kind: str) -> Any:
  """Two Kerases, mixed precision and loss scaling."""
  # Here, for no other task imports a second Keras, which takes seconds.
  from tests.support import interplay_workers

  if kind == "tensorflow":
    return interplay_workers.train_with_tensorflows()
  return interplay_workers.train()


TASKS: dict[str, Callable[..., Any]] = {
  task.__name__: task
  for task in (
    numbers,
    start,
    faults,
    lose,
    local_replicas,
    interplay,
    one_after_the_other,
    replica_states,
  )
}


def main(name: str, place: str) -> None:
  """Runs one task."""
  tf.get_logger().setLevel("ERROR")
  given = pathlib.Path(place)
  result = TASKS[name](**pickle.loads(given.with_suffix(".in").read_bytes()))
  part = given.with_suffix(".part")
  part.write_bytes(pickle.dumps(result))
  os.replace(part, given.with_suffix(".out"))


if __name__ == "__main__":
  main(*sys.argv[1:])
