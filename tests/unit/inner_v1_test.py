"""What a version 1 optimizer is in Keras, and what is refused."""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tf_cross_shard.migration import v1, v1_rates

train = tf.compat.v1.train


def _graph_tensor() -> Any:
  with tf.Graph().as_default():
    return tf.constant(0.5)


def _logged(monkeypatch: pytest.MonkeyPatch, level: str) -> list[str]:
  """Collects what is logged from here on."""
  lines: list[str] = []

  def collect(text: str, *args: Any) -> None:
    lines.append(text % args)

  monkeypatch.setattr(logging, level, collect)
  return lines


class TestRecipe:
  @pytest.mark.parametrize(
    ("make", "kind", "settings"),
    [
      (lambda: train.GradientDescentOptimizer(0.5), "SGD", {}),
      (
        lambda: train.MomentumOptimizer(0.5, 0.75, use_nesterov=True),
        "Momentum",
        {"momentum": 0.75, "nesterov": True},
      ),
      (
        lambda: train.AdamOptimizer(0.5, 0.25, 0.75, 0.125),
        "Adam",
        {"beta_1": 0.25, "beta_2": 0.75, "epsilon": 0.125},
      ),
      (
        lambda: train.AdagradOptimizer(0.5, 0.25),
        "Adagrad",
        {"initial_accumulator_value": 0.25, "epsilon": 0.0},
      ),
      (
        lambda: train.RMSPropOptimizer(0.5, 0.75, 0.25, 0.125, centered=True),
        "RMSProp",
        {"rho": 0.75, "momentum": 0.25, "epsilon": 0.125, "centered": True},
      ),
      (
        lambda: train.AdadeltaOptimizer(0.5, 0.75, 0.125),
        "Adadelta",
        {"rho": 0.75, "epsilon": 0.125},
      ),
      (
        lambda: train.FtrlOptimizer(
          0.5,
          -0.25,
          0.75,
          l1_regularization_strength=1.0,
          l2_regularization_strength=2.0,
          l2_shrinkage_regularization_strength=3.0,
          beta=4.0,
        ),
        "Ftrl",
        {
          "learning_rate_power": -0.25,
          "initial_accumulator_value": 0.75,
          "l1_regularization_strength": 1.0,
          "l2_regularization_strength": 2.0,
          "l2_shrinkage_regularization_strength": 3.0,
          "beta": 4.0,
        },
      ),
    ],
  )
  def test_reads_every_setting(
    self, make: Callable[[], Any], kind: str, settings: dict[str, Any]
  ) -> None:
    found = v1.recipe(make())
    assert (found.kind, found.rate) == (kind, 0.5)
    assert found.settings == settings
    for name, value in settings.items():
      assert type(found.settings[name]) is type(value), name
    assert found.start == 0

  def test_keeps_the_name(self) -> None:
    assert v1.recipe(train.AdamOptimizer(name="mine")).name == "mine"

  @pytest.mark.parametrize(
    "kind", [int, np.float32, np.asarray, tf.convert_to_tensor]
  )
  def test_numbers_of_every_kind(self, kind: Callable[[int], Any]) -> None:
    number = kind(1)
    found = v1.recipe(train.MomentumOptimizer(number, number))
    assert (found.rate, found.settings["momentum"]) == (1.0, 1.0)
    assert type(found.rate) is type(found.settings["momentum"]) is float


