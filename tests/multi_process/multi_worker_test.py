"""Real processes that train together, against plain Keras and NumPy.

A launch runs all cases of so many workers at once, since a process takes
seconds to start; the tests then read what each worker had at the end.
"""
# bazel: size=large timeout=long tags=exclusive

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support import multi_worker_cases as cases
from tests.support import oracle, testbed, workers
from tf_cross_shard import groups as groups_lib

LAUNCHES = tuple(cases.CASES)
# The half of the last of so many bits, by which rounding is off at most.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = 2.0**-24  # of float16; rounding to it is off by as much, at most


def _of(function: str) -> Any:
  """The tests of all cases of one function."""
  chosen = [
    (launch, key)
    for launch in LAUNCHES
    for key in cases.cases_of(launch)
    if key[0] == function
  ]
  assert chosen
  return pytest.mark.parametrize(
    ("launch", "key"), chosen, ids=[" ".join([a, *k[1:]]) for a, k in chosen]
  )


class Launches:
  """Starts each launch once, when a test first asks for it."""

  def __init__(self) -> None:
    self.results = functools.cache(self._run)

  def _run(self, launch: str) -> list[dict[Any, Any]]:
    count = int(launch[-1])
    done = workers.run("numbers", count, arguments={"launch": launch})
    assert len({worker.index for worker in done}) == count > 1
    assert all(worker.result["replicas"] == count for worker in done)
    return [worker.result for worker in done]


@pytest.fixture(scope="session")
def launches() -> Launches:
  """All launches of this file."""
  return Launches()


def _groups(count: int, grouping: str) -> groups_lib.Groups:
  return testbed.groups_of(cases.GROUPINGS[count][grouping], count)


def _check(
  held: Sequence[Sequence[np.ndarray]],
  grouping: str,
  expected: Callable[[Sequence[int]], Sequence[Any]],
  bound: Callable[[int, Sequence[int]], Any] | None = None,
) -> None:
  """Every worker holds what its group was to learn; members bitwise.

  Args:
    held: The variables of each worker.
    grouping: The name of the grouping.
    expected: The right values for a group.
    bound: How far a variable may be off, by its number and the members; None
      for not at all.
  """
  groups = _groups(len(held), grouping)
  assert len(held) > 1
  for members in groups:
    right = expected(members)
    for replica in members:
      assert len(held[replica]) == len(right)
      for i, (mine, first, value) in enumerate(
        zip(held[replica], held[members[0]], right, strict=True)
      ):
        assert mine.tobytes() == first.tobytes(), f"replica {replica}, {i}"
        off = np.abs(mine.astype("float64") - np.asarray(value, "float64"))
        allowed = bound(i, members) if bound else 0.0
        assert (off <= allowed).all(), f"replica {replica}, {i}: {off.max()}"


def _assert_groups_differ(
  held: Sequence[Sequence[np.ndarray]], grouping: str
) -> None:
  """So that a sum over the wrong members would have been seen."""
  groups = _groups(len(held), grouping)
  for one in groups:
    for other in groups:
      if one != other:
        assert (held[one[0]][0] != held[other[0]][0]).any()


def _held(launches: Launches, launch: str, key: cases.Key) -> list[Any]:
  return [result[key] for result in launches.results(launch)]


# ---------------------------------------------------------------- regression


@functools.cache
def _plain(
  count: int, optimizer: str, members: tuple[int, ...], factor: float
) -> list[np.ndarray]:
  """Plain Keras on the group's concatenated batch."""
  return testbed.train_plain(
    testbed.Regression(num_replicas=count),
    members,
    testbed.OPTIMIZERS[optimizer](),
    factor,
  )


