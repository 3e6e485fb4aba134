"""Prints versions and devices: the command `doctor`."""

import os
import platform
from importlib import metadata
from typing import Final

# Packages that install the module `tensorflow`, and overwrite each other.
_TENSORFLOWS: Final = (
  *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm"),
  *("tensorflow-tpu", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu"),
)


def examine(options: object = None) -> str:
  """Prints the versions of packages, TF_CONFIG and devices."""
  del options
  facts = {
    "Python": f"{platform.python_version()} on {platform.platform()}",
    "tf_cross_shard": version("tf-cross-shard") or "not installed",
    "TensorFlow": _named(_TENSORFLOWS),
    "Keras": _named(("keras", "tf_keras")),
    "TF_CONFIG": os.environ.get("TF_CONFIG") or "not set",
  }
  try:
    facts |= _imported()
  except Exception as error:  # Mixed files of several packages raise any error.
    facts["import"] = f"fails with {type(error).__name__}: {error}"
  return "\n".join(f"{name:15} {fact}" for name, fact in facts.items())


def _imported() -> dict[str, str]:
  """Returns what only TensorFlow knows, without starting its runtime."""
  import tensorflow as tf

  from tf_cross_shard import CrossShardOptimizer  # Checks the versions.

  [keras, *_] = {"tf_keras", "keras"} & {
    base.__module__.split(".")[0] for base in CrossShardOptimizer.__mro__
  }
  counts = {
    kind: len(tf.config.list_physical_devices(kind))
    for kind in ("CPU", "GPU", "TPU")
  }
  devices = [f"{count} {kind}" for kind, count in counts.items() if count]
  return {
    "tf.keras": keras,
    "devices": f"{', '.join(devices)}; {os.cpu_count()} cores",
  }


def version(distribution: str) -> str | None:
  """Returns the version of an installed package; None if it is missing."""
  try:
    return metadata.version(distribution)
  except metadata.PackageNotFoundError:
    return None


def _named(distributions: tuple[str, ...]) -> str:
  pairs = [(name, version(name)) for name in distributions]
  found = [f"{name} {number}" for name, number in pairs if number]
  return ", ".join(found) or "not installed"