class TestRate:
  def test_a_variable_is_read_in_every_step(self) -> None:
    rate = tf.Variable(0.5)
    found = v1.recipe(train.AdamOptimizer(rate)).rate
    assert callable(found)
    assert float(v1_rates.present(found)) == 0.5
    rate.assign(0.25)
    assert float(v1_rates.present(found)) == 0.25

  def test_a_function_stays_it(self) -> None:
    def rate() -> float:
      return 0.5

    assert v1.recipe(train.AdamOptimizer(rate)).rate is rate

  def test_a_schedule_starts_from_the_global_step(self) -> None:
    step = tf.Variable(7, dtype=tf.int64)
    decay = train.exponential_decay(0.5, step, 10, 0.75, staircase=True)
    found = v1.recipe(train.AdagradOptimizer(decay))
    assert found.start == 7
    assert found.rate == v1_rates.Decay(
      "ExponentialDecay",
      {
        "initial_learning_rate": 0.5,
        "decay_steps": 10.0,
        "decay_rate": 0.75,
        "staircase": True,
      },
      start=7,
    )

  def test_a_natural_exponential_is_an_exponential(self) -> None:
    decay = train.natural_exp_decay(0.5, tf.Variable(0), 10, 0.75)
    found = v1.recipe(train.AdagradOptimizer(decay)).rate
    assert isinstance(found, v1_rates.Decay)
    assert found.kind == "ExponentialDecay"
    assert found.settings["decay_rate"] == pytest.approx(np.exp(-0.75))

  @pytest.mark.parametrize("kind", [int, np.int64, tf.convert_to_tensor])
  def test_boundaries_stay_whole(self, kind: Callable[[int], Any]) -> None:
    """As float32, 30000001 and its neighbours are one number."""
    step = tf.Variable(0, dtype=tf.int64)
    boundaries = [kind(30000001), kind(5 * 10**8)]
    decay = train.piecewise_constant(step, boundaries, [4, 2, 1])
    found = v1.recipe(train.AdagradOptimizer(decay)).rate
    assert isinstance(found, v1_rates.Decay)
    boundaries, values = (found.settings[k] for k in ("boundaries", "values"))
    assert boundaries == [30000001, 5 * 10**8]
    assert [type(x) for x in boundaries] == [int, int]
    # Of integers Keras would make a rate that is one.
    assert [type(x) for x in values] == [float] * 3

  def test_a_step_that_is_a_number_stays_it(self) -> None:
    decay = train.exponential_decay(0.5, 10, 10, 0.75)
    assert v1.recipe(train.AdagradOptimizer(decay)).rate == 0.375

  @pytest.mark.parametrize("of", ["rate", "step"])
  def test_a_schedule_of_more_than_the_step_is_called(self, of: str) -> None:
    """Of a variable learning rate, or a step that is no count."""
    rate: Any = tf.Variable(0.5) if of == "rate" else 0.5
    step = tf.Variable(1 if of == "rate" else 1.0)
    decay = train.exponential_decay(rate, step, 1, 0.5)
    found = v1.recipe(train.AdagradOptimizer(decay)).rate
    assert callable(found)
    assert float(v1_rates.present(found)) == 0.25
    step.assign_add(1)
    assert float(v1_rates.present(found)) == 0.125

  def test_a_derived_schedule_is_called(self) -> None:
    decay = train.exponential_decay(0.5, tf.Variable(0), 10, 0.75)
    derived = type("ExponentialDecay", (type(decay.func),), {})
    assert derived.__module__ == __name__
    own = functools.partial(derived(0.5, 10, 0.75), *decay.args)
    assert v1.recipe(train.AdagradOptimizer(own)).rate is own


