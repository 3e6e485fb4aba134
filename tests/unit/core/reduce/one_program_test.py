"""The program that the real TPUStrategy class traces."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.ops import summary_ops_v2
from tensorflow.python.tpu import tpu_system_metadata

from tests.support import testbed, tpu_tasks
from tf_cross_shard import CrossShardOptimizer, VectorizedStrategy, groups
from tf_cross_shard._src.core import reduce, single_program
from tf_cross_shard._src.core.reduce import one_program

_HOST_DEVICES = 8


class Resolver(tf.distribute.cluster_resolver.ClusterResolver):
  """Simulates a TPU slice with `num_devices` devices."""

  def __init__(self, num_devices: int) -> None:
    self._num_devices = num_devices
    self.task_type = "worker"
    self.task_id = 0

  def get_tpu_system_metadata(self) -> Any:
    """The parts of the TPU system that TPUStrategy reads."""
    on_host = min(_HOST_DEVICES, self._num_devices)
    devices = [
      session._DeviceAttributes(
        f"/job:worker/replica:0/task:{i // on_host}/device:TPU:{i % on_host}",
        "TPU",
        1,
        1,
      )
      for i in range(self._num_devices)
    ]
    return tpu_system_metadata.TPUSystemMetadata(
      num_cores=self._num_devices,
      num_hosts=self._num_devices // on_host,
      num_of_cores_per_host=on_host,
      topology=None,
      devices=devices,
    )

  def cluster_spec(self) -> Any:
    return tf.train.ClusterSpec({})

  def master(self, *args: Any, **kwargs: Any) -> str:
    return ""

  @property
  def environment(self) -> str:
    return ""

  def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
    return {"TPU": self._num_devices}


def nodes(graph: tf.Graph) -> Iterator[tuple[Any, dict[str, Any]]]:
  """Every operation of a graph and its functions, and its neighbours."""
  definition = graph.as_graph_def()
  for each in (
    definition.node,
    *(function.node_def for function in definition.library.function),
  ):
    neighbours = {node.name: node for node in each}
    for node in each:
      yield node, neighbours


def cross_replica_sums(graph: tf.Graph) -> list[tuple[Any, list[list[int]]]]:
  """Dtype and groups of every cross-replica sum in a graph."""
  found = []
  for node, neighbours in nodes(graph):
    if node.op == "CrossReplicaSum":
      groups = neighbours[node.input[1].split(":")[0]]
      table = tf.make_ndarray(groups.attr["value"].tensor)
      found.append((tf.as_dtype(node.attr["T"].type), table.tolist()))
  return found


def operations(graph: tf.Graph) -> set[str]:
  return {node.op for node, _ in nodes(graph)}


STRATEGIES = [
  tf.distribute.TPUStrategy,
  tf.distribute.experimental.TPUStrategy,
]


@pytest.fixture(autouse=True)
def _summaries_as_before() -> Iterator[None]:
  """Resets whether summaries are recorded.

  TPUStrategy sets this to a tensor of its graph.
  """
  yield
  state = summary_ops_v2._summary_state
  state.is_recording_distribution_strategy = True


def _strategy(num_replicas: int, kind: Any = STRATEGIES[0]) -> Any:
  strategy = kind(Resolver(num_replicas))
  assert strategy.num_replicas_in_sync == num_replicas > 1
  return strategy


def _trace(
  num_replicas: int,
  make_optimizer: Callable[[], Any],
  make_model: Callable[[], Any] = tpu_tasks.dense,
  in_function: bool = False,
  kind: Any = STRATEGIES[0],
) -> tuple[tf.Graph, list[Any]]:
  """The graph of a training step, and the model's weights."""
  with tf.Graph().as_default() as graph:
    strategy = _strategy(num_replicas, kind)
    with strategy.scope():
      model = make_model()
      optimizer = make_optimizer()
      optimizer.build(model.trainable_variables)
    shape = (4, *model.input_shape[1:])
    x = tf.zeros(shape, model.inputs[0].dtype)
    y = tf.zeros([4, 3])

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
      with tf.GradientTape() as tape:
        loss = tpu_tasks.loss(model, x, y)
      grads = tape.gradient(loss, model.trainable_variables)
      optimizer.apply(grads, model.trainable_variables)

    def step() -> Any:
      return strategy.run(replica_step, args=(x, y))

    if in_function:
      tf.function(step, autograph=False)()
    else:
      step()
    weights = list(model.trainable_variables)
  assert "TPUReplicateMetadata" in operations(graph)
  return graph, weights


