"""Compiles the gradients of a model with XLA, but not the reduction.

XLA cannot compile the reductions of MirroredStrategy, so `jit_compile=True`
fails there. But the part of a training step that precedes the reductions is a
program of one replica, which XLA can compile:

    forward pass ─▶ loss, metrics ─▶ gradients ─▶ reduction ─▶ update
    └───────────── one XLA program ───────────┘   └─ TensorFlow ────┘
"""

from typing import Any, TypeVar

import tensorflow as tf

from tf_cross_shard._src.core.inner import keras_private, overriding

_Model = TypeVar("_Model")


def compiled_gradients(model: _Model) -> _Model:
  """Makes `fit` compile the forward and the backward pass of a model with XLA.

  Use it under MirroredStrategy, where `compile(jit_compile=True)` fails. XLA
  compiles Keras' training step up to the gradients, metrics included. The
  reduction and the update of the weights run outside XLA. The numbers are the
  same, up to rounding.

  This pays off for some models only, so measure a step with and without it. The
  first step takes longer, because XLA compiles a program for each replica. All
  batches should have the same shape (`drop_remainder=True`), because XLA
  compiles the program again for each new shape.

  Call the function before or after `compile`, and again after you load or clone
  the model. Layers, losses and metrics must be of the kind that XLA can
  compile. With `run_eagerly=True`, nothing is compiled. We tested this function
  on CPUs only.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, compiled_gradients
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   layers = [tf.keras.Input((8,)), tf.keras.layers.Dense(1)]
  ...   model = compiled_gradients(tf.keras.Sequential(layers))
  ...   adam = tf.keras.optimizers.Adam(0.01)
  ...   model.compile(CrossShardOptimizer(adam), "mse")
  >>> features = tf.random.normal([64, 8])
  >>> history = model.fit(features, features[:, :1], batch_size=16, verbose=0)

  Args:
    model: A functional, subclassed or `Sequential` model of Keras 3.

  Returns:
    The same model.

  Raises:
    TypeError: The model is not a model of Keras 3.
    ValueError: The class of the model has a `train_step` of its own.
  """
  if keras_private.keras_of(model).__name__ != "keras":
    raise TypeError(
      "`compiled_gradients` needs a model of Keras 3; got a"
      f" {type(model).__name__} of tf_keras. Unset TF_USE_LEGACY_KERAS."
    )
  # A `train_step` of a user may read the weights after the update, such as for
  # a moving average. It must not be divided into gradients and update.
  home = type(model).train_step.__module__  # type: ignore[attr-defined]
  if not home.startswith("keras."):
    raise ValueError(
      f"`model` is a {type(model).__name__}, which has its own `train_step`."
      " Instead, decorate the function in `train_step` that computes the"
      " gradients with `tf.function(jit_compile=True)`."
    )
  step = _Step(model)
  model.train_step = step  # type: ignore[attr-defined]
  model.train_function = None  # type: ignore[attr-defined]  # Trace it again.
  return model


class _Step:
  """The `train_step` of one model."""

  def __init__(self, model: Any) -> None:
    self._model = model

  def __call__(self, data: Any) -> Any:
    """Trains on the batch of one replica; returns the metrics."""
    model = self._model
    keras_own = type(model).train_step
    if model.run_eagerly:
      return keras_own(model, data)
    variables: list[Any] = []

    # Each trace of `fit` has a function of its own, since `variables` is filled
    # while the function is traced.
    @tf.function(jit_compile=True, autograph=False)
    def differentiate(data: Any) -> Any:
      """Runs Keras' step; returns the gradients instead of applying them."""
      gradients: list[Any] = []

      def keep(pairs: Any) -> None:
        for gradient, variable in pairs:
          gradients.append(gradient)
          variables.append(variable)

      with overriding.overriding(model.optimizer, apply_gradients=keep):
        metrics = keras_own(model, data)
      return metrics, gradients

    metrics, gradients = differentiate(data)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return metrics
