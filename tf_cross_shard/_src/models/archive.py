"""Checkpoint files: `.npz` files of named arrays, replaced atomically.

The zip container has a checksum for each array. An entry in JSON, `about`,
names the dtypes, of which NumPy lacks some, and describes the contents.
"""

import contextlib
import errno
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
from etils import epath

from tf_cross_shard._src.models import paths as paths_lib

Array = np.ndarray[Any, Any]

_ABOUT: Final = "about"  # the name of the JSON entry
_SHORTEST_ZIP: Final = 22  # bytes: a zip file without entries
_REMEDIES: Final = {
  errno.ENOSPC: "Free space on that disk, or write to another one.",
  errno.ENOENT: "Create the folder first.",
}
_OTHER_REMEDY: Final = "Name a file in a folder that this process may write to."


class CheckpointError(ValueError):
  """Raised if a checkpoint is damaged or does not match the program."""


def write(
  path: epath.Path, arrays: Mapping[str, Array], about: Mapping[str, Any]
) -> None:
  """Writes a file atomically. `about` describes it, in values for JSON."""
  if paths_lib.is_local(path):
    # Replace the target of a symbolic link, not the link.
    path = epath.Path(os.path.realpath(path))
  dtypes = {name: array.dtype.name for name, array in arrays.items()}
  text = json.dumps({**about, "dtypes": dtypes})
  entries: dict[str, Any] = {_ABOUT: np.array(text)}
  entries |= {name: _as_plain(array) for name, array in arrays.items()}
  # The partial file is in the same folder, because `replace` is atomic only
  # within one file system. It is not created by tempfile, because only the
  # owner of tempfile's files can read them.
  partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
  try:
    try:
      # If a file system copies files to rename them, the new file may be
      # incomplete for a moment. `is_complete` detects this, because the
      # directory of a zip file is at the end of the file.
      with paths_lib.writing(partial) as file:
        np.savez(file, **entries)
      paths_lib.replace(partial, path)
    finally:
      with contextlib.suppress(OSError):
        paths_lib.delete(partial)
  except OSError as error:
    remedy = _REMEDIES.get(error.errno or 0, _OTHER_REMEDY)
    raise OSError(
      error.errno,
      f"The checkpoint {path} could not be written: {error.strerror}."
      f" The previous file is unchanged. {remedy}",
    ) from error


def is_complete(path: epath.Path) -> bool:
  """Returns whether a file was written to its end."""
  if paths_lib.is_local(path):  # Its rename is atomic.
    return True
  with paths_lib.reading(path) as file:
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
      file = stack.enter_context(paths_lib.reading(path))
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
