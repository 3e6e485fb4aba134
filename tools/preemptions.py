"""Kills training at random moments, resumes it, and compares the results.

    python tools/preemptions.py --kills=20 --seed=1
    python tools/preemptions.py --kills=20 --seed=1 --workers=2

First a program trains undisturbed. Then the same program is started, killed and
started again until its `fit` is complete, and the next such `fit` begins, until
`--kills` processes were killed. Half of the signals are SIGTERM and half are
SIGKILL, and each goes to one worker. About a quarter of the kills hit the
program before its first batch. A `fit` that ends before its signal does not
count as a kill.

Every `fit` must end with the same history, weights, slots and best weights as
the undisturbed one exactly. The tool prints how many batches each kind of
signal lost and how long it took to resume. It exits with 1 if a `fit` ended
differently. It needs Linux.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).absolute().parent.parent))

from tf_cross_shard_cli import launch

EPOCHS, STEPS = 4, 40  # Of each `fit`.
EVERY = 7  # Batches from one backup to the next.
# Seconds to wait after each batch. Without the pause nearly all of the time
# would be spent in starting, and few signals would hit training.
PAUSE = 0.02
LIMIT = 300.0  # Seconds until a process is killed as hung.


# ------------------------------------------------------------- one worker


def train(folder: pathlib.Path, worker: int, workers: int) -> None:
  """Trains with backups, and logs events with their times.

  The log is a file of JSON lines, [time, kind, ...]. The final state goes to
  another file.
  """
  import numpy as np
  import tensorflow as tf

  from tf_cross_shard import (
    CrossShardOptimizer,
    callbacks,
    multi_worker,
    replica_state,
    schedules,
  )

  log = (folder / f"log_{worker}").open("a", buffering=1)

  def note(*what: Any) -> None:
    print(json.dumps([time.time(), *what]), file=log)

  if workers > 1:
    strategy = multi_worker.MultiWorkerStrategy()
    groups = [[0], [1]]
  else:
    tf.config.set_logical_device_configuration(
      tf.config.list_physical_devices("CPU")[0],
      [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    groups = [[0, 2], [1, 3]]
  note("imported")
  tf.keras.utils.set_random_seed(1)
  layers = tf.keras.layers
  with strategy.scope():
    model = tf.keras.Sequential(
      [
        *(tf.keras.Input((6,)), layers.Dense(16), layers.Dropout(0.25)),
        *(layers.BatchNormalization(), layers.Dense(1)),
      ]
    )
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.Adam(schedules.PerGroup([0.03, 0.01])),
      group_assignment=groups,
      accumulate_steps=3,
    )
    model.compile(optimizer, "mse")
  rng = np.random.default_rng(0)
  x = rng.normal(size=(8 * STEPS, 6)).astype("float32")
  y = rng.normal(size=(8 * STEPS, 1)).astype("float32")
  backup = callbacks.BackupAndRestore(
    folder / "backup",
    # The process may be killed after `fit` and before the final state is saved.
    delete_checkpoint=False,
    every=EVERY,
    on_preemption=True,
    keep=3,
  )

  class Log(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Logs every batch, and every epoch with its metrics."""

    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
      self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
      kind = "passed over" if backup.is_skipping_batches else "trained"
      note(kind, self.epoch * STEPS + batch)
      time.sleep(0.0 if backup.is_skipping_batches else PAUSE)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
      note("epoch", epoch, {k: float(v).hex() for k, v in logs.items()})

  class Begun(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Logs that the backup is restored; comes after the backup callback."""

    def on_train_begin(self, logs: Any = None) -> None:
      note("restored")

  stop = callbacks.GroupEarlyStopping(patience=9)
  best = callbacks.GroupCheckpoint(folder / "best.npz")
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
  options = tf.data.Options()
  options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
  )
  model.fit(
    data.with_options(options),
    epochs=EPOCHS,
    verbose=0,
    callbacks=[
      callbacks.GroupMetrics((x[:8], -y[:8])),
      callbacks.GroupReduceLROnPlateau(factor=0.5, patience=1),
      *(stop, best, Log(), backup, Begun()),
    ],
  )
  # The file holds all groups; the log holds the best values of callbacks.
  replica_state.save(folder / "end.npz", optimizer, model)
  note("end", stop.best, stop.best_epoch, best.best)


# ------------------------------------------------ the process that kills


@dataclasses.dataclass
class Run:
  """One start of all workers.

  Attributes:
    began: The time at which they were started.
    codes: Their exit codes.
    log: What the first worker logged in this run.
    name: The name of the signal that ended it.
  """

  began: float
  codes: list[int]
  log: list[Any]
  name = ""

  def first(self, kind: str) -> float | None:
    """Returns the seconds from the start to the first event of a kind."""
    times = [entry[0] for entry in self.log if entry[1] == kind]
    return times[0] - self.began if times else None

  @functools.cached_property
  def trained(self) -> list[int]:
    """The numbers of the batches that were trained."""
    return [entry[2] for entry in self.log if entry[1] == "trained"]


def _log(folder: pathlib.Path, worker: int = 0) -> list[Any]:
  """Returns the events in a worker's log.

  The last line is left out: it is empty, or incomplete after a kill.
  """
  path = folder / f"log_{worker}"
  text = path.read_text() if path.exists() else ""
  return [json.loads(line) for line in text.split("\n")[:-1]]


def start(
  folder: pathlib.Path,
  workers: int,
  kill: tuple[float, float, int, int] | None,
) -> Run:
  """Runs all workers until they end; may send a signal to one of them.

  Args:
    folder: The folder of this `fit`.
    workers: The number of workers.
    kill: None, or four numbers: seconds after the start at which to send the
      signal; seconds after the first batch at which to send it instead, or -1;
      the number of the worker; the number of the signal.
  """
  environments = launch.cluster(workers) if workers > 1 else [{}]
  known, began = len(_log(folder)), time.time()
  command = [sys.executable, __file__, f"--folder={folder}"]
  command.append(f"--workers={workers}")
  processes = []
  for i, environment in enumerate(environments):
    with (folder / f"output_{i}").open("a") as output:
      processes.append(
        subprocess.Popen(
          [*command, f"--worker={i}"],
          env={**os.environ, **environment},
          stdout=output,
          stderr=output,
        )
      )
  with launch.killed_at_end(processes):
    if kill is not None:
      after_start, after_batch, worker, number = kill

      def is_time(reference: float, seconds: float) -> bool:
        return time.time() > reference + seconds

      while processes[worker].poll() is None:
        if after_batch < 0 and is_time(began, after_start):
          break
        batches = [e for e in _log(folder)[known:] if e[1] == "trained"]
        if after_batch >= 0 and batches and is_time(batches[0][0], after_batch):
          break
        time.sleep(0.01)
      processes[worker].send_signal(number)
    launch.wait(dict(enumerate(processes)), LIMIT, grace=LIMIT)
    codes = [process.poll() for process in processes]
  if None in codes:
    raise RuntimeError(
      f"Processes did not end within {LIMIT:.0f} s; their exit codes are"
      f" {codes}. See output_* in {folder}."
    )
  return Run(began, codes, _log(folder)[known:])


def outcome(folder: pathlib.Path) -> dict[str, Any]:
  """Returns history and final state, as bytes.

  An epoch that was trained twice must have the same metrics both times.
  """
  import numpy as np

  result: dict[str, Any] = {}
  for _, kind, *rest in _log(folder):
    if kind == "epoch":
      assert result.setdefault(f"epoch {rest[0]}", rest[1]) == rest[1], rest
    if kind == "end":
      result["end"] = rest
  for name in ("end", "best"):
    with np.load(folder / f"{name}.npz") as file:
      result |= {f"{name}/{key}": file[key].tobytes() for key in file}
  return result


def _show(name: str, values: list[float], unit: str) -> None:
  if values:
    middle = statistics.median(values)
    print(
      f"{name}: median {middle:.1f}, at most {max(values):.1f} {unit}"
      f" ({len(values)} times)"
    )


def main() -> int:
  """Runs all fits, or is one worker; returns 1 if a `fit` went wrong."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--kills", type=int, default=20, help="how many processes to kill"
  )
  parser.add_argument(
    "--seed", type=int, default=0, help="seed of the moments and signals"
  )
  parser.add_argument(
    "--workers", type=int, default=1, help="processes that train together"
  )
  parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
  parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
  given = parser.parse_args()
  if given.worker is not None:
    train(given.folder, given.worker, given.workers)
    return 0
  rng = random.Random(given.seed)
  home = pathlib.Path(tempfile.mkdtemp(prefix="preemptions"))
  undisturbed = home / "undisturbed"
  undisturbed.mkdir()
  run = start(undisturbed, given.workers, None)
  assert not any(run.codes), (undisturbed / "output_0").read_text()
  right = outcome(undisturbed)
  starting = run.first("trained") or 0.0
  training = (run.first("end") or 0.0) - starting
  print(
    f"undisturbed: {starting:.1f} s to the first batch, {training:.1f} s of"
    " training"
  )
  kills = fits = wrong = 0
  resuming: dict[str, list[float]] = {}
  lost: dict[str, list[float]] = {"SIGTERM": [], "SIGKILL": []}
  # The folder of the current `fit`, and its last run that trained and was
  # killed.
  folder = before = None
  while kills < given.kills or folder is not None:
    if folder is None:
      folder, fits, before = home / f"fit_{fits}", fits + 1, None
      folder.mkdir()
    # Draw the signal and its moment: before the first batch, or within the time
    # that the rest of the training should take.
    number = rng.choice([signal.SIGTERM, signal.SIGKILL])
    is_start = rng.random() < 0.25
    after_start = rng.uniform(0, starting)
    left = training
    if before is not None:
      left *= 1 - before.trained[-1] / (EPOCHS * STEPS)
    after_batch = -1.0 if is_start else rng.uniform(0, left)
    kill = after_start, after_batch, rng.randrange(given.workers), number
    # The last `fit` is not killed any more, and ends.
    due = kill if kills < given.kills else None
    run = start(folder, given.workers, due)
    is_done = not any(run.codes)
    if before is not None and run.trained:
      lost[before.name].append(before.trained[-1] + 1 - run.trained[0])
      begun = run.first("imported"), run.first("restored"), run.first("trained")
      for name, seconds in zip(
        ("imports", "restored backup", "next batch"), begun, strict=True
      ):
        resuming.setdefault(name, []).append(seconds or 0.0)
    if not is_done:
      kills += 1
      name = signal.Signals(number).name
      print(
        f"{kills}: {name} to worker {kill[2]}, exit codes {run.codes}, after"
        f" batch {run.trained[-1] if run.trained else None}",
        flush=True,
      )
      if run.trained:
        run.name, before = name, run
      expected = {-number, 143} if number == signal.SIGTERM else {-number}
      if run.codes[kill[2]] not in expected:
        wrong += 1
        print(f"WRONG exit code; see {folder}")
      continue
    found = outcome(folder)
    odd = [key for key in right if found.get(key) != right[key]]
    wrong += bool(odd)
    print(f"fit {fits}: {f'WRONG {odd[:5]}' if odd else 'equal'}", flush=True)
    if not odd:
      shutil.rmtree(folder)
    folder = None
  print(f"{kills} kills in {fits} fits; {wrong} ended differently")
  for name, batches in lost.items():
    unit = f"batches, with a backup every {EVERY}"
    _show(f"lost by {name}", batches, unit)
  for name, seconds in resuming.items():
    _show(f"time from the start to the {name}", seconds, "s")
  if not wrong:
    shutil.rmtree(home)
  return int(wrong > 0)


if __name__ == "__main__":
  sys.exit(main())
