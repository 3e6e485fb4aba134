"""Lines are alike where workers do the same, and differ where they do not."""

from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard.multi_worker import consistency


def _dense(name: str, units: int = 2, dtype: str = "float32") -> list[Any]:
  """The weights of a layer of that name."""
  layer = tf.keras.layers.Dense(units, name=name, dtype=dtype)
  layer.build((None, 3))
  return list(layer.trainable_variables)


def test_settings_show_their_values() -> None:
  lines = consistency.settings(
    group_assignment=[[0, 2], [1, 3]], wire_dtype=None
  )
  assert lines == ["group_assignment: [[0, 2], [1, 3]]", "wire_dtype: None"]
  assert consistency.settings() == []


def test_variables_show_name_dtype_shape_and_number() -> None:
  assert consistency.variables(_dense("top", dtype="float64")) == [
    "variable 0: top/kernel float64 [3, 2]",
    "variable 1: top/bias float64 [2]",
    "variables: 2",
  ]
  assert consistency.variables([]) == ["variables: 0"]


def test_variables_of_tensorflow_and_of_keras() -> None:
  mine = tf.Variable(tf.zeros([2, 1]), name="weight")
  keras = tf.keras.Variable(tf.zeros([2, 1]), name="weight")
  assert consistency.variables([mine]) == consistency.variables([keras])


@pytest.mark.parametrize(
  "names", [("dense", "dense_1"), ("dense_6", "dense_9")]
)
def test_how_many_there_were_before_does_not_matter(
  names: tuple[str, str],
) -> None:
  weights = [*_dense(names[0]), *_dense(names[1], units=5)]
  assert consistency.variables(weights) == [
    "variable 0: dense/kernel float32 [3, 2]",
    "variable 1: dense/bias float32 [2]",
    "variable 2: dense_1/kernel float32 [3, 5]",
    "variable 3: dense_1/bias float32 [5]",
    "variables: 4",
  ]


def test_the_order_does_matter() -> None:
  first, second = _dense("dense_4"), _dense("dense_7")
  one = consistency.variables([*first, *second])
  other = consistency.variables([*second, *first])
  assert one != other
  assert sorted(name.split(": ")[-1] for name in one) == sorted(
    name.split(": ")[-1] for name in other
  )


def test_gradients_show_their_kind() -> None:
  rows = tf.IndexedSlices(tf.zeros([1, 2], tf.bfloat16), tf.constant([0]))
  grads = [tf.constant([1.0]), None, rows, tf.constant([1.0], tf.float64)]
  assert consistency.gradients(grads) == [
    "gradient 0: float32",
    "gradient 1: None",
    "gradient 2: bfloat16 rows",
    "gradient 3: float64",
  ]


def test_gradients_of_other_shapes_are_alike() -> None:
  """The number of rows may differ; the variables' shapes are compared."""
  one = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]))
  two = tf.IndexedSlices(tf.zeros([2, 2]), tf.constant([0, 1]))
  assert consistency.gradients([one]) == consistency.gradients([two])


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
