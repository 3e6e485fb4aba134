"""Combinations of all settings, drawn at random, against plain Keras and NumPy.

`equivalence_test.py` has one feature at a time. RANDOM_SEEDS=1000:2000 tries
other seeds than these.
"""

import pytest
import tensorflow as tf

from tests.support import plain_training, random_programs

FAST = (3, 8, 9, 26, 29, 37, 45, 49, 53, 62)
PARAMETERS = [
  pytest.param(
    seed,
    marks=[pytest.mark.fast, pytest.mark.tf_keras_mode] if seed in FAST else (),
  )
  for seed in random_programs.chosen_seeds(range(70))
]


# Some programs have a variable that the loss does not touch.
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("seed", PARAMETERS)
def test_a_random_program(seed: int) -> None:
  program = random_programs.draw(seed)
  if seed % 2 == 0:
    program = random_programs.virtual(program)
  print(program)  # pytest shows it if the test fails.
  plain_training.check(program)
  tf.keras.backend.clear_session()
