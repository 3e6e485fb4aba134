"""Files that TensorBoard draws, written without TensorBoard."""

import os
from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf
from google.protobuf import struct_pb2

_SCALAR: Final = tf.compat.v1.SummaryMetadata(
  plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR"
)


class Runs:
  """Runs in one folder: curves, and a row of the HParams page for each."""

  def __init__(self, log_dir: Any) -> None:
    """Names the folder; a run is made when it is first written to."""
    self._log_dir = log_dir
    self._writers: dict[str, Any] = {}

  def write(
    self,
    run: str,
    step: int,
    scalars: Mapping[str, Any],
    hparams: Mapping[str, Any],
  ) -> None:
    """Adds a point to each curve; a new run has a row of `hparams`."""
    if run not in self._writers:
      self._writers[run] = tf.summary.create_file_writer(
        os.path.join(self._log_dir, run)
      )
      if hparams:
        with self._writers[run].as_default(step=0):
          tag = "_hparams_/session_start_info"
          tf.summary.write(tag, tf.zeros([0]), metadata=_metadata(hparams))
    with self._writers[run].as_default(step=step):
      for tag, value in scalars.items():
        # As tf.summary.scalar does, which needs TensorBoard to be installed.
        tf.summary.write(tag, tf.cast(value, tf.float32), metadata=_SCALAR)
    self._writers[run].flush()

  def close(self) -> None:
    """Closes the files."""
    for writer in self._writers.values():
      writer.close()
    self._writers = {}


def _metadata(values: Mapping[str, Any]) -> tf.compat.v1.SummaryMetadata:
  """Returns what hp.hparams() of TensorBoard writes, without TensorBoard.

  The plugin's data have in field 3 a message that is, in bytes, a Struct.
  """
  struct = struct_pb2.Struct()
  struct.update(dict(values))
  field = tf.train.BytesList(value=[struct.SerializeToString()])
  plugin = {
    "plugin_name": "hparams",
    "content": b"\x1a" + field.SerializeToString()[1:],  # 3 instead of 1
  }
  return tf.compat.v1.SummaryMetadata(plugin_data=plugin)
