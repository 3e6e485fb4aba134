"""A replicated model function: batches in, one spec out."""

import functools
from typing import Any

import pytest
import tensorflow as tf

from tests.support.towers_bed import FOUR, TWO, batch, caller, sgd
from tf_cross_shard import (
  ModeKeys,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)

keras = tf.keras
PREDICT = ModeKeys.PREDICT


def _echo(features: Any, mode: str) -> TowerSpec:
  """Returns its part of the batch."""
  return TowerSpec(mode, predictions=features)


def _lists(value: Any) -> Any:
  """A tensor as lists."""
  return value.numpy().tolist()


def test_nests_of_predictions_and_exports() -> None:
  def model_fn(features: Any, mode: str) -> TowerSpec:
    exports = {"serving": {"sum": tf.reduce_sum(features["x"], 1)}}
    predictions = {"all": [features["ragged"], (2.0 * features["x"], None)]}
    return TowerSpec(mode, predictions=predictions, export_outputs=exports)

  features = {
    "x": batch([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]),
    "ragged": tf.ragged.constant([[1], [], [2, 3], [4, 5, 6]]),
  }
  replicated = replicate_model_fn(model_fn, devices=TWO)
  spec = tf.function(lambda x: replicated(x, mode=PREDICT))(features)
  [ragged, (twice, none)] = spec.predictions["all"]
  assert (ragged.to_list()[1:3], none) == ([[], [2, 3]], None)
  assert _lists(twice) == _lists(2.0 * features["x"])
  assert _lists(spec.export_outputs["serving"]["sum"]) == [3.0, 7.0, 11.0, 15.0]
  assert (type(spec), spec.mode) == (TowerSpec, PREDICT)
  assert spec.loss is spec.train_op is spec.metrics is None


@pytest.mark.parametrize(
  ("place", "mode"), [("outside", "function"), ("inside", "eager")]
)
def test_metrics_are_those_of_the_whole_batch(place: str, mode: str) -> None:
  make = keras.metrics.RootMeanSquaredError
  outside = make() if place == "outside" else None

  def model_fn(features: Any, mode: str) -> TowerSpec:
    metric = outside or make()
    metric.update_state(features, tf.ones_like(features))
    return TowerSpec(mode, metrics={"root": metric})

  replicated = replicate_model_fn(model_fn, "mean", TWO)
  step = caller(lambda x: replicated(x, mode="eval").metrics, mode)
  batches = [batch([1.0], [2.0], [3.0], [5.0]), batch([9.0], [3.0])]
  whole = make()
  for x in (*batches, None, batches[1]):
    if x is None:
      replicated.reset_metrics()
      whole.reset_state()
    else:
      whole.update_state(x, tf.ones_like(x))
      value, expected = float(step(x)["root"]), float(whole.result())
      assert abs(value - expected) < 1e-5


def _own_order(
  mode: str, config: float, params: Any, labels: Any, features: Any
) -> TowerSpec:
  return TowerSpec(mode, predictions=10.0 * features + labels + params["a"])


class CalledObject:
  """An object that is called like a function."""

  def __call__(self, features: Any, params: Any, mode: str) -> TowerSpec:
    return TowerSpec(mode, predictions=[features, params["a"] + features])


@pytest.mark.parametrize(
  ("model_fn", "expected"),
  [
    (CalledObject(), [[1.0, 2.0], [8.0, 9.0]]),
    (_own_order, [20.0, 31.0]),
    # A decorator that leaves no signature.
    (lambda *args, **options: _own_order(*args, **options), [20.0, 31.0]),
    (lambda mode, x: TowerSpec(mode, predictions=x), [1.0, 2.0]),
    (
      lambda features, **options: TowerSpec(
        options["mode"], predictions=options["params"]["a"] * options["labels"]
      ),
      [21.0, 28.0],
    ),
    (
      functools.partial(
        lambda first, x, mode: TowerSpec(mode, predictions=first + x), 4.0
      ),
      [5.0, 6.0],
    ),
  ],
)
def test_model_functions_get_the_arguments_that_they_take(
  model_fn: Any, expected: Any
) -> None:
  spec = replicate_model_fn(model_fn, devices=TWO)(
    tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]), "eval", {"a": 7.0}, 2.0
  )
  found = tf.nest.map_structure(_lists, spec.predictions)
  assert found == expected


