"""Tests which engine and which collective implementation a strategy gets."""

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


def _traced(ops: collective_ops.CollectiveOps) -> list[tf.Operation]:
  """Returns four collectives of one replica in one function."""
  caller = collective_ops.Caller(groups_lib.contiguous(2, 2), 0, "CPU:0")
  found: list[tf.Operation] = []

  def trace() -> None:
    for name, dtypes in (
      (collective_ops.ALL_REDUCE, [tf.float32, tf.bfloat16]),
      (collective_ops.ALL_GATHER, [tf.int32]),
      (collective_ops.ALL_TO_ALL, [tf.float32]),
    ):
      rows = [tf.zeros([2, 2], dtype) for dtype in dtypes]
      found.extend(r.op for r in ops.run(name, rows, caller))

  tf.function(trace, autograph=False).get_concrete_function()
  return found


@pytest.mark.parametrize(("device", "chains"), [("CPU", 4), ("GPU", 1)])
def test_chains_and_communication_options_of_several_workers(
  device: str, chains: int
) -> None:
  """GPUs may start the kernels of two chains in different orders, and hang."""
  options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
  )
  strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=options
  )
  with mock.patch.object(
    type(strategy.extended), "worker_devices", (f"/{device}:0",)
  ):
    engine = multi_worker.MultiWorker(strategy, groups_lib.singletons(1))
  assert engine.method == "CollectiveReduceV2 (nccl)"
  traced = _traced(engine._collectives)
  hints = {op.get_attr("communication_hint") for op in traced}
  assert hints == {b"nccl"}
  assert len({op.inputs[-1].name for op in traced}) == chains


def test_tensorflow_chooses_the_collectives_of_one_machine() -> None:
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  with mock.patch.object(
    type(strategy.extended), "worker_devices", ("/GPU:0", "/GPU:1")
  ):
    engine = mirrored.Mirrored(strategy, groups_lib.contiguous(2, 2))
  assert engine.method == "CollectiveReduceV2"
  traced = _traced(engine._collectives)
  assert {op.get_attr("communication_hint") for op in traced} == {b"auto"}
  assert len({op.inputs[-1].name for op in traced}) == 1


def test_workers_compare_variables_and_gradients_once() -> None:
  strategy = tf.distribute.MultiWorkerMirroredStrategy()
  lines = mock.Mock(return_value=["reduction: mean"])
  variables = [tf.Variable(1.0)]
  with (
    mock.patch.object(multi_worker.workers_lib, "of_strategy"),
    mock.patch.object(multi_worker.workers_lib, "compare_workers") as compare,
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
