"""The state of groups, and how workers come to one end.

More of it is in replica_state_test.py and replica_state_workers_test.py.
"""

import json
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer
from tf_cross_shard.multi_worker import coordination, errors
from tf_cross_shard.replica_state import archive, group_state

PAIRS = [[3, 1], [0, 2]]


@pytest.fixture
def state() -> group_state.GroupCopies:
  """An optimizer and a model of four replicas, in two groups."""
  strategy = testbed.mirrored()
  assert strategy.num_replicas_in_sync == 4
  with strategy.scope():
    trained = tf.Variable([0.0, 0.0], name="trained")
    other = tf.Variable([0.0], name="other", trainable=False)
    optimizer = CrossShardOptimizer("sgd", group_assignment=PAIRS)
    optimizer.build([trained])
  cases.spread(trained, [[2.0] * 2, [1.0] * 2, [2.0] * 2, [1.0] * 2])
  cases.spread(other, [[5.0], [6.0], [7.0], [8.0]])
  # A variable that is in both is the optimizer's.
  return group_state.GroupCopies(
    optimizer, [trained, other, trained, optimizer.iterations.value]
  )


def test_each_variable_once(state: group_state.GroupCopies) -> None:
  assert {part.name: part.is_shared for part in state.parts} == {
    "optimizer/sgd/iteration": True,
    "optimizer/sgd/learning_rate": True,
    "model/trained": True,
    "model/other": False,
  }
  assert state.groups.to_lists() == PAIRS


def test_arrays_of_groups_and_members(state: group_state.GroupCopies) -> None:
  apart = state.apart("a test")
  assert apart == {"model/other"}
  arrays = {
    name: array.tolist()
    for name, array in state.arrays(apart)
    if "model/" in name
  }
  assert arrays == {
    "group_0/model/trained": [1.0, 1.0],
    "group_1/model/trained": [2.0, 2.0],
    "group_0/member_0/model/other": [8.0],
    "group_0/member_1/model/other": [6.0],
    "group_1/member_0/model/other": [5.0],
    "group_1/member_1/model/other": [7.0],
  }
  total = sum(array.nbytes for _, array in state.arrays([]))
  assert state.nbytes() == total


def test_groups_of_an_optimizer() -> None:
  plain = tf.keras.optimizers.SGD()
  assert group_state.groups_of(plain, 3).to_lists() == [[0, 1, 2]]
  assert group_state.groups_of(plain, None).to_lists() == [[0]]


def _conclude(
  state: group_state.GroupCopies,
  others: dict[str, Any],
  error: Exception | None = None,
) -> list[Any]:
  """What the first of two workers is told, and tells."""
  state.copies.workers = coordination.Workers(("worker 0", "worker 1"), 0)
  told: list[Any] = []

  def tell(
    workers: Any, topic: str, text: str, patience: float = 0.0
  ) -> list[str]:
    told.extend([topic, json.loads(text), patience])
    theirs = {"error": None, "errno": None, "digest": "d", **others}
    return [text, json.dumps(theirs)]

  with mock.patch.object(coordination, "tell", tell):
    state.conclude("testing", error, "d", 3.0)
  return told


def test_all_is_well(state: group_state.GroupCopies) -> None:
  mine = {"error": None, "errno": None, "digest": "d"}
  assert _conclude(state, {}) == ["testing", mine, 3.0]


@pytest.mark.parametrize(
  ("others", "kind", "words"),
  [
    ({"error": "broken"}, archive.CheckpointError, "On worker 1: broken"),
    ({"error": "denied", "errno": 13}, PermissionError, "On worker 1: denied"),
    ({"digest": "e"}, archive.CheckpointError, "worker 1 and worker 0 read"),
  ],
)
def test_another_worker_has_an_error(
  state: group_state.GroupCopies, others: Any, kind: Any, words: str
) -> None:
  with pytest.raises(kind, match=words):
    _conclude(state, others)


def test_one_has_an_error_of_ones_own(state: group_state.GroupCopies) -> None:
  mine = KeyError("mine")
  with pytest.raises(KeyError, match="mine"):
    _conclude(state, {"error": "theirs"}, mine)


def test_lost_workers_are_not_talked_to(
  state: group_state.GroupCopies,
) -> None:
  state.copies.workers = coordination.Workers(("worker 0", "worker 1"), 0)
  with (
    mock.patch.object(coordination, "tell", side_effect=AssertionError),
    pytest.raises(errors.WorkerLostError, match="lost"),
  ):
    state.conclude("testing", errors.WorkerLostError("lost"))


@pytest.mark.parametrize(
  ("one", "other", "words"),
  [
    ([1, 5], [1, 3], "differ by up to 2"),
    ([True], [False], "differ by up to 1"),
    ([3 + 4j], [0j], "differ by up to 5"),
    ([np.nan, 2.0], [np.nan, 1.0], "differ by up to 1"),
  ],
)
def test_differences_in_words(one: Any, other: Any, words: str) -> None:
  found = group_state._apart_by(np.array(one), np.array(other))
  assert found == words


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
