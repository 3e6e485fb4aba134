"""Runs programs as a user runs them, each in a process of its own.

Half of the time of an example is spent on imports: TensorFlow, and the
libraries that read the digits. So `fork` has one server process import them
once for all programs.
"""

import contextlib
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from tests.support import forking

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent
_TIMEOUT = 900.0  # Seconds until a program is killed as hung.


@contextlib.contextmanager
def started(
  arguments: Sequence[str], folder: pathlib.Path, **variables: str
) -> Iterator[Callable[[], str]]:
  """Starts Python in a folder.

  Yields a function that waits for the process and returns its output. The
  process has its own session. When the context ends, all processes of the
  session are killed.
  """
  # The folder of the test's own copy first, then whatever Bazel set.
  folders = [PROJECT, os.environ.get("PYTHONPATH", "")]
  environment = {**os.environ, **variables}
  # Bazel sets it for tests; it would hide an example's siblings from it.
  environment.pop("PYTHONSAFEPATH", None)
  environment["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, folders)))
  with tempfile.TemporaryFile() as output:
    process = subprocess.Popen(
      [sys.executable, *arguments],
      cwd=folder,
      env=environment,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )

    def finish() -> str:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TIMEOUT)
      output.seek(0)
      said = output.read().decode(errors="replace")
      assert process.poll() == 0, said
      return said

    try:
      yield finish
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def run(
  arguments: Sequence[str], folder: pathlib.Path, **variables: str
) -> str:
  """Runs Python in a folder; returns its output."""
  with started(arguments, folder, **variables) as finish:
    return finish()


_server = multiprocessing.get_context("forkserver")
_MODULES = (
  *("tensorflow_datasets", "keras"),
  *("matplotlib.pyplot", "sklearn.datasets"),
)


def fork(
  arguments: Sequence[str],
  folder: pathlib.Path,
  path: Sequence[pathlib.Path] = (),
) -> str:
  """Runs an example in a folder; returns its output.

  Use this function for examples that start no processes, and that set no
  environment variable of TensorFlow other than TF_ENABLE_ONEDNN_OPTS. Modules
  are looked for in the folders of `path`, too.
  """
  forking.start_server(_MODULES, {"TF_ENABLE_ONEDNN_OPTS": "0"})
  with tempfile.NamedTemporaryFile() as output:
    program = _server.Process(
      target=_become, args=([*arguments], folder, [*path], output.name)
    )
    program.start()
    program.join(_TIMEOUT)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(program.pid, signal.SIGKILL)
    program.join()
    said = output.read().decode(errors="replace")
    assert program.exitcode == 0, said
    return said


def _become(
  arguments: list[str],
  folder: pathlib.Path,
  path: list[pathlib.Path],
  output: str,
) -> None:
  """Makes this process the program, with a session of its own."""
  os.setsid()
  os.chdir(folder)
  written = os.open(output, os.O_WRONLY | os.O_APPEND)
  for stream in (1, 2):
    os.dup2(written, stream)
  sys.argv = arguments
  sys.path[:0] = [os.path.dirname(arguments[0]), *map(str, path)]
  os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for its own programs
  runpy.run_path(arguments[0], run_name="__main__")
