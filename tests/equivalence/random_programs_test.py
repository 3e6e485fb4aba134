"""Combinations of all settings, drawn at random, against plain Keras and NumPy.

`equivalence_test.py` has one feature at a time. `tools/fuzz.py` tries more
seeds than this test.
"""

import itertools

import pytest

from tests.support import covering, plain_training, random_programs
from tests.support.random_programs import Program


def _settings(program: Program) -> set[tuple[str, str]]:
  """Returns the settings of a program, without its numbers."""
  shape = {
    "group size": len(program.groups[0]),
    "grouping": program.grouping is None,
    "bad": program.bad is None,
    "excluded": bool(program.excluded),
    "resumed": program.resumed_at is not None,
    "mixed dtypes": {"float32", "float64"}
    <= {dtype for _, dtype in program.parts},
    "uneven": program.sizes == (2, 2, 2, 1),
    **{f"{key} of opt": True for key in program.settings},
    **{
      key: value if isinstance(value, str) else bool(value)
      for key, value in program.options.items()
    },
    **{f"kind {kind}": True for kind, _ in program.parts},
    **{f"dtype {dtype}": True for _, dtype in program.parts},
  }
  columns = (
    "way",
    "mode",
    "optimizer",
    "is_raw",
    "is_built",
    "decays",
    "is_per_model",
    "is_partial",
    "is_virtual",
  )
  for column in (*columns, "is_exact"):
    shape[column] = getattr(program, column)
  return {(key, str(value)) for key, value in shape.items()}


def _choose(count: int) -> list[Program]:
  """Returns programs of the first seeds, with most pairs of settings."""
  programs = {seed: random_programs.draw(seed) for seed in range(300)}
  for seed in range(0, 300, 2):
    programs[seed] = random_programs.virtual(programs[seed])
  settings = {seed: sorted(_settings(each)) for seed, each in programs.items()}
  chosen = covering.cover(
    {
      seed: set(itertools.combinations(each, 2))
      for seed, each in settings.items()
    },
    count,
  )
  covered = set().union(*(settings[seed] for seed in chosen))
  assert covered == set().union(*settings.values()), "a setting is in none"
  return [programs[seed] for seed in chosen]


# Some programs have a variable that the loss does not touch.
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
  "program", [pytest.param(each, id=str(each.seed)) for each in _choose(26)]
)
def test_a_random_program(program: Program) -> None:
  print(program)  # pytest shows it if the test fails.
  plain_training.check(program)
