"""Finds out what a loss is averaged over, by trying one batch.

The sum of the gradients that the replicas would apply, each with its part of
the batch, is compared with the gradient of one replica with the whole batch.
Only what the gradients depend on runs, and variables that this changes get
their values back.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_cross_shard._src.core import loss_factor, replicas
from tf_cross_shard._src.core import pipeline as pipeline_lib

# Two settings differ at least by a factor of 2. Dropout and the statistics of
# batch normalization differ between parts of a batch and the whole.
_TOLERANCE: Final = 1.4
# The attribute that `num_replicas_in_sync` reads.
_COUNT: Final = "_num_replicas_in_sync"


def check(
  pipeline: "pipeline_lib.GradientPipeline",
  function: Callable[..., Any],
  batch: Any,
) -> str:
  """Does the work of `CrossShardOptimizer.check_loss`."""
  replicas.check_between_steps()
  engine, convention = pipeline.engine, pipeline.convention
  factors, count = convention.factors(), engine.num_replicas
  chosen = pipeline.settings.loss_averaged_over
  if engine.strategy.num_replicas_in_sync == 1:
    return chosen or loss_factor.REPLICA
  batch = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
  for leaf in tf.nest.flatten(batch):
    if isinstance(leaf, tf.distribute.DistributedValues):
      raise ValueError(
        "`batch` must be the batch of all replicas; got"
        f" {type(leaf).__name__}, which is distributed already. Pass a batch of"
        " the dataset from before experimental_distribute_dataset."
      )
  batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
  for tensor in tf.nest.flatten(batch):
    if tensor.shape.rank == 0 or tensor.shape[0] % count:
      raise ValueError(
        f"`batch` must have rows for {count} replicas; got a tensor of shape"
        f" {tensor.shape}. Pass a multiple of {count} rows."
      )
  function = getattr(function, "python_function", function)

  def examples_of_replica(tensor: tf.Tensor) -> tf.Tensor:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    rows = [tensor.shape[0] // count, *tensor.shape[1:]]
    return tf.reshape(tensor, [count, *rows])[replica]

  def apart() -> Any:
    function(*tf.nest.map_structure(examples_of_replica, batch))
    return convention.take_gradients()

  def alone() -> Any:
    with engine.isolate():
      function(*batch)
    return convention.take_gradients()

  # The means over the groups of what they would apply, and of what one replica
  # would apply.
  with convention.dry_run(alone=False):
    applied = _sum_of(engine.strategy, apart) / engine.groups.num_groups
  with convention.dry_run(alone=True), _as_one_replica(engine.strategy):
    wanted = _sum_of(engine.strategy, alone) / count
  if not pipeline.settings.is_mean:
    wanted *= engine.groups.group_size
  square = float(wanted @ wanted)
  ratio = float(applied @ wanted) / square if square else math.nan
  if not (math.isfinite(ratio) and ratio > 0):
    raise ValueError(
      "`batch` has no gradient that can be compared: the ratio of the update to"
      f" the gradient of the whole batch is {ratio:g}. Pass another batch, and"
      " a step without randomness."
    )
  was = convention.last_factor
  unscaled = ratio / (was or 1.0)
  after = {over: unscaled * factor for over, factor in factors.items()}
  right = min(
    after, key=lambda over: (abs(math.log(after[over])), over != chosen)
  )
  where = (
    f"The update is {ratio:g} times that of one replica on the whole batch"
  )
  if not 1 / _TOLERANCE < after[right] < _TOLERANCE:
    raise ValueError(
      f"{where}, which neither value of `loss_averaged_over` explains. Average"
      " the loss over the examples in `batch`, and compute it without"
      " randomness."
    )
  if math.isclose(was or 1.0, factors[right]):
    return right
  remedy = f'Pass loss_averaged_over="{right}"'
  if was is None:
    remedy += ", and call scale_loss(loss) inside the tape"
  raise ValueError(f"{where}. {remedy}.")


def _sum_of(strategy: Any, compute: Callable[[], Any]) -> Any:
  """Returns the replicas' gradients as one row; changes no state."""

  def on_replicas() -> Any:
    of_replicas = strategy.run(compute)
    return [strategy.reduce("SUM", grad, axis=None) for grad in of_replicas]

  # A wrapped function runs only what its results depend on.
  function = tf.compat.v1.wrap_function(on_replicas, [])
  pruned = function.prune([], function.structured_outputs)
  # Functions that the step calls run as a whole, with their assignments.
  with _restoring_variables(pruned.captured_inputs):
    grads = pruned()
  return np.concatenate([np.ravel(grad).astype(np.float64) for grad in grads])


@contextlib.contextmanager
def _restoring_variables(captured: list[tf.Tensor]) -> Iterator[None]:
  """Gives the variables of captured handles the values that they had."""
  saved = []
  for handle in captured:
    data = resource_variable_ops.get_eager_safe_handle_data(handle)
    # Tensors and iterators have no data, and tables have two types.
    if data and len(data.shape_and_type) == 1:
      dtype = data.shape_and_type[0].dtype
      value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
      saved.append((handle, value))
  try:
    yield
  finally:
    for handle, value in saved:
      tf.raw_ops.AssignVariableOp(resource=handle, value=value)


@contextlib.contextmanager
def _as_one_replica(strategy: Any) -> Iterator[None]:
  """Makes a strategy say that it has one replica, by which Keras divides."""
  extended = strategy.extended
  kind = type(extended)
  extended.__class__ = type(kind.__name__, (kind,), {_COUNT: 1})
  try:
    yield
  finally:
    extended.__class__ = kind
