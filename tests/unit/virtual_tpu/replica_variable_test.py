"""A variable's copies on replicas, and the host's view of them."""

import functools
import gc
import weakref
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, tpu_tasks
from tf_cross_shard import virtual_tpu
from tf_cross_shard._src.virtual_tpu import hlo, lowering

N = 3
Aggregation = tf.VariableAggregation
ON_READ = tf.VariableSynchronization.ON_READ


def _variable(initial: Any, **options: Any) -> Any:
  with testbed.virtual(N).scope():
    variable = tf.Variable(initial, **options)
  assert len(testbed.copies(variable)) == N
  return variable


def _run(fn: Callable[..., Any]) -> Any:
  return testbed.virtual(N).run(fn)


def _ids(variable: Any) -> tf.Tensor:
  """This replica's number in the form of a variable."""
  return tf.cast(tf.fill(variable.shape, testbed.replica_id()), variable.dtype)


def _spread(variable: Any) -> None:
  """Sets replica r's copy to r."""
  _run(lambda: variable.assign(_ids(variable)))


def _copies(variable: Any) -> list[Any]:
  return [value.tolist() for value in testbed.copies(variable)]


def test_dtypes_and_shapes() -> None:
  shapes = {"float32": [], "float64": [0], "half": [2], "bfloat16": []}
  shapes |= {"uint8": [2], "int32": [0], "int64": [2], "complex64": []}
  values = [
    np.asarray(tf.cast(tf.ones(shape), name).numpy())
    for name, shape in shapes.items()
  ]
  variables = list(map(_variable, values))
  _run(lambda: [each.assign_add(_ids(each)) for each in variables])
  for name, value, variable in zip(shapes, values, variables, strict=True):
    assert variable.dtype == tf.as_dtype(name)
    expected = [(value + value.dtype.type(i)).tolist() for i in range(N)]
    assert _copies(variable) == expected


class TestHost:
  """Values that the host assigns reach every replica."""

  @pytest.mark.parametrize("traced", [False, True])
  def test_assigns(self, traced: bool) -> None:
    """Zeros are what replica 0 holds already; the other copies follow too."""
    variable = _variable([1.0, 1.0])

    def spread() -> None:
      variable.assign(_ids(variable))

    def add() -> None:
      variable.assign_add(_ids(variable))

    for assign, expected in (
      (lambda v: v.assign([5.0, 6.0]), [5, 6]),
      (lambda v: v.assign(v), [0, 0]),
      (lambda v: v.assign_add(delta=[1.0, 2.0]), [1, 2]),
      (lambda v: v.assign_sub([1.0, 2.0]), [-1, -2]),
      (lambda v: v[1].assign(0.0), [0, 0]),
      (lambda v: v.scatter_update(tf.IndexedSlices([4.0], [1])), [0, 4]),
      (lambda v: v.batch_scatter_update(tf.IndexedSlices([0.0], [0])), [0, 0]),
      (lambda v: v.scatter_nd_update([[1]], [0.0]), [0, 0]),
      (
        lambda v: tf.raw_ops.AssignVariableOp(
          resource=v.handle, value=tf.constant([7.0, 8.0])
        ),
        [7, 8],
      ),
    ):

      def host(assign: Any = assign) -> None:
        assign(variable)

      operation = tf.function(host) if traced else host
      for _ in range(2):
        _run(spread)
        operation()
        assert _copies(variable) == [expected] * N
        _run(add)
        added = [[x + i for x in expected] for i in range(N)]
        assert _copies(variable) == added

  def test_reads_before_between_and_after_steps(self) -> None:
    variable = _variable([1.0, 2.0])

    def replica_fn() -> None:
      variable.assign_add(_ids(variable) + 1.0)

    @tf.function
    def steps() -> Any:
      before = tf.identity(variable)
      testbed.virtual(N).run(replica_fn)
      between = tf.identity(variable)
      variable.assign(10.0 * variable)
      testbed.virtual(N).run(replica_fn)
      after = variable.read_value()
      variable.assign_add([1.0, 1.0])
      return before, between, after

    value = np.array([1.0, 2.0])
    for _ in range(3):
      found = [each.numpy().tolist() for each in steps()]
      after = 10 * (value + 1) + 1
      assert found == [value.tolist(), (value + 1).tolist(), after.tolist()]
      value = after + 1
      assert _copies(variable) == [value.tolist()] * N


