"""Times halving in groups beside the same trials one after the other.

    python benchmarks/trials.py --rounds=3

16 trials on handwritten digits, a quarter of them for each: for 2 epochs all,
for 4 the best half, for 8 the best four. In plain Keras each is a model and a
`fit` of its own, which goes on where it was; here four at a time are groups.
"""

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import tensorflow as tf
import timing
from sklearn import datasets

from tf_cross_shard import CrossShardOptimizer, callbacks, groups, trials

_GROUPS, _BATCH, _EPOCHS = 4, 32, 8
_SETTINGS = [
  {"learning_rate": float(rate)} for rate in np.geomspace(0.0003, 0.3, 16)
]


def _model(width: int) -> Any:
  """Returns a network whose layers have `width` channels."""
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input((8, 8, 1)),
      layers.Conv2D(width, 3, padding="same", activation="relu"),
      layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
      layers.Flatten(),
      layers.Dense(10),
    ]
  )


def _loss() -> Any:
  return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _in_groups(strategy: Any, width: int, train: Any, test: Any) -> float:
  """Returns the best loss."""
  tf.keras.utils.set_random_seed(0)
  four = groups.singletons(_GROUPS)
  with strategy.scope():
    table = trials.Table(_SETTINGS, four)
    model = _model(width)
    adam = tf.keras.optimizers.Adam(0.001)
    model.compile(CrossShardOptimizer(adam, group_assignment=four), _loss())
  with tempfile.TemporaryDirectory() as folder:
    halving = callbacks.Halving(table, folder, epochs=_EPOCHS, factor=2)
    model.fit(
      *train,
      batch_size=_GROUPS * _BATCH,
      epochs=halving.total_epochs,
      verbose=0,
      callbacks=[callbacks.GroupMetrics(test, ensemble=False), halving],
    )
  assert table.best.best is not None
  return table.best.best


def _one_by_one(width: int, train: Any, test: Any) -> float:
  """Returns the best loss of plain Keras."""
  x, y = (part[: len(part) // _GROUPS] for part in train)
  models, best = [], {}
  for settings in _SETTINGS:
    tf.keras.utils.set_random_seed(0)
    models.append(_model(width))
    models[-1].compile(tf.keras.optimizers.Adam(**settings), _loss())
  rest = list(range(len(models)))
  before = 0
  for count, until in ((16, 2), (8, 4), (4, _EPOCHS)):
    rest = sorted(rest, key=lambda i: best.get(i, 0.0))[:count]
    for i in rest:
      losses = models[i].fit(
        *(x, y),
        batch_size=_BATCH,
        initial_epoch=before,
        epochs=until,
        verbose=0,
        validation_data=test,
      )
      found = losses.history["val_loss"]
      best[i] = min(best.get(i, np.inf), *found)
    before = until
  return min(best.values())


def main() -> None:
  """Compares both, for a small and a larger network."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=3)
  rounds = parser.parse_args().rounds
  strategy = timing.mirrored(_GROUPS)
  tf.data.experimental.enable_debug_mode()  # docs/limits.md#tensorflow
  digits = datasets.load_digits()
  x = digits.images[..., np.newaxis].astype("float32") / 16
  train, test = (
    (x[:1280], digits.target[:1280]),
    (x[1280:], digits.target[1280:]),
  )
  for width in (8, 64):
    data = (width, train, test)
    taken = {"one by one": [], "in groups": []}
    for _ in range(rounds):
      start = time.perf_counter()
      one_by_one = _one_by_one(*data)
      middle = time.perf_counter()
      in_groups = _in_groups(strategy, *data)
      taken["one by one"].append(1e3 * (middle - start))
      taken["in groups"].append(1e3 * (time.perf_counter() - middle))
      print(f"best losses {one_by_one:.4f} and {in_groups:.4f}")
    arrays = {name: np.array(values) for name, values in taken.items()}
    part = f"16 trials, {width} channels"
    timing.show(timing.compare(part, arrays, baselines=["one by one"]))


if __name__ == "__main__":
  main()
