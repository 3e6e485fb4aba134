"""`minimize`, as TensorFlow 1 and Keras call it: compute, then apply."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard.gradients import compute, loss_factor


class Minimizing:
  """Both orders of `minimize`'s arguments, for optimizers of this package."""

  GATE_NONE = compute.GATE_NONE
  GATE_OP = compute.GATE_OP
  GATE_GRAPH = compute.GATE_GRAPH

  def minimize(
    self,
    loss: Any,
    global_step: Any = None,
    var_list: Any = None,
    gate_gradients: int = compute.GATE_OP,
    aggregation_method: int | None = None,
    colocate_gradients_with_ops: bool = False,
    name: str | None = None,
    grad_loss: Any = None,
    *,
    tape: tf.GradientTape | None = None,
  ) -> Any:
    """`compute_gradients`, then `apply_gradients`.

    Keras' way to call it, `minimize(loss, var_list, tape=tape)`, works too.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable(3.0)
    >>> optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(0.5))
    >>> with tf.GradientTape() as tape:
    ...   loss = weight**2
    >>> int(optimizer.minimize(loss, [weight], tape=tape))
    1
    >>> float(weight.numpy())
    0.0

    Args:
      loss: As in `compute_gradients`.
      global_step: An integer variable, incremented by one afterwards.
      var_list: As in `compute_gradients`.
      gate_gradients: How graphs order gradients, a `GATE_` constant.
      aggregation_method: How graphs combine gradient terms.
      colocate_gradients_with_ops: Put gradients beside their forward ops.
      name: The name scope of the operations.
      grad_loss: The gradient of `loss`, in a graph.
      tape: The tape that recorded `loss`.

    Returns:
      What `apply_gradients` returns.

    Raises:
      RuntimeError: As `apply_gradients`.
      ValueError: As the two methods.
      TypeError: As the two methods.
    """
    if var_list is None and validation.is_var_list(global_step):
      global_step, var_list = None, global_step  # Keras' order of arguments.
    validation.check_global_step(global_step)
    validation.check_name(name)
    options = {
      "gate_gradients": gate_gradients,
      "aggregation_method": aggregation_method,
      "colocate_gradients_with_ops": colocate_gradients_with_ops,
      "grad_loss": grad_loss,
    }
    default = loss_factor.REPLICA if tape is None else loss_factor.GLOBAL
    pairs = self._gradients(loss, var_list, tape, default, options)
    return self.apply_gradients(pairs, global_step, name=name)

  def apply_gradients(
    self,
    grads_and_vars: Iterable[Any],
    global_step: Any = None,
    name: str | None = None,
  ) -> Any:
    """Applies gradients; each optimizer has its way.

    Args:
      grads_and_vars: Pairs of a gradient and its variable.
      global_step: An integer variable, incremented by one afterwards.
      name: The name scope of the operations.

    Returns:
      The iteration count after the step.

    Raises:
      NotImplementedError: Unless an optimizer has its way.
    """
    raise NotImplementedError

  def _gradients(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: dict[str, Any],
  ) -> compute.Pairs:
    """Gradients of the scaled loss; each optimizer has its way."""
    raise NotImplementedError
