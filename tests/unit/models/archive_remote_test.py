"""Tests what is written to `gs://`, of which a local folder takes the place."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import bucket, testbed
from tf_cross_shard import CrossShardOptimizer, Models, callbacks

GROUPS = [[0, 1], [2, 3]]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
  """The URL of a folder in a bucket."""
  for name, function in bucket.functions(tmp_path).items():
    monkeypatch.setattr(tf.io.gfile, name, function)
  tf.io.gfile.makedirs("gs://bucket/run")
  return "gs://bucket/run"


def _model(rate: Any = 0.01) -> Any:
  """A model of two groups, which differ when they are trained."""
  with testbed.mirrored().scope():
    layers = [tf.keras.Input((3,)), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    adam = tf.keras.optimizers.Adam(rate)
    model.compile(CrossShardOptimizer(adam, group_assignment=GROUPS), "mse")
  return model


def _data() -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(3)
  x = rng.normal(size=(32, 3)).astype("float32")
  return x, x.sum(1, keepdims=True) + rng.normal(size=(32, 1))


def _values(model: Any) -> list[np.ndarray]:
  variables = [*model.variables, *model.optimizer.variables]
  return [copy for v in variables for copy in testbed.copies(v)]


def _fit(model: Any, epochs: int, *listed: Any, **options: Any) -> Any:
  dataset = tf.data.Dataset.from_tensor_slices(_data()).batch(8)
  return model.fit(
    dataset, epochs=epochs, callbacks=list(listed), verbose=0, **options
  )


def _assert_equal(found: list[np.ndarray], right: list[np.ndarray]) -> None:
  assert len(found) == len(right)
  for ours, theirs in zip(found, right, strict=True):
    assert ours.tobytes() == theirs.tobytes()


def test_saves_and_restores_groups(folder: str) -> None:
  model = _model()
  optimizer = model.optimizer
  _fit(model, 1)
  path = f"{folder}/state.npz"
  with pytest.raises(ValueError, match=r"`path` is .*Keras cannot load"):
    Models(model).save(f"{folder}/state.keras")
  with pytest.raises(FileNotFoundError, match=r"gs://.*save wrote"):
    Models(model).restore(path)
  Models(model, optimizer).save(path)
  right = _values(model)
  assert tf.io.gfile.listdir(folder) == ["state.npz"]
  _fit(model, 1)
  Models(model, optimizer).restore(path)
  _assert_equal(_values(model), right)
  plain = tf.keras.models.clone_model(model)
  Models.read(path, 1, plain)
  _assert_equal(
    [v.numpy() for v in plain.weights],
    [testbed.copies(v)[GROUPS[1][0]] for v in model.weights],
  )


def test_resumes_from_a_backup(folder: str) -> None:
  whole = _model()
  whole.set_weights([np.ones_like(w) for w in whole.get_weights()])
  start = whole.get_weights()
  _fit(whole, 3)

  model = _model()
  model.set_weights(start)
  path = f"{folder}/backup"
  backup = callbacks.BackupAndRestore(path, delete_checkpoint=False)
  with pytest.raises(KeyboardInterrupt):
    _fit(model, 3, testbed.Interruption(2), backup)
  names = ["epoch_1.npz", "epoch_2.npz"]
  assert sorted(tf.io.gfile.listdir(path)) == names
  resumed = _model()
  backup = callbacks.BackupAndRestore(path)
  assert _fit(resumed, 3, backup).epoch == [2]
  _assert_equal(_values(resumed), _values(whole))
  assert tf.io.gfile.listdir(path) == []


@pytest.mark.parametrize("end", [-30, 10])
def test_ignores_a_backup_that_was_not_written_to_its_end(
  folder: str, end: int
) -> None:
  model = _model()
  _fit(model, 2, callbacks.BackupAndRestore(folder, delete_checkpoint=False))
  newest = f"{folder}/epoch_2.npz"
  with tf.io.gfile.GFile(newest, "rb") as file:
    part = file.read()[:end]
  with tf.io.gfile.GFile(newest, "wb") as file:
    file.write(part)
  resumed = _model()
  assert _fit(resumed, 3, callbacks.BackupAndRestore(folder)).epoch == [1, 2]


def test_a_write_that_fails_leaves_the_older_file(
  folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  path = f"{folder}/a.npz"
  model = _model()
  _fit(model, 1)
  Models(model).save(path)
  right = _values(model)
  _fit(model, 1)

  class Full(tf.io.gfile.GFile):  # type: ignore[misc]
    def write(self, data: Any) -> None:
      super().write(data[:9])
      raise tf.errors.ResourceExhaustedError(None, None, "the quota")

  with monkeypatch.context() as patch:
    patch.setattr(tf.io.gfile, "GFile", Full)
    with pytest.raises(
      OSError, match=rf"(?s){path} could not be written.*unchanged\. Free space"
    ):
      Models(model).save(path)
  assert tf.io.gfile.listdir(folder) == ["a.npz"]
  Models(model).restore(path)
  _assert_equal(_values(model), right)


@pytest.mark.parametrize(
  ("path", "words"),
  [
    ("x3://bucket/a", r"such as gs://.*got 'x3://bucket/a'"),
    (pathlib.Path("gs://bucket/a"), r'Pass the string "gs://bucket/a"'),
    *((path, "`path` must") for path in ("", b"bytes", 3, None)),
  ],
)
def test_refuses_what_is_no_path(path: Any, words: str) -> None:
  model = _model()
  with pytest.raises((ValueError, TypeError), match=words):
    Models(model).restore(path)
