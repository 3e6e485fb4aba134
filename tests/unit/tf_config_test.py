"""A malformed TF_CONFIG is told apart from one that TensorFlow can use."""

import json
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard import multi_worker
from tf_cross_shard.multi_worker import tf_config

ADDRESSES = ["host0:12345", "host1:12345"]


def _text(cluster: Any, job: Any = "worker", index: Any = 0) -> str:
  return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


GOOD = {
  "not set": None,
  "empty": "",
  "no cluster": "{}",
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
  "cut off": ('{"cluster": {"worker": ["a:1"', "is not JSON"),
  "a list": ("[1]", "must be a JSON object"),
  "a number": ("3", "must be a JSON object"),
  "cluster a list": (
    '{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}',
    "must have a `cluster` that maps jobs to addresses",
  ),
  "cluster a string": (
    '{"cluster": "a:1"}',
    "must have a `cluster` that maps jobs to addresses",
  ),
  "no addresses": (_text({"worker": []}), "must list the addresses of job"),
  "one address": (
    _text({"worker": "host0:12345"}),
    "must list the addresses of job 'worker'",
  ),
  "no port": (
    _text({"worker": ["host0"]}),
    "has the address 'host0', which is no host:port",
  ),
  "no host": (_text({"worker": [":1"]}), "has the address ':1', which is no"),
  "port no number": (
    _text({"worker": ["a:b"]}),
    "has the address 'a:b', which",
  ),
  "port 0": (_text({"worker": ["a:0"]}), "has the address 'a:0', which"),
  "port too large": (
    _text({"worker": ["a:65536"]}),
    "has the address 'a:65536', whi",
  ),
  "address a number": (_text({"worker": [12345]}), "has the address 12345, wh"),
  "twice": (
    _text({"worker": ["a:1", "b:1", "a:1"]}),
    "gives the address 'a:1' to two tasks",
  ),
  "twice in two jobs": (
    _text({"chief": ["a:1"], "worker": ["a:1"]}),
    "gives the address 'a:1' to two tasks",
  ),
  "no task": (
    json.dumps({"cluster": {"worker": ADDRESSES}}),
    "must have a `task` with `type` and `index`",
  ),
  "task without index": (
    json.dumps({"cluster": {"worker": ADDRESSES}, "task": {"type": "worker"}}),
    "must have a `task` with `type` and `index`",
  ),
  "another job": (
    _text({"worker": ADDRESSES}, "chief"),
    "has a task of type 'chief', but the cluster has 'worker'",
  ),
  "index too large": (
    _text({"worker": ADDRESSES}, index=2),
    "has task index 2, but job 'worker' has .*0, 1",
  ),
  "negative index": (
    _text({"worker": ADDRESSES}, index=-1),
    "has task index -1, but job 'worker' has .*0, 1",
  ),
  "index no number": (
    _text({"worker": ADDRESSES}, index="one"),
    "has task index 'one'",
  ),
  "index a fraction": (
    _text({"worker": ADDRESSES}, index=0.5),
    r"has task index 0\.5",
  ),
  "index true": (
    _text({"worker": ADDRESSES}, index=True),
    "has task index True",
  ),
  "index null": (
    _text({"worker": ADDRESSES}, index=None),
    "has task index None",
  ),
  "number that is not there": (
    _text({"worker": {"3": "a:1"}}, index=0),
    "has task index 0, but job 'worker' has .*3",
  ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_tensorflow_can_use(name: str) -> None:
  tf_config.check(GOOD[name])


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
    tf_config.check(text)
  message = str(caught.value)
  assert f"got {text}" in message
  assert 'Set it like {"cluster": {"worker": ["host0:12345",' in message


def test_a_long_value_is_shown_in_part() -> None:
  text = _text({"worker": [f"host{i}:1" for i in range(99)]}, index=99)
  with pytest.raises(ValueError, match="TF_CONFIG has task index 99") as caught:
    tf_config.check(text)
  assert f"got {text[:100]}" in str(caught.value)
  assert text not in str(caught.value)


def test_the_strategy_looks_at_it_before_it_waits(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setenv("TF_CONFIG", BAD["no port"][0])
  with pytest.raises(ValueError, match=r"^TF_CONFIG has the address 'host0'"):
    multi_worker.MultiWorkerStrategy()


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
