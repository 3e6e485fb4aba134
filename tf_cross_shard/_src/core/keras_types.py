"""Names for what TensorFlow and Keras create, whose classes have no types."""

from typing import Any, TypeAlias

import tensorflow as tf

Variable: TypeAlias = Any  # A `tf.Variable` or a `keras.Variable`.
Optimizer: TypeAlias = Any  # Of Keras 3 or tf_keras.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
