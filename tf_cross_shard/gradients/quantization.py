"""Numbers of eight bits on the wire, in blocks with a scale each.

    x [256] ─ scale = max |x| / 127 ─▶ q = round(x / scale), int8 ─▶ q * scale

Four of them travel as one int32, with the scales in float32 behind them: there
are collectives that gather int32, and none for int8. Sums of int8 with several
scales cannot be made on the way, and so members gather and add up themselves.
"""

from typing import Final

import tensorflow as tf

BLOCK: Final = 256


def encode(row: tf.Tensor) -> tf.Tensor:
  """Rounds a float32 vector; returns its int32 words.

  `n` numbers make `65 * ceil(n / 256)` words. A block with a NaN or an infinity
  comes back as NaN.

  >>> words = encode(tf.constant([127.0, -3.0, 0.4]))
  >>> words.dtype.name, words.shape.as_list()
  ('int32', [65])
  >>> decode(words, 3).numpy().tolist()
  [127.0, -3.0, 0.0]
  """
  size = row.shape.num_elements()
  blocks = tf.reshape(tf.pad(row, [[0, -size % BLOCK]]), [-1, BLOCK])
  largest = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True)
  is_finite = tf.reduce_all(tf.math.is_finite(blocks), axis=1, keepdims=True)
  scales = tf.where(is_finite, largest / 127.0, float("nan"))
  # A block of NaN would have no defined integers.
  rounded = tf.round(tf.math.divide_no_nan(blocks, scales))
  whole = tf.cast(tf.where(is_finite, rounded, 0.0), tf.int8)
  words = tf.bitcast(tf.reshape(whole, [-1, 4]), tf.int32)
  return tf.concat([words, tf.bitcast(scales[:, 0], tf.int32)], axis=0)


def decode(words: tf.Tensor, size: int) -> tf.Tensor:
  """Returns the `size` numbers that `encode` has rounded."""
  count = -(-size // BLOCK)
  whole, scales = tf.split(words, [count * BLOCK // 4, count])
  blocks = tf.reshape(tf.bitcast(whole, tf.int8), [count, BLOCK])
  wide = tf.cast(blocks, tf.float32) * tf.bitcast(scales, tf.float32)[:, None]
  return tf.reshape(wide, [-1])[:size]
