"""Learning rates by model.

Each group is compared with plain Keras, which trains with the group's learning
rate on the group's concatenated batch.
"""

import copy
import pathlib
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_cross_shard.keras3
import tf_cross_shard.tf_keras
from tests.support import testbed, training
from tf_cross_shard import (
  Models,
  VectorizedStrategy,
  schedules,
)

STRIDED = [[0, 2], [1, 3]]
RATES = [0.125, 0.25]
ENGINES = testbed.STRATEGIES


def _of(library: Any) -> Any:
  is_keras3 = library is keras
  return tf_cross_shard.keras3 if is_keras3 else tf_cross_shard.tf_keras


def _decay(library: Any, rate: float) -> Any:
  """A schedule that halves a rate in each of the first steps."""
  return library.optimizers.schedules.PiecewiseConstantDecay(
    [0, 1], [rate, rate / 2, rate / 4]
  )


Make = Callable[[Any, Any], Any]
OPTIMIZERS: dict[str, Make] = {
  "SGD": lambda library, rate: library.optimizers.SGD(rate),
  "averages": lambda library, rate: library.optimizers.Adam(
    rate, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1
  ),
  "loss scale": lambda library, rate: (
    library.optimizers if library is keras else library.mixed_precision
  ).LossScaleOptimizer(library.optimizers.Adam(rate)),
  "warmup": lambda library, rate: library.optimizers.SGD(
    _halved(library, rate)
  ),
}


def _halved(library: Any, rate: Any) -> Any:
  """A schedule of the user's, around another schedule or a number."""

  class Halved(library.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
      self.rate = rate

    def __call__(self, step: Any) -> Any:
      return 0.5 * (rate(step) if callable(rate) else rate)

  return Halved()


def _train(
  engine: str, library: Any, make: Make, rates: Any, **options: Any
) -> tuple[training.Regression, list[Any]]:
  task, strategy = training.Regression(), ENGINES[engine]()
  with strategy.scope():
    variables = task.variables(library)
    optimizer = _of(library).CrossShardOptimizer(
      make(library, _of(library).PerModel(rates)),
      group_assignment=STRIDED,
      **options,
    )
    optimizer.build(variables)
  task.train_replicas(strategy, optimizer, variables)
  return task, variables


@pytest.mark.parametrize(
  ("engine", "library", "optimizer", "options"),
  [
    ("mirrored", keras, "loss scale", {"shard_update": True}),
    ("mirrored", tf_keras, "warmup", {}),
    ("virtual", tf_keras, "averages", {}),
  ],
)
def test_each_group_learns_with_its_rate(
  engine: str, library: Any, optimizer: str, options: Any
) -> None:
  """One learning rate is a number, the other one a schedule."""
  make = OPTIMIZERS[optimizer]
  rates = [RATES[0], _decay(library, RATES[1])]
  task, variables = _train(engine, library, make, rates, **options)
  plain = make
  if optimizer == "loss scale":  # The scale is a power of 2.
    plain = lambda library, rate: library.optimizers.Adam(rate)  # noqa: E731

  def expected(members: Any) -> list[np.ndarray]:
    rate = rates[STRIDED.index([*members])]
    return task.train_alone(members, plain(library, rate), library=library)

  # Kernels round otherwise, which large rates of Adam make more of.
  bound = 0.0 if optimizer in ("SGD", "warmup") else 5e-6
  held = training.by_replica(variables)
  assert len(held) == testbed.REPLICAS
  training.check_groups(held, STRIDED, expected, lambda *_: bound)


@pytest.mark.parametrize(
  ("engine", "library"), [("mirrored", keras), ("virtual", tf_keras)]
)
def test_a_group_that_skips_a_step_stays_at_its_rate(
  engine: str, library: Any
) -> None:
  """The schedules see the group's own `iterations`."""
  ours = _of(library)
  rates = ours.PerModel([_decay(library, 0.5), _decay(library, 8.0)])
  [weight], optimizer = training.build(
    *("keras" if library is keras else "tf_keras",),
    *(lambda library: library.optimizers.SGD(rates), {"weight": 0.0}),
    ENGINES[engine](),
    group_assignment=STRIDED,
    skip_nonfinite=True,
  )
  grads = np.array([[1.0, np.nan, 2.0, 1.0], [1.0, 1.0, 2.0, 4.0]], "f")
  training.train([weight], optimizer, [grads], strategy=ENGINES[engine]())
  counts = Models(optimizer=optimizer).values(optimizer.iterations)
  assert counts.tolist() == [2, 1]
  # 3 * (0.5 + 0.25), and 5 * 8 after the step that was left out
  assert testbed.copies(weight) == [-2.25, -40.0, -2.25, -40.0]
  assert rates.values(1) == [0.25, 4.0]
  assert optimizer.learning_rate.numpy() == (
    0.125 if library is keras else 0.25  # tf_keras keeps the last one used.
  )


def test_fit_callbacks_and_files(tmp_path: pathlib.Path) -> None:
  library, ours = keras, tf_cross_shard.keras3
  with testbed.mirrored().scope():
    model = library.Sequential([library.Input((3,)), library.layers.Dense(1)])
    rates = ours.PerModel([0.125, _decay(library, 0.25)])
    model.compile(
      ours.CrossShardOptimizer(
        library.optimizers.Adam(rates), group_assignment=STRIDED
      ),
      "mse",
    )
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 16, 3)).astype("float32")
  # The learning rate as TensorBoard would write it; it may be missing here.
  logs: list[dict[str, Any]] = []
  collect = library.callbacks.TensorBoard._collect_learning_rate
  board = library.callbacks.LambdaCallback(
    on_epoch_end=lambda *_: logs.append(
      collect(types.SimpleNamespace(model=model), {})
    )
  )
  model.fit(x, y[:, :1], batch_size=8, verbose=0, callbacks=[board])
  assert float(logs[0]["learning_rate"]) == 0.125
  weights = testbed.values(model.weights[0])
  assert (weights[0] == weights[2]).all()
  assert (weights[0] != weights[1]).any()

  model.save(tmp_path / "model.keras")
  with testbed.mirrored().scope():
    loaded = library.models.load_model(tmp_path / "model.keras")
  # For inference: outside of the strategy.
  alone = library.models.load_model(tmp_path / "model.keras")
  assert float(alone.optimizer.learning_rate) == 0.125
  found = loaded.optimizer.inner_optimizer._learning_rate
  assert type(found) is ours.PerModel
  assert found.values(1) == [0.125, 0.125]


