"""What a step of towers finds before it changes anything, and in what order.

Variables that stand twice, optimizers that are made anew in each call, errors
of a second optimizer, and batches and devices that only look right.
"""
# keras: both

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tests.support.towers_bed import MODES, TWO, batch, caller, sgd
from tf_cross_shard import (
  CrossShardOptimizer,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)

keras = tf.keras
every_mode = pytest.mark.parametrize("mode", MODES)


@every_mode
@pytest.mark.parametrize("devices", [TWO, TWO[:1]], ids=["two", "one"])
def test_a_variable_that_stands_twice(mode: str, devices: Any) -> None:
  """Each gradient of it counts once, as in plain Keras."""
  c = tf.Variable(10.0)
  optimizer = TowerOptimizer(sgd)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    first = tf.reduce_sum(c * features)
    second = 10.0 * first
    pairs = optimizer.compute_gradients(first, [c])
    pairs += optimizer.compute_gradients(second, [c])
    return TowerSpec(mode, first, optimizer.apply_gradients(pairs))

  caller(replicate_model_fn(model_fn, devices=devices), mode)(batch())
  assert float(c) == 10.0 - 3.0 - 30.0


def test_a_variable_that_stands_twice_in_one_tower_only() -> None:
  c = tf.Variable(10.0)
  optimizer = TowerOptimizer(sgd)
  times = iter([2, 1])

  def model_fn(features: Any, mode: str) -> TowerSpec:
    pairs = [(tf.reduce_sum(features), c)] * next(times)
    return TowerSpec(mode, None, optimizer.apply_gradients(pairs))

  with pytest.raises(ValueError, match="with the variables"):
    replicate_model_fn(model_fn, devices=TWO)(batch())
  assert float(c) == 10.0


# ------------------------------------------------------- the order of variables


@pytest.mark.parametrize("wrap", [TowerOptimizer, CrossShardOptimizer])
def test_variables_come_in_the_order_in_which_they_were_made(wrap: Any) -> None:
  """Slots are built by it. By names `w_10` would come before `w_2`."""
  weights = [tf.Variable([float(i)], name=f"w_{i}") for i in range(12)]
  optimizer = wrap(sgd())
  found: list[Any] = []

  @tf.function(autograph=False)
  def step() -> Any:
    loss = tf.add_n([tf.reduce_sum(w) for w in reversed(weights)])
    pairs = optimizer.compute_gradients(loss)
    found.extend(variable for _, variable in pairs)
    return [grad for grad, _ in pairs]

  step()
  assert [id(v) for v in found] == [id(w) for w in weights]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eeee", "ffff", "eeff", "ffee", "efef"])
def test_optimizers_made_inside_find_their_slots(order: str) -> None:
  """Eleven layers and more, of which tf.function and eager steps take turns."""
  keras.backend.clear_session()
  initializers = [keras.initializers.Constant(0.1 * i) for i in (2, 3, 4, 5)]

  def model_fn(features: Any, mode: str) -> TowerSpec:
    y = features
    for i in range(12):
      dense = keras.layers.Dense(
        3, use_bias=False, kernel_initializer=initializers[i % 4]
      )
      y = tf.tanh(dense(y))
    loss = tf.reduce_sum((y - 1.0) ** 2)
    optimizer = TowerOptimizer(sgd(0.1, momentum=0.9))
    return TowerSpec(mode, loss, optimizer.minimize(loss))

  def losses(order: str) -> list[float]:
    replicated = replicate_model_fn(model_fn, "mean", TWO)
    function = tf.function(lambda x: replicated(x).loss)
    rng = np.random.default_rng(0)
    found = []
    for letter in order:
      x = tf.constant(rng.normal(size=(4, 3)), tf.float32)
      loss = replicated(x).loss if letter == "e" else function(x)
      found.append(float(loss))
    return found

  np.testing.assert_allclose(losses(order), losses("eeee"), rtol=1e-5)


