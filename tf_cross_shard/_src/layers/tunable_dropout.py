"""Dropout whose rate is a weight."""

import abc
from typing import Any, Final, cast

import numpy as np
import tensorflow as tf

# Keras' layer creates a random number generator if its rate is not 0.
_ANY_RATE: Final = 0.5


# `layers.TunableDropout` of each Keras derives from this class and then from
# the `Dropout` of this Keras.
class TunableDropoutBase(abc.ABC):
  """Keras' `Dropout` layer, except that its rate is a non-trainable weight.

  In training, an element of the input is set to 0 with the probability `rate`,
  and multiplied by `1 / (1 - rate)` otherwise. Outside training, the layer
  returns its input.

  The weight is a scalar named `rate`. Each model can have another value, and
  `callbacks.OptunaSearch` sets it by its name. A step reads the present value.

  With the same rate and seed, the masks are those of Keras 3's `Dropout`. The
  factor `1 / (1 - rate)` can differ in its last bit, because the weight is
  float32. In tf_keras, the masks are others than those of Keras' layer: the
  state of the random numbers is a weight, as in Keras 3, so that a `fit` that
  resumes from `callbacks.BackupAndRestore` draws the numbers that it would have
  drawn without the interruption.

  A plain model that this package makes of one model has Keras' `Dropout` with
  the model's rate in place of this layer, so you can load it without this
  package.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import layers
  >>> layer = layers.TunableDropout(0.5, seed=1)
  >>> layer(tf.ones([1, 4]), training=True).numpy()
  array([[2., 0., 2., 0.]], dtype=float32)
  >>> _ = layer.rate.assign(0.0)
  >>> layer(tf.ones([1, 4]), training=True).numpy()
  array([[1., 1., 1., 1.]], dtype=float32)
  """

  # As the layers of Keras 3 and tf_keras have them.
  dtype: Any
  noise_shape: Any
  _no_autocast: str  # The name of the argument that turns off autocasting.

  def __init__(
    self, rate: float, noise_shape: Any = None, seed: Any = None, **kwargs: Any
  ) -> None:
    """Creates the layer.

    Args:
      rate: The initial rate of all models, from 0 to 1.
      noise_shape: The shape of the mask, as in Keras' `Dropout`; None for that
        of the input.
      seed: The seed of the random numbers. None draws a seed.
      **kwargs: Other arguments of Keras' `Dropout`, such as `name`.

    Raises:
      ValueError: If an argument is invalid.
    """
    layer: Any = super()
    layer.__init__(rate or _ANY_RATE, noise_shape, seed, **kwargs)
    self.rate: Any = rate

  def build(self, input_shape: Any) -> None:
    """Creates the weight."""
    initial, layer = self.rate, cast(Any, super())
    self.rate = layer.add_weight(
      name="rate",
      shape=(),
      # A rate of 0.1 would be another number in float16.
      dtype="float64" if self.dtype == "float64" else "float32",
      initializer=lambda shape, dtype=None, **__: tf.constant(initial, dtype),
      trainable=False,
      **{self._no_autocast: False},
    )
    layer.build(input_shape)

  def call(self, inputs: Any, training: Any = None) -> Any:
    """Returns the inputs, in training with elements that are set to 0."""
    if not training:
      return inputs
    inputs = tf.convert_to_tensor(inputs)
    rate = tf.convert_to_tensor(self.rate)
    drawn = tf.random.stateless_uniform(
      self._shape_of_noise(inputs), self._next_seed(), dtype=inputs.dtype
    )
    # In double precision, as Python computes it in Keras' layer.
    scale = tf.math.divide_no_nan(
      tf.ones([], tf.float64), 1 - tf.cast(rate, tf.float64)
    )
    return tf.where(
      drawn >= tf.cast(rate, inputs.dtype),
      inputs * tf.cast(scale, inputs.dtype),
      tf.zeros([], inputs.dtype),
    )

  def _shape_of_noise(self, inputs: Any) -> Any:
    """Returns the argument `noise_shape`, with sizes for None."""
    sizes = tf.shape(inputs)
    if self.noise_shape is None:
      return sizes
    return [
      sizes[i] if size is None else size
      for i, size in enumerate(self.noise_shape)
    ]

  @abc.abstractmethod
  def _next_seed(self) -> tf.Tensor:
    """Returns the seed of this call, two integers, and advances the state."""

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments of the constructor, with the present rate."""
    layer: Any = super()
    return {**layer.get_config(), "rate": as_decimal(self.rate)}


def as_decimal(rate: Any) -> float:
  """Returns a rate as a decimal number: 0.1, not 0.10000000149011612."""
  return float(str(np.asarray(rate if np.isscalar(rate) else rate.numpy())))
