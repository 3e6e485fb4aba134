"""Runs the optimizer contract on plain Keras and on wrapped optimizers."""

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import contract
from tf_cross_shard import CrossShardOptimizer


class TestReference(contract.OptimizerContract):
  """Plain Keras passes, so the assertions hold for an ordinary optimizer."""

  @pytest.fixture(params=["Momentum", "Adafactor"])
  def make(self, request: pytest.FixtureRequest) -> Any:
    return self._maker(request.param)

  def wrap(self, opt: Any) -> Any:
    return opt


class TestCrossShardOptimizer(contract.OptimizerContract):
  """Wrapped optimizers fulfill the optimizer contract."""

  def wrap(self, opt: Any) -> Any:
    return CrossShardOptimizer(opt)

  @pytest.mark.tf_keras_mode
  def test_same_numbers_as_plain_keras(self, make: Any) -> None:
    def with_keras_operations() -> Any:
      config = {**make().get_config(), "fused_update": False}
      return type(make()).from_config(config)

    optimizer, (weight,) = self._trained(with_keras_operations)
    plain = optimizer.inner_optimizer
    twin = type(plain).from_config(plain.get_config())
    expected = self._variable("weight_0")
    twin.build([expected])
    for scale in (1.0, 2.0):
      twin.apply_gradients([(scale * tf.ones([2, 3]), expected)])
    np.testing.assert_array_equal(weight.numpy(), expected.numpy())
    self._assert_same_state(optimizer, twin)

  def test_gradients_of_another_dtype_are_cast(self, make: Any) -> None:
    """Plain tf_keras would fail when it updates the first variable."""
    results = []
    for second in ("float16", "float32"):
      optimizer, variables = self._built(make, 2)
      grads = [tf.ones([2, 3]), tf.ones([2, 3], second)]
      for _ in range(2):
        pairs = zip(grads, variables, strict=True)
        optimizer.apply_gradients(pairs)
      results.append([variable.numpy() for variable in variables])
    np.testing.assert_array_equal(*results)
    assert (results[0][1] != 1.0).all()

  def test_variables_are_the_encapsulated_ones(self, make: Any) -> None:
    optimizer, _ = self._built(make)
    inner = optimizer.inner_optimizer.variables
    assert len(inner) >= 1
    for listed in (optimizer.variables, optimizer.variables()):
      assert [id(v) for v in listed] == [id(v) for v in inner]

  def test_slots_are_found_by_name(self, make: Any) -> None:
    optimizer, (weight,) = self._built(make)
    names = optimizer.get_slot_names()
    slots = [optimizer.get_slot(weight, name) for name in names]
    assert len(set(map(id, slots))) == len(slots)
    made_for_weight = [
      v
      for v in optimizer.variables
      if v.shape.rank
      and v.name not in ("iteration", "learning_rate")
      and tuple(v.shape) != (1,)
    ]
    found = {id(slot) for slot in slots}
    assert {id(v) for v in made_for_weight} <= found
    assert optimizer.get_slot(weight, "no_such_slot") is None
    assert all(
      optimizer.get_slot(tf.Variable(1.0), name) is None for name in names
    )

  def test_checkpoints_interchange(
    self, make: Any, tmp_path: pathlib.Path
  ) -> None:
    optimizer, (weight,) = self._trained(make)
    inner = optimizer.inner_optimizer
    for source, target in (
      (optimizer, type(inner).from_config(inner.get_config())),
      (inner, make()),
    ):
      checkpoint = tf.train.Checkpoint(optimizer=source)
      path = checkpoint.save(str(tmp_path / "ck"))
      target.build([weight])
      status = tf.train.Checkpoint(optimizer=target).restore(path)
      status.assert_consumed()
      self._assert_same_state(source, target)

  def test_model_files_interchange(
    self, make: Any, tmp_path: pathlib.Path
  ) -> None:
    plain = make().inner_optimizer
    first = type(plain).from_config(plain.get_config())
    second = type(plain).from_config(plain.get_config())
    for source, target in ((make(), first), (second, make())):
      self._model(source).save(tmp_path / "model.keras")
      self._model(target, steps=0).load_weights(tmp_path / "model.keras")
      assert int(target.iterations) == 1
      self._assert_same_state(source, target)


class _OfTfKeras:
  """A representative of tf_keras, next to Keras 3."""

  library_name = "tf_keras"

  @pytest.fixture(params=["Adam"])
  def make(self, request: pytest.FixtureRequest) -> Any:
    return self._maker(request.param)


class TestReferenceOfTfKeras(_OfTfKeras, TestReference):
  """Plain tf_keras passes, too."""


class TestCrossShardOptimizerOfTfKeras(_OfTfKeras, TestCrossShardOptimizer):
  """Wrapped tf_keras optimizers fulfill the optimizer contract."""

  def wrap(self, opt: Any) -> Any:
    return importlib.import_module(
      "tf_cross_shard.tf_keras"
    ).CrossShardOptimizer(opt)
