"""The update by owners: each weight is updated as a whole, by one member.

Every weight v of a group has an owner among the group's members:

    g[v] = reduce(grads[v])          the group's sum, sent to the owner of v
    v    = opt.update(v, g[v])       on the owner, with v's own norms and shape
    v    = broadcast(v)              all members have all weights again

    weights of a bucket   a a a a a a b b c c c c c c c d
    updated by member     1 1 1 1 1 1 2 2 0 0 0 0 0 0 0 3

So an optimizer that treats each variable separately computes the same numbers
as without sharding, up to the order in which gradients are summed. The members
share the work of optimizers that look at whole matrices. Weights are assigned
in order of falling cost, each to the member with the least work so far. Every
member has slots for all weights, because a variable has the same shape on all
replicas. So the update by owners saves time, but no memory, and only the
owner's slots are valid.

References:
  Anil et al., Scalable Second Order Optimization for Deep Learning, 2020 (arXiv
  2002.09018): preconditioners distributed over workers. Rajbhandari et al.,
  ZeRO, 2020, which divides elements instead of whole weights.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import nonfinite
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.keras_types import Variable
from tf_cross_shard._src.core.reduce import gradient_reducer
from tf_cross_shard._src.core.reduce import layout as layouts
from tf_cross_shard._src.core.update import rows as rows_lib
from tf_cross_shard._src.core.update import saved_state, sharded
from tf_cross_shard._src.core.wrapped import keras_classes
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

# Keras' classes whose update costs the same for each element. Muon multiplies
# matrices, so a wide matrix costs more for each element.
_LINEAR_COST = {*keras_classes.INDEPENDENT} - {"Muon"}


class ByVariableUpdate(sharded.ShardedUpdate):
  """Each member updates the weights that it owns."""

  sharding = "by_variable"

  def __init__(
    self,
    wrapped: wrapped_lib.WrappedOptimizer,
    reducer: gradient_reducer.GradientReducer,
    tables: rows_lib.Tables,
    guard: nonfinite.NonfiniteGuard,
  ) -> None:
    if reducer.engine.is_single_program:
      raise NotImplementedError(
        "`shard_update` divides the weights by variable, but all TPU replicas"
        " run one program, so a replica cannot do work that the others do not."
        " Remove `shard_update`, or use an optimizer whose update of each"
        " element depends only on that element."
      )
    super().__init__(wrapped, reducer, tables, guard)

  def _bucket_key(self, variable: Variable) -> Hashable:
    return variables_lib.native(variable).dtype

  def _make_bucket(
    self, variables: list[Variable], number: int
  ) -> sharded.WeightBucket:
    del number
    natives = list(map(variables_lib.native, variables))
    shapes = [list(map(int, native.shape)) for native in natives]
    opt_class = keras_classes.keras_class(self.wrapped.base_optimizer)
    is_linear = opt_class in _LINEAR_COST
    # The cost of an update: the number of elements or, where the optimizer
    # multiplies [m, n] matrices, the elements times min(m, n).
    costs = [
      float(np.prod(shape)) * (1 if is_linear else min(shape[-2:] or [1]))
      for shape in shapes
    ]
    layout = layouts.Layout.by_tensor(
      [int(np.prod(shape)) for shape in shapes],
      costs,
      self.engine.groups.group_size,
    )
    return sharded.WeightBucket(variables, natives, layout)

  def _build_wrapped(self) -> saved_state.PlainState:
    self.wrapped.build(self._all_variables)
    owners = {
      id(variable): bucket.layout.owners[index]
      for bucket in self.buckets
      for index, variable in enumerate(bucket.variables)
    }
    return saved_state.of_owners(
      self.wrapped,
      self._all_variables,
      [owners.get(id(variable)) for variable in self._all_variables],
      self.engine,
    )

  def variables_of(self, member: Any) -> list[Variable]:
    return [
      bucket.variables[cut.index]
      for bucket in self.buckets
      for cut in bucket.layout.cuts[member]
    ]

  def _own_gradients(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    member = self.engine.position()
    return [
      tf.reshape(flat_grad, bucket.natives[cut.index].shape)
      for part, bucket in zip(parts, self.buckets, strict=True)
      for cut, flat_grad in zip(
        bucket.layout.cuts[member],
        bucket.layout.unpack(member, part),
        strict=True,
      )
    ]
