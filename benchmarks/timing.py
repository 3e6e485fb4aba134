"""Times cases that are compared, on a machine that has other work too.

Other processes slow a machine down for seconds at a time. So the cases take
turns, A B C A B C, and what counts is the ratio of neighbours in one round.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_WARM_UP_ROUNDS = 2  # The first traces, the second fills caches and pools.
_QUARTILES = (50, 25, 75)


@dataclasses.dataclass(frozen=True)
class Row:
  """The time that one case took in one part of a benchmark."""

  part: str
  case: str
  milliseconds: float  # Median over the rounds.
  ratios: dict[str, list[float]]  # By baseline: median and quartiles.


def interleave(
  cases: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, np.ndarray]:
  """Runs the cases in turns; returns milliseconds by name, each `[rounds]`."""
  taken: dict[str, list[float]] = {name: [] for name in cases}
  for _ in range(_WARM_UP_ROUNDS + rounds):
    for name, case in cases.items():
      start = time.perf_counter()
      case()
      taken[name].append(1e3 * (time.perf_counter() - start))
  return {
    name: np.array(values[_WARM_UP_ROUNDS:]) for name, values in taken.items()
  }


def compare(
  part: str, taken: Mapping[str, np.ndarray], baselines: Sequence[str]
) -> list[Row]:
  """Divides each case's time by each baseline's, round by round."""
  return [
    Row(
      part,
      case,
      float(np.median(values)),
      {
        baseline: np.percentile(values / taken[baseline], _QUARTILES).tolist()
        for baseline in baselines
        if baseline in taken
      },
    )
    for case, values in taken.items()
  ]


def show(rows: Sequence[Row]) -> None:
  """Prints the rows of one part as a table."""
  baselines = list(rows[0].ratios)
  heading = "".join(f"{'to ' + name:>24}" for name in baselines)
  print(f"\n{rows[0].part:<34}{'ms':>8}{heading}")
  for row in rows:
    cells = (
      "{:.2f} [{:.2f}, {:.2f}]".format(*row.ratios[name]) for name in baselines
    )
    line = "".join(f"{cell:>24}" for cell in cells)
    print(f"  {row.case:<32}{row.milliseconds:>8.1f}{line}", flush=True)


def machine() -> dict[str, Any]:
  """Returns what a reader must know to judge the figures."""
  return {
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(
      "T", "minutes"
    ),
    "cores": os.cpu_count(),
    "load": list(os.getloadavg()),
    "processor": platform.machine(),
    "python": platform.python_version(),
    "keras": importlib.metadata.version("keras"),
    "tensorflow": _tensorflow_version(),
  }


def write_json(path: str, results: Mapping[str, Any]) -> None:
  """Writes what was measured, and where."""
  with open(path, "w", encoding="utf-8") as file:
    json.dump({"machine": machine(), **results}, file, indent=2)
    file.write("\n")


def _tensorflow_version() -> str:
  """TensorFlow's version, whichever package brought it."""
  import tensorflow as tf  # Slow; timing itself does not need it.

  return str(tf.__version__)


def mirrored(replicas: int) -> Any:
  """Returns a MirroredStrategy over logical CPUs, which it makes."""
  import tensorflow as tf  # Slow; timing itself does not need it.

  tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * replicas,
  )
  return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def peak_megabytes() -> float:
  """Returns the most resident memory that this process had.

  What `resource` knows may be the parent's.
  """
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  [peak] = (line.split()[1] for line in lines if line.startswith("VmHWM"))
  return int(peak) / 1024


def process_size() -> tuple[float, int]:
  """Returns resident megabytes and threads, as Linux counts them."""
  with open("/proc/self/status", encoding="ascii") as file:
    fields = dict(line.split(":", 1) for line in file)
  return int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"])
