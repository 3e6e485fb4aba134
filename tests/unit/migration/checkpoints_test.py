"""Checkpoints of TensorFlow 1, and trainings that continue from them.

Sessions of TensorFlow 1 write the checkpoints, and continue themselves for
comparison.
"""

import functools
import json
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import migration_sessions as sessions
from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, keras3, migration
from tf_cross_shard import tf_keras as keras2
from tf_cross_shard_cli import __main__ as command

v1 = tf.compat.v1
BEFORE, AFTER = 7, 13
LIMIT = 1e-6
KEPT = tempfile.TemporaryDirectory()  # until the process ends


class Saved(NamedTuple):
  """A checkpoint of TensorFlow 1, and the training that followed it."""

  src: str
  losses: list[float]
  after: sessions.Arrays


def save(old: sessions.Sessions, folder: Path) -> Saved:
  old.train(0, BEFORE)
  src = old.save(folder / "model.ckpt")
  return Saved(src, old.train(BEFORE, AFTER), old.values())


@functools.cache
def saved(name: str) -> Saved:
  folder = Path(KEPT.name, name.replace(" ", "-"))
  folder.mkdir()
  return save(sessions.Sessions(sessions.OPTIMIZERS[name]), folder)


MAKERS: dict[str, Callable[[str], Any]] = {
  "keras": lambda name: sessions.plain(name, keras3),
  "keras, wrapped": lambda name: keras3.CrossShardOptimizer(
    sessions.OPTIMIZERS[name]()
  ),
  "tf_keras": lambda name: sessions.plain(name, keras2),
}
CELLS = [
  *(("keras", name) for name in sessions.OPTIMIZERS),
  ("keras, wrapped", "Adam"),
  *(("tf_keras", name) for name in ("SGD", "Momentum", "Adam", "RMSProp")),
]


def _training(maker: str, name: str, **options: Any) -> sessions.Training:
  library = tf_keras if maker.startswith("tf_keras") else keras
  network = functools.partial(sessions.network, library)
  return sessions.Training(
    lambda: MAKERS[maker](name), model=network, **options
  )


def _convert(
  training: sessions.Training, src: Any, dst: Path, **options: Any
) -> migration.Conversion:
  return migration.convert_checkpoint(
    src, dst, training.model, training.optimizer, **options
  )


def _small(folder: Path, values: dict[str, Any]) -> str:
  """Writes a checkpoint of TensorFlow 1 with these values."""
  with tf.Graph().as_default(), v1.Session() as session:
    for name, value in values.items():
      dtype = "int64" if isinstance(value, int) else "float32"
      v1.get_variable(name, initializer=np.array(value, dtype))
    session.run(v1.global_variables_initializer())
    saver = v1.train.Saver()
    return saver.save(session, str(folder / "old"), write_meta_graph=False)


def _bring(
  folder: Path, values: dict[str, Any], model: Any, opt: Any, **options: Any
) -> migration.Conversion:
  """Converts a checkpoint of TensorFlow 1 with these values."""
  new = Path(tempfile.mkdtemp(dir=folder)) / "new"
  src = _small(folder, values)
  return migration.convert_checkpoint(src, new, model, opt, **options)


def _deviation(training: sessions.Training, old: Saved) -> float:
  """Trains on; returns the largest deviation of losses and weights."""
  largest = sessions.largest(training.train(BEFORE, AFTER), old.losses)
  weights = training.model.weights
  for path, weight in zip(sessions.SHAPES, weights, strict=True):
    for copy in testbed.copies(weight):
      largest = max(largest, float(np.abs(copy - old.after[path]).max()))
  assert int(training.optimizer.iterations.numpy()) == AFTER
  return largest


@pytest.mark.parametrize(("maker", "name"), CELLS)
def test_continues_as_tensorflow_1(
  maker: str, name: str, tmp_path: Path
) -> None:
  old, training = saved(name), _training(maker, name)
  before = Path(f"{old.src}.index").read_bytes()
  slot = sessions.DROPPED.get(name)
  names = {f"{{}}/{slot}": None} if slot else None
  done = _convert(training, old.src, tmp_path / "new", names=names)
  assert int(training.optimizer.iterations) == BEFORE
  assert done.unmatched_in_model == {}
  dropped = {f"{weight}/{slot}" for weight in sessions.SHAPES if slot}
  assert set(done.unmatched_in_checkpoint) == dropped
  assert done.path == str(tmp_path / "new")
  assert _deviation(training, old) < LIMIT
  assert Path(f"{old.src}.index").read_bytes() == before


