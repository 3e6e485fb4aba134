"""Storage that fails while a program writes to it, for `preemptions.py`.

There are three kinds of storage:

- "folder": a folder, which does not fail.
- "disk": a small file system in memory, which becomes full or read-only. Only
  root can mount it.
- "server": a folder that the program opens through `tf.io.gfile`, as it opens
  `gs://`. Each operation takes a while, and may fail. A new file is incomplete
  while another file is renamed to it.
"""

import contextlib
import os
import pathlib
import random
import subprocess
import time
from collections.abc import Iterator
from typing import Any

# The faults of each kind of storage.
FAULTS: dict[str, list[str]] = {
  "folder": [],
  "disk": ["full disk", "read-only disk"],
  "server": ["failing server"],
}
# The kinds that fail, and that this user can create.
KINDS = ["server", "disk"] if os.geteuid() == 0 else ["server"]
_SIZE = 4 << 20  # Bytes of a disk.
_PAGE = 4096  # Bytes: a file on the disk takes whole pages.
_SLOWEST = 0.01  # Seconds at most for an operation of the server.
_FAILING = 0.2  # The share of the server's operations that fail, in a fault.
_SCHEME = "file://"  # TensorFlow opens these URLs with its own functions.


@contextlib.contextmanager
def create(kind: str, folder: pathlib.Path) -> Iterator[str]:
  """Yields the path or URL of a new storage in a new folder."""
  folder.mkdir()
  if kind == "disk":
    _run("mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder))
  try:
    yield f"{_SCHEME}{folder}" if kind == "server" else str(folder)
  finally:
    if kind == "disk":
      _run("umount", "--lazy", str(folder))


@contextlib.contextmanager
def failing(
  fault: str, folder: pathlib.Path, rng: random.Random
) -> Iterator[None]:
  """Makes the storage in a folder fail, and mends it at the end."""
  if fault == "full disk":
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
      with contextlib.suppress(OSError):
        while file.write(bytes(_PAGE)):
          pass
      # A few pages are left, so that the disk is full in the middle of a file.
      os.truncate(filler, max(0, file.tell() - rng.randrange(6) * _PAGE))
    yield
    filler.unlink()
  elif fault == "read-only disk":
    _remount(folder, "ro")
    yield
    _remount(folder, "rw")
  else:
    flag = _flag(folder)
    flag.touch()
    yield
    flag.unlink()


def act_as_server(storage: str) -> None:
  """Makes `tf.io.gfile` slow and faulty in this process, for a server's URL."""
  if not storage.startswith(_SCHEME):
    return
  import tensorflow as tf

  gfile = tf.io.gfile
  flag = _flag(pathlib.Path(storage.removeprefix(_SCHEME)))
  # TensorFlow's seed must not decide: every start would fail at one place.
  rng = random.SystemRandom()

  def serve(seconds: float = _SLOWEST) -> None:
    time.sleep(rng.uniform(0, seconds))
    if flag.exists() and rng.random() < _FAILING:
      raise tf.errors.UnavailableError(None, None, "the server does not answer")

  def served(function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
      serve()
      return function(*args, **options)

    return call

  def rename(old: str, new: str, overwrite: bool = False) -> None:
    if not gfile.exists(new):
      with open(old.removeprefix(_SCHEME), "rb") as file:
        data = file.read()
      # A process that is killed here leaves half of the file.
      with open(new.removeprefix(_SCHEME), "wb") as file:
        file.write(data[: len(data) // 2])
      serve()
    move(old, new, overwrite)

  class File(gfile.GFile):  # type: ignore[misc]
    """A file of the server."""

    def write(self, data: Any) -> None:
      """Writes a part of the file, or fails."""
      serve(0)
      super().write(data)

  move = gfile.rename
  for name in ("listdir", "makedirs", "remove", "stat"):
    setattr(gfile, name, served(getattr(gfile, name)))
  gfile.rename, gfile.GFile = served(rename), File


def _flag(folder: pathlib.Path) -> pathlib.Path:
  """Returns the file that exists while a server fails."""
  return folder.with_name(f"{folder.name}_fails")


def _remount(folder: pathlib.Path, mode: str) -> None:
  """Makes a disk read-only or writable, as soon as no file is being written."""
  command = ["mount", "-o", f"remount,{mode}", str(folder)]
  while subprocess.run(command, capture_output=True, check=False).returncode:
    time.sleep(0.001)


def _run(*command: str) -> None:
  subprocess.run(command, check=True)
