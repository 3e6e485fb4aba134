"""TowerOptimizer: its numbers, its methods, and what it wraps."""

import pickle
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import oracle, testbed
from tests.support.towers_bed import (
  MODES,
  TWO,
  batch,
  caller,
  linear,
  named,
  sgd,
  values,
)
from tf_cross_shard import (
  CrossShardOptimizer,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)
from tf_cross_shard import tf_keras as ours_tf_keras

keras = tf.keras
every_mode = pytest.mark.parametrize("mode", MODES)


class Linear:
  """A model with loss `c * features`, `c` from 10, a learning rate of 1."""

  def __init__(self, variable: str, optimizer: str) -> None:
    self._c = tf.Variable(10.0, name="c") if variable == "outside" else None
    self._optimizer = TowerOptimizer(sgd) if optimizer == "outside" else None

  def __call__(self, features: Any, mode: str) -> TowerSpec:
    c = tf.Variable(10.0, name="c") if self._c is None else self._c
    # As TensorFlow 1's programs had it: an object, made in the function.
    optimizer = self._optimizer or TowerOptimizer(sgd())
    return linear(c, optimizer)(features, mode)

  def value(self, replicated: Any) -> float:
    """The value of `c`, wherever it was made."""
    c = named(replicated.variables, "c") if self._c is None else self._c
    return float(c.numpy())


# Every pair of where the variable and the optimizer are made, and how it runs;
# a mean is half of the sum, and one tower has all of the batch.
@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  ("variable", "optimizer", "mode", "reduction", "devices", "factor"),
  [
    ("outside", "outside", "eager", "sum", TWO, 1.0),
    ("outside", "outside", "eager", "mean", TWO, 0.5),
    ("outside", "inside", "function", "mean", TWO, 0.5),
    ("inside", "outside", "function", "sum", TWO, 1.0),
    ("inside", "inside", "eager", "mean", TWO[1:], 1.0),
    ("inside", "inside", "function", "sum", TWO, 1.0),
  ],
)
def test_values(
  variable: str,
  optimizer: str,
  mode: str,
  reduction: str,
  devices: Any,
  factor: float,
) -> None:
  model = Linear(variable, optimizer)
  replicated = replicate_model_fn(model, reduction, devices)
  step = caller(replicated, mode)
  c = 10.0
  # Nothing is left over of the batch before.
  for count, rows in enumerate((batch(), batch(), batch([1.0], [-3.0])), 1):
    total = factor * float(tf.reduce_sum(rows))
    spec = step(rows)
    assert [float(spec.loss), int(spec.train_op)] == [c * total, count]
    c -= total
    assert model.value(replicated) == c
  assert c == {1.0: 6.0, 0.5: 8.0}[factor]


def test_two_optimizers_on_two_variables() -> None:
  first = TowerOptimizer(sgd)
  second = TowerOptimizer(keras.optimizers.Adam(0.5))
  c, d = tf.Variable(10.0), tf.Variable(10.0)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(c * features)
    other = tf.reduce_sum(d * features * features)
    first.minimize(loss, var_list=[c])
    train_op = second.minimize(other, var_list=[d])
    return TowerSpec(mode, loss + other, train_op)

  step = tf.function(replicate_model_fn(model_fn, "sum", TWO))
  plain, expected = keras.optimizers.Adam(0.5), keras.Variable(10.0)
  for steps, (x, y) in enumerate(((1.0, 2.0), (3.0, -1.0)), 1):
    assert int(step(batch([x], [y])).train_op) == steps
    plain.apply_gradients([(tf.constant(x * x + y * y), expected)])
  assert float(c) == 5.0
  assert abs(float(d) - float(expected.numpy())) < 1e-5


@pytest.mark.tf_keras_mode
def test_two_losses_and_one_optimizer() -> None:
  optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    first = tf.reduce_sum(c * features)
    optimizer.minimize(first, var_list=[c])
    # Of the weights before the step, in the last tower too.
    second = tf.reduce_sum(c * c * features)
    return TowerSpec(mode, second, optimizer.minimize(second, var_list=[c]))

  spec = replicate_model_fn(model_fn, "sum", TWO)(batch())
  assert float(c) == 10.0 - 3.0 - 60.0
  assert float(spec.loss) == 300.0
  assert int(spec.train_op) == int(optimizer.iterations) == 2


