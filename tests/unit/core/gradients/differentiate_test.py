"""Tests gradients of losses: callables, tapes, and graphs."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core.gradients import differentiate

OPTIONS = differentiate.GraphOptions()


def _halved(seed: tf.Tensor) -> tf.Tensor:
  return seed / 2.0


def _value(pairs: differentiate.Pairs) -> list[Any]:
  return [None if grad is None else float(grad) for grad, _ in pairs]


def test_callable_tape_and_graph_agree() -> None:
  v, w = tf.Variable(3.0), tf.Variable(5.0)

  def loss() -> tf.Tensor:
    return v * v * w

  by_callable = differentiate.compute(
    loss, [v, w], None, _halved, OPTIONS, True
  )
  with tf.GradientTape() as tape:
    recorded = loss()
  by_tape = differentiate.compute(
    recorded, [v, w], tape, _halved, OPTIONS, True
  )
  own_tape = tf.GradientTape()
  by_both = differentiate.compute(
    loss, [v, w], own_tape, _halved, OPTIONS, True
  )

  @tf.function(autograph=False)
  def graph(gate: int) -> list[tf.Tensor]:
    options = differentiate.GraphOptions(gate_gradients=gate)
    pairs = differentiate.compute(loss(), [v, w], None, _halved, options, True)
    return [grad for grad, _ in pairs]

  for pairs in (by_callable, by_tape, by_both):
    assert _value(pairs) == [15.0, 4.5]
    assert [variable for _, variable in pairs] == [v, w]
  for gate in range(3):
    assert [float(grad) for grad in graph(gate)] == [15.0, 4.5]


def test_unused_variables_have_gradient_none() -> None:
  v, w = tf.Variable(3.0), tf.Variable(5.0)
  frozen = tf.Variable(2.0, trainable=False)
  pairs = differentiate.compute(
    lambda: v * frozen, [v, w], None, _halved, OPTIONS, True
  )
  assert _value(pairs) == [1.0, None]

  [(grad, variable)] = differentiate.compute(
    lambda: v * frozen, None, None, _halved, OPTIONS, True
  )
  assert float(grad) == 1.0
  assert variable is v


def test_variables_of_a_traced_loss_come_in_one_order() -> None:
  variables = [tf.Variable(float(i), name=f"v{i}") for i in range(12)]

  @tf.function(autograph=False)
  def step() -> list[tf.Tensor]:
    loss = tf.add_n([(i + 1) * v for i, v in enumerate(reversed(variables))])
    pairs = differentiate.compute(loss, None, None, _halved, OPTIONS, True)
    names = [variable.name for _, variable in pairs]
    assert len(names) == 12
    found.append(names)
    return [grad for grad, _ in pairs]

  found: list[list[str]] = []
  for _ in range(3):
    step.get_concrete_function()
    step = tf.function(step.python_function, autograph=False)
  assert found[0] == found[1] == found[2]


def test_grad_loss_seeds_graphs_only() -> None:
  v = tf.Variable([1.0, 2.0])
  options = differentiate.GraphOptions(grad_loss=tf.constant([3.0, 4.0]))

  def gradients() -> tf.Tensor:
    [(grad, _)] = differentiate.compute(
      lambda: 2.0 * v, [v], None, _halved, options, False
    )
    return grad

  np.testing.assert_array_equal(gradients(), [1.0, 1.0])
  traced = tf.function(gradients, autograph=False)
  np.testing.assert_array_equal(traced(), [3.0, 4.0])


def test_sparse_gradients_stay_sparse() -> None:
  table = tf.Variable(tf.ones([5, 2]))
  [(grad, _)] = differentiate.compute(
    lambda: tf.reduce_sum(tf.gather(table, [4, 4])),
    [table],
    None,
    _halved,
    OPTIONS,
    True,
  )
  assert isinstance(grad, tf.IndexedSlices)
  np.testing.assert_array_equal(grad.indices, [4, 4])
  np.testing.assert_array_equal(grad.values, np.full((2, 2), 0.5))