class TestReplicas:
  def test_scatter_updates(self) -> None:
    variable = _variable(tf.zeros([4]))

    def replica_fn() -> tf.Tensor:
      own = tf.cast(testbed.replica_id() + 1, tf.float32)
      variable.scatter_add(
        tf.IndexedSlices([own, own], [0, testbed.replica_id() + 1])
      )
      variable[1:2].assign([9.0])
      return tf.gather(variable, [0])

    rows = _run(replica_fn)
    found = testbed.per_replica_results(testbed.virtual(N), rows)
    assert found == [[1.0], [2.0], [3.0]]
    assert _copies(variable) == [[1, 9, 0, 0], [2, 9, 2, 0], [3, 9, 0, 3]]

  def test_aggregation(self) -> None:
    expected = {
      Aggregation.NONE: [7.0, 8.0, 9.0],
      Aggregation.SUM: [12.0] * N,
      Aggregation.MEAN: [8.0] * N,
    }
    variables = [_variable(6.0, aggregation=kind) for kind in expected]
    _run(lambda: [v.assign_add(_ids(v) + 1.0) for v in variables])
    assert list(map(_copies, variables)) == list(expected.values())

  @pytest.mark.parametrize("dtype", ["float32", "bool"])
  def test_only_the_first_replicas_value_as_mirrored(self, dtype: str) -> None:
    """Assigned and added; also Python numbers."""
    strategies = testbed.virtual(N), testbed.mirrored(N)
    found = []
    for strategy in strategies:
      with strategy.scope():
        variable = tf.Variable(
          tf.cast([1, 2], dtype), aggregation=Aggregation.ONLY_FIRST_REPLICA
        )
      is_number = dtype != "bool"

      def replica_fn(variable: Any = variable, adds: bool = is_number) -> None:
        own = _ids(variable)
        variable.assign(own if not adds else own + tf.cast(3, own.dtype))
        if adds:
          variable.assign_add(own + own)
          variable.assign_sub(own)

      tf.function(lambda s=strategy, f=replica_fn: s.run(f))()
      found.append(_copies(variable))
    assert found[0] == found[1]
    assert found[0] == [found[0][0]] * N

  def test_a_number_that_all_replicas_assign_does_not_travel(self) -> None:
    counter = _variable(1, aggregation=Aggregation.ONLY_FIRST_REPLICA)

    def count(value: Callable[[], Any]) -> int:
      traced = tpu_tasks.trace(
        testbed.virtual(N), lambda: counter.assign_add(value())
      )
      module = hlo.Module(lowering.lower(traced, []).module)
      return len(module.collectives(N))

    assert count(lambda: 1) == 0
    assert count(lambda: tf.constant(1)) == 0
    assert count(lambda: _ids(counter)) == 1

  @pytest.mark.parametrize("dtype", ["int32", "complex64"])
  def test_mean_of_what_has_none(self, dtype: str) -> None:
    for strategy in (testbed.virtual(N), testbed.mirrored(N)):
      for sync in (tf.VariableSynchronization.AUTO, ON_READ):
        with strategy.scope():
          with pytest.raises(ValueError, match=r"MEAN.*dtype"):
            tf.Variable(
              tf.cast(1, dtype),
              aggregation=Aggregation.MEAN,
              synchronization=sync,
            )

  def test_scatter_that_cannot_be_aggregated(self) -> None:
    rows = tf.IndexedSlices(tf.constant([5.0]), tf.constant([1]))
    first, total = Aggregation.ONLY_FIRST_REPLICA, Aggregation.SUM
    variable = _variable([1.0, 2.0], aggregation=total)
    for name in ("scatter_add", "batch_scatter_update"):
      with pytest.raises(NotImplementedError, match=f"cannot call {name}.*SUM"):
        _run(functools.partial(getattr(variable, name), rows))
    variable = _variable([1.0, 2.0], aggregation=first)
    with pytest.raises(NotImplementedError, match="ONLY_FIRST_REPLICA"):
      _run(lambda: variable[:1].assign([5.0]))


