"""Event files for TensorBoard, written without TensorBoard installed."""

from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.replica_state import paths as paths_lib

_SCALAR: Final = tf.compat.v1.SummaryMetadata(
  plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR"
)
_TEXT: Final = tf.compat.v1.SummaryMetadata(
  plugin_data={"plugin_name": "text"}, data_class="DATA_CLASS_TENSOR"
)


class Runs:
  """Writes the runs in one folder: curves, and a table of hyperparameters."""

  def __init__(self, log_dir: Any) -> None:
    """Sets the folder. A run is created when it is first written to."""
    self._log_dir = paths_lib.as_path(log_dir, "log_dir")
    self._writers: dict[str, Any] = {}

  def write(
    self,
    run: str,
    step: int,
    scalars: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
  ) -> None:
    """Adds a point at `step` to each curve of a run; `scalars` are by curve.

    The `hyperparameters` are written as text when the run is new.
    """
    if run not in self._writers:
      self._writers[run] = tf.summary.create_file_writer(
        str(self._log_dir / run)
      )
      if hyperparameters:
        with self._writers[run].as_default(step=0):
          # A table in Markdown, which TensorBoard shows as such.
          rows = [f"| {name} | {v} |" for name, v in hyperparameters.items()]
          table = "\n".join(["| name | value |", "| --- | --- |", *rows])
          tf.summary.write("hyperparameters", table, metadata=_TEXT)
    with self._writers[run].as_default(step=step):
      for tag, value in scalars.items():
        # The same entry that tf.summary.scalar writes, which needs TensorBoard.
        tf.summary.write(tag, tf.cast(value, tf.float32), metadata=_SCALAR)
    self._writers[run].flush()

  def close(self) -> None:
    for writer in self._writers.values():
      writer.close()
    self._writers = {}
