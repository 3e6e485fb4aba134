"""The calls between `apply_gradients` and the kernel."""

import pathlib
import traceback

import keras
import pytest
import tensorflow as tf

import tf_cross_shard
from tf_cross_shard import keras3

# Each frame is something that a reader of a stack trace has to understand.
MOST_FRAMES = 9


def test_few_frames_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
  """On one device, without options."""
  home = str(pathlib.Path(tf_cross_shard.__file__).parent)
  optimizer = keras3.CrossShardOptimizer(keras.optimizers.Adam())
  weight = keras.Variable([1.0, 2.0])
  optimizer.build([weight])
  frames: list[str] = []

  def kernel(**_: object) -> None:
    frames.extend(
      f"{pathlib.Path(frame.filename).relative_to(home)}:{frame.lineno}"
      f" {frame.name}"
      for frame in traceback.extract_stack()
      if frame.filename.startswith(home)
    )

  monkeypatch.setattr(tf.raw_ops, "ResourceApplyAdam", kernel)
  optimizer.apply_gradients([(tf.ones([2]), weight)])
  assert frames, "no kernel was called"
  count = len(frames)
  assert count <= MOST_FRAMES, "\n".join([f"{count} frames:", *frames])
