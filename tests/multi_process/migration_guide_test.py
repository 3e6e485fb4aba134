"""docs/migration.md: its Python runs, and its tables leave nothing out."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tf_cross_shard
from tests.support import pages, programs, testbed
from tf_cross_shard import migration

PAGE = "docs/migration.md"
MINIMIZE = (
  "global_step",
  "var_list",
  "gate_gradients",
  "aggregation_method",
  "colocate_gradients_with_ops",
  "name",
  "grad_loss",
)
# The shapes of the model that users' optimizers train.
SHAPES = {
  "word/embeddings": (5, 4),
  "LayerNorm/gamma": (4,),
  "LayerNorm/beta": (4,),
  "dense/kernel": (4, 1),
  "dense/bias": (1,),
}
# The slots of Keras' classes, and the names of these slots in TensorFlow 1.
SLOTS: dict[str, dict[str, str]] = {
  "bert": {},
  "lamb": {"momentum": "adam_m", "velocity": "adam_v"},
  "lars": {"momentum": "LARSOptimizer"},
}
v1 = tf.compat.v1.train
# The arguments of the optimizers of TensorFlow 1 that have no defaults.
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
  "AdagradDAOptimizer": lambda: {
    "learning_rate": 0.1,
    "global_step": tf.Variable(0, dtype=tf.int64),
  },
  "MomentumOptimizer": lambda: {"learning_rate": 0.1, "momentum": 0.9},
  "RMSPropOptimizer": lambda: {"learning_rate": 0.1, "momentum": 0.9},
  "SyncReplicasOptimizer": lambda: {
    "opt": v1.AdamOptimizer(),
    "replicas_to_aggregate": 2,
  },
}


def rows(table: str) -> list[list[str]]:
  """Returns the cells of a table between two comments."""
  [text] = re.findall(
    rf"<!-- {table} -->\n(.*?)<!-- /{table} -->", pages.text(PAGE), re.S
  )
  lines = text.strip().splitlines()
  assert re.fullmatch(r"[|-]+", lines[1])
  return [[cell.strip() for cell in x[1:-1].split("|")] for x in lines[2:]]


def run(program: str, folder: Path, **environment: str) -> str:
  """Runs a program in a separate process.

  Returns the output, and checks that this package has logged no warning.
  """
  (folder / "program.py").write_text(program)
  printed = programs.run(["program.py"], folder, **environment)
  assert "WARNING:absl" not in printed, printed
  return re.sub("(?m)^WARNING:.*\n", "", printed)


def make(name: str) -> Any:
  """Creates an optimizer of TensorFlow 1."""
  options = SETTINGS.get(name, dict)()
  kind = getattr(v1, name)
  if not options and "learning_rate" in inspect.signature(kind).parameters:
    options = {"learning_rate": 0.1}
  return kind(**options)


def test_cross_shard_program_continues(tmp_path: Path) -> None:
  before, after, towers, read, *_ = pages.blocks(PAGE, "python")
  assert "TowerOptimizer" in towers
  # The third block reads what it wrote into other variables.
  more = "\nfor v in model.trainable_variables: v.assign(0 * v)\n"
  more += read + "\nloss = tf.reduce_mean(model(tf.constant(rows)) ** 2)"
  more += "\nprint(f'{optimizer.iterations.numpy()} steps: {float(loss):.5f}')"
  printed = run(before + after + more, tmp_path)
  [expected, _] = pages.blocks(PAGE, "text")
  assert expected in printed
  lines = [line.split(": ")[1] for line in expected.splitlines()]
  assert lines[:2] == lines[2:]
  assert printed.splitlines()[-1] == f"3 steps: {lines[0]}"


@pytest.mark.parametrize("keras", ["0", "1"])
def test_towers_program(tmp_path: Path, keras: str) -> None:
  [_, expected] = pages.blocks(PAGE, "text")
  program = pages.blocks(PAGE, "python")[2]
  assert expected in run(program, tmp_path, TF_USE_LEGACY_KERAS=keras)


def slot(w: Any, name: str) -> Any:
  """Creates a slot of `w`, as users' optimizers of TensorFlow 1 did."""
  zeros = tf.compat.v1.zeros_initializer()
  return tf.compat.v1.get_variable(f"{w.op.name}/{name}", w.shape, None, zeros)


def bert(grad: Any, w: Any, step: Any) -> list[Any]:
  """Returns BERT's update: warm-up of 3 steps, 20 steps, decay 0.01."""
  rate = v1.polynomial_decay(0.05, step, 20, 0.0, power=1.0)
  done = tf.cast(step, tf.float32) / 3
  rate = tf.where(step < 3, 0.05 * done, rate)
  m, v = slot(w, "adam_m"), slot(w, "adam_v")
  next_m, next_v = m + (grad - m) * 0.1, v + (grad * grad - v) * 0.001
  update = next_m / (next_v**0.5 + 1e-6)
  if not re.search("LayerNorm|bias", w.op.name):
    update += w * 0.01
  return [w.assign(w - rate * update), m.assign(next_m), v.assign(next_v)]


