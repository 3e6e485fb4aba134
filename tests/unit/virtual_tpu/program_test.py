"""A replica's function, run as replicas of one program, and found again."""

import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, tpu_tasks
from tf_cross_shard._src.virtual_tpu import lowering, program

N = 3
SCALAR = tf.TensorSpec([], tf.float32)


def _program(fn: Callable[..., Any], *specs: tf.TensorSpec) -> program.Program:
  strategy = testbed.virtual(N)
  traced = tpu_tasks.trace(strategy, fn, *specs)
  return program.Program(traced, strategy.extended.replicas)


def _variable(value: Any) -> tf.Variable:
  with testbed.virtual(N).scope():
    return tf.Variable(value)


def _tensors(*values: Any) -> tuple[tf.Tensor, ...]:
  assert len(values) == N
  return tuple(map(tf.constant, values))


def _arguments(*args: Any, **kwargs: Any) -> program.RunArguments:
  return program.RunArguments(args, kwargs, N)


def _marks() -> Any:
  return testbed.per_replica(testbed.virtual(N), [1.0, 2.0, 4.0])


class TestRunArguments:
  def test_partly_known_shape(self) -> None:
    rows = [np.ones([i + 1, 2], np.float32) for i in range(N)]
    given = _arguments(testbed.per_replica(testbed.virtual(N), rows))
    assert given.specs[0].shape.as_list() == [None, 2]
    assert [each.shape[0] for each in given.tensors[0]] == [1, 2, 3]

  @pytest.mark.parametrize(
    ("first", "second"),
    [
      (1, 1.0),
      (1, True),
      (1, 2),
      (None, ""),
      ([1], (1,)),
      ({"a": 1}, {"b": 1}),
      (np.ones([2]), np.ones([3])),
      (np.ones([2]), np.ones([2], np.float32)),
      (object(), object()),
      (0.0, -0.0),
      (0j, -0j),
    ],
  )
  def test_keys_differ(self, first: Any, second: Any) -> None:
    assert _arguments(first).key() == _arguments(first).key()
    assert _arguments(first).key() != _arguments(second).key()

  def test_keys_of_equal_kinds(self) -> None:
    key = _arguments(_marks(), 2, a=np.ones([2])).key()
    same = _arguments(np.float32(3), 2, a=np.zeros([2])).key()
    assert key == same
    assert hash(key) == hash(same)
    # NaN is not equal to itself, and such a number is made anew.
    for kind in (float, complex):
      first, second = (_arguments(kind("nan")).key() for _ in range(2))
      assert first == second

  def test_another_number_of_replicas(self) -> None:
    two = testbed.per_replica(testbed.virtual(2), [1.0, 2.0])
    with pytest.raises(ValueError, match=r"for 2 replicas.*has 3"):
      _arguments(two)

  def test_sparse_tensors(self) -> None:
    value = tf.sparse.from_dense([1.0, 0.0])
    strategy = testbed.virtual(N)
    distributed = strategy.experimental_distribute_values_from_function(
      lambda context: value
    )
    for argument in (value, distributed):
      with pytest.raises(lowering.TPUCompileError, match="got a SparseTensor"):
        _arguments(argument)


class TestProgram:
  def test_variables_are_replaced_and_results_kept(self) -> None:
    total = _variable(10.0)

    def fn(x: tf.Tensor) -> Any:
      return total.assign_add(x), tf.constant([1, 2])

    step, marks = _program(fn, SCALAR), (1.0, 2.0, 4.0)
    results = [step(_tensors(*marks)) for _ in range(3)]
    # What an earlier step returned outlives the later ones.
    for i, (sums, constant) in enumerate(results, 1):
      assert [float(copy) for copy in sums] == [10 + i * x for x in marks]
      assert [copy.numpy().tolist() for copy in constant] == [[1, 2]] * N
    assert testbed.copies(total) == [10 + 3 * x for x in marks]

  def test_all_variables_change_in_another_order(self) -> None:
    first, second, third = _variable(1.0), _variable(2.0), _variable(3.0)

    def fn() -> tf.Tensor:
      third.assign(second + 10.0)
      first.assign(third + 100.0)
      return tf.identity(first)

    [output] = _program(fn)()
    assert list(map(float, output)) == testbed.copies(first) == [112.0] * N
    assert testbed.copies(second) == [2.0] * N
    assert testbed.copies(third) == [12.0] * N

  def test_compiles_once_per_shape(self) -> None:
    step = _program(tf.reduce_sum, tf.TensorSpec([None], tf.float32))
    for size in (2, 3, 2):
      values = [np.full([size], i, np.float32) for i in range(N)]
      [total] = step(_tensors(*values))
      assert [float(each) for each in total] == [0.0, size, 2.0 * size]
    assert set(step._executables) == {((2,),), ((3,),)}
    first = step.compile([tf.TensorShape([2])])
    assert step.compile([tf.TensorShape([2])]) is first

  def test_unlike_arguments_change_nothing(self) -> None:
    variable = _variable(1.0)

    def fn(x: tf.Tensor) -> None:
      variable.assign_add(tf.reduce_sum(x))

    step = _program(fn, tf.TensorSpec([None], tf.float32))
    for values, words in (
      ([[1.0], [1.0, 2.0], [1.0]], "same shape; got [(1,), (2,), (1,)]"),
      ([[1], [1.0], [1]], "same dtype; got ['int32', 'float32', 'int32']"),
    ):
      with pytest.raises(ValueError, match=re.escape(words)):
        step(_tensors(*values))
    assert testbed.copies(variable) == [1.0] * N

  def test_an_operation_is_lowered_while_it_is_traced(self) -> None:
    spec = tf.TensorSpec([2], tf.float32)
    step = _program(lambda x: tf.boolean_mask(x, x > 0), spec)
    host = tf.function(lambda *x: step.as_operation([x])[0])
    with pytest.raises(lowering.TPUCompileError, match="must not depend on"):
      host.get_concrete_function(*[spec] * N)


class _Callee:
  def method(self) -> None: ...
  def other(self) -> None: ...


class _EqualCallee(_Callee):
  __hash__ = None  # type: ignore[assignment]

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _EqualCallee)


class TestCache:
  def _finder(self) -> Callable[..., Any]:
    """Numbers the programs that a cache makes."""
    cache, made = program.Cache(), iter(range(1000))

    def find(fn: Callable[..., Any], *args: Any) -> Any:
      return cache.get(fn, _arguments(*args), lambda: next(made))

    return find

  def test_one_program_for_a_function_and_its_arguments(self) -> None:
    find = self._finder()

    def one() -> None: ...
    def other() -> None: ...

    assert [find(one, 1), find(one, 2), find(other, 1)] == [0, 1, 2]
    assert [find(one, 1), find(one, 2), find(other, 1)] == [0, 1, 2]

  @pytest.mark.parametrize("kind", [_Callee, _EqualCallee])
  def test_methods(self, kind: Any) -> None:
    find, one, another = self._finder(), kind(), kind()
    for _ in range(2):
      found = [find(one.method), find(one.other), find(another.method)]
      assert found == [0, 1, 2]

  def test_an_argument_that_is_gone_is_not_mistaken(self) -> None:
    """Python soon reuses the address of a deleted object for a new object."""
    find = self._finder()

    def fn() -> None: ...

    assert [find(fn, _Callee()) for _ in range(50)] == list(range(50))

  def test_a_function_takes_its_programs_with_it(self) -> None:
    cache = program.Cache()
    arguments = _arguments()
    for _ in range(3):
      cache.get(lambda x: x, arguments, object)
    gc.collect()
    assert not cache._by_owner
