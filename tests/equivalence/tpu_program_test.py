"""Tests the collectives in a training step that the TPU compiler compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed, tpu_tasks
from tf_cross_shard import CrossShardOptimizer, groups, virtual_tpu

TOPOLOGIES = {"v5e:4x2": 8, "v5p:2x2x2": 8, "v6e:16x16": 256}


def _compile(
  topology: str,
  make_optimizer: Callable[[], Any],
  make_model: Callable[[], Any] = tpu_tasks.dense,
) -> tuple[virtual_tpu.Report, int]:
  """Compiles a step; returns the report, and the bytes of its gradients."""
  strategy = testbed.virtual(TOPOLOGIES[topology])
  with strategy.scope():
    model = make_model()
    optimizer = make_optimizer()
    optimizer.build(model.trainable_variables)

  def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      value = tpu_tasks.loss(model, x, y)
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(value, weights), weights)
    return value

  args = (
    tf.TensorSpec([4, *model.input_shape[1:]], model.inputs[0].dtype),
    tf.TensorSpec([4, 3]),
  )
  report = virtual_tpu.compile_for(
    topology, replica_step, args, strategy=strategy
  )
  assert report.num_replicas == TOPOLOGIES[topology]
  return report, 4 * model.count_params()


@pytest.mark.parametrize(
  ("topology", "assigned", "model"),
  [
    ("v5e:4x2", None, "embedding"),
    ("v5p:2x2x2", groups.strided(8, 4), "dense"),
    ("v6e:16x16", groups.contiguous(256, 128), "dense"),
  ],
)
def test_gradients_cross_once_within_their_groups(
  topology: str, assigned: groups.Groups | None, model: str
) -> None:
  replicas, make_model = TOPOLOGIES[topology], tpu_tasks.MODELS[model]
  report, size = _compile(
    topology,
    lambda: CrossShardOptimizer(
      tf.keras.optimizers.Adam(0.01), group_assignment=assigned
    ),
    make_model,
  )
  [collective] = report.collectives
  in_force = assigned or groups.contiguous(replicas, replicas)
  assert collective.kind == "all-reduce"
  assert collective.groups == in_force.assignment
  assert report.wire_bytes == size
  if assigned is None:
    plain, _ = _compile(
      topology, lambda: tf.keras.optimizers.Adam(0.01), make_model
    )
    # Plain Keras' int64 counter takes the first replica's value.
    assert report.wire_bytes == plain.wire_bytes - 8
    assert report.argument_bytes <= plain.argument_bytes
    assert report.temp_bytes <= plain.temp_bytes


def test_state_in_shards() -> None:
  """Adam's two slots, and the part that it updates, have a quarter's size."""

  def wide() -> Any:
    layers = [tf.keras.layers.Dense(512), tf.keras.layers.Dense(3)]
    return tf.keras.Sequential([tf.keras.Input([512]), *layers])

  halves = groups.contiguous(8, 4)

  def compile_step(shard_update: bool) -> tuple[virtual_tpu.Report, int]:
    return _compile(
      "v5e:4x2",
      lambda: CrossShardOptimizer(
        tf.keras.optimizers.Adam(0.01),
        group_assignment=halves,
        shard_update=shard_update,
      ),
      wide,
    )

  (plain, size), (sharded, _) = compile_step(False), compile_step(True)
  saved = plain.argument_bytes - sharded.argument_bytes
  assert saved == pytest.approx(2 * size - 3 * size / 4, rel=0.01)
  # This compiler makes an all-reduce of a reduce-scatter.
  kinds = [each.kind for each in sharded.collectives]
  assert kinds in (
    ["all-reduce", "all-to-all"],
    ["reduce-scatter", "all-to-all"],
  )
  assert {each.groups for each in sharded.collectives} == {halves.assignment}
