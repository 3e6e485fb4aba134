"""Files and folders, on a local disk or on `gs://`, as `epath.Path`.

`etils.epath` opens `gs://` through `tf.io.gfile`, whose errors are no `OSError`
and whose files cannot seek while they are written.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import IO, Any, Final

import tensorflow as tf
from etils import epath

# What Python raises for the same failure of a local file.
_NUMBERS: Final = {
  tf.errors.NotFoundError: errno.ENOENT,
  tf.errors.AlreadyExistsError: errno.EEXIST,
  tf.errors.PermissionDeniedError: errno.EACCES,
  tf.errors.UnauthenticatedError: errno.EACCES,
  tf.errors.ResourceExhaustedError: errno.ENOSPC,
}


def check_not_keras(path: epath.Path) -> None:
  if path.suffix in (".keras", ".h5"):
    raise ValueError(
      f"`path` is {str(path)!r}, but Keras cannot load a file of several"
      " models. Use another name; models[i].save(path) writes one model."
    )


def as_path(path: Any, argument: str = "path") -> epath.Path:
  """Converts a user's path, or raises an error that names the argument."""
  if not isinstance(path, (str, os.PathLike)):
    raise TypeError(
      f"`{argument}` must be a string or a path; got {type(path).__name__}. Use"
      ' for example "checkpoints/step_100".'
    )
  text = os.fspath(path)
  if not text or not isinstance(text, str):
    raise ValueError(f"`{argument}` must be a path; got {text!r}.")
  scheme, _, rest = text.partition(":/")
  if scheme == "gs" and not rest.startswith("/"):
    raise ValueError(
      f"`{argument}` is {text!r}, because pathlib removes a slash of a URL."
      f' Pass the string "{scheme}://{rest}".'
    )
  try:
    return epath.Path(text)
  except KeyError as error:
    raise ValueError(
      f"`{argument}` must be a local path or a URL that etils.epath knows, such"
      f" as gs://bucket/run; got {text!r}."
    ) from error


def is_local(path: epath.Path) -> bool:
  """Returns whether the operating system opens the file."""
  return "://" not in os.fspath(path)


@contextlib.contextmanager
def as_os_errors(path: epath.Path) -> Iterator[None]:
  """Turns TensorFlow's errors into the `OSError` of a local file."""
  try:
    yield
  except tf.errors.OpError as error:
    number = _NUMBERS.get(type(error), errno.EIO)
    raise OSError(number, error.message, os.fspath(path)) from error


@contextlib.contextmanager
def reading(path: epath.Path) -> Iterator[IO[Any]]:
  with as_os_errors(path):
    # A file on gs:// would raise an error only when it is read.
    if not path.exists():
      number = errno.ENOENT
      raise FileNotFoundError(number, os.strerror(number), os.fspath(path))
    with path.open("rb") as file:
      yield file


@contextlib.contextmanager
def writing(path: epath.Path) -> Iterator[Any]:
  """Opens a new file for writing bytes; a local one reaches the disk."""
  if is_local(path):
    with open(path, "xb") as local:
      yield local
      local.flush()
      os.fsync(local.fileno())
    return
  with as_os_errors(path), path.open("wb") as file:
    # The file of `tf.io.gfile` says that it can seek while it writes.
    yield _Stream(file)


class _Stream:
  """A file that zipfile writes from start to end, since it has no `tell`."""

  read = None  # NumPy takes an object without `read` for a path.

  def __init__(self, file: IO[Any]) -> None:
    self._file = file
    # NumPy takes what has `read` for a file.
    self.flush, self.read = file.flush, file.read

  def write(self, data: Any) -> int:
    """Writes bytes; returns their number."""
    self._file.write(bytes(data))
    return memoryview(data).nbytes


def replace(path: epath.Path, target: epath.Path) -> None:
  """Renames a file, which replaces the target; a local rename is atomic."""
  if not is_local(target):
    with as_os_errors(target):
      path.replace(target)
    return
  os.replace(path, target)
  with contextlib.suppress(OSError):  # Not every file system can.
    folder = os.open(target.parent, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)


def list_folder(folder: epath.Path) -> list[epath.Path]:
  with as_os_errors(folder):
    return list(folder.iterdir())


def make_folder(folder: epath.Path) -> None:
  """Creates a folder and its parents, unless they exist."""
  with as_os_errors(folder):
    folder.mkdir(parents=True, exist_ok=True)


def delete(path: epath.Path) -> None:
  """Deletes a file, if it exists."""
  with as_os_errors(path):
    path.unlink(missing_ok=True)
