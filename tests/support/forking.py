"""Forks processes from a server that has imported TensorFlow.

A new process takes seconds to import TensorFlow. So one server process imports
TensorFlow once, without using a device, and forks each new process.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

_server = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


class Process:
  """A forked process, with the methods of `subprocess.Popen` that we need."""

  def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
    """Calls `target`, a function of a module, in a new process."""
    _start_server()
    self._process = _server.Process(target=target, args=arguments)
    self._process.start()

  def poll(self) -> int | None:
    """Returns the exit code, or None while the process runs."""
    return self._process.exitcode

  def kill(self) -> None:
    """Kills the process if it runs."""
    self._process.kill()

  def send_signal(self, number: int) -> None:
    """Sends a signal if the process runs."""
    if self.poll() is None:
      assert self._process.pid is not None
      # The server may know first that the process has ended.
      with contextlib.suppress(ProcessLookupError):
        os.kill(self._process.pid, number)


def _start_server() -> None:
  """Starts the server, which looks for modules where this process does.

  The server reads PYTHONPATH. Threads that start processes at the same time
  must not all change it.
  """
  path = os.pathsep.join(each for each in sys.path if each)
  with _starting:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = path
    try:
      _server.set_forkserver_preload(["tests.support.forking_imports"])
      multiprocessing.forkserver.ensure_running()
    finally:
      os.environ.pop("PYTHONPATH")
      if before is not None:
        os.environ["PYTHONPATH"] = before


def prepare(output: pathlib.Path, environment: Mapping[str, str]) -> None:
  """Prepares a forked process. Call it before you use a device.

  Args:
    output: The file to which stdout and stderr are written.
    environment: Environment variables to set.
  """
  with output.open("wb", buffering=0) as file:
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
      os.dup2(file.fileno(), stream.fileno())
  # The server is silent if it cannot import a module.
  assert "tests.support.forking_imports" in sys.modules
  os.environ.pop("TF_CONFIG", None)
  os.environ.update(environment)
