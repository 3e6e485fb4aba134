"""A malformed TF_CONFIG is told apart from one that TensorFlow can use."""

import json
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard import multi_worker
from tf_cross_shard.multi_worker import startup

ADDRESSES = ["host0:12345", "host1:12345"]


def _text(cluster: Any, job: Any = "worker", index: Any = 0) -> str:
  return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


GOOD = {
  "not set": None,
  "empty": "",
  "empty cluster": '{"cluster": {}}',
  "workers": _text({"worker": ADDRESSES}, index=1),
  "index as text": _text({"worker": ADDRESSES}, index="1"),
  "chief": _text({"chief": ADDRESSES[:1], "worker": ADDRESSES[1:]}, "chief"),
  "numbered": _text(
    {"worker": {"3": ADDRESSES[0], "5": ADDRESSES[1]}}, index=5
  ),
  "IPv6": _text({"worker": ["[::1]:1", "[::1]:2"]}),
  "more keys": json.dumps(
    {
      "cluster": {"worker": ADDRESSES},
      "task": {"type": "worker", "index": 0, "trial": "1"},
      "rpc_layer": "grpc",
    }
  ),
}
BAD = {
  "no JSON": ("{'cluster': {}}", r"is not JSON \(Expecting property name"),
  "a list": ("[1]", "must have a `cluster` of lists and a `task`"),
  "cluster a list": (
    '{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}',
    "must have a `cluster` of lists and a `task`",
  ),
  "no task": (
    json.dumps({"cluster": {"worker": ADDRESSES}}),
    "must have a `cluster` of lists and a `task`",
  ),
  "no port": (
    _text({"worker": ["host0"]}),
    "has the address 'host0', which is no host:port",
  ),
  "twice": (
    _text({"chief": ["a:1"], "worker": ["a:1"]}),
    "gives one address to two tasks",
  ),
  "another job": (
    _text({"worker": ADDRESSES}, "chief"),
    "has the task chief 0, but the cluster has worker 0, worker 1",
  ),
  "index too large": (
    _text({"worker": ADDRESSES}, index=2),
    "has the task worker 2, but the cluster has worker 0, worker 1",
  ),
  "index true": (_text({"worker": ADDRESSES}, index=True), "has the task w"),
  "number that is not there": (
    _text({"worker": {"3": "a:1"}}, index=0),
    "has the task worker 0, but the cluster has worker 3",
  ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_tensorflow_can_use(name: str) -> None:
  startup.check_tf_config(GOOD[name])


@pytest.mark.parametrize("name", ["workers", "chief", "numbered", "more keys"])
def test_tensorflow_does_use_it(
  name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  text = GOOD[name]
  assert text is not None
  monkeypatch.setenv("TF_CONFIG", text)
  resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
  job, index = resolver.task_type, resolver.task_id
  assert resolver.cluster_spec().task_address(job, index) in ADDRESSES


@pytest.mark.parametrize("name", BAD)
def test_what_is_malformed(name: str) -> None:
  text, fault = BAD[name]
  with pytest.raises(ValueError, match=f"^TF_CONFIG {fault}") as caught:
    startup.check_tf_config(text)
  message = str(caught.value)
  assert f"got {text}" in message
  assert 'Set it like {"cluster": {"worker": ["host0:12345",' in message


def test_the_strategy_looks_at_it_before_it_waits(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setenv("TF_CONFIG", BAD["no port"][0])
  with pytest.raises(ValueError, match=r"^TF_CONFIG has the address 'host0'"):
    multi_worker.MultiWorkerStrategy()


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
