"""MultiWorkerStrategy as one worker; the rest is in multi_worker_test.py."""

import os
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from tf_cross_shard import multi_worker
from tf_cross_shard.multi_worker import consistency, strategy


@pytest.fixture(scope="module")
def alone() -> Any:
  """A cluster of one."""
  made = multi_worker.MultiWorkerStrategy()
  assert made.num_replicas_in_sync == 1
  return made


def _results(made: Any) -> Any:
  return made.run(lambda: (tf.constant(3.0), tf.constant([4.0, 6.0])))


def test_scalars_are_reduced_along_any_axis(alone: Any) -> None:
  scalar, vector = _results(alone)
  for axis in (None, 0):
    assert float(alone.reduce("MEAN", scalar, axis=axis)) == 3.0
  assert float(alone.reduce("MEAN", vector, axis=0)) == 5.0
  assert float(alone.reduce("SUM", vector, axis=0)) == 10.0


def test_structures_of_scalars_are_reduced_one_by_one(alone: Any) -> None:
  scalar, _ = _results(alone)
  reduced = alone.reduce("SUM", {"a": scalar, "b": (scalar,)}, axis=None)
  assert float(reduced["a"]) == float(reduced["b"][0]) == 3.0


def test_of_a_batch_the_mean_is_this_workers(alone: Any) -> None:
  batch = alone.reduce("MEAN", _results(alone), axis=None)
  assert [tensor.shape.as_list() for tensor in batch] == [[], [2]]


def test_scopes_nest_and_can_be_entered_again(alone: Any) -> None:
  for _ in range(2):
    with alone.scope() as outer, alone.scope():
      variable = tf.Variable([1.0])
    assert outer is alone
    assert variable.distribute_strategy is alone


@pytest.mark.parametrize("timeout", [0, float("inf")])
def test_timeouts_that_are_none(timeout: float) -> None:
  with pytest.raises(ValueError, match=r"`timeout` .* positive"):
    multi_worker.MultiWorkerStrategy(timeout=timeout)


@pytest.mark.parametrize("timeout", ["0", "soon"])
def test_variables_that_name_no_timeout(timeout: str) -> None:
  with (
    mock.patch.dict(os.environ, {consistency.VARIABLE: timeout}),
    pytest.raises(ValueError, match=f"{consistency.VARIABLE} .*{timeout!r}"),
  ):
    multi_worker.MultiWorkerStrategy()


def test_what_is_known_of_a_variable() -> None:
  def known(**kwargs: Any) -> Any:
    return strategy._Variable(kwargs)

  kernel = known(name="dense_3/my kernel", initial_value=tf.zeros([2, 3]))
  assert str(kernel) == "dense/my_kernel float32 (2, 3)"
  assert kernel.is_like(str(kernel))
  assert kernel.is_like(str(known(name="dense/my kernel", dtype="float32")))
  assert not kernel.is_like(str(known(name="dense/bias", dtype="float32")))
  assert not kernel.is_like(
    str(known(name="dense/my kernel", initial_value=tf.zeros([3, 3])))
  )


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
