"""The files in `tests/saved_files/` load; see `tests/support/saved_files.py`.

In each file, the first step has moved the weights of group 0 from 0 to -0.5,
and those of group 1 to -1.0: half of the gradient. The velocities are the same.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import saved_files, testbed, training
from tf_cross_shard import Models


def check(model: Any, optimizer: Any, expected: list[float]) -> None:
  """Compares weights and velocities, by replica, and the iteration count."""
  for weight in model.trainable_variables:
    slot = optimizer.get_slot(weight, optimizer.get_slot_names()[-1])
    for variable in (weight, slot):
      for copy, value in zip(testbed.copies(variable), expected, strict=True):
        np.testing.assert_array_equal(copy, np.full(weight.shape, value, "f"))
  assert testbed.copies(optimizer.iterations) == [1, 1]


@training.in_both
def test_replica_state(which: str) -> None:
  model, optimizer = saved_files.make(which)
  path = saved_files.FOLDER / which / "state.npz"
  Models(model, optimizer).restore(path)
  check(model, optimizer, [-0.5, -1.0])
  # The window goes on. Velocities are -0.75 and -1.5.
  saved_files.train(model, optimizer, calls=1)
  for weight in model.trainable_variables:
    found = [copy.ravel().tolist() for copy in testbed.copies(weight)]
    assert found == [[-1.25] * len(found[0]), [-2.5] * len(found[0])]


@training.in_both
def test_a_checkpoint(which: str) -> None:
  """It has the values of group 0, for both groups."""
  model, optimizer = saved_files.make(which)
  checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
  path = saved_files.FOLDER / which / "checkpoint"
  checkpoint.read(str(path)).assert_existing_objects_matched()
  check(model, optimizer, [-0.5, -0.5])


@training.in_both
def test_a_model_file(which: str) -> None:
  library, package = training.KERASES[which]
  path = saved_files.FOLDER / which / "model.keras"
  with testbed.mirrored(2).scope():
    model = library.models.load_model(str(path))
  assert type(model.optimizer) is package.CrossShardOptimizer
  _, optimizer = saved_files.make(which)
  configs = [o.get_config() for o in (model.optimizer, optimizer)]
  for config in configs:
    del config["opt"]["config"]["name"]  # Keras numbers its names.
  assert configs[0] == configs[1]
  check(model, model.optimizer, [-0.5, -0.5])