@every_mode
@pytest.mark.parametrize("devices", [TWO, TWO[:1]], ids=["two", "one"])
def test_made_inside_with_its_variables_in_another_order(
  mode: str, devices: Any
) -> None:
  weights = [tf.Variable(10.0, name="w_1"), tf.Variable(10.0, name="w_2")]
  twins = [testbed.variable(10.0), testbed.variable(10.0)]

  def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
    loss = tf.add_n(
      [(9.0 * i + 1.0) * tf.reduce_sum(weights[i] * features) for i in params]
    )
    optimizer = TowerOptimizer(sgd(1.0, momentum=0.5))
    variables = [weights[i] for i in params]
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=variables))

  replicated = replicate_model_fn(model_fn, devices=devices)
  plain = sgd(1.0, momentum=0.5)
  testbed.build(plain, twins)
  for params in ([0, 1], [1, 0]):
    step = caller(lambda x, p=params: replicated(x, params=p).loss, mode)
    if mode == "eager" or params == [0, 1]:
      step(batch())
    else:  # A new function makes new variables: the second step is eager.
      replicated(batch(), params=params)
    grads = [tf.constant(3.0), tf.constant(30.0)]
    plain.apply_gradients(zip(grads, twins, strict=True))
  assert [float(w) for w in weights] == [float(t.numpy()) for t in twins]


@pytest.mark.parametrize("devices", [TWO, TWO[:1]], ids=["two", "one"])
def test_made_inside_with_other_variables(devices: Any) -> None:
  """Two phases would share one state; in Keras 3 names tell them apart."""
  weights = {"g": tf.Variable(10.0), "d": tf.Variable(10.0)}

  def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
    variable = weights[params["phase"]]
    loss = tf.reduce_sum(variable * features)
    adam = keras.optimizers.Adam(0.5, **params["options"])
    train = TowerOptimizer(adam).minimize(loss, var_list=[variable])
    return TowerSpec(mode, loss, train)

  def step(phase: str, **options: Any) -> int:
    params = {"phase": phase, "options": options}
    return int(replicated(batch(), params=params).train_op)

  replicated = replicate_model_fn(model_fn, devices=devices)
  step("g")
  with pytest.raises(ValueError, match=r"Make it outside of model_fn"):
    step("d")
  assert float(weights["d"]) == 10.0
  replicated = replicate_model_fn(model_fn, devices=devices)
  if not testbed.IS_TF_KERAS:
    counts = [step(p, name=f"adam_of_{p}") for p in "gdgd"]
    assert counts == [1, 1, 2, 2]
    return
  step("g", name="adam_of_g")
  with pytest.raises(ValueError, match=r"made Adam.*adam_of_g.* before"):
    step("d", name="adam_of_d")
  assert float(weights["d"]) == 10.0


# ----------------------------------------------------------- nothing half done


def _second_fails(second: Any, error: Any, words: str) -> None:
  """The first of two optimizers has not applied when the second is found."""
  c, first = tf.Variable(10.0), TowerOptimizer(sgd)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    grad = tf.reduce_sum(features)
    first.apply_gradients([(grad, c)])
    return TowerSpec(mode, None, second(grad))

  with pytest.raises(error, match=words):
    replicate_model_fn(model_fn, devices=TWO)(batch())
  assert float(c) == 10.0


@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_argument_that_an_optimizer_does_not_take(is_sharded: bool) -> None:
  d = tf.Variable(10.0)
  inner = CrossShardOptimizer(sgd()) if is_sharded else sgd()
  optimizer = TowerOptimizer(inner)
  _second_fails(
    lambda grad: optimizer.apply_gradients([(grad, d)], None, bogus=3),
    TypeError,
    r"`bogus` is no argument of .*; got 3\. It takes global_step, name",
  )


def test_an_optimizer_of_another_strategy() -> None:
  with tf.distribute.MirroredStrategy(list(TWO)).scope():
    d = tf.Variable(10.0)
    optimizer = TowerOptimizer(CrossShardOptimizer(sgd()))
    optimizer.build([d])
  _second_fails(
    lambda grad: optimizer.apply_gradients([(grad, d)]),
    RuntimeError,
    "strategy",
  )


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there(row: int) -> None:
  table, optimizer = tf.Variable([[1.0], [2.0]]), TowerOptimizer(sgd)

  def second(grad: Any) -> Any:
    rows = tf.IndexedSlices(tf.reshape(grad, [1, 1]), [row], [2, 1])
    return optimizer.apply_gradients([(rows, table)])

  _second_fails(
    second, ValueError, rf"which has 2, has the rows {row} to {row}"
  )
  assert table.numpy().tolist() == [[1.0], [2.0]]


def test_a_step_that_fails_builds_no_optimizer() -> None:
  c, d = tf.Variable(10.0), tf.Variable(10.0)
  optimizer, other = TowerOptimizer(sgd), TowerOptimizer(sgd)
  testbed.build(other, [c])
  is_bad = [True]

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum((c + d) * features)
    if is_bad[0]:
      optimizer.minimize(loss, var_list=[c])
      other.apply_gradients([(tf.constant(1.0), d)])
    else:
      optimizer.minimize(loss, var_list=[c, d])
    return TowerSpec(mode, loss)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  with pytest.raises(ValueError, match=r"Unknown variable|was built"):
    replicated(batch())
  is_bad[0] = False
  replicated(batch())
  assert float(c) == float(d) == 7.0


