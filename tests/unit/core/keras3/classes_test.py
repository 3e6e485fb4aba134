"""Wrapped Keras 3 optimizers: all features work, in every mode."""

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer, keras3

keras = tf.keras
optimizers = keras.optimizers

# Features of optimizers around an update, several at once.
_make = functools.partial(
  optimizers.SGD,
  weight_decay=0.5,
  global_clipnorm=0.5,
  use_ema=True,
  ema_momentum=0.5,
  ema_overwrite_frequency=2,
)


def _constrained(task: training.Regression) -> list[Any]:
  """The task's weights, the first of them kept non-negative."""
  variables = task.variables()
  variables[0].constraint = keras.constraints.NonNeg()
  return variables


def _expected(
  task: training.Regression, optimizer: Any, members: tuple[int, ...]
) -> list[np.ndarray]:
  """The weights and the variables of plain Keras on one device."""
  variables = _constrained(task)
  task.train_alone(members, optimizer, variables=variables)
  optimizer.finalize_variable_values(variables)
  return [variable.numpy() for variable in (*variables, *optimizer.variables)]


def test_features_of_the_encapsulated_optimizer() -> None:
  """The features work in a `tf.function`, too, where plain Keras fails."""
  task = training.Regression(seed=2)
  strategy = testbed.mirrored()
  with strategy.scope():
    variables = _constrained(task)
    optimizer = CrossShardOptimizer(
      _make(0.5), group_assignment=testbed.GROUPINGS["strided"]
    )
    optimizer.build(variables)

  task.train_replicas(strategy, optimizer, variables)
  with strategy.scope():
    optimizer.finalize_variable_values(variables)
  for members in optimizer.groups:
    right = _expected(task, _make(0.5), members)
    for variable, value in zip(
      [*variables, *optimizer.variables], right, strict=True
    ):
      held = testbed.copies(variable)
      assert len(held) == testbed.REPLICAS
      for replica in members:
        training.assert_close(
          np.asarray(held[replica], "float64"),
          np.asarray(value, "float64"),
          f"{variable.path} of replica {replica}",
        )


def test_a_frozen_layer_is_not_trained() -> None:
  """A tape and a graph find its TensorFlow variable, which is trainable."""
  layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
  model = keras.Sequential([keras.Input((1,)), *layers])
  optimizer = CrossShardOptimizer(optimizers.SGD(0.5))
  optimizer.build(model.trainable_variables)
  layers[0].trainable = False
  before = [layer.kernel.numpy() for layer in layers]

  def loss() -> Any:
    return tf.reduce_sum(model(tf.ones([1, 1])))

  [(_, variable)] = optimizer.compute_gradients(loss)
  assert variable is layers[1].kernel
  tf.function(lambda: optimizer.minimize(loss()))()
  for layer, old in zip(layers, before, strict=True):
    assert (layer.kernel.numpy() == old) == (layer is layers[0])


@pytest.mark.parametrize("is_built", [False, True])
def test_averages_are_evaluated_under_loss_scaling(is_built: bool) -> None:
  """SwapEMAWeights finds them, as in plain Keras."""
  x = np.arange(8.0, dtype="float32").reshape(4, 2)

  def losses(is_ours: bool) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    opt = optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5)
    opt = optimizers.LossScaleOptimizer(opt, initial_scale=2.0)
    if is_built:
      opt.build(model.trainable_variables)
    if is_ours:
      opt = CrossShardOptimizer(opt)
    model.compile(opt, "mse", auto_scale_loss=False)
    swap = keras.callbacks.SwapEMAWeights()
    history = model.fit(
      *(x, x[:, :1]),
      verbose=0,
      epochs=3,
      shuffle=False,
      validation_data=(x, x[:, :1]),
      callbacks=[swap],
    )
    return history.history["val_loss"], model.get_weights()

  plain, ours = losses(False), losses(True)
  np.testing.assert_array_equal(ours[0], plain[0])
  for own, right in zip(ours[1], plain[1], strict=True):
    np.testing.assert_array_equal(own, right)


@pytest.mark.parametrize("kind", [CrossShardOptimizer, keras3.TowerOptimizer])
def test_float8_layers_are_refused_by_name(kind: Any) -> None:
  layer = keras.layers.Dense(2, name="head")
  layer.build((None, 4))
  layer.quantize("float8")
  variables = layer.trainable_variables
  error = pytest.raises(NotImplementedError, match=r"head/.*mixed_bfloat16")
  with error:
    kind(optimizers.SGD(1.0)).build(variables)
  built = optimizers.SGD(1.0)
  built.build(variables)
  with error:
    kind(built)
