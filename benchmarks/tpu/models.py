"""The models that program.py compiles, one of each common kind.

They use float32, and the loss is the mean cross entropy over the replica's own
examples.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_BATCH_SIZE = 8
_CLASSES = 10
_WIDTH = 512
_PIXELS = 32
_WORDS, _LENGTH, _FEATURES, _HEADS = 1000, 64, 128, 4


@dataclasses.dataclass(frozen=True)
class Case:
  """A kind of model, and the batch of one replica.

  Attributes:
    name: The name of the model.
    make_model: A function that creates the model, which returns logits.
    specs: The shapes and dtypes of the inputs and the labels.
  """

  name: str
  make_model: Callable[[], Any]
  specs: tuple[tf.TensorSpec, tf.TensorSpec]

  def loss(self, model: Any, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the mean loss over this replica's examples.

    Args:
      model: A model that `make_model` created.
      inputs: A batch with the shape and dtype of `specs`.
      labels: The classes of the batch.

    Returns:
      A scalar.
    """
    logits = model(inputs, training=True)
    return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def make_mlp() -> Any:
  """Returns three dense layers of 512 units."""
  layers = [tf.keras.layers.Dense(_WIDTH, "relu") for _ in range(2)]
  return tf.keras.Sequential(
    [tf.keras.Input([_WIDTH]), *layers, tf.keras.layers.Dense(_WIDTH)]
  )


def make_resnet() -> Any:
  """Returns a residual network with batch normalization.

  It has one convolution and then four blocks of two convolutions.
  """
  inputs = tf.keras.Input([_PIXELS, _PIXELS, 3])
  x = _convolve(inputs, 16)
  for filters, strides in ((16, 1), (32, 2), (64, 2), (64, 1)):
    y = tf.keras.layers.ReLU()(_convolve(x, filters, strides))
    y = _convolve(y, filters)
    if x.shape != y.shape:
      x = _convolve(x, filters, strides, size=1)
    x = tf.keras.layers.ReLU()(x + y)
  x = tf.keras.layers.GlobalAveragePooling2D()(x)
  return tf.keras.Model(inputs, tf.keras.layers.Dense(_CLASSES)(x))


def make_transformer() -> Any:
  """Returns a transformer of two blocks that predicts the next word."""
  inputs = tf.keras.Input([_LENGTH], dtype=tf.int32)
  words = tf.keras.layers.Embedding(_WORDS, _FEATURES)(inputs)
  places = tf.keras.layers.Embedding(_LENGTH, _FEATURES)(tf.range(_LENGTH))
  x = words + places
  for _ in range(2):
    y = tf.keras.layers.LayerNormalization()(x)
    attention = tf.keras.layers.MultiHeadAttention(_HEADS, _FEATURES // _HEADS)
    x = x + attention(y, y, use_causal_mask=True)
    y = tf.keras.layers.LayerNormalization()(x)
    y = tf.keras.layers.Dense(4 * _FEATURES, "gelu")(y)
    x = x + tf.keras.layers.Dense(_FEATURES)(y)
  x = tf.keras.layers.LayerNormalization()(x)
  return tf.keras.Model(inputs, tf.keras.layers.Dense(_WORDS)(x))


def _convolve(x: Any, filters: int, strides: int = 1, size: int = 3) -> Any:
  """Applies a convolution and batch normalization."""
  x = tf.keras.layers.Conv2D(
    filters, size, strides, padding="same", use_bias=False
  )(x)
  return tf.keras.layers.BatchNormalization()(x)


def _case(
  name: str,
  make_model: Callable[[], Any],
  shape: list[int],
  dtype: tf.DType = tf.float32,
  label_shape: tuple[int, ...] = (),
) -> Case:
  """Returns a case with one label for each example, or for each word."""
  specs = (
    tf.TensorSpec([_BATCH_SIZE, *shape], dtype),
    tf.TensorSpec([_BATCH_SIZE, *label_shape], tf.int32),
  )
  return Case(name, make_model, specs)


CASES = {
  case.name: case
  for case in (
    _case("mlp", make_mlp, [_WIDTH]),
    _case("resnet", make_resnet, [_PIXELS, _PIXELS, 3]),
    _case("transformer", make_transformer, [_LENGTH], tf.int32, (_LENGTH,)),
  )
}
