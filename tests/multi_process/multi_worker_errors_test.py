"""What goes wrong among real processes ends in an error that says what.

Each launch holds one fault, or all of those after which the workers can go on.
"""
# bazel: size=large timeout=long tags=exclusive

import concurrent.futures
import re
import signal
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support import multi_worker_cases as cases
from tests.support import multi_worker_faults, workers

# Seconds that workers wait for each other here, and by default.
SHORT = {"TF_CROSS_SHARD_TIMEOUT": "6"}
LONGEST = 60.0
ODD = [{"odd": False}, {"odd": True}]
BAD_TF_CONFIG = (
  '{"cluster": {"worker": ["localhost:1", "localhost:2"]},'
  ' "task": {"type": "worker", "index": 2}}'
)


def _on_ports(starter: str) -> dict[str, Any]:
  """Workers whose resolver is made in Python."""
  ports = ",".join(map(str, workers.free_ports(2)))
  return {
    "arguments": {"starter": starter},
    "environments": [
      {"TEST_PORTS": ports, "TEST_INDEX": str(index)} for index in range(2)
    ],
  }


def _faults(what: str, kind: str = "own") -> dict[str, Any]:
  """Two workers of which the second is the odd one."""
  return {
    "arguments": {"kind": kind, "what": what},
    "per_worker": ODD,
    "environment": SHORT,
  }


def _launches() -> dict[str, tuple[str, int, dict[str, Any]]]:
  """The task, the number of workers and the options of each launch.

  Those that wait long come first; nobody computes meanwhile. The others follow
  in the order in which tests ask for them, so that none waits for all.
  """
  return {
    "missing, default timeout": ("start", 2, {"absent": [1]}),
    "missing first": (
      "start",
      2,
      {"absent": [0], "arguments": {"timeout": 6.0}},
    ),
    "missing chief": (
      "start",
      3,
      {"absent": [0], "chief": True, "environment": SHORT},
    ),
    "older": (
      "start",
      2,
      {"per_worker": [{"older": False}, {"older": True}]},
    ),
    "malformed": ("start", 1, {"environments": [{"TF_CONFIG": BAD_TF_CONFIG}]}),
    "Kubernetes": ("start", 2, _on_ports("Kubernetes")),
    "disagree own": ("faults", 2, _faults("disagree")),
    "disagree tensorflow": ("faults", 2, _faults("disagree", "tensorflow")),
    **{
      f"made {what}": ("faults", 2, _faults(what))
      for what in multi_worker_faults.MADE
    },
    **{
      f"lost {killed} {kind}": (
        "lose",
        3,
        {"arguments": {"kind": kind, "killed": killed}},
      )
      for killed, kind in ((0, "own"), (1, "tensorflow"))
    },
  }


class Launches:
  """Runs two launches at a time, and all while the first test waits."""

  def __init__(
    self, pool: concurrent.futures.Executor, names: Collection[object]
  ) -> None:
    self._running = {
      name: pool.submit(
        workers.run, task, count, may_fail=range(count), **options
      )
      for name, (task, count, options) in _launches().items()
      if name in names
    }

  def workers(self, name: str) -> list[workers.Worker]:
    """The workers that were not killed; each said something and ended."""
    done = self._running[name].result()
    left = [worker for worker in done if worker.returncode != -signal.SIGKILL]
    for worker in left:
      assert worker.returncode == 0, worker.output
      assert worker.result, worker.output
    return left

  def reports(self, name: str) -> list[dict[str, Any]]:
    """What they said."""
    return [worker.result for worker in self.workers(name)]


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> Iterator[Launches]:
  """The launches of those tests of this file that are to run."""
  chosen = {
    item.callspec.params["launch"]
    for item in request.session.items
    if isinstance(item, pytest.Function) and item.path == request.path
  }
  with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
    yield Launches(pool, chosen)


def _name(index: int, job: str = "worker") -> str:
  """How errors call a worker, as an expression."""
  return rf"{job} {index} \(localhost:\d+\)"


