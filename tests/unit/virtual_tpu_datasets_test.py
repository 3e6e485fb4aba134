"""A dataset cut for replicas, against the rows that went in."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import virtual_tpu
from tf_cross_shard.virtual_tpu import datasets

N = 3
Dataset = tf.data.Dataset


class Pair(NamedTuple):
  """A structure of the user's."""

  first: Any
  second: Any


def _strategy() -> virtual_tpu.VirtualTPUStrategy:
  strategy = testbed.virtual(N)
  assert strategy.num_replicas_in_sync == N
  return strategy


def _parts(value: Any) -> list[Any]:
  return testbed.per_replica_results(_strategy(), value)


def _options(options: dict[str, Any]) -> tf.distribute.InputOptions | None:
  return tf.distribute.InputOptions(**options) if options else None


def _split(dataset: Any, strategy: Any = None, **options: Any) -> Any:
  strategy = strategy or _strategy()
  return strategy.experimental_distribute_dataset(dataset, _options(options))


def _deal(dataset: Any, strategy: Any = None, **options: Any) -> Any:
  strategy = strategy or _strategy()

  def make(context: tf.distribute.InputContext) -> Any:
    assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
    return dataset

  return strategy.distribute_datasets_from_function(make, _options(options))


both = pytest.mark.parametrize("distribute", [_split, _deal])


def _weighted_sum(batch: Any) -> tf.Tensor:
  """Of one-dimensional integers: differs if replicas' parts are swapped."""

  def replica_fn(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(x, tf.int32)) * (testbed.replica_id() + 1)

  own = _strategy().run(replica_fn, (batch,))
  return _strategy().reduce("SUM", own, axis=None)


class TestSplit:
  @pytest.mark.parametrize(
    ("batch", "drop_remainder"),
    [(1, True), (5, False), (14, True), (100, False)],
  )
  def test_every_row_reaches_one_replica_in_order(
    self, batch: int, drop_remainder: bool
  ) -> None:
    x = np.arange(28).reshape(14, 2)
    data = Dataset.from_tensor_slices(x).batch(batch, drop_remainder)
    found = list(_split(data))
    assert len(found) == len(list(data)) > 0
    for whole, cut in zip(data, found, strict=True):
      parts = _parts(cut)
      assert [row for part in parts for row in part] == whole.numpy().tolist()
      sizes = [len(part) for part in parts]
      assert sizes == sorted(sizes, reverse=True)
      assert sizes[0] - sizes[-1] in (0, 1)

  def test_structures_stay(self) -> None:
    tensors = {"pair": Pair(tf.range(6), (tf.range(6, 12),)), "none": None}
    [found] = list(_split(Dataset.from_tensors(tensors)))
    assert isinstance(found["pair"], Pair)
    assert _parts(found["pair"].first) == [[0, 1], [2, 3], [4, 5]]
    assert _parts(found["pair"].second[0]) == [[6, 7], [8, 9], [10, 11]]
    assert found["none"] is None
    # tf.data hands over a tuple of one unlike its only item.
    [found] = list(_split(Dataset.from_tensors((tf.range(3),))))
    assert isinstance(found, tuple)
    assert _parts(found[0]) == [[0], [1], [2]]

  def test_strings_and_unknown_ranks(self) -> None:
    words = Dataset.from_tensor_slices(list("abc")).batch(3)
    [found] = list(_split(words))
    assert _parts(found) == [[b"a"], [b"b"], [b"c"]]
    unknown = Dataset.from_generator(
      lambda: iter([np.arange(6).reshape(3, 2)]), tf.int64
    )
    assert unknown.element_spec.shape.rank is None
    [found] = list(_split(unknown))
    assert _parts(found) == [[[0, 1]], [[2, 3]], [[4, 5]]]

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
    data = _deal(Dataset.range(12).shuffle(1).batch(2))
    assert [_parts(batch) for batch in data] == [
      [[0, 1], [2, 3], [4, 5]],
      [[6, 7], [8, 9], [10, 11]],
    ]

  @pytest.mark.parametrize("count", [2, 5])
  def test_an_incomplete_round_is_left_out(self, count: int) -> None:
    data = _deal(Dataset.range(count).batch(1))
    assert len(list(data)) == data.cardinality == count // N

  def test_structures_and_shapes_of_their_own(self) -> None:
    rows = Dataset.range(1, 4).map(
      lambda i: Pair({"rows": tf.range(i)}, (i, None))
    )
    data = _deal(rows)
    [found] = list(data)
    assert _parts(found.first["rows"]) == [[0], [0, 1], [0, 1, 2]]
    assert _parts(found.second[0]) == [1, 2, 3]
    assert found.second[1] is None
    assert isinstance(data.element_spec, Pair)


