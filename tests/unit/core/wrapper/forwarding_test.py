"""The wrapper reads and writes as if it were the encapsulated optimizer."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer

keras = tf.keras


@pytest.fixture
def optimizer() -> Any:
  return CrossShardOptimizer(keras.optimizers.Adam(0.5, beta_1=0.75))


def test_settings_live_in_the_encapsulated_optimizer(optimizer: Any) -> None:
  inner = optimizer.inner_optimizer
  assert optimizer.beta_1 == 0.75
  for name, value in (
    ("beta_1", 0.25),
    ("weight_decay", 0.125),
    ("use_ema", True),
    ("ema_momentum", 0.5),
    ("loss_scale_factor", 8.0),
    ("gradient_accumulation_steps", 3),
  ):
    setattr(optimizer, name, value)
    assert getattr(inner, name) == getattr(optimizer, name) == value
  optimizer.learning_rate = 0.25
  assert float(inner.learning_rate) == 0.25
  inner.learning_rate = 0.75
  assert float(optimizer.learning_rate) == 0.75


def test_unpickled_state_is_restored_once_in_a_function() -> None:
  weight = keras.Variable(0.0, name="weight")
  optimizer = CrossShardOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
  optimizer.apply_gradients([(tf.constant(1.0), weight)])
  again = pickle.loads(pickle.dumps(optimizer))

  @tf.function(autograph=False)
  def step() -> None:
    again.apply_gradients([(tf.constant(1.0), weight)])

  for momentum in (-1.5, -1.75):
    step()
    assert again.get_slot(weight, "momentum").numpy() == momentum
  assert again.iterations.numpy() == 3


def test_unpickled_state_reaches_every_replica() -> None:
  strategy = testbed.mirrored()
  with strategy.scope():
    weight = keras.Variable(0.0, name="weight")
    optimizer = CrossShardOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    optimizer.build([weight])

  def step(stepping: Any) -> None:
    strategy.run(lambda: stepping.apply_gradients([(tf.constant(1.0), weight)]))

  step(optimizer)
  with strategy.scope():
    again = pickle.loads(pickle.dumps(optimizer))
  with pytest.raises(RuntimeError, match=r"not built.*strategy\.scope\(\)"):
    step(again)
  with strategy.scope():
    again.build([weight])
  assert testbed.copies(again.get_slot(weight, "momentum")) == [-4.0] * 4
  step(again)
  assert testbed.copies(again.get_slot(weight, "momentum")) == [-6.0] * 4
  assert testbed.copies(again.iterations) == [2] * 4


def test_what_changes_before_the_slots_come_stays(optimizer: Any) -> None:
  weight = keras.Variable(1.0, name="weight")
  optimizer.apply_gradients([(tf.constant(1.0), weight)])
  again = copy.deepcopy(optimizer)
  again.learning_rate = 0.25
  again.iterations.assign(7)
  again = copy.deepcopy(again)
  again.build([weight])
  assert float(again.learning_rate) == 0.25
  assert again.iterations.numpy() == 7
  velocity = optimizer.get_slot(weight, "velocity").numpy()
  assert again.get_slot(weight, "velocity").numpy() == velocity != 0


def test_unpickled_and_built_on_other_shapes(optimizer: Any) -> None:
  optimizer.build([keras.Variable([1.0, 2.0])])
  again = pickle.loads(pickle.dumps(optimizer))
  with pytest.raises(ValueError, match=r"(?s)shape.*\(3,\)"):
    again.build([keras.Variable([1.0, 2.0, 3.0])])


def test_another_wrapper_further_in_is_refused(optimizer: Any) -> None:
  between = keras.optimizers.LossScaleOptimizer(optimizer)
  with pytest.raises(ValueError, match="reduced twice"):
    CrossShardOptimizer(between)


def test_clipping_name_and_new_attributes_are_its_own(optimizer: Any) -> None:
  for name in ("clipnorm", "clipvalue", "global_clipnorm"):
    setattr(optimizer, name, 2.0)
    assert getattr(optimizer.inner_optimizer, name) is None
  assert optimizer.name != optimizer.inner_optimizer.name
  optimizer.note = "mine"
  assert optimizer.note == "mine"
  assert not hasattr(optimizer.inner_optimizer, "note")
  with pytest.raises(AttributeError, match="no_such_thing"):
    _ = optimizer.no_such_thing


def test_weights_and_exclusions(optimizer: Any) -> None:
  decayed = CrossShardOptimizer(keras.optimizers.SGD(0.5, weight_decay=0.5))
  bias = keras.Variable(4.0, name="bias")
  kernel = keras.Variable(4.0, name="kernel")
  decayed.exclude_from_weight_decay(var_names=["bias"])
  decayed.apply_gradients([(tf.constant(0.0), v) for v in (bias, kernel)])
  assert (float(bias.numpy()), float(kernel.numpy())) == (4.0, 3.0)
  optimizer.build([bias])
  values = [np.full(v.shape, 3.0) for v in optimizer.variables]
  optimizer.set_weights(values)
  assert optimizer.iterations.numpy() == 3
  assert optimizer.get_slot(bias, "velocity").numpy() == 3.0


def test_loss_scale_optimizer_inside() -> None:
  weight = keras.Variable([1.0, 2.0], name="weight")
  optimizer = CrossShardOptimizer(
    keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
  )
  optimizer.build([weight])
  assert optimizer.get_slot_names() == ["momentum", "velocity"]
  assert optimizer.get_slot(weight, "momentum").shape == (2,)