class TestPresent:
  def test_numbers_are_not_frozen_in_a_function(self) -> None:
    rates = {"now": 0.5}
    run = tf.function(lambda: v1_rates.present(lambda: rates["now"]))
    assert float(run()) == 0.5
    rates["now"] = 0.25
    assert float(run()) == 0.25
    assert run().dtype == tf.float32
    assert run().shape == []

  def test_eager_tensors_are_not_frozen_in_a_function(self) -> None:
    rates = {"now": tf.constant(0.5)}
    run = tf.function(lambda: v1_rates.present(lambda: rates["now"]))
    assert float(run()) == 0.5
    rates["now"] = tf.constant(0.25)
    assert float(run()) == 0.25

  @pytest.mark.parametrize(
    "wrap",
    [
      tf.constant,
      lambda x: tf.minimum(x, 1.0),
      lambda x: tf.reduce_mean(tf.fill([200], x)),
      lambda x: tf.cond(
        tf.greater(x, 0.0), lambda: tf.identity(x), lambda: -1.0
      ),
    ],
    ids=["constant", "minimum", "large", "branch"],
  )
  @pytest.mark.parametrize("kind", [float, tf.constant, np.float32])
  def test_what_is_made_of_them_is_not_frozen(
    self, kind: Callable[[float], Any], wrap: Callable[[Any], Any]
  ) -> None:
    rates = {"now": kind(0.5)}
    present = functools.partial(v1_rates.present, lambda: wrap(rates["now"]))

    @tf.function(autograph=False)
    def run() -> tuple[Any, Any]:
      # A graph keeps an eager tensor that it uses, here before it is asked for.
      return tf.add(rates["now"], 1.0), present()

    assert float(run()[1]) == float(present()) == 0.5
    rates["now"] = kind(0.25)
    assert float(run()[1]) == float(present()) == 0.25

  def test_a_large_eager_tensor_is_not_frozen(self) -> None:
    """A graph captures those that are not small, as it does variables."""
    rates = {"now": tf.fill([200], 0.5)}
    run = tf.function(
      lambda: v1_rates.present(lambda: tf.reduce_mean(rates["now"])),
      autograph=False,
    )
    assert float(run()) == 0.5
    rates["now"] = tf.fill([200], 0.25)
    assert float(run()) == 0.25

  def test_a_function_does_once_per_step_what_it_does(self) -> None:
    calls, count = [], tf.Variable(0)

    def rate() -> tf.Tensor:
      calls.append("call")
      count.assign_add(1)
      return tf.constant(0.5)

    run = tf.function(lambda: v1_rates.present(rate), autograph=False)
    run.get_concrete_function()
    assert (len(calls), int(count)) == (1, 0)
    for step in (1, 2, 3):
      run()
      assert (len(calls), int(count)) == (1 + step, step)

  @pytest.mark.parametrize("compiled", [False, True])
  def test_what_is_made_of_variables_is_read_without_python(
    self, compiled: bool
  ) -> None:
    rate, calls = tf.Variable(0.5), []

    def half() -> tf.Tensor:
      calls.append("call")
      return tf.cond(rate > 0.0, lambda: rate / 2.0, lambda: 0.0)

    run = tf.function(
      lambda: v1_rates.present(half), autograph=False, jit_compile=compiled
    )
    assert float(run()) == 0.25
    rate.assign(0.25)
    assert float(run()) == 0.125
    assert len(calls) <= 2

  def test_tensors_of_the_step_are_read_without_python(self) -> None:
    """Which cannot be read out of it, were they constants of its graph."""
    rates: dict[str, Any] = {}
    given = functools.partial(v1_rates.present, lambda: rates["given"] * 2.0)

    @tf.function(autograph=False)
    def run(given_rate: tf.Tensor) -> tuple[Any, ...]:
      rates.update(given=given_rate, made=tf.constant(0.125))
      return (
        v1_rates.present(lambda: rates["given"]),
        given(),
        tf.cond(given_rate > 0.0, given, lambda: 0.0),
        v1_rates.present(lambda: rates["made"]),
        v1_rates.present(lambda: rates["made"] * 2.0),
      )

    for rate in (0.5, 0.25):
      results = [float(x) for x in run(tf.constant(rate))]
      assert results == [rate, 2 * rate, 2 * rate, 0.125, 0.25]

  def test_random_numbers_are_drawn_in_every_step(self) -> None:
    run = tf.function(
      lambda: v1_rates.present(lambda: tf.random.uniform([])), autograph=False
    )
    assert len({float(run()) for _ in range(5)}) > 1

  def test_variables_are_read_without_python(self) -> None:
    """`py_function` cannot be compiled for a TPU; a variable can."""
    rate = tf.Variable(0.5, dtype=tf.float64)
    run = tf.function(lambda: v1_rates.present(lambda: rate), jit_compile=True)
    assert float(run()) == 0.5
    rate.assign(0.25)
    assert float(run()) == 0.25


def _derived() -> Any:
  return type("MyAdam", (train.AdamOptimizer,), {})(0.5)


def _other() -> Any:
  return type("Other", (train.Optimizer,), {})(use_locking=False, name="other")


def _scaled() -> Any:
  mixed_precision = tf.compat.v1.mixed_precision
  return mixed_precision.MixedPrecisionLossScaleOptimizer(
    train.AdamOptimizer(0.5), loss_scale=1.0
  )


