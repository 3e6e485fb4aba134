"""TensorFlow's own kernels that update a variable and its slots at once.

Each is one operation, `tf.raw_ops.ResourceApply*`: the numbers of TensorFlow 1
are theirs, on CPUs, GPUs and, through XLA, on TPUs. They take handles: in a
replica context a mirrored variable's is that of the calling replica's copy, and
nothing is reduced or broadcast.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard.gradients import indexed_slices


@dataclasses.dataclass(frozen=True)
class Kernel:
  """What a kernel takes, by the names of its arguments.

  Attributes:
    name: `ResourceApply{name}` and, for rows, `ResourceSparseApply{name}`.
    slots: In the order in which TensorFlow 1 made them.
    powers: Products of a hyperparameter, one more factor in each step.
    moves_all_rows: Whether a sparse gradient is a dense one with zeros, because
      rows without a gradient move too.
  """

  name: str
  slots: tuple[str, ...]
  powers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  moves_all_rows: bool = False


KERNELS: Final = {
  kernel.name: kernel
  for kernel in (
    Kernel("Momentum", ("accum",)),
    Kernel(
      "Adam",
      ("m", "v"),
      powers={"beta1_power": "beta1", "beta2_power": "beta2"},
      moves_all_rows=True,
    ),
    Kernel("Adagrad", ("accum",)),
    Kernel("RMSProp", ("ms", "mom")),
    Kernel("CenteredRMSProp", ("ms", "mg", "mom")),
    Kernel("Adadelta", ("accum", "accum_update")),
    Kernel("FtrlV2", ("accum", "linear")),
  )
}


def apply(
  kernel: Kernel,
  variable: Any,
  slots: Mapping[str, Any],
  grad: tf.Tensor | tf.IndexedSlices,
  settings: Mapping[str, Any],
) -> None:
  """Updates a `tf.Variable` and its slots.

  Numbers among the settings are cast to the variable's dtype, as TensorFlow 1
  did, by way of float32. Rows of one index are added up first.

  >>> weight, accum = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 1.0])
  >>> apply(
  ...   KERNELS["Momentum"],
  ...   weight,
  ...   {"accum": accum},
  ...   tf.constant([2.0, 4.0]),
  ...   {"lr": 0.5, "momentum": 0.5, "use_nesterov": False},
  ... )
  >>> accum.numpy().tolist(), weight.numpy().tolist()
  ([2.0, 4.5], [0.0, -0.25])
  """
  dtype = _dtype(variable)
  handles = {"var": variable.handle}
  handles |= {name: slots[name].handle for name in kernel.slots}
  arguments: dict[str, Any] = {
    name: value
    if isinstance(value, bool)
    else tf.cast(tf.cast(value, tf.float32), dtype)
    for name, value in settings.items()
  }
  grad = indexed_slices.cast(grad, variable)
  dense = getattr(tf.raw_ops, f"ResourceApply{kernel.name}")
  if not isinstance(grad, tf.IndexedSlices):
    dense(**handles, **arguments, grad=grad)
    return
  if kernel.moves_all_rows:
    dense(**handles, **arguments, grad=indexed_slices.to_dense(grad, variable))
  elif "CPU" in variable.device and not _is_compiled():
    grad = indexed_slices.merge_duplicates(grad)
    sparse = getattr(tf.raw_ops, f"ResourceSparseApply{kernel.name}")
    sparse(**handles, **arguments, grad=grad.values, indices=grad.indices)
  else:
    # XLA has no kernels for rows, and GPUs lack some: the dense one, and what
    # it did to other rows is taken back.
    before = {name: read(handle, dtype) for name, handle in handles.items()}
    dense(**handles, **arguments, grad=indexed_slices.to_dense(grad, variable))
    ones = tf.ones(tf.shape(grad.indices)[:1], tf.int32)
    count = tf.math.unsorted_segment_sum(ones, grad.indices, variable.shape[0])
    column = tf.reshape(count > 0, [-1] + [1] * (len(variable.shape) - 1))
    for name, handle in handles.items():
      write(handle, tf.where(column, read(handle, dtype), before[name]))


def read(handle: Any, dtype: tf.DType) -> tf.Tensor:
  """This replica's value."""
  return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def write(handle: Any, value: tf.Tensor) -> None:
  """Assigns to this replica's copy only."""
  tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _dtype(variable: Any) -> tf.DType:
  """The dtype that is stored; under mixed precision `dtype` is another."""
  return tf.as_dtype(getattr(variable, "true_dtype", variable.dtype))


def _is_compiled() -> bool:
  """Whether this is being traced for XLA."""
  graph: Any = tf.compat.v1.get_default_graph()
  while graph is not None:
    context = graph._get_control_flow_context()
    while context is not None:
      if context.IsXLAContext():
        return True
      context = context.outer_context
    graph = getattr(graph, "outer_graph", None)
  return False
