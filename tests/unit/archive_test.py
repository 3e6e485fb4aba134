"""Files of arrays: exact, whole or known to be damaged, never half-written.

What writes in another process loads the module by its path, without the
package, and so without TensorFlow.
"""

import errno
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from tf_cross_shard.replica_state import archive

DTYPES = (
  *("bool", "int8", "uint8", "int32", "int64", "uint32", "uint64"),
  *("float16", "float32", "float64", "complex64", "complex128"),
  *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"),
)


def _array(dtype: str, shape: tuple[int, ...] = (3, 2)) -> Any:
  numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 4
  return numbers.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def _write(path: pathlib.Path, value: int, size: int = 400) -> bytes:
  """A file with two arrays that tell which one it is."""
  arrays = [
    ("group_0/x", np.full(size, value, "int64")),
    ("group_1/x", np.full(size, value + 1, "float32")),
  ]
  archive.write(path, arrays, {"value": value})
  return path.read_bytes()


def _value(path: pathlib.Path) -> int:
  """Which one it is."""
  with archive.reading(path) as found:
    value = int(found.about["value"])
    assert (found.read("group_0/x") == value).all()
    assert (found.read("group_1/x") == value + 1).all()
  return value


def _only(folder: pathlib.Path, *names: str) -> None:
  """Nothing half-written was left in the folder."""
  assert sorted(os.listdir(folder)) == sorted(names)


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("shape", [(3, 2), (), (0, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_come_back(
  tmp_path: pathlib.Path, dtype: str, shape: tuple[int, ...]
) -> None:
  array = _array(dtype, shape)
  archive.write(tmp_path / "a", [("x/y", array)], {})
  with archive.reading(tmp_path / "a") as found:
    assert found.arrays == {"x/y": archive.Stored(dtype, shape)}
    back = found.read("x/y")
  assert (back.dtype, back.shape) == (array.dtype, shape)
  assert back.tobytes() == array.tobytes()


def test_bits_come_back(tmp_path: pathlib.Path) -> None:
  bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 1], "uint32")
  archive.write(tmp_path / "a", [("x", bits.view("float32"))], {})
  with archive.reading(tmp_path / "a") as found:
    assert found.read("x").view("uint32").tolist() == bits.tolist()


def test_the_order_in_memory_does_not_matter(tmp_path: pathlib.Path) -> None:
  array = np.arange(6).reshape(2, 3)
  for name, given in (("c", array), ("f", np.asfortranarray(array))):
    archive.write(tmp_path / name, [("x", given)], {})
  assert (tmp_path / "c").read_bytes() == (tmp_path / "f").read_bytes()
  with archive.reading(tmp_path / "f") as found:
    np.testing.assert_array_equal(found.read("x"), array)


def test_numpy_opens_it_without_pickle(tmp_path: pathlib.Path) -> None:
  half = _array("bfloat16")
  archive.write(tmp_path / "a", [("g/x", np.arange(3)), ("g/y", half)], {})
  with np.load(tmp_path / "a", allow_pickle=False) as found:
    assert found["g/x"].tolist() == [0, 1, 2]
    assert found["g/y"].dtype == "uint16"
    np.testing.assert_array_equal(found["g/y"].view(half.dtype), half)


def test_equal_arrays_make_equal_files(tmp_path: pathlib.Path) -> None:
  one, other = (_write(tmp_path / name, 5) for name in ("a", "b"))
  assert one == other
  assert _write(tmp_path / "a", 6) != other


def test_the_digest_is_that_of_the_file(tmp_path: pathlib.Path) -> None:
  digest = archive.write(tmp_path / "a", [("x", np.zeros(2))], {})
  with archive.reading(tmp_path / "a") as found:
    assert found.digest == digest
  data = (tmp_path / "a").read_bytes()
  assert data.endswith(f"sha256:{digest}".encode())
  assert hashlib.sha256(data[: -len("sha256:") - 64]).hexdigest() == digest


def test_who_may_read_it_is_for_the_umask_to_say(
  tmp_path: pathlib.Path,
) -> None:
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


def test_a_file_that_was_cut_off(tmp_path: pathlib.Path) -> None:
  data = _write(tmp_path / "a", 5)
  lengths = {0, 1, 22, 70, 71, 72, *range(0, len(data), 97)}
  lengths |= {len(data) - n for n in (1, 2, 63, 64, 65, 71, 72, 93, 94, 200)}
  for length in sorted(lengths):
    _assert_damaged(tmp_path / "a", data[:length])


def test_any_byte_that_is_flipped(tmp_path: pathlib.Path) -> None:
  """Each position of a small file: all kinds of bytes are among them."""
  data = _write(tmp_path / "a", 5, size=4)
  kinds = (b"PK\x03\x04", b"\x93NUMPY", b'"version"', b"PK\x01\x02", b"sha256")
  assert all(kind in data for kind in kinds)
  assert len(data) < 3000
  for position in range(len(data)):
    flipped = bytearray(data)
    flipped[position] ^= 1 << position % 8
    _assert_damaged(tmp_path / "a", bytes(flipped))
  (tmp_path / "a").write_bytes(data)
  assert _value(tmp_path / "a") == 5


def test_bytes_that_were_added_or_exchanged(tmp_path: pathlib.Path) -> None:
  data, other = (_write(tmp_path / "a", value) for value in (5, 6))
  assert len(data) == len(other)
  for end in (1, 64, 71, 500):
    _assert_damaged(tmp_path / "a", data + data[-end:])
    _assert_damaged(tmp_path / "a", data[:-end] + other[-end:])
  _assert_damaged(tmp_path / "a", bytes(len(data)))


def _signed(path: pathlib.Path, members: dict[str, bytes]) -> bytes:
  """A whole file of our form with any content."""
  with zipfile.ZipFile(path, "w") as container:
    for name, content in members.items():
      container.writestr(name, content)
    container.comment = bytes(71)
  data = path.read_bytes()[:-71]
  return data + b"sha256:" + hashlib.sha256(data).hexdigest().encode()


def _manifest(**changes: Any) -> bytes:
  stored = {"x": {"dtype": "int64", "shape": [2]}}
  known = {"version": 1, "about": {}, "arrays": stored}
  return json.dumps({**known, **changes}).encode()


@pytest.mark.parametrize(
  ("manifest", "words"),
  [
    (b"{", "manifest"),
    (b"[1]", "manifest"),
    (b"\xff\xfe", "manifest"),
    (b'{"version": 1}', "manifest"),
    (_manifest(version=2), "version 2.*reads version 1.*newer"),
    (_manifest(arrays={"x": {"dtype": "int64"}}), "manifest"),
  ],
)
def test_a_manifest_that_says_something_else(
  tmp_path: pathlib.Path, manifest: bytes, words: str
) -> None:
  data = _signed(tmp_path / "a", {"manifest.json": manifest})
  (tmp_path / "a").write_bytes(data)
  with (
    pytest.raises(archive.CheckpointError, match=words),
    archive.reading(tmp_path / "a"),
  ):
    pass


@pytest.mark.parametrize(
  ("array", "words"),
  [
    (None, "no array `x`"),
    (np.zeros(3, "int64"), r"\[3\], where its manifest says \[2\]"),
    (np.zeros(3, "int8"), "`x` of dtype int64"),
    (np.array([{}, {}]), "`x` of dtype int64"),  # pickled
  ],
)
def test_an_array_that_is_not_what_the_manifest_says(
  tmp_path: pathlib.Path, array: Any, words: str
) -> None:
  members = {"manifest.json": _manifest()}
  if array is not None:
    np.save(tmp_path / "x.npy", array)
    members["x.npy"] = (tmp_path / "x.npy").read_bytes()
  data = _signed(tmp_path / "a", members)
  (tmp_path / "a").write_bytes(data)
  with archive.reading(tmp_path / "a") as found:
    with pytest.raises(archive.CheckpointError, match=words):
      found.read("x")


def test_other_files(tmp_path: pathlib.Path) -> None:
  np.savez(tmp_path / "b.npz", x=np.zeros(2))
  for data in (b"", b"hello", (tmp_path / "b.npz").read_bytes()):
    _assert_damaged(tmp_path / "a", data)
  content = b"no zip"
  digest = hashlib.sha256(content).hexdigest().encode()
  _assert_damaged(tmp_path / "a", content + b"sha256:" + digest)
  with (
    pytest.raises(FileNotFoundError, match=r"cannot be read.*`save` wrote"),
    archive.reading(tmp_path / "none"),
  ):
    pass
  with pytest.raises(IsADirectoryError), archive.reading(tmp_path):
    pass


@pytest.mark.parametrize("path", ["", "gs://bucket/a", b"bytes", 3, None])
def test_paths_that_are_none(path: Any) -> None:
  with pytest.raises((ValueError, TypeError), match="`path` must"):
    archive.as_path(path)


# --------------------------------------------------------------------- writing


def test_an_error_half_way_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
  _write(tmp_path / "a", 5)

  def arrays() -> Iterator[tuple[str, Any]]:
    yield "x", np.zeros(1000)
    raise KeyError("in the middle")

  with pytest.raises(KeyError, match="in the middle"):
    archive.write(tmp_path / "a", arrays(), {})
  assert _value(tmp_path / "a") == 5
  _only(tmp_path, "a")


def test_it_is_on_the_disk_before_it_takes_its_place(
  tmp_path: pathlib.Path,
) -> None:
  """So that a power failure finds the old file or the new one."""
  _write(tmp_path / "a", 5)
  done: list[Any] = []
  fsync, replace = os.fsync, os.replace

  def synced(descriptor: int) -> None:
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    whole = pathlib.Path(name).is_file() and _value(pathlib.Path(name))
    done.append(("fsync", os.path.basename(name)[:3], whole))
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
  _only(tmp_path, "a")


CHILD = """
import importlib.util, os, resource, signal, sys
import numpy as np
spec = importlib.util.spec_from_file_location("archive", sys.argv[1])
archive = sys.modules["archive"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(archive)
path = archive.as_path(sys.argv[2])

def write(arrays=()):
  arrays = arrays or [("x", np.zeros(100000))]
  archive.write(path, arrays, {})

def die(*_):
  os.kill(os.getpid(), signal.SIGKILL)

def halfway():
  yield "x", np.zeros(100000)
  die()

"""


def _child(
  path: pathlib.Path, program: str
) -> "subprocess.CompletedProcess[str]":
  source = textwrap.dedent(program)
  return subprocess.run(
    [sys.executable, "-c", CHILD + source, archive.__file__, str(path)],
    capture_output=True,
    text=True,
    timeout=60,
  )


@pytest.mark.parametrize(
  "program",
  [
    "write(halfway())",
    "os.fsync = die; write()",
    "os.replace = die; write()",
  ],
)
def test_a_process_that_is_killed_leaves_the_old_file(
  tmp_path: pathlib.Path, program: str
) -> None:
  _write(tmp_path / "a", 5)
  done = _child(tmp_path / "a", program)
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert _value(tmp_path / "a") == 5
  left = [name for name in os.listdir(tmp_path) if name != "a"]
  assert len(left) == 1  # nobody was there to remove it
  (tmp_path / ".a.txt").touch()
  _write(tmp_path / "a", 6)
  assert _value(tmp_path / "a") == 6
  _only(tmp_path, "a", ".a.txt")


def test_a_file_that_grows_too_large(tmp_path: pathlib.Path) -> None:
  """The error of a full disk, for those who may not make a disk."""
  _write(tmp_path / "a", 5)
  program = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
      write()
    except OSError as error:
      print(error.errno, error)
  """
  done = _child(tmp_path / "a", program)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(f"{errno.EFBIG} ")
  assert "could not be written: File too large. What was there" in done.stdout
  assert "ulimit -f" in done.stdout
  assert _value(tmp_path / "a") == 5
  _only(tmp_path, "a")


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A file system of 64 KiB, where this process may mount one."""
  folder = tmp_path / "disk"
  folder.mkdir()
  command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
  try:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
  except (OSError, subprocess.CalledProcessError) as error:
    pytest.skip(f"nothing can be mounted here: {error}")
  yield folder
  subprocess.run(["umount", str(folder)], check=True, timeout=30)


def test_a_full_disk(small_disk: pathlib.Path) -> None:
  _write(small_disk / "a", 5)
  with pytest.raises(OSError, match=r"No space left.*unchanged\. Free") as info:
    _write(small_disk / "a", 6, size=100_000)
  assert info.value.errno == errno.ENOSPC
  assert str(small_disk / "a") in str(info.value)
  assert _value(small_disk / "a") == 5
  _only(small_disk, "a")


def test_a_disk_that_may_only_be_read(small_disk: pathlib.Path) -> None:
  """Also for root, whom permissions do not stop."""
  _write(small_disk / "a", 5)
  remount = ["mount", "-o", "remount,ro", str(small_disk)]
  subprocess.run(remount, check=True, timeout=30)
  with pytest.raises(OSError, match=r"Read-only file system.*may write to"):
    _write(small_disk / "a", 6)
  assert _value(small_disk / "a") == 5


@pytest.mark.parametrize(
  ("code", "kind", "words"),
  [
    (errno.ENOSPC, OSError, "Free space"),
    (errno.EDQUOT, OSError, "quota"),
    (errno.EROFS, OSError, "may write to"),
    (errno.EACCES, PermissionError, "may write to"),
    (errno.EIO, OSError, "may write to"),
  ],
)
@pytest.mark.parametrize("function", ["open", "fsync", "replace"])
def test_what_the_disk_says(
  tmp_path: pathlib.Path, function: str, code: int, kind: type, words: str
) -> None:
  _write(tmp_path / "a", 5)
  failure = OSError(code, os.strerror(code))
  with (
    mock.patch.object(os, function, side_effect=failure),
    pytest.raises(kind, match=words) as info,
  ):
    _write(tmp_path / "a", 6)
  assert info.value.errno == code
  assert os.strerror(code) in str(info.value)
  assert _value(tmp_path / "a") == 5
  _only(tmp_path, "a")


def test_folders_that_are_none(tmp_path: pathlib.Path) -> None:
  with pytest.raises(FileNotFoundError, match="Make the folder first"):
    _write(tmp_path / "none" / "a", 5)
  (tmp_path / "file").touch()
  with pytest.raises(NotADirectoryError, match="could not be written"):
    _write(tmp_path / "file" / "a", 5)
  (tmp_path / "folder").mkdir()
  with pytest.raises(IsADirectoryError, match="could not be written"):
    _write(tmp_path / "folder", 5)
  _only(tmp_path, "file", "folder")


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