@pytest.mark.parametrize("maker", ["keras", "tf_keras"])
def test_converted_checkpoint_is_read_by_a_new_program(
  maker: str, tmp_path: Path
) -> None:
  new = tmp_path / "folder" / "new"  # which is made
  done = _convert(_training(maker, "Adam"), saved("Adam").src, new)
  other = _training(maker, "Adam")
  other.optimizer.build(other.model.trainable_variables)
  checkpoint = tf.train.Checkpoint(model=other.model, optimizer=other.optimizer)
  checkpoint.read(done.path).assert_consumed()
  assert _deviation(other, saved("Adam")) < LIMIT


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  ("is_in_scope", "options"),
  [(True, {}), (False, {}), (False, {"shard_update": "elementwise"})],
)
def test_continues_in_replicas(
  is_in_scope: bool, options: dict[str, Any], tmp_path: Path
) -> None:
  strategy = testbed.mirrored()
  make = sessions.OPTIMIZERS["Adam"]
  training = sessions.Training(
    lambda: keras3.CrossShardOptimizer(make(), **options), strategy
  )
  if is_in_scope:
    with strategy.scope():
      _convert(training, saved("Adam").src, tmp_path / "new")
  else:
    _convert(training, saved("Adam").src, tmp_path / "new")
  assert len(testbed.copies(training.model.weights[0])) == testbed.REPLICAS > 1
  assert _deviation(training, saved("Adam")) < LIMIT


def _rate() -> Any:
  step: Any = tf.Variable(0) if tf.executing_eagerly() else None
  step = v1.train.get_or_create_global_step() if step is None else step
  return v1.train.exponential_decay(0.1, step, 5, 0.5)


def test_momentum_under_a_schedule(tmp_path: Path) -> None:
  """The first step is that of TensorFlow 1."""
  make = functools.partial(v1.train.MomentumOptimizer, momentum=0.9)
  old = sessions.Sessions(lambda: make(_rate()))
  old.train(0, BEFORE)
  src = old.save(tmp_path / "model.ckpt")
  training = sessions.Training(lambda: migration.from_v1(make(_rate())))
  _convert(training, src, tmp_path / "new")
  for trained in (training, old):
    trained.train(BEFORE, BEFORE + 1)
  for path, weight in zip(sessions.SHAPES, training.model.weights, strict=True):
    np.testing.assert_allclose(weight, old.values()[path], atol=LIMIT)


@pytest.mark.tf_keras_mode
def test_renamed_layers(tmp_path: Path) -> None:
  training = sessions.Training(
    functools.partial(MAKERS["keras"], "Adam"),
    model=lambda: sessions.network(keras, "first"),
  )
  src = saved("Adam").src
  with pytest.raises(ValueError, match=r"optimizer only:\n  first/bias \[3\]"):
    _convert(training, src, tmp_path / "new")
  names = {f"first/{x}": f"one/{x}" for x in ("kernel", "bias")}
  done = _convert(training, src, tmp_path / "new", names=names)
  assert done.matched["first/kernel"] == "one/kernel"
  assert done.matched["first/kernel/momentum"] == "one/kernel/Adam"
  assert _deviation(training, saved("Adam")) < LIMIT


def test_names_for_every_weight(tmp_path: Path) -> None:
  """Moving averages of a model whose variables had a scope around them."""
  average = "bert/{}/ExponentialMovingAverage"
  values: dict[str, Any] = {"global_step": 1, "bert/head": [7.0]}
  for i, name in enumerate("ab"):
    values |= {f"bert/{name}": [i], average.replace("{}", name): [i + 0.5]}
  weights = [tf.Variable([0.0], name=name) for name in "ab"]
  arguments = tmp_path, values, weights, keras.optimizers.SGD()
  words = r"checkpoint only:\n  bert/a \[1\]\n  bert/b \[1\]\n  bert/head"
  with pytest.raises(ValueError, match=words):
    _bring(*arguments, names={"{}": average})
  names = {"{}": average, "bert/a": None, "bert/b": None, "{}/head": None}
  done = _bring(*arguments, names=names)
  assert [weight.numpy().tolist() for weight in weights] == [[0.5], [1.5]]
  assert done.unmatched_in_checkpoint.keys() == {
    "bert/a",
    "bert/b",
    "bert/head",
  }


