"""Losses of `compile`: each group trains as plain Keras does on its rows.

And where `compile` puts the loss scale.
"""

import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, keras3, layers
from tf_cross_shard import tf_keras as ours_tf_keras

ROWS = 16
LIBRARIES = [(keras, keras3), (tf_keras, ours_tf_keras)]
in_both = pytest.mark.parametrize(("library", "package"), LIBRARIES)
# Small integers, which float32 adds without rounding.
_dice = np.random.default_rng(7)
X = _dice.integers(-3, 4, (2 * ROWS, 3)).astype("float32")
Y = _dice.integers(-3, 4, (2 * ROWS, 1)).astype("float32")
WEIGHTS = _dice.integers(1, 3, 2 * ROWS).astype("float32")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
  caplog.set_level(logging.WARNING, "absl")
  return caplog


def one_number(y: Any, prediction: Any) -> Any:
  return tf.reduce_mean((y - prediction) ** 2)


def _losses(library: Any) -> dict[str, Any]:
  """Returns the arguments of `compile`: a loss for each output of the model."""
  error = library.losses.MeanSquaredError
  losses = [error(), error(reduction="sum"), one_number]
  return {"loss": losses, "loss_weights": [0.5, 2.0, 4.0]}


def _model(
  library: Any, optimizer: Any, extra: bool = False, **compiled: Any
) -> Any:
  """Compiles a model that has one output per loss; all weights are one.

  `extra` adds losses by `add_loss`, a regularizer of weights and one of
  activations.
  """
  layers = library.layers

  class Mean(layers.Layer):
    def call(self, x: Any) -> Any:
      self.add_loss(tf.reduce_mean(x**2))
      return x

  inputs = library.Input((3,))
  regularizers = {}
  if extra:
    l2 = library.regularizers.L2
    regularizers = {
      "kernel_regularizer": l2(0.5),
      "activity_regularizer": l2(0.25),
    }
  outputs = [
    layers.Dense(
      1, use_bias=False, kernel_initializer="ones", name=name, **regularizers
    )(inputs)
    for name in "abc"[: len(compiled["loss"])]
  ]
  if extra:
    outputs[0] = Mean()(outputs[0])
  model = library.Model(inputs, outputs)
  model.compile(optimizer, **compiled)
  return model


def _fit(model: Any, rows: Any, **options: Any) -> None:
  model.fit(
    X[rows],
    [Y[rows]] * len(model.outputs),
    shuffle=False,
    verbose=0,
    **options,
  )


def _check(
  library: Any,
  package: Any,
  options: dict[str, Any],
  compiled: dict[str, Any],
  extra: bool = False,
  steps: int = 1,
) -> None:
  """Compares `fit` in groups with plain `fit` on each group's rows."""
  sgd = library.optimizers.SGD
  with testbed.mirrored().scope():
    optimizer = package.CrossShardOptimizer(sgd(2.0**-8), **options)
    model = _model(library, optimizer, extra, **compiled)
  _fit(model, slice(0, steps * ROWS), batch_size=ROWS)
  for members in optimizer.groups:
    # Each replica has four rows of each batch.
    rows = [
      step * ROWS + 4 * member + row
      for step in range(steps)
      for member in members
      for row in range(4)
    ]
    eagerly = {"steps_per_execution": 1, "run_eagerly": True}
    alone = _model(library, sgd(2.0**-8), extra, **{**compiled, **eagerly})
    _fit(alone, rows, batch_size=4 * len(members))
    assert (np.asarray(alone.trainable_variables[0]) != 1).any()
    for ours, plain in zip(
      model.trainable_variables, alone.trainable_variables, strict=True
    ):
      expected = np.asarray(plain)
      for member in members:
        found = testbed.copies(ours)[member]
        if extra or steps > 1:  # Divisions that float32 rounds.
          np.testing.assert_allclose(found, expected, rtol=1e-6)
        else:
          assert found.tolist() == expected.tolist()


@in_both
@pytest.mark.parametrize(
  ("grouping", "extra", "how"),
  [
    ("strided", False, {}),
    ("ungrouped", False, {"run_eagerly": True}),
    ("contiguous", True, {"steps_per_execution": 2}),
  ],
)
def test_each_group_trains_as_plain_keras(
  library: Any, package: Any, grouping: str, extra: bool, how: dict[str, Any]
) -> None:
  """With added losses and regularizers, too, and in several steps."""
  options = {
    "group_assignment": testbed.GROUPINGS[grouping],
    "scale_gradients": "run_eagerly" in how,
  }
  compiled = {**_losses(library), **how}
  _check(library, package, options, compiled, extra, 2 if how else 1)


