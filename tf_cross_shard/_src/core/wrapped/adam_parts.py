"""Adam's update of variables of medium size, by kernels of its parts.

TensorFlow's kernel of Adam hands out four blocks for each thread, however small
a variable is, and waits for all of them. For 512 to 8,192 elements, this takes
0.75 to 1.1 of the time of Keras' operations with 2 threads, and 1.6 to 2.1 with
16 (`benchmarks/update.py --parts=sizes`). Up to about 64 elements, the kernel
asks for no threads. Three kernels take 0.6 to 0.76 of Keras' time, with 2 and
with 16 threads, because a kernel computes and assigns at once:

    m -= (1 - beta_1) * (m - g)            GradientDescent
    v -= (1 - beta_2) * (v - g^2)          GradientDescent
    W -= alpha_t * m / (sqrt(v) + epsilon) AdagradV2, which leaves v unchanged

These are Keras' own roundings, so the results are Keras' to the bit.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.variables import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import kernels

# The numbers of elements for which the parts are never much slower than the
# kernel, with 2 to 16 threads.
SIZES: Final = range(65, 65_536)


class Numbers(NamedTuple):
  """The numbers in the formula above; scalars in the dtype of the variable."""

  one_minus_beta_1: tf.Tensor
  one_minus_beta_2: tf.Tensor
  alpha: tf.Tensor
  epsilon: tf.Tensor


def numbers(
  optimizer: Optimizer, arguments: Mapping[str, tf.Tensor]
) -> Numbers:
  """Returns the numbers of a step, given the arguments of Adam's kernel."""

  def rest(beta: Any) -> tf.Tensor:
    # In double precision, as in Keras: in float32, 1 - 0.999 is 0.00099998713.
    number = row_sparse.in_dtype(1 - beta, alpha.dtype)
    return tf.convert_to_tensor(number, alpha.dtype)

  alpha = arguments["lr"] * tf.sqrt(1 - arguments["beta2_power"])
  return Numbers(
    one_minus_beta_1=rest(optimizer.beta_1),
    one_minus_beta_2=rest(optimizer.beta_2),
    alpha=alpha / (1 - arguments["beta1_power"]),
    epsilon=arguments["epsilon"],
  )


def apply(
  variable: Variable, slots: Mapping[str, Any], grad: tf.Tensor, given: Numbers
) -> None:
  """Updates a `tf.Variable` and its slots `m` and `v` by a dense gradient."""
  dtype = kernels.dtype_of(variable)
  grad = tf.cast(grad, dtype)
  m, v = slots["m"].handle, slots["v"].handle
  descend = tf.raw_ops.ResourceApplyGradientDescent
  descend(
    var=m, alpha=given.one_minus_beta_1, delta=kernels.read(m, dtype) - grad
  )
  delta = kernels.read(v, dtype) - tf.square(grad)
  descend(var=v, alpha=given.one_minus_beta_2, delta=delta)
  tf.raw_ops.ResourceApplyAdagradV2(
    var=variable.handle,
    accum=v,
    lr=given.alpha,
    epsilon=given.epsilon,
    grad=kernels.read(m, dtype),
    update_slots=False,
  )
