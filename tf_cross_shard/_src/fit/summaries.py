"""Event files for TensorBoard, written without TensorBoard installed."""

from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf
from google.protobuf import struct_pb2

from tf_cross_shard._src.replica_state import paths as paths_lib

_SCALAR: Final = tf.compat.v1.SummaryMetadata(
  plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR"
)


class Runs:
  """Writes the runs in one folder: curves, and rows of the HParams page."""

  def __init__(self, log_dir: Any) -> None:
    """Sets the folder. A run is created when it is first written to."""
    self._log_dir = paths_lib.as_path(log_dir, "log_dir")
    self._writers: dict[str, Any] = {}

  def write(
    self,
    run: str,
    step: int,
    scalars: Mapping[str, Any],
    hparams: Mapping[str, Any],
  ) -> None:
    """Adds a point at `step` to each curve of a run; `scalars` are by curve.

    `hparams` is the run's row of the HParams page, used when the run is new.
    """
    if run not in self._writers:
      self._writers[run] = tf.summary.create_file_writer(
        str(self._log_dir / run)
      )
      if hparams:
        with self._writers[run].as_default(step=0):
          tag = "_hparams_/session_start_info"
          tf.summary.write(tag, tf.zeros([0]), metadata=_metadata(hparams))
    with self._writers[run].as_default(step=step):
      for tag, value in scalars.items():
        # The same entry that tf.summary.scalar writes, which needs TensorBoard.
        tf.summary.write(tag, tf.cast(value, tf.float32), metadata=_SCALAR)
    self._writers[run].flush()

  def close(self) -> None:
    """Closes the files."""
    for writer in self._writers.values():
      writer.close()
    self._writers = {}


def _metadata(values: Mapping[str, Any]) -> tf.compat.v1.SummaryMetadata:
  """Returns the summary metadata that TensorBoard's hp.hparams() writes.

  The data of the plugin is a protobuf message whose field 3 holds a message
  that has, byte for byte, the form of a `Struct`. TensorFlow does not ship the
  classes of these messages, so the bytes are made from classes of the same
  layout.
  """
  struct = struct_pb2.Struct()
  struct.update(dict(values))
  field = tf.train.BytesList(value=[struct.SerializeToString()])
  plugin = {
    "plugin_name": "hparams",
    # BytesList writes field 1; its first byte is replaced to make it field 3.
    "content": b"\x1a" + field.SerializeToString()[1:],
  }
  return tf.compat.v1.SummaryMetadata(plugin_data=plugin)
