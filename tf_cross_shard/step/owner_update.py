"""The update by owners: each variable is updated whole, by one member.

    g[v] = reduce(grads[v])          to the owner of v
    v    = opt.update(v, g[v])       the owner, with v's own norms and shape
    v    = broadcast(v)              to all members

So any class of optimizer computes its own numbers from sums, to the bit, and
members share the work of those that look at whole matrices. The dearest
variable goes first, to the member with the least to do. Every member has slots
for all variables, since copies of one variable have one shape on all replicas:
what is saved is time, and only the owner's slots are in force.

References:
  Anil et al., Scalable Second Order Optimization for Deep Learning, 2020 (arXiv
  2002.09018): preconditioners distributed over workers. Rajbhandari et al.,
  ZeRO, 2020, where parts are elements.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients import layout as layouts
from tf_cross_shard.inner_optimizer import base, fused_update
from tf_cross_shard.step import sharded_state, sharded_update

# Keras' classes that cost the same for each element.
_LINEAR = {*fused_update.ELEMENTWISE, *fused_update.BY_VARIABLE} - {"Muon"}


class OwnerUpdate(sharded_update.ShardedUpdate):
  """Each member updates whole variables, those that it owns."""

  def _prepare(self) -> None:
    """Raises `NotImplementedError` where no member can do its own."""
    if self._engine.is_one_program:
      wanted = self._settings.shard_update
      raise NotImplementedError(
        f"`shard_update` is {wanted!r}, and replicas of a TPU"
        " are one program, in which all members do the same. Leave it out, or"
        " use an optimizer that updates each element by itself."
      )
    super()._prepare()

  def _kind(self, variable: Any) -> Hashable:
    """Variables of one dtype travel together."""
    return variables_lib.native(variable).dtype

  def _lay_out(
    self, variables: list[Any], number: int
  ) -> sharded_update.Weights:
    """Gives each variable an owner, so that members have alike to do."""
    del number
    natives = list(map(variables_lib.native, variables))
    shapes = [list(map(int, native.shape)) for native in natives]
    last = base.innermost(self._inner.optimizer)
    is_linear = fused_update.keras_class(last) in _LINEAR
    layout = layouts.Layout.whole(
      [int(np.prod(shape)) for shape in shapes],
      [
        float(np.prod(shape)) * (1 if is_linear else min(shape[-2:] or [1]))
        for shape in shapes
      ],
      self._engine.groups.group_size,
    )
    return sharded_update.Weights(variables, natives, layout)

  def _build(self) -> sharded_state.PlainState:
    """Builds the encapsulated optimizer on the variables themselves."""
    self._inner.build(self._variables)
    owners = {
      id(variable): weights.layout.owners[index]
      for weights in self._weights
      for index, variable in enumerate(weights.variables)
    }
    return sharded_state.of_owners(
      self._inner,
      self._variables,
      [owners.get(id(variable)) for variable in self._variables],
      self._engine,
    )

  def _updated(self) -> list[Any]:
    """Returns the variables that this member owns."""
    return [
      weights.variables[cut.index]
      for weights in self._weights
      for cut in weights.layout.cuts[self._engine.position()]
    ]

  def _sums_of(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the gradients of these variables."""
    place = self._engine.position()
    return [
      tf.reshape(piece, weights.natives[cut.index].shape)
      for part, weights in zip(parts, self._weights, strict=True)
      for cut, piece in zip(
        weights.layout.cuts[place],
        weights.layout.unpack(place, part),
        strict=True,
      )
    ]

  def _counted(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Leaves out variables whose update this member only repeats."""
    place = self._engine.position()
    return [
      part
      for part, weights in zip(parts, self._weights, strict=True)
      if all(
        weights.layout.owners[cut.index] == place
        for cut in weights.layout.cuts[place]
      )
    ]

  def _part_of(self, weights: sharded_update.Weights) -> tf.Tensor:
    """Returns the values of the variables that this member owns."""
    return self._engine.own_part(weights.natives, weights.layout)