@pytest.mark.tf_keras_mode
def test_tf_keras_mode() -> None:
  """`schedules.PerModel` is that of `tf.keras`."""
  base = tf.keras.optimizers.schedules.LearningRateSchedule
  assert issubclass(schedules.PerModel, base)
  library = tf_keras if testbed.IS_TF_KERAS else keras
  assert schedules.PerModel is _of(library).PerModel
  task, variables = _train("mirrored", library, OPTIMIZERS["SGD"], RATES)
  for members, rate in zip(STRIDED, RATES, strict=True):
    expected = task.train_alone(members, library.optimizers.SGD(rate))
    np.testing.assert_array_equal(
      testbed.copies(variables[0])[members[0]], expected[0]
    )


class TestBinding:
  def test_another_number_of_rates(self) -> None:
    with testbed.mirrored().scope():
      sgd = keras.optimizers.SGD(schedules.PerModel([1.0, 2.0, 3.0]))
      with pytest.raises(ValueError, match=r"`rates` .* 2 models .* got 3"):
        tf_cross_shard.CrossShardOptimizer(sgd, group_assignment=STRIDED)

  def test_no_wrapper(self) -> None:
    with testbed.mirrored().scope():
      sgd = keras.optimizers.SGD(schedules.PerModel([1.0, 2.0]))
      weight = keras.Variable(0.0)
      sgd.build([weight])
    one = tf.constant(1.0)
    with pytest.raises(RuntimeError, match="Wrap the optimizer"):
      testbed.run(lambda: sgd.apply_gradients([(one, weight)]))
    assert testbed.copies(weight) == [0.0] * 4

  def test_one_schedule_in_two_groupings(self) -> None:
    rates, found = schedules.PerModel([1.0, 2.0]), []
    for groups in (STRIDED, [[0, 1], [2, 3]]):
      with testbed.mirrored().scope():
        weight = keras.Variable(0.0)
        optimizer = tf_cross_shard.CrossShardOptimizer(
          keras.optimizers.SGD(rates), group_assignment=groups
        )
        optimizer.build([weight])
      pairs = [(tf.constant(0.5), weight)]
      testbed.run(lambda o=optimizer, p=pairs: o.apply_gradients(p))
      found.append(testbed.copies(weight))
    assert found == [[-1.0, -2.0, -1.0, -2.0], [-1.0, -1.0, -2.0, -2.0]]

  def test_a_schedule_that_is_assigned_later(self) -> None:
    strategy = testbed.mirrored()
    with strategy.scope():
      weight = keras.Variable(0.0)
      optimizer = tf_cross_shard.CrossShardOptimizer(
        "sgd", group_assignment=STRIDED
      )
      optimizer.build([weight])
    with pytest.raises(ValueError, match=r"`rates` .* 2 models .* got 3"):
      optimizer.learning_rate = schedules.PerModel([1.0, 2.0, 3.0])
    assert float(optimizer.learning_rate.numpy()) == np.float32(0.01)
    optimizer.learning_rate = schedules.PerModel([1.0, 2.0])
    assert float(optimizer.learning_rate) == 1.0
    one = tf.constant(0.5)
    testbed.run(lambda: optimizer.apply_gradients([(one, weight)]))
    assert testbed.copies(weight) == [-1.0, -2.0, -1.0, -2.0]

  def test_copies(self) -> None:
    with testbed.mirrored().scope():
      weight = keras.Variable(0.0)
      optimizer = copy.deepcopy(
        tf_cross_shard.CrossShardOptimizer(
          keras.optimizers.SGD(schedules.PerModel(RATES)),
          group_assignment=STRIDED,
        )
      )
      optimizer.build([weight])
    one = tf.constant(1.0)
    testbed.run(lambda: optimizer.apply_gradients([(one, weight)]))
    assert testbed.copies(weight) == [-0.25, -0.5, -0.25, -0.5]

  @pytest.mark.parametrize("library", [keras, tf_keras])
  def test_a_wrong_call_names_the_class(self, library: Any) -> None:
    with pytest.raises(TypeError, match=r"^PerModel\.__init__\(\) missing"):
      _of(library).PerModel()
    for rates in (0.1, _decay(library, 0.1), []):
      with pytest.raises(ValueError, match=r"`rates` must be a list .* each"):
        _of(library).PerModel(rates)

  @pytest.mark.parametrize("rate", ["0.1", True, None, lambda step: 0.1])
  def test_invalid_learning_rates_raise_an_error(self, rate: Any) -> None:
    with pytest.raises(TypeError, match="`rates` must contain numbers and sc"):
      schedules.PerModel([0.1, rate])
    other = tf_keras if schedules.PerModel._package == "keras" else keras
    with pytest.raises(TypeError, match="`rates`"):
      schedules.PerModel([_decay(other, 0.1)])

  def test_numbers_keep_keras_dtype(self) -> None:
    groups = schedules.PerModel([0.1])
    tf_cross_shard.CrossShardOptimizer(keras.optimizers.SGD(groups))
    keras.config.set_floatx("float64")
    try:
      rate = groups(0)
    finally:
      keras.config.set_floatx("float32")
    assert (rate.dtype, float(rate)) == (tf.float64, 0.1)
    assert groups(0).dtype == tf.float32


