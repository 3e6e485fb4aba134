"""The command `tf-cross-shard doctor`: facts, problems and known traps.

Installations that are wrong are simulated by what `metadata.version` returns.
"""

import sys
from importlib import metadata
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard._src.core import versions
from tf_cross_shard_cli import __main__ as command
from tf_cross_shard_cli import doctor

OK = {"tensorflow-cpu": tf.__version__, "keras": "3.8.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
  """The versions of packages, for a test to change."""
  packages = dict(OK)

  def version(distribution: str) -> str:
    if distribution not in packages:
      raise metadata.PackageNotFoundError(distribution)
    return packages[distribution]

  monkeypatch.setattr(metadata, "version", version)
  monkeypatch.delenv("TF_CONFIG", raising=False)
  return packages


def _notes(report: str) -> list[str]:
  """The findings, without line breaks."""
  paragraphs = [" ".join(x.split()) for x in report.split("\n\n")]
  return [x for x in paragraphs if x.startswith(("WRONG: ", "NOTE: "))]


def test_a_good_installation(
  installed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
  assert command.main(["doctor"]) == 0
  report = capsys.readouterr().out
  assert f"tensorflow-cpu {tf.__version__}\n" in report
  assert "keras 3.8.0; tf.keras is " in report
  assert "TF_CONFIG       not set\n" in report
  assert "1 CPU; " in report
  assert report.endswith("\n\nNothing is wrong.\n")
  notes = _notes(report)
  assert all(" Fix: " in x for x in notes)
  jit = [x for x in notes if "jit_compile" in x]
  assert len(jit) == (not tf.config.list_physical_devices("GPU"))


@pytest.mark.parametrize(
  ("packages", "status", "words"),
  [
    (
      {"tensorflow": "2.21.0"},
      1,
      "WRONG: tensorflow and tensorflow-cpu are installed, and overwrite",
    ),
    (
      {"tf_keras": "2.15.1"},
      0,
      "NOTE: tf_keras 2.15.1 belongs to another TensorFlow than",
    ),
    ({"horovod": "0.28.1"}, 0, "NOTE: Horovod's DistributedOptimizer does not"),
  ],
)
def test_packages(
  packages: dict[str, str], status: int, words: str, installed: dict[str, str]
) -> None:
  report, before = doctor.examine(versions)
  assert before == 0
  assert words not in " ".join(_notes(report))
  installed.update(packages)
  report, found = doctor.examine(versions)
  assert found == status
  [note] = [x for x in _notes(report) if x.startswith(words)]
  assert " Fix: " in note


@pytest.mark.parametrize("text", ['{"cluster": 3}', "workers"])
def test_tf_config(
  text: str, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("TF_CONFIG", text)
  report, status = doctor.examine(versions)
  assert status == 1
  assert f"TF_CONFIG       {text}\n" in report
  [wrong] = [x for x in _notes(report) if x.startswith("WRONG")]
  assert "TF_CONFIG cannot be used" in wrong
  assert ' Fix: Set it like {"cluster": ' in wrong
  assert report.endswith("\n\n1 thing is wrong.")


@pytest.mark.parametrize(
  ("error", "words"),
  [
    (
      ImportError("It needs Keras 3.8, but 3.7 is installed. Run: pip install"),
      "WRONG: It needs Keras 3.8, but 3.7 is installed. Fix: pip install",
    ),
    (
      AttributeError("no attribute 'x'"),
      "WRONG: Importing TensorFlow and Keras fails with AttributeError: no",
    ),
  ],
)
def test_imports_that_fail(
  error: Exception,
  words: str,
  installed: dict[str, str],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  def fails() -> None:
    raise error

  monkeypatch.setattr(versions, "check_installed", fails)
  report, status = doctor.examine(versions)
  assert status == 1
  [note] = _notes(report)
  assert note.startswith(words)


def test_known_traps(
  installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
  traps: Any = {
    "2.21.0": ["MirroredStrategy, TensorFlow 2.21 may idle", "Python 3.13"],
    "2.20.0": [],
  }
  monkeypatch.setattr(sys, "version_info", (3, 13, 0))
  for version, words in traps.items():
    monkeypatch.setattr(tf, "__version__", version)
    notes = " ".join(_notes(doctor.examine(versions)[0]))
    assert [x in notes for x in traps["2.21.0"]] == [bool(words)] * 2
