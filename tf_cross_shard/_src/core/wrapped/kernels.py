"""TensorFlow's kernels, each of which updates a variable and all of its slots.

A kernel is one operation, `tf.raw_ops.ResourceApply*`, on handles of variables.
In a replica context, the handle of a mirrored variable is that of the calling
replica's copy, so nothing is reduced or broadcast.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.variables import Optimizer, Variable


@dataclasses.dataclass(frozen=True)
class Kernel:
  """The arguments of a kernel, and where a Keras optimizer stores their values.

  `slots` and `settings` map the kernel's names to attributes of the optimizer.
  """

  name: str
  slots: Mapping[str, str] = dataclasses.field(default_factory=dict)
  settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Maps the kernel's argument for beta^t to the argument for beta.
  powers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  rate: str = "lr"  # The argument for the learning rate.
  gradient: str = "grad"  # The argument for the gradient.

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
    Kernel("KerasMomentum", {"accum": "momentums"}, _MOMENTUM),
    Kernel(
      "Adam",
      {"m": "_momentums", "v": "_velocities"},
      _BETAS,
      powers={"beta1_power": "beta1", "beta2_power": "beta2"},
    ),
    Kernel(
      "AdaMax",
      {"m": "_m", "v": "_u"},
      _BETAS,
      powers={"beta1_power": "beta1"},
    ),
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
  grad: tf.Tensor,
  arguments: Mapping[str, Any],
) -> None:
  """Updates a `tf.Variable` and its slots by a dense gradient."""
  handles = {name: slots[name].handle for name in kernel.slots}
  getattr(tf.raw_ops, kernel.operation)(
    var=variable.handle,
    **handles,
    **arguments,
    **{kernel.gradient: row_sparse.cast(grad, variable)},
  )


def read(handle: Any, dtype: tf.DType) -> tf.Tensor:
  return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def dtype_of(variable: Variable) -> tf.DType:
  """Returns the dtype of a variable's stored value."""
  # Under mixed precision, `variable.dtype` is the dtype for computations.
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
