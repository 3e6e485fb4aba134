"""Kills training at random moments, resumes it, and compares the results.

    python tools/preemptions.py --kills=20 --seed=1
    python tools/preemptions.py --kills=20 --seed=1 --workers=2
    python tools/preemptions.py --kills=20 --seed=1 --programs=rows,halving

Each `fit` is of a random program of `preemption_programs.py`. The program is
started, killed and started again until its `fit` is complete, and the next
`fit` begins, until `--kills` processes were killed. The signals are SIGTERM,
SIGKILL and SIGSTOP, and each goes to one worker. A process that got SIGSTOP
continues after at most three seconds, which does not count as a kill. About
a quarter of the signals hit the program before its first batch. A `fit` that
ends before its signal does not count as a kill.

Every `fit` must end with the same history, weights, slots and best weights as
an undisturbed `fit` of the same program, exactly. The tool prints how many
batches each kind of signal lost, and how long it took to resume. It exits with
1 if a `fit` ended differently. It needs Linux.
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

import preemption_programs as programs

from tf_cross_shard_cli import launch

STOP = 3.0  # Seconds at most from SIGSTOP to SIGCONT.
LIMIT = 300.0  # Seconds until a process is killed as hung.


# ------------------------------------------------ the process that kills


@dataclasses.dataclass(frozen=True)
class Signal:
  """A signal to one worker, and when to send it.

  Attributes:
    number: SIGTERM, SIGKILL or SIGSTOP.
    worker: The number of the worker.
    after_start: Seconds from the start of the workers to the signal.
    after_batch: Seconds from the first batch to the signal, instead of
      `after_start`; None for `after_start`.
    pause: Seconds from SIGSTOP to SIGCONT.
  """

  number: signal.Signals
  worker: int
  after_start: float
  after_batch: float | None
  pause: float


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

  def is_killed_by(self, sent: Signal) -> bool:
    """Returns whether the worker's exit code is that of the signal."""
    # On SIGTERM, BackupAndRestore ends the process with 143 when it is ready.
    codes = {signal.SIGTERM: {-15, 143}, signal.SIGKILL: {-9}}
    return self.codes[sent.worker] in codes.get(sent.number, set())

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
  program: str,
  workers: int,
  sent: Signal | None,
) -> Run:
  """Runs all workers until they end; may send a signal to one of them.

  Args:
    folder: The folder of this `fit`.
    program: The name of the program.
    workers: The number of workers.
    sent: The signal to send; None to send no signal.
  """
  environments = launch.cluster(workers) if workers > 1 else [{}]
  known, began = len(_log(folder)), time.time()
  command = [sys.executable, programs.__file__, str(folder), program]
  processes = []
  for i, environment in enumerate(environments):
    with (folder / f"output_{i}").open("a") as output:
      processes.append(
        subprocess.Popen(
          [*command, str(i), str(workers)],
          env={**os.environ, **environment},
          stdout=output,
          stderr=output,
        )
      )
  with launch.killed_at_end(processes):
    if sent is not None:
      process = processes[sent.worker]
      while process.poll() is None and not _is_due(
        sent, began, _log(folder)[known:]
      ):
        time.sleep(0.01)
      process.send_signal(sent.number)
      if sent.number == signal.SIGSTOP:
        time.sleep(sent.pause)
        process.send_signal(signal.SIGCONT)
    launch.wait(dict(enumerate(processes)), LIMIT, grace=LIMIT)
    codes = [process.poll() for process in processes]
  if None in codes:
    raise RuntimeError(
      f"Processes did not end within {LIMIT:.0f} s; their exit codes are"
      f" {codes}. See output_* in {folder}."
    )
  return Run(began, codes, _log(folder)[known:])


def _is_due(sent: Signal, began: float, log: list[Any]) -> bool:
  """Returns whether it is time to send a signal.

  `began` is when the workers were started, and `log` has their events since.
  """
  if sent.after_batch is None:
    return time.time() > began + sent.after_start
  first = next((event[0] for event in log if event[1] == "trained"), None)
  return first is not None and time.time() > first + sent.after_batch


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
  for path in sorted(folder.glob("*.npz")):
    with np.load(path) as file:
      result |= {f"{path.stem}/{key}": file[key].tobytes() for key in file}
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
  parser.add_argument(
    "--programs",
    type=lambda names: names.split(","),
    default=list(programs.PROGRAMS),
    help="the programs to draw from, separated by commas",
  )
  given = parser.parse_args()
  rng = random.Random(given.seed)
  home = pathlib.Path(tempfile.mkdtemp(prefix="preemptions"))
  chosen = [
    name
    for name in given.programs
    if given.workers == 1 or programs.PROGRAMS[name].on_workers
  ]
  undisturbed: dict[str, Undisturbed] = {}
  total = Counts()
  fits = 0
  while total.kills < given.kills:
    name = rng.choice(chosen)
    if name not in undisturbed:
      undisturbed[name] = train_undisturbed(home, name, given.workers)
    folder, fits = home / f"fit_{fits}", fits + 1
    folder.mkdir()
    before = total.wrong
    fit(folder, name, undisturbed[name], given, rng, total)
    print(
      f"fit {fits} ({name}): {'equal' if total.wrong == before else 'WRONG'}",
      flush=True,
    )
    if total.wrong == before:
      shutil.rmtree(folder)
  show(total, fits)
  if not total.wrong:
    shutil.rmtree(home)
  return int(total.wrong > 0)


