"""Starts several processes that train together: the command `launch`.

Two workers on this machine:

    tf-cross-shard launch --workers=2 train.py --epochs=3

The environment variable TF_CONFIG gives each worker the addresses of all
workers, on free ports. Each line that a worker prints begins with the worker's
number. When a worker fails, the others have a few seconds to print their own
errors. Then they are killed. Ctrl-C kills all workers.

The first of two workers on two machines:

    tf-cross-shard launch --nodes=host0:12345,host1:12345 --index=0 train.py

Without `--index`, this prints the TF_CONFIG to set on each machine.

This module does not import TensorFlow.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Any, Final

_PAUSE: Final = 0.05  # seconds between two checks of the processes
# The line that ends a traceback, such as "ValueError: text" or "SystemExit".
_EXCEPTION: Final = re.compile(
  r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b(?::|$)"
)
_LAST_LINES: Final = 5.0  # seconds to print the last lines of ended workers
# A shell script that reads the numbers of process groups and kills them when
# its input ends. The input ends with this process, even if that is killed.
_WATCHER: Final = (
  'while read -r group; do set -- "$@" "-$group"; done; kill -s KILL -- "$@"'
)


class _GroupLeader(subprocess.Popen[str]):
  """A process that is killed together with all processes that it started."""

  def poll(self) -> int | None:
    """Returns the exit code, after it killed what an ended process started."""
    before = self.returncode
    if before is None and super().poll() is not None:
      self._kill_group()
    return self.returncode

  def kill(self) -> None:
    if self.poll() is None:
      self._kill_group()

  def _kill_group(self) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
  """Returns different free ports of this machine."""
  with contextlib.ExitStack() as stack:
    # All sockets are open at the same time, so the ports differ.
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for listener in sockets:
      listener.bind(("localhost", 0))
    return [listener.getsockname()[1] for listener in sockets]


def cluster(workers: int, chief: bool = False) -> list[dict[str, str]]:
  """Returns the environment of each worker: TF_CONFIG with free ports."""
  addresses = [f"localhost:{port}" for port in free_ports(workers)]
  chiefs = {"chief": addresses[:1]} if chief else {}
  return _environments({**chiefs, "worker": addresses[int(chief) :]})


def _environments(jobs: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
  """Returns the environment of each task, from the addresses of each job."""
  tasks = [
    {"type": job, "index": index}
    for job, addresses in jobs.items()
    for index in range(len(addresses))
  ]
  return [
    {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task})} for task in tasks
  ]


@contextlib.contextmanager
def killed_at_end(
  processes: Collection[subprocess.Popen[Any]],
) -> Iterator[None]:
  """Kills all processes at the end. TensorFlow ignores SIGTERM."""
  try:
    yield
  finally:
    for process in processes:
      process.kill()
    while any(process.poll() is None for process in processes):
      time.sleep(_PAUSE)


def wait(
  processes: Mapping[int, subprocess.Popen[Any]],
  timeout: float | None = None,
  grace: float = 60.0,
  may_fail: Collection[int] = (),
  on_failure: Callable[[int], None] = lambda index: None,
) -> dict[int, float]:
  """Returns the seconds to each end; waits `grace` seconds after a failure."""
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
  workers: int | Mapping[int, Mapping[str, str]],
  timeout: float | None = None,
  grace: float = 60.0,
) -> int:
  """Runs a command as workers, in the main thread; returns the exit status."""
  if isinstance(workers, int):
    workers = dict(enumerate(cluster(workers)))
  processes: dict[int, _GroupLeader] = {}
  printers = []
  exceptions: dict[int, str] = {}

  def print_end(index: int, others: str = "") -> None:
    code = processes[index].returncode
    print(f"worker {index} ended with code {code}{others}", file=sys.stderr)

  with contextlib.ExitStack() as stack:
    # SIGTERM becomes an exception, so that `killed_at_end` kills the workers.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stack.callback(signal.signal, signal.SIGTERM, before)
    watcher = stack.enter_context(_watcher())
    stack.enter_context(killed_at_end(processes.values()))
    for index, environment in workers.items():
      process = processes[index] = _GroupLeader(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
      )
      print(process.pid, file=watcher, flush=True)
      print(f"worker {index} is process {process.pid}", flush=True)
      arguments = index, process.stdout, exceptions
      printers.append(
        threading.Thread(target=_print_lines, args=arguments, daemon=True)
      )
      printers[-1].start()
    others = f"; the other workers have {grace:g} s to end"
    ends = wait(
      processes, timeout, grace, on_failure=lambda i: print_end(i, others)
    )
  for printer in printers:
    # Not forever: a server that the worker started may keep the pipe open.
    printer.join(_LAST_LINES)
  failed = {i: p.returncode for i, p in processes.items() if p.returncode}
  for index in failed:
    print_end(index)
  # The other workers fail because of the first one, and print more.
  first = min(set(failed) & set(ends), key=ends.__getitem__, default=None)
  if first is not None:
    print(
      f"the first failure: worker {first}, code {failed[first]}:"
      f" {exceptions.get(first, 'no exception was printed')}",
      file=sys.stderr,
    )
  return int(bool(failed))


@contextlib.contextmanager
def _watcher() -> Iterator[Any]:
  """Yields a file. Process groups written to it end with this process."""
  with subprocess.Popen(
    ["sh", "-c", _WATCHER],
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    text=True,
    start_new_session=True,  # Ctrl-C must not end the watcher.
  ) as process:
    yield process.stdin
    # Kill it before its input ends: other processes may have the numbers now.
    process.kill()


def _print_lines(
  index: int, lines: IO[str], exceptions: dict[int, str]
) -> None:
  """Prints each line of a worker; stores the last one of an exception."""
  with lines:
    for line in lines:
      whole = line.removesuffix("\n") + "\n"  # The last line may lack the end.
      print(f"[worker {index}] {whole}", end="", flush=True)
      if _EXCEPTION.match(whole):
        exceptions[index] = whole.strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command-line options of `launch` to a parser."""
  add = parser.add_mutually_exclusive_group().add_argument
  workers = "the number of workers to start on this machine (default: 2)"
  add("--workers", type=int, metavar="N", help=workers)
  nodes = "the addresses of the workers, one on each machine"
  add("--nodes", metavar="HOST:PORT,...", help=nodes)
  add = parser.add_argument
  index = (
    "start the worker with this number in --nodes; without it, print the"
    " TF_CONFIG of each worker"
  )
  add("--index", type=int, metavar="I", help=index)
  timeout = "kill all workers after this time (default: no limit)"
  add("--timeout", type=float, metavar="SECONDS", help=timeout)
  grace = "when a worker fails, kill the others after this time (default: 10)"
  add("--grace", type=float, default=10.0, metavar="SECONDS", help=grace)
  add("-m", action="store_true", help="PROGRAM is a module, as in python -m")
  program = "the Python file that each worker runs"
  add("program", nargs="?", metavar="PROGRAM", help=program)
  arguments = "arguments of PROGRAM"
  add("arguments", nargs=argparse.REMAINDER, metavar="...", help=arguments)