def lamb(grad: Any, w: Any, step: Any) -> list[Any]:
  """Returns LAMB's update, without weight decay and with bias correction."""
  t = tf.cast(step, tf.float32) + 1
  m, v = slot(w, "adam_m"), slot(w, "adam_v")
  next_m, next_v = m + (grad - m) * 0.1, v + (grad * grad - v) * 0.001
  update = next_m / (1 - 0.9**t)
  update /= (next_v / (1 - 0.999**t)) ** 0.5 + 1e-6
  ratio = tf.norm(w) / tf.norm(update)
  ratio = tf.where((tf.norm(w) > 0) & (tf.norm(update) > 0), ratio, 1.0)
  return [
    w.assign(w - 0.05 * ratio * update),
    m.assign(next_m),
    v.assign(next_v),
  ]


def lars(grad: Any, w: Any, step: Any) -> list[Any]:
  """Returns LARS' update: Momentum with a learning rate for each weight."""
  del step
  rate = tf.constant(0.5)
  if "bias" not in w.op.name:
    both = 0.1 * tf.norm(w) / (tf.norm(grad) + 0.01 * tf.norm(w))
    rate *= tf.where((tf.norm(w) > 0) & (tf.norm(grad) > 0), both, 1.0)
    grad += 0.01 * w
  momentum = v1.MomentumOptimizer(rate, 0.9, name="LARSOptimizer")
  return [momentum.apply_gradients([(grad, w)])]


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns different gradients for each of four replicas."""
  rng = np.random.default_rng([3, step])
  x = rng.integers(0, 5, (testbed.REPLICAS, 2, 3)).astype("int32")
  return x, 3 * rng.normal(size=(testbed.REPLICAS, 2, 1)).astype("float32")


class Then:
  """A training in TensorFlow 1.

  The gradients of four replicas are clipped and then added.
  """

  def __init__(self, update: Callable[[Any, Any, Any], list[Any]]) -> None:
    rng = np.random.default_rng(1)
    with tf.Graph().as_default():
      self.feeds = [
        tf.compat.v1.placeholder(x.dtype, x.shape) for x in batch(0)
      ]
      words, gamma, beta, kernel, bias = w = [
        tf.compat.v1.get_variable(
          name, initializer=rng.normal(size=shape).astype("float32")
        )
        for name, shape in SHAPES.items()
      ]
      losses, clipped = [], []
      for x, y in zip(*map(tf.unstack, self.feeds), strict=True):
        hidden = tf.reduce_mean(tf.gather(words, x), axis=1)
        mean, variance = tf.nn.moments(hidden, -1, keepdims=True)
        normal = (hidden - mean) / tf.sqrt(variance + 1e-3) * gamma + beta
        losses.append(tf.reduce_mean((normal @ kernel + bias - y) ** 2))
        grads = map(tf.convert_to_tensor, tf.gradients(losses[-1], w))
        clipped.append(tf.clip_by_global_norm(list(grads), 1.0))
      step = v1.get_or_create_global_step()
      updates = []
      for i, weight in enumerate(w):
        grad = tf.add_n([grads[i] for grads, _ in clipped])
        updates += update(grad, weight, step)
      with tf.control_dependencies(updates):
        train = step.assign_add(1)
      norms = [norm for _, norm in clipped]
      self.fetches = [tf.reduce_mean(losses), norms, train]
      self.variables = {v.op.name: v for v in tf.compat.v1.global_variables()}
      self.saver = v1.Saver()
      self.session = tf.compat.v1.Session()
      self.session.run(tf.compat.v1.global_variables_initializer())

  def train(self, start: int, end: int) -> list[float]:
    """Returns the losses before each step."""
    done = [
      self.session.run(
        self.fetches, dict(zip(self.feeds, batch(i), strict=True))
      )
      for i in range(start, end)
    ]
    assert max(max(norms) for _, norms, _ in done) > 1  # Clipping is at work.
    return [float(loss) for loss, _, _ in done]


@pytest.mark.parametrize("kind", ["bert", "lamb", "lars"])
def test_custom_optimizers_continue_the_training(
  kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The page's classes, and Keras' Lamb, on four replicas with other data."""
  monkeypatch.chdir(tmp_path)
  then = Then({"bert": bert, "lamb": lamb, "lars": lars}[kind])
  then.train(0, 5)
  with then.session.graph.as_default():
    then.saver.save(then.session, "bert")
  strategy = testbed.mirrored()
  layers = tf.keras.layers
  with strategy.scope():
    model = tf.keras.Sequential(
      [
        tf.keras.Input([3], dtype="int32"),
        layers.Embedding(5, 4, name="word"),
        layers.GlobalAveragePooling1D(),
        layers.LayerNormalization(epsilon=1e-3, name="LayerNorm"),
        layers.Dense(1, name="dense"),
      ]
    )
  names: dict[str, Any] = {"strategy": strategy, "model": model}
  classes, use, lars_class = pages.blocks(PAGE, "python")[4:]
  exec(classes, names)
  exec(lars_class, names)
  if kind == "bert":
    settings = "5e-5, warmup_steps=1000, steps=10000"
    assert settings in use
    exec(use.replace(settings, "0.05, warmup_steps=3, steps=20"), names)
    optimizer = names["optimizer"]
  else:
    with strategy.scope():
      inner = (
        tf.keras.optimizers.Lamb(0.05, epsilon=1e-6)
        if kind == "lamb"
        else names["LARS"](0.5, decay=0.01, eeta=0.1, exclude=["bias"])
      )
      optimizer = tf_cross_shard.CrossShardOptimizer(
        inner, "sum", global_clipnorm=1.0
      )
      migration.convert_checkpoint(
        *("bert", "bert_converted", model, optimizer),
        names={f"{{}}/{n}": f"{{}}/{old}" for n, old in SLOTS[kind].items()},
      )

  @tf.function(autograph=False)
  def train_step(xs: Any, ys: Any) -> Any:
    def replica_step() -> Any:
      x, y = (tf.gather(of_all, testbed.replica_id()) for of_all in (xs, ys))
      loss = tf.reduce_mean((model(x) - y) ** 2)
      optimizer.minimize(loss, var_list=model.trainable_variables)
      return loss

    return strategy.reduce("MEAN", strategy.run(replica_step), axis=None)

  losses = [float(train_step(*batch(i))) for i in range(5, 15)]
  np.testing.assert_allclose(losses, then.train(5, 15), rtol=1e-5)
  assert losses[-1] != losses[0]
  expected = then.session.run(then.variables)
  for name, weight in zip(SHAPES, model.weights, strict=True):
    variables = {name: weight} | {
      f"{name}/{SLOTS[kind].get(slot, slot)}": optimizer.get_slot(weight, slot)
      for slot in optimizer.get_slot_names()
    }
    for source, variable in variables.items():
      for copy in testbed.copies(variable):
        np.testing.assert_allclose(
          copy, expected[source], rtol=1e-4, atol=1e-5, err_msg=source
        )
  assert len(variables) > 1
  # What a class is made of can be saved.
  inner = optimizer.inner_optimizer
  again = type(inner).from_config(inner.get_config(), names)
  assert again.get_config() == inner.get_config()