def test_leave_out_weights_and_values(tmp_path: Path) -> None:
  """Leaves out a weight with its slots, and a value that is replaced."""
  values = {"w": [1.0], "w/Momentum": [2.0], "new/Momentum": [9.0]}
  values |= {"w/average": [3.0], "global_step": 5}
  weights = [tf.Variable([8.0], name=name) for name in ("w", "new")]
  sgd = keras.optimizers.SGD(1.0, momentum=0.5)
  names = {"w": "w/average", "w/momentum": "w/Momentum", "new{}": None}
  done = _bring(tmp_path, values, weights, sgd, names=names)
  assert [weight.numpy().tolist() for weight in weights] == [[3.0], [8.0]]
  slots = [v.numpy().tolist() for v in sgd.variables if len(v.shape)]
  assert slots == [[-2.0], [0.0]]
  assert done.unmatched_in_checkpoint == {"new/Momentum": (1,), "w": (1,)}
  assert done.unmatched_in_model == {"new": (1,)}


def test_modules_and_equal_names(tmp_path: Path) -> None:
  def bring(model: Any, names: dict[str, str | None]) -> Any:
    values = {"w": [1.0], "c": [3.0], "global_step": 5}
    return _bring(tmp_path, values, model, keras.optimizers.SGD(), names=names)

  weights = [tf.Variable([0.0], name="w") for _ in range(2)]
  with pytest.raises(ValueError, match=r"optimizer only:\n  w \[1\]\n"):
    bring(weights, {"w#2": "w"})
  done = bring(weights, {"w": "c", "w#2": "w"})
  assert done.matched.keys() == {"w", "w#2", "iterations"}
  assert [weight.numpy().tolist() for weight in weights] == [[3.0], [1.0]]
  module = tf.Module()
  module.w = tf.Variable([0.0], name="w")
  bring(module, {"c": None})
  assert module.w.numpy().tolist() == [1.0]


def test_weights_that_are_not_trained(tmp_path: Path) -> None:
  """Statistics are restored; random states and metrics are not."""

  def make() -> Any:
    layers = [
      keras.layers.BatchNormalization(name="norm"),
      keras.layers.Dropout(0.5, seed=1),
      keras.layers.Dense(2, name="frozen", use_bias=False, trainable=False),
    ]
    model = keras.Sequential([keras.Input((2,)), *layers], name="net")
    model.compile("sgd", "mse", metrics=["mae"])
    return model

  values: dict[str, Any] = {
    "norm/gamma": [1.0, 2.0],
    "norm/beta": [3.0, 4.0],
    "norm/moving_mean": [5.0, 6.0],
    "norm/moving_variance": [7.0, 8.0],
    "frozen/kernel": [[1.0, 2.0], [3.0, 4.0]],
    "norm/gamma/Momentum": [1.0, 1.0],
    "norm/beta/Momentum": [2.0, 2.0],
    "global_step": 3,
  }
  training = sessions.Training(
    lambda: CrossShardOptimizer(sessions.plain("Momentum")),
    testbed.mirrored(),
    make,
  )
  done = _convert(training, _small(tmp_path, values), tmp_path / "new")
  assert len(done.matched) == len(values)
  for weight in training.model.weights:
    copies = testbed.copies(weight)
    assert len(copies) == testbed.REPLICAS
    for copy in copies:
      assert copy.tolist() == values[weight.path.removeprefix("net/")]


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("is_v1", [True, False])
def test_the_count_of_steps(is_v1: bool, tmp_path: Path) -> None:
  weight = tf.Variable([0.0, 0.0], name="w")
  sgd: Any = keras.optimizers.SGD()
  if is_v1:
    sgd = migration.from_v1(v1.train.GradientDescentOptimizer(_rate()))
  cases: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"scope/global_step": 7}, {}, 7),
    ({"global_step": 7}, {"iterations": 9}, 9),
    ({}, {"iterations": 9}, 9),
    ({"my_step": 7}, {"names": {"iterations": "my_step"}}, 7),
  ]
  for values, options, steps in cases:
    _bring(tmp_path, {"w": [1.0, 2.0], **values}, [weight], sgd, **options)
    assert int(sgd.iterations) == steps
  for values in ({}, {"a/global_step": 1, "b/global_step": 2}):
    with pytest.raises(
      ValueError, match=r"iterations \[\]\n.*iterations=STEPS"
    ):
      _bring(tmp_path, {"w": [1.0, 2.0], **values}, [weight], sgd)