class TestAssign:
  @pytest.mark.parametrize(
    ("engine", "library"),
    [("mirrored", keras), ("virtual", tf_keras), ("virtual", keras)],
  )
  def test_the_next_step_has_the_new_rates(
    self, engine: str, library: Any
  ) -> None:
    """From and to 0, too; the step is traced once."""
    strategy, traces = ENGINES[engine](), []
    with strategy.scope():
      weight = testbed.variable(0.0, library=library)
      rates = _of(library).PerModel([0.0, 0.5])
      optimizer = _of(library).CrossShardOptimizer(
        library.optimizers.SGD(rates), group_assignment=STRIDED
      )
      optimizer.build([weight])

    @tf.function
    def step() -> None:
      traces.append(1)

      def replica_step() -> None:
        optimizer.apply_gradients([(tf.constant(0.5), weight)])

      strategy.run(replica_step)

    step()
    assert testbed.copies(weight) == [0.0, -0.5, 0.0, -0.5]
    count = len(traces)
    rates.assign([2.0, 0.0])
    assert rates.values(step=1) == rates.rates == [2.0, 0.0]
    step()
    assert testbed.copies(weight) == [-2.0, -0.5, -2.0, -0.5]
    assert len(traces) == count
    assert float(optimizer.learning_rate) == 2.0

  def test_bad_rates_change_nothing(self) -> None:
    rates = schedules.PerModel([0.5, 0.25])
    with pytest.raises(ValueError, match="`rates` must contain 2 numbers"):
      rates.assign([1.0])
    with pytest.raises(TypeError, match="`rates` must contain numbers; got '1"):
      rates.assign(["1", 2.0])
    assert rates.rates == [0.5, 0.25]
    with pytest.raises(TypeError, match="a schedule decides them"):
      schedules.PerModel([0.5, _decay(tf.keras, 0.25)]).assign([1.0, 2.0])

  def test_files_have_the_present_rates(self, tmp_path: pathlib.Path) -> None:
    def make() -> tuple[Any, Any]:
      with testbed.mirrored().scope():
        model = tf.keras.Sequential([tf.keras.Input((3,))])
        model.add(tf.keras.layers.Dense(1))
        rates = schedules.PerModel(RATES)
        optimizer = tf_cross_shard.CrossShardOptimizer(
          tf.keras.optimizers.SGD(rates), group_assignment=STRIDED
        )
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
      return model, rates

    model, rates = make()
    rates.assign([1.0, 0.1])
    Models(model).save(tmp_path / "state")
    tf.train.Checkpoint(optimizer=model.optimizer).write(str(tmp_path / "ckpt"))
    model.save(tmp_path / "model.keras")
    again, restored = make()
    Models(again).restore(tmp_path / "state")
    assert restored.values(step=0) == [1.0, 0.1]
    again, restored = make()
    checkpoint = tf.train.Checkpoint(optimizer=again.optimizer)
    checkpoint.read(str(tmp_path / "ckpt")).assert_existing_objects_matched()
    assert restored.values(step=0) == [1.0, 0.1]
    with testbed.mirrored().scope():
      loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    found = testbed.base_optimizer(loaded.optimizer)._learning_rate
    assert found.values(step=0) == [1.0, 0.1]
    assert copy.deepcopy(rates).rates == [1.0, 0.1]