class TestRefusals:
  @pytest.mark.parametrize(
    ("make", "words"),
    [
      (
        lambda: train.ProximalGradientDescentOptimizer(0.5),
        "ProximalGradientDescent'.*no .* proximal step.*"
        "GradientDescentOptimizer",
      ),
      (
        lambda: train.ProximalAdagradOptimizer(0.5),
        "ProximalAdagrad'.*no .* proximal step.* AdagradOptimizer",
      ),
      (
        lambda: train.AdagradDAOptimizer(0.5, tf.Variable(0)),
        "AdagradDA'.*averages duals.*FtrlOptimizer",
      ),
      (
        lambda: train.SyncReplicasOptimizer(train.AdamOptimizer(0.5), 2),
        "sync_replicas'.*parameter server.*hand over the optimizer within",
      ),
      (_scaled, "MixedPrecisionLossScaleOptimizer.*Keras' LossScaleOptimizer"),
      (_derived, "MyAdam 'Adam'.*derived from one of them.*update_step"),
      (_other, "Other 'other'.*another origin.*update_step"),
    ],
  )
  def test_what_has_no_equal(self, make: Callable[[], Any], words: str) -> None:
    opt = make()
    assert v1.is_v1(opt)
    with pytest.raises(TypeError, match=rf"`opt` cannot be converted.*{words}"):
      v1.recipe(opt)

  def test_what_reduces_gradients_itself(self) -> None:
    opt = tf.compat.v1.tpu.CrossShardOptimizer(
      train.AdamOptimizer(0.5), name="mine"
    )
    with pytest.raises(
      ValueError, match=r"got 'mine'.*reduced twice.*migration\.from_v1"
    ):
      v1.recipe(opt)

  @pytest.mark.parametrize(
    ("make", "argument"),
    [
      (lambda x: train.AdamOptimizer(x), "learning_rate"),
      (lambda x: train.MomentumOptimizer(0.5, x), "momentum"),
      (
        lambda x: train.AdamOptimizer(
          train.exponential_decay(x, tf.Variable(0), 1, 0.5)
        ),
        "initial_learning_rate",
      ),
    ],
  )
  def test_a_tensor_of_a_graph(
    self, make: Callable[[Any], Any], argument: str
  ) -> None:
    with pytest.raises(
      ValueError,
      match=rf"`{argument}` of tf\.compat\.v1\.train\.\w+ is Tensor\(.*belongs"
      " to a graph.*Pass a number.*in eager",
    ):
      v1.recipe(make(_graph_tensor()))

  @pytest.mark.parametrize("kind", ["function", "variable"])
  def test_other_settings_do_not_change(self, kind: str) -> None:
    value: Any = tf.Variable(0.5) if kind == "variable" else lambda: 0.5
    with pytest.raises(
      ValueError,
      match=r"`beta1` of .*AdamOptimizer is .*every step and Keras once\. Only"
      " a learning rate may change",
    ):
      v1.recipe(train.AdamOptimizer(0.5, beta1=value))

  @pytest.mark.parametrize("value", [[0.5, 0.5], "0.5", None])
  def test_what_is_no_number(self, value: Any) -> None:
    with pytest.raises(
      ValueError,
      match=rf"`learning_rate` .* must be a number; got "
      rf"{re.escape(repr(value))}\. Pass one",
    ):
      v1.recipe(train.AdamOptimizer(value))

  def test_a_negative_momentum(self) -> None:
    with pytest.raises(ValueError, match=r"`momentum` .* negative; got -0\.5"):
      v1.recipe(train.RMSPropOptimizer(0.5, momentum=-0.5))

  @pytest.mark.parametrize(
    ("make", "argument"),
    [
      (lambda x: train.RMSPropOptimizer(0.5, momentum=x), "momentum"),
      (lambda x: train.RMSPropOptimizer(0.5, decay=x), "decay"),
      (lambda x: train.AdamOptimizer(x), "learning_rate"),
      (lambda x: train.AdamOptimizer(0.5, epsilon=x), "epsilon"),
      (
        lambda x: train.AdamOptimizer(
          train.exponential_decay(x, tf.Variable(0), 1, 0.5)
        ),
        "initial_learning_rate",
      ),
    ],
  )
  @pytest.mark.parametrize("kind", [float, np.float32, tf.constant])
  def test_nan(
    self, kind: Any, make: Callable[[Any], Any], argument: str
  ) -> None:
    with pytest.raises(
      ValueError, match=rf"`{argument}` of .* must be a number; got NaN\. Pass"
    ):
      v1.recipe(make(kind(float("nan"))))

  @pytest.mark.parametrize("argument", ["beta1", "beta2"])
  @pytest.mark.parametrize(
    ("make", "kind"),
    [
      (lambda: np.float64(0.9), "float64"),
      (lambda: np.float64(0.5), "float64"),
      (lambda: np.asarray(0.9), "float64"),
      (lambda: tf.constant(0.9, tf.float64), "float64"),
      (lambda: np.float16(0.9), "float16"),
      (lambda: tf.constant(0.9, tf.bfloat16), "bfloat16"),
    ],
  )
  def test_powers_in_another_type(
    self, make: Callable[[], Any], kind: str, argument: str
  ) -> None:
    """Version 1 multiplies them in it: as far off as 9e-2 for 0.9999999."""
    value = make()
    opt = train.AdamOptimizer(0.5, **{argument: value})
    with pytest.raises(
      ValueError,
      match=rf"`{argument}` of tf\.compat\.v1\.train\.AdamOptimizer must be a"
      rf" Python number or float32; got {kind}, .*Pass float\(x\)",
    ):
      v1.recipe(opt)
    # The remedy is one.
    remedied = train.AdamOptimizer(0.5, **{argument: float(value)})
    found = v1.recipe(remedied).settings
    assert found[f"beta_{argument[-1]}"] == float(value)


