"""Checkpoint files: `.npz` files of named arrays, replaced atomically.

The zip container has a checksum for each array. An entry in JSON, `about`,
names the dtypes, of which NumPy lacks some, and describes the contents. Files
are on a local disk or, through `tf.io.gfile`, on `gs://`.
"""

import contextlib
import errno
import io
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

import ml_dtypes
import numpy as np
import tensorflow as tf
from etils import epath

Array = np.ndarray[Any, Any]

_ABOUT: Final = "about"  # the name of the JSON entry
_SHORTEST_ZIP: Final = 22  # bytes: a zip file without entries
_REMEDIES: Final = {
  errno.ENOSPC: "Free space on that disk, or write to another one.",
  errno.ENOENT: "Create the folder first.",
}
_OTHER_REMEDY: Final = "Name a file in a folder that this process may write to."
# What Python raises for the same failure of a local file.
_NUMBERS: Final = {
  tf.errors.NotFoundError: errno.ENOENT,
  tf.errors.AlreadyExistsError: errno.EEXIST,
  tf.errors.PermissionDeniedError: errno.EACCES,
  tf.errors.UnauthenticatedError: errno.EACCES,
  tf.errors.ResourceExhaustedError: errno.ENOSPC,
}


class CheckpointError(ValueError):
  """Raised if a checkpoint is damaged or does not match the program."""


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


def _is_local(path: epath.Path) -> bool:
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


@contextlib.contextmanager
def _opened(path: epath.Path) -> Iterator[IO[Any]]:
  with as_os_errors(path):
    # A file on gs:// would raise an error only when it is read.
    if not path.exists():
      number = errno.ENOENT
      raise FileNotFoundError(number, os.strerror(number), os.fspath(path))
    with path.open("rb") as file:
      yield file


def write(
  path: epath.Path, arrays: Mapping[str, Array], about: Mapping[str, Any]
) -> None:
  """Writes a file atomically. `about` describes it, in values for JSON."""
  if _is_local(path):
    # Replace the target of a symbolic link, not the link.
    path = epath.Path(os.path.realpath(path))
  dtypes = {name: array.dtype.name for name, array in arrays.items()}
  text = json.dumps({**about, "dtypes": dtypes})
  entries: dict[str, Any] = {_ABOUT: np.array(text)}
  entries |= {name: _as_plain(array) for name, array in arrays.items()}
  # `tf.io.gfile` cannot seek in a file that it writes.
  data = io.BytesIO()
  np.savez(data, **entries)
  # The partial file is in the same folder, because a rename is atomic only
  # within one file system. It is not created by tempfile, because only the
  # owner of tempfile's files can read them.
  partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
  try:
    try:
      write_bytes(partial, data.getvalue())
      _replace(partial, path)
    finally:
      with contextlib.suppress(OSError):
        delete(partial)
  except OSError as error:
    remedy = _REMEDIES.get(error.errno or 0, _OTHER_REMEDY)
    raise OSError(
      error.errno,
      f"The checkpoint {path} could not be written: {error.strerror}."
      f" The previous file is unchanged. {remedy}",
    ) from error


def write_bytes(path: epath.Path, data: bytes) -> None:
  """Writes a file; a local one reaches the disk."""
  with as_os_errors(path), path.open("wb") as file:
    file.write(data)
    if _is_local(path):
      file.flush()
      os.fsync(file.fileno())


def _replace(path: epath.Path, target: epath.Path) -> None:
  """Renames a file, which replaces the target; a local rename is atomic."""
  if not _is_local(target):
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


def is_complete(path: epath.Path) -> bool:
  """Returns whether a file was written to its end."""
  # File systems that copy files to rename them may be interrupted. The
  # directory of a zip file is at its end.
  if _is_local(path):
    return True
  with _opened(path) as file:
    is_long = path.stat().length >= _SHORTEST_ZIP
    return is_long and zipfile.is_zipfile(file)


class Archive(Mapping[str, Array]):
  """The arrays of a checkpoint file, each of which is read on access."""

  def __init__(
    self, path: epath.Path, entries: Any, container: zipfile.ZipFile
  ) -> None:
    self.path = path
    self.about: dict[str, Any] = json.loads(entries[_ABOUT].item())
    self._dtypes: dict[str, str] = self.about["dtypes"]
    self._entries = entries
    if set(entries) != {_ABOUT, *self._dtypes}:
      raise ValueError("the arrays are not those that the file lists")
    checksums = [(i.filename, i.CRC) for i in container.infolist()]
    self.checksum = zlib.crc32(repr(checksums).encode())

  def __getitem__(self, name: str) -> Array:
    dtype = self._dtypes[name]
    array: Array = self._entries[name]
    return array.view(np.dtype(getattr(ml_dtypes, dtype, dtype)))

  def __iter__(self) -> Iterator[str]:
    return iter(self._dtypes)

  def __len__(self) -> int:
    return len(self._dtypes)


@contextlib.contextmanager
def reading(path: epath.Path) -> Iterator[Archive]:
  """Opens a file for reading, after all checksums were verified."""
  with contextlib.ExitStack() as stack:
    try:
      file = stack.enter_context(_opened(path))
    except OSError as error:
      raise OSError(
        error.errno,
        f"The checkpoint {path} cannot be read: {error.strerror}. Name a file"
        " that Models.save wrote and that every worker can read",
      ) from error
    with naming_damage(path):
      container = stack.enter_context(zipfile.ZipFile(file))
      wrong = container.testzip()
      if wrong is not None:
        raise zipfile.BadZipFile(f"wrong checksum of {wrong}")
      file.seek(0)
      entries = stack.enter_context(np.load(file, allow_pickle=False))
      archive = Archive(path, entries, container)
    yield archive


@contextlib.contextmanager
def naming_damage(path: epath.Path, *others: type[Exception]) -> Iterator[None]:
  """Turns errors but `others` into a `CheckpointError` that names the file."""
  try:
    yield
  except Exception as error:  # A wrong byte can raise an error of any class.
    if isinstance(error, (CheckpointError, *others)):
      raise
    raise CheckpointError(
      f"{path} is damaged, or is not a checkpoint of tf_cross_shard:"
      f" {error!r}. Nothing was changed; restore a file that"
      " Models.save wrote."
    ) from error


def _as_plain(array: Array) -> Array:
  """Returns an array in a dtype that every NumPy can read."""
  array = np.asarray(array, order="C")
  if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
    return array
  return array.view(f"u{array.dtype.itemsize}")
