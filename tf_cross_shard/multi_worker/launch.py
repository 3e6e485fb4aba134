"""Starts several processes on this machine that train together.

    python -m tf_cross_shard.multi_worker.launch --workers=2 train.py --epochs=3

Each is one worker of a cluster on free ports, which TF_CONFIG describes to it.
What a worker writes has its number in front. When one fails, the others have a
few seconds to say what they lack, and are killed; so they are by Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO, Final, Protocol

_PAUSE: Final = 0.05  # seconds between two looks at the processes


class Process(Protocol):
  """What `subprocess.Popen` is, as far as a launch needs it."""

  def poll(self) -> int | None:
    """Returns the exit code; None while the process runs."""

  def kill(self) -> None:
    """Ends the process."""


def free_ports(count: int) -> list[int]:
  """Returns ports of this machine that nobody listens on."""
  with contextlib.ExitStack() as stack:
    # All are open at once, so that they differ.
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for each in sockets:
      each.bind(("localhost", 0))
    return [each.getsockname()[1] for each in sockets]


def cluster(workers: int, chief: bool = False) -> list[dict[str, str]]:
  """Returns the environment of each worker: a TF_CONFIG on free ports."""
  addresses = [f"localhost:{port}" for port in free_ports(workers)]
  jobs = {"worker": addresses}
  if chief:
    jobs = {"chief": addresses[:1], "worker": addresses[1:]}
  return [
    {
      "TF_CONFIG": json.dumps(
        {"cluster": jobs, "task": {"type": job, "index": index}}
      )
    }
    for job, those in jobs.items()
    for index in range(len(those))
  ]


@contextlib.contextmanager
def killed_at_end(processes: Collection[Process]) -> Iterator[None]:
  """A context with which all processes end: TensorFlow's ignore SIGTERM."""
  try:
    yield
  finally:
    for process in processes:
      process.kill()
    while any(process.poll() is None for process in processes):
      time.sleep(_PAUSE)


def wait(
  processes: Mapping[int, Process],
  timeout: float | None = None,
  grace: float = 60.0,
  may_fail: Collection[int] = (),
) -> dict[int, float]:
  """Waits for processes, by number; for no more than `grace` after a failure.

  Returns the seconds after which each ended, without those that did not.
  """
  begin = time.monotonic()
  deadline = float("inf") if timeout is None else begin + timeout
  ends: dict[int, float] = {}
  while len(ends) < len(processes) and time.monotonic() < deadline:
    for index, process in processes.items():
      code = process.poll()
      if index not in ends and code is not None:
        ends[index] = time.monotonic() - begin
        if code != 0 and index not in may_fail:
          deadline = min(deadline, time.monotonic() + grace)
    time.sleep(_PAUSE)
  return ends


def launch(
  command: Sequence[str],
  workers: int,
  timeout: float | None = None,
  grace: float = 60.0,
) -> int:
  """Runs a command as so many workers; returns 0 if none of them failed.

  To be called in the main thread, which a SIGTERM ends.
  """
  processes: dict[int, subprocess.Popen[str]] = {}
  printers = []
  environments = cluster(workers)
  with contextlib.ExitStack() as stack:
    # As an exception, so that the workers are killed on the way out.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stack.callback(signal.signal, signal.SIGTERM, before)
    stack.enter_context(killed_at_end(processes.values()))
    for index, environment in enumerate(environments):
      process = processes[index] = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
      )
      print(f"worker {index} is process {process.pid}", flush=True)
      printer = threading.Thread(
        target=_print_lines, args=(process.stdout, f"[worker {index}] ")
      )
      printer.start()
      printers.append(printer)
    wait(processes, timeout, grace)
  for printer in printers:
    printer.join()
  for index, process in processes.items():
    if process.returncode:
      print(f"worker {index} ended with {process.returncode}", file=sys.stderr)
  return int(any(process.returncode for process in processes.values()))


def _print_lines(lines: IO[str], prefix: str) -> None:
  """Prints what a worker writes as it comes, each line whole."""
  with lines:
    for line in lines:
      print(prefix + line, end="", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
  """Reads a command line, and launches what is in it."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument("--timeout", type=float, help="seconds for all of it")
  parser.add_argument("-m", action="store_true", help="PROGRAM is a module")
  parser.add_argument("program", help="a Python file")
  parser.add_argument("arguments", nargs=argparse.REMAINDER)
  given = parser.parse_args(argv)
  module = ["-m"] if given.m else []
  command = [sys.executable, *module, given.program, *given.arguments]
  return launch(command, given.workers, given.timeout)


if __name__ == "__main__":
  sys.exit(main())
