"""From a replica's function to one XLA module."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard.virtual_tpu import hlo, lowering, replica_context

N = 3


def _trace(fn: Callable[..., Any], *specs: tf.TensorSpec) -> lowering.Traced:
  strategy = testbed.virtual(N)

  def replica_fn(*tensors: tf.Tensor) -> Any:
    with strategy.scope(), replica_context.TracedReplicaContext(strategy):
      return fn(*tensors)

  return lowering.trace(
    replica_fn, specs, lambda: strategy.extended.known_variables
  )


def _variables(*values: Any) -> list[Any]:
  with testbed.virtual(N).scope():
    return [tf.Variable(value) for value in values]


def _run(lowered: lowering.Lowered, *arguments: Any) -> list[list[Any]]:
  """Each output as each replica has it; arguments are per replica."""
  client = testbed.virtual(N).extended.client
  outputs = [
    (tuple(spec.shape), spec.dtype.as_numpy_dtype)
    for spec in [*lowered.outputs, *lowered.updated]
  ]
  executable = client.compile(lowered.module, outputs)
  given = [client.put(list(each)) for each in arguments]
  given += [variable.take(client) for variable in lowered.traced.variables]
  return [
    [np.array(each.to_numpy(i)).tolist() for i in range(N)]
    for each in executable(given)
  ]


class TestTrace:
  def test_captures_and_variables(self) -> None:
    first, unused, second = _variables(1.0, 2.0, [3.0])
    constant = tf.constant([1.0, 2.0])

    def fn(x: tf.Tensor) -> Any:
      second.assign_add([1.0])
      return {"a": x * constant + first, "none": None}

    traced = _trace(fn, tf.TensorSpec([None], tf.float32))
    assert len(traced.captured) == 1
    assert traced.captured[0] is constant
    assert {id(each) for each in traced.variables} == {id(first), id(second)}
    assert id(unused) not in {id(each) for each in traced.variables}
    assert set(traced.structure) == {"a", "none"}
    assert traced.output_specs == [tf.TensorSpec([2], tf.float32)]

  def test_variables_of_others(self) -> None:
    foreign = tf.Variable(1.0, name="foreign")
    with pytest.raises(
      lowering.TPUCompileError, match=r"not on the virtual TPU.*foreign"
    ):
      _trace(lambda: foreign + 1.0)

  @pytest.mark.parametrize(
    ("fn", "specs", "where"),
    [
      (lambda x: 1.0, [tf.TensorSpec([], tf.string)], "an argument"),
      (lambda: tf.constant("text"), [], "an output"),
    ],
  )
  def test_dtypes_of_hosts(self, fn: Any, specs: Any, where: str) -> None:
    with pytest.raises(
      lowering.TPUCompileError, match=f"no dtype string, which {where}"
    ):
      _trace(fn, *specs)

  def test_captured_text(self) -> None:
    text = tf.constant("text")
    with pytest.raises(lowering.TPUCompileError, match="a captured tensor"):
      _trace(lambda: tf.strings.length(text))


class TestLower:
  def test_numbers(self) -> None:
    read, changed = _variables([1.0, 2.0], [10.0, 20.0])

    def fn(x: tf.Tensor) -> Any:
      changed.assign_add(x * read)
      return x + 1.0, tf.constant(5), x + 1.0

    lowered = lowering.lower(
      _trace(fn, tf.TensorSpec([None], tf.float32)), [tf.TensorShape([2])]
    )
    assert [spec.shape for spec in lowered.outputs] == [(2,), (), (2,)]
    assert [spec.dtype.name for spec in lowered.outputs] == [
      "float32",
      "int32",
      "float32",
    ]
    assert len(lowered.traced.variables) == 2
    assert [each is changed for each in lowered.updated] == [True]
    x = [np.full([2], i, np.float32) for i in range(N)]
    first, constant, again, new = _run(lowered, x)
    assert first == again == [[i + 1.0] * 2 for i in range(N)]
    assert constant == [5] * N
    assert new == [[10.0 + i, 20.0 + 2 * i] for i in range(N)]

  def test_sums_of_groups(self) -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
      return replica_context.cross_replica_sum(x, [[0, 1, 2]])

    spec = tf.TensorSpec([2], tf.float32)
    lowered = lowering.lower(_trace(fn, spec), [spec.shape])
    [found] = hlo.Module(lowered.module).collectives(N)
    assert (found.kind, found.dtype, found.bytes) == ("all-reduce", "f32", 8)
    assert found.groups == ((0, 1, 2),)
    x = [np.array([i, 2.0**i], np.float32) for i in range(N)]
    assert _run(lowered, x) == [[[3.0, 7.0]] * N]

  def test_nothing_at_all(self) -> None:
    lowered = lowering.lower(_trace(lambda: None), [])
    assert (lowered.traced.variables, lowered.updated, lowered.outputs) == (
      [],
      [],
      [],
    )
    assert _run(lowered) == []

  def test_order_of_outputs_when_all_variables_change(self) -> None:
    one, two, three = _variables(1.0, 2.0, 3.0)

    def fn() -> tf.Tensor:
      three.assign(two + 10.0)
      one.assign(three + 100.0)
      return tf.identity(one)

    lowered = lowering.lower(_trace(fn), [])
    [output], *updated = [[each[1]] for each in _run(lowered)]
    assert output == 112.0
    found = {id(v): x for v, [x] in zip(lowered.updated, updated, strict=True)}
    assert found == {id(one): 112.0, id(three): 12.0}

  @pytest.mark.parametrize(
    ("fn", "words"),
    [
      (lambda x: tf.boolean_mask(x, x > 0), r"must not depend.*boolean_mask"),
      (lambda x: tf.where(x > 0), "tf.where with three arguments"),
      (
        lambda x: tf.numpy_function(lambda y: y, [x], tf.float32),
        r"must run on the host.*tf\.py_function.*XLA says",
      ),
    ],
  )
  def test_what_cannot_be_compiled(self, fn: Any, words: str) -> None:
    spec = tf.TensorSpec([2], tf.float32)
    traced = _trace(fn, spec)
    with pytest.raises(lowering.TPUCompileError, match=words):
      lowering.lower(traced, [spec.shape])

  def test_code_for_cpus(self) -> None:
    spec = tf.TensorSpec([3, 3], tf.float32)
    traced = _trace(tf.linalg.inv, spec)
    with pytest.raises(
      lowering.TPUCompileError, match=r"Qr.*for CPUs XLA calls"
    ):
      lowering.lower(traced, [spec.shape])


def test_error_is_tensorflows_and_reads_well() -> None:
  error = lowering.TPUCompileError("words")
  assert isinstance(error, tf.errors.InvalidArgumentError)
  assert str(error) == "words"


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
