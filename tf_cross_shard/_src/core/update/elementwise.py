"""The flat update: each member keeps one part of the optimizer's state.

With n members in a group and W the flat weights of one dtype, padded to n equal
parts, member i does

    g[i] = reduce_scatter(grads)[i]      the group's sum, part i of it
    W[i] = opt.update(W[i], g[i])        opt has state for W[i] only
    W    = all_gather(W[i])              all members have all weights again

    weights of a bucket   a a a a a a b b c c c c c c . .
    updated by member     0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3       . is padding

So the state of each member has 1/n of the size, and the wrapped optimizer
updates one large variable, the *shard* W[i], instead of the model's many
variables. Between machines the weights are split into several buckets, so that
several collective operations run at the same time, and the operations for the
last layers start early.

The update of an element must depend only on that element
(`shard_update="elementwise"`). Clipping by norms needs the whole gradient of a
weight, so the base class clips instead of the user's optimizer.

References:
  Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
  Training, 2020 (arXiv 2004.13336). Rajbhandari et al., ZeRO, 2020 (stage 1).
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import clipping
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.keras_types import Variable
from tf_cross_shard._src.core.reduce import layout as layouts
from tf_cross_shard._src.core.update import saved_state, sharded


class ElementwiseUpdate(sharded.ShardedUpdate):
  """Each member keeps the state of one part of the weights and updates it."""

  sharding = "elementwise"
  _limits_applied_here = ("clipnorm", "global_clipnorm")

  def _bucket_key(self, variable: Variable) -> Hashable:
    """Separates dtypes, and weights with weight decay from those without.

    The optimizer decides about weight decay once for a whole shard.
    """
    native = variables_lib.native(variable)
    return native.dtype, self.wrapped.decays(variable)

  def _split_by_size(self, variables: list[Variable]) -> list[list[Variable]]:
    limit = self.engine.scatter_bytes
    buckets: list[list[Any]] = [[]]
    filled = 0  # Bytes in the last bucket.
    for variable in variables:
      native = variables_lib.native(variable)
      size = native.dtype.size * int(np.prod(native.shape))
      if limit and buckets[-1] and filled + size > limit:
        buckets.append([])
        filled = 0
      buckets[-1].append(variable)
      filled += size
    return buckets

  def _make_bucket(
    self, variables: list[Variable], number: int
  ) -> sharded.WeightBucket:
    natives = list(map(variables_lib.native, variables))
    dtype, decays = natives[0].dtype, self.wrapped.decays(variables[0])
    layout = layouts.Layout.even(
      [int(np.prod(native.shape)) for native in natives],
      self.engine.groups.group_size,
    )
    # For example "shard_float32" or "shard1_float32_without_decay".
    name = f"shard{number or ''}_{dtype.name}"
    name += "" if decays else "_without_decay"
    # One variable W[i], [layout.part_size], with a copy for each member i.
    with self.engine.making_variables():
      zeros = tf.zeros([layout.part_size], dtype)
      shard = self.wrapped.make_variable(zeros, name)
    return sharded.WeightBucket(variables, natives, layout, shard)

  def _build_wrapped(self) -> saved_state.PlainState:
    shards = [bucket.shard for bucket in self.buckets]
    built_on = [*shards, *self.unsharded_tables]
    # One of the user's weights for each variable of `built_on`. One weight is
    # enough: either all weights of a bucket have weight decay, or none.
    example_weights = [
      *(bucket.variables[0] for bucket in self.buckets),
      *self.unsharded_tables,
    ]
    # Make one call: a second call would replace the exclusions of the first.
    self.wrapped.base_optimizer.exclude_from_weight_decay(
      var_list=[
        variable
        for variable, weight in zip(built_on, example_weights, strict=True)
        if not self.wrapped.decays(weight)
      ]
    )
    self.wrapped.build(built_on)
    state = saved_state.of_shards(
      self.wrapped,
      self._all_variables,
      self._locations_in_shards(),
      self.engine,
    )
    if self.wrapped.base_optimizer.use_ema:
      self._start_averages()
    return state

  def read_weights(self) -> None:
    """Copies this member's parts of the current weights into its shards.

    Something else, such as `set_weights`, may have changed the weights since
    the last step.
    """
    for bucket in self.buckets:
      part = self.engine.cut_part(bucket.natives, bucket.layout)
      variables_lib.native(bucket.shard).assign(part)

  def variables_of(self, member: Any) -> list[Variable]:
    del member
    return [bucket.shard for bucket in self.buckets]

  def _own_gradients(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(parts)

  def gather_weights(self, sums: Sequence[Gradient]) -> None:
    """Gives each replica the whole weights, and applies their constraints.

    Keras applies only the constraints of variables that it updates. It updates
    shards, which have no constraints.
    """
    super().gather_weights(sums)
    # A skipped step changes no weight.
    constrains = clipping.all_finite(sums) if self.guard.may_skip else True
    with self.engine.isolate():
      for bucket in self.buckets:
        for variable in bucket.variables:
          constraint = getattr(variable, "constraint", None)
          if constraint is not None:
            native = variables_lib.native(variable)
            value = tf.convert_to_tensor(native)
            native.assign(tf.where(constrains, constraint(value), value))

  def _start_averages(self) -> None:
    """Sets each member's moving averages to this member's weights.

    Keras copied the first replica's shards, which were zeros.
    """
    if not tf.distribute.in_cross_replica_context():
      # tf_keras builds in the first step.
      raise RuntimeError(
        "With `use_ema` and `shard_update`, the optimizer must be built before"
        " the first step. Call optimizer.build(model.trainable_variables)"
        " inside `with strategy.scope():`."
      )

    def start() -> None:
      with self.engine.isolate():
        self.read_weights()
        # After the averages of the shards, the list contains the averages of
        # tables.
        for average, shard in zip(
          self.wrapped.averages, self._own_variables(), strict=False
        ):
          native = variables_lib.native(shard)
          variables_lib.native(average).assign(tf.convert_to_tensor(native))

    with tf.init_scope():
      self._run_on_all_replicas(start)

  def _locations_in_shards(self) -> list[tuple[int, int | None]]:
    """Returns where `opt` holds each weight, as `of_shards` expects it."""
    places: dict[int, tuple[int, int | None]] = {
      id(table): (len(self.buckets) + i, None)
      for i, table in enumerate(self.unsharded_tables)
    }
    for i, bucket in enumerate(self.buckets):
      # In a shard, weights follow each other.
      starts = itertools.accumulate(bucket.layout.sizes, initial=0)
      for variable, start in zip(bucket.variables, starts, strict=False):
        places[id(variable)] = i, start
    return [places[id(variable)] for variable in self._all_variables]
