"""Two Kerases, mixed precision and loss scaling, in real processes.

One launch of two workers trains every cell, another one that of TensorFlow's
strategy; the tests then read what each worker had after each step.
"""
# bazel: size=large timeout=long tags=exclusive

from typing import Any

import numpy as np
import pytest

from tests.support import interplay, testbed, workers
from tests.support import interplay_workers as cells
from tests.support.interplay import Run

WANTED = cells.wanted()


@pytest.fixture(scope="session")
def results() -> list[dict[cells.Key, Any]]:
  """What each worker answered."""
  return _launch("ours")


def _launch(kind: str) -> list[Any]:
  """What the workers answered under TensorFlow's strategy, or ours."""
  count = interplay.REPLICAS[cells.ENGINE]
  arguments = {"kind": kind}
  done = workers.run("interplay", count, arguments=arguments)
  assert len({worker.index for worker in done}) == count > 1
  return [worker.result for worker in done]


Results = list[dict[cells.Key, Any]]


def _joined(results: Results, key: cells.Key) -> Run:
  return interplay.join([result[key] for result in results])


@pytest.mark.parametrize("key", WANTED, ids="-".join)
def test_cell(results: Results, key: cells.Key) -> None:
  """Plain Keras' weights; where a loss is scaled, one worker has a NaN."""
  cell, grouping, options = WANTED[key]
  done = _joined(results, key)
  groups = interplay.GROUPINGS[cells.ENGINE][grouping]
  assert bool(done.steps[-1].skipped) == bool(options)
  interplay.check(cell, done, groups, cells.with_nan(cell, options))


def test_tensorflows_strategy() -> None:
  """In processes of its own, for a second strategy in one process is a race.

  TensorFlow's starts the collectives of a process anew and waits for nobody:
  a worker that is done first may be answered out of what the other still knows
  of the strategy before ("Collective instance 100 expected type ...").
  """
  done = interplay.join(_launch("tensorflow"))
  interplay.check(cells.OF_TENSORFLOW, done, None, with_nan=True)


def test_evaluate_and_predict_of_tf_keras(results: Results) -> None:
  """Means over all workers' examples, and all rows, on every worker."""
  given = interplay.data(len(results), with_nan=False)
  right = given.x @ given.kernel + given.bias
  loss = float(np.mean((right - given.y) ** 2))
  for result in results:
    evaluated, predicted = result["evaluated", "predicted"]
    assert evaluated == pytest.approx(loss, rel=1e-6)
    assert predicted.shape == (right.size, 1)
    testbed.assert_close(predicted, right.reshape(-1, 1), "predictions")


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
