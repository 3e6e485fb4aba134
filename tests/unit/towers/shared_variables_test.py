"""Variables that a model function makes are shared by order of creation."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_cross_shard.tf_keras
from tests.support import testbed
from tests.support.towers_bed import (
  TWO,
  batch,
  caller,
  linear,
  named,
  sgd,
  values,
)
from tf_cross_shard import TowerOptimizer, TowerSpec, replicate_model_fn

keras = tf.keras


def test_get_variable_goes_by_name() -> None:
  def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
    by_name = {}
    for name, value in params.items():
      start = tf.compat.v1.constant_initializer(value)
      with tf.compat.v1.variable_scope("net"):
        by_name[name] = tf.compat.v1.get_variable(
          name, np.shape(value), initializer=start
        )
    return TowerSpec(mode, predictions=features * by_name["a"])

  replicated = replicate_model_fn(model_fn, devices=TWO)

  def predict(**params: Any) -> Any:
    run = tf.function(lambda x: replicated(x, mode="infer", params=params))
    return run(batch()).predictions.numpy().tolist()

  for params in ({"a": 2.0, "b": 3.0}, {"b": 3.0, "a": 2.0}, {"a": 2.0}):
    assert predict(**params) == [[2.0], [4.0]]
  assert [v.name for v in replicated.variables] == ["net/a:0", "net/b:0"]
  replicated.variables[0].assign(7.0)
  assert predict(b=3.0, a=2.0) == [[7.0], [14.0]]
  with pytest.raises(ValueError, match="a:0 has shape"):
    predict(a=[2.0, 3.0])


def test_get_variable_in_functions_and_eagerly() -> None:
  """Later functions do not find the variables of `get_variable`.

  TensorFlow stores these variables by name.
  """
  get = tf.compat.v1.get_variable

  def model_fn(features: Any, mode: str) -> TowerSpec:
    c = get("c", [], initializer=tf.compat.v1.constant_initializer(10.0))
    return linear(c, TowerOptimizer(sgd()))(features, mode)

  both = [replicate_model_fn(model_fn, devices=TWO) for _ in "12"]
  functions = [tf.function(step) for step in both]
  for step in (functions[0], both[0], both[1], functions[1]):
    step(batch())
  for replicated in both:
    # The optimizer's count and rate; its wrapper has none.
    by_name = {v.name.split("/")[-1]: v for v in replicated.variables}
    assert sorted(by_name) == ["c:0", "iteration:0", "learning_rate:0"]
    assert values([by_name["c:0"], by_name["iteration:0"]]) == [4.0, 2]
  # Nor is anything left for others.
  with tf.compat.v1.variable_scope("", reuse=tf.compat.v1.AUTO_REUSE):
    other = tf.function(lambda: get("c", initializer=5.0) * 1.0)
    assert float(other()) == 5.0


class TestOptimizersMadeInside:
  @pytest.mark.parametrize(
    ("mode", "devices"), [("eager", TWO[:1]), ("function", TWO)]
  )
  def test_state_is_continued(self, mode: str, devices: Any) -> None:
    """Each optimizer has its own state, which another function finds again."""

    def model_fn(features: Any, mode: str) -> TowerSpec:
      ops = []
      for name in "cd":
        c = tf.Variable(16.0, name=name)
        loss = tf.reduce_sum(c * features) * (1.0 if name == "c" else 2.0)
        optimizer = TowerOptimizer(sgd(momentum=0.5))
        ops.append(optimizer.minimize(loss, var_list=[c]))
      return TowerSpec(mode, None, ops[-1])

    replicated = replicate_model_fn(model_fn, devices=devices)
    step = caller(replicated, mode)
    counts = [int(run(batch()).train_op) for run in (step, step, replicated)]
    assert counts == [1, 2, 3]
    c, d = (named(replicated.variables, name) for name in "cd")
    # velocity 3, 4.5, 5.25, and twice that
    assert values([c, d]) == [16.0 - 12.75, 16.0 - 25.5]

  def test_another_class(self) -> None:
    """The first call's settings are used. Only the class is compared."""
    c = tf.Variable(10.0)

    def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
      return linear(c, TowerOptimizer(params()))(features, mode)

    replicated = replicate_model_fn(model_fn, devices=TWO)
    replicated(batch(), params=sgd)
    with pytest.raises(ValueError, match="it first created SGD, but now Adam"):
      replicated(batch(), params=keras.optimizers.Adam)
    assert float(c) == 7.0
    replicated(batch(), params=lambda: sgd(2.0))
    assert float(c) == 4.0

  def test_around_optimizers_from_outside(self) -> None:
    """The optimizers keep their slots inside new TowerOptimizers."""
    weights = [tf.Variable(10.0) for _ in "12"]
    optimizers = [sgd(1.0, momentum=0.5) for _ in weights]

    def model_fn(features: Any, mode: str, params: int) -> TowerSpec:
      optimizer = TowerOptimizer(optimizers[params])
      return linear(weights[params], optimizer)(features, mode)

    replicated = replicate_model_fn(model_fn, devices=TWO)
    for params in (0, 1, 0):
      replicated(batch(), params=params)
    # 3, then 3 + 0.5 * 3; the other has moved once, on its own.
    assert [float(w) for w in weights] == [10 - 3 - 4.5, 7.0]


