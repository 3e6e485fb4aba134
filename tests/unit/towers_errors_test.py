"""What cannot work in towers is refused, and nothing has changed then."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed, towers_bed
from tests.support.towers_bed import FOUR, MODES, TWO, batch, caller, sgd
from tf_cross_shard import (
  CrossShardOptimizer,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)

keras = tf.keras
v1 = tf.compat.v1.train
every_mode = pytest.mark.parametrize("mode", MODES)


class Bench:
  """Two variables, three optimizers, and a step that works."""

  def __init__(self, mode: str, devices: Any = TWO) -> None:
    self.mode = mode
    self.devices = devices
    self.c, self.d = tf.Variable(10.0, name="c"), tf.Variable(5.0, name="d")
    self.global_step = tf.Variable(0)
    makers = (lambda: sgd(momentum=0.5), keras.optimizers.Adam)
    self.first, self.second, self.other = (
      TowerOptimizer(make) for make in (makers[0], *makers)
    )
    optimizers = (self.first, self.second, self.other)
    for each in optimizers:
      each.build([self.c, self.d])
    self.untouched = towers_bed.Untouched(
      [self.c, self.d, self.global_step], *optimizers
    )

  def minimize(self, optimizer: Any, loss: Any, variables: Any = None) -> Any:
    """One call as it should be, of whatever optimizer."""
    return optimizer.minimize(loss, self.global_step, variables or [self.c])

  def loss(self, features: Any) -> Any:
    """A loss of both variables."""
    return tf.reduce_sum((self.c + self.d) * features)

  def odd(self, *calls: Callable[[Any], Any]) -> Callable[..., TowerSpec]:
    """A model function that calls another of these in each tower."""
    towers: list[int] = []

    def model_fn(features: Any, mode: str) -> TowerSpec:
      towers.append(len(towers))
      loss = self.loss(features)
      return TowerSpec(mode, loss, calls[towers[-1] % len(calls)](loss))

    return model_fn

  def fails(
    self,
    model_fn: Callable[..., Any],
    error: Any,
    *words: str,
    features: Any = None,
    mode: str = "train",
  ) -> None:
    """A step is refused in these words, and leaves all as it was."""
    replicated = replicate_model_fn(model_fn, "sum", self.devices)
    step = caller(lambda x: replicated(x, mode=mode), self.mode)
    features = batch() if features is None else features
    with pytest.raises(error) as caught:
      step(features)
    text = re.sub(r"\s+", " ", str(caught.value))
    for each in words:
      assert each in text, text
    self.untouched.check()
    self.works()

  def works(self) -> None:
    """The next good step is as if there had been none before."""

    def model_fn(features: Any, mode: str) -> TowerSpec:
      loss = tf.reduce_sum(self.c * features)
      self.minimize(self.first, loss)
      return TowerSpec(mode, loss, self.minimize(self.second, loss))

    spec = caller(replicate_model_fn(model_fn, "sum", TWO), self.mode)(batch())
    assert float(spec.loss) == 30.0
    assert [float(self.c), float(self.d)] == [4.0, 5.0]
    assert int(self.global_step) == 2
    assert [int(self.first.iterations), int(self.second.iterations)] == [1, 1]


@pytest.fixture
def bench() -> Bench:
  return Bench("eager")


# What each tower calls, by number, and the words.
ODD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
  "one is missing": (
    ("first other", "first"),
    (
      "must call the same optimizers in the same order in every tower",
      "tower 1 called 1 optimizers, tower 0 called 2: Adam('",
      "is missing",
      "Nothing was applied",
    ),
  ),
  "one more": (
    ("first", "first other"),
    ("tower 1 called Adam('", "which tower 0 did not call"),
  ),
  "another class": (
    ("first", "other"),
    ("tower 1 called Adam('", "where tower 0 called SGD('"),
  ),
  "another order": (
    ("first second", "second first"),
    ("tower 1 called SGD('", "where tower 0 called SGD('"),
  ),
  "the third of four": (
    ("first", "first", "other", "first"),
    ("tower 2 called Adam('",),
  ),
  "other variables": (
    ("first", "first:d"),
    ("tower 1 called SGD('", "with the variables ['d", "tower 0 with ['c"),
  ),
}


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("case", ODD)
def test_towers_that_differ(case: str) -> None:
  towers, words = ODD[case]
  mode = MODES[len(case) % 2]
  bench = Bench(mode, FOUR[: len(towers)])

  def call(names: str) -> Callable[[Any], Any]:
    def calls(loss: Any) -> Any:
      train_op = None
      for name in names.split():
        optimizer, _, variable = name.partition(":")
        variables = [getattr(bench, variable or "c")]
        train_op = bench.minimize(getattr(bench, optimizer), loss, variables)
      return train_op

    return calls

  features = batch(*[[float(i)] for i, _ in enumerate(towers)])
  bench.fails(
    bench.odd(*map(call, towers)), ValueError, *words, features=features
  )


@pytest.mark.parametrize(
  ("odd", "words", "mode"),
  [
    ({"loss": None}, "or by none; towers [1] gave None", "eager"),
    ({"predictions": {"b": 1}}, "must have the same structure", "function"),
    ({"metrics": {"m": keras.metrics.Mean()}}, "got [[], ['m']]", "eager"),
  ],
)
def test_towers_that_return_other_things(
  odd: dict[str, Any], words: str, mode: str
) -> None:
  bench = Bench(mode)
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    towers.append(len(towers))
    loss = bench.loss(features)
    bench.minimize(bench.first, loss)
    fine: dict[str, Any] = {"predictions": {"a": features}, "loss": loss}
    return TowerSpec(mode, **{**fine, **(odd if len(towers) % 2 == 0 else {})})

  bench.fails(model_fn, ValueError, words)


@every_mode
def test_an_exception_in_the_last_tower(mode: str) -> None:
  bench = Bench(mode)

  def good(loss: Any) -> Any:
    bench.minimize(bench.first, loss)
    return bench.minimize(bench.other, loss)

  def fail(loss: Any) -> Any:
    good(loss)
    raise KeyError("the last tower")

  bench.fails(bench.odd(good, fail), KeyError, "the last tower")


@pytest.mark.parametrize("where", ["gradient", "predictions"])
def test_an_error_that_comes_late_when_the_program_runs(where: str) -> None:
  bench = Bench("function")  # Eagerly it comes before the tower returns.

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = bench.loss(features)
    train_op = bench.minimize(bench.first, loss)
    x = tf.random.uniform([300, 300])
    for _ in range(10):  # Long after the gradients are there.
      x = tf.matmul(x, x) / 1e3
    late = 0.0 * tf.reduce_sum(tf.clip_by_value(x, 0.0, 1.0))
    good = tf.reduce_sum(features) + late < 2.0
    with tf.control_dependencies([tf.debugging.Assert(good, ["bad"])]):
      answer = tf.identity(features)
    if where == "gradient":
      bench.second.apply_gradients([(tf.reduce_sum(answer), bench.d)])
      return TowerSpec(mode, loss, train_op)
    return TowerSpec(mode, loss, train_op, {"a": [answer]})

  bench.fails(model_fn, tf.errors.InvalidArgumentError, "bad")


PLAIN: dict[str, Callable[[], Any]] = {
  "keras": lambda: keras.optimizers.LossScaleOptimizer(sgd(0.5)),
  "legacy": lambda: tf_keras.optimizers.legacy.SGD(0.5),
  "v1": lambda: v1.MomentumOptimizer(0.5, 0.5),
  "cross": lambda: CrossShardOptimizer(sgd(0.5)),
}


@pytest.mark.parametrize(
  ("name", "mode"),
  [(name, MODES[at % 2]) for at, name in enumerate(PLAIN)]
  + [("keras", "function")],
)
def test_plain_optimizers(name: str, mode: str) -> None:
  """They are found out afterwards; a graph with them never runs."""
  bench = Bench(mode)

  def step(devices: Any) -> Any:
    optimizer = PLAIN[name]()

    def model_fn(features: Any, mode: str) -> TowerSpec:
      if devices == TWO:  # One that is right does not make it right.
        bench.minimize(bench.first, bench.loss(features))
      with tf.GradientTape() as tape:
        loss = bench.loss(features)
      optimizer.apply_gradients([(tape.gradient(loss, bench.d), bench.d)])
      return TowerSpec(mode)

    return caller(replicate_model_fn(model_fn, "sum", devices), mode)(batch())

  with pytest.raises(ValueError, match="through a TowerOptimizer") as caught:
    step(TWO)
  tower = 1 if mode == "eager" else 0
  assert f"tower {tower} of 2 changed ['d:0'] by itself" in str(caught.value)
  assert float(bench.c) == 10.0
  if mode == "function":
    bench.untouched.check()
  before = float(bench.d)
  step(TWO[:1])  # In one tower it is fine.
  assert float(bench.d) < before


@every_mode
def test_variables_that_are_not_trained_may_change(mode: str) -> None:
  """Of batch normalization, metrics and counters; and a NaN is like itself."""
  bench = Bench(mode)
  norm, mean = keras.layers.BatchNormalization(), keras.metrics.Mean()
  norm.build((None, 1))
  count = tf.Variable(0, trainable=False)
  nan = tf.Variable(np.nan)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    y = norm(features, training=True)
    mean.update_state(y)
    count.assign_add(1)
    y = tf.cond(tf.reduce_sum(y) > 1e9, lambda: nan * y, lambda: bench.c * y)
    bench.minimize(bench.first, tf.reduce_sum(bench.c * features) + 0.0 * nan)
    return TowerSpec(mode, predictions=y)

  replicated = replicate_model_fn(model_fn, "sum", TWO)
  caller(replicated, mode)(batch())
  assert [float(bench.c), int(count)] == [7.0, 2]


@pytest.mark.parametrize("devices", [TWO, TWO[:1]])
def test_optimizers_are_for_training(bench: Bench, devices: Any) -> None:
  bench.devices = devices
  good = bench.odd(lambda loss: bench.minimize(bench.first, loss))
  words = 'in the mode "train" only'
  bench.fails(good, ValueError, words, mode="eval")


def test_gradients_of_a_branch_cannot_leave_it() -> None:
  bench = Bench("function")

  def model_fn(features: Any, mode: str) -> TowerSpec:
    def train() -> Any:
      return bench.first.apply_gradients([(tf.reduce_sum(features), bench.c)])

    tf.cond(features[0, 0] > 0.0, train, lambda: tf.constant(0, tf.int64))
    return TowerSpec(mode)

  bench.fails(model_fn, ValueError, "was called inside tf.cond")


def test_labels() -> None:
  def model_fn(features: Any, labels: Any, mode: str) -> TowerSpec:
    raise AssertionError("called")

  replicated = replicate_model_fn(model_fn, devices=TWO)
  with pytest.raises(ValueError, match="`labels` must divide into 2 towers"):
    replicated(batch(), tf.ones([3]))
  # Cut in two, [4, 1] and [2, 1] would broadcast.
  for labels in (tf.ones([2, 1]), [1.0, 2.0]):
    with pytest.raises(ValueError, match=r"gets 2 features and 1 labels"):
      replicated(tf.ones([4, 1]), labels)


def _unused(bench: Bench) -> Callable[..., Any]:
  return lambda features, mode: TowerSpec(mode, bench.loss(features))


def _returns(**spec: Any) -> Callable[[Bench], Callable[..., Any]]:
  """A model function that trains, and returns something odd."""

  def make(bench: Bench) -> Callable[..., Any]:
    def model_fn(features: Any) -> Any:
      loss = bench.loss(features)
      bench.minimize(bench.first, loss)
      return TowerSpec(**spec) if spec else {"loss": 3}

    return model_fn

  return make


@pytest.mark.parametrize(
  ("make", "error", "words", "mode"),
  [
    (
      _unused,
      ValueError,
      "no TowerOptimizer was called in 2 towers in mode 'train'",
      "train",
    ),
    (_unused, ValueError, "one of ['train', 'eval', 'infer']; got 'p'", "p"),
    (_returns(), TypeError, "tower 0 it returned {'loss': 3}", "train"),
    (_returns(mode="eval"), ValueError, "TowerSpec(mode='eval'", "train"),
    (
      _returns(mode="train", metrics={"a": 1.0}),
      TypeError,
      "`metrics` must be a dictionary of tf.keras.metrics.Metric objects",
      "train",
    ),
    (
      _returns(mode="train", predictions={"a": 1.0}),
      ValueError,
      "`predictions` must hold tensors with the batch in axis 0; got a scalar",
      "train",
    ),
  ],
)
def test_what_is_returned(
  bench: Bench, make: Any, error: Any, words: str, mode: str
) -> None:
  bench.fails(make(bench), error, words, mode=mode)


def test_nesting(bench: Bench) -> None:
  cross = CrossShardOptimizer("sgd")
  assert TowerOptimizer(cross).inner_optimizer is cross
  for within in (TowerOptimizer("sgd"), TowerOptimizer(cross)):
    with pytest.raises(ValueError, match="must not be or contain a TowerOpt"):
      TowerOptimizer(within)
  with pytest.raises(ValueError, match="must not be or contain a Tower"):
    CrossShardOptimizer(TowerOptimizer("sgd"))
  within = replicate_model_fn(lambda features: None, devices=TWO[:1])
  with pytest.raises(ValueError, match="is replicated already"):
    replicate_model_fn(within, devices=TWO)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    bench.minimize(bench.first, bench.loss(features))
    within(features)
    return TowerSpec(mode)

  bench.fails(model_fn, ValueError, "Towers do not nest")


def test_no_optimizer() -> None:
  argument = "`optimizer_or_optimizer_fn` must"
  for value in (3, lambda: None):
    with pytest.raises(TypeError, match=f"{argument} be an optimizer of"):
      TowerOptimizer(value)
  with pytest.raises(ValueError, match=f"{argument} name a Keras optimizer"):
    TowerOptimizer("nobody")


class TestReplicating:
  @pytest.mark.parametrize("reduction", ["none", "most", None])
  def test_reductions(self, reduction: Any) -> None:
    with pytest.raises(ValueError, match="`loss_reduction` must be one") as e:
      replicate_model_fn(lambda features: None, reduction, TWO)
    assert repr(reduction) in str(e.value)

  @pytest.mark.parametrize("reduction", tf.compat.v1.losses.Reduction.all())
  def test_reductions_of_version_1(self, reduction: str) -> None:
    """All but the sum were divided by the number of towers."""
    if reduction == tf.compat.v1.losses.Reduction.NONE:
      return  # an error, above
    factor = 2 if reduction == tf.compat.v1.losses.Reduction.SUM else 1
    replicated = replicate_model_fn(
      lambda features, mode: TowerSpec(mode, tf.reduce_sum(features)),
      reduction,
      TWO,
    )
    spec = replicated(tf.constant([1.0, 3.0]), mode="eval")
    assert float(spec.loss) == 2.0 * factor

  @pytest.mark.parametrize("device", ["CPU:17", "TPU:0"])
  def test_devices(self, device: str) -> None:
    with pytest.raises(ValueError, match="of this machine") as caught:
      replicate_model_fn(lambda features: None, devices=["CPU:0", device])
    assert repr(device) in str(caught.value)
    with pytest.raises(ValueError, match=r"`devices` must name at least one"):
      replicate_model_fn(lambda features: None, devices=[])

  def test_no_function(self) -> None:
    with pytest.raises(TypeError, match="is not a callable object"):
      replicate_model_fn("model")  # type: ignore[arg-type]


def test_places() -> None:
  replicated = replicate_model_fn(lambda features: None, devices=["", ""])
  with (
    testbed.mirrored().scope(),
    pytest.raises(RuntimeError, match=r"the function given to `strategy\.run`"),
  ):
    replicated(batch())
  replicated = replicate_model_fn(lambda features: TowerSpec("train"))
  with pytest.raises(ValueError, match="`devices` must be given"):
    testbed.mirrored().run(lambda: replicated(batch()).loss)


def _other_strategy() -> Any:
  """An optimizer, and a variable, of another strategy than where it runs."""
  with tf.distribute.MirroredStrategy(list(TWO)).scope():
    d, optimizer = tf.Variable(1.0), TowerOptimizer(CrossShardOptimizer(sgd()))
    optimizer.build([d])
  return lambda grad: optimizer.apply_gradients([(grad, d)])


def _no_row(row: int) -> Any:
  table, optimizer = tf.Variable([[1.0], [2.0]]), TowerOptimizer(sgd)
  rows = tf.IndexedSlices(tf.ones([2, 1]), [0, row], [2, 1])
  return lambda grad: optimizer.apply_gradients([(rows, table)])


@pytest.mark.parametrize(
  ("second", "error", "words"),
  [
    (
      lambda b: lambda g: b.other.apply_gradients([(tf.ones([2]), b.c)]),
      ValueError,
      "of their variables' shapes",
    ),
    (
      lambda b: lambda g: b.other.apply_gradients([(g, b.c)], bogus=3),
      TypeError,
      "unexpected keyword argument 'bogus'",
    ),
    (
      lambda b: lambda g: b.other.apply_gradients([(g, b.c)], tf.Variable(1.0)),
      TypeError,
      "`global_step` must be an integer",
    ),
    (lambda b: _other_strategy(), RuntimeError, "strategy"),
    (lambda b: _no_row(2), ValueError, "which has 2, has the rows 0 to 2"),
    (lambda b: _no_row(-1), ValueError, "which has 2, has the rows -1 to 0"),
  ],
)
def test_nothing_is_half_done(
  bench: Bench, second: Any, error: Any, words: str
) -> None:
  """The first of two optimizers has not applied when the second is found."""
  call = second(bench)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    grad = tf.reduce_sum(features)
    bench.first.apply_gradients([(grad, bench.c)])
    return TowerSpec(mode, None, call(grad))

  bench.fails(model_fn, error, words)


def test_no_rows_are_no_error() -> None:
  table, optimizer = tf.Variable([[1.0], [2.0]]), TowerOptimizer(sgd)
  none = tf.IndexedSlices(tf.ones([0, 1]), tf.zeros([0], tf.int32), [2, 1])

  def model_fn(features: Any, mode: str) -> TowerSpec:
    return TowerSpec(mode, None, optimizer.apply_gradients([(none, table)]))

  replicate_model_fn(model_fn, devices=TWO)(batch())
  assert table.numpy().tolist() == [[1.0], [2.0]]


def test_a_step_that_fails_builds_no_optimizer() -> None:
  c, d = tf.Variable(10.0), tf.Variable(10.0)
  optimizer, other = TowerOptimizer(sgd), TowerOptimizer(sgd)
  other.build([c])
  is_bad = [True]

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum((c + d) * features)
    if is_bad[0]:
      optimizer.minimize(loss, var_list=[c])
      other.apply_gradients([(tf.constant(1.0), d)])
    else:  # Built on all that it updates, in both calls.
      optimizer.minimize(loss, var_list=[c])
      optimizer.minimize(loss, var_list=[d])
    return TowerSpec(mode, loss)

  replicated = replicate_model_fn(model_fn, devices=TWO)
  with pytest.raises(ValueError, match=r"Unknown variable|was built"):
    tf.function(replicated)(batch())
  is_bad[0] = False
  tf.function(replicated)(batch())
  assert float(c) == float(d) == 7.0


def test_gradients_of_one_s_own_under_a_mean_are_warned_of(
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
  assert "in 2 towers whose mean is wanted" in line
  assert "multiply the loss by 0.5" in line


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
