"""Values assigned and written to a checkpoint: all of it, or nothing."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.migration import v1_file
from tf_cross_shard.replica_state import archive, replica_values

_INDEX: Final = ".index"


def check_target(dst: Any, src: Any) -> str:
  """The prefix to write, of which there is nothing yet."""
  path = v1_file.as_text(dst, "dst")
  folder, name = os.path.split(path)
  if not name:
    raise ValueError(
      f"`dst` must be the prefix of a checkpoint's files; got the folder"
      f' {path!r}. Name one in it, such as "{path}converted".'
    )
  # TensorFlow looks for the files by a pattern, in which these mean others.
  if "[" in path or "\\" in path:
    raise ValueError(
      "`dst` must have no [ or \\ in it, since TensorFlow writes such names and"
      f" cannot read; got {path!r}. Name a prefix and a folder without."
    )
  if _place(path) == _place(v1_file.as_text(src, "src")):
    raise ValueError(
      f"`dst` must not be `src`: got {path!r} for both. Name another prefix;"
      " what version 1 wrote stays as it is."
    )
  if not tf.io.gfile.isdir(folder or "."):
    raise FileNotFoundError(
      f"`dst` is {path!r}, and the folder {folder!r} is not there. Make it"
      " first."
    )
  there = [f for f in tf.io.gfile.listdir(folder or ".") if _is_of(f, name)]
  if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path):
    there.append(name)  # The oldest kind of checkpoint is one file.
  if there:
    raise FileExistsError(
      f"`dst` is {path!r}, of which there is {sorted(there)[0]} already. Name"
      " another prefix, or remove that checkpoint."
    )
  return path


@contextmanager
def assigned(pairs: Sequence[tuple[Any, archive.Array]]) -> Iterator[None]:
  """Assigns values on all replicas, and takes them back after an error.

  Of a variable that is the sum of what its replicas have, the first has the
  value, and the others have zeros.
  """
  before: list[tuple[Any, list[archive.Array]]] = []
  try:
    for variable, value in pairs:
      own = _copies(variable)
      before.append((variable, own.here(variable)))
      values = [value] * len(own.engine.replicas_here)
      if _is_summed(variable):
        # Equal parts would be rounded, as whole numbers are when divided.
        values = [np.zeros_like(value)] * len(values)
        if own.engine.replicas_here.start == 0:
          values[0] = value
      own.write(variable, values)
    yield
  except BaseException:  # Also of a program that is interrupted.
    for variable, values in before:
      _copies(variable).write(variable, values)
    raise


def write(path: str, model: Any, optimizer: Any) -> None:
  """Writes a checkpoint under another name and then gives it its own."""
  folder, name = os.path.split(path)
  partial = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.partial")
  moved: list[str] = []
  try:
    tf.io.gfile.makedirs(partial)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.write(os.path.join(partial, name))
    # The index last: without it the others are no checkpoint.
    files = sorted(tf.io.gfile.listdir(partial), key=lambda f: f[-6:] == _INDEX)
    for file in files:
      target = os.path.join(folder, file)
      tf.io.gfile.rename(os.path.join(partial, file), target)
      moved.append(target)
  except BaseException as error:
    for target in moved:
      with suppress(tf.errors.OpError):
        tf.io.gfile.remove(target)
    if isinstance(error, tf.errors.OpError):
      raise OSError(
        f"`dst` cannot be written: {path!r}: {error.message}. Name a prefix in"
        " a folder that this process may write to, on a disk with space."
      ) from error
    raise
  finally:
    with suppress(tf.errors.OpError):
      tf.io.gfile.rmtree(partial)


def _copies(variable: Any) -> replica_values.Copies:
  """The replicas that have a variable."""
  strategy = replica_values.strategy_of(variable)
  return replica_values.Copies(strategy or tf.distribute.get_strategy())


def _is_summed(variable: Any) -> bool:
  """Whether its value is the sum of what the replicas have."""
  native = replica_values.native(variable)
  kind = getattr(native, "synchronization", None)
  is_on_read = kind == tf.VariableSynchronization.ON_READ
  return is_on_read and bool(native.aggregation == tf.VariableAggregation.SUM)


def _is_of(file: str, name: str) -> bool:
  """Whether a file belongs to the checkpoint of that name."""
  return file == name + _INDEX or file.startswith(f"{name}.data-")


def _place(path: str) -> str:
  """The same for all spellings of a prefix."""
  return path if "://" in path else os.path.realpath(path)
