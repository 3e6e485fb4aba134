"""From a replica's function to one XLA module."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, tpu_tasks
from tf_cross_shard.virtual_tpu import lowering

N = 3


def _trace(fn: Any, *specs: tf.TensorSpec) -> lowering.Traced:
  return tpu_tasks.trace(testbed.virtual(N), fn, *specs)


def _variables(*values: Any) -> list[Any]:
  with testbed.virtual(N).scope():
    return [tf.Variable(value) for value in values]


def _run(
  traced: lowering.Traced, lowered: lowering.Lowered, *arguments: Any
) -> list[list[Any]]:
  """Each output as each replica has it; arguments are per replica."""
  client = testbed.virtual(N).extended.replicas.client
  outputs = [
    (tuple(spec.shape), spec.dtype.as_numpy_dtype)
    for spec in [*lowered.outputs, *lowered.updated]
  ]
  executable = client.compile(lowered.module, outputs)
  given = [client.put(list(each)) for each in arguments]
  given += [variable.take() for variable in traced.variables]
  return [
    [np.array(each.to_numpy(i)).tolist() for i in range(N)]
    for each in executable(given)
  ]


class TestTrace:
  def test_captures_and_variables(self) -> None:
    first, _, second = _variables(1.0, 2.0, [3.0])
    constant = tf.constant([1.0, 2.0])

    def fn(x: tf.Tensor) -> Any:
      second.assign_add([1.0])
      return {"a": x * constant + first, "none": None}

    traced = _trace(fn, tf.TensorSpec([None], tf.float32))
    assert len(traced.captured) == 1
    assert traced.captured[0] is constant
    assert {id(each) for each in traced.variables} == {id(first), id(second)}
    assert set(traced.structure) == {"a", "none"}
    assert [each.shape for each in traced.function.outputs] == [(2,)]

  def test_variables_of_others(self) -> None:
    plain = tf.Variable(1.0, name="plain")
    with testbed.virtual(2).scope():
      foreign = tf.Variable(1.0, name="foreign")
    for variable in (plain, foreign):
      words = rf"not on the virtual TPU.*{variable.name}.*strategy\.scope"
      with pytest.raises(lowering.TPUCompileError, match=words):
        _trace(lambda v=variable: v + 1.0)

  @pytest.mark.parametrize("where", ["argument", "output", "captured tensor"])
  def test_dtypes_of_hosts(self, where: str) -> None:
    text = tf.constant("text")
    fn, specs = {
      "argument": (lambda x: 1.0, [tf.TensorSpec([], tf.string)]),
      "output": (lambda: tf.constant("text"), []),
      "captured tensor": (lambda: tf.strings.length(text), []),
    }[where]
    words = f"^A TPU has no dtype string, which an? {where}"
    with pytest.raises(lowering.TPUCompileError, match=words):
      _trace(fn, *specs)


class TestLower:
  def test_outputs_and_updated_variables(self) -> None:
    read, changed = _variables([1.0, 2.0], [10.0, 20.0])

    def fn(x: tf.Tensor) -> Any:
      changed.assign_add(x * read)
      return x + 1.0, tf.constant(5), x + 1.0

    traced = _trace(fn, tf.TensorSpec([None], tf.float32))
    lowered = lowering.lower(traced, [tf.TensorShape([2])])
    assert [(spec.shape, spec.dtype.name) for spec in lowered.outputs] == [
      ((2,), "float32"),
      ((), "int32"),
      ((2,), "float32"),
    ]
    assert [each is changed for each in lowered.updated] == [True]
    x = [np.full([2], i, np.float32) for i in range(N)]
    first, constant, again, new = _run(traced, lowered, x)
    assert first == again == [[i + 1.0] * 2 for i in range(N)]
    assert constant == [5] * N
    assert new == [[10.0 + i, 20.0 + 2 * i] for i in range(N)]

  def test_order_of_outputs_when_all_variables_change(self) -> None:
    one, two, three = _variables(1.0, 2.0, 3.0)

    def fn() -> tf.Tensor:
      three.assign(two + 10.0)
      one.assign(three + 100.0)
      return tf.identity(one)

    traced = _trace(fn)
    lowered = lowering.lower(traced, [])
    output, *updated = _run(traced, lowered)
    assert output == [112.0] * N
    found = {id(v): x for v, x in zip(lowered.updated, updated, strict=True)}
    assert found == {id(one): [112.0] * N, id(three): [12.0] * N}

  def test_code_for_cpus(self) -> None:
    spec = tf.TensorSpec([3, 3], tf.float32)
    traced = _trace(tf.linalg.inv, spec)
    with pytest.raises(lowering.TPUCompileError, match=r"Qr.*for CPUs XLA"):
      lowering.lower(traced, [spec.shape])


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
