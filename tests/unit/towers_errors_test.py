"""What cannot work in towers is refused, and nothing has changed then."""
# keras: both

import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed, towers_bed
from tests.support.towers_bed import MODES, TWO, batch, caller, sgd
from tf_cross_shard import (
  CrossShardOptimizer,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)

keras = tf.keras
v1 = tf.compat.v1.train


class Bench:
  """Two variables, two optimizers, and a step that works."""

  def __init__(self, mode: str, devices: Any = TWO) -> None:
    self.mode = mode
    self.devices = devices
    self.c, self.d = tf.Variable(10.0, name="c"), tf.Variable(5.0, name="d")
    self.global_step = tf.Variable(0)
    self.first, self.second, self.other = (
      TowerOptimizer(make)
      for make in (
        lambda: sgd(momentum=0.5),
        lambda: sgd(momentum=0.5),
        keras.optimizers.Adam,
      )
    )
    for each in (self.first, self.second, self.other):
      testbed.build(each, [self.c, self.d])
    self.untouched = towers_bed.Untouched(
      [self.c, self.d, self.global_step], self.first, self.second, self.other
    )

  def minimize(self, optimizer: Any, loss: Any, variables: Any = None) -> Any:
    """One call as it should be, of whatever optimizer."""
    variables = variables or [self.c]
    return optimizer.minimize(loss, self.global_step, variables)

  def loss(self, features: Any) -> Any:
    """A loss of both variables."""
    return tf.reduce_sum((self.c + self.d) * features)

  def fails(
    self,
    model_fn: Callable[..., Any],
    error: Any,
    *words: str,
    features: Any = None,
    **options: Any,
  ) -> None:
    """A step is refused in these words, and leaves all as it was."""
    reduction = options.pop("loss_reduction", "sum")
    replicated = replicate_model_fn(model_fn, reduction, self.devices)
    step = caller(lambda x: replicated(x, **options), self.mode)
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


@pytest.fixture(params=MODES)
def bench(request: pytest.FixtureRequest) -> Bench:
  return Bench(request.param)


def _odd(
  bench: Bench, *calls: Callable[[Any], Any]
) -> Callable[..., TowerSpec]:
  """A model function that does other things in each tower."""
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    towers.append(len(towers))
    loss = bench.loss(features)
    return TowerSpec(mode, loss, calls[towers[-1] % len(calls)](loss))

  return model_fn


