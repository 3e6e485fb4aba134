"""Examples and reductions to an accuracy, with fixed and with adaptive windows.

    python benchmarks/adaptive_accumulation.py
    python benchmarks/adaptive_accumulation.py --problems text --rates 0.002

    digits   scikit-learn's 1,797 images of 8x8 pixels; a convolutional network
    text     the next character in the sources of Python's standard library, of
             the 32 before it; an embedding and two dense layers

Real data that every machine has. Four replicas are one group. Fixed and
adaptive windows train from the same start on the same examples, with Adam. Its
rate for a window of k calls is the given one times (k / 16) ** power. Every
`check` calls the network is judged on examples that it does not train on;
training ends with the first accuracy that is good enough. Each line is over the
seeds, the median and the extremes: examples, reductions. Without --rates all
rates of the problem are tried.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf
from sklearn import datasets

from tf_cross_shard import CrossShardOptimizer, callbacks

LONGEST: Final = 16
CONTEXT: Final = 32  # characters
_DEVICES: Final = [f"CPU:{i}" for i in range(4)]


class Problem(NamedTuple):
  """What is to be learned, and how well.

  Attributes:
    data: Training x and y, then those of the judgement.
    layers: From a batch of x to logits.
    goal: The accuracy.
    batch: Examples of all replicas in a call.
    check: Calls from one judgement, and change of the window, to the next.
    most: Calls after which a run is given up.
    rates: Learning rates of the longest window.
  """

  data: Sequence[Any]
  layers: Sequence[Any]
  goal: float
  batch: int
  check: int
  most: int
  rates: Sequence[float]


def digits() -> Problem:
  """Handwritten digits, one in five to judge by."""
  data = datasets.load_digits()
  x, y = data.images[..., np.newaxis].astype("float32") / 16, data.target
  is_test = np.arange(len(x)) % 5 == 0
  layers = tf.keras.layers
  return Problem(
    (x[~is_test], y[~is_test], x[is_test], y[is_test]),
    [
      layers.Input(x.shape[1:]),
      layers.Conv2D(32, 3, padding="same", activation="relu"),
      layers.Conv2D(64, 3, padding="same", activation="relu"),
      layers.MaxPooling2D(),
      layers.Flatten(),
      layers.Dense(10),
    ],
    goal=0.98,
    batch=16,
    check=16,
    most=6400,
    rates=(0.004, 0.008),
  )


def text() -> Problem:
  """Python's own sources, one file in ten to judge by."""
  paths = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
  files = [np.frombuffer(path.read_bytes(), np.uint8) % 128 for path in paths]
  x, y = map(np.concatenate, zip(*map(_windows, files), strict=True))
  is_test = np.repeat(
    np.arange(len(files)) % 10 == 0, [max(0, len(f) - CONTEXT) for f in files]
  )
  chosen = np.random.default_rng(0).permutation(np.flatnonzero(is_test))[:8192]
  layers = tf.keras.layers
  return Problem(
    (x[~is_test], y[~is_test], x[chosen], y[chosen]),
    [
      layers.Input((CONTEXT,)),
      layers.Embedding(128, 16),
      layers.Flatten(),
      layers.Dense(256, activation="relu"),
      layers.Dense(128),
    ],
    goal=0.42,
    batch=64,
    check=128,
    most=5120,
    rates=(0.004, 0.008),
  )


