"""A LossScaleOptimizer that encapsulates our optimizer.

`compile` makes one under mixed precision. Keras decides by each replica's own
gradients, or by the first replica's, that a step has overflowed, and leaves the
others with other weights. So the two change places: our optimizer reduces the
gradients first, and then each replica, isolated, hands the sums to the
LossScaleOptimizer, which decides alike on all members of a group and calls our
optimizer for the update.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any


def change_places(
  ours: Any, around: Any, methods: Mapping[str, Callable[..., Any]]
) -> None:
  """Lets `ours` reduce before `around`, just made, looks at the gradients.

  The methods, by name, take the place of those of `around`.
  """
  inner = ours._inner
  inner.outer_loss_scaler = None  # An earlier one is out of use.
  if not inner.scales_dynamically:  # Of two the inner one scales.
    inner.outer_loss_scaler = around
  vars(around).update(methods)


def find_caller(optimizer: Any, kind: type[Any]) -> Any:
  """The LossScaleOptimizer that is setting an attribute of `optimizer`.

  Its constructor marks the optimizer that it encapsulates by an attribute.
  Nothing but the calling frame, two above this one, tells who it is. None if
  somebody else is setting the attribute.
  """
  caller = sys._getframe(2).f_locals.get("self")
  if isinstance(caller, kind) and caller.inner_optimizer is optimizer:
    return caller
  return None
