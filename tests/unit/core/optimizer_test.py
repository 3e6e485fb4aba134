"""Tests the interface of CrossShardOptimizer: places, arguments, and errors."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer

keras = tf.keras
SGD = keras.optimizers.SGD
_sgd = functools.partial(SGD, 1.0)


def _make(
  opt: Callable[[], Any], *args: Any, initial: Any = 0.0, **kwargs: Any
) -> tuple[Any, Any]:
  """An optimizer and one built variable under four replicas."""
  with testbed.mirrored().scope():
    weight = keras.Variable(np.asarray(initial, "float32"), name="weight")
    optimizer = CrossShardOptimizer(opt(), *args, **kwargs)
    optimizer.build([weight])
  return optimizer, weight


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}])
def test_variables_from_outside_the_scope_are_refused(
  options: dict[str, Any],
) -> None:
  """The error explains more than TensorFlow's error about nested scopes."""
  opt = SGD(1.0)
  with (
    testbed.mirrored().scope(),
    pytest.raises(
      RuntimeError,
      match=r"no strategy.* Create the optimizer and",
    ),
  ):
    CrossShardOptimizer(opt, **options)


def test_a_variable_from_outside_the_scope_is_refused() -> None:
  weight = tf.Variable(1.0, name="outside")
  with testbed.mirrored().scope():
    optimizer = CrossShardOptimizer(SGD(1.0))
  with pytest.raises(ValueError, match="outside:0 was created outside"):
    testbed.run(lambda: optimizer.apply_gradients([(1.0, weight)]))
  assert float(weight.numpy()) == 1.0


def test_only_the_model_is_outside_the_scope() -> None:
  model = tf.keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
  with testbed.mirrored().scope():
    model.compile(CrossShardOptimizer("adam"), "mse")
  with pytest.raises(RuntimeError, match=r"create the model inside .*scope"):
    model.fit(np.ones((8, 8)), np.ones((8, 1)), verbose=0)


class TestReduction:
  def test_constant_gradient_shared_by_all_replicas(self) -> None:
    optimizer, weight = _make(_sgd)
    shared = tf.constant(1.0)
    testbed.run(lambda: optimizer.apply_gradients([(shared, weight)]), "eager")
    assert testbed.copies(weight) == [-4.0] * 4

  def test_aggregated_tf_variable_differs_between_groups(self) -> None:
    strategy = testbed.mirrored()
    with strategy.scope():
      weight = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
      optimizer = CrossShardOptimizer(
        SGD(1.0), group_assignment=[[0, 1], [2, 3]]
      )
      optimizer.build([weight])
    testbed.run(lambda: optimizer.apply_gradients([(testbed.mark(), weight)]))
    assert testbed.copies(weight) == [-3.0, -3.0, -12.0, -12.0]

  @pytest.mark.parametrize(
    ("aggregation", "way"),
    [("none", "apply"), ("mean", "found by the loss"), ("sum", "apply")],
  )
  def test_constraints_of_keras_variables(
    self, aggregation: str, way: str
  ) -> None:
    with testbed.mirrored().scope():
      weight = keras.Variable(1.0, aggregation=aggregation)
      weight.constraint = keras.constraints.get("non_neg")
      optimizer = CrossShardOptimizer(
        SGD(0.25), "sum", group_assignment=[[0, 1], [2, 3]]
      )
      optimizer.build([weight])

    def step() -> Any:
      if way == "apply":
        return optimizer.apply_gradients([(testbed.mark(), weight)])
      return optimizer.minimize(lambda: testbed.mark() * weight.value)

    testbed.run(step)
    assert testbed.copies(weight) == [0.25, 0.25, 0.0, 0.0]

  def test_global_step_of_every_kind_counts_one(self) -> None:
    on_read = tf.VariableSynchronization.ON_READ
    only_first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    total = tf.VariableAggregation.SUM
    counters = [tf.Variable(0)]
    with testbed.mirrored().scope():
      for options in (
        {},
        {"aggregation": only_first},
        {"aggregation": total},
        {"synchronization": on_read, "aggregation": total},
        {"synchronization": on_read, "aggregation": only_first},
      ):
        counters.append(tf.Variable(0, **options))
    for step in counters:
      optimizer, weight = _make(_sgd)
      for _ in range(2):
        testbed.run(
          lambda o=optimizer, w=weight, s=step: o.apply_gradients(
            [(testbed.mark(), w)], s
          ),
          "eager",
        )
      assert step.numpy() == 2
      assert testbed.copies(weight) == [-30.0] * 4


@pytest.mark.parametrize(
  ("way", "start", "slope"),
  [("minimize", 3.0, 2.0), ("compute_gradients", -3.0, -0.5)],
)
def test_a_loss_may_branch_on_tensors(
  way: str, start: float, slope: float
) -> None:
  """AutoGraph rewrites the user's loss, which this package calls."""
  optimizer, weight = _make(_sgd, "sum", initial=start)

  def loss() -> Any:
    if weight > 0:
      value = 2.0 * weight
    else:
      value = -0.5 * weight
    return value

  @tf.function
  def step() -> None:
    def replica_step() -> None:
      if way == "minimize":
        optimizer.minimize(loss, var_list=[weight])
      else:
        optimizer.apply_gradients(optimizer.compute_gradients(loss, [weight]))

    testbed.mirrored().run(replica_step)

  step()
  assert testbed.copies(weight) == [start - slope * 4] * 4


