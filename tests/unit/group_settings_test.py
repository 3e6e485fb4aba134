"""Settings that differ between groups, against plain Keras with each."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import group_training, testbed
from tf_cross_shard import callbacks, keras3, schedules

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
  weights, optimizer = group_training.build(which, make, VALUES, **options)
  group_training.train(weights, optimizer, GRADS)
  copies = map(testbed.copies, weights)
  return [list(own) for own in zip(*copies, strict=True)], optimizer


@group_training.in_both
@pytest.mark.parametrize(
  ("kind", "own", "numbers", "options"),
  [
    ("AdamW", {}, {"weight_decay": [0.0, 0.5], "beta_1": [0.9, 0.5]}, {}),
    ("AdamW", {}, {"weight_decay": [0.5, 0.0]}, {"fused_update": False}),
    ("Adam", {}, {"epsilon": [0.5, 1e-7]}, {"shard_update": True}),
    ("SGD", {"momentum": 0.5}, {"momentum": [0.0, 0.5]}, {}),
    (
      "Adamax",
      {},
      {"beta_2": [0.5, 0.9]},
      {"shard_update": "by_variable", "accumulate_steps": 1},
    ),
    (
      "RMSprop",
      {"momentum": 0.5},
      {"rho": [0.5, 0.9], "momentum": [0.5, 0.0]},
      {"skip_nonfinite": True},
    ),
  ],
)
def test_each_group_has_its_own(
  kind: str,
  own: dict[str, Any],
  numbers: dict[str, list[float]],
  options: dict[str, Any],
  which: str,
) -> None:
  make = getattr(group_training.KERASES[which][0].optimizers, kind)
  held, optimizer = _train(
    which, lambda _: make(0.125, **own), group_settings=numbers, **options
  )
  plain, opt = make(0.125, **own), optimizer.inner_optimizer
  assert all(getattr(opt, name) == getattr(plain, name) for name in numbers)
  for group, members in enumerate(GROUPS):
    settings = {name: values[group] for name, values in numbers.items()}
    alone = group_training.make_weights(which, VALUES)
    plain = make(0.125, **{**own, **settings})
    group_training.train_plain(alone, plain, GRADS, members)
    for replica in members:
      for weight, right in zip(held[replica], alone, strict=True):
        np.testing.assert_allclose(weight, right.numpy(), rtol=5e-6, atol=5e-6)
  assert np.abs(held[0][0] - held[1][0]).max() > 1e-3


@group_training.in_both
def test_the_powers_of_version_1_are_each_groups_own(which: str) -> None:
  """They begin with a factor, which is the group's too."""
  make, betas = tf.compat.v1.train.AdamOptimizer, [0.9, 0.5]
  held, _ = _train(
    which, lambda _: make(0.125, 0.75), group_settings={"beta_1": betas}
  )
  for members, beta in zip(GROUPS, betas, strict=True):
    alone, plain = list(map(tf.Variable, VALUES.values())), make(0.125, beta)
    for step in range(STEPS):
      sums = [tf.constant(rows[step, members].sum(0)) for rows in GRADS]
      plain.apply_gradients(zip(sums, alone, strict=True))
    for replica in members:
      for weight, right in zip(held[replica], alone, strict=True):
        np.testing.assert_allclose(weight, right, rtol=5e-6, atol=5e-6)


def test_averages_that_move_in_every_call() -> None:
  """Those of a Keras 3 optimizer that accumulates."""
  own = {"use_ema": True, "gradient_accumulation_steps": 2}
  numbers = [0.5, 0.75]
  [weight], optimizer = group_training.build(
    "keras",
    lambda library: library.optimizers.SGD(0.5, ema_momentum=0.5, **own),
    {"weight": 1.0},
    group_assignment=GROUPS,
    group_settings={"ema_momentum": numbers},
  )
  grads = np.ones((5, 4), "f")
  group_training.train([weight], optimizer, [grads])
  averages = testbed.copies(optimizer.get_slot(weight, "average"))
  for members, number in zip(GROUPS, numbers, strict=True):
    [plain] = group_training.make_weights("keras", {"weight": 1.0})
    sgd = keras.optimizers.SGD(0.5, ema_momentum=number, **own)
    group_training.train_plain([plain], sgd, [grads], members)
    for replica in members:
      assert averages[replica] == sgd.variables[2].numpy()


def test_limits_of_replicas() -> None:
  held, _ = _train(
    "keras",
    lambda _: keras.optimizers.SGD(1.0),
    group_settings={"clipvalue": [0.5, 0.25]},
  )
  for members, limit in zip(GROUPS, (0.5, 0.25), strict=True):
    for i, value in enumerate(VALUES.values()):
      clipped = np.clip(GRADS[i][:, members], -limit, limit).sum((0, 1))
      for replica in members:
        np.testing.assert_allclose(held[replica][i], value - clipped, rtol=1e-5)


@pytest.mark.parametrize(
  ("opt", "numbers", "message"),
  [
    ("adam", {"beta_1": [0.5]}, "a number for each of the 2 groups"),
    ("adam", {"beta_3": [0.5, 0.9]}, "Adam.beta_3 is None"),
    ("adam", {"amsgrad": [0, 1]}, "Adam.amsgrad is False"),
    ("sgd", {"momentum": [0.0, 0.5]}, "it has no slots for others"),
    ("sgd", {"learning_rate": [0.1, 0.2]}, r"SGD\(schedules.PerGroup"),
  ],
)
def test_bad_numbers(opt: str, numbers: Any, message: str) -> None:
  with (
    testbed.mirrored().scope(),
    pytest.raises(ValueError, match=message),
  ):
    keras3.CrossShardOptimizer(
      opt, group_assignment=GROUPS, group_settings=numbers
    )


def test_a_tpu_has_one_number() -> None:
  with testbed.virtual(2).scope(), pytest.raises(NotImplementedError) as error:
    keras3.CrossShardOptimizer(
      "adam", group_assignment=[[0], [1]], group_settings={"beta_1": [0.5, 0.9]}
    )
  assert "one program with one number for all" in str(error.value)


def test_groups_are_named_by_what_differs() -> None:
  with testbed.mirrored().scope():
    optimizer = keras3.CrossShardOptimizer(
      keras.optimizers.AdamW(schedules.PerGroup([0.5, 0.5])),
      group_assignment=GROUPS,
      group_settings={"weight_decay": [0.0, 0.5]},
    )
  names = callbacks.base.group_names(optimizer)
  assert names == ["lr=0.5, weight_decay=0", "lr=0.5, weight_decay=0.5"]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
