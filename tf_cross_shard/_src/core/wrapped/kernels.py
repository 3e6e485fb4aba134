"""TensorFlow's kernels, each of which updates a variable and all of its slots.

A kernel is one operation, `tf.raw_ops.ResourceApply*`. It computes the numbers
of TensorFlow 1's optimizers, on CPUs, on GPUs and, through XLA, on TPUs. The
arguments of a kernel are handles of variables. In a replica context, the handle
of a mirrored variable is the handle of the calling replica's copy, so
nothing is reduced or broadcast.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.keras_types import Optimizer, Variable


@dataclasses.dataclass(frozen=True)
class Kernel:
  """The arguments of a kernel, and where a Keras optimizer stores their values.

  Attributes:
    name: The operation is `ResourceApply{name}` and, for row-sparse gradients,
      `ResourceSparseApply{name}`.
    slots: Maps the kernel's name of a slot to the attribute of Keras'
      optimizers that holds the list of slots, in the order in which TensorFlow
      1 created slots.
    settings: Maps the kernel's argument to the attribute of Keras' optimizers.
    powers: Maps the kernel's argument for beta^t to the argument for beta.
    moves_all_rows: Whether the update also changes rows without a gradient. If
      so, a row-sparse gradient is converted to a dense one.
    rate: The kernel's argument for the learning rate.
    gradient: The kernel's argument for the gradient.
  """

  name: str
  slots: Mapping[str, str] = dataclasses.field(default_factory=dict)
  settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
  powers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  moves_all_rows: bool = False
  rate: str = "lr"
  gradient: str = "grad"

  @property
  def operation(self) -> str:
    return f"ResourceApply{self.name}"

  def arguments(self, optimizer: Optimizer, rate: Any) -> dict[str, Any]:
    """Returns a Keras optimizer's settings as arguments, without the powers."""
    arguments = {
      argument: getattr(optimizer, name)
      for argument, name in self.settings.items()
    }
    # The kernel of Ftrl has no argument for beta. Adding beta / (2 * rate) to
    # the L2 regularization gives the same formula.
    if "l2" in arguments:
      rate = tf.maximum(rate, 1e-36)
      arguments["l2"] += optimizer.beta / (2.0 * rate)
    return {self.rate: rate, **arguments}


_MOMENTUM: Final = {"momentum": "momentum", "use_nesterov": "nesterov"}
_BETAS: Final = {"beta1": "beta_1", "beta2": "beta_2", "epsilon": "epsilon"}
_RMSPROP: Final = {"rho": "rho", "momentum": "momentum", "epsilon": "epsilon"}

KERNELS: Final = {
  kernel.name: kernel
  for kernel in (
    Kernel("GradientDescent", rate="alpha", gradient="delta"),
    Kernel("Momentum", {"accum": "momentums"}, _MOMENTUM),
    Kernel("KerasMomentum", {"accum": "momentums"}, _MOMENTUM),
    Kernel(
      "Adam",
      {"m": "_momentums", "v": "_velocities"},
      _BETAS,
      powers={"beta1_power": "beta1", "beta2_power": "beta2"},
      moves_all_rows=True,
    ),
    Kernel(
      "AdaMax",
      {"m": "_m", "v": "_u"},
      _BETAS,
      powers={"beta1_power": "beta1"},
      moves_all_rows=True,
    ),
    Kernel("Adagrad", {"accum": "_accumulators"}),
    Kernel("RMSProp", {"ms": "_velocities", "mom": "_momentums"}, _RMSPROP),
    Kernel(
      "CenteredRMSProp",
      {"ms": "_velocities", "mg": "_average_gradients", "mom": "_momentums"},
      _RMSPROP,
    ),
    Kernel(
      "Adadelta",
      {
        "accum": "_accumulated_grads",
        "accum_update": "_accumulated_delta_vars",
      },
      {"rho": "rho", "epsilon": "epsilon"},
    ),
    Kernel(
      "FtrlV2",
      {"accum": "_accumulators", "linear": "_linears"},
      {
        "lr_power": "learning_rate_power",
        "l1": "l1_regularization_strength",
        "l2": "l2_regularization_strength",
        "l2_shrinkage": "l2_shrinkage_regularization_strength",
      },
    ),
  )
}


def apply(
  kernel: Kernel,
  variable: Variable,
  slots: Mapping[str, Any],
  grad: tf.Tensor | tf.IndexedSlices,
  arguments: Mapping[str, Any],
) -> None:
  """Updates a `tf.Variable` and its slots.

  Numeric arguments are cast to float32 and then to the variable's
  dtype, as in TensorFlow 1. Tensors of the variable's dtype are passed
  unchanged. Rows of a gradient with the same index are added up first.

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
  dtype = dtype_of(variable)
  handles = {"var": variable.handle}
  handles |= {name: slots[name].handle for name in kernel.slots}
  arguments = {
    name: _as_number(value, dtype) for name, value in arguments.items()
  }
  grad = row_sparse.cast(grad, variable)
  operation = getattr(tf.raw_ops, kernel.operation)
  arguments = {**handles, **arguments}
  if not isinstance(grad, tf.IndexedSlices) or kernel.moves_all_rows:
    grad = row_sparse.to_dense(grad, variable)
    operation(**arguments, **{kernel.gradient: grad})
  elif "CPU" in variable.device and not is_compiled():
    grad = row_sparse.merge_duplicates(grad)
    sparse = getattr(tf.raw_ops, f"ResourceSparseApply{kernel.name}")
    sparse(**arguments, grad=grad.values, indices=grad.indices)
  else:
    # XLA has no kernels for rows, and GPUs lack some of them. Run the dense
    # kernel, and then restore the rows that do not occur in the gradient.
    before = {name: read(handle, dtype) for name, handle in handles.items()}
    dense = row_sparse.to_dense(grad, variable)
    operation(**arguments, **{kernel.gradient: dense})
    ones = tf.ones(tf.shape(grad.indices)[:1], tf.int32)
    count = tf.math.unsorted_segment_sum(ones, grad.indices, variable.shape[0])
    column = tf.reshape(count > 0, [-1] + [1] * (len(variable.shape) - 1))
    for name, handle in handles.items():
      write(handle, tf.where(column, read(handle, dtype), before[name]))


def read(handle: Any, dtype: tf.DType) -> tf.Tensor:
  return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def write(handle: Any, value: tf.Tensor) -> None:
  """Assigns a value to this replica's copy only."""
  tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def dtype_of(variable: Variable) -> tf.DType:
  """Returns the dtype of a variable's stored value.

  Under mixed precision, `variable.dtype` is the dtype for computations.
  """
  return tf.as_dtype(getattr(variable, "true_dtype", variable.dtype))


def is_compiled() -> bool:
  """Returns whether the function that is being traced is compiled by XLA."""
  graph: Any = tf.compat.v1.get_default_graph()
  while graph is not None:
    context = graph._get_control_flow_context()  # noqa: SLF001
    while context is not None:
      if context.IsXLAContext():
        return True
      context = context.outer_context
    graph = getattr(graph, "outer_graph", None)
  return False


def _as_number(value: Any, dtype: tf.DType) -> Any:
  """Converts a value to a kernel's argument, unless it is True or False."""
  if isinstance(value, bool) or getattr(value, "dtype", None) == dtype:
    return value
  return tf.cast(tf.cast(value, tf.float32), dtype)
