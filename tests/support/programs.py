"""Runs programs as a user runs them, each in a process of its own."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent


@contextlib.contextmanager
def started(
  arguments: Sequence[str],
  folder: pathlib.Path,
  timeout: float,
  path: Sequence[pathlib.Path] = (),
  **variables: str,
) -> Iterator[Callable[[], str]]:
  """Starts Python in a folder; yields what waits for it, then its output.

  The process has a session of its own, all of which ends with the context.
  Modules are looked for in the project and the folders of `path`.
  """
  # The folder of the test's own copy first, then whatever Bazel set.
  folders = [PROJECT, *path, os.environ.get("PYTHONPATH", "")]
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
        process.wait(timeout)
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
  arguments: Sequence[str],
  folder: pathlib.Path,
  timeout: float = 200.0,
  path: Sequence[pathlib.Path] = (),
  **variables: str,
) -> str:
  """Runs Python in a folder; returns its output."""
  with started(arguments, folder, timeout, path, **variables) as finish:
    return finish()
