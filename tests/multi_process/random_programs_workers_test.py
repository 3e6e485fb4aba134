"""Random programs on two workers, against plain Keras and NumPy.

RANDOM_SEEDS=1000:1500 tries other seeds than these.
"""

import pathlib
from collections.abc import Sequence

import pytest

from tests.support import plain_training, random_programs, workers

# Windows that contain a NaN: in shards, with variables of two dtypes, and with
# state that moves to another model in the middle of a window. Also loss scales
# with uneven batches.
SEEDS = random_programs.chosen_seeds((11, 31, 47, 55, 66, 107))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
  "seeds", [SEEDS[i : i + 10] for i in range(0, len(SEEDS), 10)], ids=str
)
def test_random_programs_on_workers(
  seeds: Sequence[int], tmp_path: pathlib.Path
) -> None:
  done = workers.run(
    "random", 2, arguments={"seeds": seeds, "folder": tmp_path}
  )
  for seed in seeds:
    program = random_programs.draw(seed, 2)
    print(program)  # pytest shows it if the test fails.
    plain_training.check(program, [worker.result[seed] for worker in done])
