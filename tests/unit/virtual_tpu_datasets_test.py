"""A dataset cut for replicas, against the rows that went in."""

from collections.abc import Callable
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


def _distribute(dataset: Any, **options: Any) -> Any:
  return _strategy().experimental_distribute_dataset(
    dataset, tf.distribute.InputOptions(**options) if options else None
  )


def _deal(dataset: Any, **options: Any) -> Any:
  return _strategy().distribute_datasets_from_function(
    lambda context: dataset,
    tf.distribute.InputOptions(**options) if options else None,
  )


def _weighted_sum(batch: Any) -> tf.Tensor:
  """Of one-dimensional integers: differs if replicas' parts are swapped."""

  def replica_fn(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(x, tf.int32)) * (testbed.replica_id() + 1)

  own = _strategy().run(replica_fn, (batch,))
  return _strategy().reduce("SUM", own, axis=None)


class TestSplit:
  @pytest.mark.parametrize("drop_remainder", [True, False])
  @pytest.mark.parametrize("batch", [1, 3, 4, 5, 6, 14, 100])
  def test_every_row_reaches_one_replica_in_order(
    self, batch: int, drop_remainder: bool
  ) -> None:
    x = np.arange(28).reshape(14, 2)
    data = Dataset.from_tensor_slices(x).batch(batch, drop_remainder)
    found = list(_distribute(data))
    assert len(found) == len(list(data))
    for whole, cut in zip(data, found, strict=True):
      parts = _parts(cut)
      rows = [row for part in parts for row in part]
      assert rows == whole.numpy().tolist()
      sizes = [len(part) for part in parts]
      assert sizes == sorted(sizes, reverse=True)
      assert sizes[0] - sizes[-1] in (0, 1)

  def test_structures_stay(self) -> None:
    tensors = {"pair": Pair(tf.range(6), (tf.range(6, 12),)), "none": None}
    data = _distribute(Dataset.from_tensors(tensors))
    [found] = list(data)
    assert isinstance(found["pair"], Pair)
    assert _parts(found["pair"].first) == [[0, 1], [2, 3], [4, 5]]
    assert _parts(found["pair"].second[0]) == [[6, 7], [8, 9], [10, 11]]
    assert found["none"] is None

  @pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: {"x": x}])
  def test_structures_of_one_stay(self, wrap: Callable[..., Any]) -> None:
    data = _distribute(Dataset.from_tensors(wrap(tf.range(3))))
    [found] = list(data)
    assert type(found) is type(wrap(0))
    assert _parts(tf.nest.flatten(found)[0]) == [[0], [1], [2]]

  def test_strings_and_unknown_ranks(self) -> None:
    words = Dataset.from_tensor_slices(list("abc")).batch(3)
    [found] = list(_distribute(words))
    assert _parts(found) == [[b"a"], [b"b"], [b"c"]]
    unknown = Dataset.from_generator(
      lambda: iter([np.arange(6).reshape(3, 2)]), tf.int64
    )
    assert unknown.element_spec.shape.rank is None
    [found] = list(_distribute(unknown))
    assert _parts(found) == [[[0, 1]], [[2, 3]], [[4, 5]]]

  @pytest.mark.parametrize("batch", [6, 7])
  @pytest.mark.parametrize("drop_remainder", [True, False])
  def test_element_spec(self, batch: int, drop_remainder: bool) -> None:
    zeros = {"x": tf.zeros([14, 2]), "y": (tf.zeros([14]),)}
    data = Dataset.from_tensor_slices(zeros).batch(batch, drop_remainder)
    spec = _distribute(data).element_spec
    if batch == 6:
      mirrored = testbed.mirrored(N).experimental_distribute_dataset(data)
      assert spec == mirrored.element_spec
    known = [
      [3, 2, 2] if batch == 7 else [2] * N,
      [None] * N,
    ][not drop_remainder]
    specs = tf.nest.flatten(spec, expand_composites=True)
    assert [each.shape[0] for each in specs] == known * 2
    signed = tf.function(
      lambda batch: batch["x"].values[2], input_signature=[spec]
    )
    assert signed(next(iter(_distribute(data)))).shape == (2, 2)

  def test_of_one_replica_it_is_the_dataset(self) -> None:
    one = testbed.virtual(1)
    batches = Dataset.range(4).batch(2, True)
    data = one.experimental_distribute_dataset(batches)
    assert [x.numpy().tolist() for x in data] == [[0, 1], [2, 3]]
    assert data.element_spec == tf.TensorSpec([2], tf.int64)
    assert isinstance(iter(data), tf.distribute.DistributedIterator)
    # Nothing is cut, so that there need be no rows.
    numbers = one.experimental_distribute_dataset(Dataset.range(2))
    assert [int(x) for x in numbers] == [0, 1]

  def test_a_smaller_last_batch_is_shared(self) -> None:
    data = _distribute(Dataset.range(9).batch(6))
    assert [int(_weighted_sum(batch)) for batch in data] == [
      1 * (0 + 1) + 2 * (2 + 3) + 3 * (4 + 5),
      1 * 6 + 2 * 7 + 3 * 8,
    ]

  @pytest.mark.parametrize("drop_remainder", [True, False])
  def test_unequal_parts_cannot_run(self, drop_remainder: bool) -> None:
    data = _distribute(Dataset.range(4).batch(4, drop_remainder))
    with pytest.raises(ValueError, match=r"same shape; got.*drop_remainder"):
      _weighted_sum(next(iter(data)))