@in_both
def test_an_output_without_a_loss(library: Any, package: Any) -> None:
  """In Keras 3, the loss of the other output is not reduced."""
  options = {"group_assignment": testbed.GROUPINGS["strided"]}
  reduction = None if library is keras else "sum"
  loss = library.losses.MeanSquaredError(reduction=reduction)
  _check(library, package, options, {"loss": [loss, None]})


def test_a_loss_of_tf_keras_without_a_reduction_is_refused() -> None:
  none = tf_keras.losses.MeanSquaredError(reduction="none")
  with pytest.raises(ValueError, match="`loss` must be a scalar"):
    _check(tf_keras, ours_tf_keras, {}, {"loss": [none, none]})


@in_both
def test_train_on_batch_is_that_of_plain_keras(
  library: Any, package: Any, said: list[str]
) -> None:
  """In Keras 3, each replica receives the whole batch; tf_keras divides it."""
  compiled, sgd = _losses(library), library.optimizers.SGD
  with testbed.mirrored().scope():
    optimizer = package.CrossShardOptimizer(
      sgd(2.0**-8), "mean", "ours", testbed.GROUPINGS["contiguous"]
    )
    model = _model(library, optimizer, **compiled)
  outputs = len(model.outputs)
  model.train_on_batch(X[:ROWS], [Y[:ROWS]] * outputs)
  is_whole = library is keras
  assert any("train_on_batch gives every" in line for line in said) == is_whole
  alone = _model(library, sgd(2.0**-8), **compiled)
  rows = ROWS if is_whole else ROWS // 2
  alone.train_on_batch(X[:rows], [Y[:rows]] * outputs)
  for ours, plain in zip(model.weights, alone.weights, strict=True):
    assert testbed.copies(ours)[0].tolist() == np.asarray(plain).tolist()


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("kind", ["integers", "strings", "uneven"])
def test_fit_builds_a_subclassed_model(kind: str) -> None:
  """Keras would build it from the mean over the replicas' batches."""

  class Sums(tf.keras.Model):
    def __init__(self) -> None:
      super().__init__()
      self.last = tf.keras.layers.Dense(1, use_bias=False)
      self.dtypes: set[str] = set()

    def call(self, x: Any) -> Any:
      self.dtypes.add(tf.as_dtype(x.dtype).name)
      if x.dtype == tf.string:
        x = tf.strings.length(x)
      return self.last(tf.cast(x, tf.float32))

  x = np.arange(30 if kind == "uneven" else 32, dtype="int32").reshape(-1, 1)
  x = x.astype(str).astype(object) if kind == "strings" else x
  with testbed.mirrored().scope():
    model = Sums()
    model.compile(CrossShardOptimizer("sgd"), "mse")
  data = tf.data.Dataset.from_tensor_slices((x, np.ones([len(x), 1], "f")))
  model.fit(data.batch(32), verbose=0)
  assert set(model.dtypes) == {"string" if kind == "strings" else "int32"}


@in_both
@pytest.mark.parametrize("kind", ["function", "class"])
def test_a_number_with_weights_of_examples(
  library: Any, package: Any, kind: str
) -> None:
  """Keras makes several values of the number, and then divides their mean."""

  class OwnCall(library.losses.Loss):
    def __call__(self, y: Any, pred: Any, sample_weight: Any = None) -> Any:
      return tf.reduce_mean(sample_weight[:, None] * (y - pred) ** 2)

  loss = one_number if kind == "function" else OwnCall(name="own")
  sgd = library.optimizers.SGD
  with testbed.mirrored(2).scope():
    optimizer = package.CrossShardOptimizer(sgd(2.0**-8))
    model = _single(library, optimizer, loss)
  plain = _single(library, sgd(2.0**-8), loss)
  half = np.tile(np.arange(4), 2)  # Equal examples on each replica.
  for each, rows in ((model, half), (plain, half[:4])):
    each.fit(
      X[rows],
      Y[rows],
      batch_size=len(rows),
      sample_weight=WEIGHTS[rows],
      shuffle=False,
      verbose=0,
    )
  [ours], [expected] = model.weights, plain.weights
  assert testbed.copies(ours)[0].tolist() == np.asarray(expected).tolist()