def test_a_loss_scale_stays(tmp_path: Path) -> None:
  scaling = keras.optimizers.LossScaleOptimizer
  training = sessions.Training(
    lambda: CrossShardOptimizer(scaling(MAKERS["keras"]("Adam")))
  )
  done = _convert(training, saved("Adam").src, tmp_path / "new")
  assert done.unmatched_in_model == {}
  assert int(training.optimizer.iterations) == BEFORE


class TestErrors:
  """No variable is changed if an error is raised."""

  @pytest.fixture
  def src(self, tmp_path: Path) -> str:
    return _small(tmp_path, {"w": [1.0, 2.0], "global_step": 1})

  @pytest.mark.parametrize(
    ("options", "error", "words"),
    [
      ({"src": "none"}, tf.errors.NotFoundError, "none"),
      ({"src": "empty"}, tf.errors.OpError, "empty; Is a directory"),
      ({"dst": "old"}, FileExistsError, "`dst` is 'old'.*delete the existing"),
      ({"model": []}, ValueError, "`model` has no variables yet: got list"),
      ({"names": {"v": "w"}}, ValueError, "in `names` only:\n  v"),
      ({"names": {"{}/m": "{}/v"}}, ValueError, "in `names` only:\n  {}/m"),
      ({"names": {"w": "v"}}, ValueError, "`w` is 'v', which .* does not"),
      ({"names": {"iterations": "w"}}, ValueError, "value of iterations and"),
      (
        {"model": [tf.Variable(0, name="w")]},
        ValueError,
        r"differ:\n  w: int32 \[\] in the model, float32 \[2\] in w",
      ),
    ],
  )
  def test_arguments(
    self,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
    src: str,
    monkeypatch: pytest.MonkeyPatch,
  ) -> None:
    monkeypatch.chdir(Path(src).parent)
    Path("empty").mkdir()
    weight = tf.Variable([0.0, 0.0], name="w")
    arguments = {
      "src": "old",
      "dst": "new",
      "model": [weight],
      "optimizer": keras.optimizers.SGD(),
    }
    with pytest.raises(error, match=words):
      migration.convert_checkpoint(**{**arguments, **options})
    assert weight.numpy().tolist() == [0.0, 0.0]
    assert not list(Path().glob("new*"))

  def test_a_checkpoint_of_version_2(self, tmp_path: Path) -> None:
    weight = tf.Variable([1.0], name="w")
    second = tf.train.Checkpoint(w=weight).write(str(tmp_path / "second"))
    with pytest.raises(ValueError, match=r"is one of TensorFlow 2\. Read it"):
      migration.convert_checkpoint(
        second, tmp_path / "new", [weight], keras.optimizers.SGD()
      )

  def test_in_a_function(self, src: str, tmp_path: Path) -> None:
    weight = tf.Variable([0.0, 0.0], name="w")
    convert = tf.function(migration.convert_checkpoint, autograph=False)
    with pytest.raises(RuntimeError, match="only eagerly"):
      convert(src, tmp_path / "new", [weight], keras.optimizers.SGD())


PROGRAM = """
  from tests.support import migration_sessions as sessions
  from tf_cross_shard import CrossShardOptimizer

  def momentum():
    return sessions.network(), CrossShardOptimizer(sessions.plain("Momentum"))

  def nothing():
    pass
"""


def test_the_command_line(
  capsys: pytest.CaptureFixture[str],
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  (tmp_path / "a_program.py").write_text(textwrap.dedent(PROGRAM))
  monkeypatch.chdir(tmp_path)
  old = sessions.Sessions(
    lambda: v1.train.MomentumOptimizer(0.1, 0.9, name="mine"), with_step=False
  )
  words = ["convert-checkpoint", old.save(tmp_path / "old"), "new"]
  nothing = [*words, "--program", "a_program:nothing"]
  assert command.main(nothing) == 2
  assert "must return a model and an optimizer" in capsys.readouterr().err
  words += ["--program", "a_program:momentum"]
  assert command.main(words) == 2
  assert "or iterations=STEPS" in capsys.readouterr().err
  Path("names.json").write_text(json.dumps({"{}/momentum": "{}/mine"}))
  words += ["--iterations", "3", "--names"]
  assert command.main([*words, "names.json"]) == 0
  out = capsys.readouterr().out
  assert out.startswith("new: 9 variables\n")
  assert "one/kernel/mine\n" in out
  assert Path("new.index").exists()
