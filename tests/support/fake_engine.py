"""Runs the stages of a step on plain tensors, without a strategy.

Each replica is a thread.

    replica 0 ──┐           replica 1 ──┐
                ├─ a table              ├─ a table
    replica 2 ──┘           replica 3 ──┘

Each replica has a stage of its own, with its own variables, and runs eagerly.
In a collective, a replica waits for the other members of its group.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import groups as groups_lib
from tf_cross_shard._src.core import pipeline as pipeline_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core.gradients import compression
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

PAIRS = groups_lib.Groups([[0, 2], [1, 3]])
# The time limit for members that wait for a failed member, in seconds.
_SECONDS = 600.0
_Result = TypeVar("_Result")


class _Rendezvous:
  """Exchanges tensors between the members of one group."""

  def __init__(self, members: Sequence[int]) -> None:
    self._members = members
    self._tensors: dict[int, list[tf.Tensor]] = {}
    self.barrier = threading.Barrier(len(members))

  def meet(
    self, replica: int, tensors: Sequence[tf.Tensor]
  ) -> list[tuple[tf.Tensor, ...]]:
    """Returns all members' values of each tensor, in the members' order."""
    self._tensors[replica] = list(tensors)
    self.barrier.wait(_SECONDS)
    by_member = [self._tensors[member] for member in self._members]
    self.barrier.wait(_SECONDS)
    return list(zip(*by_member, strict=True))


class FakeEngine(engine_lib.Engine):
  """The engine of one replica, which exchanges tensors with its group.

  Attributes:
    replica: The number of the replica.
    sent: All tensors that the replica passed to collectives, in order.
  """

  def __init__(
    self,
    groups: groups_lib.Groups,
    replica: int,
    table: _Rendezvous,
  ) -> None:
    super().__init__(tf.distribute.get_strategy(), groups)
    self.replica = replica
    self.sent: list[tf.Tensor] = []
    self.table = table

  @property
  def num_replicas(self) -> int:
    return self.groups.num_replicas

  @property
  def local_replicas(self) -> range:
    return range(self.replica, self.replica + 1)

  def position(self) -> int:
    return sorted(self.groups.members_of(self.replica)).index(self.replica)

  def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.add_n(parts) for parts in self._meet(tensors)]

  def all_reduce_accumulate_f32(
    self, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Adds half precision in float32, as the Mirrored engine does."""
    return [
      tf.add_n([_widened(part) for part in parts])
      for parts in self._meet(tensors)
    ]

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.concat(parts, 0) for parts in self._meet(tensors)]

  def isolate(self) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()

  def _meet(self, tensors: Sequence[tf.Tensor]) -> list[Any]:
    self.sent += tensors
    return self.table.meet(self.replica, tensors)


def _widened(tensor: tf.Tensor) -> tf.Tensor:
  is_half = tensor.dtype in compression.WIRE_DTYPES
  return tf.cast(tensor, tf.float32) if is_half else tensor


def engines(
  groups: groups_lib.Groups = PAIRS,
) -> list[FakeEngine]:
  tables = [_Rendezvous(sorted(members)) for members in groups]
  return [
    FakeEngine(groups, replica, tables[groups.index_of(replica)])
    for replica in range(groups.num_replicas)
  ]


def run(
  replica_fn: Callable[[Any], _Result], replicas: Iterable[Any]
) -> list[_Result]:
  """Calls a function with each engine or `Replica`, each in its own thread.

  Raises:
    Exception: The first error of a replica, except errors because another
      replica failed.
  """

  def call(replica: Any) -> _Result:
    try:
      return replica_fn(replica)
    except BaseException:
      getattr(replica, "engine", replica).table.barrier.abort()
      raise

  replicas = list(replicas)
  with concurrent.futures.ThreadPoolExecutor(len(replicas)) as pool:
    futures = [pool.submit(call, replica) for replica in replicas]
  errors = [future.exception() for future in futures]
  for error in errors:
    if error and not isinstance(error, threading.BrokenBarrierError):
      raise error
  return [future.result() for future in futures]


class Replica:
  """One replica's step, and the variables that it trains.

  Attributes:
    variables: The variables that the replica trains.
    opt: The wrapped optimizer.
    step: All stages.
    engine: The engine of the replica.
  """

  def __init__(
    self,
    engine: FakeEngine,
    opt: Any,
    variables: Sequence[Any],
    reduction: str = "sum",
    **settings: Any,
  ) -> None:
    self.engine, self.opt, self.variables = engine, opt, list(variables)
    self.inner = wrapped_lib.WrappedOptimizer(opt)
    checked = settings_lib.Settings(reduction, **settings)
    self.inner.fuse(checked.fused_update)
    self.step = pipeline_lib.GradientPipeline(checked, self.inner, engine)
    self.step.build(self.variables)

  def apply(
    self, grads: Sequence[Any], variables: Any = None, **options: Any
  ) -> None:
    """Takes one step, or one call of a window."""
    trained = self.variables if variables is None else variables
    self.step.take(pipeline_lib.Call(list(grads), trained, **options))

  @property
  def values(self) -> list[np.ndarray]:
    return [variable.numpy() for variable in self.variables]


def replicas(
  make_opt: Callable[[], Any],
  values: Sequence[Any] | Mapping[str, Any],
  library: Any = tf.keras,
  groups: groups_lib.Groups = PAIRS,
  **settings: Any,
) -> list[Replica]:
  """Returns replicas, each with its own optimizer and its own variables.

  Each has its own optimizer and its own variables, with equal values and with
  these names.
  """
  if not isinstance(values, Mapping):
    values = {f"weight_{i}": value for i, value in enumerate(values)}
  return [
    Replica(
      engine,
      make_opt(),
      [testbed.variable(v, name, library) for name, v in values.items()],
      **settings,
    )
    for engine in engines(groups)
  ]


def train(
  trained: Sequence[Replica],
  grads: Sequence[Any],
  to_grad: Callable[[Any], Any] = tf.constant,
) -> None:
  """Takes steps, with an array [steps, replicas, ...] for each variable.

  `grads` has an array `[steps, replicas, ...]` for each variable.
  """

  def steps(replica: Replica) -> None:
    for rows in zip(*grads, strict=True):
      replica.apply([to_grad(row[replica.engine.replica]) for row in rows])

  run(steps, trained)
