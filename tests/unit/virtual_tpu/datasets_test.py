"""A dataset cut for replicas, against the rows that went in."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import virtual_tpu
from tf_cross_shard._src.virtual_tpu import datasets

N = 3
Dataset = tf.data.Dataset


class Pair(NamedTuple):
  """A structure of the user's."""

  first: Any
  second: Any


def _parts(value: Any) -> list[Any]:
  return testbed.per_replica_results(testbed.virtual(N), value)


def _split(dataset: Any, strategy: Any = None, options: Any = None) -> Any:
  strategy = strategy or testbed.virtual(N)
  return strategy.experimental_distribute_dataset(dataset, options)


def _deal(dataset: Any, strategy: Any = None, options: Any = None) -> Any:
  strategy = strategy or testbed.virtual(N)

  def make(context: tf.distribute.InputContext) -> Any:
    assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
    return dataset

  return strategy.distribute_datasets_from_function(make, options)


both = pytest.mark.parametrize("distribute", [_split, _deal])


def _weighted_sum(batch: Any) -> tf.Tensor:
  """Returns a sum that changes if the parts of replicas are swapped."""

  def replica_fn(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(x, tf.int32)) * (testbed.replica_id() + 1)

  own = testbed.virtual(N).run(replica_fn, (batch,))
  return testbed.virtual(N).reduce("SUM", own, axis=None)


class TestSplit:
  @pytest.mark.parametrize(
    ("batch", "drop_remainder"), [(1, True), (5, False), (100, False)]
  )
  def test_every_row_reaches_one_replica_in_order(
    self, batch: int, drop_remainder: bool
  ) -> None:
    x = np.arange(28).reshape(14, 2)
    data = Dataset.from_tensor_slices(x).batch(batch, drop_remainder)
    batches = list(_split(data))
    assert len(batches) == len(list(data)) > 0
    for whole, cut in zip(data, batches, strict=True):
      parts = _parts(cut)
      assert [row for part in parts for row in part] == whole.numpy().tolist()
      sizes = [len(part) for part in parts]
      assert sizes == sorted(sizes, reverse=True)
      assert sizes[0] - sizes[-1] in (0, 1)

  def test_structures_stay(self) -> None:
    tensors = {"pair": Pair(tf.range(6), (list("abc"),)), "none": None}
    [element] = list(_split(Dataset.from_tensors(tensors)))
    assert isinstance(element["pair"], Pair)
    assert _parts(element["pair"].first) == [[0, 1], [2, 3], [4, 5]]
    assert _parts(element["pair"].second[0]) == [[b"a"], [b"b"], [b"c"]]
    assert element["none"] is None
    # tf.data hands over a tuple of one unlike its only item.
    [element] = list(_split(Dataset.from_tensors((tf.range(3),))))
    assert isinstance(element, tuple)
    assert _parts(element[0]) == [[0], [1], [2]]

  def test_unknown_rank(self) -> None:
    rows = np.arange(6).reshape(3, 2)
    unknown = Dataset.from_generator(lambda: iter([rows]), tf.int64)
    assert unknown.element_spec.shape.rank is None
    [element] = list(_split(unknown))
    assert _parts(element) == [[[0, 1]], [[2, 3]], [[4, 5]]]

  def test_a_smaller_last_batch_runs_if_it_is_even(self) -> None:
    data = _split(Dataset.range(9).batch(6))
    assert [int(_weighted_sum(batch)) for batch in data] == [
      1 * (0 + 1) + 2 * (2 + 3) + 3 * (4 + 5),
      1 * 6 + 2 * 7 + 3 * 8,
    ]
    data = _split(Dataset.range(4).batch(4))
    with pytest.raises(ValueError, match=r"same shape; got.*drop_remainder"):
      _weighted_sum(next(iter(data)))


class TestDeal:
  def test_elements_in_turn(self) -> None:
    data = _deal(Dataset.range(14).shuffle(1).batch(2))
    assert [_parts(batch) for batch in data] == [
      [[0, 1], [2, 3], [4, 5]],
      [[6, 7], [8, 9], [10, 11]],
    ]
    assert data.cardinality == 2  # The seventh is left out.

  def test_structures_and_shapes_of_their_own(self) -> None:
    rows = Dataset.range(1, 4).map(lambda i: Pair({"rows": tf.range(i)}, (i,)))
    data = _deal(rows)
    [found] = list(data)
    assert _parts(found.first["rows"]) == [[0], [0, 1], [0, 1, 2]]
    assert _parts(found.second[0]) == [1, 2, 3]
    assert isinstance(data.element_spec, Pair)


class TestBoth:
  @both
  def test_type_is_tensorflows(self, distribute: Any) -> None:
    rows = Dataset.from_tensor_slices({"x": tf.zeros([6, 2]), "y": tf.zeros(6)})
    data = rows.batch(N)
    ours = distribute(data)
    expected = distribute(data, testbed.mirrored(N)).element_spec
    assert isinstance(ours, tf.distribute.DistributedDataset)
    assert isinstance(iter(ours), tf.data.Iterator)
    assert ours.element_spec == iter(ours).element_spec == expected

  def test_cardinality_is_tensorflows(self) -> None:
    data = Dataset.range(14).batch(6)
    for each in (data, data.repeat(), data.filter(lambda x: x[0] > 0)):
      expected = _split(each, testbed.mirrored(N)).cardinality
      assert _split(each).cardinality == expected

  @both
  def test_of_one_replica_it_is_the_dataset(self, distribute: Any) -> None:
    one = testbed.virtual(1)
    data = distribute(Dataset.range(4).batch(2, True), one)
    assert [x.numpy().tolist() for x in data] == [[0, 1], [2, 3]]
    assert data.element_spec == tf.TensorSpec([2], tf.int64)


class TestInFunctions:
  def test_one_trace_for_all_datasets_of_a_type(self) -> None:
    traces = []

    @tf.function
    def epoch(data: Any) -> Any:
      traces.append(type(data))
      assert data.cardinality == tf.data.UNKNOWN_CARDINALITY
      total = tf.constant(0)
      for batch in data:
        total += _weighted_sum(batch)
      return total

    for start in (0, 5):
      data = _split(Dataset.range(start, start + 6).batch(3, True))
      assert int(epoch(data)) == 12 * start + 18 + 16
    assert traces == [datasets.SplitDataset]


class TestErrors:
  def test_no_rows(self) -> None:
    words = r"component 'y' has no rows.*dataset\.batch\(global_batch_size\)"
    with pytest.raises(ValueError, match=words):
      _split(Dataset.from_tensors({"x": np.zeros([3]), "y": 1.0}))

  @both
  def test_what_cannot_be_distributed(self, distribute: Any) -> None:
    value = tf.sparse.from_dense([[1.0, 0.0]])
    words = r"'y/0' is a SparseTensorSpec; .*tf\.sparse\.to_dense"
    with pytest.raises(ValueError, match=words):
      distribute(Dataset.from_tensors({"x": [1.0], "y": (value,)}))
    mode = tf.distribute.InputReplicationMode.PER_REPLICA
    with pytest.raises(NotImplementedError, match=r"Use PER_WORKER"):
      distribute(
        Dataset.range(3).batch(3),
        options=tf.distribute.InputOptions(experimental_replication_mode=mode),
      )

  def test_replicas_do_not_read(self) -> None:
    iterator = iter(_split(Dataset.range(3).batch(3)))
    with pytest.raises(virtual_tpu.TPUCompileError, match="read datasets out"):
      testbed.virtual(N).run(iterator.get_next)
    assert _parts(next(iterator)) == [[0], [1], [2]]
