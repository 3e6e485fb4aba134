"""Optimizers of version 1 in both Kerases, against `tf.compat.v1.train`.

The oracle is the version 1 optimizer itself, which is fed the group's sum. The
kernels are the same, so that numbers are equal to the bit where no other
program computes them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import keras3, migration
from tf_cross_shard import tf_keras as keras2

train = tf.compat.v1.train
tpu = tf.compat.v1.tpu

SHAPE = (5, 2)
TOUCHED = 4  # Rows of sparse gradients are among so many.
STEPS = 6
KERASES: dict[str, Any] = {"keras3": keras3, "tf_keras": keras2}
every_keras = pytest.mark.parametrize("which", KERASES)
every_form = pytest.mark.parametrize(
  "sparse", [False, True], ids=["dense", "sparse"]
)

# Whatever takes a learning rate, with settings that leave no term out.
KINDS: dict[str, Callable[[Any], Any]] = {
  "descent": train.GradientDescentOptimizer,
  "momentum": lambda rate: train.MomentumOptimizer(rate, 0.5),
  "momentum 0": lambda rate: train.MomentumOptimizer(rate, 0.0),
  "nesterov": lambda rate: train.MomentumOptimizer(
    rate, 0.75, use_nesterov=True
  ),
  "adam": lambda rate: train.AdamOptimizer(rate, 0.75, 0.99, 1e-3),
  "adagrad": lambda rate: train.AdagradOptimizer(rate, 0.5),
  "rmsprop": lambda rate: train.RMSPropOptimizer(rate, 0.75),
  "rmsprop centered": lambda rate: train.RMSPropOptimizer(
    rate, 0.75, 0.5, 1e-3, centered=True
  ),
  "adadelta": lambda rate: train.AdadeltaOptimizer(10 * rate, 0.75, 1e-3),
  "ftrl": lambda rate: train.FtrlOptimizer(
    rate,
    learning_rate_power=-0.75,
    initial_accumulator_value=0.5,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
    l2_shrinkage_regularization_strength=0.05,
    beta=0.5,
  ),
}
# Version 1's names of slots, by the two Kerases'.
SLOTS: dict[str, dict[str, str]] = {
  "descent": {"m": "m"},  # of tf_keras, which does not use it
  "momentum": {"momentum": "momentum", "m": "momentum"},
  "adam": {"momentum": "m", "velocity": "v", "m": "m", "v": "v"},
  "adagrad": {"accumulator": "accumulator"},
  "rmsprop": {
    "velocity": "rms",
    "momentum": "momentum",
    "average_gradient": "mg",
  },
  "adadelta": {
    "accumulated_grad": "accum",
    "accumulated_delta_var": "accum_update",
  },
  "ftrl": {"accumulator": "accum", "linear": "linear"},
}
SLOTS["nesterov"] = SLOTS["momentum"]


def _first() -> np.ndarray:
  return np.linspace(-1.0, 1.0, 10).reshape(SHAPE).astype("float32")


def _gradient(step: int, replica: int, sparse: bool) -> Any:
  """Of whole numbers; a sparse one has duplicate rows, and not the last."""
  rng = np.random.default_rng([step, replica])
  values = rng.integers(-2, 5, size=SHAPE).astype("float32")
  if not sparse:
    return tf.constant(values)
  rows = [replica, (replica + step) % TOUCHED, replica]
  return tf.IndexedSlices(
    tf.constant(values[:3]), tf.constant(rows), tf.constant(SHAPE)
  )


def _sum(grads: Sequence[Any]) -> Any:
  if not isinstance(grads[0], tf.IndexedSlices):
    return tf.add_n(grads)
  return tf.IndexedSlices(
    tf.concat([grad.values for grad in grads], axis=0),
    tf.concat([grad.indices for grad in grads], axis=0),
    tf.constant(SHAPE),
  )


def _expected(opt: Any, members: Sequence[int], sparse: bool) -> Any:
  """A variable that version 1 trained on the sum of the members' gradients."""
  variable = tf.Variable(_first())
  for step in range(STEPS):
    total = _sum([_gradient(step, i, sparse) for i in members])
    opt.apply_gradients([(total, variable)])
  return variable


