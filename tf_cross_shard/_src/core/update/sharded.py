"""The sharded update: each member of a group keeps one part of the state.

With n members in a group and W the flat weights of one dtype, padded to n equal
parts, member i does

    g[i] = reduce_scatter(grads)[i]      the group's sum, part i of it
    W[i] = opt.update(W[i], g[i])        opt has state for W[i] only
    W    = all_gather(W[i])              all members have all weights again

    weights of a bucket   a a a a a a b b c c c c c c . .
    updated by member     0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3       . is padding

So the wrapped optimizer updates one large variable, the *shard* W[i], instead
of the model's many variables. Between machines the weights are split into
several *buckets*, so that several collective operations run at the same time,
and the operations for the last layers start early. Embedding tables that are
updated by rows are not sharded: all members update the rows in the batch.

References:
  Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
  Training, 2020 (arXiv 2004.13336). Rajbhandari et al., ZeRO, 2020 (stage 1).
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import (
  clipping,
  packing,
  row_sparse,
)
from tf_cross_shard._src.core.reduce import gradient_reducer
from tf_cross_shard._src.core.reduce import layout as layouts
from tf_cross_shard._src.core.update import (
  nonfinite,
  replicated,
  saved_state,
)
from tf_cross_shard._src.core.update import rows as rows_lib
from tf_cross_shard._src.core.variables import Gradient, Optimizer, Variable
from tf_cross_shard._src.core.wrapped import keras_classes, overriding
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

# The limits of the wrapped optimizer that need norms of whole gradients, so
# that this update clips by them instead of the optimizer.
_NORMS: Final = ("clipnorm", "global_clipnorm")


class WeightBucket(NamedTuple):
  """Weights of one dtype that are reduced and gathered together.

  `shard`, `[layout.part_size]`, is what the optimizer updates on this member.
  """

  variables: list[Variable]
  natives: list[Variable]
  layout: layouts.Layout
  shard: Any


class ShardedUpdate(replicated.Update):
  """Each member keeps the state of one part of the weights and updates it."""

  sharding = "elementwise"

  def __init__(
    self,
    wrapped: wrapped_lib.WrappedOptimizer,
    reducer: gradient_reducer.GradientReducer,
    tables: rows_lib.Tables,
    guard: nonfinite.NonfiniteGuard,
  ) -> None:
    super().__init__(wrapped, reducer, tables)
    self.guard = guard
    self._all_variables: list[Variable] = []  # In the user's order.
    self.buckets: list[WeightBucket] = []
    self.unsharded_tables: list[Variable] = []
    # The plain optimizer's children, with whole slots.
    wrapped.checkpoint_view = saved_state.CheckpointView({}, wrapped.optimizer)

  def build(self, variables: Sequence[Variable]) -> None:
    if self._all_variables:
      return
    by_key: dict[Hashable, list[Any]] = {}
    for variable in variables:
      if self.tables.is_table(variable):
        self.unsharded_tables.append(variable)
      else:
        # The optimizer decides about weight decay once for a whole shard.
        dtype = variables_lib.native(variable).dtype
        key = dtype, self.wrapped.decays(variable)
        by_key.setdefault(key, []).append(variable)
    self._all_variables = list(variables)
    self.buckets = [
      self._make_bucket(of_bucket, number)
      for of_key in by_key.values()
      for number, of_bucket in enumerate(self._split_by_size(of_key))
    ]
    with self.engine.making_variables():
      self.wrapped.sharded_state = self._build_wrapped()
    self.wrapped.checkpoint_view.add(self.wrapped.sharded_state.checkpoint_view)

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
  ) -> WeightBucket:
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
    return WeightBucket(variables, natives, layout, shard)

  def _build_wrapped(self) -> saved_state.PlainState:
    """Builds the wrapped optimizer; returns its state for savers."""
    built_on = [*self._shards, *self.unsharded_tables]
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
    state = saved_state.PlainState(
      self.wrapped,
      self._all_variables,
      self._places(),
      self.engine,
    )
    if self.wrapped.base_optimizer.use_ema:
      self._start_averages()
    return state

  def _places(self) -> list[tuple[int, int | None]]:
    """Returns where `opt` holds each weight, as `PlainState` expects it."""
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

  def _start_averages(self) -> None:
    """Sets each member's moving averages to this member's weights."""
    # Keras copied the first replica's shards, which were zeros.
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
          self.wrapped.averages, self._shards, strict=False
        ):
          native = variables_lib.native(shard)
          variables_lib.native(average).assign(tf.convert_to_tensor(native))

    with tf.init_scope():
      self._run_on_all_replicas(start)

  @property
  def _shards(self) -> list[Variable]:
    return [bucket.shard for bucket in self.buckets]

  def reduce(
    self, grads: Sequence[Gradient], variables: Sequence[Variable]
  ) -> list[Gradient]:
    if self._norm_limits():
      # A norm needs the whole gradient, so the group sums whole gradients.
      return self.cut(self.reducer.reduce(grads), variables)
    table_grads, by_bucket = self._sort_gradients(grads, variables)
    table_sums = self.reducer.reduce(table_grads)
    # Backpropagation computes the gradients of the last layers first. So start
    # with the last bucket, and return the parts in the order of the buckets.
    parts = [
      self.reducer.reduce_part(flat_grads, bucket.layout)
      for bucket, flat_grads in zip(
        self.buckets[::-1], by_bucket[::-1], strict=True
      )
    ][::-1]
    return self._own_sums(parts, table_sums)

  def cut(
    self, sums: Sequence[Gradient], variables: Sequence[Variable]
  ) -> list[Gradient]:
    sums = clipping.clip(sums, **self._norm_limits())
    table_sums, by_bucket = self._sort_gradients(sums, variables)
    parts = [
      self.engine.cut_part(flat_sums, bucket.layout)
      for bucket, flat_sums in zip(self.buckets, by_bucket, strict=True)
    ]
    return self._own_sums(parts, table_sums)

  def _norm_limits(self) -> dict[str, Any]:
    """Returns the user's limits that `cut` applies, in the gradients' scale."""
    limits = clipping.limits_of(self.wrapped.base_optimizer)
    return {
      name: self.wrapped.scale_limit(limits[name])
      for name in _NORMS
      if limits[name] is not None
    }

  def _own_sums(
    self, parts: list[tf.Tensor], table_sums: Sequence[Gradient]
  ) -> list[Gradient]:
    """Returns the gradients of the shards, then those of the tables."""
    if self.guard.may_skip:
      # Each member sees only its own parts, but all members of a group must
      # skip the same steps. Adding 0 changes no part. Adding NaN turns every
      # element into NaN.
      is_finite = clipping.all_finite([*parts, *table_sums])
      [bad] = self.engine.all_reduce_sum([tf.cast(~is_finite, tf.float32)])
      marker = tf.where(bad > 0, float("nan"), 0.0)
      parts = [part + tf.cast(marker, part.dtype) for part in parts]
    return [*parts, *table_sums]

  def read_weights(self) -> None:
    # Something else, such as `set_weights`, may have changed the weights since
    # the last step.
    for bucket in self.buckets:
      part = self.engine.cut_part(bucket.natives, bucket.layout)
      variables_lib.native(bucket.shard).assign(part)

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Variable],
    through_apply: bool,
  ) -> None:
    updated = [*self._shards, *self.unsharded_tables]
    # `cut` has applied these limits. Switch them off.
    with overriding.overriding(
      self.wrapped.base_optimizer, **dict.fromkeys(_NORMS)
    ):
      super().apply(sums, updated, through_apply)

  def gather_weights(self, sums: Sequence[Gradient]) -> None:
    self._gather()
    # Keras applies only the constraints of variables that it updates: shards,
    # which have none. A skipped step changes no weight.
    constrains = clipping.all_finite(sums) if self.guard.may_skip else True
    with self.engine.isolate():
      for bucket in self.buckets:
        for variable in bucket.variables:
          constraint = getattr(variable, "constraint", None)
          if constraint is not None:
            native = variables_lib.native(variable)
            value = tf.convert_to_tensor(native)
            native.assign(tf.where(constrains, constraint(value), value))

  def write_averages(self, variables: Sequence[Variable]) -> None:
    del variables
    if not (self._all_variables and self.wrapped.finalizes):
      return

    def finalize() -> None:
      with self.engine.isolate():
        self.read_weights()
        self.wrapped.write_averages(self.wrapped.trainable_variables)
      self._gather()

    self._run_on_all_replicas(finalize)

  def _gather(self) -> None:
    """Sets W = all_gather(W[i]) on all members."""
    for bucket in self.buckets:
      with self.engine.isolate():
        part = tf.identity(variables_lib.native(bucket.shard))
      values = self.engine.gather_parts(part, bucket.layout, bucket.natives)
      with self.engine.isolate():
        for weight, value in zip(bucket.natives, values, strict=True):
          weight.assign(value)

  def _run_on_all_replicas(self, step: Callable[[], None]) -> None:
    # TensorFlow warns of an eager `strategy.run`, and of retracing lambdas.
    run = functools.partial(self.engine.strategy.run, step)
    tf.function(run, autograph=False)()

  def _sort_gradients(
    self, grads: Sequence[Gradient], variables: Sequence[Variable]
  ) -> tuple[list[Gradient], list[list[tf.Tensor]]]:
    """Returns the tables' gradients, and each bucket's, flat and dense."""
    by_id = {
      id(variables_lib.native(variable)): grad
      for grad, variable in zip(grads, variables, strict=True)
    }
    if len(by_id) < len(grads):
      raise ValueError(
        "With `shard_update`, `grads_and_vars` must contain each variable once;"
        f" got {len(grads)} gradients of {len(by_id)} variables. Add up the"
        " gradients of each variable."
      )

    def find(variable: Variable) -> Gradient:
      native = variables_lib.native(variable)
      grad = by_id.get(id(native))
      if grad is None:
        raise ValueError(
          "With `shard_update`, `grads_and_vars` must contain a gradient for"
          f" every variable that the optimizer was built on; {native.name} has"
          " none. Build the optimizer on the variables that you train."
        )
      return grad

    def find_dense(variable: Variable) -> Gradient:
      grad = self.tables.to_dense(find(variable), variable)
      return row_sparse.cast(grad, variable)

    # Flatten gradients before they are summed: TensorFlow's graph optimizer
    # would otherwise merge a gradient with its sum.
    return list(map(find, self.unsharded_tables)), [
      packing.flatten(list(map(find_dense, bucket.variables)))
      for bucket in self.buckets
    ]


def check(optimizer: Optimizer, shard_update: bool | str) -> None:
  """Raises `ValueError` if the optimizer cannot be sharded."""
  keras_classes.check_elementwise(optimizer, "shard_update", shard_update)
  remedy = "Use `accumulate_steps` of the CrossShardOptimizer."
  remedies = {"gradient_accumulation_steps": remedy}
  # A user's class may do anything before it clips. This package can clip
  # in place of Keras' own classes only.
  if keras_classes.keras_class(optimizer) not in keras_classes.ELEMENTWISE:
    for limit in _NORMS:
      remedies[limit] = "Clip in your class, or before `apply_gradients`."
  for argument, remedy in remedies.items():
    if getattr(optimizer, argument, None):
      raise ValueError(
        f"`shard_update` is {shard_update!r}, but `opt` uses {argument}="
        f"{getattr(optimizer, argument)}, which needs whole variables. {remedy}"
      )
