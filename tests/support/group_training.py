"""Weights that groups train by given gradients, in both Kerases."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed
from tf_cross_shard import keras3, replica_state
from tf_cross_shard import tf_keras as ours_tf_keras

# Each Keras, and our classes for it.
KERASES: dict[str, tuple[Any, Any]] = {
  "keras": (keras, keras3),
  "tf_keras": (tf_keras, ours_tf_keras),
}
in_both = pytest.mark.parametrize("which", KERASES)


def make_weights(which: str, values: Mapping[str, Any]) -> list[Any]:
  """Variables of a Keras, by name."""
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
  """Weights and a built optimizer of sums over groups."""
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
) -> Callable[..., None]:
  """Returns a step that takes each weight's gradients, [replicas, ...].

  It is a function, with a condition in it by the mode "cond", or "eager".
  """
  strategy = strategy or testbed.mirrored()

  def step(*rows: tf.Tensor) -> None:
    def replica_step() -> None:
      own = [row[testbed.replica_id()] for row in rows]

      def apply() -> Any:
        return optimizer.apply_gradients(list(zip(own, weights, strict=True)))

      if mode == "cond":  # In which there are no merge calls.
        is_on = testbed.replica_id() >= 0
        tf.cond(is_on, apply, lambda: tf.constant(0, tf.int64))
      else:
        apply()

    strategy.run(replica_step)

  run = step if mode == "eager" else tf.function(step, autograph=False)
  return lambda *rows: run(
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
  """Takes steps of plain Keras with a group's sums."""
  testbed.build(optimizer, weights)
  for i in range(len(grads[0])) if steps is None else steps:
    sums = [tf.constant(rows[i, list(members)].sum(0)) for rows in grads]
    optimizer.apply_gradients(list(zip(sums, weights, strict=True)))


def state_of(weights: Sequence[Any], optimizer: Any) -> list[np.ndarray]:
  """Every group's weights and whole state."""
  return [
    value
    for variable in (*weights, *optimizer.variables)
    for value in replica_state.group_values(variable, optimizer)
  ]
