"""Tests errors of several workers, in real processes.

Each launch tests one fault, or all faults after which the workers can continue.
"""

import concurrent.futures
import json
import pathlib
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support import multi_worker_faults, programs, workers
from tf_cross_shard_cli import launch

# Seconds that workers wait for each other here.
SHORT = {"TF_CROSS_SHARD_TIMEOUT": "15"}
TIMEOUT = {"arguments": {"timeout": 15.0}}
LONGEST = 300.0


def _faults(what: str, workers: int = 2) -> dict[str, Any]:
  """Returns the options of a launch, in which worker 1 has the fault."""
  return {
    "arguments": {"what": what},
    "per_worker": [{"odd": i == 1} for i in range(workers)],
    "environment": SHORT,
  }


# The task, the number of workers and the options of each launch. Those that
# wait long come first; nobody computes meanwhile.
LAUNCHES: dict[str, tuple[str, int, dict[str, Any]]] = {
  "missing other": ("start", 3, {"absent": [2], "environment": SHORT}),
  "missing chief": ("start", 2, {"absent": [0], "chief": True, **TIMEOUT}),
  "older": ("start", 3, {"per_worker": [{"older": i == 1} for i in range(3)]}),
  "disagree": ("faults", 3, _faults("disagree", 3)),
  **{
    f"made {what}": ("faults", 2, _faults(what))
    for what in multi_worker_faults.MADE
  },
  "stalled": (
    *("stall", 3),
    {
      "per_worker": [{"odd": False}, {"odd": True}, {"odd": False}],
      "environment": {"TF_CROSS_SHARD_STEP_TIMEOUT": "20"},
    },
  ),
  "lost, others wait": ("lose_waiting", 3, {}),
  "lost 0": ("lose", 3, {"arguments": {"kind": "own", "killed": 0}}),
  "lost 1": ("lose", 3, {"arguments": {"kind": "tensorflow", "killed": 1}}),
}


class Launches:
  """Starts all launches in the background, two at a time."""

  def __init__(self, pool: concurrent.futures.Executor) -> None:
    self._running = {
      name: pool.submit(
        workers.run, task, count, may_fail=range(count), **options
      )
      for name, (task, count, options) in LAUNCHES.items()
    }

  def workers(self, name: str) -> list[workers.Worker]:
    """Returns the workers that were not killed.

    Checks that each of them has exited without an error.
    """
    done = self._running[name].result()
    left = [worker for worker in done if worker.returncode != -signal.SIGKILL]
    for worker in left:
      assert worker.returncode == 0, worker.output
      assert worker.result, worker.output
    return left

  def reports(self, name: str) -> list[dict[str, Any]]:
    """Returns what each worker reported: the class and text of its error."""
    return [worker.result for worker in self.workers(name)]


@pytest.fixture(scope="module")
def launches() -> Iterator[Launches]:
  with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
    yield Launches(pool)


def _name(index: int, job: str = "worker") -> str:
  """Returns a regular expression for a worker's name in errors."""
  return rf"{job} {index} \(localhost:\d+\)"


def _assert_says(report: Mapping[str, Any], error: str, words: str) -> None:
  assert report["error"] == error, report
  assert re.search(words, report["message"]), report["message"]
  assert report["seconds"] < LONGEST


# ------------------------------------------------------------------- no start


def test_a_worker_that_does_not_start_is_named(launches: Launches) -> None:
  """The first worker waits for all workers; the others wait for the first."""
  first, _ = launches.reports("missing other")
  (other,) = launches.reports("missing chief")
  for report, missing in ((first, _name(2)), (other, _name(0, "chief"))):
    _assert_says(
      report,
      "MissingWorkerError",
      rf"waited 15 s for {missing} to start.*TF_CROSS_SHARD_TIMEOUT",
    )
  for report in launches.reports("missing other"):
    assert report["error"] == "MissingWorkerError"


def test_waiting_for_an_unreachable_worker_ends(
  tmp_path: pathlib.Path,
) -> None:
  """A port accepts connections, but no worker answers there."""
  (tmp_path / "program.py").write_text(
    "from tf_cross_shard import multi_worker\n"
    "multi_worker.MultiWorkerStrategy(timeout=2)\n"
  )
  with socket.create_server(("localhost", 0)) as silent:
    [first, _] = launch.cluster(2)
    config = json.loads(first["TF_CONFIG"])
    port = silent.getsockname()[1]
    config["cluster"]["worker"][1] = f"localhost:{port}"
    with pytest.raises(AssertionError) as caught:
      programs.run(["program.py"], tmp_path, TF_CONFIG=json.dumps(config))
  assert re.search(
    r"(?s)Timeout \(0:00:12\)!.* in ensure_initialized\n.*program\.py",
    str(caught.value),
  )