def run(options: argparse.Namespace) -> int:
  """Starts a Python program as several workers that train together.

  They run on this machine or, with --nodes, on several machines.
  """
  program = [*["-m"] * options.m, options.program or "", *options.arguments]
  if options.nodes:
    addresses = _addresses(options.nodes)
    tasks = _environments({"worker": addresses})
    if options.index is None:
      for address, environment in zip(addresses, tasks, strict=True):
        print(f"# On {address}:")
        print(f"export TF_CONFIG={shlex.quote(environment['TF_CONFIG'])}")
        if options.program:
          print(shlex.join(["python", *program]))
      return 0
    if not 0 <= options.index < len(addresses):
      raise ValueError(
        f"--index must be in range({len(addresses)}), since --nodes has"
        f" {len(addresses)}; got {options.index}."
      )
    environments = {options.index: tasks[options.index]}
  else:
    workers = 2 if options.workers is None else options.workers
    if options.index is not None:
      raise ValueError(
        "--index needs --nodes. It is the position of this machine in --nodes."
      )
    if workers < 1:
      raise ValueError(f"--workers must be at least 1; got {workers}.")
    environments = dict(enumerate(cluster(workers)))
  if not options.program:
    raise ValueError("PROGRAM is missing. Name the Python file to run.")
  command = [sys.executable, *program]
  try:
    return launch(command, environments, options.timeout, options.grace)
  except KeyboardInterrupt:
    print("interrupted; all workers have ended", file=sys.stderr)
    return 130  # The code that shells report for Ctrl-C.


def _addresses(text: str) -> list[str]:
  """Returns the addresses in `--nodes`; raises `ValueError` for a bad one."""
  for address in (addresses := text.split(",")):
    if not re.fullmatch(r"[^\s:/]+:\d+|\[[\da-fA-F:]+\]:\d+", address):
      raise ValueError(
        f"--nodes must contain addresses such as host0:12345; got {address!r}."
      )
  if len(set(addresses)) < len(addresses):
    raise ValueError(f"--nodes must contain each address once; got {text}.")
  return addresses
