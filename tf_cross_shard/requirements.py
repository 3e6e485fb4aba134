"""Which TensorFlow and Keras this package stands on, checked at import.

A wrong Keras does not fail, it trains wrongly: before 3.8 its custom loops do
not reduce gradients at all or its `fit` does not divide the loss by the number
of replicas. So an unsuitable version is refused here, by name.
"""

import importlib
from importlib import metadata
from typing import Any

from packaging import version

OLDEST_KERAS = version.Version("3.8")
OLDEST_TENSORFLOW = version.Version("2.16")


def check_keras(keras_version: str) -> None:
  """Raises `ImportError` unless `keras_version` is one that adds up.

  >>> check_keras("3.15.1")

  Args:
    keras_version: What `tf.keras.__version__` says.

  Raises:
    ImportError: If Keras 2 (tf_keras) stands behind `tf.keras`, or a Keras 3
      that reduces or scales wrongly.
  """
  found = version.Version(keras_version)
  if found < version.Version("3"):
    raise ImportError(
      f"tf_cross_shard needs Keras 3, but `tf.keras` is Keras {found}"
      " (tf_keras). Unset TF_USE_LEGACY_KERAS before TensorFlow is imported."
    )
  if found < OLDEST_KERAS:
    raise ImportError(
      f"tf_cross_shard needs Keras {OLDEST_KERAS} or newer, but `tf.keras` is"
      f" Keras {found}, which reduces or scales gradients wrongly under"
      f" tf.distribute. Run: pip install 'keras>={OLDEST_KERAS}'"
    )


def check_tensorflow(tensorflow_version: str) -> None:
  """Raises `ImportError` unless `tensorflow_version` is new enough.

  >>> check_tensorflow("2.21.0")

  Args:
    tensorflow_version: What `tf.__version__` says.

  Raises:
    ImportError: If TensorFlow is older than 2.16, the first with Keras 3.
  """
  if version.Version(tensorflow_version) < OLDEST_TENSORFLOW:
    raise ImportError(
      f"tf_cross_shard needs TensorFlow {OLDEST_TENSORFLOW} or newer, but"
      f" {tensorflow_version} is installed. Run:"
      f" pip install --upgrade 'tensorflow>={OLDEST_TENSORFLOW}'"
    )


def check_backend(backend: str) -> None:
  """Raises `ImportError` unless Keras runs on TensorFlow.

  >>> check_backend("tensorflow")

  Args:
    backend: What `keras.backend.backend()` says.

  Raises:
    ImportError: If Keras was told to use another backend.
  """
  if backend != "tensorflow":
    raise ImportError(
      "tf_cross_shard needs Keras on its TensorFlow backend, but the backend"
      f" is {backend!r}. Set KERAS_BACKEND=tensorflow before importing Keras."
    )


def own_version() -> str:
  """The version of this package.

  >>> own_version()[0].isdigit()
  True

  Returns:
    What was installed; `"0+source"` for a source tree, as Bazel runs it.
  """
  try:
    return metadata.version("tf-cross-shard")
  except metadata.PackageNotFoundError:
    return "0+source"


def check_installed() -> None:
  """Raises `ImportError` unless a suitable TensorFlow and Keras are there.

  >>> check_installed()

  Raises:
    ImportError: If TensorFlow is missing or one of the three checks above
      fails.
  """
  try:
    tf: Any = importlib.import_module("tensorflow")
  except ModuleNotFoundError as error:
    if error.name != "tensorflow":
      raise
    raise ImportError(
      "tf_cross_shard needs TensorFlow, and none is installed. Run one of:"
      " pip install 'tf-cross-shard[cpu]' (tensorflow-cpu),"
      " pip install 'tf-cross-shard[tensorflow]', or bring tensorflow-tpu."
    ) from error
  check_tensorflow(tf.__version__)
  check_keras(tf.keras.__version__)
  check_backend(tf.keras.backend.backend())
