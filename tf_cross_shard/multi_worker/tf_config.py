"""Whether the environment variable TF_CONFIG describes a cluster.

TensorFlow reads it without a check: a wrong type fails far away from here, and
a wrong index or a number of workers that differs hangs.
"""

import json
from typing import Any

_REMEDY = (
  " Set it like"
  ' {"cluster": {"worker": ["host0:12345", "host1:12345"]},'
  ' "task": {"type": "worker", "index": 0}}'
)
_SHOWN = 200  # characters of a bad value that an error repeats


def check(text: str | None) -> None:
  """Raises an error unless `text` is a usable TF_CONFIG."""
  if not text:
    return
  try:
    config = json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(_fault(f"is not JSON ({error})", text)) from error
  if not isinstance(config, dict):
    raise ValueError(_fault("must be a JSON object", text))
  if not config.get("cluster"):
    return  # TensorFlow takes this for one worker without peers.
  cluster = config["cluster"]
  if not isinstance(cluster, dict):
    raise ValueError(
      _fault("must have a `cluster` that maps jobs to addresses", text)
    )
  for job, addresses in cluster.items():
    if addresses or job in ("chief", "worker"):
      _check_addresses(job, _as_list(addresses), text)
  everywhere = [a for each in cluster.values() for a in _as_list(each)]
  repeated = sorted({a for a in everywhere if everywhere.count(a) > 1})
  if repeated:
    raise ValueError(
      _fault(f"gives the address {repeated[0]!r} to two tasks", text)
    )
  _check_task(config.get("task"), cluster, text)


def _as_list(addresses: Any) -> Any:
  """Addresses by index, for a job that numbers them itself."""
  return list(addresses.values()) if isinstance(addresses, dict) else addresses


def _check_addresses(job: str, addresses: Any, text: str) -> None:
  """Raises an error unless a job has addresses."""
  if not isinstance(addresses, list) or not addresses:
    raise ValueError(_fault(f"must list the addresses of job {job!r}", text))
  for address in addresses:
    host, colon, port = str(address).rpartition(":")
    is_port = port.isdecimal() and 0 < int(port) < 65536
    if not (isinstance(address, str) and host and colon and is_port):
      raise ValueError(
        _fault(f"has the address {address!r}, which is no host:port", text)
      )


def _check_task(task: Any, cluster: dict[str, Any], text: str) -> None:
  """Raises an error unless the task is one of the cluster."""
  if not isinstance(task, dict) or not {"type", "index"} <= set(task):
    raise ValueError(_fault("must have a `task` with `type` and `index`", text))
  job, index = task["type"], task["index"]
  if job not in cluster:
    jobs = ", ".join(map(repr, cluster))
    raise ValueError(
      _fault(f"has a task of type {job!r}, but the cluster has {jobs}", text)
    )
  addresses = cluster[job]
  numbered = addresses if isinstance(addresses, dict) else range(len(addresses))
  indices = [str(number) for number in numbered]
  # TensorFlow reads "0" like 0.
  if isinstance(index, bool) or str(index) not in indices:
    known = ", ".join(indices)
    raise ValueError(
      _fault(f"has task index {index!r}, but job {job!r} has {known}", text)
    )


def _fault(fault: str, text: str) -> str:
  """The words for one fault."""
  shown = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
  return f"TF_CONFIG {fault}; got {shown}.{_REMEDY}."
