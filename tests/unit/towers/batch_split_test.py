"""Nests of tensors cut into parts along axis 0, and joined again."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard._src.towers import batch_split as batch


def _lists(value: Any) -> Any:
  if isinstance(value, tf.RaggedTensor):
    return value.to_list()
  if isinstance(value, tf.SparseTensor):
    value = tf.sparse.to_dense(value)
  return value.numpy().tolist()


@pytest.mark.parametrize(("count", "length"), [(1, 2), (2, 4), (3, 9)])
def test_there_and_back(count: int, length: int) -> None:
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
  parts = batch.split("tree", tree, count)
  assert len(parts) == count
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
  whole = batch.concatenate(parts)
  for name in ("dense", "sparse", "texts"):
    assert _lists(whole[name]) == _lists(tree[name])
  assert _lists(whole["ragged"][0]) == _lists(tree["ragged"][0])
  assert whole["ragged"][1] is None


@pytest.mark.parametrize(
  ("tree", "words"),
  [
    (lambda: tf.ones([3]), "shape (3,). Change"),
    (lambda: np.ones([0, 2]), "shape (0, 2). Change"),
    (lambda: {"a": 3}, "with shape (). Change"),
    (lambda: tf.sparse.eye(3), "SparseTensor with shape (3, 3)"),
    (lambda: tf.ragged.constant([[1], [], [2]]), "RaggedTensor"),
  ],
)
def test_batches_that_do_not_divide(tree: Any, words: str) -> None:
  with pytest.raises(ValueError, match="`labels` must ") as caught:
    batch.split("labels", tree(), 2)
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
    parts = batch.split("x", x, 3)
    return batch.concatenate([parts[2], parts[0], parts[1]])

  there_and_back(make([6]))
  for length in (0, 2, 4):
    with pytest.raises(tf.errors.InvalidArgumentError, match="must divide"):
      there_and_back(make([length]))