def test_overlapping_rows_are_one_row_to_adam() -> None:
  table, plain = (keras.Variable([[1.0], [2.0], [3.0]]) for _ in "12")
  optimizer = TowerOptimizer(keras.optimizers.Adam(0.5))
  whole = keras.optimizers.Adam(0.5)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    rows = tf.IndexedSlices(features, [1], [3, 1])
    return TowerSpec(mode, None, optimizer.apply_gradients([(rows, table)]))

  step = tf.function(replicate_model_fn(model_fn, "sum", TWO))
  for x in (batch([2.0], [4.0]), batch([-1.0], [7.0])):
    step(x)
    # Dense: of rows that come twice plain Adam adds up the squares.
    grad = tf.pad(tf.reduce_sum(x, 0, keepdims=True), [[1, 1], [0, 0]])
    whole.apply_gradients([(grad, plain)])
  np.testing.assert_allclose(table.numpy(), plain.numpy(), rtol=1e-6)


def test_towers_whose_gradients_are_of_other_kinds() -> None:
  """Tests gradients whose kind or dtype differs between the towers.

  The gradient of `table` is row-sparse in one tower and dense in the other,
  with different dtypes. The gradient of `d` is None in one tower only.
  """
  table, d, e = tf.Variable([[1.0], [2.0]]), tf.Variable(10.0), tf.Variable(1.0)
  optimizer = TowerOptimizer(sgd)
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    towers.append(len(towers))
    if len(towers) % 2:
      grad: Any = tf.IndexedSlices(tf.cast(features, "float64"), [1], [2, 1])
    else:
      grad = tf.concat([features, 10.0 * features], axis=0)
    part = tf.reduce_sum(features) if len(towers) % 2 else None
    pairs = [(grad, table), (part, d), (None, e)]
    return TowerSpec(mode, None, optimizer.apply_gradients(pairs))

  tf.function(replicate_model_fn(model_fn, "sum", TWO))(batch())
  assert table.numpy().tolist() == [[-1.0], [-19.0]]
  assert values([d, e]) == [9.0, 1.0]


def _pairs(
  optimizer: Any, c: Any, reduction: str = "sum", mode: str = "eager"
) -> list[float]:
  """Takes a step, and returns each tower's gradient of `c * features`."""

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(c * features)
    [(grad, variable)] = pairs = optimizer.compute_gradients(loss, [c])
    assert variable is c
    train_op = optimizer.apply_gradients(pairs)
    return TowerSpec(mode, loss, train_op, tf.stack([grad]))

  step = caller(replicate_model_fn(model_fn, reduction, TWO), mode)
  grads: list[float] = step(batch()).predictions.numpy().tolist()
  return grads


