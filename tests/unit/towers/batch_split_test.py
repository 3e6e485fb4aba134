"""Nests of tensors are divided along axis 0, and concatenated again."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.towers_bed import FOUR
from tf_cross_shard import ModeKeys, TowerSpec, replicate_model_fn


def _split(features: Any, count: int) -> tuple[list[Any], Any]:
  """Returns the features of each tower, and their concatenation."""
  parts = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    parts.append(features)
    return TowerSpec(mode, predictions=features)

  replicated = replicate_model_fn(model_fn, devices=FOUR[:count])
  whole = replicated(features, mode=ModeKeys.PREDICT).predictions
  assert len(parts) == count
  return parts, whole


def _lists(value: Any) -> Any:
  if isinstance(value, tf.RaggedTensor):
    return value.to_list()
  if isinstance(value, tf.SparseTensor):
    value = tf.sparse.to_dense(value)
  return value.numpy().tolist()


@pytest.mark.parametrize(("count", "length"), [(1, 2), (2, 4), (3, 9)])
def test_concatenate_reverses_split(count: int, length: int) -> None:
  rng = np.random.default_rng(count)
  dense = rng.integers(0, 3, size=(length, 3))
  lengths = rng.integers(0, 3, size=length)
  tree = {
    "dense": tf.constant(dense),
    "sparse": tf.sparse.from_dense(dense),
    "ragged": (
      tf.RaggedTensor.from_row_lengths(tf.range(lengths.sum()), lengths),
      None,
    ),
    "texts": tf.constant([str(i) for i in range(length)]),
    "array": dense,
  }
  parts, whole = _split(tree, count)
  for i, part in enumerate(parts):
    rows = slice(i * length // count, (i + 1) * length // count)
    assert _lists(part["dense"]) == dense[rows].tolist()
    assert _lists(part["sparse"]) == dense[rows].tolist()
    assert _lists(part["array"]) == dense[rows].tolist()
    assert _lists(part["texts"]) == [
      str(n).encode() for n in range(length)[rows]
    ]
    assert [len(row) for row in _lists(part["ragged"][0])] == (
      lengths[rows].tolist()
    )
    assert part["ragged"][1] is None
  for name in ("dense", "sparse", "texts"):
    assert _lists(whole[name]) == _lists(tree[name])
  assert _lists(whole["ragged"][0]) == _lists(tree["ragged"][0])
  assert whole["ragged"][1] is None


@pytest.mark.parametrize(
  ("tree", "first", "second"),
  [
    ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0], [2.0, 3.0]),
    ([[1, 2], [3, 4]], [[1, 2]], [[3, 4]]),
    ([[], []], [[]], [[]]),
    (["a", b"b"], [b"a"], [b"b"]),
    ([np.float32(1), True], [1.0], [1.0]),
    ([], [], []),  # A nest without tensors.
    (
      {"x": [1, 2], "y": ([[1, 2], [3, 4]], {"z": [5, 6]})},
      {"x": [1], "y": ([[1, 2]], {"z": [5]})},
      {"x": [2], "y": ([[3, 4]], {"z": [6]})},
    ),
    # A list of tensors is a nest.
    ([np.array([1, 2]), [3, 4]], [[1], [3]], [[2], [4]]),
  ],
)
def test_lists_of_numbers_are_tensors(
  tree: Any, first: Any, second: Any
) -> None:
  parts = [tf.nest.map_structure(_lists, part) for part in _split(tree, 2)[0]]
  assert parts == [first, second]


@pytest.mark.parametrize("is_value", [False, True])
def test_rows_of_a_sparse_tensor(is_value: bool) -> None:
  """A part without values keeps its shape; a value of a session is a tensor."""
  indices, values = [[0, 0], [1, 0], [1, 1]], [1.0, 2.0, 3.0]
  kind = tf.compat.v1.SparseTensorValue if is_value else tf.SparseTensor
  (first, second), _ = _split({"x": kind(indices, values, [4, 3])}, 2)
  assert _lists(first["x"]) == [[1.0, 0.0, 0.0], [2.0, 3.0, 0.0]]
  assert _lists(second["x"]) == [[0.0] * 3] * 2
  with pytest.raises(ValueError, match="got SparseTensor with shape"):
    _split(kind(indices, values, [3, 3]), 2)


@pytest.mark.parametrize(
  ("tree", "words"),
  [
    (lambda: tf.ones([3]), "shape (3,). Change"),
    (lambda: np.ones([0, 2]), "shape (0, 2). Change"),
    (lambda: {"a": 3}, "with shape (). Change"),
    (lambda: {"a": [1, 2, 3]}, "with shape (3,). Change"),
    (lambda: [{"a": 3}, {"a": 4}], "with shape (). Change"),
    (lambda: tf.sparse.eye(3), "SparseTensor with shape (3, 3)"),
    (lambda: tf.ragged.constant([[1], [], [2]]), "RaggedTensor"),
  ],
)
def test_batches_that_do_not_divide(tree: Any, words: str) -> None:
  with pytest.raises(ValueError, match="`features` must ") as caught:
    _split(tree(), 2)
  assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["tensor", "sparse", "ragged"])
def test_lengths_known_when_the_program_runs(kind: str) -> None:
  spec, make = {
    "tensor": (tf.TensorSpec([None]), tf.ones),
    "sparse": (
      tf.SparseTensorSpec([None, 1]),
      lambda shape: tf.sparse.from_dense(tf.ones([*shape, 1])),
    ),
    "ragged": (
      tf.RaggedTensorSpec([None, None], tf.float32),
      lambda shape: tf.RaggedTensor.from_tensor(tf.ones([*shape, 1])),
    ),
  }[kind]

  @tf.function(input_signature=[spec])
  def there_and_back(x: Any) -> Any:
    return _split(x, 3)[1]

  there_and_back(make([6]))
  for length in (0, 2, 4):
    with pytest.raises(tf.errors.InvalidArgumentError, match="must divide"):
      there_and_back(make([length]))
