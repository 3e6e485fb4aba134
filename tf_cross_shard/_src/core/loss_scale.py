"""Keeps Keras' LossScaleOptimizer inside our optimizers.

Around ours, it would look for overflows in each replica's own gradients instead
of their sums. Keras' `compile` puts one around any optimizer; it is moved.
"""

import contextlib
import functools
from typing import Any

from tf_cross_shard._src.core.variables import Optimizer
from tf_cross_shard._src.core.wrapped import keras_private, nested, overriding
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


def watch(kind: type[Any]) -> None:
  """Lets the constructor of a class of Keras refuse to be around ours."""
  construct: Any = kind.__init__

  @functools.wraps(construct)
  def checked(
    self: Any, inner_optimizer: Optimizer, *args: Any, **kwargs: Any
  ) -> None:
    _check_is_moved(inner_optimizer)
    construct(self, inner_optimizer, *args, **kwargs)

  kind.__init__ = checked


def compiling(optimizer: Optimizer) -> contextlib.AbstractContextManager[Any]:
  """Returns a context for Keras' `compile`, before `move_inside`."""
  wrapped = wrapped_lib.find(optimizer)
  if wrapped is None:
    return contextlib.nullcontext()
  return overriding.overriding(wrapped, moves_loss_scale=True)


def move_inside(model: Any) -> None:
  """Moves a LossScaleOptimizer that `compile` has put around ours."""
  scaler = model.optimizer
  ours = getattr(scaler, "inner_optimizer", None)
  if wrapped_lib.find(ours) is None or wrapped_lib.find(scaler) is not None:
    return
  wrapped = _innermost(ours)
  if not _has_scale(wrapped):
    is_built = wrapped.is_built
    with wrapped.strategy.scope():
      wrapped.optimizer = type(scaler)(wrapped.optimizer)
      if is_built:
        wrapped.build(wrapped.trainable_variables)
    view = wrapped.checkpoint_view
    if view is not None:
      wrapped.checkpoint_view = type(view)({}, wrapped.optimizer)
  model.optimizer = ours


def _check_is_moved(optimizer: Optimizer) -> None:
  """Raises `ValueError` if a LossScaleOptimizer cannot be around an optimizer.

  It can while `compile` runs, unless moving it inside would lose state.
  """
  wrapped = wrapped_lib.find(optimizer)
  if wrapped is None:
    return
  moves = wrapped.moves_loss_scale
  if moves and _can_move_into(_innermost(optimizer)):
    return
  inside = list(nested.nested_optimizers(optimizer))
  kinds = [type(each).__name__ for each in inside if wrapped_lib.find(each)]
  reason = (
    f"compile cannot put a LossScaleOptimizer inside a {kinds[0]} that is built"
    " or restored already. Put it inside yourself"
    if moves
    else f"A LossScaleOptimizer must not be around a {kinds[0]}, because sums"
    " of gradients show whether a step overflows. Put it inside"
  )
  kinds += ["LossScaleOptimizer", type(inside[-1]).__name__]
  line = "(".join(kinds) + "(...)" + ")" * (len(kinds) - 1)
  raise ValueError(f"{reason}: {line}.")


def _can_move_into(wrapped: wrapped_lib.WrappedOptimizer) -> bool:
  if _has_scale(wrapped):  # It stays, and the other one goes.
    return True
  view = wrapped.checkpoint_view
  if view is not None and (wrapped.sharded_state or view.has_waiting_values):
    return False
  return not keras_private.has_waiting(wrapped.optimizer, "inner_optimizer")


def _innermost(optimizer: Optimizer) -> wrapped_lib.WrappedOptimizer:
  wrappers = map(wrapped_lib.find, nested.nested_optimizers(optimizer))
  return list(filter(None, wrappers))[-1]


def _has_scale(wrapped: wrapped_lib.WrappedOptimizer) -> bool:
  return wrapped.optimizer is not wrapped.base_optimizer