def _windows(characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns each place's context, and what follows it."""
  if len(characters) <= CONTEXT:
    return np.zeros([0, CONTEXT], np.uint8), np.zeros([0], np.uint8)
  rows = np.lib.stride_tricks.sliding_window_view(characters, CONTEXT)
  return rows[:-1], characters[CONTEXT:]


class _Judge(tf.keras.callbacks.Callback):
  """Ends `fit` when the model is good enough."""

  def __init__(self, problem: Problem) -> None:
    super().__init__()
    *_, self._x, self._y = problem.data
    self._goal = problem.goal
    self.is_done = False

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    parts = np.array_split(self._x, 4)
    logits = [self.model(part, training=False) for part in parts]
    found = np.argmax(np.concatenate(logits), axis=-1)
    self.is_done = np.mean(found == self._y) >= self._goal
    self.model.stop_training = self.is_done


def run(
  problem: Problem, window: int | float, rate: float, power: float, seed: int
) -> tuple[float, float, list[int]]:
  """Returns examples, reductions, and lengths of windows at the judgements.

  Infinite ones where the goal was not reached.

  Args:
    problem: What is trained.
    window: An integer for fixed windows; a number is the `batch_ratio`.
    rate: The learning rate of windows of `LONGEST` calls.
    power: That of windows of k calls is `(k / LONGEST) ** power` of it.
    seed: Of the start, and of the order of examples.
  """
  tf.keras.utils.set_random_seed(seed)
  is_fixed = isinstance(window, int)
  with tf.distribute.MirroredStrategy(_DEVICES).scope():
    copies = [type(x).from_config(x.get_config()) for x in problem.layers[1:]]
    model = tf.keras.Sequential([problem.layers[0], *copies])
    scale = (window / LONGEST) ** power if is_fixed else 1.0
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(rate * scale),
      accumulate_steps=window if is_fixed else LONGEST,
      noise_scale=0 if is_fixed else 1,
    )
    model.compile(
      optimizer,
      tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      steps_per_execution=problem.check,
    )
  x, y, *_ = problem.data
  order = np.random.default_rng(seed).permutation(len(x))
  count = problem.most * problem.batch
  order = np.resize(order[:count], count)
  data = tf.data.Dataset.from_tensor_slices(order).batch(problem.batch)
  x, y = tf.constant(x), tf.constant(y)
  data = data.map(lambda rows: (tf.gather(x, rows), tf.gather(y, rows)))
  judge, adapt = _Judge(problem), []
  if not is_fixed:
    adapt = [
      callbacks.AdaptiveAccumulation(batch_ratio=window, rate_power=power)
    ]
  history = model.fit(
    data.prefetch(8),
    epochs=problem.most // problem.check,
    steps_per_epoch=problem.check,
    verbose=0,
    callbacks=[*adapt, judge],
  )
  lengths = history.history.get("window_length", [])
  if not judge.is_done:
    return np.inf, np.inf, lengths
  examples = len(history.epoch) * problem.check * problem.batch
  return examples, int(optimizer.iterations.numpy()), lengths


def main() -> None:
  """Trains all, and prints a line for each way."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--problems", nargs="+", default=["digits", "text"])
  parser.add_argument("--rates", nargs="+", type=float)
  parser.add_argument("--power", type=float, default=0.5)
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  parser.add_argument("--fixed", nargs="*", type=int, default=[1, 2, 4, 8, 16])
  parser.add_argument("--ratios", nargs="*", type=float, default=[0.25, 1.0])
  arguments = parser.parse_args()
  cpu = tf.config.list_physical_devices("CPU")[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * len(_DEVICES)
  )
  for name in arguments.problems:
    problem = {"digits": digits, "text": text}[name]()
    print(f"{name}: {len(problem.data[0]):,} examples to {problem.goal:.0%}")
    for rate in arguments.rates or problem.rates:
      for window in (*arguments.fixed, *arguments.ratios):
        runs = [
          run(problem, window, rate, arguments.power, s)
          for s in arguments.seeds
        ]
        kind = "fixed" if isinstance(window, int) else "adaptive"
        numbers = []
        for values in zip(*(taken[:2] for taken in runs), strict=True):
          median, least, most = np.percentile(values, [50, 0, 100])
          numbers.append(f"{median:,.0f} [{least:,.0f}, {most:,.0f}]")
        print(f"| {rate} | {kind} {window} | {' | '.join(numbers)} |")
        for *_, lengths in runs:
          if lengths:
            print("   windows:", *lengths[:: max(1, len(lengths) // 12)])


if __name__ == "__main__":
  main()
