"""Tests the lines of text that workers compare.

multi_worker_errors_test.py tests with real workers that they compare them.
"""

from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.workers import agreement


def _dense(name: str, units: int = 2, dtype: str = "float32") -> list[Any]:
  layer = tf.keras.layers.Dense(units, name=name, dtype=dtype)
  layer.build((None, 3))
  return list(layer.trainable_variables)


def test_lines_of_settings_and_variables() -> None:
  lines = agreement.setting_lines(
    group_assignment=[[0, 2], [1, 3]], wire_dtype=None
  )
  assert lines == ["group_assignment: [[0, 2], [1, 3]]", "wire_dtype: None"]
  assert agreement.variable_lines(_dense("top", dtype="float64")) == [
    "variable 0: top/kernel float64 [3, 2]",
    "variable 1: top/bias float64 [2]",
    "variables: 2",
  ]
  mine = tf.Variable(tf.zeros([2, 1]), name="weight")
  keras = tf.keras.Variable(tf.zeros([2, 1]), name="weight")
  assert agreement.variable_lines([mine]) == agreement.variable_lines([keras])


@pytest.mark.parametrize(
  "names", [("dense", "dense_1"), ("dense_6", "dense_9")]
)
def test_variable_lines_ignore_automatic_layer_numbers(
  names: tuple[str, str],
) -> None:
  """The order of layers still matters."""
  first, second = _dense(names[0]), _dense(names[1], units=5)
  lines = agreement.variable_lines([*first, *second])
  assert lines == [
    "variable 0: dense/kernel float32 [3, 2]",
    "variable 1: dense/bias float32 [2]",
    "variable 2: dense_1/kernel float32 [3, 5]",
    "variable 3: dense_1/bias float32 [5]",
    "variables: 4",
  ]
  assert lines != agreement.variable_lines([*second, *first])


def test_only_automatic_names_are_renumbered() -> None:
  """Names that Keras derived from a class are renumbered, in both spellings."""
  for name, expected in (
    ("head_5/dense_3/kernel", "head_5/dense/kernel"),
    ("batch_normalization_4/gamma", "batch_normalization/gamma"),
    (
      "bidirectional_2/forward_lstm_7/kernel",
      "bidirectional/forward_lstm/kernel",
    ),
    (
      "seed_generator_9/seed_generator_state",
      "seed_generator/seed_generator_state",
    ),
    ("adam_2/iteration", "adam/iteration"),
    ("variable_8", "variable"),
    ("block_2_1/w", "block_2_1/w"),
  ):
    assert variables_lib.renumbered([name]) == [expected]


def test_gradients_show_their_kind_and_no_shape() -> None:
  """The number of rows may differ; the variables' shapes are compared."""
  for rows in (1, 2):
    values = tf.zeros([rows, 2], tf.bfloat16)
    sparse = tf.IndexedSlices(values, tf.range(rows))
    grads = [tf.ones([1]), None, sparse, tf.ones([1], tf.float64)]
    assert agreement.gradient_lines(grads) == [
      "gradient 0: float32",
      "gradient 1: None",
      "gradient 2: bfloat16 rows",
      "gradient 3: float64",
    ]
