"""Variables that a model function makes are made once."""
# keras: both

import concurrent.futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, towers_bed
from tests.support.towers_bed import (
  MODES,
  TWO,
  batch,
  caller,
  named,
  sgd,
  values,
)
from tf_cross_shard import (
  ModeKeys,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)
from tf_cross_shard.towers import shared_variables

keras = tf.keras
KINDS = ("tf", "keras", "get_variable")


def _make(kind: str, value: float, name: str, **options: Any) -> Any:
  """A variable, made in one of several ways."""
  if kind == "keras":
    return testbed.variable(value, name)
  if kind == "get_variable":
    return tf.compat.v1.get_variable(name, initializer=value, use_resource=True)
  return tf.Variable(value, name=name, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_made_once_for_all_towers_and_steps(kind: str, mode: str) -> None:
  optimizer = TowerOptimizer(sgd)
  seen: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    c, d = _make(kind, 10.0, "c"), _make(kind, 5.0, "d")
    seen.append(id(c))
    loss = tf.reduce_sum(c * features - d)
    train_op = None
    if mode == "train":
      train_op = optimizer.minimize(loss, var_list=[c, d])
    return TowerSpec(mode, loss, train_op, features * c)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  step = caller(replicated, mode)
  steps = []
  for rows in ([1.0], [2.0]), ([3.0], [-1.0]):
    spec = step(batch(*rows))
    steps.append(float(spec.loss))
  assert steps == [30.0 - 10.0, 14.0 - 14.0]
  assert len(replicated.variables) == 2  # The optimizer has its own.
  c, d = (named(replicated.variables, name) for name in "cd")
  assert values([c, d]) == [5.0, 9.0]
  # What is predicted, and evaluated, is of the weights that were trained.
  run = caller(lambda x, mode: replicated(x, mode=mode), mode)
  spec = run(batch([1.0], [2.0]), mode=ModeKeys.PREDICT)
  assert spec.predictions.numpy().tolist() == [[5.0], [10.0]]
  assert float(run(batch(), mode="eval").loss) == 15.0 - 18.0
  c.assign(1.0)
  spec = run(batch([1.0], [2.0]), mode=ModeKeys.PREDICT)
  assert spec.predictions.numpy().tolist() == [[1.0], [2.0]]
  assert len(replicated.variables) == 2
  if kind == "tf":
    assert len(set(seen)) == 1


def _layers(features: Any) -> Any:
  """A network with automatic names, whose layers have one shape."""
  hidden = keras.layers.Dense(3, use_bias=True)(features)
  hidden = keras.layers.Dense(3, "tanh")(hidden)
  return keras.layers.Dense(3)(hidden)


def _by_hand(variables: Any, x: Any) -> Any:
  """What `_layers` computes, of kernels and biases in order of creation."""
  kernels = [np.asarray(v.numpy()) for v in variables]
  hidden = x @ kernels[0] + kernels[1]
  hidden = np.tanh(hidden @ kernels[2] + kernels[3])
  return hidden @ kernels[4] + kernels[5]


def _network(made: str = "outside") -> Any:
  """A replicated function of Keras layers made inside."""
  optimizer = TowerOptimizer(lambda: keras.optimizers.Adam(0.125))

  def model_fn(features: Any, mode: str) -> TowerSpec:
    opt = optimizer
    y = _layers(features)
    loss = tf.reduce_mean((y - features) ** 2)
    train_op = None
    if mode == "train":
      if made == "inside":
        opt = TowerOptimizer(lambda: keras.optimizers.Adam(0.125))
      train_op = opt.minimize(loss)
    return TowerSpec(mode, loss, train_op, y)

  return replicate_model_fn(model_fn, "mean", TWO)


def _weights(replicated: Any) -> list[Any]:
  """Kernels and biases, not what belongs to the optimizer."""
  return replicated.variables[:6]


ROWS = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")


@pytest.mark.parametrize("made", ["outside", "inside"])
@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("predict", MODES)
def test_layers_with_automatic_names(
  predict: str, train: str, made: str
) -> None:
  # Names are numbered on: other layers come in between.
  keras.layers.Dense(3)
  replicated = _network(made)
  answer = caller(
    lambda x: replicated(x, mode=ModeKeys.PREDICT).predictions, predict
  )
  evaluate = caller(lambda x: replicated(x, mode="eval").loss, train)
  if predict == "function" == train:
    # A tf.function makes variables in its first call only.
    answer(tf.constant(ROWS))
  before = answer(tf.constant(ROWS)).numpy()
  assert len(replicated.variables) == 6
  np.testing.assert_allclose(
    before, _by_hand(_weights(replicated), ROWS), rtol=1e-4, atol=1e-5
  )
  losses = [float(evaluate(tf.constant(ROWS)))]
  step = caller(lambda x: replicated(x).loss, train)
  for _ in range(8):
    step(tf.constant(ROWS))
    losses.append(float(evaluate(tf.constant(ROWS))))
  assert losses[-1] < 0.75 * losses[0]
  after = answer(tf.constant(ROWS)).numpy()
  assert np.abs(after - before).max() > 0.05
  np.testing.assert_allclose(
    after, _by_hand(_weights(replicated), ROWS), rtol=1e-4, atol=1e-5
  )
  shapes = [v.shape.as_list() for v in _weights(replicated)]
  assert shapes == [[3, 3], [3]] * 3


@pytest.mark.parametrize("mode", MODES)
def test_training_is_that_of_one_network(mode: str) -> None:
  replicated = _network("inside")
  step = caller(lambda x: replicated(x).loss, mode)
  # A look at the weights, before anything is trained.
  replicated(tf.constant(ROWS), mode=ModeKeys.PREDICT)
  start = [v.numpy() for v in _weights(replicated)]
  model = keras.Sequential(
    [
      keras.Input((3,)),
      keras.layers.Dense(3),
      keras.layers.Dense(3, "tanh"),
      keras.layers.Dense(3),
    ]
  )
  model.set_weights(start)
  model.compile(keras.optimizers.Adam(0.125), "mse")
  for _ in range(3):
    step(tf.constant(ROWS))
    model.train_on_batch(ROWS, ROWS)
  for a, b, s in zip(
    _weights(replicated), model.get_weights(), start, strict=True
  ):
    assert np.abs(b - s).max() > 0.02
    np.testing.assert_allclose(a.numpy(), b, atol=1e-4)


@pytest.mark.parametrize("first", MODES)
def test_eagerly_and_in_functions_in_turn(first: str) -> None:
  optimizer = TowerOptimizer(lambda: sgd(momentum=0.5))

  def model_fn(features: Any, mode: str) -> TowerSpec:
    c = tf.Variable(16.0, name="c")
    loss = tf.reduce_sum(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  found = []
  in_function = tf.function(replicated)
  for i in range(4):
    is_eager = (i % 2 == 0) == (first == "eager")
    (replicated if is_eager else in_function)(batch())
    found.append(values(replicated.variables)[0])
  # velocity 3, 4.5, 5.25, 5.625
  assert found == [13.0, 8.5, 3.25, -2.375]


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_made_inside_keeps_its_state(mode: str) -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    c, d = tf.Variable(10.0, name="c"), tf.Variable(10.0, name="d")
    ops = []
    for variable in (c, d):
      optimizer = TowerOptimizer(keras.optimizers.Adam(0.5))
      loss = tf.reduce_sum(variable * features)
      if variable is d:
        loss = loss * loss
      ops.append(optimizer.minimize(loss, var_list=[variable]))
    return TowerSpec(mode, None, ops[-1])

  replicated = replicate_model_fn(model_fn, devices=TWO)
  step = caller(replicated, mode)
  plain = [testbed.variable(10.0), testbed.variable(10.0)]
  optimizers = [keras.optimizers.Adam(0.5) for _ in plain]
  counts = []
  for x, y in ((1.0, 2.0), (4.0, -1.0), (0.5, 1.0)):
    counts.append(int(step(batch([x], [y])).train_op))
    for each, variable in zip(optimizers, plain, strict=True):
      with tf.GradientTape() as tape:
        parts = [variable * x, variable * y]
        loss = sum(p * p if variable is plain[1] else p for p in parts)
      native = towers_bed.native(variable)
      each.apply_gradients([(tape.gradient(loss, native), variable)])
  assert counts == [1, 2, 3]
  for name, expected in zip("cd", plain, strict=True):
    found = float(named(replicated.variables, name))
    assert abs(found - 10.0) > 0.5
    assert abs(found - float(expected.numpy())) < 1e-4
  assert len({id(v) for v in replicated.variables}) == len(replicated.variables)


@pytest.mark.parametrize("mode", MODES)
def test_variables_are_where_the_first_tower_is(mode: str) -> None:
  devices = ("CPU:2", "CPU:1")
  optimizer = TowerOptimizer(sgd(momentum=0.5))

  def model_fn(features: Any, mode: str) -> TowerSpec:
    c = tf.Variable(10.0, name="c")
    loss = tf.reduce_sum(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

  replicated = replicate_model_fn(model_fn, devices=devices)
  caller(replicated, mode)(batch())
  [c] = replicated.variables
  assert c.device.endswith("CPU:2")
  assert float(c) == 7.0
  [name] = optimizer.get_slot_names()
  slot = optimizer.get_slot(c, name)
  slot = getattr(slot, "value", slot)
  slot = slot if isinstance(slot, tf.Variable) else slot()
  assert slot.device.endswith("CPU:2")
  assert float(slot) == -3.0


class TestChanges:
  @pytest.mark.parametrize("mode", MODES)
  def test_another_start(self, mode: str) -> None:
    def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
      c = tf.Variable(params["start"], name="c")
      return TowerSpec(mode, predictions=features * c)

    replicated = replicate_model_fn(model_fn, devices=TWO)

    def predict(start: float) -> Any:
      return (
        caller(
          lambda x: replicated(x, mode="infer", params={"start": start}), mode
        )(batch())
        .predictions.numpy()
        .tolist()
      )

    assert predict(10.0) == [[10.0], [20.0]]
    with pytest.raises(ValueError, match="the same variables") as caught:
      predict(11.0)
    for words in (
      "must make the same variables in every tower and every call",
      "c started from 10.0 and is to start from 11.0 now",
    ):
      assert words in str(caught.value)
    assert predict(10.0) == [[10.0], [20.0]]

  def test_another_learning_rate(self) -> None:
    c = tf.Variable(10.0)

    def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
      optimizer = TowerOptimizer(sgd(params["rate"]))
      loss = tf.reduce_sum(c * features)
      return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

    replicated = replicate_model_fn(model_fn, devices=TWO)
    replicated(batch(), params={"rate": 1.0})
    assert float(c) == 7.0
    with pytest.raises(ValueError, match=r"learning_rate.* started from 1\.0"):
      replicated(batch(), params={"rate": 2.0})
    assert float(c) == 7.0
    replicated(batch(), params={"rate": 1.0})
    assert float(c) == 4.0

  def test_another_shape(self) -> None:
    towers: list[int] = []

    def model_fn(features: Any, mode: str) -> TowerSpec:
      towers.append(len(towers))
      tf.Variable(tf.zeros([len(towers)]), name="c")
      return TowerSpec(mode)

    with pytest.raises(ValueError, match=r"c has shape \(1,\), and now \(2,\)"):
      replicate_model_fn(model_fn, devices=TWO)(batch(), mode="eval")

  def test_another_dtype(self) -> None:
    towers: list[int] = []

    def model_fn(features: Any, mode: str) -> TowerSpec:
      towers.append(len(towers))
      dtype = tf.float32 if len(towers) == 1 else tf.float64
      c = tf.Variable(lambda: tf.zeros([2], dtype), name="c", dtype=dtype)
      assert c.dtype == dtype
      return TowerSpec(mode)

    with pytest.raises(ValueError, match="dtype"):
      replicate_model_fn(model_fn, devices=TWO)(batch(), mode="eval")

  def test_a_start_that_is_no_number_is_not_compared(self) -> None:
    def model_fn(features: Any, mode: str) -> TowerSpec:
      c = tf.Variable(float("nan"), name="c")
      d = tf.Variable(tf.random.uniform([2]), name="d")
      e = tf.Variable(lambda: tf.random.uniform([]), name="e")
      return TowerSpec(mode, predictions=features * (e + d[0] + 0.0 * c))

    replicated = replicate_model_fn(model_fn, devices=TWO)
    for _ in range(2):
      replicated(batch(), mode="infer")
    assert len(replicated.variables) == 3


class TestNames:
  def test_names_of_the_user_s(self) -> None:
    shared = shared_variables.SharedVariables()

    def call(*names: str) -> list[float]:
      with shared.reused():
        found = []
        for i, name in enumerate(names):
          *scopes, last = name.split("/")
          if scopes:
            with tf.name_scope("/".join(scopes)):
              found.append(tf.Variable(tf.fill([2], float(i)), name=last))
          else:
            found.append(tf.Variable(tf.fill([2], float(i)), name=last))
        return [float(each[0]) for each in found]

    assert call("a", "b/c", "d_1/c", "d_2/c") == [0.0, 1.0, 2.0, 3.0]
    # In another order, of names that are known.
    assert call("d_2/c", "b/c", "a", "d_1/c") == [3.0, 1.0, 0.0, 2.0]
    # Other numbers that the user gave are other variables.
    assert call("d_3/c", "d_2/c") == [0.0, 3.0]
    # What is new is made; what is there twice in one call too.
    assert call("new", "a", "a") == [0.0, 0.0, 2.0]
    assert call("a", "new", "a") == [0.0, 0.0, 2.0]
    assert len(shared.variables) == 7

  @pytest.mark.parametrize("mode", MODES)
  def test_keras_counts_anew(self, mode: str) -> None:
    for others in (0, 2):
      keras.backend.clear_session()
      for _ in range(others):
        keras.layers.Dense(3)
      replicated = _network()
      replicated(tf.constant(ROWS), mode="infer")
      predict = caller(
        lambda x, r=replicated: r(x, mode="infer").predictions, mode
      )
      expected = _by_hand(_weights(replicated), ROWS)
      for again in range(3):
        keras.backend.clear_session()
        for _ in range(again):
          keras.layers.Dense(3)
        rows = tf.constant(np.concatenate([ROWS] * (again + 1)))
        found = predict(rows).numpy()[:4]
        np.testing.assert_allclose(
          found, expected, rtol=1e-4, atol=1e-5, err_msg=f"{others} {again}"
        )
      assert len(replicated.variables) == 6


def _dense(value: float, **options: Any) -> Any:
  """A layer that multiplies by a number until it is trained."""
  return keras.layers.Dense(
    1,
    use_bias=False,
    kernel_initializer=keras.initializers.Constant(value),
    **options,
  )


class TestWhoMakesThem:
  """What a guess would mix up."""

  @pytest.mark.parametrize("mode", MODES)
  def test_layers_that_the_user_named(self, mode: str) -> None:
    def model_fn(features: Any, mode: str, params: int) -> TowerSpec:
      head = _dense(float(params), name=f"head_{params}")
      return TowerSpec(mode, predictions=head(features))

    replicated = replicate_model_fn(model_fn, devices=TWO)
    heads = {
      i: caller(lambda x, i=i: replicated(x, mode="infer", params=i), mode)
      for i in (1, 2, 3)
    }
    for i in (1, 2, 1, 3, 2):
      found = heads[i](batch()).predictions
      np.testing.assert_array_equal(found, batch() * float(i))
    assert len(replicated.variables) == 3

  def test_layers_that_keras_named_and_some_calls_leave_out(self) -> None:
    def model_fn(features: Any, mode: str) -> TowerSpec:
      hidden = _dense(1.0)(features)
      if mode == "eval":
        _dense(0.0)(hidden)
      return TowerSpec(mode, predictions=_dense(5.0)(hidden))

    replicated = replicate_model_fn(model_fn, devices=TWO)
    replicated(batch(), mode="eval")
    with pytest.raises(
      ValueError, match=r"there were 3, and now 2\..*name them"
    ):
      replicated(batch(), mode="infer")
    other = replicate_model_fn(model_fn, devices=TWO)
    expected = other(batch(), mode="infer").predictions
    with pytest.raises(ValueError, match=r"were 2, and one more is asked for"):
      other(batch(), mode="eval")
    found = other(batch(), mode="infer").predictions
    np.testing.assert_array_equal(found, expected)

  def test_models_from_outside_that_are_built_within(self) -> None:
    models = [keras.Sequential([_dense(value)]) for value in (1.0, 3.0)]

    def model_fn(features: Any, mode: str, params: int) -> TowerSpec:
      return TowerSpec(mode, predictions=models[params](features))

    replicated = replicate_model_fn(model_fn, devices=TWO)
    replicated(batch(), mode="infer", params=0)
    with pytest.raises(ValueError, match="build them before the first call"):
      replicated(batch(), mode="infer", params=1)
    models[1] = keras.Sequential([_dense(3.0)])
    models[1].build((None, 1))
    for params, factor in ((0, 1.0), (1, 3.0)):
      found = replicated(batch(), mode="infer", params=params).predictions
      np.testing.assert_array_equal(found, batch() * factor)

  @pytest.mark.parametrize("mode", MODES)
  @pytest.mark.parametrize("devices", [TWO, TWO[:1]])
  def test_optimizers_from_outside_keep_their_slots(
    self, devices: Any, mode: str
  ) -> None:
    weights = [tf.Variable(10.0) for _ in "12"]
    optimizers = [TowerOptimizer(sgd(1.0, momentum=0.5)) for _ in weights]

    def model_fn(features: Any, mode: str, params: int) -> TowerSpec:
      loss = tf.reduce_sum(weights[params] * features)
      train_op = optimizers[params].minimize(loss, var_list=[weights[params]])
      return TowerSpec(mode, loss, train_op)

    replicated = replicate_model_fn(model_fn, devices=devices)
    steps = [
      caller(lambda x, i=i: replicated(x, mode="train", params=i).loss, mode)
      for i in (0, 1)
    ]
    for i in (0, 1, 0):
      steps[i](batch())
    # 3, then 3 + 0.5 * 3; the other has moved once, on its own.
    assert [float(w) for w in weights] == [10 - 3 - 4.5, 7.0]

  @pytest.mark.parametrize("devices", [TWO, TWO[:1]])
  def test_optimizers_from_within_find_their_slots(self, devices: Any) -> None:
    c = tf.Variable(10.0)

    def model_fn(features: Any, mode: str) -> TowerSpec:
      loss = tf.reduce_sum(c * features)
      optimizer = TowerOptimizer(sgd(1.0, momentum=0.5))
      return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

    replicated = replicate_model_fn(model_fn, devices=devices)
    for _ in range(2):
      replicated(batch(), mode="train")
    assert float(c) == 10 - 3 - 4.5

  def test_threads(self) -> None:
    def model_fn(features: Any, mode: str) -> TowerSpec:
      hidden = keras.layers.Dense(3)(features)
      return TowerSpec(mode, predictions=keras.layers.Dense(1)(hidden))

    replicated = replicate_model_fn(model_fn, devices=TWO)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
      found = list(
        threads.map(
          lambda _: replicated(batch(), mode="infer").predictions, range(8)
        )
      )
    assert len(replicated.variables) == 4
    for each in found:
      np.testing.assert_allclose(each, found[0], rtol=1e-6)


_RANDOM = ("Dropout", "GaussianNoise", "LSTM", "MultiHeadAttention")


def _at_random(kind: str, x: Any) -> Any:
  """What a new layer that draws random numbers makes of rows of numbers."""
  layer = getattr(keras.layers, kind)
  row = x[:, None, :]
  if kind == "LSTM":
    return layer(1, dropout=0.5)(row, training=True)
  if kind == "MultiHeadAttention":
    return layer(1, 2, dropout=0.5)(row, row, training=True)[:, 0]
  return layer(0.5)(x, training=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [TWO, TWO[:1]])
@pytest.mark.parametrize("kind", _RANDOM)
def test_layers_that_draw_random_numbers(
  kind: str, devices: Any, mode: str
) -> None:
  optimizer = TowerOptimizer(lambda: sgd(0.01))

  def model_fn(features: Any, mode: str) -> TowerSpec:
    y = keras.layers.Dense(1, name="head")(_at_random(kind, features))
    loss = tf.reduce_mean((y - 8.0) ** 2)
    train_op = optimizer.minimize(loss) if mode == "train" else None
    return TowerSpec(mode, loss, train_op, y)

  replicated = replicate_model_fn(model_fn, "mean", devices)
  step = caller(lambda x: replicated(x).loss, mode)
  losses = [float(step(batch()))]
  before = len(replicated.variables)
  losses += [float(step(batch())) for _ in range(30)]
  caller(lambda x: replicated(x, mode="infer").predictions, mode)(batch())
  assert len(replicated.variables) == before
  assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_draw_random_numbers_in_some_calls(mode: str) -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    names = "ab" if mode == "eval" else "b"
    for name in names:
      features = keras.layers.Dropout(0.0625, name=name)(
        features, training=True
      )
    return TowerSpec(mode, predictions=features)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  counts = []
  for which in ("eval", "infer", "eval"):
    caller(lambda x, m=which: replicated(x, mode=m).predictions, mode)(batch())
    counts.append(len(replicated.variables))
  assert counts == [0 if testbed.IS_TF_KERAS else 2] * 3


class Nested(keras.layers.Layer):
  """A layer that names another after itself."""

  def __init__(self) -> None:
    super().__init__()
    self.inner = keras.layers.Dense(2, name=self.name + "_dense")

  def call(self, x: Any) -> Any:
    return self.inner(x)


def _named_after(kind: str, x: Any) -> Any:
  """What layers whose names hold numbers of Keras' make of rows."""
  if kind == "bidirectional":
    cell = keras.layers.SimpleRNN(1)
    return keras.layers.Bidirectional(cell)(x[:, None, :])
  if kind == "self":
    return Nested()(x)
  first = keras.layers.Dense(2)
  return keras.layers.Dense(2, name=f"{first.name}_head")(first(x))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [TWO, TWO[:1]])
@pytest.mark.parametrize("kind", ["bidirectional", "other", "self"])
def test_names_made_of_names_that_keras_numbered(
  kind: str, devices: Any, mode: str
) -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    return TowerSpec(mode, predictions=_named_after(kind, features))

  replicated = replicate_model_fn(model_fn, devices=devices)
  predict = caller(lambda x: replicated(x, mode="infer").predictions, mode)
  first = predict(tf.ones([2, 1])).numpy()
  before = len(replicated.variables)
  np.testing.assert_allclose(first[0], first[1], rtol=1e-5)
  for _ in range(2):
    keras.layers.Dense(1)
    again = predict(tf.ones([4, 1])).numpy()
    np.testing.assert_allclose(again[2:], first, rtol=1e-5)
  assert len(replicated.variables) == before


def _forgotten(x: Any) -> tuple[Any, str]:
  """What a layer makes of rows, and its name, which is all that is left."""
  layer = keras.layers.Dense(2)
  return layer(x), layer.name


@pytest.mark.parametrize("devices", [TWO, TWO[:1]])
def test_a_name_made_of_one_that_is_gone(devices: Any) -> None:
  c = tf.Variable(10.0)
  optimizer = TowerOptimizer(sgd())

  def model_fn(features: Any, mode: str) -> TowerSpec:
    y, name = _forgotten(features)
    y = keras.layers.Dense(1, name=f"{name}_head")(y)
    loss = tf.reduce_sum(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]), y)

  replicated = replicate_model_fn(model_fn, devices=devices)
  started = 10.0
  if len(devices) == 1:
    replicated(batch())
    started = 7.0
  with pytest.raises(ValueError, match=r"dense(_\d+)?_head/.*: name them"):
    replicated(batch())
  assert float(c) == started


