"""One step of a CrossShardOptimizer, in each replica.

    gradients ─▶ clip ─▶ window ─▶ reduce ─▶ guard ─▶ apply ─▶ gather
                 this    k calls   over the  NaN?     once     the parts of
                 replica or one    group                       the weights
                 alone

`GradientPipeline.take` and `_apply_or_skip` follow this drawing to the right.
Before a step, `scale` multiplies the loss (or `take` multiplies the gradients,
with `scale_gradients`), and `differentiate` or the user's own tape computes the
gradients.

`update` decides which part of the weights and of the optimizer's state each
replica keeps, `engine` how replicas exchange tensors, and `wrapped` is the
user's optimizer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import (
  accumulation,
  loss_convention,
)
from tf_cross_shard._src.core import checks as checks_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import warnings as warnings_lib
from tf_cross_shard._src.core.gradients import (
  clipping,
  differentiate,
  row_sparse,
)
from tf_cross_shard._src.core.per_model import settings as per_model_lib
from tf_cross_shard._src.core.per_model import variable as per_model_numbers
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.reduce import gradient_reducer
from tf_cross_shard._src.core.update import nonfinite, replicated, sharded
from tf_cross_shard._src.core.update import rows as rows_lib
from tf_cross_shard._src.core.variables import Gradient, Variable
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of `apply_gradients` with valid arguments.

  `through_apply`: the call was Keras 3's `apply`, which does not run what the
  user's class overrides in `apply_gradients`. `is_reduced`: `grads` are sums.
  """

  grads: Sequence[Gradient]
  variables: Sequence[Variable]
  global_step: Any = None
  name: str | None = None
  through_apply: bool = False
  is_reduced: bool = False


