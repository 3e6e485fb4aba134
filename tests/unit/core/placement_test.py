"""Tests that a training step stays on the device of its variables.

The second logical CPU stands for an accelerator, so that a copy from or to the
host, the first one, is a pair of `_Send` and `_Recv` in the optimized graph.
What has no kernel on an accelerator is not seen here.
"""

from collections import Counter
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tf_cross_shard import CrossShardOptimizer, layers

DEVICE = "CPU:1"
COPIES = "_Send", "_Recv", "_HostSend", "_HostRecv"


def operations(step: Any, *args: tf.Tensor) -> Counter[str]:
  """Returns how often each operation is in the optimized graphs of a step."""
  context.enable_run_metadata()
  try:
    context.export_run_metadata()  # What ran before does not count.
    step(*args)
    graphs = context.export_run_metadata().function_graphs
  finally:
    context.disable_run_metadata()
  parts = [part for graph in graphs for part in graph.partition_graphs]
  nodes = [node for part in parts for node in part.node]
  for part in parts:
    nodes += [node for f in part.library.function for node in f.node_def]
  return Counter(node.op for node in nodes)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"fused_update": False},
    {"accumulate_steps": 2},
    {"skip_nonfinite": True, "global_clipnorm": 1.0},
    {"lazy_rows": True},
  ],
  ids=lambda options: "-".join(options) or "defaults",
)
def test_no_copy_between_host_and_device(options: dict[str, Any]) -> None:
  strategy = tf.distribute.OneDeviceStrategy(DEVICE)
  with strategy.scope():
    table = tf.keras.layers.Embedding
    if options.get("lazy_rows"):
      table = layers.Embedding
    model = tf.keras.Sequential(
      [
        tf.keras.Input([3], dtype="int64"),
        *(table(50, 4), tf.keras.layers.Flatten()),
        *(tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(1)),
      ]
    )
    optimizer = CrossShardOptimizer(tf.keras.optimizers.Adam(), **options)
    optimizer.build(model.trainable_variables)
  for variable in [*model.variables, *optimizer.variables]:
    assert variable.value.device.endswith(DEVICE)

  def replica_step(x: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
      loss = optimizer.scale_loss(tf.reduce_mean(model(x) ** 2))
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(
      zip(grads, model.trainable_variables, strict=True)
    )

  @tf.function(autograph=False)
  def step(x: tf.Tensor) -> None:
    strategy.run(replica_step, args=(x,))

  with tf.device(DEVICE):
    # TensorFlow keeps int32 tensors on the host.
    x = tf.reshape(tf.range(12, dtype=tf.int64), [4, 3])
  found = operations(step, x)
  assert found["ReadVariableOp"]  # The graph is the step's.
  assert not [op for op in found if op in COPIES or "PyFunc" in op]


def test_a_copy_is_seen() -> None:
  variables = []
  for device in ("CPU:0", DEVICE):
    with tf.device(device):
      variables.append(tf.Variable(1.0))

  @tf.function(autograph=False)
  def step() -> None:
    variables[1].assign_add(variables[0])

  assert operations(step)["_Send"] == 1
