"""Forks processes that train together, and ends every one of them."""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support import forking, multi_worker_tasks
from tf_cross_shard_cli import launch

# The number of seconds in which the other workers must end by themselves after
# a worker has failed.
_GRACE = 60.0


@dataclasses.dataclass(frozen=True)
class Worker:
  """The result of one process.

  `returncode` is as in `subprocess`: negative for a signal. `result` is what
  the task returned, or None.
  """

  index: int
  returncode: int
  seconds: float
  output: str
  result: Any


class WorkersFailedError(AssertionError):
  """Raised if a worker fails unexpectedly; has the logs of all workers."""


def run(
  task: str,
  workers: int,
  *,
  timeout: float = 900.0,
  arguments: Mapping[str, Any] | None = None,
  per_worker: Sequence[Mapping[str, Any]] = (),
  environment: Mapping[str, str] | None = None,
  chief: bool = False,
  absent: Sequence[int] = (),
  may_fail: Sequence[int] = (),
) -> list[Worker]:
  """Runs a task in several processes at once, and waits for all of them.

  `per_worker` has the arguments of each worker, and `environment` has the
  environment variables of all workers. `chief` says whether the first worker
  has the task type "chief". Workers in `absent` are not started. Workers in
  `may_fail` may end with an error or be killed. The function raises
  `WorkersFailedError` if any other worker fails, or after `timeout` seconds.
  """
  environments = launch.cluster(workers, chief)
  started = [index for index in range(workers) if index not in absent]
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    processes: dict[int, forking.Process] = {}
    stack.enter_context(launch.killed_at_end(processes.values()))
    for index in started:
      mine = {**(arguments or {}), **(per_worker[index] if per_worker else {})}
      variables = {**(environment or {}), **environments[index]}
      place = os.path.join(folder, str(index))
      processes[index] = forking.Process(
        *(multi_worker_tasks.run, task, place, variables, mine)
      )
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
    raise WorkersFailedError(_report(task, done, failed, timeout))
  return done


def _read(
  place: pathlib.Path,
  index: int,
  process: forking.Process,
  ends: Mapping[int, float],
) -> Worker:
  result = place.with_suffix(".out")
  return Worker(
    index=index,
    returncode=process.poll() or 0,
    seconds=ends.get(index, float("inf")),
    output=place.with_suffix(".log").read_text(errors="replace"),
    result=pickle.loads(result.read_bytes()) if result.exists() else None,
  )


def _report(
  task: str, done: Sequence[Worker], failed: Sequence[int], timeout: float
) -> str:
  parts = [f"{task}: failed or not done after {timeout:g} s: {failed}"]
  for worker in done:
    parts.append(
      f"--- worker {worker.index}, exit {worker.returncode},"
      f" {worker.seconds:.1f} s ---\n{worker.output}"
    )
  return "\n".join(parts)
