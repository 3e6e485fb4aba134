"""Trains random programs on four replicas and by plain Keras, and compares.

    python tools/fuzz.py --seeds=500 --start=1000

Prints each program that does not end as it must, and how. To repeat it, give
its seed as the start. With TF_USE_LEGACY_KERAS=1 it tries tf_keras.
"""

import argparse
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).absolute().parent.parent))

import tensorflow as tf
from absl import logging

logging.set_verbosity(logging.ERROR)
tf.get_logger().setLevel("ERROR")
warnings.filterwarnings("ignore", "Gradients do not exist")


def main() -> int:
  """Tries the seeds; returns 1 if one fails."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--seeds", type=int, default=100, help="how many")
  parser.add_argument("--start", type=int, default=0, help="the first")
  arguments = parser.parse_args()
  from tests.support import logical_devices

  logical_devices.split_cpu(4)
  from tests.support import plain_training, random_programs

  failures = 0
  began = time.monotonic()
  for seed in range(arguments.start, arguments.start + arguments.seeds):
    program = random_programs.draw(seed)
    try:
      plain_training.check(program)
    except Exception:
      failures += 1
      print(f"FAILED {program}\n{traceback.format_exc()}", flush=True)
    tf.keras.backend.clear_session()
  seconds = time.monotonic() - began
  print(f"{failures} of {arguments.seeds} failed, in {seconds:.0f} s")
  return int(failures > 0)


if __name__ == "__main__":
  sys.exit(main())
