"""What `src` may be, where the count of steps is, and what is not left out."""
# keras: both

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard import CrossShardOptimizer, migration
from tf_cross_shard import __main__ as command
from tf_cross_shard.migration import adapters

v1 = tf.compat.v1


def _save(
  folder: Path, values: dict[str, Any] | None = None, **options: Any
) -> str:
  """Writes a checkpoint of version 1; answers what it calls its path."""
  if values is None:
    values = {**_weights(1.0), "global_step": np.int64(7)}
  folder.mkdir(parents=True, exist_ok=True)
  with tf.Graph().as_default(), v1.Session() as session:
    for name, value in values.items():
      v1.get_variable(name, initializer=np.asarray(value))
    session.run(v1.global_variables_initializer())
    saver = v1.train.Saver(**options)
    return saver.save(session, str(folder / "model"), write_meta_graph=False)


def _weights(value: float) -> dict[str, np.ndarray]:
  return {
    "w": np.array([value, 2.0], "float32"),
    "w/Momentum": np.array([0.5, 0.25], "float32"),
  }


def _weight() -> Any:
  return tf.Variable([0.0, 0.0], name="w")


def _momentum(rate: Any = 0.5) -> Any:
  return migration.from_v1(v1.train.MomentumOptimizer(rate, 0.75))


def test_a_folder_of_the_same_name_is_another_thing(tmp_path: Path) -> None:
  """`runs/model` is a prefix, and there are logs in the folder runs/model/."""
  src = _save(tmp_path / "runs")
  _save(tmp_path / "runs" / "model", {**_weights(77.0), "global_step": 1})
  weight, optimizer = _weight(), _momentum()
  migration.convert_checkpoint(src, tmp_path / "new", [weight], optimizer)
  assert weight.numpy().tolist() == [1.0, 2.0]
  assert int(optimizer.iterations) == 7


def test_an_empty_folder_of_the_same_name(tmp_path: Path) -> None:
  src = _save(tmp_path / "runs")
  (tmp_path / "runs" / "model").mkdir()
  weight = _weight()
  migration.convert_checkpoint(src, tmp_path / "new", [weight], _momentum())
  assert weight.numpy().tolist() == [1.0, 2.0]


def test_parts_of_the_oldest_kind(tmp_path: Path) -> None:
  """What `Saver.save` answers for them is a pattern of their names."""
  src = _save(
    tmp_path / "runs", write_version=v1.train.SaverDef.V1, sharded=True
  )
  assert src.endswith("model-?????-of-00001")
  weight = _weight()
  migration.convert_checkpoint(src, tmp_path / "new", [weight], _momentum())
  assert weight.numpy().tolist() == [1.0, 2.0]
  other = src.replace("model", "other")
  with pytest.raises(FileNotFoundError, match="names no checkpoint"):
    migration.convert_checkpoint(
      other, tmp_path / "other", [weight], _momentum()
    )


def test_names_that_tensorflow_cannot_read(tmp_path: Path) -> None:
  src = _save(tmp_path / "runs")
  odd = tmp_path / "runs[1]"
  os.rename(tmp_path / "runs", odd)
  with pytest.raises(ValueError, match=r"`src` must have no \[ .*runs\[1\]"):
    migration.convert_checkpoint(
      src.replace("runs", "runs[1]"),
      tmp_path / "new",
      [_weight()],
      _momentum(),
    )


def test_a_source_that_is_not_there_is_told_first(tmp_path: Path) -> None:
  nowhere = tmp_path / "nowhere"
  with pytest.raises(FileNotFoundError, match=r"`src` .*nowhere"):
    migration.convert_checkpoint(
      nowhere, nowhere / "new", [_weight()], _momentum()
    )


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_count_of_another_name(tmp_path: Path, dtype: str) -> None:
  values = {**_weights(1.0), "my_step": np.array(9, dtype)}
  src = _save(tmp_path / "runs", values)
  weight, optimizer = _weight(), _momentum()
  done = migration.convert_checkpoint(
    src,
    tmp_path / "new",
    [weight],
    optimizer,
    names={"iterations": "my_step"},
  )
  assert int(optimizer.iterations) == 9
  assert done.matched["iterations"] == "my_step"
  assert not done.unmatched_in_checkpoint