class TestTowersThatDiffer:
  def test_one_is_missing(self, bench: Bench) -> None:
    def both(loss: Any) -> Any:
      bench.minimize(bench.first, loss)
      return bench.minimize(bench.other, loss)

    def one(loss: Any) -> Any:
      return bench.minimize(bench.first, loss)

    bench.fails(
      _odd(bench, both, one),
      ValueError,
      "must call the same optimizers in the same order in every tower",
      "tower 1 called 1 optimizers, tower 0 called 2: Adam('",
      "is missing",
      "Nothing was applied",
    )

  def test_none_at_all(self, bench: Bench) -> None:
    bench.fails(
      _odd(
        bench,
        lambda loss: bench.minimize(bench.first, loss),
        lambda loss: None,
      ),
      ValueError,
      "tower 1 called 0 optimizers, tower 0 called 1: SGD('",
    )

  def test_only_the_second_calls(self, bench: Bench) -> None:
    bench.fails(
      _odd(
        bench,
        lambda loss: None,
        lambda loss: bench.minimize(bench.other, loss),
      ),
      ValueError,
      "tower 1 called Adam('",
      "which tower 0 did not call",
    )

  def test_one_more(self, bench: Bench) -> None:
    def both(loss: Any) -> Any:
      bench.minimize(bench.first, loss)
      return bench.minimize(bench.other, loss)

    bench.fails(
      _odd(bench, lambda loss: bench.minimize(bench.first, loss), both),
      ValueError,
      "tower 1 called Adam('",
      "which tower 0 did not call",
    )

  @pytest.mark.parametrize("other", ["other", "second"])
  def test_another_order(self, bench: Bench, other: str) -> None:
    # Two of one class are told apart as well as two of different classes.
    both = [bench.first, getattr(bench, other)]

    def forwards(loss: Any) -> Any:
      return [bench.minimize(each, loss) for each in both][-1]

    def backwards(loss: Any) -> Any:
      return [bench.minimize(each, loss) for each in both[::-1]][-1]

    name = "SGD('" if other == "second" else "Adam('"
    bench.fails(
      _odd(bench, forwards, backwards),
      ValueError,
      f"tower 1 called {name}",
      "where tower 0 called SGD('",
    )

  def test_another_class(self, bench: Bench) -> None:
    bench.fails(
      _odd(
        bench,
        lambda loss: bench.minimize(bench.first, loss),
        lambda loss: bench.minimize(bench.other, loss),
      ),
      ValueError,
      "tower 1 called Adam('",
      "where tower 0 called SGD('",
    )

  def test_another_object_of_the_class(self, bench: Bench) -> None:
    bench.fails(
      _odd(
        bench,
        lambda loss: bench.minimize(bench.first, loss),
        lambda loss: bench.minimize(bench.second, loss),
      ),
      ValueError,
      "tower 1 called SGD('",
    )

  def test_other_variables(self, bench: Bench) -> None:
    def of(*variables: Any) -> Callable[[Any], Any]:
      return lambda loss: bench.minimize(bench.first, loss, list(variables))

    bench.fails(
      _odd(bench, of(bench.c, bench.d), of(bench.d)),
      ValueError,
      "tower 1 called SGD('",
      "with the variables ['d",
      "tower 0 with ['c",
    )

  def test_the_third_of_four(self) -> None:
    for mode in MODES:
      bench = Bench(mode, towers_bed.FOUR)
      good = lambda loss, b=bench: b.minimize(b.first, loss)  # noqa: E731
      bad = lambda loss, b=bench: b.minimize(b.other, loss)  # noqa: E731
      bench.fails(
        _odd(bench, good, good, bad, good),
        ValueError,
        "tower 2 called Adam('",
        features=batch([1.0], [2.0], [3.0], [4.0]),
      )

  def test_losses_and_nests_of_other_shapes(self, bench: Bench) -> None:
    towers: list[int] = []

    def answer(**odd: Any) -> Callable[..., TowerSpec]:
      def model_fn(features: Any, mode: str) -> TowerSpec:
        towers.append(len(towers))
        loss = bench.loss(features)
        bench.minimize(bench.first, loss)
        fine: dict[str, Any] = {"predictions": {"a": features}, "loss": loss}
        return TowerSpec(mode, **(odd if len(towers) % 2 == 0 else fine))

      return model_fn

    bench.fails(
      answer(loss=None, predictions={"a": batch()}),
      ValueError,
      "`loss` must be given by every tower or by none; towers [1] gave None",
    )
    bench = Bench(bench.mode)
    bench.fails(
      answer(loss=tf.constant(1.0), predictions={"b": batch()}),
      ValueError,
      "`predictions` must have the same structure in every tower",
      "'a'",
      "'b'",
    )
    bench = Bench(bench.mode)
    bench.fails(
      answer(
        loss=tf.constant(1.0),
        predictions={"a": batch()},
        metrics={"m": keras.metrics.Mean()},
      ),
      ValueError,
      "`metrics` must have the same names in every tower; got [[], ['m']]",
    )

  def test_an_exception_in_the_last_tower(self, bench: Bench) -> None:
    def fail(loss: Any) -> Any:
      bench.minimize(bench.first, loss)
      bench.minimize(bench.other, loss)
      raise KeyError("the last tower")

    def good(loss: Any) -> Any:
      bench.minimize(bench.first, loss)
      return bench.minimize(bench.other, loss)

    bench.fails(_odd(bench, good, fail), KeyError, "the last tower")

  @pytest.mark.parametrize(
    "where", ["gradient", "loss", "predictions", "exports"]
  )
  def test_an_error_that_comes_late_when_the_program_runs(
    self, where: str
  ) -> None:
    for mode in MODES[1:]:  # Eagerly it comes before the tower returns.
      bench = Bench(mode)

      def model_fn(features: Any, mode: str, bench: Bench = bench) -> TowerSpec:
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
        if where == "loss":
          return TowerSpec(mode, tf.reduce_sum(answer), train_op)
        if where == "exports":
          return TowerSpec(mode, loss, train_op, None, None, {"a": answer})
        return TowerSpec(mode, loss, train_op, {"a": [answer]})

      bench.fails(model_fn, tf.errors.InvalidArgumentError, "bad")


def _plain(name: str) -> Any:
  """An optimizer that is not made for towers."""
  return {
    "keras": lambda: sgd(0.5),
    "keras adam": keras.optimizers.Adam,
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.5),
    "tf_keras adam": tf_keras.optimizers.Adam,
    "legacy": lambda: tf_keras.optimizers.legacy.SGD(0.5),
    "legacy adam": tf_keras.optimizers.legacy.Adam,
    "v1": lambda: v1.GradientDescentOptimizer(0.5),
    "v1 momentum": lambda: v1.MomentumOptimizer(0.5, 0.5),
    "cross": lambda: CrossShardOptimizer(sgd(0.5)),
  }[name]()


