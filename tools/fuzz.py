"""Trains random programs on four replicas and by plain Keras, and compares.

    python tools/fuzz.py --seeds=500 --start=1000
    python tools/fuzz.py --seeds=500 --start=1000 --virtual
    python tools/fuzz.py --seeds=500 --start=1000 --workers

Prints each program that does not end as it must, and how. Also compares what
`optimizer.describe()` says with the graph of each traced step. To repeat
a program, give its seed as the start. With --virtual, the replicas are on a
virtual TPU, and with --workers two processes; otherwise they are logical
devices. With TF_USE_LEGACY_KERAS=1 it tries tf_keras.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).absolute().parent.parent))

import tensorflow as tf
from absl import logging

logging.set_verbosity(logging.ERROR)
tf.get_logger().setLevel("ERROR")
warnings.filterwarnings("ignore", "Gradients do not exist")

_SEEDS_IN_A_LAUNCH = 10


def main() -> int:
  """Tries the seeds; returns 1 if one fails."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--seeds", type=int, default=100, help="how many")
  parser.add_argument("--start", type=int, default=0, help="the first")
  kinds = parser.add_mutually_exclusive_group()
  kinds.add_argument(
    "--virtual", action="store_true", help="train on a virtual TPU"
  )
  kinds.add_argument(
    "--workers", action="store_true", help="train on two workers"
  )
  arguments = parser.parse_args()
  from tests.support import logical_devices

  logical_devices.split_cpu(4)
  seeds = range(arguments.start, arguments.start + arguments.seeds)
  began = time.monotonic()
  if arguments.workers:
    failures = _on_workers(seeds)
  else:
    failures = _here(seeds, arguments.virtual)
  seconds = time.monotonic() - began
  print(f"{failures} of {arguments.seeds} failed, in {seconds:.0f} s")
  return int(failures > 0)


def _here(seeds: Sequence[int], virtual: bool) -> int:
  """Trains on four replicas of this process; returns how many fail."""
  from tests.support import random_programs

  programs = map(random_programs.draw, seeds)
  if virtual:
    programs = map(random_programs.virtual, programs)
  return sum(not _check(program) for program in programs)


def _on_workers(seeds: Sequence[int]) -> int:
  """Trains on two workers, several programs in a launch."""
  from tests.support import random_programs, workers

  failures = 0
  for i in range(0, len(seeds), _SEEDS_IN_A_LAUNCH):
    part = seeds[i : i + _SEEDS_IN_A_LAUNCH]
    try:
      with tempfile.TemporaryDirectory() as folder:
        done = workers.run(
          "random",
          2,
          timeout=60 + 20.0 * len(part),
          arguments={"seeds": part, "folder": Path(folder)},
        )
    except workers.WorkersFailedError as error:
      if len(part) > 1:  # Find out which one it is.
        failures += sum(_on_workers([seed]) for seed in part)
        continue
      failures += 1
      print(f"FAILED {random_programs.draw(part[0], 2)}\n{error}", flush=True)
      continue
    for seed in part:
      states = [worker.result[seed] for worker in done]
      failures += not _check(random_programs.draw(seed, 2), states)
  return failures


def _check(program: Any, states: Sequence[Any] | None = None) -> bool:
  """Whether a program ends as it must; prints it if it does not."""
  from tests.support import plain_training

  try:
    plain_training.check(program, states)
  except Exception:
    print(f"FAILED {program}\n{traceback.format_exc()}", flush=True)
    return False
  finally:
    tf.keras.backend.clear_session()
  return True


if __name__ == "__main__":
  sys.exit(main())