def test_layers_of_tf_keras_in_the_same_program() -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    layers = [tf_keras.layers.Dense(1, kernel_initializer="ones") for _ in "12"]
    y = tf_keras.Sequential(layers)(features)
    loss = tf.reduce_sum(y)
    if mode == "train":
      optimizer = tf_keras.optimizers.SGD(0.5, momentum=0.5)
      tf_cross_shard.tf_keras.TowerOptimizer(optimizer).minimize(loss)
    return TowerSpec(mode, loss)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  step = tf.function(lambda x: replicated(x).loss)
  assert float(step(batch())) == 3.0
  step(batch())
  k1, b1, k2, b2 = (float(tf.squeeze(v)) for v in replicated.variables[:4])
  # Two steps by hand: of gradients 3 k2, 2 k2, 3 k1 + 2 b1 and 2.
  assert [k1, b1, k2, b2] == [-0.5, -1.0, 0.5, -2.5]
  # Evaluation makes no optimizer.
  evaluate = tf.function(lambda x: replicated(x, mode="eval").loss)
  assert float(evaluate(batch())) == -3.25 - 3.5


def test_variables_are_where_the_first_tower_is() -> None:
  optimizer = TowerOptimizer(sgd(momentum=0.5))

  def model_fn(features: Any, mode: str) -> TowerSpec:
    c = tf.Variable(10.0, name="c")
    return linear(c, optimizer)(features, mode)

  replicated = replicate_model_fn(model_fn, devices=("CPU:2", "CPU:1"))
  tf.function(replicated)(batch())
  [c] = replicated.variables
  slot = optimizer.get_slot(c, *optimizer.get_slot_names()).value
  assert all(v.device.endswith("CPU:2") for v in (c, slot))
  assert [float(c), float(slot)] == [7.0, -3.0]


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  ("after", "starts", "words"),
  [
    (1, (1.0, [0.0] * 3), "tower_0/b:0 has shape (2,) and dtype"),
    (
      2,
      (lambda: tf.ones([], tf.float64),),
      "dtype float32, but this tower or call needs shape () and dtype float64",
    ),
    (1, (1.0,), "created 2, but this one created 1: only one of them has tow"),
    (2, (1.0, [0.0] * 2, 1.0), "this one created 3: only one"),
  ],
)
def test_differences(after: int, starts: Any, words: str) -> None:
  """After towers that agree, one creates others, and nothing is applied."""
  c, optimizer = tf.Variable(10.0), TowerOptimizer(sgd)
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    made = starts if len(towers) == after else (1.0, [0.0] * 2)
    for name, start in zip("abc", made, strict=False):
      tf.Variable(start, name=name)
    towers.append(1)
    return linear(c, optimizer)(features, mode)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  for _ in range(after // 2):
    replicated(batch())
  with pytest.raises(ValueError, match="create the same variables") as error:
    replicated(batch())
  assert words in str(error.value)
  assert float(c) == 10.0 - 3.0 * (after // 2)
  assert len(replicated.variables) == 2


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  ("first", "second", "words"),
  [
    ("Adam SGD", "SGD", "it first created Adam, but now SGD."),
    ("SGD", "SGD Adam", "it first created no optimizer 2, but now Adam."),
    ("", "Adam", "it first created no optimizer 1, but now Adam."),
    ("SGD", "+SGD", "it first created SGD, but now LossScaleOptimizer(SGD)."),
  ],
)
def test_towers_that_make_other_optimizers(
  first: str, second: str, words: str
) -> None:
  """The error names the optimizers, and not their variables."""
  weights = [tf.Variable(10.0), tf.Variable(10.0)]
  towers = iter([first, second])

  def make(name: str) -> Any:
    optimizer = getattr(keras.optimizers, name.removeprefix("+"))(1.0)
    if not name.startswith("+"):
      return optimizer
    return keras.mixed_precision.LossScaleOptimizer(optimizer)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(features)
    for weight, name in zip(weights, next(towers).split(), strict=False):
      part = weight * tf.reduce_sum(features)
      TowerOptimizer(make(name)).minimize(part, var_list=[weight])
      loss += part
    return TowerSpec(mode, loss)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  with pytest.raises(ValueError, match="the same optimizers in") as error:
    tf.function(replicated)(batch())
  text = " ".join(str(error.value).split())
  assert words in text.replace("OptimizerV3", "Optimizer")  # tf_keras' class
  assert values(weights) == [10.0, 10.0]


@pytest.mark.parametrize("modes", [("eval", "infer"), ("infer", "eval")])
def test_weights_that_another_mode_leaves_out(modes: Any) -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    for _ in range(2 if mode == "eval" else 1):
      tf.Variable(1.0)
    return TowerSpec(mode, predictions=tf.Variable(5.0) * features)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  replicated(batch(), mode=modes[0])
  with pytest.raises(ValueError, match="may add optimizers"):
    replicated(batch(), mode=modes[1])
  spec = replicated(batch(), mode=modes[0])
  np.testing.assert_array_equal(spec.predictions, batch() * 5.0)


class _Lazy(keras.Model):
  """A model that is built when it is first called."""

  def __init__(self, value: float, units: int = 1) -> None:
    super().__init__()
    start = keras.initializers.Constant(value)
    self.dense = keras.layers.Dense(
      units, use_bias=False, kernel_initializer=start
    )

  def call(self, x: Any) -> Any:
    return self.dense(x)


def test_models_from_outside_that_are_built_within() -> None:
  models = [_Lazy(value) for value in (1.0, 3.0)]

  def model_fn(features: Any, mode: str, params: int) -> TowerSpec:
    return TowerSpec(mode, predictions=models[params](features))

  replicated = replicate_model_fn(model_fn, devices=TWO)

  def predict(i: int) -> Any:
    run = tf.function(lambda x: replicated(x, mode="infer", params=i))
    return run(batch()).predictions

  np.testing.assert_array_equal(predict(0), batch())
  # The first model has the variables that it made; another may not.
  with pytest.raises(ValueError, match=r"outside model_fn, before its first"):
    predict(1)
  models[1] = _Lazy(3.0)
  models[1](batch())
  for i, factor in ((1, 3.0), (0, 1.0)):
    np.testing.assert_array_equal(predict(i), batch() * factor)


def test_replicas_share_what_is_made_inside() -> None:
  strategy = testbed.mirrored(2)
  with strategy.scope():
    optimizer = TowerOptimizer(tf_cross_shard.CrossShardOptimizer(sgd(), "sum"))

  def model_fn(features: Any, mode: str) -> TowerSpec:
    c = tf.Variable(10.0, name="c")
    return linear(c, optimizer)(features, mode)

  replicated = replicate_model_fn(model_fn, "sum", ["", ""])
  rows = testbed.per_replica(strategy, [[[1.0], [2.0]], [[0.5], [0.25]]])

  @tf.function
  def step(rows: Any) -> Any:
    return strategy.run(lambda x: replicated(x).loss, args=(rows,))

  for c in (10.0 - 3.75, 10.0 - 7.5):
    step(rows)
    assert testbed.copies(replicated.variables[0]) == [c, c]
  assert len(replicated.variables) == 1
