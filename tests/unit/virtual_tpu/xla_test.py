"""The TPU compiler: versions and topologies."""

import configparser
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tensorflow as tf

from tests.support import testbed
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

  def test_missing_and_untested(self, monkeypatch: pytest.MonkeyPatch) -> None:
    xla.require()  # What is installed here will do.

    def missing(distribution: str) -> str:
      raise metadata.PackageNotFoundError(distribution)

    remedy = r"pip install '\.\[tpu-compiler\]'"
    tested = re.escape(f"jax{xla.TESTED['jax']}")
    for found, words in (
      (missing, rf"needs {tested}, which is not installed.*{remedy}"),
      (lambda _: "0.1", rf"with {tested}.*found jax 0\.1.*{remedy}"),
    ):
      monkeypatch.setattr(metadata, "version", found)
      # No other test asks for this topology: results are cached.
      with pytest.raises(ImportError, match=words):
        xla.topology("v5e:16x8")


def test_the_virtual_tpu_needs_tensorflow_alone(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  for name in ("jax", "jaxlib", "libtpu"):
    monkeypatch.setitem(sys.modules, name, None)
  strategy = virtual_tpu.VirtualTPUStrategy(2)
  context = tf.distribute.get_replica_context
  total = strategy.run(lambda: context().all_reduce("SUM", tf.constant(1.0)))
  assert testbed.per_replica_results(strategy, total) == [2.0, 2.0]


# libtpu itself would divide by the zero, and die of it.
@pytest.mark.parametrize("name", ["nowhere", "v5e", "v5e:0x2", "v5e:9x9"])
def test_unknown_topology(name: str) -> None:
  words = rf"`topology` must be.*v5e:4x2.*got '{name}'"
  with pytest.raises(ValueError, match=words):
    xla.topology(name)