PLAIN = (
  "keras",
  "keras adam",
  "tf_keras",
  "tf_keras adam",
  "legacy",
  "legacy adam",
  "v1",
  "v1 momentum",
  "cross",
)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_optimizers(bench: Bench, name: str, beside: bool) -> None:
  optimizer = _plain(name)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    if beside:  # One that is right does not make the other right.
      bench.minimize(bench.first, bench.loss(features))
    optimizer.apply_gradients([(tf.reduce_sum(features), bench.d)])
    return TowerSpec(mode)

  bench.fails(
    model_fn,
    ValueError,
    "`model_fn` must apply gradients through a TowerOptimizer when it is"
    " replicated",
    *(() if bench.mode == "function" else ("TowerOptimizer(", "2 towers")),
  )


@pytest.mark.parametrize("name", PLAIN)
def test_plain_optimizers_are_fine_on_one_device(
  bench: Bench, name: str
) -> None:
  optimizer = _plain(name)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    optimizer.apply_gradients([(tf.reduce_sum(features), bench.d)])
    return TowerSpec(mode)

  caller(replicate_model_fn(model_fn, devices=TWO[:1]), bench.mode)(batch())
  assert float(bench.d) < 5.0


def test_no_optimizer_at_all(bench: Bench) -> None:
  bench.fails(
    lambda features: TowerSpec("train", bench.loss(features)),
    ValueError,
    "no TowerOptimizer was called in 2 towers in mode 'train'",
    "Use TowerOptimizer(optimizer)",
  )


class TestBatches:
  @pytest.mark.parametrize(
    ("features", "words"),
    [
      (lambda: tf.ones([3, 1]), "axis 0 has length 3"),
      (
        lambda: {"a": tf.ones([2]), "b": tf.ones([5, 2])},
        "axis 0 has length 5",
      ),
      (lambda: tf.ones([0, 1]), "axis 0 has length 0"),
      (lambda: tf.constant(["a", "b", "c"]), "axis 0 has length 3"),
      (lambda: tf.ragged.constant([[1.0], [], [2.0]]), "axis 0 has length 3"),
      (lambda: tf.sparse.eye(3), "axis 0 has length 3"),
    ],
  )
  def test_does_not_divide(
    self, bench: Bench, features: Any, words: str
  ) -> None:
    if bench.mode == "function" and "sparse" in str(features().__class__):
      pytest.skip("known when it runs")
    bench.fails(
      _odd(bench, lambda loss: bench.minimize(bench.first, loss)),
      (ValueError, tf.errors.InvalidArgumentError),
      *(
        ("`features` must divide into 2 towers", words)
        if bench.mode == "eager"
        else ("divi",)
      ),
      features=features(),
    )

  def test_labels_do_not_divide(self) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> TowerSpec:
      raise AssertionError("called")

    replicated = replicate_model_fn(model_fn, devices=TWO)
    with pytest.raises(ValueError, match="`labels` must divide into 2 towers"):
      replicated(batch(), tf.ones([3]))

  def test_scalars(self, bench: Bench) -> None:
    bench.fails(
      _odd(bench, lambda loss: bench.minimize(bench.first, loss)),
      ValueError,
      "`features` must hold tensors with the batch in axis 0; got a scalar",
      "`params`",
      features={"a": tf.constant(2.0)},
    )

  def test_no_tensor(self) -> None:
    replicated = replicate_model_fn(lambda features: None, devices=TWO)
    with pytest.raises(
      TypeError, match="`features` must hold tensors, arrays or nests of them"
    ):
      replicated({"a": object()})

  def test_predictions_without_an_axis(self, bench: Bench) -> None:
    def model_fn(features: Any, mode: str) -> TowerSpec:
      loss = bench.loss(features)
      train_op = bench.minimize(bench.first, loss)
      return TowerSpec(mode, loss, train_op, {"loss": loss})

    bench.fails(
      model_fn,
      ValueError,
      "`predictions` must hold tensors with the batch in axis 0; got a scalar",
    )

  def test_labels_that_nobody_takes(self) -> None:
    replicated = replicate_model_fn(lambda features: None, devices=TWO)
    with pytest.raises(ValueError, match="`labels` were given"):
      replicated(batch(), tf.ones([2]))


