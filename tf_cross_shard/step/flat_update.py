"""The flat update: each member keeps one part of the state.

With n members in a group and W the flat weights of one dtype, padded to n equal
parts, member i does

    g[i] = reduce_scatter(grads)[i]      the group's sum, this part of it
    W[i] = opt.update(W[i], g[i])        opt has state for W[i] only
    W    = all_gather(W[i])

So the state has 1/n of its size, and the encapsulated optimizer updates one
large variable where the model has many. Between machines there are several such
rows: they travel at once, and those of the last layers begin early.

References:
  Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
  Training, 2020 (arXiv 2004.13336). Rajbhandari et al., ZeRO, 2020 (stage 1).
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients import clipping
from tf_cross_shard.gradients import layout as layouts
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base
from tf_cross_shard.step import sharded_state, sharded_update


class FlatUpdate(sharded_update.ShardedUpdate):
  """Each member keeps one part of the state and updates this part."""

  _clipped = ("clipnorm", "global_clipnorm")

  def _kind(self, variable: Any) -> Hashable:
    """Weights with weight decay, and those without, are not in one part."""
    native = variables_lib.native(variable)
    return native.dtype, self._inner.decays(variable)

  def _rows(self, variables: list[Any]) -> list[list[Any]]:
    """Returns them in rows of about the engine's size."""
    limit = self._engine.row_bytes
    rows: list[list[Any]] = [[]]
    filled = 0
    for variable in variables:
      native = variables_lib.native(variable)
      size = native.dtype.size * int(np.prod(native.shape))
      if limit and rows[-1] and filled + size > limit:
        rows.append([])
        filled = 0
      rows[-1].append(variable)
      filled += size
    return rows

  def _lay_out(
    self, variables: list[Any], number: int
  ) -> sharded_update.Weights:
    """Cuts weights into equal parts, and makes the variable of one part."""
    natives = list(map(variables_lib.native, variables))
    dtype, decays = natives[0].dtype, self._inner.decays(variables[0])
    layout = layouts.Layout.even(
      [int(np.prod(native.shape)) for native in natives],
      self._engine.groups.group_size,
    )
    name = f"shard{number or ''}_{dtype.name}"
    name += "" if decays else "_without_decay"
    with self._engine.making_variables():
      zeros = tf.zeros([layout.part], dtype)
      shard = self._inner.make_variable(zeros, name)
    return sharded_update.Weights(variables, natives, layout, shard)

  def _build(self) -> sharded_state.PlainState:
    """Builds the encapsulated optimizer on the parts."""
    built_on = [*(weights.shard for weights in self._weights), *self._whole]
    like = [*(weights.variables[0] for weights in self._weights), *self._whole]
    # At once: Keras forgets what was excluded before.
    base.innermost(self._inner.optimizer).exclude_from_weight_decay(
      var_list=[
        built
        for built, variable in zip(built_on, like, strict=True)
        if not self._inner.decays(variable)
      ]
    )
    self._inner.build(built_on)
    state = sharded_state.of_parts(
      self._inner,
      self._variables,
      self._places(),
      built_on,
      self._engine,
    )
    if base.innermost(self._inner.optimizer).use_ema:
      self._start_averages()
    return state

  def _updated(self) -> list[Any]:
    """Returns the parts, as the weights are now."""
    with self._engine.isolate():
      self._take_own_part()
    return [weights.shard for weights in self._weights]

  def _sums_of(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the parts: each is the gradient of a shard."""
    return list(parts)

  def _part_of(self, weights: sharded_update.Weights) -> tf.Tensor:
    """Returns the value of a shard."""
    return tf.convert_to_tensor(variables_lib.native(weights.shard))

  def _clip(
    self, parts: list[tf.Tensor], tables: Sequence[Gradient]
  ) -> list[Gradient]:
    """Returns sums clipped by the limits of `opt` that are norms."""
    limit = base.innermost(self._inner.optimizer).clipnorm
    if limit and limit > 0:
      limit = self._inner.scale_limit(limit)
      parts = self._clip_each(parts, limit)
      tables = clipping.clip(tables, clipnorm=limit)
    return super()._clip(parts, tables)

  def _clip_each(
    self, parts: Sequence[tf.Tensor], limit: Any
  ) -> list[tf.Tensor]:
    """Clips the gradient of each weight by its own norm."""
    squares, place = [], self._engine.place_among_zeros
    for part, weights in zip(parts, self._weights, strict=True):
      if part.dtype.size < tf.float32.size:
        part = tf.cast(part, tf.float32)
      # A weight may lie in several parts; zeros add nothing to a norm.
      rows = tf.split(place(tf.square(part)), len(weights.layout.cuts))
      pieces = weights.layout.join(rows)
      squares.append(tf.stack([tf.reduce_sum(piece) for piece in pieces]))
    clipped = []
    totals = self._engine.all_reduce_sum(squares)
    for part, weights, total in zip(parts, self._weights, totals, strict=True):
      bound = tf.cast(limit, total.dtype)
      scale = tf.cast(bound / tf.maximum(tf.sqrt(total), bound), part.dtype)
      scales = [
        tf.fill([size], factor)
        for size, factor in zip(
          weights.layout.sizes, tf.unstack(scale), strict=True
        )
      ]
      clipped.append(part * self._engine.own_part(scales, weights.layout))
    return clipped

  def _gather(self, is_step: Any) -> None:
    """Gives each replica the weights, constrained after a step."""
    super()._gather(is_step)
    with self._engine.isolate():
      for weights in self._weights:
        for variable in weights.variables:
          constraint = getattr(variable, "constraint", None)
          if constraint is not None:
            native = variables_lib.native(variable)
            value = tf.convert_to_tensor(native)
            # Not where a step is left out.
            native.assign(tf.where(is_step, constraint(value), value))

  def _start_averages(self) -> None:
    """Sets averages, which Keras made of the first replica's parts."""
    if not tf.distribute.in_cross_replica_context():
      # tf_keras builds in the first step.
      raise RuntimeError(
        "`opt` averages weights and `shard_update` is set: call"
        " optimizer.build(model.trainable_variables) inside `with"
        " strategy.scope():` before the first step."
      )

    def start() -> None:
      with self._engine.isolate():
        self._take_own_part()
        shards = (weights.shard for weights in self._weights)
        for average, shard in zip(self._inner.averages, shards, strict=False):
          native = variables_lib.native(shard)
          variables_lib.native(average).assign(tf.convert_to_tensor(native))

    with tf.init_scope():
      self._run(start)

  def _take_own_part(self) -> None:
    """Copies this member's parts of the weights; isolated."""
    for weights in self._weights:
      part = self._engine.own_part(weights.natives, weights.layout)
      variables_lib.native(weights.shard).assign(part)

  def _places(self) -> list[tuple[int, int | None]]:
    """Returns which part holds each variable, and where in all it begins.

    That is None for a table, of which the optimizer has the whole.
    """
    places: dict[int, tuple[int, int | None]] = {
      id(table): (len(self._weights) + i, None)
      for i, table in enumerate(self._whole)
    }
    for i, weights in enumerate(self._weights):
      starts = itertools.accumulate(weights.layout.sizes, initial=0)
      for variable, start in zip(weights.variables, starts, strict=False):
        places[id(variable)] = i, start
    return [places[id(variable)] for variable in self._variables]
