"""This replica's own gradients of a loss.

The factor of the mean goes into the *seed* of the backward pass, the gradient
of the loss with respect to itself. That is the same arithmetic as multiplying
the loss, works for a loss that a tape has already recorded, and does not change
the loss that the user sees.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard import variables as variables_lib

GATE_NONE = 0
GATE_OP = 1
GATE_GRAPH = 2

Pairs = list[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class GraphOptions:
  """How a graph computes gradients; eager execution ignores it."""

  gate_gradients: int = GATE_OP
  aggregation_method: int | None = None
  colocate_gradients_with_ops: bool = False
  grad_loss: Any = None

  def __post_init__(self) -> None:
    """Raises `ValueError` for an unknown gate."""
    if self.gate_gradients not in (GATE_NONE, GATE_OP, GATE_GRAPH):
      raise ValueError(
        "`gate_gradients` must be GATE_NONE (0), GATE_OP (1) or GATE_GRAPH"
        f" (2); got {self.gate_gradients!r}."
      )


def compute(
  loss: Any,
  var_list: list[Any] | None,
  tape: tf.GradientTape | None,
  scale: Callable[[tf.Tensor], tf.Tensor],
  options: GraphOptions,
  scalar: bool,
  of_class: Callable[..., Pairs] | None = None,
) -> Pairs:
  """Gradients of `scale(loss)` with respect to the variables.

  `of_class(loss, variables, tape)` is the method of a user's class, which
  takes the place of `tape.gradient`.

  >>> v = tf.Variable(3.0)
  >>> [(grad, _)] = compute(
  ...   lambda: v * v, [v], None, lambda seed: seed / 2, GraphOptions(), True
  ... )
  >>> float(grad)
  3.0
  """
  if callable(loss):
    tape = tape or tf.GradientTape()
    with tape:
      loss = loss()
  if not tf.is_tensor(loss):
    raise TypeError(
      f"`loss` must be a tensor or a function that returns one; got {loss!r}."
    )
  grad_loss = None if tf.executing_eagerly() else options.grad_loss
  if scalar:
    validation.check_scalar(loss, seeded=grad_loss is not None)
  seed = tf.ones_like(loss) if grad_loss is None else grad_loss
  # Keras widens what it scales; a gradient has the dtype of its loss.
  seed = tf.cast(scale(seed), seed.dtype)
  if tape is not None:
    variables = tape.watched_variables() if var_list is None else var_list
    if of_class is not None:
      with tape:  # The method takes a loss and no seed.
        loss = tf.cast(scale(loss), loss.dtype)
      return of_class(loss, variables, tape)
    grads = tape.gradient(loss, list(variables), output_gradients=seed)
  elif of_class is not None:
    raise TypeError(
      "`loss` must be a function, or `tape` be given, for an optimizer whose"
      " class computes gradients itself; got a tensor of a graph."
    )
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
        "`loss` touches no trainable variable, so there is nothing to"
        " differentiate. Compute it from variables, or pass `var_list`."
      )
  return pairs


def differentiate(
  inner: Any,
  loss: Any,
  var_list: Any,
  tape: tf.GradientTape | None,
  scale: Callable[[Any], Any],
  options: GraphOptions,
  scalar: bool,
) -> Pairs:
  """Computes gradients for an encapsulated optimizer, with its loss scale."""
  variables = _checked(inner, var_list)
  pairs = compute(
    loss,
    variables,
    tape,
    scale=lambda seed: inner.scale_loss(scale(seed)),
    options=options,
    scalar=scalar,
    of_class=inner.compute_gradients if inner.computes_gradients else None,
  )
  if variables is None:
    # TensorFlow's variables do not know which layers of Keras 3 are frozen.
    pairs = [(grad, inner.as_built(v)) for grad, v in pairs]
    pairs = [(grad, v) for grad, v in pairs if v.trainable]
  grads = inner.unscale([grad for grad, _ in pairs])
  return [(g, v) for g, (_, v) in zip(grads, pairs, strict=True)]


@tf.autograph.experimental.do_not_convert
def _checked(inner: Any, var_list: Any) -> list[Any] | None:
  """The variables to take gradients of, checked."""
  variables = validation.check_var_list(var_list)
  if variables is not None and inner.is_built:
    validation.check_known(variables, inner.knows, "var_list")
  return variables


def _graph_gradients(
  loss: tf.Tensor, variables: list[Any], seed: tf.Tensor, options: GraphOptions
) -> list[Any]:
  """`tf.gradients` with the gates that version 1 optimizers had."""
  grads = tf.compat.v1.gradients(
    loss,
    variables,
    grad_ys=seed,
    gate_gradients=options.gate_gradients == GATE_OP,
    aggregation_method=options.aggregation_method,
    colocate_gradients_with_ops=options.colocate_gradients_with_ops,
  )
  any_gradient = any(grad is not None for grad in grads)
  if options.gate_gradients == GATE_GRAPH and any_gradient:
    grads = tf.tuple(grads)
  return list(grads)
