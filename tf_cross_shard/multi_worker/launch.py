"""Starts several processes on this machine that train together.

    tf-cross-shard launch --workers=2 train.py --epochs=3

Each is one worker of a cluster on free ports, which TF_CONFIG describes to it.
What a worker writes has its number in front. When one fails, the others have a
few seconds to say what they lack, and are killed; so they are by Ctrl-C.

    tf-cross-shard launch --nodes=host0:12345,host1:12345 train.py

prints what to set on each of several machines; with `--index=0` it sets that
and runs the program, as the first worker, on this one. Workers connect to each
other at these addresses.

Nothing here imports TensorFlow. `python -m tf_cross_shard.multi_worker.launch`
is the same command.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Final, Protocol

_PAUSE: Final = 0.05  # seconds between two looks at the processes
_INTERRUPTED: Final = 130  # the exit status that shells give a Ctrl-C


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
  if chief:
    return _environments({"chief": addresses[:1], "worker": addresses[1:]})
  return _environments({"worker": addresses})


def _environments(jobs: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
  """Returns the environment of each task of a cluster."""
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
  on_failure: Callable[[int], None] = lambda index: None,
) -> dict[int, float]:
  """Waits for processes, by number; for no more than `grace` after a failure.

  Calls `on_failure` with the number of each that fails while others run.
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
          if len(ends) < len(processes):
            on_failure(index)
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
  return _run_all(command, dict(enumerate(cluster(workers))), timeout, grace)


def _run_all(
  command: Sequence[str],
  environments: Mapping[int, Mapping[str, str]],
  timeout: float | None,
  grace: float,
) -> int:
  """Runs a command in each environment; returns 0 if none of them failed."""
  processes: dict[int, subprocess.Popen[str]] = {}
  printers = []

  def say_first(index: int) -> None:
    code = processes[index].returncode
    _say(f"worker {index} ended with {code}; the others have {grace:g} s")

  with contextlib.ExitStack() as stack:
    # As an exception, so that the workers are killed on the way out.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stack.callback(signal.signal, signal.SIGTERM, before)
    stack.enter_context(killed_at_end(processes.values()))
    for index, environment in environments.items():
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
    wait(processes, timeout, grace, on_failure=say_first)
  for printer in printers:
    printer.join()
  for index, process in processes.items():
    if process.returncode:
      _say(f"worker {index} ended with {process.returncode}")
  return int(any(process.returncode for process in processes.values()))


def _print_lines(lines: IO[str], prefix: str) -> None:
  """Prints what a worker writes as it comes, each line whole."""
  with lines:
    for line in lines:
      print(prefix + line, end="", flush=True)


def _say(text: str) -> None:
  """Prints what is this program's own, not a worker's."""
  print(text, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of a launch, and `run` as the command."""
  parser.set_defaults(command=run)
  add = parser.add_mutually_exclusive_group().add_argument
  add("--workers", type=int, help="processes on this machine, 2 if not given")
  add("--nodes", metavar="HOST:PORT,...", help="one worker on each instead")
  add = parser.add_argument
  add("--index", type=int, help="which of --nodes this is; else it prints all")
  add("--timeout", type=float, metavar="SECONDS", help="for all of it")
  grace = "for the others after a failure, 10 if not given"
  add("--grace", type=float, default=10.0, metavar="SECONDS", help=grace)
  add("-m", action="store_true", help="PROGRAM is a module")
  add("program", nargs="?", metavar="PROGRAM", help="a Python file")
  add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own")


def run(options: argparse.Namespace) -> int:
  """Launches what the options say; returns the exit status.

  Raises:
    ValueError: If an option has no valid value.
  """
  program = [*(["-m"] if options.m else []), options.program or ""]
  program += options.arguments
  if options.index is not None and not options.nodes:
    raise ValueError("--index needs --nodes, of which it is one.")
  if options.nodes:
    addresses = _addresses(options.nodes)
    environments = dict(enumerate(_environments({"worker": addresses})))
    if options.index is None:
      for address, environment in zip(
        addresses, environments.values(), strict=True
      ):
        print(f"# On {address}:")
        print(f"export TF_CONFIG={shlex.quote(environment['TF_CONFIG'])}")
        if options.program:
          print(shlex.join(["python", *program]))
      return 0
    if options.index not in environments:
      raise ValueError(
        f"--index must be in range({len(addresses)}), as many as --nodes has;"
        f" got {options.index}."
      )
    environments = {options.index: environments[options.index]}
  else:
    workers = 2 if options.workers is None else options.workers
    if workers < 1:
      raise ValueError(f"--workers must be at least 1; got {workers}.")
    environments = dict(enumerate(cluster(workers)))
  if not options.program:
    raise ValueError("PROGRAM is missing: the Python file that workers run.")
  if not options.m and not pathlib.Path(options.program).exists():
    raise ValueError(f"PROGRAM {options.program} does not exist.")
  try:
    return _run_all(
      [sys.executable, *program], environments, options.timeout, options.grace
    )
  except KeyboardInterrupt:
    _say("interrupted; all workers have ended")
    return _INTERRUPTED


def _addresses(text: str) -> list[str]:
  """Returns the addresses of `--nodes`, each checked."""
  addresses = text.split(",")
  for address in addresses:
    if not re.fullmatch(r"[^\s:/]+:\d+|\[[\da-fA-F:]+\]:\d+", address):
      raise ValueError(
        f"--nodes must hold addresses such as host0:12345; got {address!r}."
      )
  if len(set(addresses)) < len(addresses):
    raise ValueError(f"--nodes must hold each address once; got {text}.")
  return addresses


def main(argv: Sequence[str] | None = None) -> int:
  """Reads a command line, and launches what is in it."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  add_arguments(parser)
  try:
    return run(parser.parse_args(argv))
  except ValueError as error:
    parser.error(str(error))


if __name__ == "__main__":
  sys.exit(main())
