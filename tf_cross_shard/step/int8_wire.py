"""Sums of gradients that travel in eight bits.

Each member keeps what rounding has left of its dense gradients, and adds it to
the next (error feedback). With part k of a buffer for each member k, and Q for
the rounding of blocks of 256 numbers,

    v = g + left                            each member its own
    t = v[k] + sum over others of Q(v_other[k])      member k: it gets part k
    sum = Q(t) of all parts                 all members, of the same bytes
    left = t - Q(t) in part k, and v - Q(v) in all others

so that `sum` and all members' `left` add up to all members' `v`: what is
rounded away anywhere is left somewhere. Under a sharded update `t` is what
member k needs, and there is no second phase.

References:
  Seide et al., 1-Bit Stochastic Gradient Descent, 2014: error feedback.
  Tang et al., 1-bit Adam, 2021 (arXiv 2102.02888): it, in two phases.
"""

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import (
  indexed_slices,
  layout,
  packing,
  quantization,
)
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base
from tf_cross_shard.step import nonfinite, reduction
from tf_cross_shard.step.reduction import Left

# Of float32 before it is rounded, on every engine: blocks are then the same.
_BUFFER_BYTES: Final = 8 << 20


class Int8Wire(reduction.Wire):
  """Eight bits of dense gradients travel, and what they leave is kept.

  All else, rows and gradients of variables that it was not built on, travels in
  bfloat16.
  """

  def __init__(
    self, engine: engines.Engine, inner: base.InnerOptimizer
  ) -> None:
    """Raises `NotImplementedError` where bytes would not be saved."""
    super().__init__(engine, tf.bfloat16)
    if not engine.can_exchange:
      raise NotImplementedError(
        '`wire_dtype` is "int8", and with more than ten replicas TensorFlow has'
        " no order of workers in which they could exchange parts. Use"
        ' wire_dtype="bfloat16".'
      )
    self._inner = inner
    self._residuals: dict[int, Any] = {}
    self._known: list[Any] = []  # Ids stay theirs.

  @property
  def variables(self) -> list[Any]:
    """The residuals, along the variables that it was built on."""
    return list(self._residuals.values())

  def build(self, variables: Sequence[Any]) -> None:
    """Makes a residual for each of the variables that has none."""
    # In groups of one, too: files go from one size of groups to another.
    for variable in variables:
      native = variables_lib.native(variable)
      if (
        id(native) in self._residuals
        or not native.dtype.is_floating
        or self._inner.is_overwritten(variable)
      ):
        continue
      self._known.append(native)
      with self._engine.making_variables():
        self._residuals[id(native)] = tf.Variable(
          tf.zeros(native.shape),
          trainable=False,
          name=f"wire_residual/{variables_lib.path_of(variable)}",
        )

  def sum_part(
    self,
    grads: Sequence[tf.Tensor],
    variables: Sequence[Any],
    parts: layout.Layout,
  ) -> tuple[tf.Tensor, Left]:
    """Sends all others their parts, and keeps its own as it is."""
    residuals = [self._residual(variable) for variable in variables]
    flat = packing.flatten(self._with_left(grads, residuals))
    members = self._engine.groups.group_size
    rows = tf.reshape(self._engine.row(flat, parts), [members, -1])
    total, left = self._exchange(rows)
    left = self._in_order(tf.zeros_like(total), left)
    news = parts.join(tf.unstack(left))
    return tf.cast(total, grads[0].dtype), self._pairs(residuals, news)

  def keep(self, left: Left, sums: Sequence[Gradient]) -> None:
    """Keeps all residuals, or none where anything is not finite."""
    if not left:
      return
    is_step = nonfinite.all_finite([*sums, *(new for _, new in left)])
    with self._engine.isolate():
      for residual, new in left:
        old = tf.convert_to_tensor(residual)
        residual.assign(tf.where(is_step, new, old))

  def _sum_dense(
    self,
    grads: Sequence[tf.Tensor],
    variables: Sequence[Any],
    beside: Sequence[tf.Tensor],
  ) -> tuple[list[tf.Tensor], Left]:
    """Sums in two phases what there are residuals for."""
    if self._engine.groups.group_size == 1:
      return [*grads, *beside], []
    known = list(map(self._residual, variables))
    residuals = [residual for residual in known if residual is not None]
    own = [
      grad
      for grad, residual in zip(grads, known, strict=True)
      if residual is not None
    ]
    others = [
      grad
      for grad, residual in zip(grads, known, strict=True)
      if residual is None
    ]
    rest, _ = super()._sum_dense(others, [], beside)
    if not own:
      return rest, []
    buffers, unpack = packing.pack(
      self._with_left(own, residuals), _BUFFER_BYTES
    )
    # The last layers' gradients exist first.
    both = list(map(self._sum_buffer, buffers[::-1]))[::-1]
    sums = iter(packing.widen(unpack([total for total, _ in both]), own))
    left = self._pairs(residuals, unpack([left for _, left in both]))
    remaining = iter(rest)
    dense = [
      next(remaining if residual is None else sums) for residual in known
    ]
    return [*dense, *remaining], left

  def _sum_buffer(self, buffer: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of a buffer, and what is left of this member's."""
    size, members = buffer.shape[0], self._engine.groups.group_size
    block = quantization.BLOCK
    part = block * max(1, -(-size // (members * block)))
    if missing := members * part - size:
      buffer = tf.pad(buffer, [[0, missing]])
    total, left = self._exchange(tf.reshape(buffer, [members, part]))
    words = self._engine.all_gather_part(quantization.encode(total))
    sums = quantization.decode(tf.reshape(words, [members, -1]), part)
    left = self._in_order(total - sums[self._engine.position()], left)
    return tf.reshape(sums, [-1])[:size], tf.reshape(left, [-1])[:size]

  def _exchange(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this member's sum, and what is left of the others' rows.

    The rows of the others begin with the next member's.
    """
    place = self._engine.position()
    rows = tf.roll(rows, -place, axis=0)
    words = quantization.encode(rows[1:])
    sent = tf.pad(words, [[1, 0], [0, 0]])  # Its own does not travel.
    received = self._engine.all_to_all(tf.roll(sent, place, axis=0))
    others = tf.roll(received, -place, axis=0)[1:]
    part = rows.shape[1]
    total = rows[0] + tf.reduce_sum(quantization.decode(others, part), axis=0)
    return total, rows[1:] - quantization.decode(words, part)

  def _in_order(self, own: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all members, in their order."""
    rows = tf.concat([own[tf.newaxis], others], axis=0)
    return tf.roll(rows, self._engine.position(), axis=0)

  def _residual(self, variable: Any) -> Any:
    """Returns the residual of a variable, or None."""
    return self._residuals.get(id(variables_lib.native(variable)))

  def _with_left(
    self, grads: Sequence[tf.Tensor], residuals: Sequence[Any]
  ) -> list[tf.Tensor]:
    """Returns gradients and what was left before, in the loss scale of now."""
    scale = self._inner.scale_limit(1.0)
    with self._engine.isolate():
      return [
        tf.reshape(tf.cast(grad, tf.float32), residual.shape)
        + indexed_slices.times(tf.convert_to_tensor(residual), scale)
        for grad, residual in zip(grads, residuals, strict=True)
      ]

  def _pairs(self, residuals: Sequence[Any], news: Sequence[Any]) -> Left:
    """Returns residuals with their next values, without a loss scale."""
    scale = 1.0 / self._inner.scale_limit(1.0)
    return [
      (residual, indexed_slices.times(tf.reshape(new, residual.shape), scale))
      for residual, new in zip(residuals, news, strict=True)
    ]