class TestMembers:
  """The members of the specification's page."""

  def test_constructor(self) -> None:
    made: list[Any] = []

    def make() -> Any:
      made.append(sgd(0.25))
      return made[-1]

    opt = sgd(0.25)
    assert TowerOptimizer(opt).inner_optimizer is opt
    from_function = TowerOptimizer(make)
    c = tf.Variable(10.0)
    for _ in range(2):
      from_function.apply_gradients([(tf.constant(4.0), c)])
    assert [from_function.inner_optimizer] == made
    assert float(c) == 8.0
    for opt in (keras.optimizers.SGD, "sgd"):
      inner = TowerOptimizer(optimizer_or_optimizer_fn=opt).inner_optimizer
      assert type(inner) is keras.optimizers.SGD

  def test_names_slots_and_variables(self) -> None:
    opt, c = sgd(momentum=0.5, name="inner"), tf.Variable(10.0)
    optimizer = TowerOptimizer(opt)
    optimizer.build([c])
    assert optimizer.get_name() == "inner"
    [name] = optimizer.get_slot_names()
    assert optimizer.get_slot(c, "none") is None
    # Without replicate_model_fn, all calls are forwarded.
    optimizer.minimize(lambda: tf.reduce_sum(c * batch()), var_list=[c])
    assert values([c, optimizer.get_slot(c, name)]) == [7.0, -3.0]
    for found in (optimizer.variables, optimizer.variables()):
      assert list(map(id, found)) == list(map(id, opt.variables))

  @every_mode
  def test_compute_gradients(self, mode: str) -> None:
    for reduction, expected in (("sum", [1.0, 2.0]), ("mean", [0.5, 1.0])):
      optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)
      assert _pairs(optimizer, c, reduction, mode) == expected

  def test_compute_gradients_outside_of_towers(self) -> None:
    optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)

    @tf.function
    def in_graph() -> Any:
      # By position, as in TensorFlow 1.
      gate = optimizer.GATE_GRAPH
      args = (gate, tf.AggregationMethod.ADD_N, True, tf.constant(2.0))
      [(grad, _)] = optimizer.compute_gradients(7.0 * c, [c], *args)
      return grad

    assert float(in_graph()) == 14.0
    with pytest.raises(TypeError, match="unexpected keyword argument 'gates'"):
      optimizer.compute_gradients(lambda: c, gates=1)

  @every_mode
  def test_apply_gradients(self, mode: str) -> None:
    optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)
    global_step = tf.Variable(5, dtype=tf.int64)

    def model_fn(features: Any, mode: str) -> TowerSpec:
      grad = tf.reduce_sum(features)
      count = optimizer.apply_gradients([(grad, c)], global_step, name="step")
      # Earlier towers change nothing, and neither does the last one yet.
      now = [c.read_value(), *(tf.cast(x, "float32") for x in (global_step, 0))]
      return TowerSpec(mode, None, count, tf.stack(now)[tf.newaxis])

    step = caller(replicate_model_fn(model_fn, "sum", TWO), mode)
    spec = step(batch())
    assert spec.predictions.numpy().tolist() == [[10.0, 5.0, 0.0]] * 2
    assert [int(spec.train_op), float(c), int(global_step)] == [1, 7.0, 6]
    assert int(step(batch()).train_op) == int(optimizer.iterations) == 2
    assert [float(c), int(global_step)] == [4.0, 7]

  def test_has_been_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
    base = next(x for x in TowerOptimizer.__mro__ if "_was_used" in vars(x))
    monkeypatch.setattr(base, "_was_used", False)
    optimizer, c = TowerOptimizer(sgd), tf.Variable(1.0)
    CrossShardOptimizer("sgd").minimize(lambda: 2.0 * c, var_list=[c])
    with pytest.raises(ValueError, match="shapes"):
      optimizer.apply_gradients([(tf.ones([2]), c)])
    assert not TowerOptimizer.has_been_used()
    replicate_model_fn(linear(c, optimizer), devices=TWO)(batch())
    assert TowerOptimizer.has_been_used()

  def test_constants(self) -> None:
    name = TowerOptimizer.COLLECTION_FOR_GRAPH_STATES
    assert name == "replicate_model_fn_graph_states"
    gates = TowerOptimizer.GATE_NONE, TowerOptimizer.GATE_OP
    assert (*gates, TowerOptimizer.GATE_GRAPH) == (0, 1, 2)


class TestState:
  def test_config_and_pickle(self) -> None:
    optimizer = TowerOptimizer(lambda: sgd(0.5, momentum=0.5))
    config = optimizer.get_config()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is TowerOptimizer
    assert again.get_config() == config
    assert again.inner_optimizer.momentum == 0.5
    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again) is TowerOptimizer
    assert again.get_config() == config

  def test_fit(self) -> None:
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(TowerOptimizer(sgd(0.25)), "mse")
    model.fit(np.ones([4, 1]), np.ones([4, 1]), verbose=0)
    assert float(dense.kernel.numpy()[0, 0]) == 0.5

  def test_a_rate_that_changes_and_clipping_of_the_sum(self) -> None:
    optimizer, c = TowerOptimizer(sgd(clipvalue=4.0)), tf.Variable(10.0)
    assert optimizer.clipvalue == 4.0
    optimizer.clipvalue = 2.5  # The wrapped optimizer's.
    step = tf.function(replicate_model_fn(linear(c, optimizer), "sum", TWO))
    step(batch())
    assert float(c) == 7.5
    optimizer.learning_rate = 2.0
    assert float(optimizer.inner_optimizer.learning_rate) == 2.0
    step(batch())
    assert float(c) == 2.5


