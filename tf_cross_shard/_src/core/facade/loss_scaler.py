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
from typing import Any


def find_caller(optimizer: Any, kind: type[Any]) -> Any:
  """Returns the LossScaleOptimizer that is being created around `optimizer`.

  The constructor of a LossScaleOptimizer sets an attribute on the optimizer
  that it wraps. Call this function from the `__setattr__` of `optimizer`: only
  the calling frame, two above this one, knows the LossScaleOptimizer. If
  something else is setting the attribute, the result is None.
  """
  frame = sys._getframe(2)  # noqa: SLF001
  caller = frame.f_locals.get("self")
  if isinstance(caller, kind) and caller.inner_optimizer is optimizer:
    return caller
  return None
