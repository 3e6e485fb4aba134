"""Programs that are written once, and train under any strategy.

Each check trains a program twice, and compares all weights:

- `check_models`: n models under VectorizedStrategy, and each model alone
- `check_replicas`: one model on two devices, each with half of the batches, and
  with plain Keras on whole batches
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, Models, VectorizedStrategy

keras = tf.keras
SEEDS = (3, 4, 5)
# The gradient of some weights is 0 up to rounding, such as that of the bias of
# attention's keys. Differences of weights that moved less are relative to this.
LEAST_MOVED = 1e-2
# For a loss of `compile`; for a model's own loss, which is averaged over the
# replica's examples; and for a tape that computes the gradients of such a loss.
IN_FIT: Mapping[str, Any] = {}
OWN_LOSS_IN_FIT = {"loss_averaged_over": "replica"}
IN_A_LOOP = {"scale_gradients": True, "loss_averaged_over": "replica"}
Arrays = list[np.ndarray]


def adam(rate: float = 0.01) -> Any:
  """Returns Adam with so large an epsilon that tiny gradients do not matter."""
  return keras.optimizers.Adam(rate, epsilon=1e-5)


def normal(*shape: int) -> np.ndarray:
  """Returns the same normally distributed numbers for each call."""
  return np.random.default_rng(0).normal(size=shape).astype("float32")


class Program(abc.ABC):
  """A program for one device, whose strategy and optimizer can be replaced."""

  # The largest allowed difference between two values of a weight, relative to
  # how far training has moved the weight.
  rtol = 1e-3
  # The arguments of CrossShardOptimizer on several replicas.
  options: Mapping[str, Any] = IN_A_LOOP

  @abc.abstractmethod
  def build(self) -> Any:
    """Returns a new, built Keras model, which depends on the random seed."""

  def initialize(self, model: Any, strategy: tf.distribute.Strategy) -> None:
    """Gives the i-th of n models the values of the i-th seed."""
    del strategy
    Models(model).initialize(self.build, SEEDS)

  @abc.abstractmethod
  def train(
    self,
    model: Any,
    strategy: tf.distribute.Strategy,
    wrap: Callable[[Any], Any],
  ) -> Sequence[tf.Variable] | None:
    """Trains a model of `build`.

    Args:
      model: The model, created in the strategy's scope.
      strategy: The strategy. TensorFlow's default one, if there is none.
      wrap: A function that each optimizer must pass through.

    Returns:
      Other variables that must be equal, such as the number of the last step.
    """


class Networks(keras.Model):  # type: ignore[misc]
  """Several networks and a random number generator, as one built model."""

  def __init__(self, **networks: Any) -> None:
    super().__init__()
    self.random = keras.random.SeedGenerator()
    for name, network in networks.items():
      setattr(self, name, network)
    self.built = True


def dense(inputs: int, *units: int, activation: str = "tanh") -> Any:
  """Returns a built network of dense layers, the last one linear."""
  hidden = [keras.layers.Dense(n, activation) for n in units[:-1]]
  return keras.Sequential(
    [keras.Input((inputs,)), *hidden, keras.layers.Dense(units[-1])]
  )


def run_steps(
  strategy: tf.distribute.Strategy,
  step: Callable[..., Any],
  data: tf.data.Dataset,
) -> None:
  """Runs `step(*batch)` for each batch, as one `tf.function`."""
  run = tf.function(lambda *batch: strategy.run(step, batch), autograph=False)
  for batch in strategy.experimental_distribute_dataset(data):
    run(*batch)


def check_models(program: Program) -> None:
  """Compares n models in one program with n programs."""
  strategy = VectorizedStrategy(len(SEEDS))
  with strategy.scope():
    model = program.build()
  program.initialize(model, strategy)
  others = program.train(model, strategy, lambda optimizer: optimizer)
  trained = [testbed.copies(v) for v in [*model.weights, *(others or [])]]
  starts, ends = zip(*(_train_alone(program, s) for s in SEEDS), strict=True)
  _check_that_models_differ(starts, ends)
  _compare(program, zip(*trained, strict=True), starts, ends)


def check_replicas(program: Program) -> None:
  """Compares two data-parallel replicas with one device."""
  strategy = testbed.mirrored(2)
  keras.utils.set_random_seed(SEEDS[0])
  with strategy.scope():
    model = program.build()
  others = program.train(
    model, strategy, lambda opt: CrossShardOptimizer(opt, **program.options)
  )
  trained = [testbed.copies(v) for v in [*model.weights, *(others or [])]]
  start, end = _train_alone(program, SEEDS[0])
  assert any(map(_differ, start, end)), "Nothing was trained."
  _compare(program, zip(*trained, strict=True), [start] * 2, [end] * 2)


def _train_alone(program: Program, seed: int) -> tuple[Arrays, Arrays]:
  """Returns the values of a plain model before and after training."""
  keras.utils.set_random_seed(seed)
  model = program.build()
  start = [v.numpy() for v in model.weights]
  others = program.train(model, tf.distribute.get_strategy(), lambda opt: opt)
  return start, [v.numpy() for v in [*model.weights, *(others or [])]]


def _check_that_models_differ(
  starts: Sequence[Arrays], ends: Sequence[Arrays]
) -> None:
  """Raises an error if a test could pass with models that are all alike."""
  is_trained = False
  for i, values in enumerate(zip(*ends, strict=True)):
    is_frozen = i < len(starts[0]) and not any(
      _differ(start[i], end) for start, end in zip(starts, values, strict=True)
    )
    is_trained = is_trained or not is_frozen
    assert is_frozen or any(_differ(values[0], other) for other in values)
  assert is_trained


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
  return bool(np.any(a != b))


def _compare(
  program: Program,
  trained: Iterable[Sequence[Any]],
  starts: Sequence[Arrays],
  ends: Sequence[Arrays],
) -> None:
  """Compares each weight of each model, relative to how far it moved."""
  differences = []
  for values, start, end in zip(trained, starts, ends, strict=True):
    begin = [*start, *(np.zeros_like(x) for x in end[len(start) :])]
    for got, was, want in zip(values, begin, end, strict=True):
      moved = np.abs(np.subtract(want, was, dtype="float64")).max()
      error = np.abs(np.subtract(got, want, dtype="float64")).max()
      differences.append(error / max(moved, LEAST_MOVED))
  largest = np.max(differences)
  print(f"{type(program).__name__}: largest relative difference {largest:.1e}")
  assert largest <= program.rtol  # NaN fails.
