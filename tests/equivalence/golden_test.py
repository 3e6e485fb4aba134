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
    # Of all losses, or of all sums of the same weight.
    largest = max(
      abs(value)
      for other, numbers in recorded
      for value in numbers
      if other.split()[0] == label.split()[0]
    )
    for group, (value, right) in enumerate(zip(values, expected, strict=True)):
      assert abs(value - right) <= program.bound * largest, (
        f"{label} of group {group}: {value!r}, recorded {right!r}"
      )


def test_groups_of_a_program_differ() -> None:
  """The recorded groups differ, so a sum over all replicas is noticed."""
  for label, values in golden.read("sgd_groups"):
    assert values[0] != values[1], label