def test_defaults_stay_and_params_are_each_tower_s_own() -> None:
  got: list[Any] = []

  def model_fn(features: Any, mode: str, params: Any) -> TowerSpec:
    got.append((mode, dict(params)))
    params["a"] = 0
    return TowerSpec(mode)

  bound = functools.partial(model_fn, params={"a": 1})
  replicate_model_fn(bound, devices=TWO[:1])(batch(), mode="eval")
  given = {"a": 2}
  replicate_model_fn(bound, devices=TWO)(batch(), mode="eval", params=given)
  assert got == [("eval", {"a": 1}), *[("eval", {"a": 2})] * 2]
  assert given == {"a": 2}
  # The mode is "train" by default.
  spec = replicate_model_fn(lambda x, mode: TowerSpec(mode), devices=TWO[:1])
  assert spec(batch()).mode == ModeKeys.TRAIN == "train"
  assert [ModeKeys.EVAL, ModeKeys.PREDICT] == ["eval", "infer"]


@pytest.mark.parametrize(
  ("devices", "mode"), [(FOUR[::-1], "function"), (("CPU:2", "CPU:2"), "eager")]
)
def test_operations_are_on_their_tower_s_device(
  devices: Any, mode: str
) -> None:
  found: list[tuple[str, str]] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    y = tf.matmul(features, [[2.0]], name="product")
    name = "" if tf.executing_eagerly() else y.op.name
    found.append((y.device, name))
    assert tf.get_current_name_scope() == f"tower_{len(found) - 1}"
    return TowerSpec(mode, predictions=y)

  replicated = replicate_model_fn(model_fn, devices=devices)
  rows = batch([1.0], [2.0], [3.0], [4.0])
  spec = caller(lambda x: replicated(x, mode=PREDICT), mode)(rows)
  assert _lists(spec.predictions) == [[2.0], [4.0], [6.0], [8.0]]
  places = [tf.DeviceSpec.from_string(device) for device, _ in found]
  assert [
    f"{place.device_type}:{place.device_index}" for place in places
  ] == list(devices)
  if mode == "function":
    assert [name for _, name in found] == [
      f"tower_{i}/product" for i in range(len(devices))
    ]


def test_towers_wait_for_each_other_in_nothing_but_the_update() -> None:
  c, optimizer = tf.Variable(10.0), TowerOptimizer(sgd)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(tf.matmul(features, [[2.0]]) * c)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  graph = (
    tf.function(lambda x: replicated(x).loss)
    .get_concrete_function(tf.TensorSpec([2, 1]))
    .graph
  )
  [product] = [
    op
    for op in graph.get_operations()
    if op.type == "MatMul" and op.name == "tower_1/MatMul"
  ]
  needed, waiting = set(), [product]
  while waiting:
    op = waiting.pop()
    needed.add(op.name)
    before = [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    waiting += [x for x in before if x.name not in needed]
  assert product.device.endswith("CPU:1")
  assert len(needed) > 2
  assert not [name for name in needed if name.startswith("tower_0")]


def test_devices_left_out_are_all_of_them() -> None:
  found = replicate_model_fn(_echo).devices
  kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
  expected = [device.name for device in tf.config.list_logical_devices(kind)]
  assert found == expected
  assert replicate_model_fn(_echo, devices="CPU:1").devices == ["CPU:1"]


def test_branches_and_loops_on_tensors() -> None:
  c, optimizer = tf.Variable(10.0), TowerOptimizer(sgd)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    if tf.reduce_sum(features) > 1.5:
      scale = 10.0 * c
    else:
      scale = 1.0 * c
    total = tf.constant(0.0)
    for row in features:
      total += scale * row[0]
    return TowerSpec(mode, total, optimizer.minimize(total, var_list=[c]))

  step = tf.function(replicate_model_fn(model_fn, devices=TWO))
  assert float(step(batch()).loss) == 10.0 + 200.0
  assert float(c) == 10.0 - 1.0 - 20.0
