"""Tests gradients of losses: callables, tapes, and graphs.

In a group of two replicas, a mean halves the gradient of each replica.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer


def _made(*values: Any, **options: Any) -> tuple[Any, list[Any]]:
  """Returns an optimizer that averages, and variables, on two replicas."""
  with testbed.mirrored(2).scope():
    variables = [
      tf.Variable(value, name=f"v{i}", **options)
      for i, value in enumerate(values)
    ]
    optimizer = CrossShardOptimizer("sgd", loss_averaged_over="replica")
  return optimizer, variables


def _run(replica_fn: Callable[[], Any], is_traced: bool = False) -> Any:
  """Returns what replica 0 returns."""
  strategy = testbed.mirrored(2)

  def run() -> Any:
    return strategy.run(replica_fn)

  result = tf.function(run, autograph=False)() if is_traced else run()
  return tf.nest.map_structure(
    lambda value: strategy.experimental_local_results(value)[0], result
  )


def test_callable_tape_and_graph_agree() -> None:
  optimizer, (v, w) = _made(3.0, 5.0)

  def loss() -> tf.Tensor:
    return v * v * w

  def grads(*args: Any, **options: Any) -> list[Any]:
    pairs = optimizer.compute_gradients(*args, [v, w], **options)
    assert [variable.name for _, variable in pairs] == ["v0:0", "v1:0"]
    return [grad for grad, _ in pairs]

  def by_tape() -> list[Any]:
    with tf.GradientTape() as tape:
      recorded = loss()
    return grads(recorded, tape=tape)

  for compute in (
    lambda: grads(loss),
    by_tape,
    lambda: grads(loss, tape=tf.GradientTape()),
  ):
    assert [float(grad) for grad in _run(compute)] == [15.0, 4.5]
  for gate in range(3):
    found = _run(lambda gate=gate: grads(loss(), gate_gradients=gate), True)
    assert [float(grad) for grad in found] == [15.0, 4.5]


def test_variables_of_a_loss_and_unused_ones() -> None:
  optimizer, (v, w) = _made(3.0, 5.0)
  _, (frozen,) = _made(2.0, trainable=False)
  seen = []

  def step() -> Any:
    first, second = optimizer.compute_gradients(lambda: v * frozen, [v, w])
    pairs = optimizer.compute_gradients(lambda: v * w * frozen)
    seen.append((second[0], {variable.name for _, variable in pairs}))
    return [first[0], *(grad for grad, _ in pairs)]

  assert sorted(map(float, _run(step))) == [1.0, 3.0, 5.0]
  assert seen[0] == (None, {"v0:0", "v1:0"})


def test_variables_of_a_traced_loss_come_in_one_order() -> None:
  optimizer, variables = _made(*map(float, range(12)))
  found: list[list[str]] = []

  def step() -> list[tf.Tensor]:
    loss = tf.add_n([(i + 1) * v for i, v in enumerate(reversed(variables))])
    pairs = optimizer.compute_gradients(loss)
    names = [variable.name for _, variable in pairs]
    assert len(names) == 12
    found.append(names)
    return [grad for grad, _ in pairs]

  for _ in range(3):
    _run(step, is_traced=True)
  assert all(names == found[0] for names in found)


def test_grad_loss_seeds_graphs_only() -> None:
  optimizer, (v,) = _made([1.0, 2.0])
  seed = tf.constant([3.0, 4.0])

  def grad() -> tf.Tensor:
    [(found, _)] = optimizer.compute_gradients(
      lambda: 2.0 * v, [v], grad_loss=seed
    )
    return found

  np.testing.assert_array_equal(_run(grad, is_traced=True), [3.0, 4.0])

  def eager_grad() -> tf.Tensor:
    [(found, _)] = optimizer.compute_gradients(
      lambda: tf.reduce_sum(v), [v], grad_loss=tf.constant(3.0)
    )
    return found

  np.testing.assert_array_equal(_run(eager_grad), [0.5, 0.5])


def test_options_of_tf_gradients() -> None:
  """Where gradients are, and how those of one variable are added."""
  options = {
    "aggregation_method": tf.AggregationMethod.EXPERIMENTAL_TREE,
    "colocate_gradients_with_ops": True,
  }
  found = []
  for given in ({}, options):
    with tf.Graph().as_default() as graph:
      v = tf.Variable(1.0)
      with tf.device("CPU:1"):
        loss = tf.add_n([tf.exp(v), tf.sin(v), tf.tanh(v)])
      CrossShardOptimizer("sgd").compute_gradients(loss, [v], **given)
    operations = graph.get_operations()
    [cosine] = [each for each in operations if each.type == "Cos"]
    sums = [each for each in operations if each.type == "AddN"]
    # One is the loss. A tree has more than one for the gradient.
    found.append((len(sums) > 2, cosine.device))
  assert found == [(False, ""), (True, "/device:CPU:1")]


def test_sparse_gradients_stay_sparse() -> None:
  optimizer, (table,) = _made(tf.ones([5, 2]))

  def step() -> Any:
    [(grad, _)] = optimizer.compute_gradients(
      lambda: tf.reduce_sum(tf.gather(table, [4, 4])), [table]
    )
    assert isinstance(grad, tf.IndexedSlices)
    return grad.indices, grad.values

  indices, values = _run(step)
  np.testing.assert_array_equal(indices, [4, 4])
  np.testing.assert_array_equal(values, np.full((2, 2), 0.5))
