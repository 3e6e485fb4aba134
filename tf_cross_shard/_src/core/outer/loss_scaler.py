"""Support for a LossScaleOptimizer that wraps our optimizer.

Under mixed precision, `compile` puts a LossScaleOptimizer around our optimizer.
Without this module, Keras would look at each replica's own gradients, or only
at the gradients of the first replica, to decide whether a step has overflowed.
Replicas would decide differently and end up with different weights. So the
order is changed:

    Keras    LossScaleOptimizer checks ─▶ our optimizer reduces ─▶ update
    here     our optimizer reduces ─▶ LossScaleOptimizer checks ─▶ update

After our optimizer has reduced the gradients, each replica (isolated from the
others) passes the sums to the LossScaleOptimizer. All members of a group have
the same sums, or parts that are all NaN if any part is not finite
(`shard_update`), so their LossScaleOptimizers make the same decision. If the
sums are finite, the LossScaleOptimizer calls our optimizer for the update.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from tf_cross_shard._src.core.inner import inner as inner_lib


def install_outer_loss_scaler(
  inner: inner_lib.Inner,
  outer_scaler: Any,
  methods: Mapping[str, Callable[..., Any]],
) -> None:
  """Makes our optimizer reduce gradients before the loss scaler checks them.

  `outer_scaler` is the LossScaleOptimizer, which was just created around our
  optimizer. Our `methods` replace its methods of the same names.
  """
  # An earlier LossScaleOptimizer is not used any more.
  inner.outer_scaler = None
  # If `opt` is also a LossScaleOptimizer, only `opt` scales the loss.
  if not inner.skips_overflows:
    inner.outer_scaler = outer_scaler
  vars(outer_scaler).update(methods)


def find_caller(optimizer: Any, kind: type[Any]) -> Any:
  """Returns the LossScaleOptimizer that is being created around `optimizer`.

  The constructor of a LossScaleOptimizer sets an attribute on the optimizer
  that it wraps. Call this function from the `__setattr__` of
  `optimizer`: only the calling frame, two above this one, knows the
  LossScaleOptimizer.

  Returns:
    The LossScaleOptimizer; None if something else is setting the attribute.
  """
  frame = sys._getframe(2)  # noqa: SLF001
  caller = frame.f_locals.get("self")
  if isinstance(caller, kind) and caller.inner_optimizer is optimizer:
    return caller
  return None
