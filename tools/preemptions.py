"""Kills training at random moments, resumes it, and compares the results.

    python tools/preemptions.py --kills=20 --seed=1
    python tools/preemptions.py --kills=20 --seed=1 --workers=2
    python tools/preemptions.py --kills=20 --seed=1 --programs=rows,halving
    python tools/preemptions.py --kills=20 --seed=1 --faults

Each `fit` is of a random program of `preemption_programs.py`. The program is
started, killed and started again until its `fit` is complete, and the next
`fit` begins, until `--kills` processes were killed. The signals are SIGTERM,
SIGKILL and SIGSTOP, and each goes to one worker. A process that got SIGSTOP
continues after at most three seconds, and gets another signal. About a quarter
of the signals come at a random time after the start, the others at a random
batch of those that are left.

With `--faults`, half of the signals are replaced by faults of the storage that
holds the backups; see `failing_storage.py`. A fault ends after at most three
seconds. It may end the program with an error that names the storage.

Every `fit` must end with the same history, weights, slots and best weights as
an undisturbed `fit` of the same program, exactly. The tool prints how many
batches each kind of signal lost, and how long it took to resume. This time
does not include the imports: each process is forked from a server that has
imported TensorFlow. The tool exits with 1 if a `fit` ended differently. It
needs Linux.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).absolute().parent.parent))

import failing_storage
import preemption_programs as programs

from tests.support import fit_outcome, forking
from tf_cross_shard_cli import launch

KILLS = ["SIGTERM", "SIGKILL"]
SIGNALS = [*KILLS, "SIGSTOP"]
PAUSE = 3.0  # Seconds at most from SIGSTOP to SIGCONT, and of a fault.
DELAY = 0.2  # Seconds at most from a batch to the signal after it.
LIMIT = 300.0  # Seconds until a process is killed as hung.


# ------------------------------------------------ the process that kills


@dataclasses.dataclass(frozen=True)
class Signal:
  """A signal to one worker or a fault of the storage, and when it happens.

  Attributes:
    name: The name of the signal or fault.
    worker: The number of the worker.
    batch: The number of the batch after which it happens; None to count from
      the start of the workers.
    after: Seconds from the end of the batch, or from the start.
    pause: Seconds from SIGSTOP to SIGCONT, or to the end of a fault.
  """

  name: str
  worker: int
  batch: int | None
  after: float
  pause: float


@dataclasses.dataclass
class Run:
  """One start of all workers.

  Attributes:
    began: The time at which they were started.
    codes: Their exit codes.
    log: What the first worker logged in this run.
    outputs: What each worker printed.
    hits: The signals and faults that came while the workers ran.
    name: The name of the signal or fault that ended it.
  """

  began: float
  codes: list[int]
  log: list[Any]
  outputs: list[str]
  hits: list[Signal]
  name = ""

  def is_ended_by(self, sent: Signal, storage: str) -> bool:
    """Returns whether the workers ended as the signal or fault ends them."""
    if sent.name not in SIGNALS:
      # The error of one worker ends the others in several ways.
      error = rf"Error\b.*{re.escape(storage)}"
      return any(re.search(error, output) for output in self.outputs)
    # On SIGTERM, BackupAndRestore ends the process with 143 when it is ready.
    codes = {"SIGTERM": {-15, 143}, "SIGKILL": {-9}}
    return self.codes[sent.worker] in codes.get(sent.name, set())

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
  storage: str,
  program: str,
  workers: int,
  signals: Iterable[Signal],
) -> Run:
  """Runs all workers until they end, and sends signals to them.

  Args:
    folder: The folder of this `fit`.
    storage: The path or URL of the storage of backups.
    program: The name of the program.
    workers: The number of workers.
    signals: The signals and faults, one after the other. Each is drawn when
      the one before was sent.
  """
  environments = launch.cluster(workers) if workers > 1 else [{}]
  known, began = len(_log(folder)), time.time()
  outputs = [folder / f"output_{began:.2f}_{i}" for i in range(workers)]
  processes: list[forking.Process] = []
  hits: list[Signal] = []
  with launch.killed_at_end(processes):
    for i, environment in enumerate(environments):
      arguments = folder, program, i, storage, outputs[i], environment
      processes.append(forking.Process(programs.train, *arguments))
    for sent in signals:
      while processes[sent.worker].poll() is None and not _is_due(
        sent, began, _log(folder)[known:]
      ):
        time.sleep(0.01)
      if any(process.poll() is not None for process in processes):
        break
      hits.append(sent)
      _send(sent, processes, folder)
      if sent.name in KILLS:
        break
    launch.wait(dict(enumerate(processes)), LIMIT, grace=LIMIT)
    codes = [process.poll() for process in processes]
  if None in codes:
    raise RuntimeError(
      f"Processes did not end within {LIMIT:.0f} s; their exit codes are"
      f" {codes}. See output_* in {folder}."
    )
  texts = [p.read_text() if p.exists() else "" for p in outputs]
  return Run(began, codes, _log(folder)[known:], texts, hits)


def _send(
  sent: Signal, processes: list[forking.Process], folder: pathlib.Path
) -> None:
  """Sends a signal, or lets the storage of a `fit` fail for a while."""
  process, waited = processes[sent.worker], dict(enumerate(processes))
  if sent.name not in SIGNALS:
    rng = random.Random(sent.pause)
    with failing_storage.failing(sent.name, folder / "storage", rng):
      launch.wait(waited, sent.pause, grace=sent.pause)
    return
  process.send_signal(signal.Signals[sent.name])
  if sent.name == "SIGSTOP":
    time.sleep(sent.pause)
    process.send_signal(signal.SIGCONT)


def _is_due(sent: Signal, began: float, log: list[Any]) -> bool:
  """Returns whether it is time to send a signal.

  `began` is when the workers were started, and `log` has their events since.
  """
  if sent.batch is not None:
    ends = [e[0] for e in log if e[1] == "trained" and e[2] >= sent.batch]
    began = ends[0] if ends else math.inf
  return time.time() > began + sent.after


def outcome(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the history, the final state and the best weights, as bytes."""
  ends = [rest for _, kind, *rest in _log(folder) if kind == "end"]
  found = fit_outcome.of(folder) | fit_outcome.of(folder / "storage")
  return {**found, "end": ends[-1]}


