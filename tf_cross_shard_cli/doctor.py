"""Looks for known problems of an installation: the command `doctor`.

    tf-cross-shard doctor

Prints the versions, the devices and TF_CONFIG. Then it prints what is wrong
with them, and the known problems of the installed versions, each with its
remedy. The exit status is 1 if something is wrong; known problems of versions
do not count.
"""

import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final, NamedTuple

# Packages that install the module `tensorflow`, and overwrite each other.
_TENSORFLOWS: Final = (
  *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm"),
  *("tensorflow-tpu", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu"),
)
_LIMITS: Final = "See docs/limits.md#tensorflow."


class Finding(NamedTuple):
  """A problem of the installation, or a known problem of its versions.

  Attributes:
    text: What is wrong.
    remedy: What to do.
    is_wrong: Whether programs fail or train wrongly. A known
      problem that a program may not meet is only a note.
  """

  text: str
  remedy: str
  is_wrong: bool = True


def examine(versions: Any) -> tuple[str, int]:
  """Returns the report, and 1 if something is wrong, else 0.

  Args:
    versions: The module `versions` of `tf_cross_shard`, which does not import
      TensorFlow before it is asked.
  """
  facts = {
    "Python": f"{platform.python_version()} on {platform.platform()}",
    "tf_cross_shard": versions.own_version(),
    "TensorFlow": _named(_TENSORFLOWS) or "not installed",
    "Keras": _named(("keras", "tf_keras")) or "not installed",
    "TF_CONFIG": os.environ.get("TF_CONFIG") or "not set",
  }
  findings = list(_several_tensorflows())
  try:
    versions.check_installed()
  except ImportError as error:  # It names its remedy.
    findings.append(Finding(*_halves(str(error))))
  except Exception as error:  # Mixed files raise any error.
    findings.append(
      Finding(
        f"Importing TensorFlow and Keras fails with {type(error).__name__}:"
        f" {error}",
        "Install TensorFlow and Keras in a new virtual environment.",
      )
    )
  else:
    kind = "tf_keras" if versions.uses_tf_keras() else "Keras 3"
    facts["Keras"] += f"; tf.keras is {kind}"
    facts["devices"] = _devices()
    findings += [
      *_wrong_tf_keras(kind),
      *_wrong_tf_config(),
      *_unused_gpu(),
      *_known_problems(kind),
    ]
  findings.sort(key=lambda finding: not finding.is_wrong)
  wrong = sum(finding.is_wrong for finding in findings)
  lines = [f"{name:15} {fact}" for name, fact in facts.items()]
  for finding in findings:
    kind = "WRONG" if finding.is_wrong else "NOTE"
    lines += ["", *_wrapped(f"{kind}: {finding.text}")]
    lines += _wrapped(f"Fix: {finding.remedy}", "  ")
  things = "thing is" if wrong == 1 else "things are"
  lines += ["", f"{wrong} {things} wrong." if wrong else "Nothing is wrong."]
  return "\n".join(lines), int(wrong > 0)


def _several_tensorflows() -> Iterator[Finding]:
  """Finds packages whose files overwrite each other's."""
  found = [name for name in _TENSORFLOWS if _version(name)]
  if len(found) > 1:
    yield Finding(
      f"{' and '.join(found)} are installed, and overwrite each other's files.",
      f"pip uninstall -y {' '.join(found)}; then install one of them again,"
      f" for example: pip install {found[-1]}",
    )


def _wrong_tf_keras(kind: str) -> Iterator[Finding]:
  """Finds a tf_keras for another TensorFlow."""
  import tensorflow as tf

  ours, theirs = _version("tf_keras"), tf.__version__
  minor = ".".join(theirs.split(".")[:2])
  if ours and ours.split(".")[:2] != theirs.split(".")[:2]:
    yield Finding(
      f"tf_keras {ours} belongs to another TensorFlow than {theirs}.",
      f"pip install --no-deps 'tf_keras~={minor}.0'",
      is_wrong=kind == "tf_keras",
    )


def _wrong_tf_config() -> Iterator[Finding]:
  """Finds a TF_CONFIG that cannot be read, or lacks this process."""
  # Only now, because the import fails with unsupported versions.
  from tf_cross_shard._src.multi_worker import strategy

  try:
    strategy.check_tf_config(os.environ.get("TF_CONFIG"))
  except ValueError as error:
    yield Finding(*_halves(str(error)))


def _unused_gpu() -> Iterator[Finding]:
  """Finds a driver for GPUs that TensorFlow does not see."""
  if shutil.which("nvidia-smi") and not _physical("GPU"):
    yield Finding(
      "This machine has NVIDIA's driver, but TensorFlow sees no GPU.",
      "pip install 'tensorflow[and-cuda]', in place of tensorflow-cpu. Unset"
      " CUDA_VISIBLE_DEVICES if it is empty.",
      is_wrong=False,
    )


def _known_problems(kind: str) -> Iterator[Finding]:
  """Finds known problems of the installed versions."""
  import tensorflow as tf

  if tf.__version__.startswith("2.21."):
    yield Finding(
      "After an epoch of `fit` under MirroredStrategy, TensorFlow 2.21 may"
      " idle for minutes.",
      "on CPUs, create the strategy with tf_cross_shard.local_strategy(). On"
      " GPUs, call tf.data.experimental.enable_debug_mode() after you have"
      f" created your datasets. {_LIMITS}",
      is_wrong=False,
    )
    if sys.version_info >= (3, 13):
      yield Finding(
        "On Python 3.13, an eager strategy.run waits for a second.",
        f"call strategy.run inside a tf.function. {_LIMITS}",
        is_wrong=False,
      )
  if _version("horovod") and kind == "Keras 3":
    yield Finding(
      "Horovod's DistributedOptimizer does not reduce gradients with Keras 3,"
      " and raises no error.",
      "use CrossShardOptimizer or tf_keras. See docs/coming_from.md#horovod.",
      is_wrong=False,
    )


def _devices() -> str:
  """Returns the numbers of devices, without starting TensorFlow's runtime."""
  counts = {kind: len(_physical(kind)) for kind in ("CPU", "GPU", "TPU")}
  shown = [f"{count} {kind}" for kind, count in counts.items() if count]
  return f"{', '.join(shown)}; {os.cpu_count()} cores"


def _physical(kind: str) -> list[Any]:
  import tensorflow as tf

  return list(tf.config.list_physical_devices(kind))


def _version(distribution: str) -> str | None:
  """Returns the version of an installed package; None if it is missing."""
  try:
    return metadata.version(distribution)
  except metadata.PackageNotFoundError:
    return None


def _named(distributions: tuple[str, ...]) -> str:
  """Returns the names and versions of those packages that are installed."""
  pairs = [(name, _version(name)) for name in distributions]
  return ", ".join(f"{name} {version}" for name, version in pairs if version)


def _halves(message: str) -> tuple[str, str]:
  """Returns the two sentences of an error: what is wrong, and the remedy."""
  text, _, remedy = message.partition(". ")
  rest = re.sub("^(Run|Install it with): ", "", remedy)
  return f"{text}.", rest or "see the error."


def _wrapped(text: str, indent: str = "") -> list[str]:
  """Returns the text in lines that fit a terminal."""
  return textwrap.wrap(
    text,
    width=80,
    initial_indent=indent,
    subsequent_indent=indent or "  ",
    break_long_words=False,
    break_on_hyphens=False,
  )
