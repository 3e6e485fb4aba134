"""Settings that differ between groups, against plain Keras with each value."""

import contextlib
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import Models, VectorizedStrategy, keras3

GROUPS = [[0, 2], [3, 1]]
STEPS = 3
SHAPES = [(3, 4), (5,)]
_RNG = np.random.default_rng(5)
GRADS = [
  (_RNG.integers(-16, 17, (STEPS, 4, *shape)) / 8).astype("f")
  for shape in SHAPES
]
VALUES = {
  f"weight_{i}": _RNG.normal(size=shape).astype("f")
  for i, shape in enumerate(SHAPES)
}


def _train(
  which: str, make: Callable[[Any], Any], **options: Any
) -> tuple[list[list[np.ndarray]], Any]:
  """Returns each replica's weights after sums over groups."""
  options = {"group_assignment": GROUPS, **options}
  weights, optimizer = training.build(which, make, VALUES, **options)
  training.train(weights, optimizer, GRADS)
  return training.by_replica(weights), optimizer


def _check(
  held: list[list[np.ndarray]], expected: Callable[[int, Any], Any]
) -> None:
  """Compares each group's weights with what `expected` returns for it."""
  training.check_groups(
    held,
    GROUPS,
    lambda members: expected(GROUPS.index(members), members),
    lambda right, *_: 5e-6 * (1 + np.abs(right)),
  )


@pytest.mark.parametrize(
  ("which", "kind", "own", "numbers", "options"),
  [
    (
      *("keras", "AdamW", {}),
      *({"weight_decay": [0.0, 0.5], "beta_1": [0.9, 0.5]}, {}),
    ),
    (
      *("tf_keras", "AdamW", {}),
      *({"weight_decay": [0.5, 0.0]}, {"fused_update": False}),
    ),
    ("keras", "Adam", {}, {"epsilon": [0.5, 1e-7]}, {"shard_update": True}),
    ("tf_keras", "SGD", {"momentum": 0.5}, {"momentum": [0.0, 0.5]}, {}),
    ("keras", "Adamax", {}, {"beta_2": [0.5, 0.9]}, {"accumulate_steps": 1}),
    (
      *("tf_keras", "RMSprop", {"momentum": 0.5}),
      *({"rho": [0.5, 0.9], "momentum": [0.5, 0.0]}, {"skip_nonfinite": True}),
    ),
  ],
)
def test_each_group_trains_with_its_own_setting(
  which: str,
  kind: str,
  own: dict[str, Any],
  numbers: dict[str, list[float]],
  options: dict[str, Any],
) -> None:
  make = getattr(training.KERASES[which][0].optimizers, kind)
  held, optimizer = _train(
    which, lambda _: make(0.125, **own), per_model=numbers, **options
  )
  plain, opt = make(0.125, **own), optimizer.inner_optimizer
  assert all(getattr(opt, name) == getattr(plain, name) for name in numbers)

  def expected(group: int, members: Any) -> list[np.ndarray]:
    settings = {name: values[group] for name, values in numbers.items()}
    alone = training.make_weights(which, VALUES)
    plain = make(0.125, **{**own, **settings})
    training.train_plain(alone, plain, GRADS, members)
    return [weight.numpy() for weight in alone]

  _check(held, expected)
  assert np.abs(held[0][0] - held[1][0]).max() > 1e-3


@training.in_both
@pytest.mark.parametrize("virtual", [False, True])
def test_assigned_numbers_are_those_of_the_next_step(
  which: str, virtual: bool, tmp_path: pathlib.Path
) -> None:
  """To and from 0, too; the step is traced once."""
  strategy = testbed.virtual(4) if virtual else testbed.mirrored()
  before = {"momentum": [0.5, 0.0], "clipvalue": [0.0, 2.0]}
  after = {"momentum": [0.0, 0.75], "clipvalue": [1.0, 0.0]}

  def make() -> Any:
    return training.build(
      which,
      lambda library: library.optimizers.SGD(0.5, momentum=0.5),
      {"weight": 0.0},
      strategy,
      group_assignment=GROUPS,
      per_model=before,
    )

  [weight], optimizer = make()
  traces = []

  @tf.function
  def step() -> None:
    traces.append(1)

    def replica_step() -> None:
      optimizer.apply_gradients([(tf.constant(4.0), weight)])

    strategy.run(replica_step)

  step()
  step()
  count = len(traces)
  optimizer.per_model = after
  step()
  assert len(traces) == count
  found = [testbed.copies(weight)[members[0]] for members in GROUPS]
  # v = m * v - 0.5 * 2 * clip(4), w += v, for two steps and then one.
  assert found == [-4.0 - 6.0 - 1.0, -2.0 - 2.0 - (1.5 + 4.0)]
  assert optimizer.per_model == after
  assert optimizer.get_config()["per_model"] == after
  Models([weight], optimizer).save(tmp_path / "state")
  [weight], other = make()
  Models([weight], other).restore(tmp_path / "state")
  assert other.per_model == after
  with pytest.raises(ValueError, match="a number for each of the 2 models"):
    optimizer.per_model = {"momentum": [0.5]}
  assert optimizer.per_model == after


