"""tf_keras and Keras 3 together: optimizers and methods."""

import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed
from tf_cross_shard import Models, keras3
from tf_cross_shard import tf_keras as sharded
from tf_cross_shard.tf_keras import CrossShardOptimizer

HALVES = [[0, 1], [2, 3]]
optimizers = tf_keras.optimizers
legacy = tf_keras.optimizers.legacy


def _make(opt: Callable[[], Any], initial: Any, **options: Any) -> Any:
  """A built optimizer and its variable, under MirroredStrategy."""
  with testbed.mirrored().scope():
    weight = tf.Variable(initial, dtype=tf.float32)
    optimizer = CrossShardOptimizer(opt(), **options)
    optimizer.build([weight])
  return optimizer, weight


def _scaled(optimizer: Any, **options: Any) -> Any:
  """Returns an optimizer in a loss scaling optimizer."""
  kind = tf_keras.mixed_precision.LossScaleOptimizer
  return kind(optimizer, **{"initial_scale": 8.0, **options})


def _run(step: Callable[[], Any], mode: str = "function") -> None:
  """One step on four replicas, which return nothing."""
  testbed.run(lambda: [step(), None][1], mode)


class TestWhichKeras:
  @pytest.mark.parametrize(
    ("home", "opt", "error", "words"),
    [
      (keras3, optimizers.Adam, TypeError, "from tf_cross_shard.tf_keras imp"),
      (
        sharded,
        keras.optimizers.Adam,
        TypeError,
        "an optimizer of keras.*from tf_cross_shard.keras3 import",
      ),
      (
        sharded,
        lambda: keras3.CrossShardOptimizer("sgd"),
        ValueError,
        "reduced twice",
      ),
      (
        sharded,
        lambda: CrossShardOptimizer("sgd"),
        ValueError,
        "reduced twice",
      ),
    ],
  )
  def test_what_cannot_be_encapsulated(
    self, home: Any, opt: Any, error: type[Exception], words: str
  ) -> None:
    with pytest.raises(error, match=words):
      home.CrossShardOptimizer(opt())


class _Own(legacy.Adam):
  """A class of the user's."""


@pytest.mark.parametrize(
  ("wrap", "argument"),
  [
    (CrossShardOptimizer, "opt"),
    (keras3.CrossShardOptimizer, "opt"),
    (sharded.TowerOptimizer, "optimizer_or_optimizer_fn"),
    (
      lambda opt: Models([tf.Variable(1.0)], opt).save("state"),
      "optimizer",
    ),
  ],
)
@pytest.mark.parametrize(
  ("make", "name", "new"),
  [
    (legacy.SGD, "SGD", "SGD"),
    (_Own, "_Own", "Adam"),
    (lambda: _scaled(legacy.Adam()), "Adam", "Adam"),
  ],
)
def test_legacy_optimizers_are_refused(
  wrap: Any, argument: str, make: Any, name: str, new: str
) -> None:
  words = (
    rf"`{argument}` must not be .*\.legacy; got {name}\. Use a class without"
    rf" `\.legacy`: tf_keras\.optimizers\.{new}\."
  )
  with pytest.raises(TypeError, match=words):
    wrap(make())


def test_a_name_is_a_new_optimizer_in_a_graph() -> None:
  """There, and on some machines, it is a legacy one of plain tf_keras."""
  with tf.Graph().as_default():
    assert isinstance(optimizers.get("sgd"), legacy.SGD)
    optimizer = CrossShardOptimizer("sgd")
  assert type(optimizer.inner_optimizer) is optimizers.SGD


class TestReduction:
  def test_sums_in_groups_eagerly(self) -> None:
    optimizer, weight = _make(
      lambda: optimizers.SGD(1.0), 0.0, group_assignment=HALVES
    )
    _run(lambda: optimizer.apply_gradients([(testbed.mark(), weight)]), "eager")
    assert testbed.copies(weight) == [-3.0, -3.0, -12.0, -12.0]

  @pytest.mark.parametrize("scale", [_scaled, lambda plain: plain])
  @pytest.mark.parametrize(
    "switch",
    [
      {"skip_gradients_aggregation": True},
      {"experimental_aggregate_gradients": False},
    ],
  )
  def test_gradients_that_are_sums_already(
    self, scale: Any, switch: dict[str, bool]
  ) -> None:
    optimizer, weight = _make(lambda: scale(optimizers.SGD(1.0)), 0.0)
    _run(
      lambda: optimizer.apply_gradients([(testbed.mark(), weight)], **switch)
    )
    assert testbed.copies(weight) == [-1.0, -2.0, -4.0, -8.0]

  def test_aggregated_first_and_applied_then(self) -> None:
    optimizer, weight = _make(
      lambda: optimizers.SGD(1.0), 0.0, group_assignment=HALVES, clipvalue=2.0
    )

    def step() -> Any:
      pairs = optimizer.aggregate_gradients([(testbed.mark(), weight)])
      return optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

    _run(step)
    assert testbed.copies(weight) == [-3.0, -3.0, -4.0, -4.0]

  def test_constraints(self) -> None:
    with testbed.mirrored().scope():
      weight = tf.Variable(1.0, constraint=tf_keras.constraints.NonNeg())
      sgd = optimizers.SGD(0.25)
      optimizer = CrossShardOptimizer(sgd, group_assignment=HALVES)
      optimizer.build([weight])
    _run(lambda: optimizer.apply_gradients([(testbed.mark(), weight)]))
    assert testbed.copies(weight) == [0.25, 0.25, 0.0, 0.0]


