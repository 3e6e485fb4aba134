"""Tests the collectives of MirroredStrategy, and their errors."""

from concurrent import futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import groups as groups_lib
from tf_cross_shard._src.core.reduce import mirrored

GROUPINGS = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3, 0], [1, 2]]]
# Powers of two tell from a sum which replicas are in it.
MARKS = np.array([1, 2, 4, 8])


def _sums(
  engine: mirrored.Mirrored,
  wrap: Any = lambda reduce: reduce(),
  dtypes: Any = (tf.float32,),
  eager: bool = False,
) -> list[list[float]]:
  """Each replica's sums of its mark, one tensor per dtype."""

  def replica_fn() -> list[tf.Tensor]:
    tensors = [
      tf.fill([3], tf.constant(MARKS, dtype)[testbed.replica_id()])
      for dtype in dtypes
    ]
    sums = wrap(lambda: engine.all_reduce_sum(tensors))
    # A tensor that replicas share would come back as one, not as four.
    return [tf.identity(total) for total in sums]

  def run() -> Any:
    return engine.strategy.run(replica_fn)

  results = run() if eager else tf.function(run, autograph=False)()
  per_tensor = [
    engine.strategy.experimental_local_results(result) for result in results
  ]
  for copies, dtype in zip(per_tensor, dtypes, strict=True):
    assert len(copies) == testbed.REPLICAS
    for copy in copies:
      assert copy.dtype == dtype
      assert copy.shape == (3,)
      assert len(np.unique(copy.numpy().astype("float64"))) == 1
  return [[float(copy[0]) for copy in copies] for copies in per_tensor]


def _expected(groups: groups_lib.Groups) -> list[float]:
  """Returns the sums that each replica must receive."""
  return [float(MARKS[list(groups.members_of(r))].sum()) for r in range(4)]


def _in_cond(reduce: Any) -> Any:
  return tf.cond(testbed.replica_id() >= 0, reduce, lambda: [tf.zeros([3])])


def _in_nested_function(reduce: Any) -> Any:
  return tf.function(reduce, autograph=False)()


DTYPES = (tf.float32, tf.int32, tf.bfloat16, tf.float16, tf.float64)


@pytest.mark.parametrize("table", GROUPINGS)
class TestSums:
  @pytest.mark.parametrize("prefer_merge", [True, False])
  def test_all_reduce_sums_over_each_group(
    self, table: list[list[int]], prefer_merge: bool
  ) -> None:
    """Engines for GPUs use collectives even where a merge call is possible."""
    groups = groups_lib.Groups(table)
    engine = mirrored.Mirrored(testbed.mirrored(), groups, prefer_merge)
    sums = _sums(engine, dtypes=DTYPES)
    assert sums == [_expected(groups)] * len(DTYPES)
    assert _sums(engine, eager=True) == [_expected(groups)]

  @pytest.mark.parametrize("wrap", [_in_cond, _in_nested_function])
  def test_all_reduce_in_cond_and_nested_function(
    self, table: list[list[int]], wrap: Any
  ) -> None:
    groups = groups_lib.Groups(table)
    engine = mirrored.Mirrored(testbed.mirrored(), groups)
    assert _sums(engine, wrap) == [_expected(groups)]
    # A new trace meets under the same keys.
    assert _sums(engine, wrap) == [_expected(groups)]


@pytest.mark.parametrize(
  ("in_cond", "eager"), [(False, False), (False, True), (True, False)]
)
def test_half_precision_is_added_in_float32(in_cond: bool, eager: bool) -> None:
  """Merge calls add float16 in float32. Collectives round the sum once more."""
  groups = groups_lib.Groups(GROUPINGS[1])
  engine = mirrored.Mirrored(testbed.mirrored(), groups)

  def replica_fn() -> Any:
    own = tf.constant([1.0, 2.0**-11] * 2, tf.float16)[testbed.replica_id()]

    def reduce() -> tf.Tensor:
      [total] = engine.all_reduce_accumulate_f32([own])
      return tf.cast(total, tf.float32)

    return tf.cond(own > 0, reduce, lambda: 0.0) if in_cond else reduce()

  def run() -> Any:
    return engine.strategy.run(replica_fn)

  results = run() if eager else tf.function(run, autograph=False)()
  right = 1.0 if in_cond else 1.0 + 2.0**-11
  assert testbed.per_replica_results(engine.strategy, results) == [right] * 4


def test_two_groupings_and_many_reductions_in_one_step() -> None:
  pairs, crossed = (
    mirrored.Mirrored(testbed.mirrored(), groups_lib.Groups(table))
    for table in GROUPINGS[1:]
  )

  def twice() -> list[tf.Tensor]:
    mark = testbed.mark()
    first = pairs.all_reduce_sum([mark, 16 * mark])
    return crossed.all_reduce_sum(first)

  @tf.function(autograph=False)
  def run() -> Any:
    return pairs.strategy.run(
      lambda: tf.cond(
        testbed.replica_id() >= 0, twice, lambda: [tf.zeros([]), tf.zeros([])]
      )
    )

  for _ in range(3):
    for result, scale in zip(run(), (1, 16), strict=True):
      copies = pairs.strategy.experimental_local_results(result)
      # Pairs sum to 3 and 12; each crossed pair has one of either.
      assert [float(copy) for copy in copies] == [15.0 * scale] * 4


