"""Gradients that travel in eight bits, with error feedback.

Between processes: `tests/multi_process/multi_worker_test.py`.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import fake_engine, group_training, int8_oracle, testbed
from tf_cross_shard import CrossShardOptimizer, replica_state
from tf_cross_shard import groups as groups_lib
from tf_cross_shard.gradients import quantization
from tf_cross_shard.inner_optimizer import optimizer_state
from tf_cross_shard.step import int8_wire

STEPS = 4
# Smaller than a block, over the end of one, larger than one for each member;
# 1354 in all, which neither 256 nor 2, 3 or 4 parts of it divide.
SHAPES = [(3,), (2, 130), (), (2, 545)]
SIZES = [int(np.prod(shape)) for shape in SHAPES]
PAIRS = [[0, 2], [1, 3]]
ALL = [[2, 0, 1, 3]]
_rng = np.random.default_rng(11)
# By variable: [steps, replicas, ...], of other sizes, so that blocks matter.
GRADS = [
  scale * _rng.normal(size=(STEPS, 4, *shape)).astype("f")
  for scale, shape in zip((1.0, 30.0, 0.01, 2.0), SHAPES, strict=True)
]


def _sgd() -> Any:
  return keras.optimizers.SGD(1.0)


def _flat(values: Sequence[np.ndarray]) -> np.ndarray:
  """Values by variable, [steps, replicas, size]."""
  return np.concatenate([v.reshape(*v.shape[:2], -1) for v in values], axis=2)


def _applied(
  groups: Any, grads: np.ndarray, in_parts: bool = False
) -> tuple[np.ndarray, np.ndarray]:
  """The weights [replicas, size] after all steps, and what is left."""
  wire = int8_oracle.Wire(groups, grads.shape[-1])
  weights = np.zeros_like(wire.left)
  for row in grads:
    weights -= wire.sum(row, in_parts)
  return weights, wire.left


def _train(
  groups: Any = PAIRS,
  grads: Sequence[np.ndarray] = GRADS,
  make_opt: Callable[[], Any] = _sgd,
  **settings: Any,
) -> list[fake_engine.Replica]:
  """Replicas that have taken a step with each row of gradients."""
  trained = fake_engine.replicas(
    make_opt,
    [np.zeros(rows.shape[2:], "f") for rows in grads],
    groups=groups_lib.Groups(groups),
    wire_dtype="int8",
    **settings,
  )
  fake_engine.train(trained, grads)
  return trained


def _weights(trained: Sequence[fake_engine.Replica]) -> np.ndarray:
  return np.stack(
    [np.concatenate([v.ravel() for v in each.values]) for each in trained]
  )


def _left(trained: Sequence[fake_engine.Replica]) -> np.ndarray:
  return np.stack(
    [
      np.concatenate([v.numpy().ravel() for v in each.step.wire.variables])
      for each in trained
    ]
  )


@pytest.mark.parametrize(
  "groups", [PAIRS, ALL, [[0, 1, 2]], [[3], [0], [1], [2]]]
)
def test_numpy(groups: Any) -> None:
  trained = _train(groups)
  count = sum(map(len, groups))
  weights, left = _applied(groups, _flat(GRADS)[:, :count])
  if len(groups[0]) == 1:  # Nothing travels, and nothing is rounded.
    weights, left = -_flat(GRADS).sum(0, dtype="f"), np.zeros_like(left)
  np.testing.assert_array_equal(_weights(trained), weights)
  np.testing.assert_array_equal(_left(trained), left)
  for members in groups:
    for other in members[1:]:
      np.testing.assert_array_equal(*_weights(trained)[[members[0], other]])


def test_bytes() -> None:
  """One for a number, and one scale for a block, in each of two phases."""
  [trained, *_] = _train(grads=[rows[:1] for rows in GRADS])
  words = 2 * 65 * -(-sum(SIZES) // (2 * 256))
  sent = [t.shape.num_elements() for t in trained.engine.sent]
  # The fake engine gathers by sums: twice as much as there is.
  assert sent == [2 * words, words]
  assert {t.dtype for t in trained.engine.sent} == {tf.int32}


def test_what_eight_bits_carry_is_exact() -> None:
  rng = np.random.default_rng(0)
  base = rng.integers(-127, 128, [STEPS, 1, 1000]).astype("f")
  base[:, :, ::128] = 127  # In each block, so that scales are 1, 2 and 3.
  grads = base * np.array([1, 4, 2, 8], "f")[:, np.newaxis]
  trained = _train(grads=[grads])
  assert not _left(trained).any()
  sums = base.sum(0) * np.array([3, 12, 3, 12], "f")[:, np.newaxis]
  np.testing.assert_array_equal(_weights(trained), -sums)


def test_what_is_rounded_away_is_applied_later() -> None:
  """Of what was to be applied nothing is missing but what is left."""
  grads = np.tile(np.linspace(0.0, 1.0, 300, dtype="f"), [40, 4, 1])
  grads[:, :, 7] = 127 / 0.3  # Beside it most would be rounded to 0 each time.
  trained = _train(grads=[grads])
  weights, left = _weights(trained), _left(trained)
  for members in PAIRS:
    total = grads[:, members].sum((0, 1)) - left[members].sum(0)
    np.testing.assert_allclose(
      -weights[members[0]], total, rtol=1e-5, atol=1e-4
    )
  assert np.abs(left).max() < 10


def test_each_half_precision_keeps_its_dtype() -> None:
  trained = fake_engine.replicas(
    _sgd, [np.zeros(3, "float16")], groups=groups_lib.Groups(PAIRS),
    wire_dtype="int8",
  )  # fmt: skip
  base = np.array([127.0, -3.0, 0.0], "float16")
  fake_engine.train(trained, [np.tile(base, [1, 4, 1])])
  np.testing.assert_array_equal(trained[0].values[0], -2 * base)
  assert trained[0].step.wire.variables[0].dtype == tf.float32


def test_rows_and_what_is_not_trained_on_travel_in_half_precision() -> None:
  rows = np.array([1.0009765625, -3.14159, 100.25], "f")
  trained = fake_engine.replicas(
    _sgd, [np.zeros([4, 3], "f")], groups=groups_lib.Groups(PAIRS),
    wire_dtype="int8",
  )  # fmt: skip
  fake_engine.train(
    trained,
    [np.tile(rows, [1, 4, 1])],
    lambda row: tf.IndexedSlices(
      tf.constant(row[np.newaxis]), tf.constant([2]), [4, 3]
    ),
  )
  half = tf.cast(tf.cast(rows, tf.bfloat16), tf.float32).numpy()
  np.testing.assert_array_equal(trained[0].values[0][2], -2 * half)
  sent = {tensor.dtype for tensor in trained[0].engine.sent}
  assert sent == {tf.bfloat16, tf.int32}


def test_windows_send_their_means() -> None:
  trained = _train(accumulate_steps=2)
  means = _flat(GRADS).reshape(STEPS // 2, 2, 4, -1).sum(1) / np.float32(2)
  weights, left = _applied(PAIRS, means)
  np.testing.assert_array_equal(_weights(trained), weights)
  np.testing.assert_array_equal(_left(trained), left)


@pytest.mark.parametrize("groups", [PAIRS, ALL])
def test_sharded_updates_need_one_phase(groups: Any) -> None:
  trained = _train(groups, shard_update=True)
  weights, left = _applied(groups, _flat(GRADS), in_parts=True)
  np.testing.assert_allclose(_weights(trained), weights, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(_left(trained), left, rtol=1e-4, atol=1e-4)
  assert left.any(axis=1).all()


def test_owners_need_one_phase() -> None:
  trained = _train(shard_update="by_variable")
  values, left = _weights(trained), _left(trained)
  for members in PAIRS:
    np.testing.assert_array_equal(*values[members])
    total = _flat(GRADS)[:, members].sum((0, 1)) - left[members].sum(0)
    np.testing.assert_allclose(-values[members[0]], total, atol=1e-3)
    # Only one of two has something left: the owner adds up its own as it is.
    assert not (left[members] != 0).all(0).any()
    assert (left[members] != 0).any(0).mean() > 0.9


@pytest.mark.parametrize(
  ("bad", "settings"),
  [
    (float("nan"), {}),
    (float("inf"), {"shard_update": True}),
    (-float("inf"), {"shard_update": "by_variable"}),
  ],
)
def test_a_step_that_is_left_out_leaves_no_trace(
  bad: float, settings: dict[str, Any]
) -> None:
  """In its group; the other one takes it."""
  broken = [rows.copy() for rows in GRADS]
  broken[1][2, 2, 1, 3] = bad
  trained = _train(grads=broken, skip_nonfinite=True, **settings)
  without = _train(grads=[np.delete(rows, 2, 0) for rows in GRADS], **settings)
  for members, right in ((PAIRS[0], without), (PAIRS[1], _train(**settings))):
    for member in members:
      for found in (_weights, _left):
        np.testing.assert_array_equal(
          found(trained)[member], found(right)[member]
        )
  counts = [int(each.step.guard.count) for each in trained]
  assert counts == [1, 0, 1, 0]


def test_a_residual_is_never_lost_to_a_nan() -> None:
  """Also where nobody leaves steps out, in parts that others have."""
  broken = [rows.copy() for rows in GRADS]
  broken[3][2, 0, 1, 500:] = np.nan  # The part of the other member.
  for settings in ({}, {"shard_update": True}):
    assert np.isfinite(_left(_train(grads=broken, **settings))).all()


def test_what_is_left_knows_no_loss_scale() -> None:
  """The scale doubles after two steps; what was left before is doubled."""

  def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(
      _sgd(), initial_scale=1024.0, dynamic_growth_steps=2
    )

  scales = np.array([1024, 1024, 2048, 2048], "f")
  trained = _train(
    grads=[(rows.T * scales).T for rows in GRADS],  # Powers of two: exact.
    make_opt=scaled,
  )
  weights, left = _applied(PAIRS, _flat(GRADS))
  np.testing.assert_array_equal(_weights(trained), weights)
  np.testing.assert_array_equal(_left(trained), left)
  assert float(trained[0].opt.dynamic_scale.numpy()) == 4096


# ------------------------------------------------------------ on strategies


def _make(
  strategy: tf.distribute.Strategy, groups: Any, **options: Any
) -> tuple[list[Any], Any]:
  values = {f"weight_{i}": np.zeros(s, "f") for i, s in enumerate(SHAPES)}
  return group_training.build(
    *("keras", lambda _: _sgd(), values, strategy),
    group_assignment=groups,
    wire_dtype="int8",
    **options,
  )


def _copies(variables: Sequence[Any]) -> np.ndarray:
  copies = zip(*map(testbed.copies, variables), strict=True)
  return np.stack([np.concatenate([v.ravel() for v in row]) for row in copies])


@pytest.mark.parametrize(
  ("kind", "groups", "mode"),
  [
    ("mirrored", PAIRS, "function"),
    ("mirrored", [[0, 3], [1, 2]], "eager"),
    ("mirrored", PAIRS, "cond"),
    ("virtual", [[0, 3], [1, 2]], "function"),
  ],
)
def test_strategies(kind: str, groups: Any, mode: str) -> None:
  """The same numbers on all of them, to the bit where nothing is fused."""
  strategy = testbed.virtual(4) if kind == "virtual" else testbed.mirrored()
  weights, optimizer = _make(strategy, groups)
  group_training.train(weights, optimizer, GRADS, None, strategy, mode)
  values, left = _applied(groups, _flat(GRADS))
  found, residuals = _copies(weights), _copies(optimizer._step.wire.variables)
  for members in groups:
    np.testing.assert_array_equal(*found[list(members)])
  if kind == "virtual":
    np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-4)
  else:
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(residuals, left)


@pytest.mark.parametrize("options", [{}, {"shard_update": True}])
def test_a_restored_run_goes_on_to_the_bit(
  options: dict[str, Any], tmp_path: pathlib.Path
) -> None:
  strategy, train = testbed.mirrored(), group_training.train
  weights, optimizer = _make(strategy, PAIRS, **options)
  train(weights, optimizer, GRADS, range(2))
  replica_state.save(tmp_path / "state", optimizer, weights)
  train(weights, optimizer, GRADS, range(2, STEPS))
  others, again = _make(strategy, PAIRS, **options)
  replica_state.restore(tmp_path / "state", again, others)
  assert _copies(again._step.wire.variables).any(axis=1).all()
  train(others, again, GRADS, range(2, STEPS))
  np.testing.assert_array_equal(_copies(others), _copies(weights))
  for members in PAIRS:  # The members' own, which differ.
    left = _copies(again._step.wire.variables)[members]
    assert (left[0] != left[1]).any()


# ---------------------------------------------------------------- the rounding


def test_names_in_files_know_no_numbers_of_a_program() -> None:
  """Of `variable` and `variable_1` the latter is no slot of the former."""
  tf.keras.Variable(0.0)  # Keras then gives these names.
  names = []
  for numbers in (("", "_1"), ("_4", "_5")):
    weights = [
      tf.keras.Variable(np.zeros(3), name=f"variable{number}")
      for number in numbers
    ]
    optimizer = CrossShardOptimizer("sgd", wire_dtype="int8")
    optimizer.build(weights)
    names.append([n for n, _ in optimizer_state.state_variables(optimizer)])
  assert names[0] == names[1]


def test_groups_of_another_size_begin_without_residuals(
  tmp_path: pathlib.Path,
) -> None:
  """Their mean would count twice in four members, and never in one."""
  pair = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  weights, optimizer = _make(pair, None)
  group_training.train(weights, optimizer, GRADS, range(2), pair)
  assert _copies(optimizer._step.wire.variables).any()
  replica_state.save(tmp_path / "state", optimizer, weights)
  others, again = _make(testbed.mirrored(), None)
  replica_state.restore(tmp_path / "state", again, others)
  assert not _copies(again._step.wire.variables).any()


def test_vectors_are_rounded_each_by_itself() -> None:
  rows = _rng.normal(size=(2, 3, 300)).astype("f")
  words = quantization.encode(tf.constant(rows))
  assert words.shape == [2, 3, 2 * 65]
  found = quantization.decode(words, 300).numpy()
  right = [[int8_oracle.rounded(row) for row in part] for part in rows]
  np.testing.assert_array_equal(found, right)


def test_the_largest_floats_are_no_infinity_afterwards() -> None:
  most = np.finfo("f").max
  for number in (most, np.nextafter(most, np.float32(0))):
    row = np.full(300, number, "f")
    found = quantization.decode(quantization.encode(tf.constant(row)), 300)
    assert not np.isinf(found).any()


def test_it_is_refused_where_workers_have_no_order() -> None:
  class Many(fake_engine.FakeEngine):
    can_exchange = False

  [engine, *_] = fake_engine.engines()
  engine.__class__ = Many
  inner: Any = None
  with pytest.raises(NotImplementedError, match='`wire_dtype` is "int8"'):
    int8_wire.Int8Wire(engine, inner)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