def _assert_says(report: Mapping[str, Any], error: str, words: str) -> None:
  assert report["error"] == error, report
  assert re.search(words, report["message"]), report["message"]
  assert report["seconds"] < LONGEST


# ------------------------------------------------------------------- no start


@pytest.mark.parametrize(
  ("launch", "missing"),
  [
    ("missing first", _name(0)),
    ("missing chief", _name(0, "chief")),
    pytest.param("missing, default timeout", _name(1), marks=pytest.mark.slow),
  ],
)
def test_a_worker_that_does_not_start_is_named(
  launches: Launches, launch: str, missing: str
) -> None:
  seconds = "50" if "default" in launch else "6"
  reports = launches.reports(launch)
  assert len(reports) == (2 if "chief" in launch else 1)
  for report in reports:
    _assert_says(
      report,
      "MissingWorkerError",
      rf"waited {seconds} s for {missing} to start.*TF_CROSS_SHARD_TIMEOUT",
    )
    assert not report["sums"]


@pytest.mark.parametrize("launch", ["older"])
def test_another_version_at_the_start(launches: Launches, launch: str) -> None:
  reports = launches.reports(launch)
  assert len(reports) == 2
  for report in reports:
    _assert_says(
      report,
      "DisagreementError",
      rf"{_name(1)} has `tf_cross_shard: 0\.0\.1` where {_name(0)} has"
      rf" `tf_cross_shard: (?!0\.0\.1`)",
    )


@pytest.mark.parametrize("launch", ["malformed"])
def test_a_malformed_tf_config(launches: Launches, launch: str) -> None:
  [report] = launches.reports(launch)
  _assert_says(report, "ValueError", "TF_CONFIG has task index 2, but job")
  assert BAD_TF_CONFIG in report["message"]
  assert report["seconds"] < 5.0


@pytest.mark.parametrize("launch", ["Kubernetes"])
def test_what_else_starts_workers(launches: Launches, launch: str) -> None:
  """Slurm is in multi_worker_test."""
  reports = launches.reports(launch)
  assert len(reports) == 2
  each = [cases.dense_gradients("small", replica) for replica in range(2)]
  for report in reports:
    assert report["error"] is None, report["message"]
    for held, *grads in zip(report["sums"], *each, strict=True):
      np.testing.assert_array_equal(held, -sum(grads))


# --------------------------------------------------------------- disagreement

DIFFERENCES = {
  "group_assignment": (r"group_assignment: \[\[0\], \[1\]\]", r"\[\[0, 1\]\]"),
  "wire_dtype": ("wire_dtype: bfloat16", "wire_dtype: None"),
  "reduction": ("reduction: sum", "reduction: mean"),
  "fewer variables": ("variables: 1", r"variable 1: b float32 \[2, 3\]"),
  "more variables": (r"variable 2: a(_\d+)? float32 \[4\]", "variables: 2"),
  "order": (r"variable 0: b float32 \[2, 3\]", r"a float32 \[3\]"),
  "dtype": (r"variable 0: a(_\d+)? float64 \[3\]", r"a float32 \[3\]"),
  "shape": (r"variable 0: a(_\d+)? float32 \[4\]", r"a float32 \[3\]"),
  "no gradient": ("gradient 0: None", "gradient 0: float32"),
  "sparse gradient": ("gradient 1: float32 rows", "gradient 1: float32"),
  "dtype of gradient": ("gradient 0: float16", "gradient 0: float32"),
  "iterations": ("iterations: 5", "iterations: 0"),
  "versions": (r"tf_cross_shard: 0\.0\.1", "tf_cross_shard: "),
}


@pytest.mark.parametrize("what", multi_worker_faults.DIFFERENCES)
@pytest.mark.parametrize("launch", ["disagree own", "disagree tensorflow"])
def test_workers_that_differ_are_told_in_what(
  launches: Launches, launch: str, what: str
) -> None:
  odd, even = DIFFERENCES[what]
  reports = launches.reports(launch)
  assert len(reports) == 2
  for report in reports:
    _assert_says(
      report[what],
      "DisagreementError",
      rf"{_name(1)} has `{odd}` where {_name(0)} has `[^`]*{even}[^`]*`",
    )
    assert report[what]["unchanged"]


