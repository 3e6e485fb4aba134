"""The command `tf-cross-shard doctor`."""

import sys

import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard_cli import __main__ as command
from tf_cross_shard_cli import doctor


def test_prints_versions_and_devices(
  capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.delenv("TF_CONFIG", raising=False)
  assert command.main(["doctor"]) == 0
  lines = capsys.readouterr().out.splitlines()
  facts = {line[:15].strip(): line[16:] for line in lines}
  assert tf.__version__ in facts["TensorFlow"]
  assert tf.keras.__version__ in facts["Keras"]
  assert facts["tf.keras"] == ("tf_keras" if testbed.IS_TF_KERAS else "keras")
  assert facts["TF_CONFIG"] == "not set"
  assert "1 CPU" in facts["devices"]


def test_names_an_import_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, "tf_cross_shard", None)
  report = doctor.examine()
  assert "import          fails with ModuleNotFoundError: " in report
  assert tf.__version__ in report
