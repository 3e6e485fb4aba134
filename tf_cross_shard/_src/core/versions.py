"""Checks the versions of TensorFlow and Keras when the package is imported.

With an older Keras, a program would not fail, but train wrongly: no reduction
in a loop, losses that `fit` does not divide, no loss scale of `mixed_float16`.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packaging import version

OLDEST_KERAS = "3.10"
OLDEST_TF_KERAS = "2.16"
OLDEST_TENSORFLOW = "2.16"
# The newest TensorFlow with which VectorizedStrategy was tested.
NEWEST_VECTORIZED = "2.21"


def own_version() -> str:
  """Returns the version of this package."""
  try:
    return metadata.version("tf-cross-shard")
  except metadata.PackageNotFoundError:
    return "0+source"


def check_installed() -> None:
  """Raises `ImportError` unless TensorFlow and `tf.keras` are supported."""
  _check_new_enough("TensorFlow", _import_tensorflow(), OLDEST_TENSORFLOW)
  (check_tf_keras if uses_tf_keras() else check_keras3)()


def check_keras3() -> None:
  """Raises `ImportError` unless a supported Keras 3 is installed."""
  keras = _import("keras", f"pip install 'keras>={OLDEST_KERAS}'")
  _check_new_enough("Keras", keras, OLDEST_KERAS)
  backend = keras.backend.backend()
  if backend != "tensorflow":
    raise ImportError(
      "tf_cross_shard needs Keras on its TensorFlow backend, but the backend"
      f" is {backend!r}. Set KERAS_BACKEND=tensorflow before importing Keras."
    )


def check_tf_keras() -> None:
  """Raises `ImportError` unless a supported tf_keras is installed."""
  major, minor = version.Version(_import_tensorflow().__version__).release[:2]
  # Without --no-deps, pip would install `tensorflow`, which tf_keras requires,
  # over the files of tensorflow-cpu.
  remedy = f"pip install --no-deps 'tf_keras~={major}.{minor}.0'"
  tf_keras = _import("tf_keras", remedy)
  _check_new_enough("tf_keras", tf_keras, OLDEST_TF_KERAS, remedy)


def uses_tf_keras() -> bool:
  """Returns whether `tf.keras` is tf_keras."""
  tf = _import_tensorflow()
  try:
    # Ask the class. Keras 2 may also be called `keras`, and the module need not
    # have a version.
    module: str = tf.keras.optimizers.Optimizer.__module__
  except (ImportError, AttributeError, RecursionError):
    # Keras is missing, or too old for this TensorFlow: return what the user
    # asked for, so that the error is about that Keras.
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")
  return module.split(".")[0] == "tf_keras"


def keras_version() -> str:
  """Returns the version of the Keras behind `tf.keras`."""
  module = "tf_keras" if uses_tf_keras() else "keras"
  return str(importlib.import_module(module).__version__)


@contextlib.contextmanager
def needing_private_modules(name: str) -> Iterator[None]:
  """Raises `NotImplementedError` if TensorFlow lacks what `name` imports."""
  try:
    yield
  except (ImportError, AttributeError) as error:
    number = _import_tensorflow().__version__
    raise NotImplementedError(
      f"{name} uses private parts of TensorFlow {OLDEST_TENSORFLOW} to"
      f" {NEWEST_VECTORIZED}, and TensorFlow {number} has others: {error}."
      " Train the models in separate fits, and replicas under"
      " local_strategy(n)."
    ) from error


def _check_new_enough(
  name: str, module: Any, oldest: str, remedy: str = ""
) -> None:
  """Raises `ImportError` if a package is older than a version."""
  number = module.__version__
  if version.Version(number) < version.Version(oldest):
    remedy = remedy or f"pip install --upgrade '{module.__name__}>={oldest}'"
    raise ImportError(
      f"tf_cross_shard needs {name} {oldest} or newer, but {number} is"
      f" installed. Run: {remedy}"
    )


def _import(name: str, remedy: str) -> Any:
  """Imports a package; the `ImportError` without it says how to install it."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name != name:  # A requirement of the package is missing.
      raise
    raise ImportError(
      f"tf_cross_shard needs the package {name}, which is not installed. Run:"
      f" {remedy}"
    ) from error


def _import_tensorflow() -> Any:
  return _import(
    "tensorflow",
    "pip install '.[cpu]' in your clone of tf_cross_shard (tensorflow-cpu), or"
    " pip install '.[tensorflow]', or bring tensorflow-tpu.",
  )