def test_a_later_tower_makes_nothing_new() -> None:
  c = tf.Variable(10.0)
  optimizer = TowerOptimizer(sgd())
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    tf.Variable(1.0, name="common")
    if len(towers) % 2 and towers[0]:
      tf.Variable(1.0, name="more")
    towers.append(1)
    loss = tf.reduce_sum(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  with pytest.raises(
    ValueError, match=r"same variables .* tower 1 asks for one more of more"
  ):
    replicated(batch())
  assert float(c) == 10.0
  assert not replicated.variables
  towers[:] = [0]
  replicated(batch())
  assert float(c) == 7.0


class _Two(keras.Model):
  """A model without build(), with two layers of one shape."""

  def __init__(self, name: str | None, head: str | None) -> None:
    super().__init__(name=name)
    self.aux = _dense(5.0, name="aux")
    self.head = _dense(1.0, name=head)

  def call(self, x: Any, both: bool = False) -> Any:
    if both:
      self.aux(x)
    return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
  "names", [("net", "head"), ("net", None), (None, "head"), (None, None)]
)
def test_layers_of_a_model_without_build(names: Any, mode: str) -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    model = _Two(*names)
    return TowerSpec(mode, predictions=model(features, both=mode == "eval"))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  counts = []
  for which in ("eval", "infer", "eval"):
    run = caller(lambda x, m=which: replicated(x, mode=m).predictions, mode)
    np.testing.assert_array_equal(run(batch()), batch())
    counts.append(len(replicated.variables))
  assert counts == counts[:1] * 3