@pytest.mark.parametrize("name", ["CrossShardOptimizer", "TowerOptimizer"])
def test_members_of_the_page_are_there(name: str) -> None:
  kind = getattr(tf_cross_shard, name)
  optimizer, arguments = kind("sgd"), inspect.signature(kind).parameters
  minimize = list(inspect.signature(kind.minimize).parameters)
  assert minimize[1:9] == ["loss", *MINIMIZE]
  then = [re.findall(r"^`(\w+)|, `(\w+)`", cell) for cell, _ in rows(name)]
  members = {a or b for cell in then for a, b in cell} - {name}
  assert {*MINIMIZE, "get_slot", "GATE_GRAPH"} < members
  for member in members - {*minimize, *arguments, "replicate_model_fn"}:
    assert hasattr(optimizer, member), member
  assert optimizer.variables() == list(optimizer.variables)


def slots_of_v1(name: str) -> set[str]:
  """Returns the slot names of an optimizer of TensorFlow 1."""
  with tf.Graph().as_default():
    optimizer = make(name)
    weight = tf.compat.v1.get_variable("w", [2])
    optimizer.minimize(tf.reduce_sum(weight))
    return set(optimizer.get_slot_names())


def names_in(cell: str) -> set[str]:
  """Returns the slot names in a table cell."""
  return set() if cell == "none" else set(cell.split(", "))


@pytest.mark.parametrize("row", rows("optimizers"), ids=lambda row: row[0])
def test_optimizers_are_converted_as_in_the_table(row: list[str]) -> None:
  v1_name, kind, then, now, _ = row
  optimizer = migration.from_v1(make(v1_name.strip("`")))
  weight = tf.Variable([1.0, 2.0])
  optimizer.build([weight])
  inner = next(
    kind
    for kind in type(optimizer.inner_optimizer).__mro__
    if kind.__module__.startswith("keras.")
  )
  assert f"`{inner.__name__}`" == kind.removesuffix(", derived")
  derived = type(optimizer.inner_optimizer) is not inner
  assert derived == kind.endswith(", derived")
  assert names_in(then) == slots_of_v1(v1_name.strip("`"))
  assert names_in(now) == set(optimizer.get_slot_names())


@pytest.mark.parametrize("row", rows("refused"), ids=lambda row: row[0])
def test_other_optimizers_of_the_table_raise_an_error(row: list[str]) -> None:
  with pytest.raises(TypeError, match="cannot be converted"):
    migration.from_v1(make(row[0].strip("`")))


def test_every_optimizer_of_tensorflow_1_is_in_a_table() -> None:
  tables = rows("optimizers") + rows("refused")
  named = {row[0].strip("`") for row in tables}
  there = {
    name
    for name in dir(v1)
    if inspect.isclass(getattr(v1, name))
    and issubclass(getattr(v1, name), v1.Optimizer)
  }
  assert named == there - {"Optimizer"}