@pytest.mark.parametrize("launch", ["disagree own", "disagree tensorflow"])
def test_they_can_go_on_afterwards(launches: Launches, launch: str) -> None:
  for report in launches.reports(launch):
    assert report["nothing"]["error"] is None, report["nothing"]
    assert not report["nothing"]["unchanged"]


@pytest.mark.parametrize(
  ("what", "chosen"), [("one is newer", 20), ("none", None)]
)
@pytest.mark.parametrize("launch", ["disagree own"])
def test_the_newest_checkpoint_that_all_have(
  launches: Launches, launch: str, what: str, chosen: int | None
) -> None:
  for report in launches.reports(launch):
    assert report[what]["error"] is None, report[what]
    assert report[what]["chosen"] == [chosen]


@pytest.mark.parametrize("what", ["no common one", "none on one"])
@pytest.mark.parametrize("launch", ["disagree own"])
def test_no_checkpoint_that_all_have(
  launches: Launches, launch: str, what: str
) -> None:
  first, second = (
    re.escape(str(numbers)) if numbers else "none"
    for numbers in multi_worker_faults.CHECKPOINTS[what]
  )
  for report in launches.reports(launch):
    _assert_says(
      report[what],
      "DisagreementError",
      rf"{_name(0)} has {first}; {_name(1)} has {second}\. Copy those",
    )
    assert not report[what]["chosen"]


@pytest.mark.parametrize("launch", ["disagree own", "disagree tensorflow"])
def test_a_worker_that_does_something_else_meanwhile(
  launches: Launches, launch: str
) -> None:
  first, _ = launches.reports(launch)
  _assert_says(
    first["absence"],
    "MissingWorkerError",
    rf"{_name(0)} waited 6 s for {_name(1)} at: the building of"
    r" CrossShardOptimizer\. It does not run, or does something else",
  )
  assert first["absence"]["unchanged"]


EITHER = rf"({_name(0)}|{_name(1)})"
MADE = {
  "fewer": (
    "DisagreementError",
    rf"{_name(1)} makes iteration .* where {_name(0)} makes kernel",
  ),
  "more": (
    "DisagreementError",
    rf"{_name(1)} makes kernel .* where {_name(0)} makes iteration",
  ),
  "shape": (
    "DisagreementError",
    rf"expected shape \[3,[45]\] but .*\[3,[45]\].* {EITHER}, kernel",
  ),
  "fewer at the end": (
    "MissingWorkerError",
    rf"{_name(1)} waited .* for {_name(0)}",
  ),
  "more at the end": (
    "DisagreementError",
    rf"{_name(1)} makes kernel .* where {_name(0)} makes no more variables",
  ),
}


@pytest.mark.parametrize(
  "launch", [f"made {what}" for what in multi_worker_faults.MADE]
)
def test_variables_that_workers_make_differently(
  launches: Launches, launch: str
) -> None:
  error, words = MADE[launch.removeprefix("made ")]
  reports = launches.reports(launch)
  assert len(reports) == 2
  for report in reports:
    assert re.fullmatch(error, report["error"] or ""), report
    _assert_says(report, report["error"], words)
    assert report["unchanged"]


# ----------------------------------------------------------------------- loss


@pytest.mark.parametrize(
  ("launch", "killed"),
  [("lost 0 own", 0), ("lost 1 tensorflow", 1)],
)
def test_the_others_name_a_worker_that_is_killed(
  launches: Launches, launch: str, killed: int
) -> None:
  """Killed with SIGKILL, when some of the step's sums are there already."""
  left = launches.workers(launch)
  assert [w.index for w in left] == [i for i in range(3) if i != killed]
  for worker in left:
    report = worker.result
    _assert_says(report, "WorkerLostError", rf"^worker {killed}\b.* was lost")
    assert report["seconds"] < 30.0
    assert report["trained"] == -3.0  # the sum of the step before
    assert report["unchanged"]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
