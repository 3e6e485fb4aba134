"""Trains tiny models on replicas and on one device, and compares variables.

There are two ways to train: with a loss (`Regression`, `take_step`), and with
given gradients of the shape [steps, replicas, ...] for each weight (`build`,
`train`, `train_plain`). `check_groups` compares each replica with the expected
values of its group.
"""

import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import Models, keras3
from tf_cross_shard import groups as groups_lib

# Each installed Keras, and our classes for it.
KERASES: dict[str, tuple[Any, Any]] = {"keras": (keras, keras3)}
# tf_keras is an extra.
if importlib.util.find_spec("tf_keras"):
  KERASES["tf_keras"] = (
    importlib.import_module("tf_keras"),
    importlib.import_module("tf_cross_shard.tf_keras"),
  )
in_both = pytest.mark.parametrize("which", KERASES)

# Each way to train by a loss, and over whose examples the optimizer takes this
# loss to be averaged.
WAYS = {
  "compute_gradients": "replica",
  "minimize": "replica",
  "minimize_tape": "global",
  "scale_loss": "global",
  "bare": "global",  # `apply_gradients` alone
  "fit": "global",
}


# ----------------------------------------------------------------- by a loss


def native(variables: Sequence[Any]) -> list[Any]:
  """Returns the TensorFlow variables of Keras variables.

  Tapes only know TensorFlow variables.
  """
  keras_variable = getattr(tf.keras, "Variable", ())
  return [v.value if isinstance(v, keras_variable) else v for v in variables]


def take_step(
  optimizer: Any,
  loss: Callable[[], tf.Tensor],
  variables: Sequence[Any],
  way: str = "minimize",
) -> Any:
  """Updates the variables once, within a replica, by one of `WAYS`."""
  if way == "minimize":
    return optimizer.minimize(loss, var_list=variables)
  if way == "compute_gradients":
    pairs = optimizer.compute_gradients(loss, variables)
    return optimizer.apply_gradients(pairs)
  # tf_keras leaves the loss scale to the user.
  is_scaled = way == "scale_loss" and hasattr(optimizer, "get_scaled_loss")
  with tf.GradientTape() as tape:
    value = loss()
    if way == "scale_loss":
      value = optimizer.scale_loss(value)
      if is_scaled:
        value = optimizer.get_scaled_loss(value)
  if way == "minimize_tape":
    return optimizer.minimize(value, variables, tape=tape)
  grads = tape.gradient(value, native(variables))
  if is_scaled:
    grads = optimizer.get_unscaled_gradients(grads)
  return optimizer.apply_gradients(zip(grads, variables, strict=True))


def on_rows(
  strategy: tf.distribute.Strategy,
  replica_step: Callable[..., Any],
  eager: bool = False,
) -> Callable[..., Any]:
  """Returns a step that gives each replica its row of [replicas, ...] arrays.

  The step is one `tf.function` unless `eager` is True.
  """

  def step(*rows: tf.Tensor) -> Any:
    return strategy.run(
      lambda: replica_step(*(row[testbed.replica_id()] for row in rows))
    )

  run = step if eager else tf.function(step, autograph=False)
  return lambda *rows: run(*map(tf.convert_to_tensor, rows))


