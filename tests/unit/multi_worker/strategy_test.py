"""MultiWorkerStrategy as one worker; the rest is in multi_worker_test.py."""

import json
import os
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, multi_worker

# Nothing connects to them.
CLUSTER = {"chief": ["localhost:1"], "worker": ["localhost:2"]}


@pytest.fixture(scope="module")
def alone() -> Any:
  """A cluster of one."""
  made = multi_worker.MultiWorkerStrategy()
  assert made.num_replicas_in_sync == 1
  return made


def test_what_keras_reduces(alone: Any) -> None:
  """Reduces scalars along any axis, structures, and parts of a batch."""
  results = alone.run(lambda: (tf.constant(3.0), tf.constant([4.0, 6.0])))
  scalar, vector = results
  for axis in (None, 0):
    assert float(alone.reduce("MEAN", scalar, axis=axis)) == 3.0
  assert float(alone.reduce("MEAN", vector, axis=0)) == 5.0
  assert float(alone.reduce("SUM", vector, axis=0)) == 10.0
  reduced = alone.reduce("SUM", {"a": scalar, "b": (scalar,)}, axis=None)
  assert float(reduced["a"]) == float(reduced["b"][0]) == 3.0
  batch = alone.reduce("MEAN", results, axis=None)
  assert [tensor.shape.as_list() for tensor in batch] == [[], [2]]


def test_scopes_nest_and_can_be_entered_again(alone: Any) -> None:
  for _ in range(2):
    with alone.scope() as outer, alone.scope():
      variable = tf.Variable([1.0])
    assert outer is alone
    assert variable.distribute_strategy is alone


def test_a_strategy_after_the_first_operation_is_explained() -> None:
  late = RuntimeError("Collective ops must be configured at program startup")
  kind = tf.distribute.MultiWorkerMirroredStrategy
  with (
    mock.patch.object(kind, "__init__", side_effect=late),
    pytest.raises(RuntimeError, match="before the first operation"),
  ):
    multi_worker.MultiWorkerStrategy()


def test_timeouts_that_are_none() -> None:
  for timeout in (0, float("inf"), float("nan")):
    with pytest.raises(ValueError, match=r"`timeout` .* positive"):
      multi_worker.MultiWorkerStrategy(timeout=timeout)
  for name in ("TF_CROSS_SHARD_TIMEOUT", "TF_CROSS_SHARD_STEP_TIMEOUT"):
    with (
      mock.patch.dict(os.environ, {name: "soon"}),
      pytest.raises(ValueError, match=f"{name} .*'soon'"),
    ):
      multi_worker.MultiWorkerStrategy()


def _as_task(job: str, cluster: Any = CLUSTER) -> str:
  """Returns a TF_CONFIG of one task, as `launch` sets it."""
  config = {"cluster": cluster, "task": {"type": job, "index": 0}}
  return json.dumps(config)


@pytest.mark.parametrize("job", CLUSTER)
def test_workers_that_would_train_independently_are_refused(job: str) -> None:
  """Under MultiWorkerStrategy they train together: multi_worker_test.py."""
  words = r"lists 2 workers, .*{}.* Use tf_cross_shard.multi_worker.MultiWork"
  with mock.patch.dict(os.environ, TF_CONFIG=_as_task(job)):
    with (
      testbed.mirrored(2).scope(),
      pytest.raises(ValueError, match=words.format("Mirrored")),
    ):
      CrossShardOptimizer("sgd")
    weight = tf.Variable(1.0)  # Without a strategy a model may be loaded,
    optimizer = CrossShardOptimizer("sgd")
    optimizer.build([weight])
    refused = pytest.raises(ValueError, match=words.format("no strategy"))
    with refused:  # but not trained.
      optimizer.apply_gradients([(tf.constant(1.0), weight)])
  assert float(weight.numpy()) == 1.0


@pytest.mark.parametrize("text", ["{'cluster': {}}", '{"cluster": ["a:1"]}'])
def test_a_malformed_variable_is_named_where_an_optimizer_is_made(
  text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("TF_CONFIG", text)
  with (
    testbed.mirrored(2).scope(),
    pytest.raises(ValueError, match=r"^TF_CONFIG cannot be used") as caught,
  ):
    CrossShardOptimizer("sgd")
  assert f"got {text}. Set it like" in str(caught.value)


@pytest.mark.parametrize(
  "text",
  [
    _as_task("evaluator"),
    _as_task("worker", {"worker": ["a:1"]}),
    "",
    '{"cluster": {}}',
  ],
)
def test_a_worker_that_trains_by_itself(
  text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("TF_CONFIG", text)
  with testbed.mirrored(2).scope():
    optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(1.0), "sum")
    weight = tf.Variable(1.0)
    optimizer.build([weight])
    pairs = [(tf.constant(1.0), weight)]
    testbed.mirrored(2).run(lambda: optimizer.apply_gradients(pairs))
  assert float(weight.numpy()) == -1.0  # 1 - 2 * 1


# ------------------------------------------------------------------- TF_CONFIG

ADDRESSES = ["host0:12345", "host1:12345"]


def _text(cluster: Any, job: Any = "worker", index: Any = 0) -> str:
  return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


NUMBERED = {"worker": {"3": ADDRESSES[0], "5": ADDRESSES[1]}}
GOOD = (
  _text({"worker": ADDRESSES}, index=1),
  _text({"worker": ADDRESSES}, index="1"),
  _text({"chief": ADDRESSES[:1], "worker": ADDRESSES[1:]}, "chief"),
  _text(NUMBERED, index=5),
)
BAD = (
  ("{'cluster': {}}", "JSONDecodeError: Expecting property name"),
  ("[1]", "AttributeError: 'list'"),
  (_text(["a:1"]), "TypeError: "),
  (json.dumps({"cluster": {"worker": ADDRESSES}}), "KeyError: 'task'"),
  (_text({"worker": ["host0"]}), "the address 'host0' is not host:port"),
  (_text({"worker": ADDRESSES}, "chief"), "worker 1, but no chief 0"),
  (_text({"worker": ADDRESSES}, index=2), "but no worker 2"),
  (_text({"worker": {"3": "a:1"}}), "has worker 3, but no worker 0"),
)


@pytest.mark.parametrize("text", GOOD)
def test_what_tensorflow_can_use(
  text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The workers of each text are found; they may not train independently."""
  monkeypatch.setenv("TF_CONFIG", text)
  with (
    testbed.mirrored(2).scope(),
    pytest.raises(ValueError, match="lists 2 workers"),
  ):
    CrossShardOptimizer("sgd")


@pytest.mark.parametrize(("text", "fault"), BAD)
def test_what_is_malformed(
  text: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("TF_CONFIG", text)
  words = rf"^TF_CONFIG cannot be used \(.*{fault}"
  with pytest.raises(ValueError, match=words) as caught:
    multi_worker.MultiWorkerStrategy()
  assert f"got {text}" in str(caught.value)
  assert 'Set it like {"cluster": {"worker":' in str(caught.value)
