"""Starts real processes that train together, and ends every one of them.

TensorFlow's workers wait for each other without a limit and do not heed
SIGTERM, so each launch has a time limit and ends with SIGKILL.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support import multi_worker_tasks

_PROGRAM = pathlib.Path(multi_worker_tasks.__file__).absolute()
_PAUSE = 0.05  # seconds between two looks at the processes
# How long the others have to end by themselves when one failed.
_GRACE = 5.0


@dataclasses.dataclass(frozen=True)
class Worker:
  """What became of one process.

  Attributes:
    index: Its place among the workers.
    returncode: As in `subprocess`: negative for a signal.
    seconds: How long it ran.
    output: All that it wrote to stdout and stderr.
    result: What the task returned; None where it did not return.
  """

  index: int
  returncode: int
  seconds: float
  output: str
  result: Any


class WorkersFailedError(AssertionError):
  """A worker failed that was not to; holds what all of them wrote."""


def free_ports(count: int, adjacent: bool = False) -> list[int]:
  """Ports that nobody listens on, one after the other if `adjacent`."""
  for _ in range(100):
    with contextlib.ExitStack() as stack:
      ports: list[int] = []
      for i in range(count):
        one = stack.enter_context(socket.socket())
        wanted = ports[0] + i if adjacent and ports else 0
        try:
          one.bind(("localhost", wanted))
        except OSError:
          break
        ports.append(one.getsockname()[1])
      if len(ports) == count:
        return ports
  raise RuntimeError(f"no {count} free ports")


def cluster_of(workers: int, chief: bool = False) -> list[dict[str, Any]]:
  """A TF_CONFIG for each worker, on free ports of this machine."""
  addresses = [f"localhost:{port}" for port in free_ports(workers)]
  tasks: list[tuple[str, int]] = [("worker", i) for i in range(workers)]
  cluster = {"worker": addresses}
  if chief:
    cluster = {"chief": addresses[:1], "worker": addresses[1:]}
    tasks = [("chief", 0), *(("worker", i) for i in range(workers - 1))]
  return [
    {"cluster": cluster, "task": {"type": job, "index": index}}
    for job, index in tasks
  ]


def run(
  task: str,
  workers: int,
  *,
  timeout: float = 120.0,
  arguments: Mapping[str, Any] | None = None,
  per_worker: Sequence[Mapping[str, Any]] = (),
  environment: Mapping[str, str] | None = None,
  environments: Sequence[Mapping[str, str]] | None = None,
  chief: bool = False,
  absent: Sequence[int] = (),
  may_fail: Sequence[int] = (),
) -> list[Worker]:
  """Runs a task in several processes at once, and waits for all of them.

  Args:
    task: A name in `multi_worker_tasks.TASKS`.
    workers: How many there are in the cluster.
    timeout: Seconds after which all are killed.
    arguments: What the task is called with.
    per_worker: What it is called with besides, one for each worker.
    environment: Variables of all processes.
    environments: Variables of each process, in the place of TF_CONFIG.
    chief: Whether the first worker is called so.
    absent: Workers of the cluster that are never started.
    may_fail: Workers that may end with an error, or be killed.

  Returns:
    The workers that were started, in order.

  Raises:
    WorkersFailedError: If one fails that may not, or time is up.
  """
  if environments is None:
    environments = [
      {"TF_CONFIG": json.dumps(config)} for config in cluster_of(workers, chief)
    ]
  assert len(environments) == workers
  base = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
  base |= {
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "TF_CPP_MIN_LOG_LEVEL": "2",
    **(environment or {}),
  }
  started = [index for index in range(workers) if index not in absent]
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    processes: dict[int, subprocess.Popen[bytes]] = {}
    stack.callback(_kill, processes)
    begin = time.monotonic()
    for index in started:
      place = pathlib.Path(folder, str(index))
      mine = {**(arguments or {}), **(per_worker[index] if per_worker else {})}
      place.with_suffix(".in").write_bytes(pickle.dumps(mine))
      output = stack.enter_context(place.with_suffix(".log").open("wb"))
      processes[index] = subprocess.Popen(
        [sys.executable, str(_PROGRAM), task, str(place)],
        env={**base, **environments[index]},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
      )
    ends = _wait(processes, begin, timeout, may_fail)
    _kill(processes)
    done = [
      _read(pathlib.Path(folder, str(index)), index, processes[index], ends)
      for index in started
    ]
  failed = [
    worker.index
    for worker in done
    if worker.index not in ends
    or (worker.index not in may_fail and worker.returncode != 0)
  ]
  if failed:
    raise WorkersFailedError(_everything(task, done, failed, timeout))
  return done


def _wait(
  processes: Mapping[int, "subprocess.Popen[bytes]"],
  begin: float,
  timeout: float,
  may_fail: Sequence[int],
) -> dict[int, float]:
  """When each process ended; without those that did not."""
  ends: dict[int, float] = {}
  deadline = begin + timeout
  while len(ends) < len(processes) and time.monotonic() < deadline:
    for index, process in processes.items():
      if index not in ends and process.poll() is not None:
        ends[index] = time.monotonic() - begin
        if process.returncode != 0 and index not in may_fail:
          deadline = min(deadline, time.monotonic() + _GRACE)
    time.sleep(_PAUSE)
  return ends


def _kill(processes: Mapping[int, "subprocess.Popen[bytes]"]) -> None:
  """Ends all that still run."""
  for process in processes.values():
    process.kill()
  for process in processes.values():
    process.wait()


def _read(
  place: pathlib.Path,
  index: int,
  process: "subprocess.Popen[bytes]",
  ends: Mapping[int, float],
) -> Worker:
  """What a process left behind."""
  result = place.with_suffix(".out")
  return Worker(
    index=index,
    returncode=process.returncode,
    seconds=ends.get(index, float("inf")),
    output=place.with_suffix(".log").read_text(errors="replace"),
    result=pickle.loads(result.read_bytes()) if result.exists() else None,
  )


def _everything(
  task: str, done: Sequence[Worker], failed: Sequence[int], timeout: float
) -> str:
  """All that there is to know of a launch that went wrong."""
  parts = [f"{task}: failed or not done after {timeout:g} s: {failed}"]
  for worker in done:
    parts.append(
      f"--- worker {worker.index}, exit {worker.returncode},"
      f" {worker.seconds:.1f} s ---\n{worker.output}"
    )
  return "\n".join(parts)
