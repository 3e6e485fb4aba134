"""Paths on the file systems that only TensorFlow opens, such as `gs://`.

A `RemotePath` has the methods of `pathlib.Path` that this package uses, on top
of `tf.io.gfile`. Local paths stay `pathlib.Path`, because a local file is also
synchronized with the disk before it replaces an older file.
"""

import contextlib
import errno
import fnmatch
import io
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, Final

import tensorflow as tf

_SEPARATOR: Final = "/"
# What Python raises for the same failure of a local file.
_NUMBERS: Final = {
  tf.errors.NotFoundError: errno.ENOENT,
  tf.errors.AlreadyExistsError: errno.EEXIST,
  tf.errors.PermissionDeniedError: errno.EACCES,
  tf.errors.UnauthenticatedError: errno.EACCES,
  tf.errors.ResourceExhaustedError: errno.ENOSPC,
}


@contextlib.contextmanager
def as_os_errors(path: str) -> Iterator[None]:
  """Turns TensorFlow's errors into the `OSError` of a local file."""
  try:
    yield
  except tf.errors.OpError as error:
    number = _NUMBERS.get(type(error), errno.EIO)
    raise OSError(number, error.message, path) from error


class RemotePath(os.PathLike[str]):
  """A file or folder that `tf.io.gfile` opens.

  >>> folder = RemotePath("ram://run/")
  >>> folder / "step_1.npz", (folder / "step_1.npz").name
  (RemotePath('ram://run/step_1.npz'), 'step_1.npz')
  """

  def __init__(self, path: str) -> None:
    self._path = path.rstrip(_SEPARATOR)

  def __fspath__(self) -> str:
    return self._path

  __str__ = __fspath__

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self._path!r})"

  def __eq__(self, other: object) -> bool:
    return isinstance(other, RemotePath) and self._path == other._path

  def __hash__(self) -> int:
    return hash(self._path)

  def __truediv__(self, name: str) -> "RemotePath":
    return RemotePath(f"{self._path}{_SEPARATOR}{name}")

  @property
  def name(self) -> str:
    """The last part of the path."""
    return self._path.rpartition(_SEPARATOR)[2]

  @property
  def parent(self) -> "RemotePath":
    """The folder of this file or folder."""
    return RemotePath(self._path.rpartition(_SEPARATOR)[0])

  def with_name(self, name: str) -> "RemotePath":
    """Returns a path in the same folder."""
    return self.parent / name

  def resolve(self) -> "RemotePath":
    """Returns the path itself: remote files have no symbolic links."""
    return self

  def exists(self) -> bool:
    """Returns whether there is a file or folder."""
    with as_os_errors(self._path):
      return bool(tf.io.gfile.exists(self._path))

  def size(self) -> int:
    """Returns the number of bytes of the file."""
    with as_os_errors(self._path):
      return int(tf.io.gfile.stat(self._path).length)

  @contextlib.contextmanager
  def open(self, mode: str = "r", **options: Any) -> Iterator[Any]:
    """Opens the file; closing it raises the errors of buffered writes.

    Args:
      mode: `"rb"`, `"wb"` (a stream that cannot seek), or `"w"` for UTF-8 text.
      **options: Ignored. They are the arguments of `pathlib.Path.open`.
    """
    if "w" in mode:
      self.unlink(missing_ok=True)  # Some file systems would append to it.
    with as_os_errors(self._path), tf.io.gfile.GFile(self._path, mode) as file:
      if mode == "rb":
        file.size()  # `GFile` itself notices only later that there is no file.
      yield _Stream(file) if mode == "wb" else file

  def replace(self, target: "RemotePath") -> None:
    """Renames the file, which replaces the target."""
    with as_os_errors(str(target)):
      tf.io.gfile.rename(self._path, str(target), overwrite=True)

  def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
    """Creates the folder and its parents."""
    del parents, exist_ok  # The arguments of `pathlib.Path.mkdir`.
    with as_os_errors(self._path):
      tf.io.gfile.makedirs(self._path)

  def unlink(self, missing_ok: bool = False) -> None:
    """Deletes the file."""
    try:
      with as_os_errors(self._path):
        tf.io.gfile.remove(self._path)
    except FileNotFoundError:
      if not missing_ok:
        raise

  def iterdir(self) -> Iterator["RemotePath"]:
    """Returns an iterator over the files and folders in the folder."""
    with as_os_errors(self._path):
      names = tf.io.gfile.listdir(self._path)
    return (self / name.rstrip(_SEPARATOR) for name in names)

  def glob(self, pattern: str) -> Iterator["RemotePath"]:
    """Yields the files and folders in this folder that match a pattern."""
    return (p for p in self.iterdir() if fnmatch.fnmatchcase(p.name, pattern))


Path = pathlib.Path | RemotePath


def as_path(path: Any, argument: str = "path") -> Path:
  """Converts a user's path to a `pathlib.Path` or a `RemotePath`.

  Raises:
    TypeError: If `path` is neither a string nor a path.
    ValueError: If `path` is empty, or a URL that TensorFlow cannot open.
  """
  if not isinstance(path, (str, os.PathLike)):
    raise TypeError(
      f"`{argument}` must be a string or a path; got {type(path).__name__}. Use"
      ' for example "checkpoints/step_100".'
    )
  text = os.fspath(path)
  if not text or not isinstance(text, str):
    raise ValueError(f"`{argument}` must be a path; got {text!r}.")
  known = tf.io.gfile.get_registered_schemes()
  scheme, is_url, _ = text.partition("://")
  if not is_url:
    scheme, colon, rest = text.partition(":/")
    if colon and scheme in known:
      raise ValueError(
        f"`{argument}` is {text!r}, because pathlib removes a slash of a URL."
        f' Pass the string "{scheme}://{rest}".'
      )
    return pathlib.Path(text)
  if scheme not in known:
    schemes = ", ".join(f"{each}://" for each in known if each)
    raise ValueError(
      f"`{argument}` must be a local path or begin with one of {schemes}; got"
      f" {text!r}. Other file systems need a plugin, such as tensorflow-io."
    )
  return RemotePath(text)


def delete_tree(folder: Path) -> None:
  """Deletes a folder with all files in it; ignores errors."""
  if isinstance(folder, pathlib.Path):
    shutil.rmtree(folder, ignore_errors=True)
    return
  with contextlib.suppress(tf.errors.OpError):
    tf.io.gfile.rmtree(str(folder))


class _Stream(io.RawIOBase):
  """A file that can only be written from start to end, as zipfile needs it.

  `GFile` says that it can seek while it writes, but it cannot.
  """

  def __init__(self, file: Any) -> None:
    super().__init__()
    self._file = file

  def writable(self) -> bool:
    """Returns True."""
    return True

  def write(self, data: Any) -> int:
    """Writes bytes; returns their number."""
    self._file.write(bytes(data))
    return memoryview(data).nbytes

  def flush(self) -> None:
    """Writes what `GFile` has buffered."""
    if not self.closed:
      self._file.flush()