def test_another_version_at_the_start(launches: Launches) -> None:
  """Every worker reports it, although each ends when it has done so."""
  reports = launches.reports("older")
  assert len(reports) == 3
  for report in reports:
    _assert_says(
      report,
      "DisagreementError",
      rf"{_name(1)} has `tf_cross_shard: 0\.0\.1` where {_name(0)} has"
      rf" `tf_cross_shard: (?!0\.0\.1`)",
    )


# --------------------------------------------------------------- disagreement

DIFFERENCES = {
  "group_assignment": (
    r"group_assignment: \[\[0\], \[1\], \[2\]\]",
    r"\[\[0, 1, 2\]\]",
  ),
  "order": (r"variable 0: b float32 \[2, 3\]", r"a float32 \[3\]"),
  "sparse gradient": ("gradient 1: float32 rows", "gradient 1: float32"),
  "iterations": ("iterations: 5", "iterations: 0"),
}


def _assert_differs(report: Mapping[str, Any], what: str, odd: int = 1) -> None:
  theirs, ours = DIFFERENCES[what]
  _assert_says(
    report,
    "DisagreementError",
    rf"{_name(odd)} has `{theirs}` where {_name(0)} has `[^`]*{ours}[^`]*`",
  )
  assert report["unchanged"]


def test_workers_that_differ_raise_the_difference(launches: Launches) -> None:
  """The workers can train after the error."""
  reports = launches.reports("disagree")
  assert len(reports) == 3
  for report in reports:
    for what in DIFFERENCES:
      _assert_differs(report[what], what)
    assert report["nothing"]["error"] is None, report["nothing"]
    assert not report["nothing"]["unchanged"]


def test_an_empty_variable_is_refused(launches: Launches) -> None:
  """TensorFlow ends the process if it broadcasts an empty variable."""
  for report in launches.reports("disagree"):
    _assert_says(
      report["empty"], "ValueError", r"variable .* \(0, 3\) is empty"
    )


def test_a_worker_that_does_something_else_is_named(
  launches: Launches,
) -> None:
  """The last worker starts to wait later, and does not wait longer."""
  first, _, last = launches.reports("disagree")
  for report in (first["absence"], last["absence"]):
    _assert_says(
      report,
      "MissingWorkerError",
      rf"{_name(0)} waited 15 s for {_name(1)} at: the building of"
      r" CrossShardOptimizer\. Each missing worker is not running, or is doing",
    )
    assert report["unchanged"]


CREATING = rf"({_name(0)}|{_name(1)}) was creating the variable"
MADE = {
  "fewer": (
    "DisagreementError",
    rf"expected type .* but got .* {CREATING} (kernel|iteration)",
  ),
  "shape": (
    "DisagreementError",
    rf"expected shape \[3,[45]\] but .*\[3,[45]\].* {CREATING} kernel",
  ),
}


@pytest.mark.parametrize("what", multi_worker_faults.MADE)
def test_variables_that_workers_make_differently(
  launches: Launches, what: str
) -> None:
  reports = launches.reports(f"made {what}")
  assert len(reports) == 2
  for report in reports:
    _assert_says(report, *MADE[what])
    assert report["unchanged"]


# ----------------------------------------------------------------------- loss


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_worker_is_named_by_the_other_workers(
  launches: Launches, killed: int
) -> None:
  """SIGKILL arrives after some of the step's sums."""
  left = launches.workers(f"lost {killed}")
  assert [w.index for w in left] == [i for i in range(3) if i != killed]
  for worker in left:
    report = worker.result
    _assert_says(report, "WorkerLostError", rf"^worker {killed}\b.* was lost")
    assert report["trained"] == -3.0  # the sum of the step before
    assert report["unchanged"]
    # Under TensorFlow's strategy workers compare what they do, too.
    if killed == 1:
      _assert_differs(report["differ"], "sparse gradient", odd=2)


def test_waiting_without_a_limit_ends_if_a_worker_is_killed(
  launches: Launches,
) -> None:
  """Worker 2 is killed while the other workers wait for it."""
  for report in launches.reports("lost, others wait"):
    _assert_says(report, "WorkerLostError", r"^worker 2\b.* was lost")