@pytest.mark.parametrize(
  ("place", "towers", "replicas", "shard_update"),
  [
    ("mirrored", "mean", "sum", False),
    ("virtual", "sum", "mean", "elementwise"),
  ],
)
def test_towers_of_replicas(
  place: str, towers: str, replicas: str, shard_update: bool | str
) -> None:
  strategies = {"mirrored": testbed.mirrored, "virtual": testbed.virtual}
  strategy = strategies[place](4)
  with strategy.scope():
    c, global_step = tf.Variable(10.0), tf.Variable(0)
    optimizer = TowerOptimizer(
      CrossShardOptimizer(
        sgd(momentum=0.5),
        replicas,
        group_assignment=[[0, 2], [1, 3]],
        shard_update=shard_update,
      )
    )
    optimizer.build([c])

  model_fn = linear(c, optimizer, global_step)
  replicated = replicate_model_fn(model_fn, towers, ["", ""])
  # Two towers in each replica.
  rows = tf.constant([[1.0, 3.0], [6.0, 2.0], [-1.0, 5.0], [9.0, 5.0]])

  @tf.function
  def run() -> Any:
    return strategy.run(
      lambda: replicated(tf.gather(rows, testbed.replica_id())).loss
    )

  run()
  # One of the two is a mean, of 2.
  a, b = 10.0 - (4.0 + 4.0) / 2, 10.0 - (8.0 + 14.0) / 2
  assert testbed.copies(c) == [a, b, a, b]
  assert testbed.copies(global_step) == [1, 1, 1, 1]
  momentum = optimizer.get_slot(c, optimizer.get_slot_names()[0])
  assert testbed.copies(momentum)[:2] == [a - 10.0, b - 10.0]


def _scaled(opt: Any) -> Any:
  """A loss scaling optimizer that starts from a scale of 8."""
  return keras.optimizers.LossScaleOptimizer(opt, initial_scale=8.0)


def test_a_loss_scale_within() -> None:
  optimizer, c = TowerOptimizer(_scaled(sgd(momentum=0.5))), tf.Variable(10.0)
  global_step = tf.Variable(0)
  model_fn = linear(c, optimizer, global_step)
  step = tf.function(replicate_model_fn(model_fn, "sum", TWO))
  step(batch())
  assert [float(c), int(global_step)] == [7.0, 1]
  scale = optimizer.inner_optimizer.dynamic_scale
  assert float(scale.numpy()) == 8.0
  # Only one tower overflows; all of the step is left out.
  step(batch([3.0], [float("inf")]))
  assert [float(c), int(global_step)] == [7.0, 1]
  assert [float(scale.numpy()), int(optimizer.iterations)] == [4.0, 1]
  step(batch([2.0], [1.0]))
  assert [float(c), int(global_step)] == [7.0 - 1.5 - 3.0, 2]


def test_a_loss_scale_around() -> None:
  with pytest.raises(ValueError, match=r"inside: TowerOptimizer\(Loss.*\(SGD"):
    _scaled(TowerOptimizer(sgd()))
  with pytest.raises(ValueError, match=r"\(CrossShardOptimizer\(LossS.*\(SGD"):
    _scaled(TowerOptimizer(CrossShardOptimizer("sgd")))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_nadam_of_tf_keras(replicas: int, mode: str) -> None:
  """Nadam multiplies its product once in each step, not for each variable.

  Plain tf_keras does so only in an eager loop with one replica.
  """
  strategy = (
    tf.distribute.get_strategy() if replicas == 1 else testbed.mirrored(2)
  )
  expected = [np.array([1.0, 2.0]), np.array([3.0])]
  slots = [oracle.first_slots(oracle.nadam, w) for w in expected]
  with strategy.scope():
    weights = list(map(tf.Variable, ([1.0, 2.0], [3.0])))
    plain = tf_keras.optimizers.Nadam(0.1)
    optimizer = ours_tf_keras.TowerOptimizer(plain)
    optimizer.build(weights)

  def step() -> None:  # tf_keras sums over the replicas.
    optimizer.apply_gradients([(w * 0.5 / replicas, w) for w in weights])

  run = caller(lambda: strategy.run(step), mode)
  for t in range(1, 5):
    run()
    expected = [
      oracle.nadam({"learning_rate": 0.1}, w, 0.5 * w, t, m)
      for w, m in zip(expected, slots, strict=True)
    ]
    for weight, value in zip(weights, expected, strict=True):
      for copy in testbed.copies(weight):
        np.testing.assert_allclose(copy, value, rtol=1e-5)
  assert plain._u_product_counter == 1  # The attribute is restored.