class TestState:
  def test_the_learning_rate_under_all_its_names(self) -> None:
    optimizer = CrossShardOptimizer(optimizers.SGD(0.5))
    assert float(optimizer.lr) == float(optimizer.learning_rate) == 0.5
    optimizer.lr = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    weight = tf.Variable(1.0)
    optimizer.apply_gradients([(tf.constant(2.0), weight)])
    assert weight.numpy() == 0.5


class TestCornersOfTheInterface:
  @pytest.mark.parametrize("way", ["tape", "compute"])
  def test_minimize_with_a_loss_scale(self, way: str) -> None:
    """The loss of a function is this replica's; that of a tape is global."""
    optimizer, weight = _make(
      lambda: _scaled(optimizers.SGD(1.0)), 0.0, group_assignment=HALVES
    )

    def step() -> None:
      def loss() -> tf.Tensor:
        return testbed.mark() * weight

      if way == "compute":
        optimizer.apply_gradients(optimizer.compute_gradients(loss, [weight]))
      else:
        with tf.GradientTape() as tape:
          value = loss() / testbed.REPLICAS
        optimizer.minimize(value, [weight], tape=tape)

    _run(step)
    assert testbed.copies(weight) == [-1.5, -1.5, -6.0, -6.0]

  def test_attributes_and_the_iteration_count_are_set(self) -> None:
    optimizer = CrossShardOptimizer("sgd")
    optimizer.mine, optimizer.list = tf.Variable(0), [1]
    optimizer.iterations = tf.Variable(3, dtype=tf.int64)
    optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    assert int(optimizer.inner_optimizer.iterations) == 4

  def test_small_gradients_survive_a_float16_wire(self) -> None:
    optimizer, weight = _make(
      lambda: _scaled(optimizers.SGD(1.0), initial_scale=2.0**15),
      0.0,
      wire_dtype="float16",
    )
    small = 2.0**-30  # float16 ends at 2**-24.
    _run(
      lambda: optimizer.minimize(
        lambda: small * testbed.mark() * weight, var_list=[weight]
      )
    )
    assert testbed.copies(weight) == [-small * 15 / 4] * 4

  @pytest.mark.parametrize("form", ["h5", "tf"])
  def test_models_with_a_loss_scale_are_loaded(
    self, form: str, tmp_path: pathlib.Path
  ) -> None:
    opt = CrossShardOptimizer(_scaled(optimizers.Adam()))
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(1,))])
    model.compile(opt, "mse")
    data = np.ones([4, 1], "float32")
    model.fit(data, data, verbose=0)
    model.save(str(tmp_path / f"model.{form}"), save_format=form)
    again = tf_keras.models.load_model(str(tmp_path / f"model.{form}"))
    kinds = [type(each.optimizer.inner_optimizer) for each in (model, again)]
    assert kinds[0] is kinds[1]
    assert type(again.optimizer) is type(opt)
    for a, b in zip(model.get_weights(), again.get_weights(), strict=True):
      np.testing.assert_array_equal(a, b)
    again.fit(data, data, verbose=0)


@pytest.mark.parametrize("name", ["Lion", "Adafactor", "Adam"])
def test_pickles_of_a_loss_scale_keep_tf_keras_classes(name: str) -> None:
  """Without our code, tf_keras would create Keras 3's Lion and Adafactor.

  It would then raise an error for them.
  """
  kind = getattr(tf_keras.optimizers, name)
  optimizer = CrossShardOptimizer(
    tf_keras.mixed_precision.LossScaleOptimizer(kind(0.125))
  )
  weight = tf.Variable([1.0, 2.0])
  optimizer.build([weight])
  optimizer.apply_gradients([(tf.constant([1.0, -3.0]), weight)])
  again = pickle.loads(pickle.dumps(optimizer))
  assert type(again.inner_optimizer.inner_optimizer) is kind
  again.build([weight])
  assert len(again.variables) == len(optimizer.variables) > 1
