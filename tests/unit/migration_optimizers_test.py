"""From a version 1 optimizer to a CrossShardOptimizer, and over replicas.

The oracle is the version 1 optimizer itself, which is fed the group's sum.
"""
# keras: both

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import tf_cross_shard
from tests.support import testbed
from tf_cross_shard import migration

train = tf.compat.v1.train
tpu = tf.compat.v1.tpu

SHAPE = (5, 2)
STEPS = 6
# On integers sums are exact, so that only the update rounds.
BOUND = 1e-6

KINDS: dict[str, Callable[[], Any]] = {
  "descent": lambda: train.GradientDescentOptimizer(0.05),
  "momentum": lambda: train.MomentumOptimizer(0.05, 0.5),
  # 1 - beta2^t loses digits where beta2 is almost 1: see inner_v1_keras_test.
  "adam": lambda: train.AdamOptimizer(0.05, beta2=0.9),
  "adagrad": lambda: train.AdagradOptimizer(0.05),
  "rmsprop": lambda: train.RMSPropOptimizer(
    0.05, momentum=0.5, epsilon=1e-3, centered=True
  ),
  "adadelta": lambda: train.AdadeltaOptimizer(0.5, epsilon=1e-3),
  "ftrl": lambda: train.FtrlOptimizer(
    0.05,
    l1_regularization_strength=0.5,
    l2_shrinkage_regularization_strength=0.05,
  ),
}


