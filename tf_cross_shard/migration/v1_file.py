"""A checkpoint that TensorFlow 1 wrote: values by the names of variables."""

import os
import re
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard.migration import adapters
from tf_cross_shard.replica_state import archive

# What stands after the prefix in the names of files.
_ONE_FILE: Final = re.compile(r"(.+)\.(index|meta|data-\d+-of-\d+)", re.DOTALL)
_PARTS: Final = re.compile(r".+-\?{5}-of-\d{5}", re.DOTALL)
# What the reader raises for what it cannot read, after its own translation.
_READING: Final = (tf.errors.OpError, RuntimeError, ValueError, IndexError)


class V1File:
  """What a checkpoint holds; its files are only read."""

  def __init__(self, path: str) -> None:
    """Reads the names."""
    self.path = path
    try:
      # Not load_checkpoint, which reads another one where there is a folder of
      # this name too.
      self._reader: Any = tf.compat.v1.train.NewCheckpointReader(path)
      shapes = self._reader.get_variable_to_shape_map()
      self.dtypes: dict[str, Any] = self._reader.get_variable_to_dtype_map()
    except _READING as error:
      raise archive.CheckpointError(_damaged(path, error)) from error
    if adapters.OBJECT_GRAPH in shapes:
      raise archive.CheckpointError(
        f"`src` must be a checkpoint of TensorFlow 1; {path} is one of"
        " TensorFlow 2, whose values belong to objects, not to names. Read it"
        " with tf.train.Checkpoint(model=model, optimizer=optimizer).read(src)."
      )
    self.shapes = {name: tuple(shapes[name]) for name in sorted(shapes)}
    self._values: dict[str, archive.Array] = {}

  def read(self, name: str) -> archive.Array:
    """Reads the value of a variable."""
    if name in self._values:
      return self._values[name]
    try:
      value = np.array(self._reader.get_tensor(name))
    except tf.errors.UnimplementedError as error:  # of the oldest kind
      raise archive.CheckpointError(
        f"`src` holds {name} in parts that TensorFlow 2 cannot read:"
        f" {self.path}. Write it with version 1 once more, by"
        " Saver(write_version=SaverDef.V2)."
      ) from error
    except _READING as error:
      raise archive.CheckpointError(_damaged(self.path, error)) from error
    self._values[name] = value
    return value


def prefix_of(src: Any) -> str:
  """The prefix of a checkpoint's files."""
  path = as_text(src, "src")
  # TensorFlow looks for the files by a pattern, in which these mean others.
  if "[" in path or "\\" in path:
    raise ValueError(
      "`src` must have no [ or \\ in it, since TensorFlow cannot read such"
      f" names; got {path!r}. Copy its files to a folder and a prefix without."
    )
  exists, is_folder = tf.io.gfile.exists, tf.io.gfile.isdir(path)
  # The oldest kind of checkpoint is one file, without an index beside it.
  if exists(f"{path}.index") or (exists(path) and not is_folder):
    found = _ONE_FILE.fullmatch(path)
    if found is None or exists(f"{path}.index"):
      return path
    raise FileNotFoundError(
      f"`src` names one file of a checkpoint, got {path!r}. Name what all of"
      f" its files begin with: {found[1]!r}."
    )
  if is_folder:
    latest = tf.train.latest_checkpoint(path)
    if latest is None:
      raise FileNotFoundError(
        f"`src` is the folder {path}, in which the file named `checkpoint`"
        " names no checkpoint that is there. Name one by the prefix of its"
        f' files, such as "{os.path.join(path, "model.ckpt-1000")}".'
      )
    return str(latest)
  # Of its parts the oldest kind has no index either, and this is their prefix.
  if _PARTS.fullmatch(path) and tf.io.gfile.glob(path):
    return path
  remedy = "Name the prefix of its files, without .index or .data."
  raise FileNotFoundError(f"`src` names no checkpoint: got {path!r}. {remedy}")


def as_text(path: Any, argument: str) -> str:
  """A path as a string."""
  if isinstance(path, (str, os.PathLike)):
    text = os.fspath(path)
    if text and isinstance(text, str):
      if "\0" in text:
        raise ValueError(
          f"`{argument}` must have no character NUL in it; got {text!r}. Name"
          ' the prefix of a checkpoint, such as "folder/model.ckpt-1000".'
        )
      return text
  raise TypeError(
    f"`{argument}` must be a string or a path; got {path!r}. Name the prefix"
    ' of a checkpoint, such as "folder/model.ckpt-1000".'
  )


def _damaged(path: str, error: Exception) -> str:
  """The words about what cannot be read."""
  return (
    f"`src` cannot be read: {path} is damaged or no checkpoint:"
    f" {getattr(error, 'message', error)}. Copy it again from where it is"
    " whole, all of its files."
  )