def test_averages_that_move_in_every_call() -> None:
  """The moving averages of a Keras 3 optimizer that accumulates."""
  own = {"use_ema": True, "gradient_accumulation_steps": 2}
  numbers = [0.5, 0.75]
  [weight], optimizer = training.build(
    "keras",
    lambda library: library.optimizers.SGD(0.5, ema_momentum=0.5, **own),
    {"weight": 1.0},
    group_assignment=GROUPS,
    per_model={"ema_momentum": numbers},
  )
  grads = np.ones((5, 4), "f")
  training.train([weight], optimizer, [grads])
  averages = testbed.copies(optimizer.get_slot(weight, "average"))
  for members, number in zip(GROUPS, numbers, strict=True):
    [plain] = training.make_weights("keras", {"weight": 1.0})
    sgd = keras.optimizers.SGD(0.5, ema_momentum=number, **own)
    training.train_plain([plain], sgd, [grads], members)
    for replica in members:
      assert averages[replica] == sgd.variables[2].numpy()


def test_limits_of_replicas() -> None:
  held, _ = _train(
    "keras",
    lambda _: keras.optimizers.SGD(1.0),
    per_model={"clipvalue": [0.5, 0.25]},
  )

  def expected(group: int, members: Any) -> list[np.ndarray]:
    limit = (0.5, 0.25)[group]
    return [
      value - np.clip(rows[:, members], -limit, limit).sum((0, 1))
      for value, rows in zip(VALUES.values(), GRADS, strict=True)
    ]

  _check(held, expected)


@pytest.mark.parametrize(
  ("opt", "numbers", "message"),
  [
    ("adam", {"beta_1": [0.5]}, "a number for each of the 2 models"),
    ("adam", {"weigth_decay": [0.5, 0.9]}, r"setting. Did you mean 'weight_d"),
    ("adam", {"strength": [0.5, 0.9]}, r"no such setting. Use one of \["),
    ("adam", {"weight_decay": [0.5, 0.9]}, "Adam.weight_decay is None"),
    ("adam", {"amsgrad": [0, 1]}, "Adam.amsgrad is False"),
    ("sgd", {"momentum": [0.0, 0.5]}, "with one of the nonzero numbers"),
    ("adagrad", {"initial_accumulator_value": [0.1, 0.2]}, "in its update"),
    (
      {"class_name": "SGD", "config": {"loss_scale_factor": 2.0}},
      {"loss_scale_factor": [2.0, 4.0]},
      "this setting has one value for all models",
    ),
    ("sgd", {"learning_rate": [0.1, 0.2]}, r"SGD\(schedules.PerModel"),
  ],
)
def test_bad_numbers(opt: Any, numbers: Any, message: str) -> None:
  with (
    testbed.mirrored().scope(),
    pytest.raises(ValueError, match=message),
  ):
    keras3.CrossShardOptimizer(opt, group_assignment=GROUPS, per_model=numbers)