def _show(name: str, values: list[float], unit: str) -> None:
  if values:
    middle = statistics.median(values)
    print(
      f"{name}: median {middle:.1f}, at most {max(values):.1f} {unit}"
      f" ({len(values)} times)"
    )


def main() -> int:
  """Runs all fits; returns 1 if a `fit` went wrong."""
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
  parser.add_argument(
    "--faults", action="store_true", help="let the storage fail as well"
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
  try:
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
  finally:  # Ctrl-C prints the results so far.
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
    batches: How many batches it trained.
  """

  outcome: dict[str, Any]
  starting: float
  batches: int


@dataclasses.dataclass
class Counts:
  """The results of all fits so far.

  Attributes:
    sent: How often each signal or fault hit a running program.
    ended: How often each signal or fault ended a program.
    wrong: How many fits or processes ended differently.
    lost: The batches that each kill lost, by the name of the signal.
    resuming: Seconds from a start to what was reached, by its name.
  """

  sent: Counter[str] = dataclasses.field(default_factory=Counter)
  ended: Counter[str] = dataclasses.field(default_factory=Counter)
  wrong: int = 0
  lost: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  resuming: dict[str, list[float]] = dataclasses.field(default_factory=dict)

  @property
  def kills(self) -> int:
    """How many processes were killed."""
    return self.ended["SIGTERM"] + self.ended["SIGKILL"]


def train_undisturbed(
  home: pathlib.Path, program: str, workers: int
) -> Undisturbed:
  """Runs a program until its end, without signals."""
  folder = home / f"undisturbed_{program}"
  folder.mkdir()
  with failing_storage.create("folder", folder / "storage") as storage:
    run = start(folder, storage, program, workers, ())
  assert not any(run.codes), run.outputs
  starting = run.first("trained") or 0.0
  return Undisturbed(outcome(folder), starting, len(run.trained))


def fit(
  folder: pathlib.Path,
  program: str,
  right: Undisturbed,
  given: argparse.Namespace,
  rng: random.Random,
  total: Counts,
) -> None:
  """Starts and kills a program until its `fit` is complete, and counts."""
  kind = rng.choice(failing_storage.KINDS) if given.faults else "folder"
  faults = failing_storage.FAULTS[kind]

  def signals() -> Iterator[Signal]:
    # When enough processes were killed, the last `fit` runs to its end. After
    # the last batch, half of the starts do, or a `fit` might never end.
    while total.kills < given.kills:
      done = _done(folder)
      if done >= right.batches and rng.random() < 0.5:
        return
      yield draw(rng, right, done, given.workers, faults)

  before = None  # The last run that trained and was killed.
  with failing_storage.create(kind, folder / "storage") as storage:
    while True:
      run = start(folder, storage, program, given.workers, signals())
      if before is not None and run.trained:
        _count_resumed(before, run, total)
      total.sent.update(sent.name for sent in run.hits)
      if not any(run.codes):
        break
      ended = [sent for sent in run.hits if run.is_ended_by(sent, storage)]
      if not ended:
        total.wrong += 1
        print(f"WRONG exit codes {run.codes} after {run.hits}; see {folder}")
        if total.wrong > 20:
          raise RuntimeError("More than 20 runs ended wrongly.")
        continue
      run.name = ended[-1].name
      total.ended[run.name] += 1
      names = ", ".join(f"{s.name} to worker {s.worker}" for s in run.hits)
      print(
        f"{total.kills}: {names}, exit codes {run.codes},"
        f" after batch {_done(folder) - 1}",
        flush=True,
      )
      if run.trained:
        before = run
    found = outcome(folder)
  keys = right.outcome.keys() | found.keys()
  odd = [k for k in sorted(keys) if found.get(k) != right.outcome.get(k)]
  if odd:
    total.wrong += 1
    print(f"WRONG {odd[:5]}; see {folder}")


def _done(folder: pathlib.Path) -> int:
  """Returns how many batches the first worker of a `fit` has trained."""
  numbers = [entry[2] for entry in _log(folder) if entry[1] == "trained"]
  return numbers[-1] + 1 if numbers else 0


def _count_resumed(before: Run, run: Run, total: Counts) -> None:
  """Counts the lost batches and the seconds, of a run that resumed."""
  batches = before.trained[-1] + 1 - run.trained[0]
  total.lost.setdefault(before.name, []).append(batches)
  for name, kind in (
    ("restored backup", "restored"),
    ("next batch", "trained"),
  ):
    total.resuming.setdefault(name, []).append(run.first(kind) or 0.0)


def draw(
  rng: random.Random,
  right: Undisturbed,
  done: int,
  workers: int,
  faults: list[str],
) -> Signal:
  """Draws a signal and its moment.

  A quarter of the signals come at a time when the program is starting, or at
  once if it has started. The others come after one of the batches that are left
  when `done` batches were trained. If the storage has faults, half of the
  signals are faults.
  """
  batch = None
  if done < right.batches and rng.random() < 0.75:
    batch = rng.randrange(done, right.batches)
  return Signal(
    name=rng.choice(faults if faults and rng.random() < 0.5 else SIGNALS),
    worker=rng.randrange(workers),
    batch=batch,
    after=rng.uniform(0, right.starting if batch is None else DELAY),
    pause=rng.uniform(0, PAUSE),
  )


def show(total: Counts, fits: int) -> None:
  """Prints the table of results."""
  print(f"{total.kills} kills in {fits} fits; {total.wrong} ended differently")
  for name, count in sorted(total.sent.items()):
    print(f"{name}: {count} times; ended the program {total.ended[name]} times")
  for name, batches in sorted(total.lost.items()):
    _show(f"lost by {name}", batches, "batches")
  for name, seconds in total.resuming.items():
    _show(f"time from the start to the {name}", seconds, "s")


if __name__ == "__main__":
  sys.exit(main())