class Regression:
  """A linear regression whose arithmetic is exact for a few SGD steps.

  Weights, data and step size are small multiples of powers of two, so that
  float32 sums are exact and the order of summation cannot matter.
  """

  examples = 2  # per replica and step
  steps = 3

  def __init__(
    self, seed: int = 7, num_replicas: int = testbed.REPLICAS
  ) -> None:
    rng = np.random.default_rng(seed)
    shape = (self.steps, num_replicas, self.examples)
    self.x = rng.integers(-1, 2, size=(*shape, 3)).astype("float32")
    self.y = rng.integers(-2, 3, size=(*shape, 2)).astype("float32")
    self.initial = [
      rng.integers(-2, 3, size=(3, 2)).astype("float32"),
      rng.integers(-2, 3, size=(2,)).astype("float32"),
    ]
    flat = self.x.reshape(self.steps, num_replicas, -1)
    assert not (flat == flat[:, :1]).all(axis=(0, 2))[1:].any(), "same data"

  def variables(self, library: Any = tf.keras) -> list[Any]:
    return [
      testbed.variable(value, name, library)
      for value, name in zip(self.initial, ("kernel", "bias"), strict=True)
    ]

  def loss(self, variables: Sequence[Any], x: Any, y: Any) -> tf.Tensor:
    """Returns half the squared error, averaged over the given examples."""
    error = tf.matmul(x, variables[0]) + variables[1] - y
    return tf.reduce_mean(tf.reduce_sum(error * error, axis=-1)) / 2.0

  def group_batch(
    self, step: int, members: Sequence[int]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples of all members of a group, concatenated."""
    rows = list(members)
    return (
      np.concatenate(self.x[step, rows]),
      np.concatenate(self.y[step, rows]),
    )

  def train_alone(
    self,
    members: Sequence[int],
    optimizer: Any,
    factor: float = 1.0,
    library: Any = tf.keras,
    variables: Sequence[Any] | None = None,
  ) -> list[np.ndarray]:
    """Trains with plain Keras on one group's concatenated batch.

    There is no strategy. The loss is multiplied by `factor`.
    """
    variables = self.variables(library) if variables is None else variables
    optimizer.build(variables)
    for step in range(self.steps):
      x, y = self.group_batch(step, members)
      with tf.GradientTape() as tape:
        loss = factor * self.loss(variables, x, y)
      grads = tape.gradient(loss, variables)
      optimizer.apply_gradients(zip(grads, variables, strict=True))
    return [each.numpy() for each in variables]

  def train_replicas(
    self,
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    variables: Sequence[Any],
    eager: bool = False,
    way: str = "minimize",
  ) -> None:
    replicas = strategy.num_replicas_in_sync
    share = 1.0 if WAYS[way] == "replica" else 1 / replicas
    traced = []

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> Any:
      traced.append(x)

      def loss() -> tf.Tensor:
        return share * self.loss(variables, x, y)

      return take_step(optimizer, loss, variables, way)

    step = on_rows(strategy, replica_step, eager)
    for x, y in zip(self.x, self.y, strict=True):
      step(x, y)
    assert eager or len(traced) <= replicas, "the step was traced again"


# --------------------------------------------------------- by given gradients


def make_weights(which: str, values: Mapping[str, Any]) -> list[Any]:
  library, _ = KERASES[which]
  return [
    testbed.variable(value, name, library) for name, value in values.items()
  ]


def build(
  which: str,
  make: Callable[[Any], Any],
  values: Mapping[str, Any],
  strategy: Any = None,
  **options: Any,
) -> tuple[list[Any], Any]:
  """Returns weights, and a built optimizer that sums gradients over groups.

  `make` is called with the Keras module, and returns the optimizer to
  wrap.
  """
  library, package = KERASES[which]
  with (strategy or testbed.mirrored()).scope():
    weights = make_weights(which, values)
    optimizer = package.CrossShardOptimizer(make(library), "sum", **options)
    optimizer.build(weights)
  return weights, optimizer


def stepper(
  weights: Sequence[Any],
  optimizer: Any,
  strategy: Any = None,
  mode: str = "function",
) -> Callable[..., Any]:
  """Returns a step that takes each weight's gradients, [replicas, ...].

  The mode is "function", "eager", or "cond" for a function that applies the
  gradients within a condition, where TensorFlow allows no merge call.
  """

  def replica_step(*grads: tf.Tensor) -> Any:
    def apply() -> Any:
      return optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

    if mode != "cond":
      return apply()
    is_on = testbed.replica_id() >= 0
    return tf.cond(is_on, apply, lambda: tf.constant(0, tf.int64))

  step = on_rows(strategy or testbed.mirrored(), replica_step, mode == "eager")
  return lambda *rows: step(
    *(
      tf.constant(row, weight.dtype)
      for row, weight in zip(rows, weights, strict=True)
    )
  )


def train(
  weights: Sequence[Any],
  optimizer: Any,
  grads: Sequence[np.ndarray],
  steps: Sequence[int] | None = None,
  strategy: Any = None,
  mode: str = "function",
) -> None:
  """Takes steps with each weight's gradients, [steps, replicas, ...]."""
  step = stepper(weights, optimizer, strategy, mode)
  for i in range(len(grads[0])) if steps is None else steps:
    step(*(rows[i] for rows in grads))


def train_plain(
  weights: Sequence[Any],
  optimizer: Any,
  grads: Sequence[np.ndarray],
  members: Sequence[int],
  steps: Sequence[int] | None = None,
) -> None:
  """Takes steps of plain Keras with the sums over a group's members."""
  optimizer.build(weights)
  for i in range(len(grads[0])) if steps is None else steps:
    sums = [tf.constant(rows[i, list(members)].sum(0)) for rows in grads]
    optimizer.apply_gradients(list(zip(sums, weights, strict=True)))


def state_of(weights: Sequence[Any], optimizer: Any) -> list[np.ndarray]:
  return [
    value
    for variable in (*weights, *optimizer.variables)
    for value in Models(optimizer=optimizer).values(variable)
  ]


# ----------------------------------------------------------------- comparison


def assert_close(actual: np.ndarray, expected: np.ndarray, where: str) -> None:
  """Checks that values differ by at most 1e-6 of the largest weight."""
  bound, difference = near(expected), float(np.abs(actual - expected).max())
  assert difference <= bound, f"{where}: {difference} > {bound}"


def near(value: np.ndarray, *_: Any) -> float:
  """Returns the bound of `assert_close`, for `check_groups`."""
  return 1e-6 * max(1.0, float(np.abs(value).max()))


def by_replica(variables: Sequence[Any]) -> list[list[np.ndarray]]:
  copies = map(testbed.copies, variables)
  return [list(own) for own in zip(*copies, strict=True)]


def check_groups(
  held: Sequence[Sequence[np.ndarray]],
  groups: groups_lib.Groups | Sequence[Sequence[int]],
  expected: Callable[[Sequence[int]], Sequence[Any]],
  bound: Callable[..., Any] = lambda *_: 0.0,
) -> None:
  """Compares each replica with the expected values of its group.

  The members of a group must have the same bits, and groups must differ, so
  that the test fails if a sum is over the wrong members.

  Args:
    held: The values, [replicas, variables].
    groups: The members of each group.
    expected: Returns the right values for the members of a group.
    bound: Returns how far a value may be off. It is called with the right
      value, the number of the variable, and the members.
  """
  assert len(held) == sum(map(len, groups)) > 1
  for members in groups:
    right = [np.asarray(value, "float64") for value in expected(members)]
    for replica in members:
      for i, (mine, first, value) in enumerate(
        zip(held[replica], held[members[0]], right, strict=True)
      ):
        assert mine.tobytes() == first.tobytes(), f"replica {replica}, {i}"
        off = np.abs(mine.astype("float64") - value)
        allowed = bound(value, i, members)
        assert (off <= allowed).all(), f"replica {replica}, {i}: {off.max()}"
  i = next(i for i in range(len(held[0])) if any(m[i].any() for m in held))
  for one, other in itertools.combinations(groups, 2):
    assert (held[one[0]][i] != held[other[0]][i]).any()