@pytest.mark.parametrize("mode", MODES)
def test_metrics_that_the_user_named(mode: str) -> None:
  def model_fn(features: Any, mode: str, params: str) -> TowerSpec:
    metrics = {}
    for name in params:
      metrics[name] = keras.metrics.Mean(name=name)
      metrics[name].update_state(features * (1.0 if name == "a" else 10.0))
    return TowerSpec(mode, metrics=metrics)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  for names in ("ab", "b", "ba"):
    evaluate = caller(
      lambda x, n=names: replicated(x, mode="eval", params=n).metrics, mode
    )
    found = {name: float(value) for name, value in evaluate(batch()).items()}
    assert found == {name: {"a": 1.5, "b": 15.0}[name] for name in names}


class _Lazy(tf.Module):
  """A module that makes its weight when it is called."""

  def __init__(self, value: float) -> None:
    super().__init__()
    self.value = value
    self.w: Any = None

  def __call__(self, x: Any) -> Any:
    if self.w is None:
      self.w = tf.Variable([[self.value]], name="w")
    return x @ self.w


@pytest.mark.parametrize("mode", MODES)
def test_modules_from_outside_that_are_built_within(mode: str) -> None:
  modules = [_Lazy(1.0), _Lazy(3.0)]

  def model_fn(features: Any, mode: str, params: int) -> TowerSpec:
    return TowerSpec(mode, predictions=modules[params](features))

  replicated = replicate_model_fn(model_fn, devices=TWO)

  def predict(i: int) -> Any:
    run = caller(lambda x: replicated(x, mode="infer", params=i), mode)
    return run(batch()).predictions

  np.testing.assert_array_equal(predict(0), batch())
  with pytest.raises(ValueError, match="build them before the first call"):
    predict(1)
  modules[1] = _Lazy(3.0)
  modules[1](batch())
  for i, factor in ((1, 3.0), (0, 1.0)):
    np.testing.assert_array_equal(predict(i), batch() * factor)