def _single(library: Any, optimizer: Any, loss: Any, kind: Any = None) -> Any:
  dense = library.layers.Dense(1, use_bias=False, kernel_initializer="ones")
  model = (kind or library.Sequential)([library.Input((3,)), dense])
  model.compile(optimizer, loss)
  return model


@pytest.mark.parametrize(
  ("which", "kinds", "argument", "words"),
  [
    (0, "mean sum number", None, ["loss one_number returns one number"]),
    (1, "mean sum number", None, ["loss one_number returns one number"]),
    # What this warning says to pass instead.
    (0, "number", "global", []),
    (0, "mean", "replica", ["mean_squared_error by 0.5", "right factor is 2"]),
    (1, "mean sum", "global", ["mean_squared_error by 2", "factor is 1"]),
  ],
)
def test_what_is_logged(
  which: int,
  kinds: str,
  argument: str | None,
  words: list[str],
  log: pytest.LogCaptureFixture,
) -> None:
  library, package = LIBRARIES[which]
  error = library.losses.MeanSquaredError
  every = {"mean": error(), "sum": error(reduction="sum"), "number": one_number}
  with testbed.mirrored().scope():
    optimizer = package.CrossShardOptimizer(
      library.optimizers.SGD(0.5),
      group_assignment=testbed.GROUPINGS["contiguous"],
      loss_averaged_over=argument,
    )
    losses = [every[kind] for kind in kinds.split()]
    model = _model(library, optimizer, loss=losses)
  _fit(model, slice(0, ROWS), batch_size=ROWS)
  # Retracing, and what Keras would evaluate, are warned about, too.
  others = ("Consider", "retracing", "evaluate()")
  lines = [x for x in log.messages if not any(word in x for word in others)]
  if not words:
    assert lines == []
    return
  [line] = lines
  for word in words:
    assert word in line
  assert "loss_averaged_over" in line


