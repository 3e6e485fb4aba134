"""Which versions of TensorFlow and Keras are supported, checked at import.

An unsupported Keras does not fail, it trains wrongly: before 3.8 its custom
loops do not reduce gradients at all, or its `fit` does not divide the loss by
the number of replicas. So it is refused at import, by name. The Keras that is
checked is the one that `tf.keras` is.
"""

import importlib
import os
from importlib import metadata
from typing import Any

from packaging import version

OLDEST_KERAS = version.Version("3.8")
OLDEST_TF_KERAS = version.Version("2.16")
OLDEST_TENSORFLOW = version.Version("2.16")


def check_keras(keras_version: str) -> None:
  """Raises `ImportError` unless `keras_version` reduces rightly."""
  found = version.Version(keras_version)
  remedy = f"Run: pip install --upgrade 'keras>={OLDEST_KERAS}'"
  if found < version.Version("3.0.dev0"):
    raise ImportError(
      f"tf_cross_shard needs Keras {OLDEST_KERAS} or newer, or tf_keras"
      f" {OLDEST_TF_KERAS} or newer, but `keras` is Keras {found}. {remedy}"
    )
  if found < OLDEST_KERAS:
    raise ImportError(
      f"tf_cross_shard needs Keras {OLDEST_KERAS} or newer, but found Keras"
      f" {found}, which reduces or scales gradients wrongly under"
      f" tf.distribute. {remedy}"
    )


def check_tf_keras_version(
  tf_keras_version: str, tensorflow_version: str
) -> None:
  """Raises `ImportError` unless `tf_keras_version` is new enough."""
  if version.Version(tf_keras_version) < OLDEST_TF_KERAS:
    remedy = _install_tf_keras(tensorflow_version)
    raise ImportError(
      f"tf_cross_shard needs tf_keras {OLDEST_TF_KERAS} or newer, but"
      f" {tf_keras_version} is installed. {remedy}"
    )


def check_tensorflow(tensorflow_version: str) -> None:
  """Raises `ImportError` unless `tensorflow_version` is new enough."""
  if version.Version(tensorflow_version) < OLDEST_TENSORFLOW:
    raise ImportError(
      f"tf_cross_shard needs TensorFlow {OLDEST_TENSORFLOW} or newer, but"
      f" {tensorflow_version} is installed. Run:"
      f" pip install --upgrade 'tensorflow>={OLDEST_TENSORFLOW}'"
    )


def check_backend(backend: str) -> None:
  """Raises `ImportError` unless Keras runs on TensorFlow."""
  if backend != "tensorflow":
    raise ImportError(
      "tf_cross_shard needs Keras on its TensorFlow backend, but the backend"
      f" is {backend!r}. Set KERAS_BACKEND=tensorflow before importing Keras."
    )


def own_version() -> str:
  """The version of this package."""
  try:
    return metadata.version("tf-cross-shard")
  except metadata.PackageNotFoundError:
    return "0+source"


def check_keras3() -> None:
  """Raises `ImportError` unless a supported Keras 3 is installed."""
  keras = _import(
    "keras",
    "tf_cross_shard needs Keras 3, and none is installed. Run:"
    f" pip install 'keras>={OLDEST_KERAS}'",
  )
  check_keras(keras.__version__)
  check_backend(keras.backend.backend())


def check_tf_keras() -> None:
  """Raises `ImportError` unless a supported tf_keras is installed."""
  tf = _import_tensorflow()
  try:
    # The recorded version first: one that is too old cannot be imported.
    recorded = metadata.version("tf_keras")
  except metadata.PackageNotFoundError:
    pass  # None, or a nightly build.
  else:
    check_tf_keras_version(recorded, tf.__version__)
  tf_keras = _import(
    "tf_keras",
    "tf_cross_shard.tf_keras, which TF_USE_LEGACY_KERAS=1 asks for too, needs"
    " tf_keras, and none is installed."
    f" {_install_tf_keras(tf.__version__)}",
  )
  check_tf_keras_version(tf_keras.__version__, tf.__version__)


def uses_tf_keras() -> bool:
  """Whether `tf.keras` is tf_keras."""
  tf = _import_tensorflow()
  try:
    # There `tf.keras` has no version. Keras 2 may also be called `keras`.
    module: str = tf.keras.optimizers.Optimizer.__module__
  except (ImportError, AttributeError, RecursionError):
    # Missing, or too old for this TensorFlow: what that was told to look for.
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")
  return module.split(".")[0] == "tf_keras"


def keras_version() -> str:
  """The version of what `tf.keras` is."""
  module = "tf_keras" if uses_tf_keras() else "keras"
  return str(importlib.import_module(module).__version__)


def check_installed() -> None:
  """Raises `ImportError` unless TensorFlow and `tf.keras` are supported."""
  check_tensorflow(_import_tensorflow().__version__)
  (check_tf_keras if uses_tf_keras() else check_keras3)()


def _import(name: str, words: str) -> Any:
  """The package of that name; without it an `ImportError` of these words."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name != name:  # One of its own requirements is missing.
      raise
    raise ImportError(words) from error


def _import_tensorflow() -> Any:
  """TensorFlow."""
  return _import(
    "tensorflow",
    "tf_cross_shard needs TensorFlow, and none is installed. Run one of:"
    " pip install 'tf-cross-shard[cpu]' (tensorflow-cpu),"
    " pip install 'tf-cross-shard[tensorflow]', or bring tensorflow-tpu.",
  )


def _install_tf_keras(tensorflow_version: str) -> str:
  """The command that installs the tf_keras of that TensorFlow."""
  major, minor = version.Version(tensorflow_version).release[:2]
  # Its one requirement is `tensorflow`, and this one may be tensorflow-cpu,
  # whose files pip would overwrite.
  return f"Run: pip install --no-deps 'tf_keras~={major}.{minor}.0'"
