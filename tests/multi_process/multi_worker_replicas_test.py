"""Two workers with two replicas each, as with several GPUs in each machine.

Tests sums in groups inside and across workers, and functions that read the
values of all replicas.
"""

import pathlib
import tempfile
import zlib
from typing import Any

import numpy as np
import pytest

from tests.support import multi_worker_cases as cases
from tests.support import replica_state_workers as program
from tests.support import testbed, workers

STEPS = 2
REPLICAS = range(4)


class Found:
  """The values that the workers returned."""

  def __init__(self) -> None:
    with tempfile.TemporaryDirectory() as folder:
      done = workers.run(
        "local_replicas",
        2,
        arguments={"steps": STEPS, "folder": pathlib.Path(folder)},
      )
    self.sums = [worker.result for worker in done]
    self.results = [found["replica_state"] for found in self.sums]
    here = [result["replicas"] for result in self.results]
    assert here == [[0, 1], [2, 3]]

  def same(self, case: str) -> Any:
    """Returns the value that all workers returned."""
    first, second = (result[case] for result in self.results)
    assert first == second
    return first


@pytest.fixture(scope="module")
def found() -> Found:
  return Found()


@pytest.mark.parametrize("case", cases.POWERS)
def test_sums_over_replicas_of_two_workers(
  found: Found, case: tuple[str, str | None, int]
) -> None:
  """Powers of two: exact, and each sum tells whose gradients are in it."""
  groups = testbed.groups_of(cases.GROUPINGS[4][case[0]], 4)
  for process, results in enumerate(found.sums):
    result = results[case]
    assert result["counter"] == STEPS
    assert len(result["weights"]) == len(result["tables"]) == 2
    for local in range(2):
      members = groups.members_of(2 * process + local)
      table = np.zeros([cases.ROWS, 2])
      for member in members:
        table[: member + 1] -= STEPS * 2.0**member
      weight = -STEPS * sum(2.0**member for member in members)
      np.testing.assert_array_equal(result["weights"][local], [weight] * 3)
      np.testing.assert_array_equal(result["tables"][local], table)


def test_values_of_all_replicas_of_all_workers(found: Found) -> None:
  for result in found.results:
    values = dict(result["values"])
    for dtype in program.DTYPES:
      expected = [program.replica_value(dtype, r).tolist() for r in REPLICAS]
      assert values[dtype] == [(dtype, each) for each in expected]
    assert values["rows"] == [[[r, r]] * (1 + r % 3) for r in REPLICAS]
    assert values["scalar"] == values["total"] == [2.0**r for r in REPLICAS]
  alone = [result["values"]["alone"] for result in found.results]
  assert alone == [[[0.0]], [[1.0]]]  # of a process, not of the strategy


def test_long_values_are_sent_in_several_messages(found: Found) -> None:
  assert found.same("in_parts") == [
    [zlib.crc32(program.numbers(size, r).tobytes()) for r in REPLICAS]
    for size in program.SIZES
  ]


def test_restored_training_equals_uninterrupted_training(found: Found) -> None:
  for i, result in enumerate(found.results):
    resumed = result["resume"]
    assert resumed["wrote"] == (1 if i == 0 else 0)
    assert resumed["differed"] > 10
    assert resumed["trained"] > 10
    assert resumed["restored"] == resumed["continued"] == []
    assert len(set(resumed["groups"])) == len(program.GROUPS) == 2
    for members, value in zip(program.GROUPS, resumed["groups"], strict=True):
      assert [resumed["values"][r] for r in members] == [value] * len(members)


def _words(found: Found, name: str, kind: str) -> list[str]:
  """Checks that both workers raise this kind of error; returns the messages."""
  errors = [result["errors"][name] for result in found.results]
  assert [error["error"] for error in errors] == [kind] * 2
  assert errors[0]["errno"] == errors[1]["errno"]
  return [error["message"] for error in errors]


def test_errors_of_the_first_workers_disk(found: Found) -> None:
  words = _words(found, "full disk", "OSError")
  assert all("No space left" in text for text in words)
  assert "On worker 0 (" in words[1]
  for result in found.results:
    assert result["errors"]["the old file"]
    assert result["errors"]["left behind"] == []


def test_errors_of_one_workers_file(found: Found) -> None:
  for name, words in (
    ("damaged", "is damaged"),
    ("another file", "read different checkpoints"),
  ):
    texts = _words(found, name, "CheckpointError")
    assert all(words in text for text in texts)
    assert "worker 1 (" in texts[0]
    for result in found.results:
      assert result["errors"][f"{name}: unchanged"] == [[[9.0, 9.0]] * 2]
  for result in found.results:
    assert result["errors"]["the same file"]["error"] is None
    assert result["errors"]["the same file: unchanged"] != [[[9.0, 9.0]] * 2]


def test_workers_that_call_different_functions_raise(found: Found) -> None:
  texts = _words(found, "another model", "DisagreementError")
  assert all("model/0: " in text for text in texts)


def test_members_in_different_workers_are_compared(found: Found) -> None:
  first, second = _words(found, "in sync", "OutOfSyncError")
  assert first == second
  assert "`weight` differs within group 0 [0, 3]" in first
  assert "replicas 0 and 3 differ by up to 14." in first
  for result in found.results:  # restored at the end
    for variable in result["errors"]["at the end"]:
      for replica, value in zip(result["replicas"], variable, strict=True):
        index = [replica in members for members in program.GROUPS].index(True)
        assert np.max(value) == index + 1