def test_a_wait_for_a_worker_that_is_stuck_ends(launches: Launches) -> None:
  """The stuck process runs, so TensorFlow alone would wait forever.

  Before that, a worker is slow for half of the limit, and no wait ends.
  """
  first, stuck, other = launches.reports("stalled")
  for report in (first, other):
    place = r"which is at multi_worker_faults\.py, line \d+, in step\."
    words = rf"waited 20 s in a step .* for {_name(1)}, {place}"
    _assert_says(report, "MissingWorkerError", words)
  for report in (first, stuck, other):
    assert report["trained"] == -3.0 - 4.5  # sums of two steps, with momentum


def test_resumed_training_equals_uninterrupted_training(
  tmp_path: pathlib.Path,
) -> None:
  """A worker is killed while the other one writes the third backup.

  The workers are in different groups, so each has values of its own.
  """

  def run(dies: bool) -> list[dict[str, Any]]:
    arguments = {"folder": tmp_path, "dies": dies}
    may_fail = [1] if dies else []
    done = workers.run(
      *("resume", 2), arguments=arguments, may_fail=may_fail, environment=SHORT
    )
    return [worker.result for worker in done]

  left, killed = run(dies=True)
  assert killed is None
  # TensorFlow reports the loss after about ten seconds. On a busy machine, the
  # wait of 15 seconds for the other worker may end first.
  if left["error"] == "WorkerLostError":
    _assert_says(left, "WorkerLostError", r"^worker 1\b.* was lost")
  else:
    _assert_says(left, "MissingWorkerError", rf"for {_name(1)} at: a backup\.")
  assert left["files"] == [f"epoch_{i}.npz" for i in (1, 2, 3)]
  done = run(dies=False)
  assert done[0]["state"][0].tolist() != done[1]["state"][0].tolist()
  for resumed in done:
    _assert_as_undisturbed(resumed, [3])


def test_backups_in_a_folder_that_one_worker_does_not_see(
  tmp_path: pathlib.Path,
) -> None:
  done = workers.run(
    *("resume", 2),
    arguments={"dies": True},
    per_worker=[{"folder": tmp_path / str(i)} for i in range(2)],
    environment=SHORT,
  )
  words = rf"{_name(1)} does not see what {_name(0)} writes\. Name one folder"
  for worker in done:
    _assert_says(worker.result, "CheckpointError", words)
    assert worker.result["epochs"] == []
  assert done[0].result["files"] == []


def _assert_as_undisturbed(resumed: dict[str, Any], epochs: list[int]) -> None:
  whole = resumed["undisturbed"]
  assert resumed["epochs"] == epochs
  assert whole["epochs"] == [0, 1, 2, 3]
  assert resumed["losses"] == whole["losses"][epochs[0] :]
  for value, right in zip(resumed["state"], whole["state"], strict=True):
    assert value.tobytes() == right.tobytes()


def test_four_workers_resume_after_two_were_killed(
  tmp_path: pathlib.Path,
) -> None:
  def run(count: int, name: str, killed_after: int | None) -> Any:
    return workers.run(
      *("fit", count),
      arguments={"folder": tmp_path / name, "killed_after": killed_after},
      may_fail=range(count) if killed_after else (),
    )[0]

  undisturbed = run(2, "undisturbed", None).result
  assert run(2, "backups", 13).returncode == -signal.SIGKILL
  resumed = run(4, "backups", None).result
  assert resumed["epochs"] == [1, 2]  # The first epoch was complete.
  for value, right in zip(
    resumed["weights"], undisturbed["weights"], strict=True
  ):
    np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)


def test_a_signal_to_one_worker_ends_all_after_one_batch(
  tmp_path: pathlib.Path,
) -> None:
  """The signal arrives within an epoch, where both workers resume."""
  arguments = {"folder": tmp_path, "dies": False}
  done = workers.run(
    *("resume", 2),
    arguments={**arguments, "signalled": 0},
    may_fail=[0, 1],
    environment=SHORT,
  )
  assert [worker.returncode for worker in done] == [143, 143]
  names = {path.name for path in (tmp_path / "backup").iterdir()}
  assert names == {"epoch_1.npz", "epoch_1_batch_2.npz"}
  for worker in workers.run(
    *("resume", 2), arguments=arguments, environment=SHORT
  ):
    _assert_as_undisturbed(worker.result, [1, 2, 3])
