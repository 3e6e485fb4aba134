"""Checkpoints of TensorFlow 1, and trainings that continue from them.

Sessions of TensorFlow 1 write the checkpoints, and continue themselves for
comparison.
"""

import functools
import itertools
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
  return save(sessions.Sessions(sessions.PAIRS[name].v1), folder)


MAKERS: dict[str, Callable[[str], Any]] = {
  "keras": lambda name: sessions.plain(name, keras.optimizers),
  "keras, wrapped": lambda name: CrossShardOptimizer(sessions.plain(name)),
  "keras, from_v1": lambda name: keras3.CrossShardOptimizer(
    sessions.PAIRS[name].v1()
  ),
  "tf_keras": lambda name: sessions.plain(name, tf_keras.optimizers),
  "tf_keras, from_v1": lambda name: keras2.CrossShardOptimizer(
    sessions.PAIRS[name].v1()
  ),
}
TWO_SLOTS = ["Adam", "Adadelta", "RMSProp", "Ftrl"]
CELLS = [
  *(("keras", name) for name in ("Momentum", "Adagrad", *TWO_SLOTS)),
  ("keras", "RMSProp centered only"),
  ("keras, wrapped", "Adam"),
  *(("keras, from_v1", name) for name in ("SGD", *TWO_SLOTS)),
  ("keras, from_v1", "RMSProp centered only"),
  *(("tf_keras", name) for name in ("Momentum", "RMSProp centered")),
  *(("tf_keras, from_v1", name) for name in ("SGD", "Adam")),
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
  slot = None if "v1" in maker else sessions.PAIRS[name].dropped
  names = {f"{{}}/{slot}": None} if slot else None
  done = _convert(training, old.src, tmp_path / "new", names=names)
  assert int(training.optimizer.iterations) == BEFORE
  assert done.unmatched_in_model == {}
  dropped = {f"{weight}/{slot}" for weight in sessions.SHAPES if slot}
  assert set(done.unmatched_in_checkpoint) == dropped
  assert done.path == str(tmp_path / "new")
  assert _deviation(training, old) < LIMIT
  assert Path(f"{old.src}.index").read_bytes() == before


@pytest.mark.parametrize("maker", [m for m in MAKERS if m != "keras, wrapped"])
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
  make = sessions.PAIRS["Adam"].v1
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
  make = functools.partial(v1.train.MomentumOptimizer, momentum=0.9)
  old = save(sessions.Sessions(lambda: make(_rate())), tmp_path)
  training = sessions.Training(lambda: migration.from_v1(make(_rate())))
  _convert(training, old.src, tmp_path / "new")
  assert _deviation(training, old) < LIMIT
  schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
  plain = sessions.Training(lambda: keras.optimizers.SGD(schedule, 0.9))
  words = (
    r"`optimizer` is SGD, whose momentum includes the learning rate.*from_v1"
  )
  with pytest.raises(ValueError, match=words):
    _convert(plain, old.src, tmp_path / "other")


@pytest.mark.parametrize(
  ("name", "scope", "first"),
  [
    ("my_1", "", None),  # from_v1 takes the name over.
    ("my/adam", "", "{}/my/adam"),
    ("Adam", "training", "training/{}/Adam"),
  ],
)
def test_names_of_slots(
  name: str, scope: str, first: str | None, tmp_path: Path
) -> None:
  make = functools.partial(v1.train.AdamOptimizer, 0.01, name=name)
  old = save(sessions.Sessions(make, scope=scope), tmp_path)
  plain = sessions.Training(lambda: keras.optimizers.Adam(0.01))
  words = r'(?s)only:.*names=\{"\{\}/momentum": "\{\}/..."\}'
  with pytest.raises(ValueError, match=words):
    _convert(plain, old.src, tmp_path / "new")
  training = sessions.Training(lambda: migration.from_v1(make()))
  names = first and {"{}/momentum": first, "{}/velocity": f"{first}_1"}
  done = _convert(training, old.src, tmp_path / "new", names=names)
  assert done.unmatched_in_checkpoint == done.unmatched_in_model == {}
  assert _deviation(training, old) < LIMIT


def _own(library: Any, base: str, names: tuple[str, ...]) -> Any:
  """An optimizer of a class that the user wrote, with slots of these names."""

  class Own(getattr(library.optimizers, base)):  # type: ignore[misc]
    def build(self, variables: Any) -> None:
      super().build(variables)
      for name in names:
        made = [self.add_variable_from_reference(v, name) for v in variables]
        setattr(self, f"_{name}", made)

  return Own(0.5)


BERT = ("adam_m", "adam_v")
LAMB = {"{}/momentum": "{}/adam_m", "{}/velocity": "{}/adam_v"}
OWN: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
  "own names": (lambda: _own(keras, "Optimizer", BERT), {}),
  "more than SGD has": (
    lambda: CrossShardOptimizer(_own(tf.keras, "SGD", BERT)),
    {},
  ),
  "other names": (
    lambda: _own(keras, "Optimizer", ("m", "v")),
    {"{}/m": "{}/adam_m", "{}/v": "{}/adam_v"},
  ),
  "derived from Adam": (lambda: _own(keras, "Adam", ()), LAMB),
  "tf_keras": (lambda: _own(tf_keras, "SGD", BERT), {}),
}