def test_a_count_that_a_weight_has_too(tmp_path: Path) -> None:
  src = _save(tmp_path / "runs")
  step = tf.Variable(0, name="global_step", dtype="int64", trainable=False)
  optimizer = _momentum()
  migration.convert_checkpoint(
    src,
    tmp_path / "new",
    [_weight(), step],
    optimizer,
    names={"iterations": "global_step"},
  )
  assert int(step.numpy()) == int(optimizer.iterations) == 7


@pytest.mark.parametrize(
  ("value", "words"),
  [
    ("absent", "it is not there"),
    ("w", r"it is float32 \[2\]"),
    ("half", r"it is float32 \[\]"),
  ],
)
def test_what_is_no_count(tmp_path: Path, value: str, words: str) -> None:
  values = {**_weights(1.0), "half": np.float32(0.5)}
  src = _save(tmp_path / "runs", values)
  optimizer = _momentum()
  with pytest.raises(ValueError, match=rf"`names` says .*{words}"):
    migration.convert_checkpoint(
      src,
      tmp_path / "new",
      [_weight()],
      optimizer,
      names={"iterations": value},
    )
  assert not adapters.adapter_of(optimizer).is_built


def test_a_momentum_of_rmsprop_is_not_left_out(tmp_path: Path) -> None:
  """Plain Keras' may be forgotten; that of `from_v1` is known to be 0."""
  rows = np.array([0.5, 0.25], "float32")
  values = {
    "w": rows,
    "w/RMSProp": rows,
    "w/RMSProp_1": rows,
    "global_step": np.int64(7),
  }
  src = _save(tmp_path / "runs", values)
  plain = tf.keras.optimizers.RMSprop(0.5)
  with pytest.raises(
    ValueError, match=r"in the checkpoint only:\s+w/RMSProp_1"
  ):
    migration.convert_checkpoint(src, tmp_path / "a", [_weight()], plain)
  allow = ["w/RMSProp_1"]
  done = migration.convert_checkpoint(
    src, tmp_path / "b", [_weight()], plain, allow_unmatched=allow
  )
  assert done.unmatched_in_checkpoint == {"w/RMSProp_1": (2,)}
  ours = migration.from_v1(v1.train.RMSPropOptimizer(0.5))
  done = migration.convert_checkpoint(src, tmp_path / "c", [_weight()], ours)
  assert not done.unmatched_in_checkpoint


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_rate_that_is_shown(tmp_path: Path, is_wrapped: bool) -> None:
  """tf_keras keeps it in a variable, which goes into the checkpoint too."""
  src = _save(tmp_path / "runs")
  schedules = tf.keras.optimizers.schedules
  rate = schedules.PiecewiseConstantDecay([6], [0.5, 0.25])
  sgd = tf.keras.optimizers.SGD(rate)
  optimizer = CrossShardOptimizer(sgd) if is_wrapped else sgd
  migration.convert_checkpoint(
    src, tmp_path / "new", [_weight()], optimizer, allow_unmatched=["w/.*"]
  )
  assert int(sgd.iterations) == 7
  assert float(sgd.learning_rate) == 0.25


PROGRAM = """
import os
import tensorflow as tf
from tf_cross_shard import (migration)

os.chdir("elsewhere")

def momentum():
  old = tf.compat.v1.train.MomentumOptimizer(0.5, 0.75)
  return [tf.Variable([0.0, 0.0], name="w")], migration.from_v1(old)
"""


def _main(*words: str) -> int:
  return command.main(["convert-checkpoint", *words])


def test_a_program_that_goes_elsewhere(
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  src, dst = _save(tmp_path / "runs"), str(tmp_path / "new")
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "program_elsewhere.py").write_text(PROGRAM)
  monkeypatch.chdir(tmp_path)
  before = list(sys.path)
  status = _main(src, dst, "--program", "program_elsewhere:momentum")
  assert (status, capsys.readouterr().err) == (0, "")
  assert sys.path == before


def test_names_that_are_no_text(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  file = tmp_path / "names.json"
  file.write_bytes(b'{"w": "\xff"}')
  words = ["--program", "os:getcwd", "--names", str(file)]
  assert _main("src", "dst", *words) == 2
  assert f"got {file}: 'utf-8' codec can't" in capsys.readouterr().err


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
