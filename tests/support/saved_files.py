"""Writes the files in `tests/saved_files/`, which guard the format.

A commit that changes the format on purpose writes them again, and says why:

    python -m tests.support.saved_files

Two groups of one replica train. The gradient of each element is 1 in group 0,
and 2 in group 1. Two of three calls made a step; one waits in the window.
"""

import pathlib
from typing import Any, Final

import tensorflow as tf

from tests.support import logical_devices, testbed, training
from tf_cross_shard import Models

FOLDER: Final = pathlib.Path(__file__).parent.parent / "saved_files"


def make(which: str) -> tuple[Any, Any]:
  """Returns a built model on two replicas, and its optimizer."""
  library, package = training.KERASES[which]
  with testbed.mirrored(2).scope():
    dense = library.layers.Dense(1, kernel_initializer="zeros", name="dense")
    model = library.Sequential([library.Input((2,)), dense], name="model")
    optimizer = package.CrossShardOptimizer(
      library.optimizers.SGD(0.5, momentum=0.5),
      group_assignment=[[0], [1]],
      accumulate_steps=2,
      skip_nonfinite=True,
    )
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
  return model, optimizer


def train(model: Any, optimizer: Any, calls: int) -> None:

  def step() -> None:
    number = tf.cast(testbed.replica_id() + 1, tf.float32)
    grads = [number * tf.ones(v.shape) for v in model.trainable_variables]
    pairs = zip(grads, model.trainable_variables, strict=True)
    optimizer.apply_gradients(pairs)

  for _ in range(calls):
    testbed.mirrored(2).run(step)


def write(which: str) -> None:
  """Trains, and saves in three ways."""
  folder = FOLDER / which
  folder.mkdir(parents=True, exist_ok=True)
  model, optimizer = make(which)
  train(model, optimizer, calls=3)
  Models(model, optimizer).save(folder / "state.npz")
  checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
  checkpoint.write(str(folder / "checkpoint"))
  model.save(str(folder / "model.keras"))


if __name__ == "__main__":
  logical_devices.split_cpu(2)
  for name in training.KERASES:
    write(name)
