"""Checks that twelve programs still compute their recorded losses and weights.

If a test fails, the change that you test also changes the training of users. If
you want this, record the numbers again (see `tests/support/golden.py`), and say
why in the commit.
"""

import pytest

from tests.support import golden


@pytest.mark.parametrize("name", golden.PROGRAMS)
def test_a_program_computes_the_recorded_numbers(name: str) -> None:
  program = golden.PROGRAMS[name]
  pytest.importorskip(program.keras)
  found, recorded = golden.run(program), golden.read(name)
  assert [label for label, _ in found] == [label for label, _ in recorded]
  for (label, values), (_, expected) in zip(found, recorded, strict=True):
    assert len(values) == len(expected) > 0
    scale = _scale(label, dict(recorded))
    for group, (value, right) in enumerate(zip(values, expected, strict=True)):
      assert abs(value - right) <= program.bound * scale, (
        f"{label} of group {group}: {value!r}, recorded {right!r}"
      )


def _scale(label: str, recorded: dict[str, list[float]]) -> float:
  """Returns the size of a recorded number, which its bound multiplies.

  For a loss, this is the largest loss. If the error of the weights w is at most
  b |w|, then the sum of squares is off by at most 2 b |w|^2. The sum of w may
  be close to zero although w is not, so its bound is relative to |w|.
  """
  what, kind = label.split()
  if what == "loss":
    rows = [numbers for key, numbers in recorded.items() if "loss" in key]
    return max(abs(number) for numbers in rows for number in numbers)
  square = max(recorded[f"{what} squares"])
  if kind == "squares":
    return 2 * square
  return max(square**0.5, *map(abs, recorded[label]))


def test_groups_of_a_program_differ() -> None:
  """The recorded groups differ, so a sum over all replicas is noticed."""
  for label, values in golden.read("sgd_groups"):
    assert values[0] != values[1], label