@every_form
@pytest.mark.parametrize("kind", KINDS)
@every_keras
def test_steps_equal_version_1(which: str, kind: str, sparse: bool) -> None:
  theirs = KINDS[kind](0.05)
  other = _expected(theirs, [0, 1], sparse)
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
  variable = tf.Variable(_first())
  for step in range(STEPS):
    total = _sum([_gradient(step, i, sparse) for i in (0, 1)])
    ours.apply_gradients([(total, variable)])
  # Of those two Keras, or the dense kernel, computes rows in another order.
  tolerance = 1e-6 if sparse and kind in ("descent", "adam") else 0.0
  np.testing.assert_allclose(variable, other, rtol=tolerance, atol=tolerance)
  moved = np.abs(variable.numpy() - _first()).max(axis=1)
  assert (moved[:TOUCHED] > 1e-3).all()
  assert (moved[TOUCHED:] == 0.0).all() == sparse
  names = SLOTS[kind.split()[0]]
  slots = {names[n]: ours.get_slot(variable, n) for n in ours.get_slot_names()}
  if kind == "descent":
    return
  assert slots.keys() == set(theirs.get_slot_names())
  for name, slot in slots.items():
    expected = theirs.get_slot(other, name).numpy()
    np.testing.assert_allclose(slot, expected, rtol=tolerance, atol=tolerance)


def _train(
  strategy: tf.distribute.Strategy, optimizer: Any, weight: Any, sparse: bool
) -> None:
  """Applies each replica's own gradients."""
  replicas = strategy.num_replicas_in_sync

  @tf.function(autograph=False)
  def step(grads: Any) -> None:
    def replica_step() -> None:
      mine = testbed.replica_id()
      own = tf.nest.map_structure(lambda *of_all: tf.stack(of_all)[mine], *grads)
      if sparse:
        own = tf.IndexedSlices(*own, tf.constant(SHAPE))
      optimizer.apply_gradients([(own, weight)])

    strategy.run(replica_step)

  for i in range(STEPS):
    grads = [_gradient(i, replica, sparse) for replica in range(replicas)]
    step([(g.values, g.indices) if sparse else g for g in grads])


@every_form
@pytest.mark.parametrize("kind", KINDS)
def test_groups(kind: str, sparse: bool) -> None:
  strategy = testbed.mirrored()
  groups = testbed.GROUPINGS["strided"]
  assert groups is not None
  with strategy.scope():
    weight = testbed.variable(_first(), "weight")
    opt = tpu.CrossShardOptimizer(KINDS[kind](0.05), group_assignment=groups)
    optimizer = migration.from_v1(opt)
    optimizer.build([weight])
  _train(strategy, optimizer, weight, sparse)
  held = testbed.copies(weight)
  assert len(held) == testbed.REPLICAS > 1
  assert (held[0] != held[1]).any()
  for members in groups:
    expected = _expected(KINDS[kind](0.05), members, sparse).numpy()
    for replica in members:
      np.testing.assert_allclose(held[replica], expected, rtol=1e-6, atol=1e-6)
      assert (held[replica] == held[members[0]]).all()


@every_form
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_virtual_tpu(kind: str, sparse: bool) -> None:
  """Rows stay rows where nothing is summed, and are dense otherwise."""
  strategy = testbed.virtual(2)
  with strategy.scope():
    weight = testbed.variable(_first(), "weight")
    opt = tpu.CrossShardOptimizer(
      KINDS[kind](0.05), group_assignment=[[0], [1]] if sparse else None
    )
    optimizer = migration.from_v1(opt)
    optimizer.build([weight])
  _train(strategy, optimizer, weight, sparse)
  held = testbed.copies(weight)
  assert len(held) == 2
  for replica, members in enumerate([[0], [1]] if sparse else [[0, 1]] * 2):
    expected = _expected(KINDS[kind](0.05), members, sparse).numpy()
    np.testing.assert_allclose(held[replica], expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("kind", ["nesterov", "rmsprop centered", "ftrl"])
@every_keras
def test_compiled_rows(which: str, kind: str) -> None:
  """XLA has no kernels for rows; other rows stay all the same."""
  ours = KERASES[which].CrossShardOptimizer(KINDS[kind](0.05))
  variable = tf.Variable(_first())
  ours.build([variable])

  @tf.function(jit_compile=True)
  def step(values: tf.Tensor, indices: tf.Tensor) -> None:
    grad = tf.IndexedSlices(values, indices, tf.constant(SHAPE))
    ours.apply_gradients([(grad, variable)])

  for i in range(STEPS):
    grad = _gradient(i, 0, sparse=True)
    step(grad.values, grad.indices)
  theirs = KINDS[kind](0.05)
  other = _expected(theirs, [0], sparse=True)
  np.testing.assert_allclose(variable, other, rtol=5e-6, atol=5e-6)
  assert (variable.numpy()[TOUCHED:] == _first()[TOUCHED:]).all()
  for name in ours.get_slot_names():
    slot = theirs.get_slot(other, SLOTS[kind.split()[0]][name])
    mine = ours.get_slot(variable, name)
    np.testing.assert_allclose(mine, slot, rtol=5e-6, atol=5e-6)