class TestAnswers:
  def test_no_spec(self, bench: Bench) -> None:
    def model_fn(features: Any) -> Any:
      bench.minimize(bench.first, bench.loss(features))
      return {"loss": 3}

    bench.fails(
      model_fn,
      TypeError,
      "`model_fn` must return a TowerSpec; in tower 0 it returned {'loss': 3}",
    )

  def test_another_mode(self, bench: Bench) -> None:
    def model_fn(features: Any) -> TowerSpec:
      bench.minimize(bench.first, bench.loss(features))
      return TowerSpec("eval")

    bench.fails(
      model_fn,
      ValueError,
      "must return a TowerSpec of the mode it is called for, 'train'; in tower"
      " 0 it returned 'eval'",
    )

  def test_an_unknown_mode(self, bench: Bench) -> None:
    bench.fails(
      lambda features, mode: TowerSpec(mode),
      ValueError,
      "`mode` must be one of ['train', 'eval', 'infer']; got 'predict'",
      mode="predict",
    )

  @pytest.mark.parametrize(
    ("metrics", "words"),
    [
      ([1.0], "`metrics` must be a dictionary of tf.keras.metrics.Metric"),
      ({"a": 1.0}, "`metrics` must hold tf.keras.metrics.Metric objects"),
    ],
  )
  def test_no_metrics(self, bench: Bench, metrics: Any, words: str) -> None:
    def model_fn(features: Any, mode: str) -> TowerSpec:
      bench.minimize(bench.first, bench.loss(features))
      return TowerSpec(mode, metrics=metrics)

    bench.fails(model_fn, TypeError, words)


class TestNesting:
  def test_a_tower_in_a_tower(self) -> None:
    for within in (TowerOptimizer("sgd"), "cross"):
      opt = within
      if within == "cross":
        opt = CrossShardOptimizer("sgd")
        assert TowerOptimizer(opt).inner_optimizer is opt
        opt = TowerOptimizer(opt)
      with pytest.raises(ValueError, match="must not be or") as caught:
        TowerOptimizer(opt)
      assert (
        "`optimizer_or_optimizer_fn` must not be or contain a TowerOptimizer"
        in str(caught.value)
      )
      assert "Encapsulate its inner optimizer" in str(caught.value)

  def test_replicas_around_a_tower(self) -> None:
    with pytest.raises(ValueError, match="must not be or contain a Tower"):
      CrossShardOptimizer(TowerOptimizer("sgd"))

  def test_no_optimizer(self) -> None:
    argument = "`optimizer_or_optimizer_fn` must"
    with pytest.raises(TypeError, match=f"{argument} be an optimizer of"):
      TowerOptimizer(3)
    with pytest.raises(TypeError, match=f"{argument} be an optimizer of"):
      TowerOptimizer(lambda: None)
    with pytest.raises(ValueError, match=f"{argument} name a Keras optimizer"):
      TowerOptimizer("nobody")

  def test_replicated_twice(self) -> None:
    once = replicate_model_fn(lambda features: None, devices=TWO)
    with pytest.raises(ValueError, match="is replicated already"):
      replicate_model_fn(once, devices=TWO)

  def test_a_call_within_a_tower(self, bench: Bench) -> None:
    within = replicate_model_fn(lambda features: None, devices=TWO[:1])

    def model_fn(features: Any, mode: str) -> TowerSpec:
      bench.minimize(bench.first, bench.loss(features))
      within(features)
      return TowerSpec(mode)

    bench.fails(model_fn, ValueError, "Towers do not nest")


class TestMaking:
  def test_reductions(self) -> None:
    for reduction in ("none", "NONE", "most", None, 3):
      with pytest.raises(ValueError, match="must be one of") as caught:
        replicate_model_fn(lambda features: None, reduction, TWO)
      assert "`loss_reduction` must be one of" in str(caught.value)
      assert repr(reduction) in str(caught.value)

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

  def test_devices(self) -> None:
    with pytest.raises(ValueError, match=r"`devices` must name at least one"):
      replicate_model_fn(lambda features: None, devices=[])
    for device in ("CPU:17", "TPU:0", "/job:nobody/x", "first"):
      with pytest.raises(ValueError, match="of this machine") as caught:
        replicate_model_fn(lambda features: None, devices=["CPU:0", device])
      assert "`devices` must name devices of this machine" in str(caught.value)
      assert repr(device) in str(caught.value)

  def test_no_function(self) -> None:
    with pytest.raises(TypeError, match="`model_fn` must be a function"):
      replicate_model_fn("model")  # type: ignore[arg-type]


