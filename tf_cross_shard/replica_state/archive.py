"""A file of named arrays that is whole, or known not to be.

It is an `.npz` of NumPy's, which has a checksum for each array. What NumPy has
no dtype for (bfloat16, float8) is kept as unsigned integers of that size. An
entry of JSON says which these are, and what the file is about.
"""

import contextlib
import errno
import json
import os
import pathlib
import secrets
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

_ABOUT: Final = "about"  # the name of the entry of JSON
_REMEDIES: Final = {
  errno.ENOSPC: "Free space on that disk, or write to another one.",
  errno.ENOENT: "Make the folder first.",
}
_OTHER_REMEDY: Final = "Name a file in a folder that this process may write to."


class CheckpointError(ValueError):
  """A checkpoint is damaged, or does not belong to what it is read for."""


def as_path(path: Any, argument: str = "path") -> pathlib.Path:
  """Returns the path of a file or a folder."""
  if not isinstance(path, (str, os.PathLike)):
    raise TypeError(
      f"`{argument}` must be a string or a path; got {type(path).__name__}. Use"
      ' for example "checkpoints/step_100".'
    )
  text = str(path)
  if not text or "://" in text:
    raise ValueError(
      f"`{argument}` must be in a file system; got {text!r}. Mount the storage,"
      " or name a place on a disk."
    )
  return pathlib.Path(text)


def write(
  path: pathlib.Path, arrays: Mapping[str, Array], about: Mapping[str, Any]
) -> None:
  """Writes a file that takes the place of an older one when it is whole."""
  path = path.resolve()  # what a link leads to, and not the link
  dtypes = {name: array.dtype.name for name, array in arrays.items()}
  text = json.dumps({**about, "dtypes": dtypes})
  entries: dict[str, Any] = {_ABOUT: np.array(text)}
  entries |= {name: _as_plain(array) for name, array in arrays.items()}
  # Beside the old file, so that it can take its place; and not by tempfile,
  # whose files can be read by their owner only.
  partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
  try:
    try:
      with partial.open("xb") as file:
        np.savez(file, **entries)
        file.flush()
        os.fsync(file.fileno())
      os.replace(partial, path)
    finally:
      with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)
  except OSError as error:
    remedy = _REMEDIES.get(error.errno or 0, _OTHER_REMEDY)
    raise OSError(
      error.errno,
      f"The checkpoint {path} could not be written: {error.strerror}. What was"
      f" there before is unchanged. {remedy}",
    ) from error
  with contextlib.suppress(OSError):  # not every file system can sync a folder
    folder = os.open(path.parent, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)


class Archive(Mapping[str, Array]):
  """The arrays of a whole file, each read when it is asked for.

  Attributes:
    path: The file.
    about: What `write` was told of it.
    checksum: Of all that is in it.
  """

  def __init__(
    self, path: pathlib.Path, entries: Any, container: zipfile.ZipFile
  ) -> None:
    """Reads the entry of JSON."""
    self.path = path
    self.about: dict[str, Any] = json.loads(entries[_ABOUT].item())
    self._dtypes: dict[str, str] = self.about["dtypes"]
    self._entries = entries
    if set(entries) != {_ABOUT, *self._dtypes}:
      raise ValueError("another number of arrays")
    checksums = [(i.filename, i.CRC) for i in container.infolist()]
    self.checksum = zlib.crc32(repr(checksums).encode())

  def __getitem__(self, name: str) -> Array:
    """Reads an array."""
    dtype = self._dtypes[name]
    array: Array = self._entries[name]
    return array.view(np.dtype(getattr(ml_dtypes, dtype, dtype)))

  def __iter__(self) -> Iterator[str]:
    """Returns the names."""
    return iter(self._dtypes)

  def __len__(self) -> int:
    """Returns how many arrays there are."""
    return len(self._dtypes)


def about(path: pathlib.Path) -> dict[str, Any]:
  """Returns what `write` was told of a file; nothing if it cannot be read."""
  with (
    contextlib.suppress(Exception),
    path.open("rb") as file,
    np.load(file) as entries,
  ):
    return dict(json.loads(entries[_ABOUT].item()))
  return {}


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[Archive]:
  """Opens a file, if all of its arrays have their checksums."""
  with contextlib.ExitStack() as stack:
    try:
      file = stack.enter_context(path.open("rb"))
    except OSError as error:
      raise OSError(
        error.errno,
        f"The checkpoint {path} cannot be read: {error.strerror}. Name a file"
        " that replica_state.save wrote, which every worker sees",
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
def naming_damage(
  path: pathlib.Path, *others: type[Exception]
) -> Iterator[None]:
  """Raises `CheckpointError` for any errors but `others`.

  A wrong byte makes zipfile, NumPy and json raise errors of any kind.
  """
  try:
    yield
  except Exception as error:
    if isinstance(error, (CheckpointError, *others)):
      raise
    raise CheckpointError(
      f"The checkpoint {path} is damaged, or is another file: {error!r}."
      " Nothing was changed; restore one that replica_state.save wrote."
    ) from error


def _as_plain(array: Array) -> Array:
  """Returns `array` in a dtype that every NumPy reads."""
  array = np.asarray(array, order="C")
  if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
    return array
  return array.view(f"u{array.dtype.itemsize}")
