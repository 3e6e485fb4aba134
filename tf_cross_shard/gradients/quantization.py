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
  """Rounds float32 vectors `[..., n]`; returns their int32 words.

  `n` numbers make `65 * ceil(n / 256)` words. A block with a NaN or an infinity
  comes back as NaN.

  >>> words = encode(tf.constant([127.0, -3.0, 0.4]))
  >>> words.dtype.name, words.shape.as_list()
  ('int32', [65])
  >>> decode(words, 3).numpy().tolist()
  [127.0, -3.0, 0.0]
  """
  *rows, size = row.shape
  if missing := -size % BLOCK:
    row = tf.pad(row, [*([[0, 0]] * len(rows)), [0, missing]])
  blocks = tf.reshape(row, [*rows, -1, BLOCK])
  largest = tf.reduce_max(tf.abs(blocks), axis=-1, keepdims=True)
  is_finite = tf.reduce_all(tf.math.is_finite(blocks), axis=-1, keepdims=True)
  # Not `/`, of which graphs make a product that rounds otherwise.
  scales = tf.math.divide_no_nan(largest, 127.0)
  # The largest floats would come back as infinity.
  is_finite &= tf.math.is_finite(127.0 * scales)
  scales = tf.where(is_finite, scales, float("nan"))
  # Whatever integers a block of NaN has, its scale makes NaN of them again.
  whole = tf.cast(tf.round(tf.math.divide_no_nan(blocks, scales)), tf.int8)
  words = tf.bitcast(tf.reshape(whole, [*rows, -1, 4]), tf.int32)
  return tf.concat([words, tf.bitcast(scales[..., 0], tf.int32)], axis=-1)


def decode(words: tf.Tensor, size: int) -> tf.Tensor:
  """Returns the `size` numbers of each vector that `encode` has rounded."""
  rows, count = words.shape[:-1], -(-size // BLOCK)
  whole, scales = tf.split(words, [count * BLOCK // 4, count], axis=-1)
  blocks = tf.reshape(tf.bitcast(whole, tf.int8), [*rows, count, BLOCK])
  scales = tf.bitcast(scales, tf.float32)[..., tf.newaxis]
  wide = tf.reshape(tf.cast(blocks, tf.float32) * scales, [*rows, -1])
  return wide[..., :size]
