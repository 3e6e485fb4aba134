"""How arguments reach the replicas, and results come back."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import virtual_tpu
from tf_cross_shard.virtual_tpu import run_arguments

N = 3


def _arguments(*args: Any, **kwargs: Any) -> run_arguments.RunArguments:
  return run_arguments.RunArguments(args, kwargs, N)


def _marks() -> Any:
  return testbed.per_replica(testbed.virtual(N), [1.0, 2.0, 4.0])


class TestRunArguments:
  def test_inputs_and_parts_of_the_program(self) -> None:
    nest = {"a": np.ones([2]), "b": None}
    given = _arguments(_marks(), 2, nest, k="text", t=tf.constant(5))
    assert [
      [float(tf.reduce_sum(x)) for x in each] for each in given.tensors
    ] == [[1.0, 2.0, 4.0], [2.0] * N, [5.0] * N]
    assert given.specs == [
      tf.TensorSpec([], tf.float32),
      tf.TensorSpec([2], tf.float64),
      tf.TensorSpec([], tf.int32),
    ]
    args, kwargs = given.bind([each[1] for each in given.tensors])
    assert float(args[0]) == 2.0
    assert args[1] == 2
    assert args[2]["a"].numpy().tolist() == [1.0, 1.0]
    assert args[2]["b"] is None
    assert kwargs["k"] == "text"
    assert int(kwargs["t"]) == 5

  def test_partly_known_shape(self) -> None:
    rows = [np.ones([i + 1, 2], np.float32) for i in range(N)]
    given = _arguments(testbed.per_replica(testbed.virtual(N), rows))
    assert given.specs[0].shape.as_list() == [None, 2]
    assert [each.shape[0] for each in given.tensors[0]] == [1, 2, 3]

  @pytest.mark.parametrize(
    ("one", "other"),
    [
      (1, 1.0),
      (1, True),
      (1, 2),
      (None, ""),
      ([1], (1,)),
      ({"a": 1}, {"b": 1}),
      ([1, np.ones([2])], [np.ones([2]), 1]),
      (np.ones([2]), np.ones([3])),
      (np.ones([2]), np.ones([2], np.float32)),
      (object(), object()),
    ],
  )
  def test_keys_differ(self, one: Any, other: Any) -> None:
    assert _arguments(one).key() == _arguments(one).key()
    assert _arguments(one).key() != _arguments(other).key()

  def test_keys_of_equal_kinds(self) -> None:
    one, other = (
      _arguments(_marks(), 2, a=np.ones([2])).key(),
      _arguments(np.float32(3), 2, a=np.zeros([2])).key(),
    )
    assert one == other
    assert hash(one) == hash(other)

  def test_another_number_of_replicas(self) -> None:
    two = testbed.per_replica(testbed.virtual(2), [1.0, 2.0])
    with pytest.raises(ValueError, match=r"for 2 replicas.*has 3"):
      _arguments(two)

  @pytest.mark.parametrize("kind", ["RaggedTensor", "SparseTensor"])
  def test_sparse_and_ragged(self, kind: str) -> None:
    value = {
      "RaggedTensor": lambda: tf.ragged.constant([[1.0], []]),
      "SparseTensor": lambda: tf.sparse.from_dense([1.0, 0.0]),
    }[kind]()
    strategy = testbed.virtual(N)
    distributed = strategy.experimental_distribute_values_from_function(
      lambda context: value
    )
    for argument in (value, distributed):
      with pytest.raises(virtual_tpu.TPUCompileError, match=f"got a {kind}"):
        _arguments(argument)


def test_packed_results() -> None:
  structure = {"a": (1, None), "b": [2]}
  outputs = [tuple(tf.constant(10 * k + i) for i in range(N)) for k in range(2)]
  packed = run_arguments.pack_results(structure, outputs)
  results = testbed.per_replica_results
  assert packed["a"][1] is None
  assert results(testbed.virtual(N), packed["a"][0]) == [0, 1, 2]
  assert results(testbed.virtual(N), packed["b"][0]) == [10, 11, 12]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
