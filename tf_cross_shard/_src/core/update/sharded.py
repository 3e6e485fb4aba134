"""Sharded updates: each member of a group updates one part of the weights.

With g the gradients of all weights W, and i a member of the group:

    g[i] = reduce(grads)[i]         the group's sum, member i's part of it
    W[i] = opt.update(W[i], g[i])   each member updates its own part
    W    = gather(W[i])             all members receive all of the weights

This module contains the common code of two kinds of sharded updates.
`elementwise` cuts the elements of all weights into equal parts. `by_variable`
assigns each weight to one member, its owner. Embedding tables that are updated
by rows are not sharded: all members update the rows in the batch.

Weights are reduced and gathered in *buckets*: one collective operation sends
several weights of one dtype, flattened and concatenated.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import nonfinite
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import (
  clipping,
  packing,
  row_sparse,
)
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.keras_types import Optimizer, Variable
from tf_cross_shard._src.core.reduce import gradient_reducer
from tf_cross_shard._src.core.reduce import layout as layouts
from tf_cross_shard._src.core.update import replicated, saved_state
from tf_cross_shard._src.core.update import rows as rows_lib
from tf_cross_shard._src.core.wrapped import keras_classes, overriding
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


@dataclasses.dataclass(frozen=True)
class WeightBucket:
  """Weights of one dtype that are reduced and gathered together.

  Attributes:
    variables: The user's weights, in their order.
    natives: The same weights as `tf.Variable`s.
    layout: Which elements of the weights each member updates.
    shard: The variable, of shape `[layout.part_size]`, that the wrapped
      optimizer updates on this member; None if the optimizer updates the
      weights themselves.
  """

  variables: list[Variable]
  natives: list[Variable]
  layout: layouts.Layout
  shard: Any = None


class ShardedUpdate(replicated.Update):
  """Each member updates one part of the weights.

  Attributes:
    buckets: The weights, in the buckets in which they are reduced and gathered;
      empty before `build`.
    unsharded_tables: Embedding tables, whose rows all members update.
    guard: Whether all members must notice a NaN in the parts of one.
  """

  # The clipping limits of the wrapped optimizer that this class applies,
  # because they need norms of whole gradients. The optimizer applies all
  # others.
  _limits_applied_here: tuple[str, ...] = ("global_clipnorm",)

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
    self._view = saved_state.CheckpointView({}, wrapped.optimizer)
    self.checkpointed = self._view

  def build(self, variables: Sequence[Variable]) -> None:
    if self._all_variables:
      return
    # Tables are not sharded. All other weights are put into buckets by their
    # key.
    by_key: dict[Hashable, list[Any]] = {}
    for variable in variables:
      if self.tables.is_table(variable):
        self.unsharded_tables.append(variable)
      else:
        by_key.setdefault(self._bucket_key(variable), []).append(variable)
    self._all_variables = list(variables)
    self.buckets = [
      self._make_bucket(of_bucket, number)
      for of_key in by_key.values()
      for number, of_bucket in enumerate(self._split_by_size(of_key))
    ]
    with self.engine.making_variables():
      self.wrapped.sharded_state = self._build_wrapped()
    self._view.add(self.wrapped.sharded_state.checkpoint_view)

  @abc.abstractmethod
  def _bucket_key(self, variable: Variable) -> Hashable:
    """Returns a key that all weights of one bucket have in common."""

  def _split_by_size(self, variables: list[Variable]) -> list[list[Variable]]:
    """Splits weights with one key into buckets; here, into a single one."""
    return [variables]

  @abc.abstractmethod
  def _make_bucket(
    self, variables: list[Variable], number: int
  ) -> WeightBucket:
    """Decides which elements of the weights each member updates.

    `number` is the number of the bucket among the buckets with the same key.
    """

  @abc.abstractmethod
  def _build_wrapped(self) -> saved_state.PlainState:
    """Builds the wrapped optimizer; returns its state for savers."""

  @abc.abstractmethod
  def variables_of(self, member: Any) -> list[Variable]:
    """Returns the variables that a member updates, without tables."""

  def _own_variables(self) -> list[Variable]:
    """Returns the variables that this member updates, without tables."""
    return self.variables_of(self.engine.position())

  @abc.abstractmethod
  def _own_gradients(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the gradients of `_own_variables`, given one part per bucket."""

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
    # Clip by the user's limits that need norms of whole gradients.
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
      for name in self._limits_applied_here
      if limits[name] is not None
    }

  def _own_sums(
    self, parts: list[tf.Tensor], table_sums: Sequence[Gradient]
  ) -> list[Gradient]:
    """Returns the gradients of `_own_variables`, then those of the tables."""
    if self.guard.may_skip:
      # Each member sees only its own parts, but all members of a group must
      # skip the same steps. Adding 0 changes no part. Adding NaN turns every
      # element into NaN.
      is_finite = clipping.all_finite([*parts, *table_sums])
      [bad] = self.engine.all_reduce_sum([tf.cast(~is_finite, tf.float32)])
      marker = tf.where(bad > 0, float("nan"), 0.0)
      parts = [part + tf.cast(marker, part.dtype) for part in parts]
    return [*self._own_gradients(parts), *table_sums]

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Variable],
    through_apply: bool,
  ) -> None:
    updated = [*self._own_variables(), *self.unsharded_tables]
    # `cut` has applied these limits. Switch them off.
    with overriding.overriding(
      self.wrapped.base_optimizer, **dict.fromkeys(self._limits_applied_here)
    ):
      super().apply(sums, updated, through_apply)

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

  def gather_weights(self, sums: Sequence[Gradient]) -> None:
    del sums
    self._gather()

  def _gather(self) -> None:
    """Sets W = gather(W[i]) on all members."""
    for bucket in self.buckets:
      with self.engine.isolate():
        if bucket.shard is None:
          part = self.engine.cut_part(bucket.natives, bucket.layout)
        else:
          part = tf.identity(variables_lib.native(bucket.shard))
      values = self.engine.gather_parts(part, bucket.layout, bucket.natives)
      with self.engine.isolate():
        for weight, value in zip(bucket.natives, values, strict=True):
          weight.assign(value)

  def _run_on_all_replicas(self, step: Callable[[], None]) -> None:
    """Runs a function once on all replicas, in a `tf.function`.

    TensorFlow warns of `strategy.run` in eager mode.
    """
    # Not a lambda, for which TensorFlow would warn about retracing.
    run = functools.partial(self.engine.strategy.run, step)
    tf.function(run, autograph=False)()

  def _sort_gradients(
    self, grads: Sequence[Gradient], variables: Sequence[Variable]
  ) -> tuple[list[Gradient], list[list[tf.Tensor]]]:
    """Returns the tables' gradients, and each bucket's flat, dense gradients.

    Raises `ValueError` if a variable has no gradient, or two gradients.
    """
    by_variable = {
      id(variables_lib.native(variable)): grad
      for grad, variable in zip(grads, variables, strict=True)
    }
    if len(by_variable) < len(grads):
      raise ValueError(
        "With `shard_update`, `grads_and_vars` must contain each variable once;"
        f" got {len(grads)} gradients of {len(by_variable)} variables. Add up"
        " the gradients of each variable."
      )

    def find(variable: Variable) -> Gradient:
      native = variables_lib.native(variable)
      grad = by_variable.get(id(native))
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