@pytest.mark.parametrize("name", OWN)
def test_slots_of_classes_that_the_user_wrote(
  name: str, tmp_path: Path
) -> None:
  """Custom TensorFlow 1 optimizers choose the names of their slots."""
  values: dict[str, Any] = {"a/kernel": [1.0, 2.0], "a/bias": [3.0, 4.0]}
  values |= {
    f"{weight}/{slot}": [i + 0.5, i + 0.25]
    for i, (weight, slot) in enumerate(itertools.product([*values], BERT))
  }
  weights = [tf.Variable([0.0, 0.0], name=n) for n in ("a/kernel", "a/bias")]
  make, names = OWN[name]
  made = make()
  steps = {"global_step": 6}
  done = _bring(tmp_path, values | steps, weights, made, names=names)
  assert done.unmatched_in_checkpoint == done.unmatched_in_model == {}
  variables = {v.name: v.numpy().tolist() for v in testbed.variables_of(made)}
  for label, source in done.matched.items():
    weight, _, slot = label.rpartition("/")
    if weight.startswith("a/"):
      assert source == names.get(f"{{}}/{slot}", label).replace("{}", weight)
      [value] = [
        value
        for key, value in variables.items()
        if slot in key and weight[2:] in key
      ]
      assert value == values[source]
  assert len(done.matched) == 7
  assert int(made.iterations) == 6


def test_second_optimizer_of_a_graph(tmp_path: Path) -> None:
  """Each optimizer has its own powers; both count in the global step."""
  values: dict[str, Any] = {"w": [1.0, 2.0], "global_step": 9}
  for i in range(4):
    values[f"w/Adam_{i}".removesuffix("_0")] = [i, i + 0.5]
  for i in range(2):
    values[f"beta1_power_{i}".removesuffix("_0")] = 0.5 + i / 4
    values[f"beta2_power_{i}".removesuffix("_0")] = 0.25 + i / 4
  weight = tf.Variable([0.0, 0.0], name="w")
  made = migration.from_v1(v1.train.AdamOptimizer())
  with pytest.raises(ValueError, match=r"checkpoint only:(?s:.*)  w/Adam_2 "):
    _bring(tmp_path, values, [weight], made)
  done = _bring(
    *(tmp_path, values, [weight], made),
    names={"w/momentum": "w/Adam_2", "w/velocity": "w/Adam_3"}
    | {"w/Adam": None, "w/Adam_1": None, "beta{}_power": None}
    | {f"beta{n}_power": f"beta{n}_power_1" for n in (1, 2)},
    iterations=4,
  )
  slots = [made.get_slot(weight, n).numpy() for n in ("momentum", "velocity")]
  assert np.array(slots).tolist() == [[2.0, 2.5], [3.0, 3.5]]
  assert float(made.inner_optimizer.beta1_power) == 0.75
  assert float(made.inner_optimizer.beta2_power) == 0.5
  assert int(made.iterations) == 4
  assert sorted(done.unmatched_in_checkpoint) == [
    *("beta1_power", "beta2_power", "w/Adam", "w/Adam_1")
  ]