class GradientPipeline:
  """What lies between a loss and the weights.

  `tables` are updated by rows; `attached` are variables of callbacks, which
  `Models` saves, too.
  """

  def __init__(
    self,
    settings: settings_lib.Settings,
    wrapped: wrapped_lib.WrappedOptimizer,
    engine: engine_lib.Engine,
  ) -> None:
    self.settings = settings
    self.wrapped = wrapped
    self.engine = engine
    self.checks = checks_lib.Checks(settings, wrapped, engine)
    self.convention = loss_convention.LossConvention(
      settings,
      int(engine.strategy.num_replicas_in_sync),
      engine.groups.group_size,
    )
    self.per_model = per_model_lib.PerModelSettings(
      settings.per_model, wrapped.base_optimizer, engine
    )
    self.tables = rows_lib.Tables(wrapped, engine, settings.lazy_rows)
    self.guard = nonfinite.NonfiniteGuard(
      settings.skip_nonfinite, wrapped, engine
    )
    self.update = _make_update(
      settings, wrapped, engine, self.tables, self.guard
    )
    self.window = accumulation.make(settings.accumulate_steps, wrapped, engine)
    self.warnings = warnings_lib.GroupWarnings(settings.name, wrapped, engine)
    self.attached: tuple[Any, ...] = ()

  def take(self, call: Call) -> tf.Tensor:
    """Takes a step, or adds a call to a window; returns the iteration count."""
    with tf.name_scope(call.name or self.settings.name), self.in_my_group():
      grads = call.grads if call.is_reduced else self._scale_and_clip(call)
      if self.window is None:
        self._apply_or_skip(call, grads)
      else:
        window, variables = self.window, call.variables
        dense = window.to_dense(grads, variables)
        # All replicas have had the same number of calls, so all run the same
        # branch.
        tf.cond(
          window.is_last_call(),
          lambda: self._apply_or_skip(call, window.take(dense, variables)),
          lambda: window.add(dense, variables),
        )
      with self.engine.isolate():
        return tf.identity(self.wrapped.iterations())

  def _apply_or_skip(self, call: Call, grads: Sequence[Gradient]) -> None:
    """Reduces gradients over the group, and applies the sums once."""
    if call.is_reduced:
      sums = self.update.cut(grads, call.variables)
    else:
      sums = self.update.reduce(grads, call.variables)
    # Isolated: the user's optimizer would otherwise reduce the sums again.
    with (
      self.engine.after_all_sums(sums),
      self.engine.isolate(),
      self.per_model.in_force(),
    ):
      self.update.read_weights()
      is_finite = self.guard.count(sums)
      if is_finite is None:
        self.update.apply(sums, call.variables, call.through_apply)
      else:
        tf.cond(
          is_finite,
          lambda: self.update.apply(sums, call.variables, call.through_apply),
          lambda: None,
        )
      counter = call.global_step
      if counter is not None and self.engine.should_update(counter):
        is_step = clipping.all_finite(sums) if self.guard.may_skip else True
        counter.assign_add(tf.cast(is_step, counter.dtype))
    self.update.gather_weights(sums)

  def _scale_and_clip(self, call: Call) -> list[Gradient]:
    """Returns this replica's own gradients, scaled and clipped.

    With f the loss factor (1 unless `scale_gradients`) and g a gradient:
    clip(f * g).
    """
    grads = call.grads
    self.tables.warn(grads)
    if not self.tables.keeps_rows:
      grads = list(map(row_sparse.to_dense, grads, call.variables))
    factor = self.convention.for_gradients()
    if factor != 1:
      grads = [row_sparse.times(grad, factor) for grad in grads]
    limits = self.per_model.limits(self.settings.limits)
    clipped = list(grads)
    # The first limit that is set has the last word.
    for name in reversed(clipping.LIMITS):
      limit = limits[name]
      if not limit:  # As in Keras, 0 does not clip.
        continue
      # Gradients may be multiplied by a loss scale: also multiply the limit.
      scaled: Any = {name: self.wrapped.scale_limit(limit)}
      clipped = clipping.select(
        per_model_lib.is_nonzero(limit),
        clipping.clip(grads, **scaled, keep_infinite=self.guard.may_skip),
        clipped,
      )
    return clipped

  def in_my_group(self) -> Any:
    """Returns a context that knows the calling replica's group."""
    return per_model_numbers.as_group(
      per_model_numbers.group_here(self.engine.groups)
    )

  def sum(self, call: Call) -> list[Gradient]:
    """Returns the group's sums of this replica's gradients, clipped."""
    with self.in_my_group():
      return self.update.reducer.reduce(self._scale_and_clip(call))

  def differentiate(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: differentiate.GraphOptions,
  ) -> differentiate.Pairs:
    """Returns this replica's gradients of the scaled loss."""
    self.checks.check_place()
    return differentiate.differentiate(
      self.wrapped,
      loss,
      var_list,
      tape,
      scale=lambda seed: self.scale(seed, default),
      options=options,
      requires_scalar=self.settings.is_mean,
    )

  @tf.autograph.experimental.do_not_convert
  def scale(self, loss: Any, default: str) -> Any:
    factor = self.convention.for_loss(default)
    return loss if factor == 1 else loss * factor

  def replace(self, **changes: Any) -> None:
    """Replaces clipping limits and `per_model`, if all are valid.

    The next step reads new numbers of `per_model`; only steps that are traced
    afterwards read limits, and settings that were added or removed.
    """
    settings = dataclasses.replace(self.settings, **changes)
    if "per_model" in changes:
      self.per_model.replace(settings.per_model)
    self.settings = settings

  def current_settings(self) -> settings_lib.Settings:
    """Returns the settings, with the present numbers of `per_model`."""
    if not self.per_model.numbers:
      return self.settings
    present = self.per_model.read()
    return dataclasses.replace(self.settings, per_model=present)

  def build(self, variables: Sequence[Variable]) -> None:
    """Creates the slots, and the sums of a window, unless they exist."""
    if not self.wrapped.is_built:
      self.warnings.before_build(variables)
    self.update.build(variables)
    if self.window is not None:
      # tf_keras' LossScaleOptimizer around this optimizer also calls `build`
      # with the variables that are updated, which may be shards. The window
      # needs the weights.
      self.window.build([v for v in variables if self.wrapped.knows(v)])

  @property
  def calls_per_step(self) -> int:
    """How many calls of `apply_gradients` make one step."""
    return int(self.settings.accumulate_steps or self.wrapped.accumulates or 1)

  @property
  def state(self) -> list[Variable]:
    """The step's own variables, which `Models` saves."""
    skipped_steps = self.guard.skipped_steps
    return [
      *([] if skipped_steps is None else [skipped_steps]),
      *self.per_model.variables,
      *self.window_state,
      *self.attached,
    ]

  @property
  def window_state(self) -> list[Variable]:
    """State of an unfinished accumulation window.

    The members of a group have different values. The state is reset when the
    group's members change.
    """
    return [] if self.window is None else list(self.window.variables)


def _make_update(
  settings: settings_lib.Settings,
  wrapped: wrapped_lib.WrappedOptimizer,
  engine: engine_lib.Engine,
  tables: rows_lib.Tables,
  guard: nonfinite.NonfiniteGuard,
) -> replicated.Update:
  """Creates the kind of update for the settings."""
  # float16 rounds small gradients to 0. So gradients that were divided by the
  # loss scale are multiplied by it while they are sent.
  is_float16 = settings.wire_dtype == tf.float16
  scale = wrapped.wire_scale if is_float16 else None
  reducer = gradient_reducer.GradientReducer(engine, settings.wire_dtype, scale)
  if settings.shard_update:
    sharded.check(wrapped.base_optimizer, settings.shard_update)
    # A program may load the optimizer on one device, whatever the groups are.
    if min(engine.groups.group_size, engine.num_replicas) > 1:
      return sharded.ShardedUpdate(wrapped, reducer, tables, guard)
  return replicated.Update(wrapped, reducer, tables)
