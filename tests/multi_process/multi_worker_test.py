"""Real processes that train together, against plain Keras and NumPy.

Each launch starts several workers and runs all cases in them, because a process
takes seconds to start. The tests then read the values that each worker had at
the end.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support import mixed_precision, testbed, training, workers
from tests.support import multi_worker_cases as cases
from tf_cross_shard import groups as groups_lib

# Half a unit in the last place: the largest relative error of rounding.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = 2.0**-24  # of float16: the largest absolute error of rounding


def _of(*functions: str) -> Any:
  """Returns a mark that runs a test with all cases of some functions.

  Four workers take a minute on two cores, so they are slow.
  """
  chosen = [
    pytest.param(
      *(launch, key),
      id=" ".join([launch, *key]),
      marks=[pytest.mark.slow] if launch == "own-4" else [],
    )
    for launch in cases.CASES
    for key in cases.cases_of(launch)
    if key[0] in functions
  ]
  assert chosen
  return pytest.mark.parametrize(("launch", "key"), chosen)


class Launches:
  """Starts each launch once, when a test first asks for it."""

  def __init__(self) -> None:
    self.results = functools.cache(self._run)

  def _run(self, launch: str) -> list[Any]:
    count = int(launch[-1])
    if launch == "own-2":  # started at different times
      done = workers.run("two", 2, per_worker=[{"delay": 0.5}, {"delay": 0.0}])
    else:
      done = workers.run("numbers", count, arguments={"launch": launch})
    assert len({worker.index for worker in done}) == count > 1
    return [worker.result for worker in done]


@pytest.fixture(scope="session")
def launches() -> Launches:
  return Launches()


def _groups(count: int, grouping: str) -> groups_lib.Groups:
  return testbed.groups_of(cases.GROUPINGS[count][grouping], count)


def _check(
  held: Sequence[Any], grouping: str, *expected: Callable[..., Any]
) -> None:
  training.check_groups(held, _groups(len(held), grouping), *expected)


def _held(launches: Launches, launch: str, key: cases.Key) -> list[Any]:
  return [result[key] for result in launches.results(launch)]


# ---------------------------------------------------- sums of given gradients


def _given(
  function: str, kind: str, members: Sequence[int]
) -> list[list[np.ndarray]]:
  """Returns the gradients of each member, by variable, all of them dense."""
  each = []
  for member in members:
    if function == "sparse_sum":
      ids, values, dense = cases.sparse_gradients(kind, member)
      table = np.zeros((cases.ROWS, 2))
      np.add.at(table, ids, values)
      each.append([table, dense])
    else:
      each.append(cases.dense_gradients(kind, member))
  return [list(of_one) for of_one in zip(*each, strict=True)]


def _negative_sums(
  function: str, kind: str, members: Sequence[int]
) -> list[np.ndarray]:
  return [
    -np.sum(np.asarray(given, "float64"), axis=0)
    for given in _given(function, kind, members)
  ]


@_of("dense_sum", "sparse_sum")
def test_gradient_sums_over_workers(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  """Sums of integers are exact. Others have the rounding error of wire_dtype.

  A gradient is rounded once to the wire dtype, and a dense sum once more. So
  each term has a relative error of at most `(1 + u) ** 2 - 1`, and a small
  additional error for each addition in float32. Rows are converted back before
  they are added.
  """
  function, kind, grouping, _, *wire = key
  held = _held(launches, launch, key)
  expected = functools.partial(_negative_sums, function, kind)
  if kind != "normal":
    _check(held, grouping, expected)
    return

  def bound(_: Any, i: int, members: Sequence[int]) -> Any:
    given = np.asarray(_given(function, kind, members)[i], "float64")
    n, roundings = len(members), 1 if function == "sparse_sum" else 2
    relative = (1 + UNIT[wire[0]]) ** roundings * (1 + 2.0**-24) ** n - 1
    return relative * np.abs(given).sum(axis=0) + (n + 1) * SMALLEST

  _check(held, grouping, expected, bound)
  right = expected(_groups(len(held), grouping).members_of(0))
  assert np.abs(held[0][0] - right[0]).max() > 1e-4, "nothing was narrowed"


@_of("sharded")
def test_sharded(launches: Launches, launch: str, key: cases.Key) -> None:
  """Compares with plain Keras; the state is saved and loaded between steps."""
  _, grouping, optimizer, *_ = key
  held = _held(launches, launch, key)
  task = training.Regression(num_replicas=len(held))

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    plain = testbed.OPTIMIZERS[optimizer]()
    return task.train_alone(sorted(members), plain)

  _check(held, grouping, expected)


@_of("islands")
def test_islands(launches: Launches, launch: str, key: cases.Key) -> None:
  """An outer step sets all groups to their mean weights."""
  held = _held(launches, launch, key)
  groups = _groups(len(held), key[1])
  sums = functools.partial(_negative_sums, "dense_sum", "small")
  totals = sums(range(len(held)))
  synchronized = [(1.0 + 2.0) * each / groups.num_groups for each in totals]
  for each in held:
    for mine, expected in zip(each["synchronized"], synchronized, strict=True):
      np.testing.assert_array_equal(mine, expected)

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    return [
      a + 3.0 * b for a, b in zip(synchronized, sums(members), strict=True)
    ]

  _check([each["at the end"] for each in held], key[1], expected)


@_of("retrace")
def test_one_worker_traces_anew(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  def expected(members: Sequence[int]) -> list[np.ndarray]:
    sums = _negative_sums("dense_sum", "retrace", members)
    return [cases.STEPS * total for total in sums]

  _check(_held(launches, launch, key), key[1], expected)


def test_one_strategy_after_the_other(launches: Launches) -> None:
  """No worker makes variables before the slowest worker has started.

  TensorFlow's own strategy does not wait when it is made again: the faster
  worker would use state that the other worker still has from the previous
  strategy.
  """
  results = [result["one after the other"] for result in _two(launches)]
  for made in zip(*results, strict=True):
    assert [first for _, first, _ in made] == [[2], [2]]
    held = [sums for *_, sums in made]
    expected = functools.partial(_negative_sums, "dense_sum", "small")
    _check(held, made[0][0], expected)


def _two(launches: Launches) -> list[Any]:
  return launches.results("own-2")


# ------------------------------------------------------------ Keras' own loop


def _forward(weights: Sequence[np.ndarray], x: np.ndarray) -> np.ndarray:
  """Returns the outputs of `testbed.network` with these weights."""
  kernel, bias, last_kernel, last_bias = weights
  return np.tanh(x @ kernel + bias) @ last_kernel + last_bias


@_of("fit")
def test_fit_evaluate_and_predict(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  """Metrics are means over the examples of all workers, on every worker.

  `predict` returns all rows, each by the group of its replica.
  """
  held = _held(launches, launch, key)
  x, y = cases.fit_data(len(held))
  groups = _groups(len(held), key[2])
  right = np.zeros_like(y)
  for replica, result in enumerate(held):
    right[:, replica] = _forward(result["weights"], x[:, replica])
    kernel = result["weights"][0]
    for other, its in enumerate(held):
      is_equal = its["weights"][0].tobytes() == kernel.tobytes()
      assert is_equal == (other in groups.members_of(replica))
  metrics = {"loss": ((right - y) ** 2).mean(), "mae": abs(right - y).mean()}
  for result in held:
    assert result["evaluated"] == held[0]["evaluated"]
    assert result["evaluated"] == pytest.approx(metrics, rel=1e-5)
    rows = right.reshape(-1, right.shape[-1])
    training.assert_close(result["predicted"], rows, "predictions")
    np.testing.assert_array_equal(result["predicted"], held[0]["predicted"])


@_of("group_callbacks")
def test_callbacks_for_groups(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  """The first worker evaluates, and all workers decide alike."""
  held = _held(launches, launch, key)
  x, y = cases.fit_data(len(held))
  for i, members in enumerate(_groups(len(held), key[1])):
    outputs = [_forward(w, x) for w in held[members[0]]["of_epoch"]]
    losses = [((output - y) ** 2).mean() for output in outputs]
    for found in held:
      assert found["history"] == held[0]["history"]
      assert found["best_epoch"] == [0, 1]
      values = found["history"][f"val_loss/model_{i}"]
      assert values == pytest.approx(losses, rel=1e-5)
      assert found["rates"] == [0.125, 0.0625]
      # All have what BackupAndRestore is to keep, of all groups.
      assert found["state"] == held[0]["state"]
      # Five rows; the best weights; stopped, with two variables of SGD.
      weights = len(found["weights"])
      assert len(found["state"]) == 5 + weights + (weights + 2) + 3
    for replica in members:
      found = held[replica]
      assert found["runs"] == ["ensemble", "model_0", "model_1"]
      assert found["files"] == 1
      # Group 0 had its best after it had stopped.
      for name, epochs in (("weights", (0, 1)), ("restored", (2, 1))):
        right = found["of_epoch"][epochs[i]]
        for mine, value in zip(found[name], right, strict=True):
          np.testing.assert_array_equal(mine, value)


# ------------------------------------------- mixed precision and loss scaling


@pytest.mark.parametrize("cell", mixed_precision.WORKER_CELLS, ids=str)
def test_mixed_precision(
  launches: Launches, cell: mixed_precision.Cell
) -> None:
  """Weights are those of plain Keras on the whole batch.

  If the loss is scaled, one worker has a NaN, and all must skip this step.
  """
  held = [own for result in _two(launches) for own in result[cell]]
  mixed_precision.check(cell, held, mixed_precision.WORKER_CELLS[cell])


def test_workers_get_the_same_number_of_batches(launches: Launches) -> None:
  first, second = (result["even"] for result in _two(launches))
  batches = [[[i, i + 1.0], [-i, -i - 1.0]] for i in (1.0, 3.0, 5.0, 7.0)]
  assert first["stop"] == second["stop"] == batches[:2]
  ones, zeros = [1.0, 1.0], [0.0, 0.0]
  padded = [[*b, ones] for b in batches[:2]] + 2 * [[*batches[0], zeros]]
  assert first["pad"] == first["unknown length"] == padded
  assert second["pad"] == [[*b, ones] for b in batches]
  # The user's sample weights are kept.
  weights = [weight for *_, weight in first["weighted"]]
  assert weights == 2 * [[0.5, 2.0]] + 2 * [zeros]
  for found in (first, second):
    assert "same on all workers" in found["modes"]
    assert re.search(r"an end and a batch .* got \[0, 4\]", found["none"])
    assert re.search(r"got \[-1, 4\] batches", found["endless"])


def test_mixed_precision_under_tensorflows_strategy(launches: Launches) -> None:
  cell = mixed_precision.OF_TENSORFLOW
  results = launches.results("tensorflow-2")
  held = [own for result in results for own in result[cell]]
  mixed_precision.check(cell, held, mixed_precision.WORKER_CELLS[cell])


def test_evaluate_and_predict_of_tf_keras(launches: Launches) -> None:
  """Every worker gets means over all examples, and all predictions."""
  given = mixed_precision.data(2, has_nan=False)
  right = given.x @ given.kernel + given.bias
  loss = float(np.mean((right - given.y) ** 2))
  for result in _two(launches):
    evaluated, predicted = result["evaluated"]
    assert evaluated == pytest.approx(loss, rel=1e-6)
    assert predicted.shape == (right.size, 1)
    training.assert_close(predicted, right.reshape(-1, 1), "predictions")