def test_it_has_not_been_used_by_a_step_that_failed(monkeypatch: Any) -> None:
  import threading

  from tf_cross_shard.towers import gradient_collector

  monkeypatch.setattr(gradient_collector, "_used", threading.Event())
  c, optimizer = tf.Variable(10.0), TowerOptimizer(sgd)

  def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
    loss = tf.reduce_sum(c * features)
    optimizer.minimize(loss, var_list=[c])
    if params:
      raise KeyError(params)
    return TowerSpec(mode, loss)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  with pytest.raises(KeyError):
    replicated(batch(), params="bad")
  assert not TowerOptimizer.has_been_used()
  replicated(batch())
  assert TowerOptimizer.has_been_used()


# ------------------------------------------------------------ what is handed in


def test_compute_gradients_takes_what_version_1_took_by_position() -> None:
  c, optimizer = tf.Variable(10.0), TowerOptimizer(sgd)
  gate = optimizer.GATE_OP
  [(grad, _)] = optimizer.compute_gradients(lambda: 2.0 * c, [c], gate)
  assert float(grad) == 2.0

  @tf.function(autograph=False)
  def weighted() -> Any:
    loss, weight = 2.0 * c, tf.constant(3.0)
    args = (loss, [c], gate, None, False, weight)
    [(grad, _)] = optimizer.compute_gradients(*args)
    return grad

  assert float(weighted()) == 6.0
  with pytest.raises(TypeError, match="at most 4 arguments after `var_list`"):
    optimizer.compute_gradients(lambda: c, [c], gate, None, False, None, 7)
  with pytest.raises(TypeError, match="`gate_gradients` was given twice"):
    optimizer.compute_gradients(lambda: c, [c], gate, gate_gradients=gate)


def test_as_many_labels_as_features() -> None:
  """Cut in two, [4, 1] and [2, 1] would broadcast."""

  def model_fn(features: Any, labels: Any, mode: str) -> TowerSpec:
    raise AssertionError("called")

  replicated = replicate_model_fn(model_fn, "mean", TWO)
  for labels in (tf.ones([2, 1]), np.ones([2, 1]), [1.0, 2.0]):
    with pytest.raises(ValueError, match=r"as many as `features`; .* 2, .* 4"):
      replicated(tf.ones([4, 1]), labels)


def test_an_empty_batch_of_unknown_length() -> None:
  c, optimizer = tf.Variable(10.0), TowerOptimizer(sgd)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_mean(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  step = tf.function(
    lambda x: replicated(x).loss,
    input_signature=[tf.TensorSpec([None, 1], tf.float32)],
  )
  with pytest.raises(tf.errors.InvalidArgumentError, match="must not be empty"):
    step(tf.zeros([0, 1]))
  with pytest.raises(
    tf.errors.InvalidArgumentError, match="must divide into 2"
  ):
    step(tf.zeros([3, 1]))
  assert float(c) == 10.0
  step(batch())
  assert float(c) == 10.0 - 3.0


def test_params_of_the_caller_stay() -> None:
  params = {"list": [1], "in": {"list": []}}
  seen: list[Any] = []

  def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
    params["list"].append(2)
    params["in"]["list"].append(3)
    seen.append((params["list"], params["in"]["list"]))
    return TowerSpec(mode, predictions=features)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  replicated(batch(), mode="infer", params=params)
  assert seen == [([1, 2], [3])] * 2
  assert params == {"list": [1], "in": {"list": []}}


def test_devices_that_are_objects() -> None:
  devices = tf.config.list_logical_devices("CPU")[:2]
  replicated = replicate_model_fn(lambda features: None, devices=devices)
  assert replicated.devices == [device.name for device in devices]


@pytest.mark.parametrize("devices", [2, [0, 1], [b"CPU:0"]])
def test_devices_that_are_none(devices: Any) -> None:
  with pytest.raises(TypeError, match="`devices` must hold names of devices"):
    replicate_model_fn(lambda features: None, devices=devices)


@pytest.mark.parametrize(
  "device", ["/job:worker/task:3/device:CPU:0", "/replica:7/device:CPU:0"]
)
def test_devices_of_other_machines(device: str) -> None:
  with pytest.raises(ValueError, match="must name devices of this machine"):
    replicate_model_fn(lambda features: None, devices=[device])


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