@_of("regression")
def test_against_plain_keras_and_the_oracle(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  _, grouping, reduction, optimizer, _, *averaged = key
  held = _held(launches, launch, key)
  count = len(held)
  task = testbed.Regression(num_replicas=count)
  is_global = averaged == ["global"]

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    factor = 1.0 if reduction == "mean" else float(len(members))
    # `minimize(callable)` hands in a mean over the replica's own examples. Said
    # to be one over all replicas' examples, it counts num_replicas times.
    factor *= count if is_global else 1
    return _plain(count, optimizer, tuple(sorted(members)), factor)

  def by_hand(members: Sequence[int]) -> list[np.ndarray]:
    return oracle.train(
      task.x, task.y, task.initial, members, reduction, optimizer
    )

  def bound(i: int, members: Sequence[int]) -> float:
    largest = float(np.abs(expected(members)[i]).max())
    return 0.0 if optimizer == "SGD" else 1e-6 * max(1.0, largest)

  _check(held, grouping, expected, bound)
  if optimizer != "RMSprop" and not is_global:
    _check(held, grouping, by_hand, bound)
  _assert_groups_differ(held, grouping)


# ---------------------------------------------------- sums of given gradients


def _dense(kind: str, members: Sequence[int]) -> list[list[np.ndarray]]:
  """Each member's gradients, by variable."""
  each = [cases.dense_gradients(kind, member) for member in members]
  return [list(of_one) for of_one in zip(*each, strict=True)]


def _table(kind: str, replica: int) -> np.ndarray:
  """A replica's sparse gradient, made dense by NumPy."""
  ids, values, _ = cases.sparse_gradients(kind, replica)
  table = np.zeros((cases.ROWS, 2))
  np.add.at(table, ids, values)
  return table


def _sparse(kind: str, members: Sequence[int]) -> list[list[np.ndarray]]:
  """Each member's gradients, those of the table and of the dense variable."""
  return [
    [_table(kind, member) for member in members],
    [cases.sparse_gradients(kind, member)[2] for member in members],
  ]


def _negative_sums(
  given: Callable[[Sequence[int]], list[list[np.ndarray]]],
  members: Sequence[int],
) -> list[np.ndarray]:
  return [-np.sum(np.asarray(v, "float64"), axis=0) for v in given(members)]


@_of("dense_sum")
def test_dense_sums(launches: Launches, launch: str, key: cases.Key) -> None:
  """Whole numbers: exact, whatever travels; others within the wire's bits.

  Each gradient is rounded once to what travels and the sum is so once more:
  every term was multiplied by at most `(1 + u) ** 2`, and by a little for each
  addition in float32.
  """
  _, kind, grouping, _, *wire = key
  held = _held(launches, launch, key)
  given = functools.partial(_dense, kind)

  def bound(i: int, members: Sequence[int]) -> Any:
    terms = np.abs(np.asarray(given(members)[i], "float64")).sum(axis=0)
    n = len(members)
    relative = (1 + UNIT[wire[0]]) ** 2 * (1 + 2.0**-24) ** n - 1
    return relative * terms + (n + 1) * SMALLEST

  is_exact = kind != "normal" or _groups(len(held), grouping).group_size == 1
  expected = functools.partial(_negative_sums, given)
  _check(held, grouping, expected, None if is_exact else bound)
  if not is_exact:
    right = expected(_groups(len(held), grouping).members_of(0))
    off = np.abs(held[0][0] - right[0])
    assert off.max() > 1e-4, "nothing was narrowed"
  _assert_groups_differ(held, grouping)


@_of("sparse_sum")
def test_sparse_sums(launches: Launches, launch: str, key: cases.Key) -> None:
  """Rows travel as they are; they add up after each was widened again."""
  _, kind, grouping, _, *wire = key
  held = _held(launches, launch, key)
  given = functools.partial(_sparse, kind)
  is_exact = kind != "normal" or _groups(len(held), grouping).group_size == 1

  def bound(i: int, members: Sequence[int]) -> Any:
    terms = np.abs(np.asarray(given(members)[i], "float64")).sum(axis=0)
    # Once on the wire, and a little for each sum in float32.
    unit = (1 + UNIT[wire[0]]) * (1 + 2.0**-24) ** len(members) - 1
    return unit * terms + len(members) * SMALLEST

  expected = functools.partial(_negative_sums, given)
  _check(held, grouping, expected, None if is_exact else bound)
  if not is_exact:
    right = expected(_groups(len(held), grouping).members_of(0))
    assert np.abs(held[0][0] - right[0]).max() > 1e-4, "nothing was narrowed"
  if kind != "nowhere":
    _assert_groups_differ(held, grouping)
  else:
    assert not held[0][0].any()


@_of("two_optimizers")
def test_two_groupings_in_one_step(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  held = _held(launches, launch, key)
  for i, grouping in enumerate(key[1:]):

    def expected(members: Sequence[int], i: int = i) -> list[np.ndarray]:
      sums = _negative_sums(lambda them: _dense("two", them), members)
      return [cases.STEPS * sums[i]]

    one = [[each[i]] for each in held]
    _check(one, grouping, expected)
    _assert_groups_differ(one, grouping)


@_of("retrace")
def test_one_worker_traces_anew(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  held = _held(launches, launch, key)

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    sums = _negative_sums(lambda them: _dense("retrace", them), members)
    return [cases.STEPS * each for each in sums]

  _check(held, key[2], expected)
  _assert_groups_differ(held, key[2])


_small = functools.partial(_dense, "small")


def test_one_strategy_after_the_other() -> None:
  """None makes variables before the slowest worker is there too.

  TensorFlow's strategy alone waits for nobody when it is made again: the
  faster worker meets what the other one still knows of the strategy before.
  """
  done = workers.run(
    "one_after_the_other", 2, per_worker=[{"delay": 0.5}, {"delay": 0.0}]
  )
  assert len(done) == 2
  for made in zip(*(worker.result for worker in done), strict=True):
    grouping = made[0][0]
    assert [first for _, first, _ in made] == [[2], [2]]
    held = [sums for *_, sums in made]
    _check(held, grouping, lambda them: _negative_sums(_small, them))
    _assert_groups_differ(held, grouping)


# ---------------------------------------------------------------- loss scales


@_of("overflowing")
def test_the_loss_scale_heeds_what_travels(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  """float16 ends at 65,504; what overflows on the wire is no step."""
  _, wire, grouping = key
  held = _held(launches, launch, key)
  groups = _groups(len(held), grouping)
  size = groups.group_size
  for replica, found in enumerate(held):
    assert found == held[groups.members_of(replica)[0]]
    weight, scale = 0.0, cases.LARGEST_SCALE
    skipped = []
    for after, scale_after in zip(
      found["weights"], found["scales"], strict=True
    ):
      skipped.append(scale_after < scale)
      assert scale_after == (scale / 2 if skipped[-1] else scale)
      assert after == (weight if skipped[-1] else weight - 100.0 * size)
      weight, scale = after, scale_after
    is_narrow = wire == "float16" and size > 1
    # At first a gradient is itself too large, whatever becomes of the sum.
    assert skipped[0] == is_narrow
    assert not skipped[-1]
    assert 100.0 * scale <= 65504.0 or not is_narrow


@_of("one_is_not_finite")
def test_a_group_skips_a_step_together(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  held = _held(launches, launch, key)
  groups = _groups(len(held), key[1])
  size = groups.group_size
  for replica, found in enumerate(held):
    if 1 in groups.members_of(replica):
      half = cases.LARGEST_SCALE / 2
      assert found == {"weights": [0.0, -size], "scales": [half, half]}
    else:
      whole = cases.LARGEST_SCALE
      assert found == {"weights": [-size, -2 * size], "scales": [whole, whole]}


# ------------------------------------------------------------ Keras' own loop


@functools.cache
def _twin(
  count: int, optimizer: str, members: tuple[int, ...]
) -> tuple[Any, dict[str, list[float]]]:
  """Plain Keras' `fit` on a group's part of each batch, and its history."""
  x, y = cases.fit_data(count)
  rows = list(members)
  model = cases.network()
  model.compile(testbed.OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
  history = model.fit(
    cases.batches(x[:, rows], y[:, rows]),
    epochs=cases.FIT["epochs"],
    verbose=0,
  )
  return model, history.history


@_of("fit")
def test_fit(launches: Launches, launch: str, key: cases.Key) -> None:
  _, optimizer, grouping = key
  held = [found["weights"] for found in _held(launches, launch, key)]
  count = len(held)

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    twin, _ = _twin(count, optimizer, tuple(sorted(members)))
    return [variable.numpy() for variable in twin.trainable_variables]

  def bound(i: int, members: Sequence[int]) -> float:
    return 1e-6 * max(1.0, float(np.abs(expected(members)[i]).max()))

  _check(held, grouping, expected, bound)
  _assert_groups_differ(held, grouping)


@_of("fit")
def test_metrics_of_fit_and_evaluate(
  launches: Launches, launch: str, key: cases.Key
) -> None:
  """Means over all workers' examples, the same number on all of them."""
  _, optimizer, grouping = key
  held = _held(launches, launch, key)
  count = len(held)
  groups = _groups(count, grouping)
  twins = [
    _twin(count, optimizer, groups.members_of(replica))
    for replica in range(count)
  ]
  x, y = cases.fit_data(count)
  parts = [
    twin.evaluate(
      cases.batches(x[:, [replica]], y[:, [replica]]),
      verbose=0,
      return_dict=True,
    )
    for replica, (twin, _) in enumerate(twins)
  ]
  for found in held:
    assert found["evaluated"] == held[0]["evaluated"]
    for name in ("loss", "mae"):
      whole = np.mean([part[name] for part in parts])
      assert found["evaluated"][name] == pytest.approx(whole, rel=1e-5)
      epochs = np.mean([history[name] for _, history in twins], axis=0)
      assert found["history"][name] == pytest.approx(list(epochs), rel=1e-5)


@_of("fit")
def test_predict(launches: Launches, launch: str, key: cases.Key) -> None:
  """All rows on every worker, each by the group that its replica is in."""
  _, optimizer, grouping = key
  held = [found["predicted"] for found in _held(launches, launch, key)]
  count = len(held)
  groups = _groups(count, grouping)
  x, _ = cases.fit_data(count)
  by_replica = [
    _twin(count, optimizer, groups.members_of(replica))[0]
    .predict(x[:, replica].reshape(-1, x.shape[-1]), verbose=0)
    .reshape(len(x), x.shape[2], -1)
    for replica in range(count)
  ]
  right = np.stack(by_replica, axis=1).reshape(x[..., 0].size, -1)
  for predicted in held:
    assert predicted.shape == right.shape
    testbed.assert_close(predicted, right, "predictions")
    np.testing.assert_array_equal(predicted, held[0])


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
