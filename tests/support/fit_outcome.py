"""Reads the files that a `fit` has written, to compare two runs."""

import json
import pathlib
from typing import Any

import numpy as np


def history(path: pathlib.Path) -> Any:
  """Returns a callback that appends the metrics of each epoch to a file."""
  import tensorflow as tf

  def append(epoch: int, logs: Any) -> None:
    numbers = {name: float(value).hex() for name, value in logs.items()}
    with path.open("a") as file:
      print(json.dumps([epoch, numbers]), file=file)

  return tf.keras.callbacks.LambdaCallback(on_epoch_end=append)


def of(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the metrics and arrays in the files of a folder, as bytes.

  The files are `history*`, of `history`, and `*.npz`. An epoch that was
  trained twice must have the same metrics both times.
  """
  found: dict[str, Any] = {}
  for path in folder.glob("history*"):
    for line in path.read_text().splitlines():
      epoch, numbers = json.loads(line)
      key = f"{path.name}/epoch {epoch}"
      assert found.setdefault(key, numbers) == numbers, key
  for path in folder.glob("*.npz"):
    with np.load(path) as file:
      arrays = {key: file[key].tobytes() for key in file}
      about = json.loads(str(file["about"]))
    del about["names"]  # Keras numbers them.
    found |= {
      f"{path.stem}/{k}": v for k, v in {**arrays, "about": about}.items()
    }
  return found