@pytest.mark.parametrize("mode", MODES)
def test_modules_from_within_share_their_variables(mode: str) -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    return TowerSpec(mode, predictions=_Lazy(2.0)(features))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  predict = caller(lambda x: replicated(x, mode="infer").predictions, mode)
  predict(batch())
  replicated.variables[0].assign([[4.0]])
  np.testing.assert_array_equal(predict(batch()), batch() * 4.0)
  assert len(replicated.variables) == 1


class OwnGradient(keras.layers.Layer):
  """A layer with a gradient of its own, which TensorFlow keeps."""

  def build(self, shape: Any) -> None:
    self.w = self.add_weight(name="w", shape=(shape[-1], 2))

  def call(self, x: Any) -> Any:
    @tf.custom_gradient
    def twice(z: Any) -> Any:
      return z, lambda grad: grad * (1.0 if self.w is None else 2.0)

    return twice(tf.matmul(x, self.w))


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_tensorflow_keeps(mode: str) -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    return TowerSpec(mode, predictions=OwnGradient()(features))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  predict = caller(lambda x: replicated(x, mode="infer").predictions, mode)
  first = predict(tf.ones([2, 3])).numpy()
  np.testing.assert_allclose(predict(tf.ones([4, 3]))[2:], first, rtol=1e-5)
  np.testing.assert_allclose(first[0], first[1], rtol=1e-5)
  assert len(replicated.variables) == 1


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_model_fn_keeps(mode: str) -> None:
  kept: dict[int, Any] = {}

  def model_fn(features: Any, mode: str, params: int) -> TowerSpec:
    if params not in kept:
      kept[params] = _dense(float(params))
    return TowerSpec(mode, predictions=kept[params](features))

  replicated = replicate_model_fn(model_fn, devices=TWO)

  def predict(i: int) -> Any:
    run = caller(lambda x: replicated(x, mode="infer", params=i), mode)
    return run(batch()).predictions

  np.testing.assert_array_equal(predict(1), batch())
  with pytest.raises(ValueError, match="let it keep none of them"):
    predict(2)