def _adam() -> Any:
  return tf.keras.optimizers.Adam(0.01)


@pytest.mark.parametrize(
  ("grouping", "in_function", "kind"),
  [
    ([[0, 1, 2, 3], [4, 5, 6, 7]], True, STRATEGIES[1]),
    ([[0, 7], [1, 6], [2, 5], [3, 4]], False, STRATEGIES[0]),
    (None, True, STRATEGIES[0]),
  ],
)
def test_one_sum_per_gradient_over_the_groups(
  grouping: Any, in_function: bool, kind: Any
) -> None:
  graph, weights = _trace(
    8,
    lambda: CrossShardOptimizer(_adam(), group_assignment=grouping),
    in_function=in_function,
    kind=kind,
  )
  expected = grouping or [list(range(8))]
  sums = cross_replica_sums(graph)
  assert len(weights) == 4
  assert sums == [(tf.float32, expected)] * len(weights)
  others = {
    "AllToAll",
    "CollectivePermute",
    "CollectiveReduceV2",
    "XlaAllReduce",
  }
  assert not others & operations(graph)


# What has conditions of its own.
CONDITIONS: dict[str, Any] = {
  "gradient_accumulation_steps": 2,
  "use_ema": True,
  "ema_overwrite_frequency": 2,
  "weight_decay": 0.1,
  "global_clipnorm": 1.0,
}


@pytest.mark.parametrize(
  ("settings", "assigned", "model", "count"),
  [
    ({}, groups.singletons(8), "dense", 0),
    (CONDITIONS, groups.strided(8, 2), "dense", 4),
    ({}, None, "embedding", 3),  # Sparse gradients are summed dense.
  ],
)
def test_how_often_gradients_are_summed(
  settings: dict[str, Any], assigned: Any, model: str, count: int
) -> None:
  graph, _ = _trace(
    8,
    lambda: CrossShardOptimizer(
      tf.keras.optimizers.Adam(0.01, **settings), group_assignment=assigned
    ),
    tpu_tasks.MODELS[model],
  )
  assert len(cross_replica_sums(graph)) == count


def test_dtypes() -> None:
  halves = groups.Groups([[0, 1], [2, 3]])
  with tf.Graph().as_default() as graph:
    strategy = _strategy(4)
    engine = reduce.for_strategy(strategy, halves)
    assert type(engine) is one_program.OneProgram
    tensors = [tf.ones([2], dtype) for dtype in one_program.DTYPES]
    strategy.run(lambda: engine.all_reduce_sum(tensors))
  assert cross_replica_sums(graph) == [
    (dtype, halves.to_lists()) for dtype in one_program.DTYPES
  ]


def test_dtypes_that_tpus_do_not_sum() -> None:
  engine = reduce.for_strategy(testbed.virtual(2))
  with pytest.raises(
    TypeError, match=r"VirtualTPUStrategy sums only bfloat16, .* int64\."
  ):
    engine.all_reduce_sum([tf.zeros([2], tf.int64)])


def test_what_a_strategy_is() -> None:
  """What the package asks of a strategy: its program, and its copies."""
  for strategy, is_one, are_models, copies in (
    (testbed.virtual(2), True, False, 2),
    (VectorizedStrategy(3), True, True, 3),
    (testbed.mirrored(), False, False, testbed.REPLICAS),
    (tf.distribute.get_strategy(), False, False, 1),
  ):
    program = single_program.of_strategy(strategy)
    assert (program is not None) == is_one
    assert single_program.are_models(strategy) == are_models
    assert single_program.num_copies(strategy) == copies
