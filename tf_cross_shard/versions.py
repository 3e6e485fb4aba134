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

OLDEST_KERAS = "3.8"
OLDEST_TF_KERAS = "2.16"
OLDEST_TENSORFLOW = "2.16"


def own_version() -> str:
  """Returns the version of this package."""
  try:
    return metadata.version("tf-cross-shard")
  except metadata.PackageNotFoundError:
    return "0+source"


def check_installed() -> None:
  """Raises `ImportError` unless TensorFlow and `tf.keras` are supported."""
  number = _import_tensorflow().__version__
  if _is_older(number, OLDEST_TENSORFLOW):
    raise ImportError(
      f"tf_cross_shard needs TensorFlow {OLDEST_TENSORFLOW} or newer, but"
      f" {number} is installed. Run:"
      f" pip install --upgrade 'tensorflow>={OLDEST_TENSORFLOW}'"
    )
  (check_tf_keras if uses_tf_keras() else check_keras3)()


def check_keras3() -> None:
  """Raises `ImportError` unless a supported Keras 3 is installed."""
  keras = _import(
    "keras",
    "tf_cross_shard needs Keras 3, and none is installed. Run:"
    f" pip install 'keras>={OLDEST_KERAS}'",
  )
  number = keras.__version__
  if _is_older(number, OLDEST_KERAS):
    why = (
      f"or tf_keras {OLDEST_TF_KERAS} or newer, but `keras` is Keras {number}."
      if _is_older(number, "3.0.dev0")
      else f"but found Keras {number}, which reduces or scales gradients"
      " wrongly under tf.distribute."
    )
    raise ImportError(
      f"tf_cross_shard needs Keras {OLDEST_KERAS} or newer, {why} Run:"
      f" pip install --upgrade 'keras>={OLDEST_KERAS}'"
    )
  backend = keras.backend.backend()
  if backend != "tensorflow":
    raise ImportError(
      "tf_cross_shard needs Keras on its TensorFlow backend, but the backend"
      f" is {backend!r}. Set KERAS_BACKEND=tensorflow before importing Keras."
    )


def check_tf_keras() -> None:
  """Raises `ImportError` unless a supported tf_keras is installed."""
  major, minor = version.Version(_import_tensorflow().__version__).release[:2]
  # Its one requirement is `tensorflow`; beside tensorflow-cpu pip would
  # overwrite that one's files.
  remedy = f"Run: pip install --no-deps 'tf_keras~={major}.{minor}.0'"
  try:
    # The recorded version first: one that is too old cannot be imported.
    number = metadata.version("tf_keras")
  except metadata.PackageNotFoundError:
    number = OLDEST_TF_KERAS  # None, or a nightly build.
  if not _is_older(number, OLDEST_TF_KERAS):
    tf_keras = _import(
      "tf_keras",
      "tf_cross_shard.tf_keras, which TF_USE_LEGACY_KERAS=1 selects too, needs"
      f" tf_keras, and none is installed. {remedy}",
    )
    number = tf_keras.__version__
  if _is_older(number, OLDEST_TF_KERAS):
    raise ImportError(
      f"tf_cross_shard needs tf_keras {OLDEST_TF_KERAS} or newer, but {number}"
      f" is installed. {remedy}"
    )


def uses_tf_keras() -> bool:
  """Whether `tf.keras` is tf_keras."""
  tf = _import_tensorflow()
  try:
    # A version it need not have, and Keras 2 may be called `keras`, too.
    module: str = tf.keras.optimizers.Optimizer.__module__
  except (ImportError, AttributeError, RecursionError):
    # Missing, or too old for this TensorFlow: the choice that was asked for.
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")
  return module.split(".")[0] == "tf_keras"


def keras_version() -> str:
  """Returns the version of what `tf.keras` is."""
  module = "tf_keras" if uses_tf_keras() else "keras"
  return str(importlib.import_module(module).__version__)


def _is_older(number: str, oldest: str) -> bool:
  """Whether a version is older than another."""
  return version.Version(number) < version.Version(oldest)


def _import(name: str, words: str) -> Any:
  """Returns a package; raises an `ImportError` of these words without it."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name != name:  # One of its own requirements is missing.
      raise
    raise ImportError(words) from error


def _import_tensorflow() -> Any:
  """Returns TensorFlow."""
  return _import(
    "tensorflow",
    "tf_cross_shard needs TensorFlow, and none is installed. Run one of:"
    " pip install 'tf-cross-shard[cpu]' (tensorflow-cpu),"
    " pip install 'tf-cross-shard[tensorflow]', or bring tensorflow-tpu.",
  )
