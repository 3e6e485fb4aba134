"""Assertions that hold for every optimizer, wrapped or plain.

Subclasses of `OptimizerContract` run its assertions: one subclass on plain
Keras, which shows that the assertions hold for an ordinary optimizer, and one
for each way to wrap an optimizer.
"""

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed

# These have: momentum; two slots; one slot; slots of other shapes; an update
# that depends on the sign only.
REPRESENTATIVES = ("Momentum", "Adam", "Adagrad", "Adafactor", "Lion")


class OptimizerContract:
  """Assertions about one optimizer on one device.

  Subclasses define how a Keras optimizer is wrapped, and whether it is an
  optimizer of Keras 3 or of tf_keras.
  """

  library_name = "tf_keras" if testbed.IS_TF_KERAS else "keras"

  @property
  def library(self) -> Any:
    return importlib.import_module(self.library_name)

  @property
  def is_tf_keras(self) -> bool:
    return self.library_name == "tf_keras"

  def wrap(self, opt: Any) -> Any:
    """Returns the optimizer under test: `opt`, or an optimizer around it."""
    raise NotImplementedError

  @pytest.fixture(params=REPRESENTATIVES)
  def make(self, request: pytest.FixtureRequest) -> Any:
    return self._maker(request.param)

  def test_updates_and_counts(self, make: Any) -> None:
    optimizer, (weight,) = self._built(make)
    before = weight.numpy()
    result = optimizer.apply_gradients([(tf.ones([2, 3]), weight)])
    assert int(result) == int(optimizer.iterations) == 1
    assert np.all(weight.numpy() < before)

  def test_learning_rate_is_read_and_written(self, make: Any) -> None:
    ends = []
    for rate in (None, 0.5):
      optimizer, (weight,) = self._built(make)
      if rate is not None:
        optimizer.learning_rate = rate
        assert float(optimizer.learning_rate) == rate
      optimizer.apply_gradients([(tf.ones([2, 3]), weight)])
      ends.append(weight.numpy())
    assert np.all(ends[0] != ends[1])

  def test_gradient_of_none_passes(self, make: Any) -> None:
    optimizer, (first, second) = self._built(make, count=2)
    before = second.numpy()
    optimizer.weight_decay = None  # None decays nothing, in any Keras.
    optimizer.apply_gradients([(tf.ones([2, 3]), first), (None, second)])
    np.testing.assert_array_equal(second.numpy(), before)
    assert np.any(first.numpy() != before)

  def test_config_round_trip(self, make: Any) -> None:
    saving = importlib.import_module(f"{self.library_name}.saving")
    optimizer = make(clipnorm=0.5, use_ema=True, ema_momentum=0.75)
    config = optimizer.get_config()
    again = type(optimizer).from_config(dict(config))
    assert again.get_config() == config == optimizer.get_config()
    serialized = saving.serialize_keras_object(optimizer)
    other = saving.deserialize_keras_object(serialized)
    assert type(other) is type(optimizer)
    assert other.get_config() == config

  @pytest.mark.parametrize("built_first", [True, False])
  def test_checkpoint_round_trip(
    self, make: Any, built_first: bool, tmp_path: pathlib.Path
  ) -> None:
    optimizer, (weight,) = self._trained(make)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    other = make()
    if built_first:
      other.build([weight])
    status = tf.train.Checkpoint(optimizer=other).restore(path)
    if built_first:
      status.assert_consumed()
    other.build([weight])
    self._assert_same_state(optimizer, other)

  def test_model_file_round_trip(
    self, make: Any, tmp_path: pathlib.Path
  ) -> None:
    model = self._model(make())
    model.save(tmp_path / "model.keras")
    again = self.library.models.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is type(model.optimizer)
    self._assert_same_state(model.optimizer, again.optimizer)

  def test_schedule(self, make: Any) -> None:
    schedule = self.library.optimizers.schedules.PiecewiseConstantDecay(
      [0, 1], [0.25, 0.25, 0.5]
    )
    optimizer = make()
    optimizer.learning_rate = schedule
    weight = self._variable("weight")
    optimizer.build([weight])
    for rate in (0.25, 0.25, 0.5):
      if not self.is_tf_keras:
        assert float(optimizer.learning_rate) == rate
      optimizer.apply_gradients([(tf.ones([2, 3]), weight)])
      if self.is_tf_keras:  # It is computed when a step begins.
        assert float(optimizer.learning_rate) == rate

  def _maker(self, name: str) -> Any:
    make = testbed.optimizers_of(self.library)[name]
    return lambda **options: self.wrap(make(**options))

  def _variable(self, name: str) -> Any:
    return testbed.variable(np.ones((2, 3), "float32"), name, self.library)

  def _built(self, make: Any, count: int = 1) -> tuple[Any, list[Any]]:
    variables = [self._variable(f"weight_{i}") for i in range(count)]
    optimizer = make()
    optimizer.build(variables)
    return optimizer, variables

  def _trained(self, make: Any) -> tuple[Any, list[Any]]:
    optimizer, variables = self._built(make)
    for scale in (1.0, 2.0):
      optimizer.apply_gradients([(scale * tf.ones([2, 3]), variables[0])])
    assert int(optimizer.iterations) == 2
    return optimizer, variables

  def _model(self, optimizer: Any, steps: int = 1) -> Any:
    layers = self.library.layers
    model = self.library.Sequential([self.library.Input((3,)), layers.Dense(2)])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    for _ in range(steps):
      optimizer.apply_gradients(
        [(tf.ones(each.shape), each) for each in model.trainable_variables]
      )
    return model

  def _assert_same_state(self, first: Any, second: Any) -> None:
    """Checks that all variables of two optimizers have the same bits."""
    states = [each.variables for each in (first, second)]
    assert len(states[0]) == len(states[1]) >= 1
    for a, b in zip(*states, strict=True):
      np.testing.assert_array_equal(a.numpy(), b.numpy())
