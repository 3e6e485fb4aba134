"""Tests of the checks that run before a step."""

import threading
from typing import Any

import pytest

from tests.support import testbed, training

_LIMIT = 20.0  # seconds


@training.in_both
def test_two_threads_at_once_raise_an_error(which: str) -> None:
  keras, package = training.KERASES[which]
  inside, resume = threading.Event(), threading.Event()

  class Slow(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer whose update waits for another thread."""

    def update_step(self, *args: Any) -> None:
      inside.set()
      assert resume.wait(_LIMIT)
      super().update_step(*args)

  weight = testbed.variable([8.0], "weight", keras)
  optimizer = package.CrossShardOptimizer(Slow(0.5))
  optimizer.build([weight])

  def step() -> None:
    optimizer.apply_gradients([(weight * 0 + 2.0, weight)])

  other = threading.Thread(target=step)
  other.start()
  assert inside.wait(_LIMIT)
  with pytest.raises(RuntimeError, match="Two threads called CrossShard"):
    step()
  resume.set()
  other.join(_LIMIT)
  assert weight.numpy().tolist() == [7.0]
  step()  # The threads may take turns.
  assert weight.numpy().tolist() == [6.0]
