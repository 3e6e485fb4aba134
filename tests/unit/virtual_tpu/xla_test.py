"""XLA through jaxlib: versions, devices, topologies."""

import configparser
import re
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from tf_cross_shard import virtual_tpu
from tf_cross_shard._src.virtual_tpu import xla

SETUP = Path(__file__).absolute().parent.parent.parent.parent / "setup.cfg"


class TestVersions:
  def _required(self, extra: str) -> dict[str, str]:
    setup = configparser.ConfigParser()
    assert setup.read(SETUP)
    lines = setup["options.extras_require"][extra].split("\n")
    found = [re.match(r"([\w-]+)([^;]+)", line) for line in lines if line]
    return {match[1]: match[2].strip() for match in found if match}

  def test_the_same_in_setup_cfg(self) -> None:
    assert self._required("tpu-compiler") == xla.TESTED
    assert self._required("virtual-tpu") == {
      name: xla.TESTED[name] for name in ("jax", "jaxlib")
    }

  @pytest.mark.parametrize(
    ("name", "version", "extra"),
    [("jax", "0.10.1", "virtual-tpu"), ("libtpu", "0.0.52", "tpu-compiler")],
  )
  def test_missing_and_untested(
    self, name: str, version: str, extra: str, monkeypatch: pytest.MonkeyPatch
  ) -> None:
    xla.require(name)  # What is installed here will do.

    def missing(distribution: str) -> str:
      raise metadata.PackageNotFoundError(distribution)

    remedy = rf"pip install '\.\[{extra}\]'"
    tested = re.escape(f"{name}{xla.TESTED[name]}")
    for found, words in (
      (missing, rf"needs {tested}, which is not installed.*{remedy}"),
      (lambda _: version, rf"with {tested}.*found {name} {version}.*{remedy}"),
    ):
      monkeypatch.setattr(metadata, "version", found)
      with pytest.raises(ImportError, match=words):
        xla.require(name)

  def test_one_extra_has_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without jax and libtpu, the first error names the extra with both."""

    def missing(distribution: str) -> str:
      raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match=r"needs jax>=.*\[tpu-compiler\]"):
      # No other test asks for this topology: results are cached.
      xla.topology("v5e:16x8")

  def test_asked_before_anything_is_imported(
    self, monkeypatch: pytest.MonkeyPatch
  ) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.1")
    for use in (
      virtual_tpu.VirtualTPUStrategy,
      lambda: xla.topology("v5e:8x8"),
    ):
      with pytest.raises(ImportError, match=r"found jax 0\.1"):
        use()


def test_each_replica_has_its_own_array() -> None:
  client = xla.Client(3)
  for dtype in ("float64", "int64", "bool"):  # jax would narrow the first two.
    arrays = [np.array([i, 1]).astype(dtype) for i in range(3)]
    buffers = client.put(arrays)
    assert buffers.dtype == np.dtype(dtype)
    for i, array in enumerate(arrays):
      np.testing.assert_array_equal(xla.to_numpy(buffers, i), array)


# libtpu itself would divide by the zero, and die of it.
@pytest.mark.parametrize("name", ["nowhere", "v5e", "v5e:0x2", "v5e:9x9"])
def test_unknown_topology(name: str) -> None:
  words = rf"`topology` must be.*v5e:4x2.*got '{name}'"
  with pytest.raises(ValueError, match=words):
    xla.topology(name)
