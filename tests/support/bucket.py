"""Buckets of `gs://` in a local folder, for programs without a network."""

import functools
import pathlib
from typing import Any, Final

import tensorflow as tf

NAMES: Final = (
  *("exists", "glob", "isdir", "listdir", "makedirs", "mkdir", "remove"),
  *("rename", "rmtree", "stat"),
)


def functions(folder: pathlib.Path) -> dict[str, Any]:
  """Returns functions for `tf.io.gfile` that keep `gs://` in a folder."""

  def local(path: Any) -> Any:
    return str(path).replace("gs://", f"{folder}/", 1)

  def calls(name: str) -> Any:
    function = getattr(tf.io.gfile, name)

    @functools.wraps(function)
    def call(*paths: Any, **options: Any) -> Any:
      return function(*map(local, paths), **options)

    return call

  class File(tf.io.gfile.GFile):  # type: ignore[misc]
    """A file in the folder."""

    def __init__(self, name: Any, mode: str = "r") -> None:
      super().__init__(local(name), mode)

  return {"GFile": File, **{name: calls(name) for name in NAMES}}