class TestBoth:
  @both
  def test_type_is_tensorflows(self, distribute: Any) -> None:
    rows = Dataset.from_tensor_slices({"x": tf.zeros([6, 2]), "y": tf.zeros(6)})
    data = rows.batch(N)
    mine = distribute(data)
    theirs = distribute(data, testbed.mirrored(N))
    assert isinstance(mine, tf.distribute.DistributedDataset)
    assert isinstance(iter(mine), tf.distribute.DistributedIterator)
    assert mine.element_spec == iter(mine).element_spec == theirs.element_spec

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

  def test_each_iterator_starts_anew(self) -> None:
    data = _split(Dataset.range(6).batch(3))
    first, second = iter(data), iter(data)
    assert _parts(next(first)) == _parts(next(second)) == [[0], [1], [2]]
    assert iter(first) is first
    assert _parts(first.get_next()) == [[3], [4], [5]]
    with pytest.raises(StopIteration):
      next(first)
    with pytest.raises(tf.errors.OutOfRangeError):
      first.get_next()
    assert not first.get_next_as_optional().has_value()
    assert second.get_next_as_optional().has_value()


class TestInFunctions:
  def test_one_trace_for_all_iterators_of_a_type(self) -> None:
    traces = []

    @tf.function(reduce_retracing=True)
    def step(iterator: Any) -> Any:
      element = next(iterator)
      traces.append((type(iterator), len(element.values)))
      return element.values[0]

    for count, rows in ((2, 4), (3, 6), (3, 9), (3, 12)):
      data = Dataset.range(rows).batch(rows, drop_remainder=True)
      iterator = iter(datasets.split(data, count))
      assert step(iterator).numpy().tolist() == list(range(rows // count))
      with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)
    # The third serves all numbers of rows.
    assert traces == [(datasets.SplitIterator, n) for n in (2, 3, 3)]

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

  def test_loop_over_an_iterator_with_a_break(self) -> None:
    @tf.function
    def some(iterator: Any) -> Any:
      total = tf.constant(0)
      for batch in iterator:
        total += _weighted_sum(batch)
        if total > 20:
          break
      return total

    iterator = iter(_split(Dataset.range(9).batch(3, drop_remainder=True)))
    assert [int(some(iterator)) for _ in range(3)] == [8 + 26, 44, 0]


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
    data = _split(Dataset.range(3).batch(3))
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset.*a SplitDataset"):
      distribute(data)
    mode = tf.distribute.InputReplicationMode.PER_REPLICA
    with pytest.raises(NotImplementedError, match=r"Leave it at PER_WORKER"):
      distribute(Dataset.range(3).batch(3), experimental_replication_mode=mode)

  def test_replicas_do_not_read(self) -> None:
    iterator = iter(_split(Dataset.range(3).batch(3)))
    for read in (iterator.get_next, iterator.get_next_as_optional):
      for run in (lambda fn: fn(), lambda fn: tf.function(fn)()):
        with pytest.raises(ValueError, match=r"args=\(next\(iterator\),\)"):
          run(lambda read=read: _strategy().run(read))
    assert _parts(next(iterator)) == [[0], [1], [2]]


def _model(strategy: Any, **options: Any) -> tuple[Any, list[str]]:
  """A model, and a list that grows with each trace of its step."""
  tf.keras.utils.set_random_seed(1)
  traces = []

  class Model(tf.keras.Sequential):
    def train_step(self, data: Any) -> Any:
      traces.append("train")
      return super().train_step(data)

  with strategy.scope():
    model = Model([tf.keras.Input((5,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.05), "mse", **options)
  return model, traces


def test_fit_learns_what_plain_keras_learns() -> None:
  rng = np.random.default_rng(3)
  x, y = rng.normal(size=(36, 5)), rng.normal(size=(36, 1))
  rows = Dataset.from_tensor_slices((x.astype("float32"), y))
  whole, parts = rows.batch(12, True), rows.batch(4, True)

  def fit(strategy: Any, data: Any, steps: int) -> tuple[Any, Any]:
    model, traces = _model(strategy, steps_per_execution=steps)
    history = model.fit(data, epochs=2, validation_data=whole, verbose=0)
    count = len(traces)
    assert count > 0
    weights = [testbed.copies(each) for each in model.weights]
    model.fit(data, verbose=0)
    assert len(traces) == count, "an epoch more is no trace more"
    return weights, history.history

  expected, losses = fit(tf.distribute.get_strategy(), whole, 1)
  assert set(losses) == {"loss", "val_loss"}
  # Three steps an epoch: the last execution of two is cut short.
  for data, steps in ((whole, 2), (_deal(parts), 1)):
    weights, history = fit(_strategy(), data, steps)
    for name, values in losses.items():
      np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for held, [plain] in zip(weights, expected, strict=True):
      assert len(held) == N
      for copy in held:
        np.testing.assert_allclose(copy, plain, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
