"""Computes this replica's gradients of a loss.

A factor on the loss goes into the *seed* of the backward pass, which also works
for a loss that a tape has recorded: dL/dv · seed = factor · dL/dv.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.variables import Variable

GATE_NONE = 0
GATE_OP = 1
GATE_GRAPH = 2

Pairs = list[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class GraphOptions:
  """The options of `tf.gradients`, which eager execution ignores."""

  gate_gradients: int = GATE_OP
  aggregation_method: int | None = None
  colocate_gradients_with_ops: bool = False
  grad_loss: Any = None

  def __post_init__(self) -> None:
    if self.gate_gradients not in (GATE_NONE, GATE_OP, GATE_GRAPH):
      raise ValueError(
        "`gate_gradients` must be GATE_NONE (0), GATE_OP (1) or GATE_GRAPH"
        f" (2); got {self.gate_gradients!r}."
      )


def compute(
  loss: Any,
  var_list: list[Variable] | None,
  tape: tf.GradientTape | None,
  scale: Callable[[tf.Tensor], tf.Tensor],
  options: GraphOptions,
  requires_scalar: bool,
) -> Pairs:
  """Returns pairs of the gradients of `scale(loss)` and their variables."""
  if callable(loss):
    tape = tape or tf.GradientTape()
    with tape:
      loss = loss()
  if not tf.is_tensor(loss):
    raise TypeError(
      f"`loss` must be a tensor or a function that returns one; got {loss!r}."
    )
  grad_loss = None if tf.executing_eagerly() else options.grad_loss
  if requires_scalar:
    validation.check_scalar(loss, seeded=grad_loss is not None)
  seed = tf.ones_like(loss) if grad_loss is None else grad_loss
  # Keras' loss scaling returns float32. The seed needs the dtype of the loss.
  seed = tf.cast(scale(seed), seed.dtype)
  if tape is not None:
    variables = tape.watched_variables() if var_list is None else var_list
    grads = tape.gradient(loss, list(variables), output_gradients=seed)
  elif tf.executing_eagerly():
    raise TypeError(
      "`loss` is an eager tensor, which does not know how it was computed:"
      f" {loss!r}. Pass a function of no arguments that computes it,"
      " or `tape=` the tape that recorded it."
    )
  else:
    variables = variables_lib.read_by_graph() if var_list is None else var_list
    grads = _graph_gradients(loss, list(variables), seed, options)
  pairs = list(zip(grads, variables, strict=True))
  if var_list is None:
    pairs = [
      (g, variables_lib.distributed(v)) for g, v in pairs if g is not None
    ]
    if not pairs:
      raise ValueError(
        "`loss` depends on no trainable variable, so there is nothing to"
        " differentiate. Compute it from variables, or pass `var_list`."
      )
  return pairs


def differentiate(
  wrapped: Any,
  loss: Any,
  var_list: Any,
  tape: tf.GradientTape | None,
  scale: Callable[[Any], Any],
  options: GraphOptions,
  requires_scalar: bool,
) -> Pairs:
  """Computes gradients with the loss scale of `wrapped`, divided out."""
  variables = _checked(wrapped, var_list)
  pairs = compute(
    loss,
    variables,
    tape,
    scale=lambda seed: wrapped.scale_loss(scale(seed)),
    options=options,
    requires_scalar=requires_scalar,
  )
  if variables is None:
    # Only the Keras 3 variable knows that its layer is frozen, but a tape
    # reports the TensorFlow variable.
    pairs = [(grad, wrapped.as_built(v)) for grad, v in pairs]
    pairs = [(grad, v) for grad, v in pairs if v.trainable]
  grads = wrapped.unscale([grad for grad, _ in pairs])
  return [(g, v) for g, (_, v) in zip(grads, pairs, strict=True)]


@tf.autograph.experimental.do_not_convert
def _checked(wrapped: Any, var_list: Any) -> list[Variable] | None:
  variables = validation.check_var_list(var_list)
  if variables is not None and wrapped.is_built:
    validation.check_known(variables, wrapped.knows, "var_list")
  return variables


def _graph_gradients(
  loss: tf.Tensor,
  variables: list[Variable],
  seed: tf.Tensor,
  options: GraphOptions,
) -> list[Any]:
  grads = tf.compat.v1.gradients(
    loss,
    variables,
    grad_ys=seed,
    gate_gradients=options.gate_gradients == GATE_OP,
    aggregation_method=options.aggregation_method,
    colocate_gradients_with_ops=options.colocate_gradients_with_ops,
  )
  # GATE_GRAPH: no gradient is used before all of them exist.
  any_gradient = any(grad is not None for grad in grads)
  if options.gate_gradients == GATE_GRAPH and any_gradient:
    grads = tf.tuple(grads)
  return list(grads)
