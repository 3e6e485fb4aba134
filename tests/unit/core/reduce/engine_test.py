"""Tests which engine and which collective implementation a strategy gets."""

from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer
from tf_cross_shard import groups as groups_lib
from tf_cross_shard._src.core import reduce
from tf_cross_shard._src.core.reduce import (
  collective_ops,
  mirrored,
  multi_worker,
)
from tf_cross_shard._src.core.reduce import engine as engine_lib


def test_for_strategy() -> None:
  for strategy, engine in (
    (tf.distribute.get_strategy(), engine_lib.OneDevice),
    (tf.distribute.OneDeviceStrategy("CPU:0"), engine_lib.OneDevice),
    (testbed.mirrored(), mirrored.Mirrored),
    (tf.distribute.MirroredStrategy(["CPU:0"]), mirrored.Mirrored),
  ):
    found = reduce.for_strategy(strategy)
    assert type(found) is engine
    assert found.num_replicas == strategy.num_replicas_in_sync


def test_unknown_strategy_raises_not_implemented_error() -> None:
  strategy = tf.compat.v1.distribute.experimental.CentralStorageStrategy(
    ["CPU:0", "CPU:1"], "CPU:0"
  )
  with (
    strategy.scope(),
    pytest.raises(NotImplementedError, match=r"CentralStorage.*not known"),
  ):
    CrossShardOptimizer("sgd")


@pytest.mark.parametrize(
  ("devices", "physical", "logical", "asked", "hint"),
  [
    ("GPU:0 GPU:1", 2, 2, "auto", "nccl"),
    ("GPU:0 GPU:1", 4, 4, "auto", "nccl"),
    ("GPU:0 GPU:1", 1, 2, "auto", "ring"),  # NCCL needs a GPU for each.
    ("CPU:0 CPU:1", 2, 2, "auto", "ring"),
    ("CPU:0 GPU:0", 1, 1, "auto", "ring"),
    ("GPU:0 GPU:1", 2, 2, "ring", "ring"),
    ("GPU:0 GPU:1", 1, 2, "nccl", "nccl"),
  ],
)
def test_hint_for_chooses_nccl_or_ring(
  devices: str, physical: int, logical: int, asked: str, hint: str
) -> None:
  names = [f"/job:worker/task:0/device:{name}" for name in devices.split()]
  found = collective_ops.hint_for(names, physical, logical, asked)
  assert found == hint


def _traced(ops: collective_ops.CollectiveOps) -> list[tf.Operation]:
  """Returns four collectives of one replica in one function."""
  groups = groups_lib.contiguous(2, 2)
  found: list[tf.Operation] = []

  def trace() -> None:
    for name, dtypes in (
      (collective_ops.ALL_REDUCE, [tf.float32, tf.bfloat16]),
      (collective_ops.ALL_GATHER, [tf.int32]),
      (collective_ops.ALL_TO_ALL, [tf.float32]),
    ):
      rows = [tf.zeros([2, 2], dtype) for dtype in dtypes]
      found.extend(r.op for r in ops.run(name, rows, groups, 0, "CPU:0"))

  tf.function(trace, autograph=False).get_concrete_function()
  return found


@pytest.mark.parametrize(
  ("asked", "hints", "chains"),
  [
    # NCCL has neither a bfloat16 sum nor an all-to-all. Kernels of two chains
    # could start in another order on another device.
    ("nccl", ["nccl", "auto", "nccl", "auto"], 1),
    ("ring", ["ring", "ring", "ring", "auto"], 4),
  ],
)
def test_unsupported_dtypes_and_all_to_all_use_auto(
  asked: str, hints: list[str], chains: int
) -> None:
  ops = _traced(collective_ops.CollectiveOps(chains=4, hint=asked))
  found = [op.get_attr("communication_hint").decode() for op in ops]
  assert found == hints
  tokens = {op.inputs[-1].name for op in ops}
  assert len(tokens) == chains


@pytest.mark.parametrize(
  ("make", "method"),
  [
    (tf.distribute.HierarchicalCopyAllReduce, "CollectiveReduceV2 (ring)"),
    (tf.distribute.NcclAllReduce, "CollectiveReduceV2 (nccl)"),
    (lambda: None, "CollectiveReduceV2 (nccl)"),
  ],
)
def test_cross_device_ops_of_mirrored_strategy_are_used(
  make: Any, method: str
) -> None:
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], make())
  with mock.patch.object(
    type(strategy.extended), "worker_devices", ("/GPU:0", "/GPU:1")
  ):
    assert reduce.for_strategy(strategy).method == method


def test_communication_options_of_multi_worker_strategy_are_used() -> None:
  options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
  )
  strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=options
  )
  engine = multi_worker.MultiWorker(strategy, groups_lib.singletons(1))
  assert engine.method == "CollectiveReduceV2 (nccl)"


def test_workers_compare_variables_and_gradients_once() -> None:
  strategy = tf.distribute.MultiWorkerMirroredStrategy()
  lines = mock.Mock(return_value=["reduction: mean"])
  variables = [tf.Variable(1.0)]
  with (
    mock.patch.object(multi_worker.agreement, "of_strategy"),
    mock.patch.object(multi_worker.agreement, "compare_workers") as compare,
  ):
    engine = multi_worker.MultiWorker(strategy, groups_lib.singletons(1))
    for grad in (None, None, tf.constant(1.0), None):
      engine.compare_workers("a step", variables, [grad], lines)
  assert compare.call_count == lines.call_count == 2


def test_one_worker_of_a_multi_worker_strategy_accumulates() -> None:
  strategy = tf.distribute.MultiWorkerMirroredStrategy()
  assert strategy.num_replicas_in_sync == 1
  with strategy.scope():
    weight = tf.Variable(0.0)
    optimizer = CrossShardOptimizer(
      tf.keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    )
    optimizer.build([weight])

  @tf.function(autograph=False)
  def step() -> None:
    strategy.run(lambda: optimizer.apply([tf.constant(2.0)], [weight]))

  for expected in (0.0, -2.0, -2.0, -4.0):
    step()
    assert float(weight.numpy()) == expected
