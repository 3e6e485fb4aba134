"""An unsuitable TensorFlow or Keras is refused at import, with the remedy.

The tests execute the modules again while a different version seems to be
installed. The modules raise the error before they define anything.
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tf_cross_shard.keras3
import tf_cross_shard.tf_keras
from tests.support import programs, testbed
from tf_cross_shard import multi_worker
from tf_cross_shard._src.core import versions

MINOR = ".".join(tf.__version__.split(".")[:2])
# The module whose import checks a package, if it is not `tf_cross_shard`
# itself.
MODULES = {"tf_keras": tf_cross_shard.tf_keras}
TF_KERAS_REMEDY = f"pip install --no-deps 'tf_keras~={MINOR}.0'"


def _refusal(module: types.ModuleType) -> str:
  """Returns the message of the ImportError that importing a module raises."""
  with pytest.raises(ImportError) as caught:
    importlib.reload(module)
  return str(caught.value)


@pytest.mark.parametrize(
  ("package", "version", "words"),
  [
    ("tensorflow", "2.15.1", "needs TensorFlow 2.16 or newer, but 2.15.1 is"),
    ("tensorflow", "2.16.0rc0", "pip install --upgrade 'tensorflow>=2.16'"),
    ("keras", "3.9.2", "pip install --upgrade 'keras>=3.10'"),
    ("tf_keras", "2.15.1", TF_KERAS_REMEDY),
  ],
)
def test_old_versions_are_refused(
  monkeypatch: pytest.MonkeyPatch, package: str, version: str, words: str
) -> None:
  monkeypatch.setattr(importlib.import_module(package), "__version__", version)
  assert words in _refusal(MODULES.get(package, tf_cross_shard))


@pytest.mark.parametrize(
  ("package", "version"),
  [
    ("tensorflow", "2.16.0"),
    ("keras", "3.10.0"),
    ("keras", "3.11.0rc1"),
    ("tf_keras", "2.16.0"),
  ],
)
def test_new_versions_are_accepted(
  monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
  monkeypatch.setattr(importlib.import_module(package), "__version__", version)
  versions.check_installed()
  versions.check_tf_keras()


def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
  backend = importlib.import_module("keras.backend")
  monkeypatch.setattr(backend, "backend", lambda: "jax")
  text = _refusal(tf_cross_shard)
  assert "the backend is 'jax'" in text
  assert "KERAS_BACKEND=tensorflow" in text


@pytest.mark.parametrize(
  ("package", "words"),
  [
    ("tensorflow", "pip install '.[cpu]'"),
    ("keras", "pip install 'keras>=3.10'"),
    ("tf_keras", TF_KERAS_REMEDY),
  ],
)
def test_missing_packages_are_named(
  monkeypatch: pytest.MonkeyPatch, package: str, words: str
) -> None:
  monkeypatch.setitem(sys.modules, package, None)
  modules = [MODULES.get(package, tf_cross_shard)]
  modules += [tf_cross_shard.keras3] * (package == "keras")
  for module in modules:
    text = _refusal(module)
    assert "which is not installed. Run" in text
    assert words in text


@pytest.mark.parametrize("package", ["tensorflow", "tf_keras"])
def test_broken_import_raises_the_original_error(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str
) -> None:
  """A package that lacks a dependency of its own is not "missing"."""
  (tmp_path / f"{package}.py").write_text("import a_missing_dependency\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, package)
  module = MODULES.get(package, tf_cross_shard)
  assert _refusal(module) == "No module named 'a_missing_dependency'"


# Which Keras `tf.keras` is.


def test_uses_tf_keras_is_what_tensorflow_decided(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """Environment variables that are set later have no effect."""
  before = versions.uses_tf_keras()
  assert before == tf.keras.Model.__module__.startswith("tf_keras.")
  monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0" if before else "1")
  assert versions.uses_tf_keras() == before


class _WithoutKeras:
  """A TensorFlow whose Keras cannot be imported."""

  @property
  def keras(self) -> Any:
    raise AttributeError("keras")


@pytest.mark.parametrize(
  ("value", "legacy"), [("True", True), ("0", False), (None, False)]
)
def test_uses_tf_keras_where_it_cannot_be_imported(
  monkeypatch: pytest.MonkeyPatch, value: str | None, legacy: bool
) -> None:
  monkeypatch.setitem(sys.modules, "tensorflow", _WithoutKeras())
  monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
  if value is not None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
  assert versions.uses_tf_keras() == legacy


@pytest.mark.tf_keras_mode
def test_the_package_has_the_optimizer_of_tf_dot_keras() -> None:
  home = getattr(
    tf_cross_shard, "tf_keras" if testbed.IS_TF_KERAS else "keras3"
  )
  chosen = tf_cross_shard.CrossShardOptimizer
  assert chosen is home.CrossShardOptimizer
  assert issubclass(chosen, tf.keras.optimizers.Optimizer)


# What the package shows of itself.


def test_the_package_lists_what_is_public() -> None:
  names = dir(tf_cross_shard)
  later = {"keras3", "multi_worker", "tf_keras", "virtual_tpu"}
  assert set(names) == {*tf_cross_shard.__all__, *later}
  assert set(dir(multi_worker)) == set(multi_worker.__all__)
  modules = [getattr(tf_cross_shard, name) for name in tf_cross_shard.__all__]
  modules = [m for m in modules if isinstance(m, types.ModuleType)]
  assert len(modules) == 6
  for module in modules:
    assert dir(module) == sorted(module.__all__)
  for package, name in [
    *((tf_cross_shard, name) for name in names),
    *((multi_worker, name) for name in multi_worker.__all__),
  ]:
    assert getattr(package, name) is not None
    assert not hasattr(package, f"{name}_no_such")
    assert not hasattr(package, f"_{name}_no_such")


def test_only_the_keras_in_use_is_imported(tmp_path: Path) -> None:
  """The other Keras, jax and optional packages are not imported."""
  program = """
import sys
idle = "tf_keras", "jax", "matplotlib", "sklearn"
sys.modules.update(dict.fromkeys(idle))
import tensorflow as tf, tf_cross_shard
weight = tf.Variable(3.0)
optimizer = tf_cross_shard.CrossShardOptimizer(tf.keras.optimizers.SGD(0.5))
optimizer.apply_gradients([(tf.constant(2.0), weight)])
print(float(weight.numpy()))
"""
  keras = {"TF_USE_LEGACY_KERAS": "0", "KERAS_BACKEND": "tensorflow"}
  output = programs.run(["-c", program], tmp_path, **keras)
  assert output.splitlines()[-1] == "2.0"