@functools.cache
def _data(num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
  """Gradients and rows, by step and replica; no two replicas have the same."""
  rng = np.random.default_rng(4)
  grads = rng.integers(-3, 4, size=(STEPS, num_replicas, *SHAPE))
  rows = rng.integers(0, SHAPE[0] - 1, size=(STEPS, num_replicas, 3))
  flat = grads.reshape(STEPS, num_replicas, -1)
  assert not (flat == flat[:, :1]).all(axis=2)[:, 1:].any(), "same data"
  return grads.astype("float32"), rows


def _first() -> np.ndarray:
  return np.linspace(-1.0, 1.0, 10).reshape(SHAPE).astype("float32")


def _expected(
  opt: Any, members: Sequence[int], num_replicas: int, sparse: bool
) -> np.ndarray:
  """Version 1's optimizer on the sum of the members' gradients."""
  variable = tf.Variable(_first())
  grads, rows = _data(num_replicas)
  for grad, row in zip(grads, rows, strict=True):
    if sparse:
      total: Any = tf.IndexedSlices(
        tf.concat([grad[i, :3] for i in members], axis=0),
        tf.concat([row[i] for i in members], axis=0),
        tf.constant(SHAPE),
      )
    else:
      total = tf.constant(grad[list(members)].sum(axis=0))
    opt.apply_gradients([(total, variable)])
  return np.asarray(variable.numpy())


def _train(
  strategy: tf.distribute.Strategy, optimizer: Any, weight: Any, sparse: bool
) -> None:
  """Applies each replica's own gradients."""

  @tf.function(autograph=False)
  def step(grad: tf.Tensor, row: tf.Tensor) -> None:
    def replica_step() -> None:
      mine = testbed.replica_id()
      own: Any = grad[mine]
      if sparse:
        own = tf.IndexedSlices(own[:3], row[mine], tf.constant(SHAPE))
      optimizer.apply_gradients([(own, weight)])

    strategy.run(replica_step)

  for grad, row in zip(*_data(strategy.num_replicas_in_sync), strict=True):
    step(tf.constant(grad), tf.constant(row))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("grouping", ["ungrouped", "strided"])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas(kind: str, grouping: str, sparse: bool) -> None:
  strategy = testbed.mirrored()
  groups = testbed.GROUPINGS[grouping]
  with strategy.scope():
    weight = testbed.variable(_first(), "weight")
    opt = tpu.CrossShardOptimizer(KINDS[kind](), group_assignment=groups)
    optimizer = migration.from_v1(opt)
    optimizer.build([weight])
  _train(strategy, optimizer, weight, sparse)
  held = testbed.copies(weight)
  assert len(held) == testbed.REPLICAS > 1
  expected = {}
  for members in testbed.groups_of(groups):
    value = _expected(KINDS[kind](), members, testbed.REPLICAS, sparse)
    moved = np.abs(value - _first()).max(axis=1)
    assert (moved[:-1] > 1e-3).all()
    assert (moved[-1] == 0.0) == sparse
    for replica in members:
      assert np.abs(held[replica] - value).max() <= BOUND * np.abs(value).max()
      assert (held[replica] == held[members[0]]).all()
    expected[members[0]] = value.tolist()
  assert len({str(each) for each in expected.values()}) == len(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_virtual_tpu(kind: str) -> None:
  """Compiled; rows become dense there, as version 1 made them on a TPU."""
  strategy = testbed.virtual(2)
  with strategy.scope():
    weight = testbed.variable(_first(), "weight")
    optimizer = migration.from_v1(tpu.CrossShardOptimizer(KINDS[kind]()))
    optimizer.build([weight])
  _train(strategy, optimizer, weight, sparse=False)
  value = _expected(KINDS[kind](), (0, 1), 2, sparse=False)
  held = testbed.copies(weight)
  assert len(held) == 2
  for each in held:
    assert np.abs(each - value).max() <= 5 * BOUND


def test_the_mean_is_kept() -> None:
  """By default as in version 1: the loss is divided, gradients are summed."""
  strategy = testbed.mirrored()
  with strategy.scope():
    weight = testbed.variable(0.0)
    optimizer = migration.from_v1(train.GradientDescentOptimizer(1.0))

  @tf.function(autograph=False)
  def step() -> None:
    def replica_step() -> None:
      slope = tf.cast(testbed.replica_id() + 1, tf.float32)
      optimizer.minimize(lambda: slope * weight, var_list=[weight])

    strategy.run(replica_step)

  step()
  assert [float(x) for x in testbed.copies(weight)] == [-2.5] * 4


def test_replicas_draw_the_same_noise() -> None:
  """Otherwise each of them would go its own way."""
  strategy = testbed.mirrored()
  with strategy.scope():
    weight = testbed.variable(_first(), "weight")
    decay = train.noisy_linear_cosine_decay(0.25, tf.Variable(0), 10)
    optimizer = migration.from_v1(train.GradientDescentOptimizer(decay))
    optimizer.build([weight])
  _train(strategy, optimizer, weight, sparse=False)
  held = testbed.copies(weight)
  assert len(held) == testbed.REPLICAS > 1
  assert (held[0] != _first()).all()
  for each in held[1:]:
    np.testing.assert_array_equal(each, held[0])


def test_the_kind_is_the_chosen_keras() -> None:
  optimizer = migration.from_v1(train.AdamOptimizer(0.5, name="mine"))
  assert type(optimizer) is tf_cross_shard.CrossShardOptimizer
  assert isinstance(optimizer, tf.keras.optimizers.Optimizer)
  assert isinstance(optimizer.inner_optimizer, tf.keras.optimizers.Adam)
  assert (optimizer.reduction, optimizer.name) == (
    "mean",
    "CrossShardOptimizer",
  )
  assert optimizer.inner_optimizer.name == "mine"


def test_arguments_of_version_1s_own_are_kept() -> None:
  reduction = tf.compat.v1.losses.Reduction
  for spelling, meaning in ((reduction.SUM, "sum"), (reduction.MEAN, "mean")):
    optimizer = migration.from_v1(
      tpu.CrossShardOptimizer(
        train.AdamOptimizer(0.5),
        reduction=spelling,
        name="mine",
        group_assignment=[[0]],
      )
    )
    assert optimizer.reduction == meaning
    assert optimizer.name == "mine"
    assert optimizer.group_assignment == [[0]]


def test_slashes_in_names_become_what_keras_takes() -> None:
  optimizer = migration.from_v1(
    tpu.CrossShardOptimizer(
      train.MomentumOptimizer(0.5, 0.5, name="train/Mom"), name="train/Cross"
    )
  )
  assert optimizer.name == "train_Cross"
  assert optimizer.inner_optimizer.name == "train_Mom"


def test_what_became_what_is_said_once(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  lines: list[str] = []

  def collect(text: str, *args: Any) -> None:
    lines.append(text % args)

  monkeypatch.setattr(logging, "info", collect)
  decay = train.exponential_decay(0.5, tf.Variable(7), 10, 0.5)
  tf_cross_shard.CrossShardOptimizer(train.MomentumOptimizer(decay, 0.25))
  [line] = lines
  home = "tf_keras" if testbed.IS_TF_KERAS else "keras"
  assert line == (
    "tf.compat.v1.train.MomentumOptimizer 'Momentum' became V1Momentum, a"
    f" kind of {home}.SGD, with learning_rate=ExponentialDecay from iteration"
    " 7, momentum=0.25, nesterov=False."
  )


class TestRefusals:
  @pytest.mark.parametrize(
    ("make", "words"),
    [
      (
        lambda: tf.keras.optimizers.Adam(),
        r"got .*Adam, which is a Keras optimizer already\. Pass it to Cross",
      ),
      (
        lambda: tf_cross_shard.CrossShardOptimizer("sgd"),
        r"got .*CrossShardOptimizer, which is a Keras optimizer already",
      ),
      (lambda: "adam", r"got 'adam'\. Pass it to CrossShardOptimizer"),
      (lambda: 1, r"got builtins\.int\. Pass one such as tf\.compat\.v1"),
    ],
  )
  def test_what_is_no_version_1_optimizer(
    self, make: Callable[[], Any], words: str
  ) -> None:
    with pytest.raises(TypeError, match=f"`opt` must be a version 1.*{words}"):
      migration.from_v1(make())

  def test_version_1s_own_is_not_encapsulated(self) -> None:
    opt = tpu.CrossShardOptimizer(train.AdamOptimizer(0.5))
    words = r"reduced twice\..*tf_cross_shard\.migration\.from_v1"
    with pytest.raises(ValueError, match=words):
      tf_cross_shard.CrossShardOptimizer(opt)
    with pytest.raises(ValueError, match=words):
      migration.from_v1(tpu.CrossShardOptimizer(opt))

  def test_one_without_an_equal(self) -> None:
    with pytest.raises(TypeError, match=r"cannot be converted.*proximal"):
      migration.from_v1(
        tpu.CrossShardOptimizer(train.ProximalAdagradOptimizer(0.5))
      )


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