@pytest.mark.parametrize("version", [1, 2])
def test_partitioned_variables_and_kinds_of_files(
  version: int, tmp_path: Path
) -> None:
  """TensorFlow 1 shortens slot names inside a scope."""
  is_second = version == 2
  with tf.Graph().as_default(), v1.Session() as session:
    parts = v1.fixed_size_partitioner(2 if is_second else 1)
    with v1.variable_scope("emb", partitioner=parts if is_second else None):
      w = v1.get_variable("w", initializer=tf.reshape(tf.range(8.0), (4, 2)))
    step = v1.train.get_or_create_global_step()
    loss = tf.reduce_sum(tf.convert_to_tensor(w) ** 2)
    train = v1.train.MomentumOptimizer(0.5, 0.5).minimize(loss, step)
    session.run(v1.global_variables_initializer())
    session.run(train)
    src = v1.train.Saver(write_version=version).save(
      session, str(tmp_path / "old"), write_meta_graph=False
    )
  weight = tf.Variable(tf.zeros((4, 2)), name="emb/w")
  made = migration.from_v1(v1.train.MomentumOptimizer(0.5, 0.5))
  migration.convert_checkpoint(src, tmp_path / "new", [weight], made)
  # The gradient is twice the weight: all of it is gone, and sums up.
  assert weight.numpy().tolist() == np.zeros((4, 2)).tolist()
  expected = 2 * np.arange(8.0).reshape(4, 2)
  assert made.get_slot(weight, "momentum").numpy().tolist() == expected.tolist()


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("head", ["", "net/"])
def test_renamed_layers(head: str, tmp_path: Path) -> None:
  training = sessions.Training(
    functools.partial(MAKERS["keras, from_v1"], "Adam"),
    model=lambda: sessions.network(keras, "first"),
  )
  src = saved("Adam").src
  with pytest.raises(ValueError, match=r'names=\{"net/first/bias": "\.\.\."\}'):
    _convert(training, src, tmp_path / "new")
  names = {f"{head}first/{x}": f"one/{x}" for x in ("kernel", "bias")}
  done = _convert(training, src, tmp_path / "new", names=names)
  assert done.matched["net/first/kernel"] == "one/kernel"
  assert done.matched["net/first/kernel/momentum"] == "one/kernel/Adam"
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
  assert done.unmatched_in_model == {"new": (1,), "new/momentum": (1,)}


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
    with pytest.raises(ValueError, match=r"iterations \[\]\nPass iterations=S"):
      _bring(tmp_path, {"w": [1.0, 2.0], **values}, [weight], sgd)


@pytest.mark.parametrize("is_around", [True, False])
def test_a_loss_scale_stays(is_around: bool, tmp_path: Path) -> None:
  scaling = keras.optimizers.LossScaleOptimizer

  def make() -> Any:
    if is_around:
      return scaling(MAKERS["keras, from_v1"]("Adam"))
    return CrossShardOptimizer(scaling(sessions.plain("Adam")))

  training = sessions.Training(make)
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
      (
        {"optimizer": tf_keras.optimizers.legacy.Adam()},
        TypeError,
        "`optimizer` is Adam, one of tf_keras.optimizers.legacy",
      ),
      ({"names": {"v": "w"}}, ValueError, "in `names` only: v\\nPass names"),
      ({"names": {"{}/m": "{}/v"}}, ValueError, "in `names` only: {}/m"),
      ({"names": {"w": "v"}}, ValueError, "`w` is 'v', which .* does not"),
      (
        {"names": {"iterations": "w"}},
        ValueError,
        "value of both w and iterations",
      ),
      (
        {"model": [tf.Variable(0, name="w")]},
        ValueError,
        r"differ:\n  w is int32 \[\]; w in the checkpoint is float32 \[2\]",
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

  def test_unmatched_variables_are_listed_in_the_error(
    self, tmp_path: Path
  ) -> None:
    """The checkpoint is from another optimizer."""
    training = sessions.Training(lambda: sessions.plain("Adam"))
    before = [w.numpy().tolist() for w in training.model.weights]
    with pytest.raises(ValueError, match="Not everything has a") as caught:
      _convert(training, saved("Momentum").src, tmp_path / "new")
    assert [w.numpy().tolist() for w in training.model.weights] == before
    text = str(caught.value)
    assert "in the checkpoint only:\n  one/bias/Momentum [3]\n" in text
    for weight, slot in itertools.product(
      sessions.SHAPES, ("momentum", "velocity")
    ):
      assert f"  net/{weight}/{slot} [" in text
    assert text.endswith(
      'Pass names={"net/one/bias/momentum": "..."} or'
      ' names={"{}/momentum": "{}/..."} or names={"one/bias/Momentum": None};'
      " or add the missing variables to the model or the optimizer."
    )

  def test_in_a_function(self, src: str, tmp_path: Path) -> None:
    weight = tf.Variable([0.0, 0.0], name="w")
    convert = tf.function(migration.convert_checkpoint, autograph=False)
    with pytest.raises(RuntimeError, match="is converted eagerly; this is in"):
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
  assert "Pass iterations=STEPS or names=" in capsys.readouterr().err
  Path("names.json").write_text(json.dumps({"{}/momentum": "{}/mine"}))
  words += ["--iterations", "3", "--names"]
  assert command.main([*words, "names.json"]) == 0
  out = capsys.readouterr().out
  assert out.startswith("new: 9 variables\n")
  assert "one/kernel/mine\n" in out
  assert Path("new.index").exists()
