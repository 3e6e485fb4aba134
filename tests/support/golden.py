"""Trains twelve small programs, and records their losses and final weights.

Each program trains a tiny model for 20 steps on four replicas. The file
`tests/golden/<program>.txt` has, for each group, the loss of each step and sums
of the final weights. A commit that changes a number must change the file, and
its message must say why.

    python -m tests.support.golden                   # writes all files
    python -m tests.support.golden adam sgd_groups   # writes two of them

Programs whose data are integers must give exactly the recorded numbers, because
float32 holds all their sums and products exactly. The other programs have a
bound, because the last bits of a matrix product or of a square root may differ
between versions of TensorFlow and between processors.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tests.support import logical_devices, testbed, training

STEPS: Final = 20
FOLDER: Final = pathlib.Path(__file__).parent.parent / "golden"

_GROUPS: Final = [[0, 2], [1, 3]]
_ROWS: Final = 32  # Of the embedding table.


class Linear:
  """A model whose loss is linear in its weights; its data are integers.

  The gradients do not depend on the weights, so all sums are exact in float32.
  """

  def __init__(self) -> None:
    rng = np.random.default_rng(1)
    shape = (STEPS, testbed.REPLICAS, 4)
    self.x = rng.integers(-4, 5, (*shape, 3)).astype("float32")
    self.y = rng.integers(-4, 5, (*shape, 2)).astype("float32")
    self.initial = {
      "kernel": rng.integers(-4, 5, (3, 2)).astype("float32"),
      "bias": rng.integers(-4, 5, (2,)).astype("float32"),
    }

  def loss(self, weights: Any, x: Any, y: Any) -> tf.Tensor:
    """Returns the mean over the four examples of (x W + b) * y."""
    outputs = tf.matmul(x, tf.convert_to_tensor(weights[0])) + weights[1]
    return tf.reduce_mean(tf.reduce_sum(outputs * y, axis=-1))


class Network:
  """Two dense layers with tanh between them, trained on the squared error.

  The layers compute in `dtype`; weights and loss are float32.
  """

  def __init__(self, dtype: str = "float32") -> None:
    self.dtype = dtype
    rng = np.random.default_rng(2)
    shape = (STEPS, testbed.REPLICAS, 8)
    # Integers, because NumPy may change how it draws other numbers.
    self.x = (rng.integers(-8, 9, (*shape, 6)) / 8).astype("float32")
    self.y = (rng.integers(-8, 9, (*shape, 2)) / 8).astype("float32")
    self.initial = {
      "kernel_0": (rng.integers(-8, 9, (6, 16)) / 16).astype("float32"),
      "bias_0": np.zeros(16, "float32"),
      "kernel_1": (rng.integers(-8, 9, (16, 2)) / 16).astype("float32"),
      "bias_1": np.zeros(2, "float32"),
    }

  def loss(self, weights: Any, x: Any, y: Any) -> tf.Tensor:
    """Returns the mean squared error."""
    kernel, bias, kernel_1, bias_1 = (
      tf.cast(tf.convert_to_tensor(weight), self.dtype) for weight in weights
    )
    hidden = tf.tanh(tf.matmul(tf.cast(x, self.dtype), kernel) + bias)
    outputs = tf.cast(tf.matmul(hidden, kernel_1) + bias_1, "float32")
    return tf.reduce_mean(tf.square(outputs - y))


class Table:
  """An embedding table whose loss is linear in the rows that it looks up."""

  def __init__(self) -> None:
    rng = np.random.default_rng(3)
    shape = (STEPS, testbed.REPLICAS, 8)
    self.x = rng.integers(0, _ROWS, shape).astype("int32")
    self.y = rng.integers(-4, 5, (*shape, 4)).astype("float32")
    self.initial = {"table": rng.integers(-4, 5, (_ROWS, 4)).astype("float32")}

  def loss(self, weights: Any, x: Any, y: Any) -> tf.Tensor:
    """Returns the mean over the examples of rows * y."""
    rows = tf.gather(tf.convert_to_tensor(weights[0]), x)
    return tf.reduce_mean(tf.reduce_sum(rows * y, axis=-1))


@dataclasses.dataclass(frozen=True)
class Program:
  """One training program.

  Attributes:
    make: Creates the user's optimizer from a Keras package.
    options: The arguments of CrossShardOptimizer besides `opt`.
    model: Creates the model: its data, initial weights and loss.
    keras: The Keras package.
    bound: How far a loss may be off, relative to the largest loss, and a
      weight, relative to its norm; 0 if the arithmetic is exact.
  """

  make: Callable[[Any], Any]
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  model: Callable[[], Any] = Network
  keras: str = "keras"
  bound: float = 1e-5


PROGRAMS: Final[dict[str, Program]] = {
  "sgd_groups": Program(
    lambda keras: keras.optimizers.SGD(0.25),
    {"group_assignment": _GROUPS},
    model=Linear,
    bound=0,
  ),
  "sgd_accumulated_in_shards": Program(
    lambda keras: keras.optimizers.SGD(0.25),
    {"accumulate_steps": 2, "shard_update": True},
    model=Linear,
    bound=0,
  ),
  "sgd_rows": Program(
    lambda keras: keras.optimizers.SGD(0.25),
    {"group_assignment": _GROUPS, "shard_update": True},
    model=Table,
    bound=0,
  ),
  "tf_keras_sgd": Program(
    lambda keras: keras.optimizers.SGD(0.25),
    {"group_assignment": _GROUPS, "loss_averaged_over": "global"},
    model=Linear,
    keras="tf_keras",
    bound=0,
  ),
  "adam": Program(lambda keras: keras.optimizers.Adam(0.02)),
  "adamw_shards": Program(
    lambda keras: keras.optimizers.AdamW(
      0.02, weight_decay=0.1, global_clipnorm=1.0
    ),
    {"group_assignment": _GROUPS, "shard_update": True},
  ),
  "lion_group_settings": Program(
    lambda keras: keras.optimizers.Lion(0.005, weight_decay=0.1),
    {
      "group_assignment": _GROUPS,
      "group_settings": {"weight_decay": [0.0, 0.1]},
    },
  ),
  "nadam_accumulated": Program(
    lambda keras: keras.optimizers.Nadam(0.02),
    {"accumulate_steps": 2, "skip_nonfinite": True},
  ),
  "adafactor_by_variable": Program(
    lambda keras: keras.optimizers.Adafactor(0.02),
    {"shard_update": "by_variable"},
  ),
  "lazy_adam_rows": Program(
    lambda keras: keras.optimizers.Adam(0.02),
    {"group_assignment": _GROUPS, "lazy_rows": True},
    model=Table,
  ),
  "mixed_float16": Program(
    lambda keras: keras.optimizers.LossScaleOptimizer(
      keras.optimizers.Adam(0.02), initial_scale=1024.0
    ),
    {"wire_dtype": "float16", "clipnorm": 2.0},
    model=lambda: Network("float16"),
    bound=2e-3,
  ),
  "tf_keras_rmsprop": Program(
    lambda keras: keras.optimizers.RMSprop(0.01, momentum=0.5),
    {"group_assignment": _GROUPS, "shard_update": True},
    keras="tf_keras",
  ),
}


def run(program: Program) -> list[tuple[str, list[float]]]:
  """Trains a program.

  Returns:
    Pairs of a label and a number for each group: the loss of each step, and at
    the end, for each weight, the sum of its values and the sum of their
    squares.
  """
  keras, package = training.KERASES[program.keras]
  options = {"loss_averaged_over": "replica", **program.options}
  groups = options.get("group_assignment") or [list(range(testbed.REPLICAS))]
  # Each replica computes its share of a mean over all replicas.
  is_global = options["loss_averaged_over"] == "global"
  share = 1 / testbed.REPLICAS if is_global else 1.0
  model = program.model()
  strategy = testbed.mirrored()
  with strategy.scope():
    weights = [
      testbed.variable(value, name, keras)
      for name, value in model.initial.items()
    ]
    optimizer = package.CrossShardOptimizer(program.make(keras), **options)
    if isinstance(model, Table) and "shard_update" in options:
      optimizer.update_by_rows(weights)  # Tables are not divided.
    optimizer.build(weights)

  def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    losses: list[tf.Tensor] = []

    def loss() -> tf.Tensor:
      losses.append(share * model.loss(weights, x, y))
      return losses[0]

    optimizer.minimize(loss, weights)
    return losses[0]

  train = training.on_rows(strategy, replica_step)
  numbers = []
  for step, (x, y) in enumerate(zip(model.x, model.y, strict=True)):
    losses = strategy.experimental_local_results(train(x, y))
    numbers.append((f"loss {step}", _means(map(float, losses), groups)))
  for name, weight in zip(model.initial, weights, strict=True):
    copies = [copy.astype("float64") for copy in testbed.copies(weight)]
    sums = (copy.sum() for copy in copies)
    squares = (np.square(copy).sum() for copy in copies)
    numbers.append((f"{name} sum", _means(sums, groups)))
    numbers.append((f"{name} squares", _means(squares, groups)))
  return numbers


def read(name: str) -> list[tuple[str, list[float]]]:
  """Reads from a file what `run` returned when the file was written."""
  lines = (FOLDER / f"{name}.txt").read_text().splitlines()
  rows = [line.split() for line in lines if not line.startswith("#")]
  return [
    (" ".join(row[:2]), [float(number) for number in row[2:]]) for row in rows
  ]


def write(name: str) -> None:
  """Trains a program, and writes its numbers to its file."""
  program = PROGRAMS[name]
  exact = f"to {program.bound:g}" if program.bound else "exact"
  digits = 9 if program.bound else 17  # 17 digits name a float64.
  lines = [
    f"# {name}, {exact}; one column for each group of replicas. See"
    " tests/support/golden.py."
  ]
  for label, values in run(program):
    lines.append(
      " ".join([label, *(f"{value:.{digits}g}" for value in values)])
    )
  (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


def _means(
  values: Iterable[float], groups: Sequence[Sequence[int]]
) -> list[float]:
  """Averages the values of all replicas over the members of each group."""
  of_replicas = list(values)
  return [
    float(np.mean([of_replicas[member] for member in members]))
    for members in groups
  ]


if __name__ == "__main__":
  logical_devices.split_cpu(testbed.REPLICAS)
  for name in sys.argv[1:] or PROGRAMS:
    write(name)
