"""An unsuitable TensorFlow or Keras is refused by name, with the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tf_cross_shard import requirements

PROJECT = Path(__file__).absolute().parent.parent


@pytest.mark.parametrize(
  "version", ["3.8", "3.8.0", "3.15.1", "4.0", "3.9.0rc1"]
)
def test_keras_that_adds_up_is_accepted(version: str) -> None:
  requirements.check_keras(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.21.0", "2.99"])
def test_keras_2_is_refused(version: str) -> None:
  with pytest.raises(ImportError) as error:
    requirements.check_keras(version)
  assert str(error.value) == (
    f"tf_cross_shard needs Keras 3, but `tf.keras` is Keras {version}"
    " (tf_keras). Unset TF_USE_LEGACY_KERAS before TensorFlow is imported."
  )


@pytest.mark.parametrize("version", ["3.0.0", "3.7.0", "3.8.0.dev0"])
def test_keras_that_trains_wrongly_is_refused(version: str) -> None:
  with pytest.raises(ImportError) as error:
    requirements.check_keras(version)
  text = str(error.value)
  assert "needs Keras 3.8 or newer" in text
  assert f"`tf.keras` is Keras {version}" in text
  assert "reduces or scales gradients wrongly under tf.distribute" in text
  assert text.endswith("Run: pip install 'keras>=3.8'")


@pytest.mark.parametrize("version", ["2.16", "2.16.1", "2.21.0", "3.0"])
def test_new_tensorflow_is_accepted(version: str) -> None:
  requirements.check_tensorflow(version)


@pytest.mark.parametrize("version", ["1.15.5", "2.9.0", "2.15.1", "2.16.0rc0"])
def test_old_tensorflow_is_refused(version: str) -> None:
  with pytest.raises(ImportError) as error:
    requirements.check_tensorflow(version)
  assert str(error.value) == (
    f"tf_cross_shard needs TensorFlow 2.16 or newer, but {version} is"
    " installed. Run: pip install --upgrade 'tensorflow>=2.16'"
  )


def test_tensorflow_backend_is_accepted() -> None:
  requirements.check_backend("tensorflow")


@pytest.mark.parametrize("backend", ["jax", "torch", "numpy", "openvino"])
def test_other_backends_are_refused(backend: str) -> None:
  with pytest.raises(ImportError) as error:
    requirements.check_backend(backend)
  assert str(error.value) == (
    "tf_cross_shard needs Keras on its TensorFlow backend, but the backend is"
    f" {backend!r}. Set KERAS_BACKEND=tensorflow before importing Keras."
  )


def test_what_is_installed_here_is_accepted() -> None:
  requirements.check_installed()


@pytest.mark.parametrize(
  ("owner", "name", "value", "words"),
  [
    (tf, "__version__", "2.15.0", "needs TensorFlow 2.16 or newer"),
    (tf.keras, "__version__", "3.7.0", "needs Keras 3.8 or newer"),
    (tf.keras, "__version__", "2.21.0", "Unset TF_USE_LEGACY_KERAS"),
    (tf.keras.backend, "backend", lambda: "jax", "the backend is 'jax'"),
  ],
  ids=["tensorflow", "keras", "tf_keras", "backend"],
)
def test_each_check_is_made_of_what_is_installed(
  monkeypatch: pytest.MonkeyPatch,
  owner: object,
  name: str,
  value: object,
  words: str,
) -> None:
  monkeypatch.setattr(owner, name, value)
  with pytest.raises(ImportError, match=words):
    requirements.check_installed()


def _import_in_a_fresh_process(preparation: str) -> str:
  """The last line that importing the package writes after `preparation`."""
  done = subprocess.run(
    [sys.executable, "-c", f"{preparation}\nimport tf_cross_shard"],
    cwd=PROJECT,
    env={
      **os.environ,
      "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
    },
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 1, done.stderr
  return done.stderr.strip().splitlines()[-1]


def test_without_tensorflow_the_extras_are_named() -> None:
  last = _import_in_a_fresh_process(
    "import sys; sys.modules['tensorflow'] = None"
  )
  assert last == (
    "ImportError: tf_cross_shard needs TensorFlow, and none is installed. Run"
    " one of: pip install 'tf-cross-shard[cpu]' (tensorflow-cpu), pip install"
    " 'tf-cross-shard[tensorflow]', or bring tensorflow-tpu."
  )


def test_a_broken_tensorflow_tells_its_own_story(tmp_path: Path) -> None:
  """TensorFlow that lacks a dependency of its own is not "missing"."""
  (tmp_path / "tensorflow.py").write_text("import a_missing_dependency\n")
  last = _import_in_a_fresh_process(
    f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
  )
  assert last == ("ModuleNotFoundError: No module named 'a_missing_dependency'")


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