class TestPlaces:
  def test_the_cross_replica_context(self) -> None:
    replicated = replicate_model_fn(lambda features: None, devices=["", ""])
    with (
      testbed.mirrored().scope(),
      pytest.raises(
        RuntimeError, match=r"the function given to `strategy\.run`"
      ),
    ):
      replicated(batch())

  def test_devices_left_out_in_a_replica(self) -> None:
    replicated = replicate_model_fn(lambda features: TowerSpec("train"))
    with pytest.raises(ValueError, match="`devices` must be given"):
      testbed.mirrored().run(lambda: replicated(batch()).loss)

  def test_a_version_1_graph(self) -> None:
    replicated = replicate_model_fn(lambda features: None, devices=TWO)
    with (
      tf.Graph().as_default(),
      pytest.raises(RuntimeError, match="in a version 1 graph"),
    ):
      replicated(tf.ones([2, 1]))


def test_bad_pairs_are_refused_where_they_are_handed_in(bench: Bench) -> None:
  for pairs, error, words in (
    ([], ValueError, "at least one (gradient, variable) pair"),
    ([(None, bench.c)], ValueError, "a gradient that is not None"),
    ([(tf.ones([2]), bench.c)], ValueError, "of their variables' shapes"),
    ([(tf.ones([]), tf.ones([]))], TypeError, "`grads_and_vars` must hold tf."),
  ):
    bench = Bench(bench.mode)
    first: Any = bench.first

    def call(loss: Any, first: Any = first, pairs: Any = pairs) -> Any:
      return first.apply_gradients(pairs)

    bench.fails(_odd(bench, call), error, words)
  with pytest.raises(TypeError, match="`global_step` must be an integer"):
    bench.first.minimize(lambda: bench.c, global_step=tf.Variable(1.0))


def test_version_1_is_left_as_it_was() -> None:
  before = tf.compat.v1.train.Optimizer.apply_gradients
  seen = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    seen.append(tf.compat.v1.train.Optimizer.apply_gradients is before)
    return TowerSpec(mode, tf.reduce_sum(features))

  replicated = replicate_model_fn(model_fn, devices=TWO)
  replicated(tf.constant([[1.0], [2.0]]), mode="eval")
  assert seen == [False, False]
  assert tf.compat.v1.train.Optimizer.apply_gradients is before
  weight = tf.Variable(1.0)
  v1.GradientDescentOptimizer(0.5).apply_gradients([(tf.constant(1.0), weight)])
  assert float(weight.numpy()) == 0.5


class TestBeforeTheUpdate:
  """Found before the first of several optimizers has applied."""

  @pytest.mark.parametrize("mode", MODES)
  def test_a_variable_that_the_second_does_not_know(self, mode: str) -> None:
    a, b, c = (tf.Variable(10.0) for _ in "abc")
    first, second = TowerOptimizer(sgd()), TowerOptimizer(sgd())
    testbed.build(second.inner_optimizer, [b])

    def model_fn(features: Any, mode: str) -> TowerSpec:
      first.minimize(tf.reduce_sum(a * features), var_list=[a])
      second.apply_gradients([(tf.reduce_sum(features), c)])
      return TowerSpec(mode)

    replicated = caller(replicate_model_fn(model_fn, devices=TWO), mode)
    with pytest.raises((ValueError, KeyError), match=r"(?i)unknown variable"):
      replicated(batch())
    assert [float(v) for v in (a, b, c)] == [10.0] * 3
    assert int(first.iterations) == 0

  @pytest.mark.parametrize("mode", MODES)
  def test_one_optimizer_is_built_on_all_that_it_updates(
    self, mode: str
  ) -> None:
    a, b = tf.Variable(10.0), tf.Variable(10.0)
    optimizer = TowerOptimizer(sgd(momentum=0.5))

    def model_fn(features: Any, mode: str) -> TowerSpec:
      optimizer.minimize(tf.reduce_sum(a * features), var_list=[a])
      optimizer.minimize(tf.reduce_sum(2.0 * b * features), var_list=[b])
      return TowerSpec(mode)

    caller(replicate_model_fn(model_fn, devices=TWO), mode)(batch())
    assert [float(a), float(b)] == [7.0, 4.0]


@pytest.mark.parametrize("devices", [TWO, TWO[:1]])
@pytest.mark.parametrize("mode", MODES)
def test_optimizers_are_for_training(mode: str, devices: Any) -> None:
  c = tf.Variable(10.0)
  optimizer = TowerOptimizer(sgd())

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

  replicated = replicate_model_fn(model_fn, devices=devices)
  evaluate = caller(lambda x: replicated(x, mode="eval"), mode)
  with pytest.raises(ValueError, match='in the mode "train" only'):
    evaluate(batch())
  assert float(c) == 10.0
  caller(replicated, mode)(batch())
  assert float(c) == 7.0


def test_gradients_of_one_s_own_under_a_mean_are_warned_of(
  caplog: pytest.LogCaptureFixture,
) -> None:
  c = tf.Variable(10.0)
  optimizer = TowerOptimizer(sgd())

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