def test_each_replicated_function_has_its_own() -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    c = tf.Variable(1.0, name="c")
    c.assign_add(1.0)
    return TowerSpec(mode, predictions=features * c)

  first, second = (replicate_model_fn(model_fn, devices=TWO) for _ in "12")
  for _ in range(3):
    first(batch(), mode="eval")
  second(batch(), mode="eval")
  assert values(first.variables + second.variables) == [7.0, 3.0]


def test_retracing() -> None:
  optimizer = TowerOptimizer(lambda: sgd(momentum=0.5))
  traces: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    traces.append(1)
    c = tf.Variable(16.0, name="c")
    loss = tf.reduce_sum(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  step = tf.function(replicated)
  found = []
  for rows in ([[1.0], [2.0]], [[1.0], [2.0], [0.0], [0.0]], [[1.0]] * 6):
    before = len(traces)
    step(batch(*rows))
    assert len(traces) >= before + 2
    step(batch(*rows))
    found.append(values(replicated.variables)[0])
  assert len(traces) <= 8
  # sums 3, 3, 3, 3, 6, 6; velocity 3, 4.5, 5.25, 5.625, 8.8125, 10.40625
  assert found == [8.5, -2.375, -21.59375]


@pytest.mark.parametrize("tower", [0, 1])
def test_a_trace_that_fails_leaves_nothing_behind(tower: int) -> None:
  optimizer = TowerOptimizer(lambda: sgd(momentum=0.5))
  fails = [True]
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    towers.append(len(towers))
    c = tf.Variable(10.0, name="c")
    loss = tf.reduce_sum(c * features)
    train_op = optimizer.minimize(loss, var_list=[c])
    if fails[0] and len(towers) == tower + 1:
      raise KeyError("not this time")
    return TowerSpec(mode, loss, train_op)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  with pytest.raises(KeyError):
    tf.function(replicated)(batch())
  fails[0] = False
  assert float(tf.function(replicated)(batch()).loss) == 30.0
  assert float(named(replicated.variables, "c")) == 7.0
  assert float(replicated(batch()).loss) == 21.0


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
