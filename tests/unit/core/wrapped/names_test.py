"""All variables of optimizers, of Keras 3 and tf_keras, by lasting names."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import replica_state_cases
from tf_cross_shard import CrossShardOptimizer


def _weights() -> list[Any]:
  """Returns variables with equal names, and names that end with a number."""
  names = ("dense_7/kernel", "dense_7_1/kernel", "dense_9/kernel", "w", "w")
  return [tf.Variable([1.0], name=name) for name in names]


def _state(optimizer: Any) -> dict[str, np.ndarray]:
  """Returns the values of an optimizer, by the names that files have."""
  [state] = replica_state_cases.saved(optimizer)
  return {
    name.removeprefix("optimizer/"): value for name, value in state.items()
  }


def _names(optimizer: Any) -> list[str]:
  return list(_state(optimizer))


@pytest.mark.parametrize("wrapped", [False, True])
def test_names_of_slots(wrapped: bool) -> None:
  optimizer: Any = tf.keras.optimizers.SGD(momentum=0.5, name="mine")
  if wrapped:
    optimizer = CrossShardOptimizer(optimizer)
  optimizer.build(_weights())
  assert _names(optimizer) == [
    "mine/iteration",
    "mine/learning_rate",
    "mine/dense/kernel/momentum",
    "mine/dense_7_1/kernel/momentum",
    "mine/dense_1/kernel/momentum",
    "mine/w/momentum",
    "mine/w/momentum#2",
  ]


def test_state_names_with_loss_scale_optimizer() -> None:
  """A LossScaleOptimizer has its own iteration count."""
  adam = tf.keras.optimizers.Adam(name="adam")
  scaled = tf.keras.optimizers.LossScaleOptimizer(adam, name="scale")
  ours = CrossShardOptimizer(scaled)
  ours.build([tf.Variable([1.0], name="w")])
  assert _names(ours) == _names(scaled)
  assert sorted({*_names(ours)} - {*_names(adam)}) == [
    f"scale/{name}"
    for name in ("dynamic_scale", "iteration", "learning_rate", "step_counter")
  ]


@pytest.mark.parametrize("kind", ["Adafactor", "Nadam"])
def test_names_do_not_depend_on_what_was_made_before(kind: str) -> None:
  """State names do not contain the numbers that Keras adds to layer names."""
  found = []
  for _ in range(2):
    model = tf.keras.Sequential(
      [tf.keras.Input((2,)), *(tf.keras.layers.Dense(2) for _ in range(3))]
    )
    optimizer = getattr(tf.keras.optimizers, kind)()
    optimizer.build(model.trainable_variables)
    found.append(_names(optimizer))
  assert found[0] == found[1]
  assert len(found[0]) > 12


def test_window_sums_are_named_after_stable_names() -> None:
  """Accumulated gradients keep their names if other layers were made first."""
  found = []
  for numbers in (("", "_1"), ("_7", "_9")):
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(momentum=0.5), accumulate_steps=2
    )
    optimizer.build(
      [tf.Variable([1.0], name=f"dense{number}/kernel") for number in numbers]
    )
    found.append(_names(optimizer))
  assert found[0] == found[1]
  sums = ["gradient_sum/dense/kernel", "gradient_sum/dense_1/kernel"]
  assert found[0][-2:] == sums


def _kinds(optimizer: Any) -> set[str]:
  return {name.rpartition("/")[2] for name in _names(optimizer)}


def test_tf_keras_state_includes_learning_rate() -> None:
  adam = tf_keras.optimizers.Adam(0.5)
  with pytest.raises(ValueError, match="not built"):
    _state(adam)
  adam.build(_weights())
  found = _state(adam)
  [rate] = [v for name, v in found.items() if "learning_rate" in name]
  assert float(rate) == 0.5
  assert "iteration" in _kinds(adam)
  assert len(found) == 2 * len(_weights()) + 2


def test_tf_keras_state_includes_loss_scale() -> None:
  adam = tf_keras.optimizers.Adam()
  scaled = tf_keras.mixed_precision.LossScaleOptimizer(adam)
  with pytest.raises(ValueError, match="not built"):
    _state(scaled)
  scaled.build(_weights())
  more = {*_names(scaled)} - {*_names(adam)}
  assert more == {"current_loss_scale", "good_steps"}


@pytest.mark.parametrize(
  "what",
  ["adam", 3, tf.Module, tf.compat.v1.train.AdamOptimizer],
)
def test_other_objects_raise_type_error(what: Any) -> None:
  what = what() if callable(what) else what
  with pytest.raises(TypeError, match="`optimizer` must be a Keras optimizer"):
    _state(what)