@dataclasses.dataclass(frozen=True)
class Undisturbed:
  """The result of a `fit` to which no signal was sent.

  Attributes:
    outcome: Its history and final state.
    starting: The seconds from the start to the first batch.
    training: The seconds from the first batch to the end.
    batches: How many batches it trained.
  """

  outcome: dict[str, Any]
  starting: float
  training: float
  batches: int


@dataclasses.dataclass
class Counts:
  """The results of all fits so far.

  Attributes:
    kills: How many processes were killed.
    stops: How many processes were stopped and continued.
    wrong: How many fits or processes ended differently.
    lost: The batches that each kill lost, by the name of the signal.
    resuming: Seconds from a start to what was reached, by its name.
  """

  kills: int = 0
  stops: int = 0
  wrong: int = 0
  lost: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  resuming: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def train_undisturbed(
  home: pathlib.Path, program: str, workers: int
) -> Undisturbed:
  """Runs a program until its end, without signals."""
  folder = home / f"undisturbed_{program}"
  folder.mkdir()
  run = start(folder, program, workers, None)
  assert not any(run.codes), (folder / "output_0").read_text()
  starting = run.first("trained") or 0.0
  training = (run.first("end") or 0.0) - starting
  print(
    f"{program}, undisturbed: {starting:.1f} s to the first batch,"
    f" {training:.1f} s of training",
    flush=True,
  )
  return Undisturbed(outcome(folder), starting, training, len(run.trained))


def fit(
  folder: pathlib.Path,
  program: str,
  right: Undisturbed,
  given: argparse.Namespace,
  rng: random.Random,
  total: Counts,
) -> None:
  """Starts and kills a program until its `fit` is complete, and counts."""
  before = None  # The last run that trained and was killed.
  while True:
    part = 1.0  # Of the batches, that are left to train.
    if before is not None:
      part = max(0.0, 1 - before.trained[-1] / right.batches)
    drawn = draw(rng, right, part, given.workers)
    # When enough processes were killed, the last `fit` runs to its end.
    sent = drawn if total.kills < given.kills else None
    run = start(folder, program, given.workers, sent)
    if before is not None and run.trained:
      batches = before.trained[-1] + 1 - run.trained[0]
      total.lost.setdefault(before.name, []).append(batches)
      begun = run.first("imported"), run.first("restored"), run.first("trained")
      for name, seconds in zip(
        ("imports", "restored backup", "next batch"), begun, strict=True
      ):
        total.resuming.setdefault(name, []).append(seconds or 0.0)
    total.stops += sent is not None and sent.number == signal.SIGSTOP
    if not any(run.codes):
      break
    if sent is None or not run.is_killed_by(sent):
      total.wrong += 1
      print(f"WRONG exit codes {run.codes} after {sent}; see {folder}")
      if total.wrong > 20:
        raise RuntimeError("More than 20 runs ended wrongly.")
      continue
    total.kills += 1
    print(
      f"{total.kills}: {sent.number.name} to worker {sent.worker}, exit codes"
      f" {run.codes}, after batch {run.trained[-1] if run.trained else None}",
      flush=True,
    )
    if run.trained:
      run.name, before = sent.number.name, run
  found = outcome(folder)
  keys = right.outcome.keys() | found.keys()
  odd = [k for k in sorted(keys) if found.get(k) != right.outcome.get(k)]
  if odd:
    total.wrong += 1
    print(f"WRONG {odd[:5]}; see {folder}")


def draw(
  rng: random.Random, right: Undisturbed, part: float, workers: int
) -> Signal:
  """Draws a signal and its moment.

  A quarter of the signals come before the first batch. The others come within
  the time that the rest of the training should take, a `part` of the whole.
  """
  kinds = [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP]
  is_early = rng.random() < 0.25
  return Signal(
    number=rng.choice(kinds),
    worker=rng.randrange(workers),
    after_start=rng.uniform(0, right.starting),
    after_batch=None if is_early else rng.uniform(0, right.training * part),
    pause=rng.uniform(0, STOP),
  )


def show(total: Counts, fits: int) -> None:
  """Prints the table of results."""
  print(
    f"{total.kills} kills and {total.stops} stops in {fits} fits;"
    f" {total.wrong} ended differently"
  )
  for name, batches in sorted(total.lost.items()):
    _show(f"lost by {name}", batches, "batches")
  for name, seconds in total.resuming.items():
    _show(f"time from the start to the {name}", seconds, "s")


if __name__ == "__main__":
  sys.exit(main())