def test_slashes_in_names() -> None:
  """Keras 3 refuses them."""
  opt = train.MomentumOptimizer(0.5, 0.5, name="train/Mom")
  assert v1.recipe(opt).name == "train_Mom"
  around = tf.compat.v1.tpu.CrossShardOptimizer(opt, name="a/b")
  assert v1.within(around)[1]["name"] == "a_b"


class TestWarnings:
  def test_of_float64(self, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _logged(monkeypatch, "warning")
    for value in (0.9, np.float32(0.9), np.float64(0.5), tf.constant(0.9)):
      v1.recipe(train.MomentumOptimizer(np.float64(0.1), value))
    assert lines == []
    v1.recipe(train.MomentumOptimizer(0.1, np.float64(0.9)))
    [line] = lines
    assert "`momentum` of tf.compat.v1.train.MomentumOptimizer is float" in line

  @pytest.mark.parametrize("argument", ["accum_name", "linear_name"])
  def test_of_names_of_slots(
    self, argument: str, monkeypatch: pytest.MonkeyPatch
  ) -> None:
    lines = _logged(monkeypatch, "warning")
    v1.recipe(train.FtrlOptimizer(0.5))
    assert lines == []
    v1.recipe(train.FtrlOptimizer(0.5, name="mine", **{argument: "acc"}))
    [line] = lines
    assert "train.FtrlOptimizer 'mine', its accum_name and linear_name" in line
    assert "are not kept. tf_cross_shard.migration.convert_checkpoint" in line
    assert "weight/mine and weight/mine_1." in line

  def test_of_slots_that_are_lost(
    self, monkeypatch: pytest.MonkeyPatch
  ) -> None:
    lines = _logged(monkeypatch, "warning")
    opt = train.AdamOptimizer(0.5)
    v1.recipe(opt)
    assert lines == []
    opt.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    v1.recipe(opt)
    [line] = lines
    assert "AdamOptimizer 'Adam' was used before" in line
    assert "tf_cross_shard.migration.convert_checkpoint" in line

  def test_of_adams_bias(self, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _logged(monkeypatch, "warning")
    for start in (0, 7):
      decay = train.exponential_decay(0.5, tf.Variable(start), 10, 0.75)
      v1.recipe(train.AdagradOptimizer(decay))
      v1.recipe(train.AdamOptimizer(decay))
    [line] = lines
    assert "AdamOptimizer 'Adam' starts at 7" in line
    assert "`global_step` of 0" in line


def test_within() -> None:
  opt = train.AdamOptimizer(0.5)
  around = tf.compat.v1.tpu.CrossShardOptimizer(
    opt,
    tf.compat.v1.losses.Reduction.SUM,
    name="mine",
    group_assignment=[[0], [1]],
  )
  assert v1.is_cross_shard(around)
  assert not v1.is_cross_shard(opt)
  assert v1.within(around) == (
    opt,
    {
      "reduction": tf.compat.v1.losses.Reduction.SUM,
      "name": "mine",
      "group_assignment": [[0], [1]],
    },
  )


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
