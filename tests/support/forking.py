"""Forks processes from a server that has imported TensorFlow.

A new process takes seconds to import TensorFlow. So one server process imports
TensorFlow once, without using a device, and forks each new process.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from unittest import mock

_server = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
_modules: Sequence[str] = ()  # Those that the server has imported.


class Process:
  """A forked process, with the methods of `subprocess.Popen` that we need."""

  def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
    """Calls `target`, a function of a module, in a new process."""
    start_server()
    self._process = _server.Process(target=target, args=arguments)
    self._process.start()

  def poll(self) -> int | None:
    """Returns the exit code, or None while the process runs."""
    return self._process.exitcode

  def kill(self) -> None:
    self._process.kill()

  def send_signal(self, number: int) -> None:
    """Sends a signal if the process runs."""
    if self.poll() is None:
      assert self._process.pid is not None
      # The server may know first that the process has ended.
      with contextlib.suppress(ProcessLookupError):
        os.kill(self._process.pid, number)


def start_server(
  modules: Sequence[str] = ("tests.support.forking_imports",),
  environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Starts the server, unless one with the same modules runs.

  Python has one server for each process. So a server with other modules is
  ended. Processes that it has forked continue.

  Args:
    modules: The modules that the server imports.
    environment: Environment variables of the server.
  """
  global _modules
  # The server searches for modules in the folders of PYTHONPATH.
  path = os.pathsep.join(each for each in sys.path if each)
  # Threads that start processes at the same time must not all change
  # `os.environ`.
  with (
    _starting,
    mock.patch.dict(os.environ, {**environment, "PYTHONPATH": path}),
  ):
    if _modules not in ((), modules):
      multiprocessing.forkserver._forkserver._stop()
    _modules = modules
    _server.set_forkserver_preload(list(modules))
    multiprocessing.forkserver.ensure_running()


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
  # Only an ordinary process runs these functions by itself.
  multiprocessing.util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)
  # The server is silent if it cannot import a module.
  assert "tests.support.forking_imports" in sys.modules
  os.environ.pop("TF_CONFIG", None)
  os.environ.update(environment)