class TestDeal:
  def test_elements_in_turn(self) -> None:
    data = _deal(Dataset.range(12).batch(2))
    assert [_parts(batch) for batch in data] == [
      [[0, 1], [2, 3], [4, 5]],
      [[6, 7], [8, 9], [10, 11]],
    ]

  @pytest.mark.parametrize("count", [0, 2, 3, 4, 5, 6])
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

  def test_shuffled_elements_are_read_once(self) -> None:
    data = _deal(Dataset.range(9).shuffle(9).batch(1))
    seen = [row for batch in data for part in _parts(batch) for row in part]
    assert sorted(seen) == list(range(9))

  def test_element_spec_is_tensorflows(self) -> None:
    rows = Dataset.from_tensor_slices((tf.zeros([6, 2]), tf.zeros([6])))
    for drop_remainder in (True, False):
      data = rows.batch(2, drop_remainder)
      mirrored = testbed.mirrored(N).distribute_datasets_from_function(
        lambda context, data=data: data
      )
      assert _deal(data).element_spec == mirrored.element_spec

  def test_of_one_replica_it_is_the_dataset(self) -> None:
    data = testbed.virtual(1).distribute_datasets_from_function(
      lambda context: Dataset.range(2)
    )
    assert [int(x) for x in data] == [0, 1]


class TestDataset:
  @pytest.mark.parametrize(
    "data",
    [
      lambda: Dataset.range(14).batch(6),
      lambda: Dataset.range(14).batch(6).repeat(),
      lambda: Dataset.range(14).batch(6).filter(lambda x: x[0] > 0),
    ],
    ids=["finite", "infinite", "unknown"],
  )
  def test_is_what_tensorflow_asks_for(self, data: Any) -> None:
    mine = _distribute(data())
    theirs = testbed.mirrored(N).experimental_distribute_dataset(data())
    assert isinstance(mine, tf.distribute.DistributedDataset)
    assert isinstance(iter(mine), tf.distribute.DistributedIterator)
    assert iter(mine).element_spec == mine.element_spec
    assert mine.cardinality == theirs.cardinality

  def test_each_iterator_starts_anew(self) -> None:
    data = _distribute(Dataset.range(6).batch(3))
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

  @pytest.mark.parametrize("size", [0, 1, 4])
  def test_read_in_advance(self, size: int) -> None:
    options = {"experimental_per_replica_buffer_size": size}
    for make in (_distribute, _deal):
      data = make(Dataset.range(18).batch(3, True), **options)
      rows = [x for batch in data for part in _parts(batch) for x in part]
      assert rows == list(range(18))

  @pytest.mark.parametrize("make", [_distribute, _deal])
  def test_sharding_options_do_not_matter(self, make: Any) -> None:
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policy.FILE
    data = make(Dataset.range(9).batch(3, True).with_options(options))
    rows = [x for batch in data for part in _parts(batch) for x in part]
    assert rows == list(range(9))


