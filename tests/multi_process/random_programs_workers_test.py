"""Random programs on two workers, against plain Keras and NumPy.

`tools/fuzz.py --workers` tries more seeds than this test.
"""

import pathlib

import pytest

from tests.support import plain_training, random_programs, workers

# Windows that contain a NaN: in shards, with variables of two dtypes, and with
# state that moves to another model in the middle of a window.
SEEDS = (47, 55, 66, 107)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_random_programs_on_workers(tmp_path: pathlib.Path) -> None:
  programs = {seed: random_programs.draw(seed, 2) for seed in SEEDS}
  for program in programs.values():
    assert program.bad
    assert program.options["accumulate_steps"] == 2
  done = workers.run(
    "random", 2, arguments={"seeds": SEEDS, "folder": tmp_path}
  )
  for seed, program in programs.items():
    print(program)  # pytest shows it if the test fails.
    plain_training.check(program, [worker.result[seed] for worker in done])