@pytest.mark.parametrize("scale_gradients", [False, True])
def test_a_multi_optimizer_does_not_scale_the_loss(
  scale_gradients: bool, said: list[str]
) -> None:
  """You get a warning, or pass `scale_gradients`."""
  with testbed.mirrored().scope():
    weight = keras.Variable(0.0)
    ours = CrossShardOptimizer(
      SGD(1.0),
      group_assignment=testbed.GROUPINGS["contiguous"],
      loss_averaged_over="global",
      scale_gradients=scale_gradients,
    )
    optimizers = keras.optimizers
    both = optimizers.MultiOptimizer(optimizers.OptimizerMap(ours))
    both.build([weight])
  testbed.run(lambda: both.apply_gradients([(testbed.mark() / 4, weight)]))
  if scale_gradients:
    assert testbed.copies(weight) == [-1.5, -1.5, -6.0, -6.0]
    assert said == []
  else:
    [text] = said
    assert "scale_gradients=True, the only way within Keras' Multi" in text


class TestPlaces:
  def test_one_replica_reduces_nothing(self) -> None:
    for strategy in (
      tf.distribute.get_strategy(),
      tf.distribute.OneDeviceStrategy("CPU:0"),
      tf.distribute.MirroredStrategy(["CPU:0"]),
    ):
      with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = CrossShardOptimizer(SGD(1.0), group_assignment=[[0]])

      step = functools.partial(
        optimizer.minimize, functools.partial(tf.multiply, 3.0, weight)
      )
      strategy.run(tf.function(step, autograph=False))
      strategy.run(step)
      assert float(weight.numpy()) == -5.0

  def test_cross_replica_context_is_refused(self) -> None:
    optimizer, weight = _make(_sgd)
    with testbed.mirrored().scope():
      for call in (
        lambda: optimizer.apply_gradients([(tf.constant(1.0), weight)]),
        lambda: optimizer.apply([tf.constant(1.0)], [weight]),
        lambda: optimizer.compute_gradients(lambda: weight * 2.0, [weight]),
        lambda: optimizer.minimize(lambda: weight * 2.0, var_list=[weight]),
        lambda: optimizer.scale_loss(tf.constant(1.0)),
      ):
        with pytest.raises(RuntimeError, match=r"inside the.*strategy\.run"):
          call()
    assert testbed.copies(weight) == [0.0] * 4

  def test_under_another_strategy_is_refused(self) -> None:
    optimizer, weight = _make(_sgd)
    with pytest.raises(RuntimeError, match=r"MirroredStrategy \(4 replicas\)"):
      optimizer.apply_gradients([(tf.constant(1.0), weight)])
    stray = CrossShardOptimizer(SGD(1.0))
    with pytest.raises(RuntimeError, match=r"inside the `strategy\.scope"):
      testbed.run(lambda: stray.apply_gradients([(testbed.mark(), weight)]))
    assert testbed.copies(weight) == [0.0] * 4

  def test_groups_without_strategy_are_refused_when_used(self) -> None:
    optimizer = CrossShardOptimizer("sgd", group_assignment=[[0, 1]])
    weight = keras.Variable(0.0)
    with pytest.raises(ValueError, match=r"covers 2 replicas.*no strategy"):
      optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert optimizer.iterations.numpy() == 0

  def test_version_1_graph_of_several_replicas_is_refused(self) -> None:
    with tf.Graph().as_default():
      strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
      with strategy.scope():
        weight = tf.Variable(3.0)
        optimizer = CrossShardOptimizer(_sgd())
      words = r"TensorFlow 1 graph.*tf\.function"
      with pytest.raises(RuntimeError, match=words):
        strategy.run(lambda: optimizer.minimize(weight * weight))

  def test_version_1_graph(self) -> None:
    with tf.Graph().as_default():
      weight = tf.Variable(3.0)
      optimizer = CrossShardOptimizer(SGD(0.25))
      global_step = tf.compat.v1.train.get_or_create_global_step()
      step = optimizer.minimize(
        weight * weight,
        global_step,
        gate_gradients=CrossShardOptimizer.GATE_GRAPH,
        grad_loss=tf.constant(2.0),
      )
      assert isinstance(step, tf.Operation)
      with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step)
        assert session.run([weight, global_step]) == [0.0, 1]


