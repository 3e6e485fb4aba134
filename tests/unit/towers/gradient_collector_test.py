"""Tests that towers raise errors for wrong steps, and change no variable."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed
from tests.support.towers_bed import (
  FOUR,
  MODES,
  TWO,
  batch,
  caller,
  sgd,
  values,
)
from tf_cross_shard import (
  CrossShardOptimizer,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)

keras = tf.keras
every_mode = pytest.mark.parametrize("mode", MODES)


class Bench:
  """Two variables, two optimizers, and steps that are refused."""

  def __init__(self, mode: str = "eager", devices: Any = TWO) -> None:
    self.mode = mode
    self.devices = devices
    self.c, self.d = tf.Variable(10.0, name="c"), tf.Variable(5.0, name="d")
    self.global_step = tf.Variable(0)
    self.first = TowerOptimizer(sgd(momentum=0.5))
    self.second = TowerOptimizer(keras.optimizers.Adam())
    for optimizer in (self.first, self.second):
      optimizer.build([self.c, self.d])
    self._before = self._state()

  def _state(self) -> list[Any]:
    slots = (each.variables for each in (self.first, self.second))
    return [values(v) for v in ([self.c, self.d, self.global_step], *slots)]

  def check_untouched(self) -> None:
    """Checks that no variable was changed or added."""
    assert self._state() == self._before

  def loss(self, features: Any) -> Any:
    """A loss of both variables."""
    return tf.reduce_sum((self.c + self.d) * features)

  def train(self, loss: Any, calls: str = "first") -> None:
    """Calls optimizers.

    Each word of `calls` is the name of an optimizer, or `name:variable`.
    """
    for call in calls.split():
      name, _, variable = call.partition(":")
      variables = [getattr(self, variable or "c")]
      getattr(self, name).minimize(loss, self.global_step, variables)

  def fails(
    self,
    model_fn: Callable[..., Any],
    error: Any,
    *words: str,
    mode: str = "train",
  ) -> None:
    """Checks that a step raises `error` with these words, changing nothing."""
    replicated = replicate_model_fn(model_fn, "sum", self.devices)
    step = caller(lambda x: replicated(x, mode=mode), self.mode)
    features = batch(*[[float(i)] for i, _ in enumerate(self.devices)])
    with pytest.raises(error) as caught:
      step(features)
    text = " ".join(str(caught.value).split())
    for word in words:
      assert word in text, text
    self.check_untouched()


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize(
  ("towers", "words", "mode"),
  [
    (
      ("first second", "first"),
      (
        "must call the same optimizers in the same order in every tower",
        "tower 1 called no optimizer, but tower 0 called Adam('",
        "Nothing was applied",
      ),
      "eager",
    ),
    (
      ("first", "first", "second"),
      ("tower 2 called Adam", "0 called SGD"),
      "eager",
    ),
    (("first", "first:d"), ("variables ['d'], but", "['c']."), "function"),
  ],
)
def test_towers_that_differ(towers: Any, words: Any, mode: str) -> None:
  bench = Bench(mode, FOUR[: len(towers)])
  calls = iter(towers)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = bench.loss(features)
    bench.train(loss, next(calls))
    return TowerSpec(mode, loss)

  bench.fails(model_fn, ValueError, *words)


def test_the_step_after_an_exception_in_the_last_tower() -> None:
  bench = Bench("function")
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    towers.append(len(towers))
    loss = tf.reduce_sum(bench.c * features)
    bench.train(loss)
    if len(towers) == 2:
      raise KeyError("the last tower")
    return TowerSpec(mode, loss)

  bench.fails(model_fn, KeyError, "the last tower")
  tf.function(replicate_model_fn(model_fn, "sum", TWO))(batch())
  assert [float(bench.c), int(bench.global_step)] == [7.0, 1]


@pytest.mark.parametrize("where", ["gradient", "predictions"])
def test_an_error_that_comes_late_when_the_program_runs(where: str) -> None:
  bench = Bench("function")  # Eagerly it comes before the tower returns.

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = bench.loss(features)
    bench.train(loss)
    x = tf.random.uniform([300, 300])
    for _ in range(10):  # Long after the gradients are there.
      x = tf.matmul(x, x) / 1e3
    late = 0.0 * tf.reduce_sum(tf.clip_by_value(x, 0.0, 1.0))
    good = tf.reduce_sum(features) + late < 1.0
    with tf.control_dependencies([tf.debugging.Assert(good, ["bad"])]):
      checked = tf.identity(features)
    if where == "gradient":
      bench.second.apply_gradients([(tf.reduce_sum(checked), bench.d)])
      return TowerSpec(mode, loss)
    return TowerSpec(mode, loss, None, {"a": [checked]})

  bench.fails(model_fn, tf.errors.InvalidArgumentError, "bad")


@every_mode
def test_plain_optimizers(mode: str) -> None:
  """In a graph, plain optimizers never run.

  Eagerly, they have already updated the variables when the error is raised.
  """
  bench = Bench(mode)

  def step(devices: Any) -> Any:
    optimizer = keras.optimizers.SGD(0.5)

    def model_fn(features: Any, mode: str) -> TowerSpec:
      with tf.GradientTape() as tape:
        loss = bench.loss(features)
      optimizer.apply_gradients([(tape.gradient(loss, bench.d), bench.d)])
      return TowerSpec(mode)

    return caller(replicate_model_fn(model_fn, "sum", devices), mode)(batch())

  with pytest.raises(ValueError, match="through a TowerOptimizer when it is"):
    step(TWO)
  if mode == "function":
    bench.check_untouched()
  before = float(bench.d)
  step(TWO[:1])  # In one tower it is fine.
  assert float(bench.d) == before - 1.5


def test_labels_are_split_by_their_own_rows() -> None:
  """As in contrib, whose tests use sparse features with fewer labels."""
  shapes = []

  def model_fn(features: Any, labels: Any) -> TowerSpec:
    shapes.append((features.shape.as_list(), labels.shape.as_list()))
    return TowerSpec("infer", predictions=labels)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  features = tf.sparse.from_dense(tf.eye(4))
  spec = replicated(features, tf.constant([[1.0], [2.0]]), mode="infer")
  assert shapes == [([2, 4], [1, 1])] * 2
  assert spec.predictions.numpy().tolist() == [[1.0], [2.0]]
  with pytest.raises(ValueError, match=r"first axis of `labels` .* towers, 2"):
    replicated(features, tf.ones([3]))


@pytest.mark.parametrize(
  ("spec", "error", "words"),
  [
    (lambda x: {"loss": 3}, TypeError, "a TowerSpec; got {'loss': 3}"),
    (
      lambda x: TowerSpec("train", metrics={"a": (1.0, None)}),
      TypeError,
      "`metrics` must be a dictionary of tf.keras.metrics.Metric objects",
    ),
    # TensorFlow's own errors, before the update.
    (lambda x: TowerSpec("train", None if x[0, 0] > 0 else x), ValueError, ""),
  ],
)
def test_specs(spec: Any, error: Any, words: str) -> None:
  bench = Bench()

  def model_fn(features: Any) -> Any:
    bench.train(bench.loss(features))
    return spec(features)

  bench.fails(model_fn, error, words)


def test_nesting() -> None:
  cross = CrossShardOptimizer("sgd")
  assert TowerOptimizer(cross).inner_optimizer is cross
  for within in (TowerOptimizer("sgd"), TowerOptimizer(cross)):
    with pytest.raises(ValueError, match="must not be or contain a TowerOpt"):
      TowerOptimizer(within)
  with pytest.raises(ValueError, match="must not be or contain a Tower"):
    CrossShardOptimizer(TowerOptimizer("sgd"))
  within = replicate_model_fn(lambda features: None, devices=TWO[:1])
  with pytest.raises(ValueError, match="Towers cannot be nested"):
    replicate_model_fn(within, devices=TWO)(batch())


@pytest.mark.parametrize(
  "reduction", ["most", *tf.compat.v1.losses.Reduction.all()]
)
def test_reductions(reduction: str) -> None:
  """TensorFlow 1 divided all but the sum by the number of towers."""

  def make() -> Any:
    return replicate_model_fn(
      lambda features, mode: TowerSpec(mode, tf.reduce_sum(features)),
      reduction,
      TWO,
    )

  if reduction in ("most", "none"):
    with pytest.raises(ValueError, match="`loss_reduction` must be one") as e:
      make()
    assert repr(reduction) in str(e.value)
  else:
    spec = make()(tf.constant([1.0, 3.0]), mode="eval")
    is_sum = reduction == tf.compat.v1.losses.Reduction.SUM
    assert float(spec.loss) == (4.0 if is_sum else 2.0)


@pytest.mark.parametrize("devices", [["CPU:0", "CPU:17"], "TPU:0", []])
def test_devices(devices: Any) -> None:
  with pytest.raises(ValueError, match="of this machine") as caught:
    replicate_model_fn(lambda features: None, devices=devices)
  assert repr(devices) in str(caught.value)


def test_calls() -> None:
  replicated = replicate_model_fn(lambda features: TowerSpec("train"))
  with pytest.raises(ValueError, match=r"'train', 'eval', 'infer'\]; got 'p'"):
    replicated(batch(), mode="p")
  with pytest.raises(ValueError, match="`devices` must be given"):
    testbed.mirrored(2).run(lambda: replicated(batch()).loss)
  with pytest.raises(TypeError, match="is not a callable object"):
    replicate_model_fn("model")  # type: ignore[arg-type]


@functools.cache
def _of_another_strategy() -> tuple[Any, Any]:
  with tf.distribute.MirroredStrategy(list(TWO)).scope():
    d, optimizer = tf.Variable(1.0), TowerOptimizer(CrossShardOptimizer(sgd()))
    optimizer.build([d])
  return optimizer, d


@pytest.mark.parametrize(
  ("run", "mode", "call", "error", "words"),
  [
    (
      *("eager", "eval", lambda b, g: b.train(g)),
      *(ValueError, 'in the mode "train" only'),
    ),
    (
      *("function", "train"),
      lambda b, g: tf.cond(
        g > 0.0,
        lambda: b.second.apply_gradients([(g, b.c)]),
        lambda: tf.constant(0, tf.int64),
      ),
      *(ValueError, "was called inside tf.cond"),
    ),
    (
      *("eager", "train"),
      lambda b, g: b.second.apply_gradients([(g, b.c)], bogus=3),
      *(TypeError, "unexpected keyword argument 'bogus'"),
    ),
    (
      *("eager", "train"),
      lambda b, g: _of_another_strategy()[0].apply_gradients(
        [(g, _of_another_strategy()[1])]
      ),
      *(RuntimeError, "strategy"),
    ),
  ],
)
def test_nothing_is_half_done(
  run: str, mode: str, call: Any, error: Any, words: str
) -> None:
  """The first of two optimizers has not applied when the second fails."""
  bench = Bench(run)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    grad = tf.reduce_sum(features)
    if mode == "train":
      bench.first.apply_gradients([(grad, bench.c)])
    call(bench, grad)
    return TowerSpec(mode)

  bench.fails(model_fn, error, words, mode=mode)


def test_a_step_that_fails_builds_no_optimizer() -> None:
  c, d = tf.Variable(10.0), tf.Variable(10.0)
  optimizer, other = TowerOptimizer(sgd), TowerOptimizer(sgd)
  other.build([c])

  def model_fn(features: Any, mode: str, params: bool) -> TowerSpec:
    loss = tf.reduce_sum((c + d) * features)
    optimizer.minimize(loss, var_list=[c])
    # A good step builds it on all that it updates, in both calls.
    (other if params else optimizer).minimize(loss, var_list=[d])
    return TowerSpec(mode, loss)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  with pytest.raises(ValueError, match=r"Unknown variable|was built"):
    replicated(batch(), params=True)
  replicated(batch(), params=False)
  assert float(c) == float(d) == 7.0


def test_gradients_from_user_tape_are_warned_about(
  caplog: pytest.LogCaptureFixture,
) -> None:
  c, optimizer = tf.Variable(10.0), TowerOptimizer(sgd())

  def model_fn(features: Any, mode: str, params: bool) -> TowerSpec:
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(c * features)
    if params:
      optimizer.minimize(loss, [c], tape=tape)
    else:
      optimizer.apply_gradients([(tape.gradient(loss, c), c)])
    return TowerSpec(mode, loss)

  replicated = replicate_model_fn(model_fn, "mean", TWO)
  with caplog.at_level("WARNING", logger="absl"):
    replicated(batch(), params=True)
    assert (float(c), caplog.messages) == (8.5, [])
    replicated(batch(), params=False)
  assert float(c) == 5.5
  [line] = caplog.messages
  assert 'loss_reduction is "mean" over 2 towers' in line
  assert "multiply the loss by 0.5" in line
