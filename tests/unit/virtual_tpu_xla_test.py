"""XLA through jaxlib: versions, devices, topologies."""

import configparser
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from tf_cross_shard import virtual_tpu
from tf_cross_shard.virtual_tpu import xla

SETUP = Path(__file__).absolute().parent.parent.parent / "setup.cfg"


class TestVersions:
  def _required(self, extra: str) -> dict[str, str]:
    setup = configparser.ConfigParser()
    assert setup.read(SETUP)
    lines = setup["options.extras_require"][extra].split("\n")
    found = [re.match(r"([\w-]+)([^;]+)", line) for line in lines if line]
    return {match[1]: match[2].strip() for match in found if match}

  def test_the_same_in_setup_cfg(self) -> None:
    tested = xla.TESTED
    assert set(tested) == {"jax", "jaxlib", "libtpu"}
    assert self._required("tpu-compiler") == tested
    assert self._required("virtual-tpu") == {
      name: tested[name] for name in ("jax", "jaxlib")
    }

  def test_what_is_installed_here(self) -> None:
    for name in xla.TESTED:
      xla.require(name)

  @pytest.mark.parametrize(
    ("name", "extra"),
    [
      ("jax", "virtual-tpu"),
      ("jaxlib", "virtual-tpu"),
      ("libtpu", "tpu-compiler"),
    ],
  )
  def test_missing(
    self, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
  ) -> None:
    def missing(distribution: str) -> str:
      raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError) as error:
      xla.require(name)
    text = str(error.value)
    assert f"needs {name}{xla.TESTED[name]}, which is not installed" in text
    assert f"pip install 'tf-cross-shard[{extra}]'" in text

  @pytest.mark.parametrize(
    ("name", "version"),
    [("jax", "0.10.1"), ("jaxlib", "0.11.0"), ("libtpu", "0.0.52")],
  )
  def test_untested(
    self, name: str, version: str, monkeypatch: pytest.MonkeyPatch
  ) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(ImportError) as error:
      xla.require(name)
    text = str(error.value)
    assert f"tested with {name}{xla.TESTED[name]}" in text
    assert f"found {name} {version}" in text
    assert "pip install 'tf-cross-shard[" in text

  def test_asked_before_anything_is_imported(
    self, monkeypatch: pytest.MonkeyPatch
  ) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.1")
    with pytest.raises(ImportError, match=r"found jax 0\.1"):
      xla.Client(2)
    xla.topology.cache_clear()
    with pytest.raises(ImportError, match=r"found jax 0\.1"):
      xla.topology("v5e:2x4")


class TestBuffers:
  @pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
  def test_each_replica_has_its_own(self, dtype: str) -> None:
    client = xla.Client(3)
    assert client.num_replicas == 3
    arrays = [np.array([i, 1]).astype(dtype) for i in range(3)]
    buffers = client.put(arrays)
    assert buffers.shape == (2,)
    assert buffers.dtype == np.dtype(dtype)
    for i, array in enumerate(arrays):
      np.testing.assert_array_equal(buffers.to_numpy(i), array)
    assert len(set(buffers.addresses())) == 3


class TestTopology:
  def test_coordinates(self) -> None:
    found = xla.coordinates("v5e:4x2")
    assert virtual_tpu.coordinates("v5e:4x2") == found
    assert len(found) == len(set(found)) == 8
    assert {place[:3] for place in found} == {
      (x, y, 0) for x in range(4) for y in range(2)
    }

  def test_three_dimensions(self) -> None:
    chips = {place[:3] for place in xla.coordinates("v5p:2x2x2")}
    assert chips == {
      (x, y, z) for x in range(2) for y in range(2) for z in range(2)
    }

  def test_is_described_once(self) -> None:
    first = xla.topology("v5e:2x2")
    assert xla.topology("v5e:2x2") is first
    assert (first.name, len(first.devices)) == ("v5e:2x2", 4)
    assert "TPU" in first.kind

  @pytest.mark.parametrize("name", ["nowhere", "", "v5e", "v5e:4xx2"])
  def test_unknown(self, name: str) -> None:
    with pytest.raises(
      ValueError, match=r"`topology` must be.*v5e:4x2"
    ) as error:
      xla.topology(name)
    assert repr(name) in str(error.value)

  def test_no_chips(self) -> None:
    """In a process of its own: libtpu divides by zero, and dies of it."""
    name = "v5e:0x2"
    code = f"""
from tf_cross_shard.virtual_tpu import xla
try:
  xla.topology({name!r})
except ValueError as error:
  print(error)
"""
    done = subprocess.run(
      [sys.executable, "-c", code],
      env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
      cwd=SETUP.parent,
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "`topology` must be" in done.stdout
    assert repr(name) in done.stdout


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