class TestInFunctions:
  def test_one_trace_for_all_iterators(self) -> None:
    traces = []

    @tf.function
    def step(iterator: Any) -> Any:
      traces.append(type(iterator))
      return _weighted_sum(next(iterator))

    for start in (0, 1, 2):
      data = Dataset.range(start, start + 6).batch(3, drop_remainder=True)
      iterator = iter(_distribute(data))
      for first in (start, start + 3):
        assert int(step(iterator)) == 6 * first + 2 + 6
      with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)
    assert traces == [datasets.SplitIterator]

  def test_one_trace_for_all_datasets(self) -> None:
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
      data = Dataset.range(start, start + 6).batch(3, drop_remainder=True)
      assert int(epoch(_distribute(data))) == 12 * start + 18 + 16
    assert traces == [datasets.SplitDataset]

  def test_replicas_and_shapes_are_part_of_the_type(self) -> None:
    traces = []

    @tf.function(reduce_retracing=True)
    def step(iterator: Any) -> Any:
      element = next(iterator)
      traces.append(len(element.values))
      return element.values[0]

    for count, rows in ((2, 4), (3, 6), (3, 9), (3, 12), (3, 15), (2, 8)):
      data = Dataset.range(rows).batch(rows, drop_remainder=True)
      iterator = iter(datasets.split(data, count))
      assert step(iterator).numpy().tolist() == list(range(rows // count))
    # The fourth serves all numbers of rows; two replicas' have another.
    assert traces == [2, 3, 3, 2]

  def test_while_loop_over_optionals(self) -> None:
    @tf.function
    def steps(iterator: Any, most: tf.Tensor) -> Any:
      def body(step: Any, total: Any, element: Any) -> Any:
        total += _weighted_sum(element.get_value())
        step += 1
        element = tf.cond(
          step < most, iterator.get_next_as_optional, lambda: element
        )
        return step, total, element

      step, total, _ = tf.while_loop(
        lambda step, _, element: (step < most) & element.has_value(),
        body,
        (0, 0, iterator.get_next_as_optional()),
      )
      return step, total

    data = Dataset.range(12).batch(3, drop_remainder=True)
    iterator = iter(_distribute(data))
    wanted = [6 * first + 8 for first in (0, 3, 6, 9)]
    found = [[int(x) for x in steps(iterator, 3)] for _ in range(3)]
    assert found == [[3, sum(wanted[:3])], [1, wanted[3]], [0, 0]]

  def test_loop_over_a_dataset(self) -> None:
    @tf.function
    def epoch(data: Any) -> Any:
      total, count = 0, 0
      for batch in data:
        if count > 0:
          total += _weighted_sum(batch)
        count += 1
      return total, count

    data = _distribute(Dataset.range(9).batch(3, drop_remainder=True))
    wanted = [(6 * 3 + 8) + (6 * 6 + 8), 3]
    assert [int(x) for x in epoch(data)] == wanted
    captured = tf.function(lambda: epoch(data))
    assert [int(x) for x in captured()] == wanted

  def test_reduce_outside_of_a_function(self) -> None:
    data = _distribute(Dataset.range(6).batch(3))
    total = data.reduce(
      tf.constant(0), lambda total, batch: total + _weighted_sum(batch)
    )
    assert int(total) == 8 + 6 * 3 + 8

  def test_loop_over_an_iterator_with_a_break(self) -> None:
    @tf.function
    def some(iterator: Any) -> Any:
      total = tf.constant(0)
      for batch in iterator:
        total += _weighted_sum(batch)
        if total > 20:
          break
      return total

    iterator = iter(_distribute(Dataset.range(9).batch(3, drop_remainder=True)))
    found = [int(some(iterator)) for _ in range(3)]
    assert found == [8 + 26, 44, 0]

  def test_enumerate_is_refused_as_tensorflow_does(self) -> None:
    """Python's own would never end there."""
    data = _distribute(Dataset.range(9).batch(3, drop_remainder=True))
    count = tf.function(lambda data: [i for i, _ in enumerate(data)])
    for each in (data, iter(data)):
      with pytest.raises(NotImplementedError, match="a separate counter"):
        count(each)


class TestRefusals:
  def test_no_rows(self) -> None:
    for data, words in (
      (Dataset.range(6), r"The dataset has no rows to share among 3 replicas"),
      (
        Dataset.from_tensors({"x": tf.zeros([3]), "y": 1.0}),
        r"component 'y' has no rows.*dataset\.batch\(global_batch_size\)",
      ),
    ):
      with pytest.raises(ValueError, match=words):
        _distribute(data)

  @pytest.mark.parametrize("make", [_distribute, _deal])
  def test_sparse_and_ragged(self, make: Any) -> None:
    for name, value in (
      ("RaggedTensorSpec", tf.ragged.constant([[1.0], [2.0, 3.0]])),
      ("SparseTensorSpec", tf.sparse.from_dense([[1.0, 0.0]])),
      ("OptionalSpec", tf.experimental.Optional.empty(None)),
    ):
      with pytest.raises(
        ValueError, match=rf"'y/0' is a {name}; .*tf\.sparse\.to_dense"
      ):
        make(Dataset.from_tensors({"x": [1.0], "y": (value,)}))

  @pytest.mark.parametrize("make", [_distribute, _deal])
  def test_what_is_no_dataset(self, make: Any) -> None:
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset.*got a list"):
      make([1.0])
    data = _distribute(Dataset.range(3).batch(3))
    with pytest.raises(TypeError, match=r"got a SplitDataset"):
      make(data)

  @pytest.mark.parametrize("make", [_distribute, _deal])
  def test_a_pipeline_per_replica(self, make: Any) -> None:
    mode = tf.distribute.InputReplicationMode.PER_REPLICA
    with pytest.raises(NotImplementedError, match=r"Leave it at PER_WORKER"):
      make(Dataset.range(3).batch(3), experimental_replication_mode=mode)

  @pytest.mark.parametrize("name", ["get_next", "get_next_as_optional"])
  def test_replicas_do_not_read(self, name: str) -> None:
    iterator = iter(_distribute(Dataset.range(3).batch(3)))
    for run in (lambda fn: fn(), lambda fn: tf.function(fn)()):
      with pytest.raises(ValueError, match=r"args=\(next\(iterator\),\)"):
        run(lambda: _strategy().run(getattr(iterator, name)))
    assert _parts(next(iterator)) == [[0], [1], [2]]


def _model(strategy: Any, **options: Any) -> tuple[Any, list[str]]:
  tf.keras.utils.set_random_seed(1)
  traces = []

  class Model(tf.keras.Sequential):
    def train_step(self, data: Any) -> Any:
      traces.append("train")
      return super().train_step(data)

  with strategy.scope():
    model = Model(
      [
        tf.keras.Input((5,)),
        tf.keras.layers.Dense(4, "tanh"),
        tf.keras.layers.Dense(1),
      ]
    )
    model.compile(tf.keras.optimizers.SGD(0.05), "mse", **options)
  return model, traces


def _examples(rows: int = 36) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(3)
  x = rng.normal(size=(rows, 5)).astype("float32")
  return x, rng.normal(size=(rows, 1)).astype("float32")


def _assert_same_weights(model: Any, other: Any) -> None:
  for mine, theirs in zip(model.weights, other.weights, strict=True):
    held = testbed.copies(mine)
    assert len(held) == N
    for copy in held:
      np.testing.assert_allclose(copy, theirs.numpy(), rtol=1e-4, atol=1e-6)


class TestKeras:
  @pytest.mark.parametrize("steps", [1, 2])
  def test_fit_as_mirrored_replicas_do(self, steps: int) -> None:
    data = Dataset.from_tensor_slices(_examples()).batch(12, True)
    found = []
    # One step of Mirrored replicas at a time: with more Keras fails.
    for strategy, count in ((_strategy(), steps), (testbed.mirrored(N), 1)):
      # Three steps an epoch: the last execution of two is cut short.
      model, _ = _model(strategy, steps_per_execution=count)
      history = model.fit(
        data, epochs=2, validation_data=data, verbose=0
      ).history
      found.append((model, history))
    _assert_same_weights(found[0][0], found[1][0])
    assert set(found[1][1]) == {"loss", "val_loss"}
    for name, values in found[1][1].items():
      np.testing.assert_allclose(found[0][1][name], values, rtol=1e-5)

  @pytest.mark.parametrize("steps", [1, 2])
  def test_an_epoch_more_is_no_trace_more(self, steps: int) -> None:
    model, traces = _model(_strategy(), steps_per_execution=steps)
    data = Dataset.from_tensor_slices(_examples()).batch(12, True)
    counts = []
    for epochs in (1, 3, 1):
      model.fit(data, epochs=epochs, verbose=0)
      counts.append(len(traces))
    assert counts[0] > 0
    assert counts == counts[:1] * 3

  def test_distributed_datasets(self) -> None:
    rows = Dataset.from_tensor_slices(_examples())
    model, _ = _model(_strategy())
    model.fit(_distribute(rows.batch(12, True)), verbose=0)
    other, _ = _model(_strategy())
    other.fit(_deal(rows.batch(4, True)), verbose=0)
    for mine, theirs in zip(model.weights, other.weights, strict=True):
      np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
