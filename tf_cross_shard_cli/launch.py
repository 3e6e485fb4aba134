"""Starts several processes on this machine that train together.

    tf-cross-shard launch --workers=2 train.py --epochs=3

Each is one worker of a cluster on free ports, which TF_CONFIG describes to it.
Lines that a worker writes have its number in front. When a worker fails, the
others have a few seconds to say what they lack, and are killed; so they are by
Ctrl-C. With `--nodes=host0:12345,host1:12345` in the place of `--workers` it
prints the TF_CONFIG to set on each of several machines; with `--index=0`, too,
it sets that and runs the program, as the first worker, on this machine.

Nothing here imports TensorFlow.
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

_GRACE: Final = "for the others after a failure, 10 if not given"
_PAUSE: Final = 0.05  # seconds between two looks at the processes
_LAST_LINES: Final = 5.0  # seconds to print what ended workers have written
# A shell that reads process groups, and kills them when its input ends: so it
# does however the process that has started it ends.
_WATCHER: Final = (
  'while read -r group; do set -- "$@" "-$group"; done; kill -s KILL -- "$@"'
)


class _GroupLeader(subprocess.Popen[str]):
  """A process that ends with all that it has started."""

  def poll(self) -> int | None:
    """Returns the exit code, None while it runs; kills what it has left."""
    before = self.returncode
    if before is None and super().poll() is not None:
      self._kill_group()
    return self.returncode

  def kill(self) -> None:
    """Kills the process and what it has started."""
    if self.poll() is None:
      self._kill_group()

  def _kill_group(self) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
  """Returns ports of this machine that nobody listens on."""
  with contextlib.ExitStack() as stack:
    # All are open at once, so that they differ.
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for listener in sockets:
      listener.bind(("localhost", 0))
    return [listener.getsockname()[1] for listener in sockets]


def cluster(workers: int, chief: bool = False) -> list[dict[str, str]]:
  """Returns the environment of each worker: a TF_CONFIG on free ports."""
  addresses = [f"localhost:{port}" for port in free_ports(workers)]
  chiefs = {"chief": addresses[:1]} if chief else {}
  return _environments({**chiefs, "worker": addresses[int(chief) :]})


def _environments(jobs: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
  """Returns the environment of each task of a cluster."""
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
  """Kills all processes at the end: those of TensorFlow ignore SIGTERM."""
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
  """Waits for processes; for no more than `grace` seconds after a failure.

  Calls `on_failure` with the number of each process that fails while others
  run. Returns the seconds after which each ended, without those that did not.
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
  workers: int | Mapping[int, Mapping[str, str]],
  timeout: float | None = None,
  grace: float = 60.0,
) -> int:
  """Runs a command as so many workers, or in the environments of some.

  Returns 0 if none of them failed. Only the main thread may call it.
  """
  if isinstance(workers, int):
    workers = dict(enumerate(cluster(workers)))
  processes: dict[int, _GroupLeader] = {}
  printers = []

  def say_end(index: int, others: str = "") -> None:
    code = processes[index].returncode
    print(f"worker {index} ended with {code}{others}", file=sys.stderr)

  with contextlib.ExitStack() as stack:
    # As an exception, so that the workers are killed on the way out.
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
      arguments = index, process.stdout
      printers.append(
        threading.Thread(target=_print_lines, args=arguments, daemon=True)
      )
      printers[-1].start()
    others = f"; the others have {grace:g} s"
    wait(processes, timeout, grace, on_failure=lambda i: say_end(i, others))
  for printer in printers:
    printer.join(_LAST_LINES)  # A server of their own may still have the pipe.
  failed = [i for i, process in processes.items() if process.returncode]
  for index in failed:
    say_end(index)
  return int(bool(failed))


@contextlib.contextmanager
def _watcher() -> Iterator[Any]:
  """Yields where to write process groups that are to end with this process."""
  with subprocess.Popen(
    ["sh", "-c", _WATCHER],
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    text=True,
    start_new_session=True,  # Ctrl-C is not for it.
  ) as process:
    yield process.stdin
    process.kill()  # Before its input ends: the numbers may be others' by now.


def _print_lines(index: int, lines: IO[str]) -> None:
  """Prints what a worker writes as it comes, each line whole."""
  with lines:
    for line in lines:
      whole = line.removesuffix("\n") + "\n"  # A last one may have no end.
      print(f"[worker {index}] {whole}", end="", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of a launch, and `run` as the command."""
  parser.set_defaults(command=run)
  add = parser.add_mutually_exclusive_group().add_argument
  add("--workers", type=int, help="processes on this machine, 2 if not given")
  add("--nodes", metavar="HOST:PORT,...", help="one worker on each instead")
  add = parser.add_argument
  add("--index", type=int, help="which of --nodes this is; else it prints all")
  add("--timeout", type=float, metavar="SECONDS", help="for all of it")
  add("--grace", type=float, default=10.0, metavar="SECONDS", help=_GRACE)
  add("-m", action="store_true", help="PROGRAM is a module")
  add("program", nargs="?", metavar="PROGRAM", help="a Python file")
  add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own")


def run(options: argparse.Namespace) -> int:
  """Launches as the options say; returns the exit status."""
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
        f"--index must be in range({len(addresses)}), as many as --nodes has;"
        f" got {options.index}."
      )
    environments = {options.index: tasks[options.index]}
  else:
    workers = 2 if options.workers is None else options.workers
    if options.index is not None:
      raise ValueError("--index needs --nodes, of which it is one.")
    if workers < 1:
      raise ValueError(f"--workers must be at least 1; got {workers}.")
    environments = dict(enumerate(cluster(workers)))
  if not options.program:
    raise ValueError("PROGRAM is missing: the Python file that workers run.")
  command = [sys.executable, *program]
  try:
    return launch(command, environments, options.timeout, options.grace)
  except KeyboardInterrupt:
    print("interrupted; all workers have ended", file=sys.stderr)
    return 130  # as of shells


def _addresses(text: str) -> list[str]:
  """Returns the addresses of `--nodes`, each checked."""
  for address in (addresses := text.split(",")):
    if not re.fullmatch(r"[^\s:/]+:\d+|\[[\da-fA-F:]+\]:\d+", address):
      raise ValueError(
        f"--nodes must hold addresses such as host0:12345; got {address!r}."
      )
  if len(set(addresses)) < len(addresses):
    raise ValueError(f"--nodes must hold each address once; got {text}.")
  return addresses
