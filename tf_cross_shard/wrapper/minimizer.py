"""The ways from a loss to gradients, and on to a step."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard.gradients import differentiation, loss_factor
from tf_cross_shard.inner_optimizer import base


class Minimizer:
  """Differentiates a loss that each kind of wrapper scales in its way."""

  GATE_NONE = differentiation.GATE_NONE
  GATE_OP = differentiation.GATE_OP
  GATE_GRAPH = differentiation.GATE_GRAPH

  _inner: base.InnerOptimizer

  # Each kind of wrapper has its way. The latter takes a loss, variables, a
  # tape, what the loss is averaged over by default, and a graph's options.
  apply_gradients: Callable[..., Any]
  _gradients: Callable[
    [Any, Any, Any, str, differentiation.GraphOptions], differentiation.Pairs
  ]

  def compute_gradients(
    self,
    loss: Callable[[], Any] | tf.Tensor,
    var_list: "validation.Variables | None" = None,
    gate_gradients: int = differentiation.GATE_OP,
    aggregation_method: int | None = None,
    colocate_gradients_with_ops: bool = False,
    grad_loss: Any = None,
    *,
    tape: tf.GradientTape | None = None,
  ) -> differentiation.Pairs:
    """Scales the loss, then takes this replica's, or this tower's, gradients.

    They are not reduced yet, so that each replica can clip or change its own.
    They contain the factor of the mean.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable(3.0)
    >>> optimizer = CrossShardOptimizer("sgd")
    >>> [(grad, _)] = optimizer.compute_gradients(lambda: weight**2)
    >>> float(grad)
    6.0

    Args:
      loss: A function of no arguments, a tensor recorded by `tape`, or a
        tensor of the graph being built. A scalar under a mean over replicas.
        In a tower any tensor that was computed there.
      var_list: Trainable variables. None means all that the loss touches; Keras
        variables, and that a layer is frozen, are then known only if the
        optimizer is built. In tf_keras frozen ones are trained.
      gate_gradients: How graphs order gradients, a `GATE_` constant. It and
        the next three are without effect in eager execution.
      aggregation_method: How graphs combine gradient terms.
      colocate_gradients_with_ops: Put gradients beside their forward ops.
      grad_loss: The gradient of `loss`, in a graph.
      tape: The tape that recorded `loss`.

    Returns:
      A list of (gradient, variable); the gradient is None for a variable of
      `var_list` that the loss does not touch.

    Raises:
      RuntimeError: If called in the cross-replica context.
      ValueError: If an argument has no valid value.
      TypeError: If an argument is of the wrong kind.
    """
    options = differentiation.GraphOptions(
      gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
    )
    return self._gradients(loss, var_list, tape, loss_factor.REPLICA, options)

  def minimize(
    self,
    loss: Callable[[], Any] | tf.Tensor,
    global_step: "validation.Variable | None" = None,
    var_list: "validation.Variables | None" = None,
    gate_gradients: int = differentiation.GATE_OP,
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
      gate_gradients: As in `compute_gradients`.
      aggregation_method: As in `compute_gradients`.
      colocate_gradients_with_ops: As in `compute_gradients`.
      name: The name scope of the operations.
      grad_loss: As in `compute_gradients`.
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
    is_empty = isinstance(var_list, (list, tuple)) and not var_list
    if is_empty and tape is not None:
      return self._inner.iterations()  # tf_keras' `fit` with nothing to train.
    options = differentiation.GraphOptions(
      gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
    )
    default = loss_factor.REPLICA if tape is None else loss_factor.GLOBAL
    pairs = self._gradients(loss, var_list, tape, default, options)
    return self.apply_gradients(pairs, global_step, name=name)
