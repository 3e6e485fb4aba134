"""An unsuitable TensorFlow or Keras is refused by name, with the remedy."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tf_cross_shard import versions

PROJECT = Path(__file__).absolute().parent.parent.parent
MINOR = ".".join(tf.__version__.split(".")[:2])
# Keras imports them for no other reason than that they are installed, and that
# takes a third of the time of an import.
IDLE = ("jax", "matplotlib", "sklearn")
NO_KERAS = (
  "tf_cross_shard needs Keras 3, and none is installed. Run:"
  " pip install 'keras>=3.8'"
)
NO_TF_KERAS = (
  "tf_cross_shard.tf_keras, which TF_USE_LEGACY_KERAS=1 asks for too, needs"
  " tf_keras, and none is installed. Run: pip install --no-deps"
  f" 'tf_keras~={MINOR}.0'"
)


@pytest.mark.parametrize(
  "version", ["3.8", "3.8.0", "3.15.1", "4.0", "3.9.0rc1"]
)
def test_keras_that_adds_up_is_accepted(version: str) -> None:
  versions.check_keras(version)


@pytest.mark.parametrize(
  "version", ["3.0.0", "3.0.0rc1", "3.5.0", "3.7.0", "3.8.0.dev0"]
)
def test_keras_that_trains_wrongly_is_refused(version: str) -> None:
  with pytest.raises(ImportError) as error:
    versions.check_keras(version)
  assert str(error.value) == (
    f"tf_cross_shard needs Keras 3.8 or newer, but found Keras {version}, which"
    " reduces or scales gradients wrongly under tf.distribute. Run: pip install"
    " --upgrade 'keras>=3.8'"
  )


@pytest.mark.parametrize("version", ["2.4.3", "2.15.0", "2.16.0", "2.99"])
def test_keras_2_of_that_name_is_refused(version: str) -> None:
  with pytest.raises(ImportError) as error:
    versions.check_keras(version)
  assert str(error.value) == (
    "tf_cross_shard needs Keras 3.8 or newer, or tf_keras 2.16 or newer, but"
    f" `keras` is Keras {version}. Run: pip install --upgrade 'keras>=3.8'"
  )


@pytest.mark.parametrize("version", ["2.16", "2.16.0", "2.21.0", "2.22.0rc0"])
def test_new_tf_keras_is_accepted(version: str) -> None:
  versions.check_tf_keras_version(version, "2.21.0")


@pytest.mark.parametrize("version", ["2.14.1", "2.15.1", "2.16.0rc0"])
@pytest.mark.parametrize(
  ("tensorflow", "wanted"),
  [("2.16.2", "2.16.0"), ("2.21.0", "2.21.0"), ("2.22.0-rc1", "2.22.0")],
)
def test_old_tf_keras_is_refused(
  version: str, tensorflow: str, wanted: str
) -> None:
  with pytest.raises(ImportError) as error:
    versions.check_tf_keras_version(version, tensorflow)
  assert str(error.value) == (
    f"tf_cross_shard needs tf_keras 2.16 or newer, but {version} is installed."
    f" Run: pip install --no-deps 'tf_keras~={wanted}'"
  )


@pytest.mark.parametrize("version", ["2.16", "2.16.1", "2.21.0", "3.0"])
def test_new_tensorflow_is_accepted(version: str) -> None:
  versions.check_tensorflow(version)


@pytest.mark.parametrize("version", ["1.15.5", "2.9.0", "2.15.1", "2.16.0rc0"])
def test_old_tensorflow_is_refused(version: str) -> None:
  with pytest.raises(ImportError) as error:
    versions.check_tensorflow(version)
  assert str(error.value) == (
    f"tf_cross_shard needs TensorFlow 2.16 or newer, but {version} is"
    " installed. Run: pip install --upgrade 'tensorflow>=2.16'"
  )


def test_tensorflow_backend_is_accepted() -> None:
  versions.check_backend("tensorflow")


@pytest.mark.parametrize("backend", ["jax", "torch", "numpy", "openvino"])
def test_other_backends_are_refused(backend: str) -> None:
  with pytest.raises(ImportError) as error:
    versions.check_backend(backend)
  assert str(error.value) == (
    "tf_cross_shard needs Keras on its TensorFlow backend, but the backend is"
    f" {backend!r}. Set KERAS_BACKEND=tensorflow before importing Keras."
  )


def test_what_is_installed_here_is_accepted() -> None:
  versions.check_installed()
  versions.check_keras3()
  versions.check_tf_keras()


@pytest.mark.parametrize(
  ("check", "module", "name", "value", "words"),
  [
    ("installed", "tensorflow", "__version__", "2.15.0", "TensorFlow 2.16 or"),
    ("keras3", "keras", "__version__", "3.7.0", "needs Keras 3.8 or newer"),
    ("keras3", "keras", "__version__", "2.15.0", "`keras` is Keras 2.15.0"),
    ("keras3", "keras.backend", "backend", lambda: "jax", "backend is 'jax'"),
    ("tf_keras", "tf_keras", "__version__", "2.15.1", "needs tf_keras 2.16 or"),
  ],
  ids=["tensorflow", "keras", "keras2", "backend", "tf_keras"],
)
def test_each_check_is_made_of_what_is_installed(
  monkeypatch: pytest.MonkeyPatch,
  check: str,
  module: str,
  name: str,
  value: object,
  words: str,
) -> None:
  monkeypatch.setattr(importlib.import_module(module), name, value)
  with pytest.raises(ImportError, match=words):
    getattr(versions, f"check_{check}")()


@pytest.mark.parametrize(
  ("legacy", "checked"), [(True, "check_tf_keras"), (False, "check_keras3")]
)
def test_the_keras_that_tf_keras_is_gets_checked(
  monkeypatch: pytest.MonkeyPatch, legacy: bool, checked: str
) -> None:
  called = []
  monkeypatch.setattr(versions, "uses_tf_keras", lambda: legacy)
  for name in ("check_tf_keras", "check_keras3"):
    note = functools.partial(called.append, name)
    monkeypatch.setattr(versions, name, note)
  versions.check_installed()
  assert called == [checked]


def _import_in_a_fresh_process(
  preparation: str = "",
  afterwards: str = "",
  module: str = "tf_cross_shard",
  **environment: str,
) -> subprocess.CompletedProcess[str]:
  """Imports the package in a process of its own, in Keras 3's mode."""
  inherited = {
    key: value
    for key, value in os.environ.items()
    if key not in ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND")
  }
  program = [_without(*IDLE), preparation, f"import {module}", afterwards]
  return subprocess.run(
    [sys.executable, "-c", "\n".join(program)],
    cwd=PROJECT,
    env={
      **inherited,
      "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
      **environment,
    },
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


def _refusal(*args: str, **environment: str) -> str:
  """The last line of an import that fails."""
  done = _import_in_a_fresh_process(*args, **environment)
  assert done.returncode == 1, done.stderr
  return done.stderr.strip().splitlines()[-1]


def _without(*packages: str) -> str:
  """Python that makes packages look as if they were not installed."""
  return f"import sys; sys.modules.update(dict.fromkeys({packages}))"


@pytest.mark.slow
def test_without_tensorflow_the_extras_are_named() -> None:
  assert _refusal(_without("tensorflow")) == (
    "ImportError: tf_cross_shard needs TensorFlow, and none is installed. Run"
    " one of: pip install 'tf-cross-shard[cpu]' (tensorflow-cpu), pip install"
    " 'tf-cross-shard[tensorflow]', or bring tensorflow-tpu."
  )


@pytest.mark.slow
def test_a_broken_tensorflow_tells_its_own_story(tmp_path: Path) -> None:
  """TensorFlow that lacks a dependency of its own is not "missing"."""
  (tmp_path / "tensorflow.py").write_text("import a_missing_dependency\n")
  assert _refusal(f"import sys; sys.path.insert(0, {str(tmp_path)!r})") == (
    "ModuleNotFoundError: No module named 'a_missing_dependency'"
  )


@pytest.mark.slow
def test_without_keras_it_is_named() -> None:
  assert _refusal(_without("keras")) == f"ImportError: {NO_KERAS}"


@pytest.mark.slow
def test_without_tf_keras_it_is_named() -> None:
  last = _refusal(_without("tf_keras"), TF_USE_LEGACY_KERAS="1")
  assert last == f"ImportError: {NO_TF_KERAS}"


@pytest.mark.slow
def test_without_tf_keras_its_module_says_so() -> None:
  last = _refusal(_without("tf_keras"), "", "tf_cross_shard.tf_keras")
  assert last == f"ImportError: {NO_TF_KERAS}"


@pytest.mark.slow
def test_without_keras_its_module_says_so() -> None:
  last = _refusal(
    _without("keras"), "", "tf_cross_shard.keras3", TF_USE_LEGACY_KERAS="1"
  )
  assert last == f"ImportError: {NO_KERAS}"


def test_an_old_keras_is_refused_at_import() -> None:
  old = "import keras; keras.__version__ = '3.5.0'"
  assert "but found Keras 3.5.0, which" in _refusal(old)


OLD_TF_KERAS = (
  "ImportError: tf_cross_shard needs tf_keras 2.16 or newer, but 2.15.1 is"
  f" installed. Run: pip install --no-deps 'tf_keras~={MINOR}.0'"
)


def test_an_old_tf_keras_is_refused_at_import() -> None:
  old = "import tf_keras; tf_keras.__version__ = '2.15.1'"
  assert _refusal(old, TF_USE_LEGACY_KERAS="1") == OLD_TF_KERAS


@pytest.mark.slow
def test_an_old_tf_keras_that_breaks_is_refused_at_import(
  tmp_path: Path,
) -> None:
  """So do 2.15.1 and older under TensorFlow 2.16 and newer."""
  (tmp_path / "tf_keras.py").write_text("raise AttributeError('gone')\n")
  recorded = tmp_path / "tf_keras-2.15.1.dist-info"
  recorded.mkdir()
  (recorded / "METADATA").write_text("Name: tf_keras\nVersion: 2.15.1\n")
  first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
  assert _refusal(first, TF_USE_LEGACY_KERAS="1") == OLD_TF_KERAS


@pytest.mark.slow
def test_a_broken_tf_keras_tells_its_own_story(tmp_path: Path) -> None:
  (tmp_path / "tf_keras.py").write_text("raise AttributeError('gone')\n")
  first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
  last = _refusal(first, TF_USE_LEGACY_KERAS="1")
  assert last == "AttributeError: gone"


@pytest.mark.slow
def test_keras_2_as_keras_is_no_tf_keras(tmp_path: Path) -> None:
  """That `tf.keras` is Keras 2 does not make it tf_keras, which is here too."""
  package = tmp_path / "keras" / "api" / "_v2" / "keras"
  package.mkdir(parents=True)
  (tmp_path / "keras" / "__init__.py").write_text("__version__ = '2.15.0'\n")
  (package / "__init__.py").write_text(
    "from keras.api._v2.keras import optimizers\n"
  )
  (package / "optimizers.py").write_text("class Optimizer:\n  pass\n")
  last = _refusal(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
  assert "but `keras` is Keras 2.15.0. Run: pip install --upgrade" in last


def test_another_backend_is_refused_at_import() -> None:
  other = "import keras; keras.backend.backend = lambda: 'jax'"
  assert "the backend is 'jax'" in _refusal(other)


@pytest.mark.parametrize(
  ("legacy", "other"), [("1", "keras"), ("0", "tf_keras")]
)
def test_only_the_keras_in_use_is_imported(legacy: str, other: str) -> None:
  """Each takes seconds, and the other one may be missing or unsuitable."""
  done = _import_in_a_fresh_process(
    _without(other),
    """
import tensorflow as tf
from tf_cross_shard import (CrossShardOptimizer)
print(CrossShardOptimizer.__module__)
print(issubclass(CrossShardOptimizer, tf.keras.optimizers.Optimizer))
print(tf.keras.optimizers.Optimizer.__module__.split(".")[0])
weight = tf.Variable(3.0)
optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(0.5))
print(int(optimizer.apply_gradients([(tf.constant(2.0), weight)])))
print(float(weight.numpy()))
""",
    TF_USE_LEGACY_KERAS=legacy,
  )
  assert done.returncode == 0, done.stderr
  which = {"1": "tf_keras", "0": "keras"}[legacy]
  module = {"1": "tf_keras", "0": "keras3"}[legacy]
  assert done.stdout.split() == [
    f"tf_cross_shard.{module}", "True", which, "1", "2.0"
  ]  # fmt: skip


def test_both_side_by_side() -> None:
  done = _import_in_a_fresh_process(
    afterwards="""
import keras, tf_keras
from tf_cross_shard import (keras3, tf_keras as keras2)
assert tf_cross_shard.CrossShardOptimizer is keras3.CrossShardOptimizer
assert issubclass(keras3.CrossShardOptimizer, keras.optimizers.Optimizer)
assert issubclass(keras2.CrossShardOptimizer, tf_keras.optimizers.Optimizer)
assert keras3.CrossShardOptimizer is not keras2.CrossShardOptimizer
"""
  )
  assert done.returncode == 0, done.stderr


def test_uses_tf_keras_is_what_tensorflow_decided(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """What is set after TensorFlow made its choice changes nothing."""
  before = versions.uses_tf_keras()
  assert before == tf.keras.Model.__module__.startswith("tf_keras.")
  monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0" if before else "1")
  assert versions.uses_tf_keras() == before


@pytest.mark.parametrize(
  ("value", "legacy"),
  [("1", True), ("true", True), ("True", True), ("0", False), (None, False)],
)
@pytest.mark.parametrize("error", [ImportError, AttributeError, RecursionError])
def test_uses_tf_keras_where_it_cannot_be_imported(
  monkeypatch: pytest.MonkeyPatch,
  value: str | None,
  legacy: bool,
  error: type[Exception],
) -> None:
  class TensorFlow:
    @property
    def keras(self) -> None:
      raise error

  monkeypatch.setattr(versions, "_import_tensorflow", TensorFlow)
  monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
  if value is not None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
  assert versions.uses_tf_keras() == legacy


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
