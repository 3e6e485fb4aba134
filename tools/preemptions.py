"""Kills training at random moments, resumes it, and compares the results.

    python tools/preemptions.py --kills=20 --seed=1
    python tools/preemptions.py --kills=20 --seed=1 --workers=2
    python tools/preemptions.py --kills=20 --seed=1 --programs=rows,shards
    python tools/preemptions.py --kills=20 --seed=1 --faults
    python tools/preemptions.py --kills=0 --fits=64 --seed=1 --workers=2

Each `fit` is of a random program of `preemption_programs.py`. The program is
started, killed and started again until its `fit` is complete, and the next
`fit` begins, until `--kills` processes were killed and `--fits` fits began.
With `--kills=0`, nothing disturbs a `fit`. The signals are SIGTERM, SIGKILL and
SIGSTOP, and each goes to one worker. A process that got SIGSTOP continues after
at most three seconds, and gets another signal. About a quarter of the signals
come at a random time after the start, the others at a random batch of those
that are left.

With `--faults`, half of the signals are replaced by faults of the storage that
holds the backups: a small disk, which root can mount, is full or read-only, or
a bucket does not answer. A fault ends after at most three seconds. It may end
the program with an error that names the storage.

Every `fit` must end with the same history, weights, slots and best weights as
an undisturbed `fit` of the same program, exactly. The tool exits with 1 if one
ended differently. It needs Linux.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).absolute().parent.parent))

import preemption_programs as programs

from tests.support import fit_outcome, forking
from tf_cross_shard_cli import launch

SIGNALS = ["SIGTERM", "SIGKILL", "SIGSTOP"]
# The faults of each kind of storage.
FAULTS = {"disk": ["full disk", "read-only disk"], "bucket": ["silent bucket"]}
PAUSE = 3.0  # Seconds at most from SIGSTOP to SIGCONT, and of a fault.
DELAY = 0.2  # Seconds at most from a batch to the signal after it.
LIMIT = 300.0  # Seconds until a process is killed as hung.
DISK, PAGE = 4 << 20, 4096  # Bytes of a disk, and of a page.


class Event(NamedTuple):
  """A signal to a worker or a fault of the storage, and when it happens."""

  name: str
  worker: int
  batch: int | None  # After which it happens; None for the start.
  after: float  # Seconds from the end of the batch, or from the start.
  pause: float  # Seconds from SIGSTOP to SIGCONT, or to the end of a fault.

  def is_due(self, began: float, log: list[Any]) -> bool:
    """Returns whether it is time, given the start and the entries since."""
    if self.batch is not None:
      ends = [e[0] for e in log if e[1] == "trained" and e[2] >= self.batch]
      began = ends[0] if ends else math.inf
    return time.time() > began + self.after

  def explains(self, codes: list[int], texts: list[str], storage: str) -> bool:
    """Returns whether workers may end with these codes because of it."""
    if self.name not in SIGNALS:
      # The error of one worker ends the others in several ways.
      error = rf"Error\b.*{re.escape(storage)}"
      return any(re.search(error, text) for text in texts)
    # On SIGTERM, BackupAndRestore ends the process with 143 when it is ready.
    ends = {"SIGTERM": {-15, 143}, "SIGKILL": {-9}}.get(self.name, set())
    return codes[self.worker] in ends


@contextlib.contextmanager
def storage_of(kind: str, folder: pathlib.Path) -> Iterator[str]:
  """Yields the path or URL of a new storage in a new folder."""
  folder.mkdir()
  if kind == "disk":
    size = f"size={DISK}"
    subprocess.run(
      ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True
    )
  try:
    yield f"gs://{folder.name}" if kind == "bucket" else str(folder)
  finally:
    if kind == "disk":
      subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def failing(fault: str, folder: pathlib.Path, seed: float) -> Iterator[None]:
  """Makes the storage in a folder fail, and mends it at the end."""
  path = folder / "filler" if fault == "full disk" else programs.flag(folder)
  if fault == "full disk":
    with path.open("wb", buffering=0) as file:
      with contextlib.suppress(OSError):
        while file.write(bytes(PAGE)):
          pass
      # A few pages are left, so that the disk is full in the middle of a file.
      left = random.Random(seed).randrange(6) * PAGE
      os.truncate(path, max(0, file.tell() - left))
  elif fault == "read-only disk":
    _remount(folder, "ro")
  else:
    path.touch()
  yield
  if fault == "read-only disk":
    _remount(folder, "rw")
  else:
    path.unlink()


def _remount(folder: pathlib.Path, mode: str) -> None:
  """Makes a disk read-only or writable, as soon as no file is being written."""
  command = ["mount", "-o", f"remount,{mode}", str(folder)]
  while subprocess.run(command, capture_output=True, check=False).returncode:
    time.sleep(0.001)


def log_of(folder: pathlib.Path, worker: int = 0) -> list[Any]:
  """Returns a worker's log, without the last line: a kill may have cut it."""
  path = folder / f"log_{worker}"
  text = path.read_text() if path.exists() else ""
  return [json.loads(line) for line in text.split("\n")[:-1]]