class TestModels:
  """Under a VectorizedStrategy, a plain optimizer can have a PerModel."""

  @pytest.mark.parametrize("library", [keras, tf_keras])
  def test_plain_optimizer(self, library: Any) -> None:
    rates = _of(library).PerModel([0.5, 0.25, _decay(library, 1.0)])
    strategy = VectorizedStrategy(3)
    with strategy.scope():
      weight = testbed.variable(0.0, library=library)
      sgd = library.optimizers.SGD(rates)
      sgd.build([weight])
    rate = strategy.run(tf.function(lambda: rates(0)))
    found = strategy.experimental_local_results(rate)
    assert list(map(float, found)) == [0.5, 0.25, 1.0]

  @pytest.mark.parametrize("library", [keras, tf_keras])
  def test_a_plain_optimizer_restores_its_rates(
    self, library: Any, tmp_path: pathlib.Path
  ) -> None:
    """Before the first step, as a program does that goes on."""

    def make() -> tuple[Any, Any]:
      with VectorizedStrategy(2).scope():
        rates = _of(library).PerModel([0.5, 0.25])
        model = library.Sequential(
          [library.Input([1]), library.layers.Dense(1)]
        )
        model.compile(library.optimizers.SGD(rates), "mse")
        model.optimizer.build(model.trainable_variables)
      return rates, model

    rates, model = make()
    model.fit(tf.ones([4, 1]), tf.ones([4, 1]), verbose=0)
    rates.assign([0.125, 0.75])
    Models(model).save(tmp_path / "state")
    rates, model = make()
    Models(model).restore(tmp_path / "state")
    assert rates.values(step=0) == [0.125, 0.75]

  def test_another_number_of_rates(self) -> None:
    rates = schedules.PerModel([0.5, 0.25])
    strategy = VectorizedStrategy(3)
    with pytest.raises(ValueError, match=r"each of the 3 models .* got 2"):
      strategy.run(lambda: rates(0))
