"""What goes wrong among real processes ends in an error that says what.

Each launch holds one fault, or all of those after which the workers can go on.
"""
# bazel: size=large timeout=long tags=exclusive

import concurrent.futures
import pathlib
import re
import signal
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest

from tests.support import multi_worker_faults, workers

# Seconds that workers wait for each other here.
SHORT = {"TF_CROSS_SHARD_TIMEOUT": "4"}
LONGEST = 30.0


def _faults(what: str, kind: str = "own") -> dict[str, Any]:
  """Two workers of which the second is the odd one."""
  return {
    "arguments": {"kind": kind, "what": what},
    "per_worker": [{"odd": False}, {"odd": True}],
    "environment": SHORT,
  }


# The task, the number of workers and the options of each launch. Those that
# wait long come first; nobody computes meanwhile.
LAUNCHES: dict[str, tuple[str, int, dict[str, Any]]] = {
  "missing first": ("start", 2, {"absent": [0], "arguments": {"timeout": 4.0}}),
  "missing other": ("start", 3, {"absent": [2], "environment": SHORT}),
  "missing chief": (
    *("start", 3),
    {"absent": [0], "chief": True, "environment": SHORT},
  ),
  "older": ("start", 2, {"per_worker": [{"older": False}, {"older": True}]}),
  "disagree own": ("faults", 2, _faults("disagree")),
  "disagree tensorflow": ("faults", 2, _faults("disagree", "tensorflow")),
  **{
    f"made {what}": ("faults", 2, _faults(what))
    for what in multi_worker_faults.MADE
  },
  "lost 0": ("lose", 3, {"arguments": {"kind": "own", "killed": 0}}),
  "lost 1": ("lose", 3, {"arguments": {"kind": "tensorflow", "killed": 1}}),
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
      for name, (task, count, options) in LAUNCHES.items()
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
  ("launch", "left", "missing"),
  [
    ("missing first", 1, _name(0)),
    ("missing other", 2, _name(2)),
    ("missing chief", 2, _name(0, "chief")),
  ],
)
def test_a_worker_that_does_not_start_is_named(
  launches: Launches, launch: str, left: int, missing: str
) -> None:
  reports = launches.reports(launch)
  assert len(reports) == left
  # The first waits for all, and the others for the first.
  wanted = reports[:1] if launch == "missing other" else reports
  for report in wanted:
    _assert_says(
      report,
      "MissingWorkerError",
      rf"waited 4 s for {missing} to start.*TF_CROSS_SHARD_TIMEOUT",
    )
  for report in reports:
    assert report["error"] == "MissingWorkerError"


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


# --------------------------------------------------------------- disagreement

DIFFERENCES = {
  "group_assignment": (r"group_assignment: \[\[0\], \[1\]\]", r"\[\[0, 1\]\]"),
  "wire_dtype": ("wire_dtype: bfloat16", "wire_dtype: None"),
  "reduction": ("reduction: sum", "reduction: mean"),
  "order": (r"variable 0: b float32 \[2, 3\]", r"a float32 \[3\]"),
  "no gradient": ("gradient 0: None", "gradient 0: float32"),
  "sparse gradient": ("gradient 1: float32 rows", "gradient 1: float32"),
  "iterations": ("iterations: 5", "iterations: 0"),
  "versions": (r"tf_cross_shard: 0\.0\.1", "tf_cross_shard: "),
}


@pytest.mark.parametrize(
  ("launch", "what"),
  [
    (f"disagree {kind}", what)
    for kind, those in multi_worker_faults.DIFFERENCES.items()
    for what in those
  ],
)
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
    re.escape(str(numbers)) for numbers in multi_worker_faults.CHECKPOINTS[what]
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
    rf"{_name(0)} waited 4 s for {_name(1)} at: the building of"
    r" CrossShardOptimizer\. It does not run, or does something else",
  )
  assert first["absence"]["unchanged"]


EITHER = rf"({_name(0)}|{_name(1)})"
MADE = {
  "fewer": (
    "DisagreementError",
    rf"{_name(1)} makes iteration .* where {_name(0)} makes kernel",
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
  [("lost 0", 0), ("lost 1", 1)],
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


def test_killed_and_resumed_is_as_undisturbed(tmp_path: pathlib.Path) -> None:
  """In groups, so that each worker goes on from what it alone has saved."""

  def run(name: str, **options: Any) -> list[dict[str, Any]]:
    done = workers.run(
      "resume",
      2,
      arguments={"folder": tmp_path / name, **options},
      may_fail=[1] if options else [],
    )
    return [worker.result for worker in done]

  undisturbed = run("whole")
  left, killed = run("killed", dies=True)
  assert killed is None
  _assert_says(left, "WorkerLostError", r"^worker 1\b.* was lost")
  resumed = run("killed")
  assert resumed[0]["state"][0].tolist() != resumed[1]["state"][0].tolist()
  for mine, whole in zip(resumed, undisturbed, strict=True):
    assert mine["epochs"] == [2, 3]
    assert whole["epochs"] == [0, 1, 2, 3]
    for one, other in zip(mine["state"], whole["state"], strict=True):
      assert one.tobytes() == other.tobytes()


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
