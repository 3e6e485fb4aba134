"""TensorFlow 1's `compute_gradients` and `minimize`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import loss_factor, validation
from tf_cross_shard._src.core.facade import saving
from tf_cross_shard._src.core.gradients import differentiate


class Minimizer(saving.Wrapping):
  """Mixin with `compute_gradients` and `minimize`.

  Each kind of wrapper scales the loss differently, in `_gradients`.
  """

  GATE_NONE = differentiate.GATE_NONE
  GATE_OP = differentiate.GATE_OP
  GATE_GRAPH = differentiate.GATE_GRAPH

  # Each kind of wrapper implements these two methods. The arguments of
  # `_gradients` are a loss, the variables, a tape, what the loss is averaged
  # over by default, and options for graphs.
  apply_gradients: Callable[..., Any]
  _gradients: Callable[
    [Any, Any, Any, str, differentiate.GraphOptions], differentiate.Pairs
  ]

  def compute_gradients(
    self,
    loss: Callable[[], Any] | tf.Tensor,
    var_list: "validation.Variables | None" = None,
    gate_gradients: int = differentiate.GATE_OP,
    aggregation_method: int | None = None,
    colocate_gradients_with_ops: bool = False,
    grad_loss: Any = None,
    *,
    tape: tf.GradientTape | None = None,
  ) -> differentiate.Pairs:
    """Scales the loss and returns this replica's, or this tower's, gradients.

    The gradients are not reduced yet, so you can clip or change the
    gradients of each replica. They include the loss factor, so their sum over
    the group is the mean.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable(3.0)
    >>> optimizer = CrossShardOptimizer("sgd")
    >>> [(grad, _)] = optimizer.compute_gradients(lambda: weight**2)
    >>> float(grad)
    6.0

    Args:
      loss: A function of no arguments, a tensor recorded by `tape`, or a
        tensor of the graph that is being built. It must be a scalar for a mean
        over replicas. In a tower, it can be any tensor that was computed there.
      var_list: Trainable variables. None means all variables that the loss
        depends on. In this case, build the optimizer first, so that it knows
        which variables are Keras variables and which layers are frozen;
        tf_keras also trains frozen variables.
      gate_gradients: How graphs order gradients, a `GATE_` constant. This and
        the next three arguments have no effect in eager execution.
      aggregation_method: How graphs combine gradient terms, a constant of
        `tf.AggregationMethod`.
      colocate_gradients_with_ops: Whether graphs place gradients on the devices
        of their forward operations.
      grad_loss: The gradient with respect to `loss`, a tensor in the shape of
        `loss`; None for ones.
      tape: The tape that recorded `loss`.

    Returns:
      A list of (gradient, variable). The gradient is None for a variable of
      `var_list` that the loss does not depend on.

    Raises:
      RuntimeError: If you call it in the cross-replica context.
      ValueError: If an argument has no valid value.
      TypeError: If an argument has the wrong type.
    """
    options = differentiate.GraphOptions(
      gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
    )
    return self._gradients(loss, var_list, tape, loss_factor.REPLICA, options)

  def minimize(
    self,
    loss: Callable[[], Any] | tf.Tensor,
    global_step: "validation.Variable | None" = None,
    var_list: "validation.Variables | None" = None,
    gate_gradients: int = differentiate.GATE_OP,
    aggregation_method: int | None = None,
    colocate_gradients_with_ops: bool = False,
    name: str | None = None,
    grad_loss: Any = None,
    *,
    tape: tf.GradientTape | None = None,
  ) -> Any:
    """Calls `compute_gradients`, then `apply_gradients`.

    You can also call it as in Keras: `minimize(loss, var_list, tape=tape)`.

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
      gate_gradients: As in `compute_gradients`.
      aggregation_method: As in `compute_gradients`.
      colocate_gradients_with_ops: As in `compute_gradients`.
      name: The name scope of the operations; this optimizer's name if None.
      grad_loss: As in `compute_gradients`.
      tape: The tape that recorded `loss`.

    Returns:
      The iteration count after the step, as `apply_gradients` does.

    Raises:
      RuntimeError: As in `apply_gradients`.
      ValueError: As in `compute_gradients` and `apply_gradients`.
      TypeError: As in `compute_gradients` and `apply_gradients`.
    """
    if var_list is None and validation.is_var_list(global_step):
      global_step, var_list = None, global_step  # Keras' order of arguments.
    validation.check_global_step(global_step)
    is_empty = isinstance(var_list, (list, tuple)) and not var_list
    if is_empty and tape is not None:
      # `fit` of tf_keras, with a model that has nothing to train.
      return self._wrapped.iterations()
    options = differentiate.GraphOptions(
      gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
    )
    default = loss_factor.REPLICA if tape is None else loss_factor.GLOBAL
    pairs = self._gradients(loss, var_list, tape, default, options)
    return self.apply_gradients(pairs, global_step, name=name)
