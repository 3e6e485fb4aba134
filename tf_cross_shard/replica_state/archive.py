"""A file of named arrays that is whole, or known not to be.

A zip file that `np.load` opens, with one `.npy` member per array and a
`manifest.json`. Its comment, the last bytes of the file, is the SHA-256 of all
that stands before: no byte can change or be missing without being noticed.

    name.npy, name.npy, ..., manifest.json, zip directory | sha256:0123...

What NumPy alone has no dtype for (bfloat16, float8) is kept as unsigned
integers of that size; the manifest has the name of the dtype.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import platform
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

VERSION: Final = 1
_MANIFEST: Final = "manifest.json"
_PREFIX: Final = b"sha256:"
_DIGITS: Final = 64
_COMMENT: Final = len(_PREFIX) + _DIGITS
_BLOCK: Final = 1 << 20
# While it is being written: beside the file, so that it can take its place.
_PARTIAL: Final = ".partial"
_REMEDIES: Final = {
  errno.ENOSPC: "Free space on that disk, or write to another one.",
  errno.EDQUOT: "Free some of your quota, or write to another disk.",
  errno.EFBIG: "Raise the limit for files (ulimit -f).",
  errno.ENOENT: "Make the folder first.",
}
_OTHER_REMEDY: Final = "Name a file in a folder that this process may write to."


class CheckpointError(ValueError):
  """A checkpoint is damaged, or does not belong to what it is read for."""


@dataclasses.dataclass(frozen=True)
class Stored:
  """What the manifest says of an array."""

  dtype: str
  shape: tuple[int, ...]


def as_path(path: Any) -> Path:
  """`path` as that of a file."""
  if not isinstance(path, (str, os.PathLike)):
    raise TypeError(
      f"`path` must be a string or a path; got {type(path).__name__}. Name a"
      ' file, such as "checkpoints/step_100".'
    )
  text = os.fspath(path)
  if not text or not isinstance(text, str) or "://" in text:
    raise ValueError(
      f"`path` must name a file of a file system; got {text!r}. Mount the"
      " storage, or name a file that is on a disk."
    )
  return Path(text)


def write(
  path: Path, arrays: Iterable[tuple[str, Array]], about: Mapping[str, Any]
) -> str:
  """Writes a file that takes the place of an older one when it is whole."""
  place = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
  partial = path.with_name(f".{path.name}.{place}{_PARTIAL}")
  try:
    try:
      digest = _write_new(partial, arrays, about)
      os.replace(partial, path)
    finally:
      with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
  except Exception as error:
    _raise_for_disk(path, error)
  for left in path.parent.glob(f".{_escaped(path.name)}.*-*-*{_PARTIAL}"):
    if _is_left_behind(left):
      with contextlib.suppress(OSError):
        left.unlink()
  return digest


def _is_left_behind(partial: Path) -> bool:
  """Whether it is of a process of this machine that was killed as it wrote."""
  node, process, _ = partial.name.removesuffix(_PARTIAL).rsplit("-", 2)
  if not node.endswith(f".{platform.node()}") or not process.isdecimal():
    return False
  try:
    os.kill(int(process), 0)
  except ProcessLookupError:
    return True
  except OSError:
    return False  # Somebody else's.
  return False


@contextlib.contextmanager
def reading(path: Path) -> Iterator["Archive"]:
  """Opens a file that is whole."""
  try:
    file = path.open("rb")
  except OSError as error:
    raise OSError(
      error.errno,
      f"The checkpoint {path} cannot be read: {error.strerror}. Name a file"
      " that `save` wrote, which every worker sees",
    ) from error
  with file:
    digest = _check_digest(path, file)
    try:
      with zipfile.ZipFile(file) as container:
        archive = Archive(path, digest, container)
        yield archive
    except zipfile.BadZipFile as error:
      raise CheckpointError(
        f"{path} is no checkpoint: {error}. Name a file that `save` wrote."
      ) from error


class Archive:
  """What a whole file holds."""

  def __init__(
    self, path: Path, digest: str, container: zipfile.ZipFile
  ) -> None:
    """Reads the manifest."""
    self.digest = digest
    self.path = path
    self._container = container
    try:
      manifest = json.loads(container.read(_MANIFEST))
      version = int(manifest["version"])
      self.about: dict[str, Any] = dict(manifest["about"])
      self.arrays = {
        str(name): Stored(stored["dtype"], tuple(map(int, stored["shape"])))
        for name, stored in manifest["arrays"].items()
      }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
      raise CheckpointError(
        f"{path} is no checkpoint: its manifest cannot be understood"
        f" ({error!r}). Name a file that `save` wrote."
      ) from error
    if version != VERSION:
      raise CheckpointError(
        f"{path} is of version {version}; this program reads version"
        f" {VERSION}. Install a newer tf_cross_shard."
      )

  def read(self, name: str) -> Array:
    """Reads an array."""
    stored = self.arrays[name]
    try:
      with self._container.open(f"{name}.npy") as member:
        array: Array = np.lib.format.read_array(member, allow_pickle=False)
      array = array.view(_dtype(stored.dtype))
    except (KeyError, TypeError, ValueError) as error:
      raise CheckpointError(
        f"{self.path} has no array `{name}` of dtype {stored.dtype}: {error}."
        " Save it again."
      ) from error
    if array.shape != stored.shape:
      raise CheckpointError(
        f"{self.path} has `{name}` with shape {list(array.shape)}, where its"
        f" manifest says {list(stored.shape)}. Save it again."
      )
    return array


def _write_new(
  path: Path, arrays: Iterable[tuple[str, Array]], about: Mapping[str, Any]
) -> str:
  """Writes a new file, to the disk itself."""
  # Not by tempfile: its files can be read by their owner only.
  flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
  with os.fdopen(os.open(path, flags, 0o666), "w+b") as file:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as container:
      container.comment = bytes(_COMMENT)  # until the digest is known
      stored = {}
      for name, array in arrays:
        stored[name] = {"dtype": array.dtype.name, "shape": list(array.shape)}
        member = _member(f"{name}.npy")
        with container.open(member, "w", force_zip64=True) as to:
          np.lib.format.write_array(to, _plain(array), allow_pickle=False)
      manifest = {"version": VERSION, "about": dict(about), "arrays": stored}
      container.writestr(_member(_MANIFEST), json.dumps(manifest))
    end = file.seek(-_COMMENT, os.SEEK_END)
    digest = _digest(file, end)
    file.seek(end)
    file.write(_PREFIX + digest.encode())
    file.flush()
    os.fsync(file.fileno())
  return digest


def _member(name: str) -> zipfile.ZipInfo:
  """A member without a date: equal state makes equal files."""
  return zipfile.ZipInfo(name)


def _plain(array: Array) -> Array:
  """`array` in a dtype that every NumPy reads."""
  array = np.asarray(array, order="C")
  if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
    return array
  return array.view(f"u{array.dtype.itemsize}")


def _dtype(name: str) -> np.dtype[Any]:
  """The dtype of that name."""
  return np.dtype(getattr(ml_dtypes, name, None) or name)


def _digest(file: IO[bytes], size: int) -> str:
  """The SHA-256 of the first so many bytes."""
  file.seek(0)
  digest = hashlib.sha256()
  while size > 0 and (block := file.read(min(size, _BLOCK))):
    digest.update(block)
    size -= len(block)
  return digest.hexdigest()


def _check_digest(path: Path, file: IO[bytes]) -> str:
  """Raises `CheckpointError` unless the file is as it was written."""
  size = file.seek(0, os.SEEK_END)
  file.seek(max(0, size - _COMMENT))
  comment = file.read()
  digest = _digest(file, size - _COMMENT)
  if comment == _PREFIX + digest.encode():
    return digest
  if comment.startswith(_PREFIX):
    what = "its bytes do not have the checksum that is written at their end"
  else:
    what = "it does not end with a checksum; it was cut off, or is another file"
  raise CheckpointError(
    f"The checkpoint {path} is damaged, {size:,} bytes long: {what}. Nothing"
    " was changed. Restore another checkpoint, or copy this one again."
  )


def _sync_folder(folder: Path) -> None:
  """Writes to disk that the new file is in the folder."""
  with contextlib.suppress(OSError):  # not every file system can
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def _escaped(name: str) -> str:
  """`name` as a pattern that matches nothing else."""
  return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _raise_for_disk(path: Path, error: BaseException) -> NoReturn:
  """Raises what the disk said, in words; anything else as it is."""
  cause: BaseException | None = error
  # zipfile closes its file when a write failed, and so fails once more.
  while cause is not None and not (
    isinstance(cause, OSError) and cause.errno is not None
  ):
    cause = cause.__cause__ or cause.__context__
  if not isinstance(cause, OSError):
    raise error
  remedy = _REMEDIES.get(cause.errno or 0, _OTHER_REMEDY)
  raise OSError(
    cause.errno,
    f"The checkpoint {path} could not be written: {cause.strerror}. What was"
    f" there before is unchanged. {remedy}",
  ) from error
