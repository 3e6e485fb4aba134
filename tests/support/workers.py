"""Forks processes that train together, and ends every one of them.

To start a process that imports TensorFlow takes seconds. So one server process
imports it once, makes no device, and is forked for each worker.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support import multi_worker_tasks
from tf_cross_shard.multi_worker import launch

# How long the others have to end by themselves when one failed.
_GRACE = 5.0
_server = multiprocessing.get_context("forkserver")


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


class _Process:
  """A forked process, with the methods that a launch asks for."""

  def __init__(self, *arguments: Any) -> None:
    self._process = _server.Process(
      target=multi_worker_tasks.run, args=arguments
    )
    self._process.start()

  def poll(self) -> int | None:
    """Returns the exit code; None while it runs."""
    return self._process.exitcode

  def kill(self) -> None:
    """Ends it."""
    self._process.kill()


def _start_server() -> None:
  """Starts the server, which looks for modules where this process does."""
  path = os.pathsep.join(each for each in sys.path if each)
  before = os.environ.get("PYTHONPATH")
  os.environ["PYTHONPATH"] = path
  try:
    _server.set_forkserver_preload(["tests.support.multi_worker_imports"])
    multiprocessing.forkserver.ensure_running()
  finally:
    os.environ.pop("PYTHONPATH")
    if before is not None:
      os.environ["PYTHONPATH"] = before


def cluster_of(workers: int) -> list[dict[str, Any]]:
  """A TF_CONFIG for each worker, on free ports of this machine."""
  return [json.loads(each["TF_CONFIG"]) for each in launch.cluster(workers)]


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
    environments = launch.cluster(workers, chief)
  assert len(environments) == workers
  started = [index for index in range(workers) if index not in absent]
  _start_server()
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    processes: dict[int, _Process] = {}
    stack.enter_context(launch.killed_at_end(processes.values()))
    for index in started:
      mine = {**(arguments or {}), **(per_worker[index] if per_worker else {})}
      variables = {**(environment or {}), **environments[index]}
      place = os.path.join(folder, str(index))
      processes[index] = _Process(task, place, variables, mine)
    ends = launch.wait(processes, timeout, _GRACE, may_fail)
    stack.close()
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


def _read(
  place: pathlib.Path,
  index: int,
  process: _Process,
  ends: Mapping[int, float],
) -> Worker:
  """What a process left behind."""
  result = place.with_suffix(".out")
  return Worker(
    index=index,
    returncode=process.poll() or 0,
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