@pytest.mark.parametrize("sqrt", [tf.sqrt, math.sqrt, np.sqrt])
def test_a_setting_that_a_class_reads_as_a_number(sqrt: Any) -> None:
  class Own(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
      self.assign_sub(variable, sqrt(1 - self.momentum) * gradient)

  strategy = VectorizedStrategy(2)
  [weight], optimizer = training.build(
    "keras",
    lambda _: Own(momentum=0.75),
    {"weight": 2.0},
    strategy,
    per_model={"momentum": [0.0, 0.75]},
  )
  words = r"'momentum', but the update of Own .* Compute with tf.sqrt\(self.mom"
  is_right = sqrt is tf.sqrt
  with (
    contextlib.nullcontext()
    if is_right
    else pytest.raises(ValueError, match=words)
  ):
    training.train([weight], optimizer, [np.ones([1, 2])], strategy=strategy)
  held = Models(optimizer=optimizer).values(weight)
  assert held.tolist() == ([1.0, 1.5] if is_right else [2.0, 2.0])


@pytest.mark.parametrize(
  ("kind", "own", "numbers"),
  [
    (
      *("AdamW", {"weight_decay": 0.5}),
      {"weight_decay": [0.0, 0.5], "beta_1": [0.5, 0.9]},
    ),
    ("SGD", {"momentum": 0.5}, {"momentum": [0.0, 0.5]}),
  ],
)
def test_replicas_of_one_program(
  kind: str, own: dict[str, Any], numbers: dict[str, list[float]]
) -> None:
  """The group is a tensor there, and so is its number."""
  groups, held = [[0], [1]], []
  for strategy in (testbed.mirrored(2), testbed.virtual(2)):
    weights, optimizer = training.build(
      "keras",
      lambda library: getattr(library.optimizers, kind)(0.125, **own),
      {"weight": np.ones(3, "f")},
      strategy,
      group_assignment=groups,
      per_model=numbers,
      clipnorm=8.0,
      fused_update=False,  # A TPU has no kernels, which round otherwise.
    )
    grads = [np.arange(18, dtype="f").reshape(3, 2, 3)]
    training.train(weights, optimizer, grads, strategy=strategy)
    held.append(Models(optimizer=optimizer).values(weights[0]))
  np.testing.assert_allclose(*held, rtol=2e-6, atol=1e-6)
  assert np.abs(held[0][0] - held[0][1]).max() > 1e-3


def _check_in_one_program(
  make: Callable[..., Any],
  numbers: dict[str, list[float]],
  own: list[dict[str, float]],
  dtype: str = "float32",
) -> None:
  """Compares groups of one replica with plain Keras, with its `own` numbers."""
  strategy = VectorizedStrategy(2)
  values = {name: value.astype(dtype) for name, value in VALUES.items()}
  grads = [rows[:, :2].astype(dtype) for rows in GRADS]
  grads[1][0] = 0  # A norm of 0, which limits of 0 would divide by.
  weights, optimizer = training.build(
    "keras",
    lambda _: make(),
    values,
    strategy,
    group_assignment=[[0], [1]],
    per_model=numbers,
  )
  training.train(weights, optimizer, grads, strategy=strategy)
  tolerance = 1e-6 if dtype == "float32" else 1e-14
  for group, options in enumerate(own):
    plain = training.make_weights("keras", values)
    training.train_plain(plain, make(**options), grads, [group])
    for weight, expected in zip(weights, plain, strict=True):
      np.testing.assert_allclose(
        testbed.copies(weight)[group], expected, tolerance, tolerance
      )


def test_kernels_of_replicas_of_one_program() -> None:
  powers = [-0.5, -0.25]
  _check_in_one_program(
    functools.partial(keras.optimizers.Ftrl, 0.125),
    {"learning_rate_power": powers},
    [{"learning_rate_power": power} for power in powers],
  )


@pytest.mark.parametrize(
  ("numbers", "own", "dtype"),
  [
    ({"clipnorm": [0.0, 0.3]}, [{}, {"clipnorm": 0.3}], "float64"),
    (
      *({"global_clipnorm": [0.3, 0.0]}, [{"global_clipnorm": 0.3}, {}]),
      "float32",
    ),
    (
      {"clipnorm": [0.0, 0.3], "clipvalue": [0.1, 0.1]},
      [{"clipvalue": 0.1}, {"clipnorm": 0.3}],
      "float64",
    ),
  ],
)
def test_limits_of_replicas_of_one_program(
  numbers: dict[str, list[float]], own: list[dict[str, float]], dtype: str
) -> None:
  """A limit of 0 does not clip, in the groups that have it."""
  make = functools.partial(keras.optimizers.SGD, 1.0)
  _check_in_one_program(make, numbers, own, dtype)
