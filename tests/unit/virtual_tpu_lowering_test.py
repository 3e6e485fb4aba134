"""From a replica's function to one XLA module."""

from typing import Any

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


class TestTrace:
  def test_captures_and_variables(self) -> None:
    first, _, second = _variables(1.0, 2.0, [3.0])
    constant = tf.constant([1.0, 2.0])

    def fn(x: tf.Tensor) -> Any:
      second.assign_add([1.0])
      return {"a": x * constant + first, "none": None}

    traced = _trace(fn, tf.TensorSpec([None], tf.float32))
    assert [tensor is constant for tensor in traced.captured] == [True]
    assert set(map(id, traced.variables)) == {id(first), id(second)}
    assert set(traced.structure) == {"a", "none"}
    assert [output.shape for output in traced.function.outputs] == [(2,)]

  def test_traced_again_with_the_variables_that_it_makes(self) -> None:
    """Keras asks in Python whether the optimizer's state has been made."""
    made: list[Any] = []

    def fn() -> tf.Tensor:
      if not made:
        made.append(tf.Variable(1.0))
        return tf.zeros([0])
      return made[0] + tf.ones([2])

    assert [output.shape for output in _trace(fn).function.outputs] == [(2,)]

  def test_variables_of_others(self) -> None:
    plain = tf.Variable(1.0, name="plain")
    with testbed.virtual(2).scope():
      foreign = tf.Variable(1.0, name="foreign")
    for variable in (plain, foreign):
      words = rf"not on the virtual TPU.*{variable.name}.*strategy\.scope"
      with pytest.raises(lowering.TPUCompileError, match=words):
        _trace(lambda v=variable: v + 1.0)


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
    assert [variable is changed for variable in lowered.updated] == [True]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
