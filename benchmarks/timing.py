"""Compares the times of several cases on a machine that does other work too.

Other processes slow a machine down for seconds at a time. The cases therefore
run in turns, A B C A B C, and each time is divided by the time of a baseline
case in the same round. Benchmarks report the median and the quartiles of these
ratios.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags

from tf_cross_shard import local_strategy

# Rounds that do not count: the first one traces, the second one fills caches
# and memory pools.
_WARM_UP_ROUNDS = 2
_QUARTILES = (50, 25, 75)


@dataclasses.dataclass(frozen=True)
class Row:
  """The time that one case took in one part of a benchmark.

  `ratios` has, by name of the baseline, the median and the quartiles of the
  ratios of this case's time to the baseline's.
  """

  part: str
  case: str
  milliseconds: float
  ratios: dict[str, list[float]]


def define_choices(
  name: str, choices: Sequence[str]
) -> flags.FlagHolder[list[str]]:
  """Defines an option that takes some of the choices, all by default."""
  known = ", ".join(choices)
  holder = flags.DEFINE_list(name, list(choices), f"Some of: {known}.")
  flags.register_validator(
    holder,
    lambda chosen: set(chosen) <= set(choices),
    f"--{name} must name some of: {known}.",
  )
  return holder


def interleave(
  cases: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, np.ndarray]:
  """Runs the cases in turns, `rounds` times each.

  Returns the milliseconds of each run: by name, an array of shape `[rounds]`.
  """
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
  """Returns the date, the load and the versions that figures depend on."""
  return {
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(
      "T", "minutes"
    ),
    "cores": os.cpu_count(),
    "load": list(os.getloadavg()),
    "processor": platform.machine(),
    "python": platform.python_version(),
    "keras": importlib.metadata.version("keras"),
    "tensorflow": tf.__version__,
  }


def write_json(path: str, results: Mapping[str, Any]) -> None:
  """Writes the results, and the machine they were measured on, to a file."""
  with open(path, "w", encoding="utf-8") as file:
    json.dump({"machine": machine(), **results}, file, indent=2)
    file.write("\n")


def mirrored(replicas: int) -> Any:
  """Returns a MirroredStrategy over GPUs, or else over logical CPUs.

  If there are fewer GPUs than replicas, the replicas share the first one.
  """
  gpus = tf.config.list_physical_devices("GPU")
  if 0 < len(gpus) < replicas:
    part = tf.config.LogicalDeviceConfiguration(memory_limit=4096)
    tf.config.set_logical_device_configuration(gpus[0], [part] * replicas)
  return local_strategy(replicas)


def keras_reducer(grads: Any) -> Any:
  """Sums gradients over the replicas in the same way as a Keras optimizer."""
  context = tf.distribute.get_replica_context()
  return context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