def test_two_threads_do_not_share_collectives() -> None:
  """Functions that two threads run at once have different collective keys."""
  groups = groups_lib.Groups(GROUPINGS[0])
  engine = mirrored.Mirrored(testbed.mirrored(), groups)

  def make(scale: float) -> Any:
    def reduce() -> list[tf.Tensor]:
      return engine.all_reduce_sum([scale * testbed.mark() * tf.ones(3)])

    run = tf.function(lambda: engine.strategy.run(lambda: _in_cond(reduce)))
    run()
    return run

  def sums(run: Any) -> set[float]:
    results = [run()[0] for _ in range(30)]
    local = map(engine.strategy.experimental_local_results, results)
    return {float(copy[0]) for copies in local for copy in copies}

  runs = [make(1.0), make(16.0)]  # Traced one after the other.
  with futures.ThreadPoolExecutor(2) as pool:
    values = pool.map(sums, runs, timeout=600)
    assert list(values) == [{15.0}, {240.0}]


def test_all_reduce_of_dynamic_shapes() -> None:
  groups = groups_lib.Groups(GROUPINGS[1])
  engine = mirrored.Mirrored(testbed.mirrored(), groups, prefer_merge=False)

  @tf.function(
    autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)]
  )
  def run(x: tf.Tensor) -> Any:
    return engine.strategy.run(
      lambda: [tf.identity(engine.all_reduce_sum([x])[0])]
    )

  for size in (2, 5):
    [result] = run(tf.range(size, dtype=tf.float32))
    copies = engine.strategy.experimental_local_results(result)
    assert len(copies) == testbed.REPLICAS
    for copy in copies:
      np.testing.assert_array_equal(copy, 2.0 * np.arange(size))


@pytest.mark.parametrize("place", ["function", "eager", "cond"])
def test_gathers_rows_of_the_group(place: str) -> None:
  groups = groups_lib.Groups([[3, 0], [1, 2]])
  engine = mirrored.Mirrored(testbed.mirrored(), groups)

  def replica_fn() -> Any:
    assert engine.supports_sparse
    mine = testbed.replica_id()

    def gather() -> list[tf.Tensor]:
      return engine.all_gather([tf.fill([mine, 2], mine)])

    if place != "cond":
      return gather()
    none = tf.zeros([0, 2], tf.int32)
    return tf.cond(tf.convert_to_tensor(mine) >= 0, gather, lambda: [none])

  def run() -> Any:
    return engine.strategy.run(replica_fn)

  is_eager = place == "eager"
  [rows] = run() if is_eager else tf.function(run, autograph=False)()
  copies = engine.strategy.experimental_local_results(rows)
  for replica, expected in enumerate([[3] * 3, [1, 2, 2], [1, 2, 2], [3] * 3]):
    np.testing.assert_array_equal(copies[replica][:, 0], expected)
    assert copies[replica].shape[1] == 2


class TestRefusals:
  """An error with a remedy is raised where a collective would hang."""

  def test_function_called_eagerly_inside_run(self) -> None:
    groups = groups_lib.Groups(GROUPINGS[0])
    engine = mirrored.Mirrored(testbed.mirrored(), groups)
    with pytest.raises(RuntimeError, match=r"inside a tf.function"):
      _sums(engine, _in_nested_function, eager=True)

  def test_loop_inside_run(self) -> None:
    groups = groups_lib.Groups(GROUPINGS[0])
    engine = mirrored.Mirrored(testbed.mirrored(), groups)

    def in_loop(reduce: Any) -> Any:
      _, result = tf.while_loop(
        lambda i, _: i < 2,
        lambda i, _: (i + 1, reduce()[0]),
        (0, tf.zeros([3])),
      )
      return [result]

    with pytest.raises(RuntimeError, match=r"loop around `strategy\.run`"):
      _sums(engine, in_loop)

  def test_dtype_that_no_collective_sums(self) -> None:
    groups = groups_lib.Groups(GROUPINGS[0])
    engine = mirrored.Mirrored(testbed.mirrored(), groups, prefer_merge=False)
    with pytest.raises(TypeError, match=r"complex64.*float32"):
      _sums(engine, dtypes=(tf.complex64,))


def test_missing_devices_raise_an_error() -> None:
  """TensorFlow would hang if a strategy names devices that do not exist.

  It maps missing devices to one device, on which a collective in a branch
  waits forever.
  """
  strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(3, 7)])
  engine = mirrored.Mirrored(strategy, groups_lib.Groups([[0, 1, 2, 3]]))
  with pytest.raises(ValueError, match=r"CPU:4'.*local_strategy\(4\)"):
    _sums(engine, _in_cond)


def test_while_loop_around_strategy_run() -> None:
  groups = groups_lib.Groups(GROUPINGS[1])
  engine = mirrored.Mirrored(testbed.mirrored(), groups)
  with engine.strategy.scope():
    total = tf.Variable(0.0)

  def replica_fn() -> None:
    mark = testbed.mark()
    total.assign_add(engine.all_reduce_sum([mark])[0])

  @tf.function
  def run() -> None:
    for _ in tf.range(3):
      engine.strategy.run(replica_fn)

  run()
  assert testbed.copies(total) == [9.0, 9.0, 36.0, 36.0]