class TestBadInput:
  @pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
      ({"opt": 3}, TypeError, "`opt` must be an optimizer of keras"),
      ({"opt": "adan"}, ValueError, r"`opt` must name .*'adan'.*\"adam\""),
      ({"opt": SGD}, TypeError, "`opt`"),
      ({"clipnorm": 1.0, "clipvalue": 1.0}, ValueError, "clip"),
      ({"clip": 1.0}, TypeError, r"^CrossShardOptimizer\.__init__.*'clip'"),
      ({"zzz": 1.0}, TypeError, r"^CrossShardOptimizer\.__init__.*'zzz'$"),
      ({"lazy_row": True}, TypeError, "Did you mean 'lazy_rows'"),
      ({"opt": SGD(), "learning_rate": 0.1}, TypeError, "Pass it to SGD"),
      ({"groups": None}, TypeError, "Did you mean .*'group_assignment'"),
      ({"accumulation_steps": 2}, TypeError, "mean 'accumulate_steps'"),
    ],
  )
  def test_constructor(
    self, arguments: dict[str, Any], error: type[Exception], words: str
  ) -> None:
    with pytest.raises(error, match=words):
      CrossShardOptimizer(**{"opt": "sgd", **arguments})

  def test_group_count_is_checked_under_the_strategy(self) -> None:
    with (
      testbed.mirrored().scope(),
      pytest.raises(
        ValueError, match=r"covers 2 .* under MirroredStrategy \(4 replicas\)"
      ),
    ):
      CrossShardOptimizer("sgd", group_assignment=[[0, 1]])

  def test_foreign_variables(self) -> None:
    optimizer, weight = _make(_sgd)
    with testbed.mirrored().scope():
      foreign = keras.Variable(0.0, name="foreign")
    pairs = [(0.0, weight), (0.0, foreign)]
    with pytest.raises(ValueError, match=r"`grads_and_vars` holds foreign"):
      testbed.run(lambda: optimizer.apply_gradients(pairs))
    with pytest.raises(ValueError, match=r"`var_list` holds foreign"):
      testbed.run(
        lambda: optimizer.minimize(lambda: 2 * foreign, var_list=[foreign])
      )
    assert testbed.copies(weight) == [0.0] * 4

  def test_loss(self) -> None:
    weight = keras.Variable([1.0, 2.0])
    optimizer = CrossShardOptimizer("sgd")
    with pytest.raises(ValueError, match=r"`loss` .*scalar.*\(2,\).*reduce_m"):
      optimizer.compute_gradients(lambda: weight * 1.0, [weight])
    with pytest.raises(TypeError, match="`loss` is an eager tensor"):
      optimizer.compute_gradients(tf.constant(1.0), [weight])
    with pytest.raises(TypeError, match="`loss` must be a tensor"):
      optimizer.compute_gradients("loss", [weight])
    with pytest.raises(ValueError, match="depends on no trainable variable"):
      optimizer.compute_gradients(lambda: tf.constant(1.0))
    with pytest.raises(ValueError, match="`gate_gradients`"):
      optimizer.minimize(lambda: weight[0], var_list=[weight], gate_gradients=7)
    with pytest.raises(TypeError, match=r"`global_step` .*got 3"):
      optimizer.minimize(lambda: weight[0], 3, [weight])
    with pytest.raises(ValueError, match=r"`var_list`.*at least one"):
      optimizer.minimize(lambda: weight[0], var_list=[])
    total = CrossShardOptimizer("sgd", "sum")
    [(grad, _)] = total.compute_gradients(lambda: weight * 1.0, [weight])
    np.testing.assert_array_equal(grad, [1.0, 1.0])

  def test_slots(self) -> None:
    optimizer, _ = _make(_sgd)
    for other in ("weight", None, tf.constant(1.0)):
      with pytest.raises(TypeError, match="`var` must contain"):
        optimizer.get_slot(other, "momentum")

  def test_keras_order_of_arguments(self) -> None:
    weight = keras.Variable(1.0)
    optimizer = CrossShardOptimizer(_sgd())
    for var_list in ((weight,), [weight], (v for v in [weight])):
      optimizer.minimize(lambda: 1.0 * weight, var_list)
    assert float(weight.numpy()) == -2.0

  def test_apply(self) -> None:
    optimizer, weight = CrossShardOptimizer(_sgd()), keras.Variable(1.0)
    for variables in (None, [weight] * 2):
      with pytest.raises(ValueError, match=r"per variable; .* call build"):
        optimizer.apply([tf.constant(1.0)], variables)
    optimizer.apply([tf.constant(1.0)], (v for v in [weight]))  # As Keras.
    assert float(weight.numpy()) == 0.0


def test_names_and_gates() -> None:
  optimizer = CrossShardOptimizer("adam", name="mine")
  assert optimizer.get_name() == optimizer.name == "mine"
  assert CrossShardOptimizer("sgd").get_name() == "CrossShardOptimizer"
  assert isinstance(optimizer, keras.optimizers.Optimizer)
  gates = (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH)
  assert gates == (0, 1, 2)
  assert optimizer.get_slot_names() == []


def test_what_a_graph_has_read_is_updated_on_every_replica() -> None:
  """The optimizer is built on the mirrored variable, not on its copies."""
  with testbed.mirrored().scope():
    weight = tf.Variable(10.0)
    optimizer = CrossShardOptimizer(SGD(1.0, momentum=0.5), "sum")
  for _ in range(2):  # Neither built nor told of variables.
    testbed.run(lambda: optimizer.minimize(testbed.mark() * weight))
  assert testbed.copies(weight) == [10.0 - 15.0 - 15.0 * 1.5] * 4