def batches_in(log: list[Any]) -> list[int]:
  """Returns the numbers of the batches that were trained."""
  return [entry[2] for entry in log if entry[1] == "trained"]


def start(
  folder: pathlib.Path,
  storage: str,
  program: str,
  workers: int,
  events: Iterable[Event],
) -> tuple[list[int], list[Event], list[str]]:
  """Runs all workers until they end, while events happen to them.

  Returns the exit codes, the events that happened, and what workers printed.
  """
  environments = launch.cluster(workers) if workers > 1 else [{}]
  known, began = len(log_of(folder)), time.time()
  outputs = [folder / f"output_{began:.2f}_{i}" for i in range(workers)]
  processes: list[forking.Process] = []
  happened: list[Event] = []
  with launch.killed_at_end(processes):
    for i, environment in enumerate(environments):
      arguments = folder, program, i, storage, outputs[i], environment
      processes.append(forking.Process(programs.train, *arguments))
    waited = dict(enumerate(processes))
    for event in events:
      process = processes[event.worker]
      while process.poll() is None and not event.is_due(
        began, log_of(folder)[known:]
      ):
        time.sleep(0.01)
      if any(process.poll() is not None for process in processes):
        break
      happened.append(event)
      if event.name in SIGNALS:
        process.send_signal(signal.Signals[event.name])
      if event.name == "SIGSTOP":
        time.sleep(event.pause)
        process.send_signal(signal.SIGCONT)
      elif event.name in SIGNALS:
        break
      else:
        with failing(event.name, folder / "storage", event.pause):
          launch.wait(waited, event.pause, grace=event.pause)
    launch.wait(waited, LIMIT, grace=LIMIT)
    codes = [process.poll() for process in processes]
  if None in codes:
    raise RuntimeError(f"{codes} after {LIMIT:.0f} s; see {folder}/output_*.")
  texts = [p.read_text() if p.exists() else "" for p in outputs]
  return codes, happened, texts


class Undisturbed(NamedTuple):
  """A `fit` without events."""

  outcome: dict[str, Any]
  starting: float  # Seconds to the first batch.
  batches: int