class TestOnRead:
  """Metrics: copies are independent, and are combined when the host reads."""

  def test_combined(self) -> None:
    kinds = Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA
    variables = [
      _variable(0.0, synchronization=ON_READ, aggregation=kind)
      for kind in kinds
    ]
    for added in (1.0, 0.0):  # Reading in between changes nothing.
      _run(
        lambda by=added: [v.assign_add(by * (_ids(v) + 1)) for v in variables]
      )
      assert list(map(_copies, variables)) == [[1.0, 2.0, 3.0]] * 3
      assert [float(v.numpy()) for v in variables] == [6.0, 2.0, 1.0]
    for variable in variables:
      variable.assign(9.0)
    assert [float(v.numpy()) for v in variables] == [9.0] * 3
    assert list(map(_copies, variables)) == [[3.0] * N, [9.0] * N, [9.0] * N]

  def test_initial_value_is_every_replicas(self) -> None:
    """MirroredStrategy and TPUStrategy do the same."""
    options = {"synchronization": ON_READ, "aggregation": Aggregation.SUM}
    variable = _variable(6.0, **options)
    with testbed.mirrored(N).scope():
      expected = tf.Variable(6.0, **options)
    assert _copies(variable) == _copies(expected) == [6.0] * N
    assert float(variable.numpy()) == float(expected.numpy()) == 18.0


class TestViews:
  def test_assign_one_copy(self) -> None:
    variable = _variable([1, 2])
    views = testbed.virtual(N).experimental_local_results(variable)
    assert views[1].assign([5, 6]) is views[1]
    views[2].assign(tf.constant([7, 8]))
    assert _copies(variable) == [[1, 2], [5, 6], [7, 8]]
    views[0].assign(views[2])
    _run(lambda: variable.assign_add([1, 1]))
    assert _copies(variable) == [[8, 9], [6, 7], [8, 9]]
    assert variable.numpy().tolist() == [8, 9]

  def test_read(self) -> None:
    variable = _variable([1.0, 2.0])
    _spread(variable)
    for i, view in enumerate(variable.views()):
      assert view.read_value().numpy().tolist() == [i, i]
      assert np.asarray(view, "float64").tolist() == [i, i]
      assert tf.concat([view, view], 0).shape == (4,)
      assert tf.add(view, 1.0).numpy().tolist() == [i + 1, i + 1]
      assert (view.shape, view.dtype) == ((2,), tf.float32)
      assert f"replica_{i}" in repr(view)

  def test_wrong_shape_or_dtype(self) -> None:
    variable = _variable([1, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="shape"):
      variable.views()[1].assign([1, 2, 3])
    with pytest.raises(TypeError, match="int32"):
      variable.views()[1].assign([1.5, 2.5])
    assert _copies(variable) == [[1, 2]] * N


def test_checkpoint_holds_and_restores_the_hosts_value(tmp_path: Path) -> None:
  variable = _variable([0.0, 0.0])
  checkpoint = tf.train.Checkpoint(variable=variable)
  _spread(variable)
  path = checkpoint.save(str(tmp_path / "ck"))
  for change in (0.0, 3.0):  # First replica 0 still holds what is restored.
    _run(lambda by=change: variable.assign_add(_ids(variable) + by))
    checkpoint.restore(path).assert_consumed()
    assert _copies(variable) == [[0.0, 0.0]] * N
  later = tf.train.Checkpoint()
  later.restore(path)
  later.variable = _variable([1.0, 2.0])
  assert _copies(later.variable) == [[0.0, 0.0]] * N


def test_nothing_outlives_its_strategy() -> None:
  def use() -> list[Any]:
    strategy = virtual_tpu.VirtualTPUStrategy(2)
    with strategy.scope():
      variable = tf.Variable(0.0)

    def step() -> None:
      strategy.run(lambda: variable.assign_add(_ids(variable) + 1.0))

    step()
    tf.function(step)()
    assert _copies(variable) == [2.0, 4.0]
    return [weakref.ref(strategy), weakref.ref(variable)]

  references = use()
  gc.collect()
  assert [reference() for reference in references] == [None, None]


def test_steps_of_several_threads_all_count() -> None:
  variable = _variable(0.0)

  def replica_fn() -> None:
    variable.assign_add(_ids(variable) + 1.0)

  in_function = tf.function(lambda: testbed.virtual(N).run(replica_fn))
  in_function()

  def work(step: Callable[[], Any]) -> None:
    for _ in range(20):
      step()
      variable.numpy()

  in_eager = functools.partial(_run, replica_fn)
  with futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(work, [in_eager, in_function] * 2, timeout=600))
  assert _copies(variable) == [81.0, 162.0, 243.0]