def choose_kind(optimizer: Optimizer, shard_update: Any) -> str:
  """Returns `"elementwise"` or `"by_variable"`; for True, as the class needs.

  Raises `ValueError` if the optimizer cannot be sharded in this way.
  """
  class_name = type(optimizer).__name__
  keras_classes.check_vouched_for(optimizer, "shard_update", shard_update)
  keras_class = keras_classes.keras_class(optimizer)
  is_elementwise = keras_class in keras_classes.ELEMENTWISE
  kind = shard_update
  if shard_update is True:
    if not is_elementwise and keras_class not in keras_classes.BY_VARIABLE:
      raise ValueError(
        "`shard_update` is True, but tf_cross_shard does not know how"
        f' {class_name} updates weights. Pass shard_update="by_variable" if the'
        " update of each variable depends only on that variable, or"
        ' "elementwise" if the update of each element depends only on that'
        " element."
      )
    kind = "elementwise" if is_elementwise else "by_variable"
  remedy = "Use `accumulate_steps` of the CrossShardOptimizer."
  remedies = {"gradient_accumulation_steps": remedy}
  # A user's class may do anything before it clips. This package can clip
  # in place of Keras' own classes only.
  if not is_elementwise and kind == "elementwise":
    for limit in ("clipnorm", "global_clipnorm"):
      remedies[limit] = "Clip in your class, or before `apply_gradients`."
  for argument, remedy in remedies.items():
    if getattr(optimizer, argument, None):
      raise ValueError(
        f"`shard_update` is {shard_update!r}, but `opt` uses {argument}="
        f"{getattr(optimizer, argument)}, which needs whole variables. {remedy}"
      )
  return str(kind)