@pytest.mark.parametrize(
  ("which", "kind", "argument"),
  [
    *((0, kind, None) for kind in ("loss", "step", "super")),
    *((1, kind, None) for kind in ("loss", "step", "compiled")),
    (0, "compiled", "global"),
    (1, "loss", "global"),
  ],
)
def test_a_model_with_a_step_or_a_loss_of_its_own(
  which: int, kind: str, argument: str | None, said: list[str]
) -> None:
  """Only a model that computes its own loss gets a warning, in `fit`."""
  library, package = LIBRARIES[which]

  class Model(library.Sequential):
    pass

  def compute_loss(
    self: Any, x: Any, y: Any, pred: Any, *_: Any, **__: Any
  ) -> Any:
    return tf.reduce_mean((y - pred) ** 2) / testbed.REPLICAS

  def train_step(self: Any, data: Any) -> Any:
    loss_of = compute_loss if kind == "step" else Model.compute_loss
    weights = self.trainable_variables
    with tf.GradientTape() as tape:
      loss = loss_of(self, data[0], data[1], self(data[0]))
      scaled = self.optimizer.scale_loss(loss)
    grads = tape.gradient(scaled, weights)
    self.optimizer.apply_gradients(zip(grads, weights, strict=True))
    return {"loss": loss}

  if kind == "loss":
    Model.compute_loss = compute_loss
  elif kind == "super":
    Model.train_step = lambda self, data: super(Model, self).train_step(data)
  else:
    Model.train_step = train_step
  sgd = library.optimizers.SGD
  with testbed.mirrored().scope():
    optimizer = package.CrossShardOptimizer(
      sgd(2.0**-8),
      group_assignment=testbed.GROUPINGS["contiguous"],
      loss_averaged_over=argument,
    )
    model = _single(library, optimizer, "mse", Model)
  plain = _single(library, sgd(2.0**-8), "mse")
  for each, rows in ((model, ROWS), (plain, ROWS // 2)):
    each.fit(X[:rows], Y[:rows], batch_size=rows, shuffle=False, verbose=0)
  [ours], [expected] = model.weights, plain.weights
  np.testing.assert_allclose(testbed.copies(ours)[0], expected, rtol=1e-6)
  words = "over all replicas' examples, and multiplies it by 2."
  warns = argument is None and kind in ("loss", "step")
  assert [words in line for line in said if "averaged" in line] == [
    True
  ] * warns


@in_both
def test_a_model_with_added_losses_alone(
  library: Any, package: Any, said: list[str]
) -> None:
  """As those of a variational autoencoder; Keras divides them, too."""

  class Adds(library.layers.Dense):
    def call(self, inputs: Any) -> Any:
      outputs = super().call(inputs)
      self.add_loss(tf.reduce_mean(outputs**2))
      return outputs

  def train(optimizer: Any) -> Any:
    layer = Adds(1, kernel_initializer="ones")
    model = library.Sequential([library.Input((3,)), layer])
    model.compile(optimizer)
    model.fit(X, epochs=2, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()

  sgd = library.optimizers.SGD
  with testbed.mirrored(2).scope():
    found = train(package.CrossShardOptimizer(sgd(2.0**-8)))
  for value, right in zip(found, train(sgd(2.0**-8)), strict=True):
    np.testing.assert_allclose(value, right, rtol=1e-6)
  assert not said


@in_both
def test_a_loop_of_its_own_for_a_compiled_model(
  library: Any, package: Any, said: list[str]
) -> None:
  strategy = testbed.mirrored()
  with strategy.scope():
    model = _single(library, package.CrossShardOptimizer("sgd"), "mse")

  def step() -> None:
    with tf.GradientTape():
      model.optimizer.scale_loss(tf.reduce_mean((model(X) - Y) ** 2))

  strategy.run(step)
  [line] = said
  assert "assumes that the loss is averaged over all replicas' exam" in line


@in_both
def test_a_compiled_model_is_saved_and_loaded(
  library: Any, package: Any, tmp_path: Any
) -> None:
  path = str(tmp_path / "model.keras")
  with testbed.mirrored(2).scope():
    optimizer = package.CrossShardOptimizer("sgd")
    loss = library.losses.MeanSquaredError(reduction="sum")
    model = _single(library, optimizer, loss)
    model.save(path)
    loaded = library.models.load_model(path)
  for each in (model, loaded):
    each.fit(X[:ROWS], Y[:ROWS], batch_size=ROWS, shuffle=False, verbose=0)
  copies = [testbed.copies(each.weights[0])[0] for each in (model, loaded)]
  assert copies[0].tolist() == copies[1].tolist()


@in_both
def test_xla_is_refused_where_it_cannot_compile_the_sum(
  library: Any, package: Any
) -> None:
  with testbed.mirrored().scope():
    model = library.Sequential([library.layers.Dense(1)])
    optimizer = package.CrossShardOptimizer("sgd")
    words = r"`jit_compile` must be False .* Leave it out"
    with pytest.raises(ValueError, match=words):
      model.compile(optimizer, "mse", jit_compile=True)


def test_an_optimizer_for_the_other_keras_is_named() -> None:
  for (library, _), (_, package), home in (
    (*LIBRARIES, "keras3"),
    (*LIBRARIES[::-1], "tf_keras"),
  ):
    model = library.Sequential([library.layers.Dense(1)])
    with pytest.raises(TypeError, match=f"from tf_cross_shard.{home} import"):
      model.compile(package.CrossShardOptimizer("sgd"), "mse")


def test_a_table_that_is_read_whole(said: list[str]) -> None:
  for kind, count in ((keras.layers.Embedding, 1), (layers.Embedding, 0)):
    said.clear()
    table = kind(10, 2, name="users")
    model = keras.Sequential([keras.Input((1,), dtype="int32"), table])
    optimizer = keras3.CrossShardOptimizer("adam", lazy_rows=True)
    model.compile(optimizer, "mse")
    assert len(said) == count
    assert all("(users)" in x and "layers.Embedding" in x for x in said)


# ------------------------------------------------------------------ loss scale


@pytest.fixture(params=LIBRARIES, ids=["keras", "tf_keras"])
def mixed(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
  """Sets the policy `mixed_float16`; returns a Keras and our package for it."""
  library, package = request.param
  library.mixed_precision.set_global_policy("mixed_float16")
  yield library, package
  library.mixed_precision.set_global_policy("float32")


def _linear(library: Any) -> Any:
  return library.Sequential([library.Input((3,)), library.layers.Dense(1)])


def _kinds(optimizer: Any) -> list[str]:
  """Returns the classes of an optimizer and of those inside."""
  kinds = []
  while optimizer is not None:
    kinds.append(type(optimizer).__name__.removesuffix("V3"))
    optimizer = getattr(optimizer, "inner_optimizer", None)
  return kinds


def test_compile_puts_the_loss_scale_inside_once(mixed: Any) -> None:
  library, package = mixed
  model = _linear(library)
  ours = package.CrossShardOptimizer("adam")
  for _ in "12":
    model.compile(ours, "mse")
    assert model.optimizer is ours
    assert _kinds(ours) == ["CrossShardOptimizer", "LossScaleOptimizer", "Adam"]
  own = library.mixed_precision.LossScaleOptimizer(
    library.optimizers.SGD(), initial_scale=4.0
  )
  model.compile(package.CrossShardOptimizer(own), "mse")
  assert model.optimizer.inner_optimizer is own
  assert _kinds(own) == ["LossScaleOptimizer", "SGD"]
  tower = package.TowerOptimizer(package.CrossShardOptimizer("sgd"))
  model.compile(tower, "mse")
  kinds = ["CrossShardOptimizer", "LossScaleOptimizer", "SGD"]
  assert _kinds(model.optimizer) == ["TowerOptimizer", *kinds]
  model.train_on_batch(0 * X[:4], 0 * Y[:4])  # This cannot overflow.
  assert int(tower.iterations) == 1
  model.compile("sgd", "mse")
  assert _kinds(model.optimizer) == ["LossScaleOptimizer", "SGD"]


def test_compile_adds_no_loss_scale_that_keras_would_not_add(
  mixed: Any,
) -> None:
  library, package = mixed
  ours = package.CrossShardOptimizer("adam")
  if library is keras:
    model = _linear(library)
    model.compile(ours, "mse", auto_scale_loss=False)
    assert _kinds(model.optimizer) == ["CrossShardOptimizer", "Adam"]
  library.mixed_precision.set_global_policy("mixed_bfloat16")
  model = _linear(library)
  model.compile(ours, "mse")
  assert _kinds(model.optimizer) == ["CrossShardOptimizer", "Adam"]


def test_compile_keeps_the_state_of_a_built_optimizer(mixed: Any) -> None:
  library, package = mixed
  model = _linear(library)
  adam = library.optimizers.Adam(0.5, use_ema=True)
  ours = package.CrossShardOptimizer(adam)
  ours.build(model.trainable_variables)
  grads = [tf.ones(v.shape) for v in model.trainable_variables]
  ours.apply_gradients(zip(grads, model.trainable_variables, strict=True))
  before = [v.numpy() for v in adam.variables]
  model.compile(ours, "mse")
  for variable, value in zip(adam.variables, before, strict=True):
    np.testing.assert_array_equal(variable.numpy(), value)
  model.train_on_batch(0 * X[:4], 0 * Y[:4])  # This cannot overflow.
  assert int(ours.iterations) == 2


@pytest.mark.parametrize("how", ["built", "restored"])
def test_a_loss_scale_that_would_lose_state_is_refused(
  mixed: Any, how: str, tmp_path: pathlib.Path
) -> None:
  library, package = mixed
  words = r"built or restored.*CrossShardOptimizer\(LossScaleOptimizer\(SGD"

  def make() -> tuple[Any, Any]:
    with testbed.mirrored(2).scope():
      sgd = library.optimizers.SGD(0.5, momentum=0.5)
      ours = package.CrossShardOptimizer(sgd, shard_update=True)
      return _linear(library), ours

  model, ours = make()
  with testbed.mirrored(2).scope():
    ours.build(model.trainable_variables)
  if how == "restored":
    path = tf.train.Checkpoint(ours).save(str(tmp_path / "checkpoint"))
    model, ours = make()
    tf.train.Checkpoint(ours).restore(path)
  with testbed.mirrored(2).scope(), pytest.raises(ValueError, match=words):
    model.compile(ours, "mse")


@in_both
def test_a_loss_scale_around_is_refused(library: Any, package: Any) -> None:
  scaled = library.mixed_precision.LossScaleOptimizer
  sgd = library.optimizers.SGD()
  sgd.loss_scale_factor = 8.0
  words = r"Put it inside: CrossShardOptimizer\(LossScaleOptimizer\(SGD"
  for inside in (sgd, scaled(library.optimizers.SGD())):
    ours = package.CrossShardOptimizer(inside)
    with pytest.raises(ValueError, match=words):
      scaled(ours)
  assert sgd.loss_scale_factor == 8.0