class Results:
  """Kills one `fit` after the other, and counts."""

  def __init__(self, given: argparse.Namespace, home: pathlib.Path) -> None:
    self._given, self._home = given, home
    self._rng = random.Random(given.seed)
    self._undisturbed: dict[str, Undisturbed] = {}
    self.fits = self.wrong = 0
    self.happened: Counter[str] = Counter()
    self.ended: Counter[str] = Counter()  # How often each ended a program.

  @property
  def kills(self) -> int:
    """How many processes were killed."""
    return self.ended["SIGTERM"] + self.ended["SIGKILL"]

  def undisturbed(self, program: str) -> Undisturbed:
    """Runs a program until its end, without events."""
    if program not in self._undisturbed:
      folder = self._home / f"undisturbed_{program}"
      folder.mkdir()
      with storage_of("folder", folder / "storage") as storage:
        workers = self._given.workers
        codes, _, texts = start(folder, storage, program, workers, ())
      assert not any(codes), texts
      log = log_of(folder)
      first = next(entry[0] for entry in log if entry[1] == "trained")
      self._undisturbed[program] = Undisturbed(
        outcome(folder), first - log[0][0], len(batches_in(log))
      )
    return self._undisturbed[program]

  def fit(self) -> None:
    """Starts and kills a program until its `fit` is complete."""
    program = self._rng.choice(self._given.programs)
    right, kind = self.undisturbed(program), "folder"
    if self._given.faults:
      kind = self._rng.choice(list(FAULTS)[os.geteuid() > 0 :])
    folder, before = self._home / f"fit_{self.fits}", self.wrong
    folder.mkdir()
    self.fits += 1
    with storage_of(kind, folder / "storage") as storage:
      while True:
        events = self._events(folder, right, FAULTS.get(kind, []))
        codes, happened, texts = start(
          folder, storage, program, self._given.workers, events
        )
        self.happened.update(event.name for event in happened)
        if not any(codes):
          break
        reasons = [e for e in happened if e.explains(codes, texts, storage)]
        if not reasons:
          self._report(f"exit codes {codes} after {happened}", folder)
          continue
        self.ended[reasons[-1].name] += 1
        print(f"{self.kills}: {happened}, exit codes {codes}", flush=True)
      found = outcome(folder)
    keys = sorted(right.outcome.keys() | found.keys())
    odd = [k for k in keys if found.get(k) != right.outcome.get(k)]
    if odd:
      self._report(str(odd[:5]), folder)
    if self.wrong == before:
      print(f"fit {self.fits} ({program}): equal", flush=True)
      shutil.rmtree(folder)

  def _report(self, text: str, folder: pathlib.Path) -> None:
    self.wrong += 1
    print(f"WRONG {text}; see {folder}", flush=True)
    if self.wrong > 20:
      raise RuntimeError("More than 20 runs ended wrongly.")

  def _events(
    self, folder: pathlib.Path, right: Undisturbed, faults: list[str]
  ) -> Iterator[Event]:
    """Draws events; the last `fit` runs to its end after enough kills.

    A quarter come at a time when the program is starting, the others after one
    of the batches that are left. Half of them are faults, if there are any.
    """
    rng = self._rng
    while self.kills < self._given.kills:
      done = (batches_in(log_of(folder)) or [-1])[-1] + 1
      # After the last batch, half of the starts run to the end, or a `fit`
      # might never end.
      if done >= right.batches and rng.random() < 0.5:
        return
      batch = None
      if done < right.batches and rng.random() < 0.75:
        batch = rng.randrange(done, right.batches)
      yield Event(
        name=rng.choice(faults if faults and rng.random() < 0.5 else SIGNALS),
        worker=rng.randrange(self._given.workers),
        batch=batch,
        after=rng.uniform(0, right.starting if batch is None else DELAY),
        pause=rng.uniform(0, PAUSE),
      )

  def show(self) -> None:
    """Prints the table of results."""
    print(f"{self.kills} kills in {self.fits} fits; {self.wrong} wrong")
    for name, count in sorted(self.happened.items()):
      print(f"{name}: {count} times; ended a program {self.ended[name]} times")


def outcome(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the history, the final state and the best weights, as bytes."""
  ends = [rest for _, kind, *rest in log_of(folder) if kind == "end"]
  found = fit_outcome.of(folder) | fit_outcome.of(folder / "storage")
  return {**found, "end": ends[-1]}


def main() -> int:
  """Runs all fits; returns 1 if a `fit` went wrong."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for name, default, words in (
    ("--kills", 20, "how many processes to kill"),
    ("--fits", 0, "how many fits to start at least"),
    ("--seed", 0, "seed of the moments and signals"),
    ("--workers", 1, "processes that train together"),
  ):
    parser.add_argument(name, type=int, default=default, help=words)
  parser.add_argument(
    "--programs",
    type=lambda names: names.split(","),
    default=list(programs.PROGRAMS),
    help="the programs to draw from, separated by commas",
  )
  words = "let the storage fail as well"
  parser.add_argument("--faults", action="store_true", help=words)
  given = parser.parse_args()
  home = pathlib.Path(tempfile.mkdtemp(prefix="preemptions"))
  results = Results(given, home)
  try:
    while results.kills < given.kills or results.fits < given.fits:
      results.fit()
  finally:  # Ctrl-C prints the results so far.
    results.show()
  if not results.wrong:
    shutil.rmtree(home)
  return int(results.wrong > 0)


if __name__ == "__main__":
  sys.exit(main())
