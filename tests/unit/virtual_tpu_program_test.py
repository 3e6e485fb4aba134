"""A replica's function, run as replicas of one program."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard.virtual_tpu import lowering, program, replica_context

N = 3


def _program(fn: Callable[..., Any], *specs: tf.TensorSpec) -> program.Program:
  strategy = testbed.virtual(N)

  def replica_fn(*tensors: tf.Tensor) -> Any:
    with strategy.scope(), replica_context.TracedReplicaContext(strategy):
      return fn(*tensors)

  known = lambda: strategy.extended.known_variables  # noqa: E731
  traced = lowering.trace(replica_fn, specs, known)
  return program.Program(traced, strategy.extended._replicas)


def _tensors(*values: Any) -> tuple[tf.Tensor, ...]:
  assert len(values) == N
  return tuple(map(tf.constant, values))


def test_runs_and_replaces_variables() -> None:
  with testbed.virtual(N).scope():
    total = tf.Variable(10.0)

  def fn(x: tf.Tensor) -> Any:
    total.assign_add(x)
    return 2.0 * x, tf.constant([1, 2])

  step = _program(fn, tf.TensorSpec([], tf.float32))
  for i in range(1, 3):
    doubled, constant = step(_tensors(1.0, 2.0, 4.0))
    assert [float(each) for each in doubled] == [2.0, 4.0, 8.0]
    assert [each.numpy().tolist() for each in constant] == [[1, 2]] * N
    assert testbed.copies(total) == [10.0 + i * x for x in (1.0, 2.0, 4.0)]


def test_results_outlive_the_next_step() -> None:
  with testbed.virtual(N).scope():
    variable = tf.Variable([0.0])

  def fn(x: tf.Tensor) -> tf.Tensor:
    return variable.assign_add(x)

  step = _program(fn, tf.TensorSpec([1], tf.float32))
  found = [step(_tensors([1.0], [2.0], [4.0]))[0] for _ in range(3)]
  for i, results in enumerate(found, 1):
    assert [float(x[0]) for x in results] == [1.0 * i, 2.0 * i, 4.0 * i]


def test_compiles_once_per_shape() -> None:
  step = _program(tf.reduce_sum, tf.TensorSpec([None], tf.float32))
  for size in (2, 3, 2):
    values = [np.full([size], i, np.float32) for i in range(N)]
    [total] = step(_tensors(*values))
    assert [float(each) for each in total] == [0.0, size, 2.0 * size]
  assert set(step._compiled) == {((2,),), ((3,),)}
  first = step.compile([tf.TensorShape([2])])
  assert step.compile([tf.TensorShape([2])]) is first


def test_uneven_shapes_change_nothing() -> None:
  with testbed.virtual(N).scope():
    variable = tf.Variable(1.0)

  def fn(x: tf.Tensor) -> None:
    variable.assign_add(tf.reduce_sum(x))

  step = _program(fn, tf.TensorSpec([None], tf.float32))
  words = re.escape("same shape; got [(1,), (2,), (2,)]")
  with pytest.raises(ValueError, match=words):
    step(_tensors([1.0], [1.0, 2.0], [1.0, 2.0]))
  assert testbed.copies(variable) == [1.0] * N


def test_as_an_operation() -> None:
  with testbed.virtual(N).scope():
    variable = tf.Variable(0.0)

  def fn(x: tf.Tensor) -> Any:
    variable.assign_add(tf.reduce_sum(x))
    return variable.read_value(), x

  step = _program(fn, tf.TensorSpec([2], tf.float32))

  @tf.function
  def twice(*x: tf.Tensor) -> Any:
    step.as_operation([x])
    total, same = step.as_operation([x])
    assert [each.shape for each in same] == [(2,)] * N
    return total, same, variable.read_value()

  x = _tensors([1.0, 0.0], [2.0, 0.0], [4.0, 1.0])
  total, same, seen = twice(*x)
  assert [float(each) for each in total] == [2.0, 4.0, 10.0]
  assert [each.numpy().tolist() for each in same] == [
    x.numpy().tolist() for x in x
  ]
  assert float(seen) == 2.0


def test_an_operation_is_compiled_while_it_is_traced() -> None:
  step = _program(
    lambda x: tf.boolean_mask(x, x > 0), tf.TensorSpec([2], tf.float32)
  )
  signature = [tf.TensorSpec([2], tf.float32)] * N
  host = tf.function(lambda *x: step.as_operation([x])[0])
  with pytest.raises(lowering.TPUCompileError, match="must not depend on data"):
    host.get_concrete_function(*signature)
  later = tf.function(lambda *x: step.as_operation([x], compile_now=False)[0])
  later.get_concrete_function(*signature)


def test_devices_are_made_by_the_first_program() -> None:
  replicas = program.Replicas(2)
  assert replicas._client is None
  assert replicas.client.num_replicas == replicas.num_replicas == 2
  assert replicas.client is replicas.client


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
