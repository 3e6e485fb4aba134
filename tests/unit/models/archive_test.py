"""Files of arrays: exact, whole or known to be damaged, never half-written."""

import errno
import os
import pathlib
import re
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from tf_cross_shard._src.models import archive

DTYPES = (
  *("bool", "int8", "uint64", "float16", "float32", "complex128"),
  *("bfloat16", "float8_e4m3fn", "int4"),
)


def _write(path: pathlib.Path, value: int, size: int = 4) -> bytes:
  """A file with two arrays that tell which one it is."""
  arrays: dict[str, Any] = {
    "model_0/x": np.full(size, value, "int64"),
    "model_1/x": np.full(size, value + 1, ml_dtypes.bfloat16),
  }
  archive.write(path, arrays, {"value": value})
  return path.read_bytes()


def _value(path: pathlib.Path) -> int:
  """Returns which of the written files this is."""
  with archive.reading(path) as found:
    value = int(found.about["value"])
    assert sorted(found) == ["model_0/x", "model_1/x"]
    assert found["model_0/x"].tolist() == [value] * 4
    assert found["model_1/x"].tolist() == [value + 1] * 4
  return value


# ------------------------------------------------------------------ round trips


def test_arrays_come_back(tmp_path: pathlib.Path) -> None:
  bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 1], "uint32")
  given: dict[str, Any] = {"bits": bits.view("float32")}
  for dtype in DTYPES:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    given[f"{dtype}/matrix"] = np.asfortranarray(
      (np.arange(6).reshape(3, 2) % 4).astype(kind)
    )
    given[f"{dtype}/scalar"] = np.array(1).astype(kind)
    given[f"{dtype}/empty"] = np.zeros((0, 2), kind)
  archive.write(tmp_path / "a", given, {})
  with archive.reading(tmp_path / "a") as found:
    assert sorted(found) == sorted(given)
    for name, array in given.items():
      back = found[name]
      assert (back.dtype, back.shape) == (array.dtype, array.shape), name
      assert back.tobytes() == array.tobytes(), name
  with np.load(tmp_path / "a", allow_pickle=False) as plain:
    matrix = plain["bfloat16/matrix"].view(ml_dtypes.bfloat16)
    assert matrix.tolist() == given["bfloat16/matrix"].tolist()


def test_the_checksum_is_that_of_what_is_in_it(tmp_path: pathlib.Path) -> None:
  checksums = []
  for value in (5, 5, 6):
    _write(tmp_path / "a", value)
    with archive.reading(tmp_path / "a") as found:
      checksums.append(found.checksum)
  assert checksums[0] == checksums[1] != checksums[2]


def test_file_permissions_follow_umask(tmp_path: pathlib.Path) -> None:
  before = os.umask(0o027)
  try:
    _write(tmp_path / "a", 1)
  finally:
    os.umask(before)
  assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


# ------------------------------------------------------------------- bad files


def _assert_damaged(path: pathlib.Path, data: bytes) -> None:
  path.write_bytes(data)
  with (
    pytest.raises(archive.CheckpointError, match=re.escape(str(path))),
    archive.reading(path) as found,
  ):
    pytest.fail(f"{found.about}")


def test_any_byte_that_is_flipped(tmp_path: pathlib.Path) -> None:
  """A changed byte never gives a wrong array.

  In zip's metadata, some bytes do not matter.
  """
  data = _write(tmp_path / "a", 5)
  kinds = (b"PK\x03\x04", b"\x93NUMPY", b"PK\x01\x02")
  assert all(kind in data for kind in kinds)
  noticed = 0
  for position in range(len(data)):
    flipped = bytearray(data)
    flipped[position] ^= 1 << position % 8
    (tmp_path / "a").write_bytes(flipped)
    try:
      assert _value(tmp_path / "a") == 5, position
    except archive.CheckpointError:
      noticed += 1
  assert noticed > 0.8 * len(data)
  _assert_damaged(tmp_path / "a", bytes(len(data)))


def test_other_files(tmp_path: pathlib.Path) -> None:
  """Files may be truncated, made of two files, from NumPy, or missing."""
  data, other = (_write(tmp_path / "a", value) for value in (5, 6))
  for length in {0, 1, 22, *range(0, len(data), 17), len(data) - 1}:
    _assert_damaged(tmp_path / "a", data[:length])
  assert len(data) == len(other)
  middle = len(data) // 2
  _assert_damaged(tmp_path / "a", data[:middle] + other[middle:])
  np.savez(tmp_path / "b.npz", x=np.zeros(2))
  np.savez(tmp_path / "c.npz", about=np.array("{}"))
  for name in ("b.npz", "c.npz"):
    _assert_damaged(tmp_path / "a", (tmp_path / name).read_bytes())
  with (
    pytest.raises(FileNotFoundError, match=r"cannot be read.*save wrote"),
    archive.reading(tmp_path / "none"),
  ):
    pass


# --------------------------------------------------------------------- writing


def test_file_is_synced_before_it_is_renamed(tmp_path: pathlib.Path) -> None:
  """After a power failure, either the old or the new file exists."""
  _write(tmp_path / "a", 5)
  done: list[Any] = []
  fsync, replace = os.fsync, os.replace

  def synced(descriptor: int) -> None:
    path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    done.append(("fsync", path.name[:3], path.is_file() and _value(path)))
    fsync(descriptor)

  def replaced(source: Any, target: Any) -> None:
    assert _value(tmp_path / "a") == 5
    done.append(("replace", source.parent == target.parent, target.name))
    replace(source, target)

  with (
    mock.patch.object(os, "fsync", synced),
    mock.patch.object(os, "replace", replaced),
  ):
    _write(tmp_path / "a", 6)
  assert done == [
    ("fsync", ".a.", 6),
    ("replace", True, "a"),
    ("fsync", tmp_path.name[:3], False),
  ]
  assert os.listdir(tmp_path) == ["a"]


def test_write_follows_symbolic_links(tmp_path: pathlib.Path) -> None:
  (tmp_path / "disk").mkdir()
  (tmp_path / "a").symlink_to(tmp_path / "disk" / "b")
  _write(tmp_path / "a", 5)
  assert (tmp_path / "a").is_symlink()
  assert _value(tmp_path / "disk" / "b") == 5


@pytest.mark.parametrize(
  ("function", "code", "kind", "words"),
  [
    ("fsync", errno.ENOSPC, OSError, "Free space"),
    ("replace", errno.EACCES, PermissionError, "may write to"),
  ],
)
def test_os_errors_have_a_remedy(
  tmp_path: pathlib.Path, function: str, code: int, kind: type, words: str
) -> None:
  _write(tmp_path / "a", 5)
  failure = OSError(code, os.strerror(code))
  with (
    mock.patch.object(os, function, side_effect=failure),
    pytest.raises(kind, match=rf"written: .*is unchanged\. .*{words}") as info,
  ):
    _write(tmp_path / "a", 6)
  assert info.value.errno == code
  assert os.strerror(code) in str(info.value)
  assert _value(tmp_path / "a") == 5
  assert os.listdir(tmp_path) == ["a"]


def test_folders_that_are_none(tmp_path: pathlib.Path) -> None:
  with pytest.raises(FileNotFoundError, match="Create the folder first"):
    _write(tmp_path / "none" / "a", 5)
  (tmp_path / "folder").mkdir()
  with pytest.raises(IsADirectoryError, match="could not be written"):
    _write(tmp_path / "folder", 5)
  assert os.listdir(tmp_path) == ["folder"]
