"""One step of a CrossShardOptimizer, in each replica.

    loss ─ scale ─▶ gradients ─ clip ─▶ window ─▶ reduce ─▶ guard ─▶ apply
                    this replica's      1 or k    over the  NaN?     once
                    own gradients       calls     group

The first two stages come before the step: `StepPipeline.scale` multiplies the
loss, and `StepPipeline.differentiate` or the user's own tape computes the
gradients. `StepPipeline.perform` then follows this drawing from left to right.
(With `scale_gradients`, `perform` multiplies the gradients, not the loss.)

The stages are objects from this folder and from `update`. A window is one call
or k calls long. The update decides which part of the weights and of the
optimizer state each replica stores and updates. The wire decides in which dtype
replicas send gradients. Each stage receives the next stage as a function:
`window.add(..., _finish)`, `replicated.apply(..., _apply_once)`, and
`guard.apply_if_finite(sums, apply)`. Stages do not write into each other. Only
`StepPipeline._show_state` writes into the state of the user's optimizer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import (
  accumulation,
  group_settings,
  loss_convention,
  nonfinite,
)
from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import warnings as warnings_lib
from tf_cross_shard._src.core.gradients import (
  clipping,
  differentiate,
  row_sparse,
)
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.reduce import wire as wire_lib
from tf_cross_shard._src.core.update import (
  by_variable,
  elementwise,
  replicated,
  sharded,
)
from tf_cross_shard._src.core.update import rows as rows_lib


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of `apply_gradients` with valid arguments.

  Attributes:
    grads: This replica's gradients, or their sums over the group.
    variables: The variables of the gradients.
    global_step: The user's step counter, a variable; or None.
    name: The name scope of the operations; None for the optimizer's name.
    through_apply: Whether the call was Keras 3's `apply`, which does not run
      what the user's class overrides in `apply_gradients`.
    is_reduced: Whether `grads` are already the group's sums.
  """

  grads: Sequence[Gradient]
  variables: Sequence[Any]
  global_step: Any = None
  name: str | None = None
  through_apply: bool = False
  is_reduced: bool = False


_SHARDED: Final = {
  "elementwise": elementwise.ElementwiseUpdate,
  "by_variable": by_variable.ByVariableUpdate,
}


class StepPipeline:
  """The stages between a loss and the weights, with the state of the stages.

  Attributes:
    context: The arguments, the wrapped optimizer and the engine.
    convention: Chooses the factor by which the loss is multiplied.
    tables: The embedding tables that are updated by rows.
    update: Reduces gradients and updates the weights.
    window: Accumulates the gradients of several calls.
    guard: Skips steps with a NaN or an infinity, and counts them.
    by_group: Settings that differ between groups.
    watch: Warns when something else overwrites the groups' weights.
    attached: Variables of callbacks, which `replica_state` saves, too.
  """

  def __init__(self, context: context_lib.Context) -> None:
    """Creates the stages for the settings."""
    self.context = context
    settings, engine = context.settings, context.engine
    self.convention = loss_convention.LossConvention(settings, engine.groups)
    self.by_group = group_settings.GroupSettings(context)
    self.tables = rows_lib.make(context)
    self.update = _make_update(context, self.tables)
    self.window = accumulation.make(context, self.by_group)
    self.guard = nonfinite.NonfiniteGuard(context)
    self.warnings = warnings_lib.GroupWarnings(settings.name, engine)
    self.attached: tuple[Any, ...] = ()
    self._show_state(None)

  @property
  def settings(self) -> settings_lib.Settings:
    """The current arguments of the optimizer."""
    return self.context.settings

  def replace(self, **changes: Any) -> None:
    """Replaces settings in all stages that keep a context.

    Only the clipping limits and `group_settings` can be replaced. Only steps
    that are traced afterwards read the new values: a `tf.function` that was
    traced before keeps the old values.

    Raises:
      ValueError: If a value is not valid. No setting is changed in this case.
    """
    settings = dataclasses.replace(self.settings, **changes)
    context = dataclasses.replace(self.context, settings=settings)
    group_settings.check(context)
    self.context = context
    for stage in self._stages():
      stage.context = context

  def _stages(self) -> tuple[context_lib.Stage, ...]:
    """Returns the stages that keep a context."""
    return self.by_group, self.tables, self.update, self.window, self.guard

  def differentiate(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: differentiate.GraphOptions,
  ) -> differentiate.Pairs:
    """Returns this replica's gradients of the scaled loss."""
    return differentiate.differentiate(
      self.context.inner,
      loss,
      var_list,
      tape,
      scale=lambda seed: self.scale(seed, default),
      options=options,
      requires_scalar=self.settings.is_mean,
    )

  @tf.autograph.experimental.do_not_convert
  def scale(self, loss: Any, default: str) -> Any:
    """Returns a loss times the loss factor."""
    factor = self.convention.for_loss(default)
    return loss if factor == 1 else loss * factor

  def perform(self, call: Call) -> tf.Tensor:
    """Takes one step, or adds one call to an accumulation window.

    Returns:
      The iteration count afterwards, an int64 scalar.
    """
    with tf.name_scope(call.name or self.settings.name):
      overwrites = self._overwrites(call)
      with self.warnings.step(call.variables):
        own = (
          call.grads
          if call.is_reduced
          else self._scale_and_clip(call, overwrites)
        )
        self.window.of_call(any(overwrites)).add(
          own,
          call.variables,
          lambda totals: self._finish(call, overwrites, totals),
        )
      with self.context.engine.isolate():
        return tf.identity(self.context.inner.iterations())

  def sum(self, call: Call) -> list[Gradient]:
    """Returns the group's sums of this replica's gradients, clipped."""
    overwrites = self._overwrites(call)
    return self.update.all_reduce(
      self._scale_and_clip(call, overwrites), call.variables, overwrites
    )

  def apply_for_loss_scaler(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Applies sums after an outer LossScaleOptimizer found them finite.

    That optimizer calls this method inside `_apply_once`.
    """
    self.context.inner.apply_reduced(
      grads, variables, through_apply=True, row_step=self.tables.row_step
    )

  def _overwrites(self, call: Call) -> list[bool]:
    """Returns for each variable whether Keras replaces it with its "gradient".

    The user's layers set `overwrite_with_gradient` of such variables, which are
    float8 scales. Their "gradients" are new values. They are averaged over the
    group, and are not scaled, clipped, rounded or summed.
    """
    return list(map(self.context.inner.is_overwritten, call.variables))

  def _scale_and_clip(
    self, call: Call, overwrites: Sequence[bool]
  ) -> list[Gradient]:
    """Returns this replica's own gradients, scaled and clipped.

    With f the loss factor (1 unless `scale_gradients`) and g a gradient:
    clip(f * g).
    """
    grads = wire_lib.make_reducible(
      call.grads, call.variables, self.context.engine
    )
    factor = self.convention.for_gradients()
    scale_limit = self.context.inner.scaling.scale_limit
    clipped = clipping.clip(
      [
        None if overwritten else row_sparse.times(grad, factor)
        for grad, overwritten in zip(grads, overwrites, strict=True)
      ],
      # Gradients may be multiplied by a loss scale: also multiply the limits.
      # As in Keras, a limit of 0 does not clip.
      **{
        name: scale_limit(limit) if limit else None
        for name, limit in self.by_group.limits().items()
      },
      keep_infinite=self.context.may_skip,
    )
    return [
      grad if overwritten else own
      for grad, own, overwritten in zip(grads, clipped, overwrites, strict=True)
    ]

  def _finish(
    self, call: Call, overwrites: Sequence[bool], totals: Sequence[Gradient]
  ) -> None:
    """Ends a window: sums `totals` over the group, and applies the sums."""
    if call.is_reduced:
      sums = self.update.cut_sums(totals, call.variables)
    else:
      sums = self.update.reduce(totals, call.variables, overwrites)
    self.update.apply(
      sums,
      call.variables,
      lambda sums, variables: self._apply_once(call, sums, variables),
    )

  def _apply_once(
    self, call: Call, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Applies the sums with the user's optimizer, unless the step is skipped.

    `variables` are what the update lets the optimizer update: see
    `Update.apply`.
    """
    engine = self.context.engine

    def apply() -> None:
      self.context.inner.apply_reduced(
        sums, variables, call.through_apply, self.tables.row_step
      )
      step = call.global_step
      if step is not None and engine.updates_here(step):
        step.assign_add(tf.cast(self.guard.is_step(sums), step.dtype))

    # Isolate the replica: the optimizer would otherwise reduce the sums again.
    with (
      engine.all_or_nothing(sums),
      engine.isolate(),
      self.by_group.in_force(),
    ):
      self.guard.apply_if_finite(sums, apply)

  def build(self, variables: Sequence[Any]) -> None:
    """Creates the variables of all stages, unless they exist."""
    if not self.context.inner.is_built:
      self.tables.prepare_divided(variables)
      self.warnings.before_build(variables)
    self._show_state(self.update.build(variables))
    # tf_keras' LossScaleOptimizer around this optimizer also calls `build` with
    # the variables that are updated, which may be shards. The window needs the
    # weights.
    knows = self.context.inner.state.knows
    self.window.build([v for v in variables if knows(v)])

  def _show_state(self, whole: Any) -> None:
    """Shows savers the state with whole slots, if the update keeps parts."""
    state = self.context.inner.state
    state.checkpointed = self.update.checkpointed
    if whole is not None:
      state.whole = whole
      state.checkpointed.add(whole.checkpoint_view)

  @property
  def calls(self) -> int:
    """How many calls of `apply_gradients` make one step."""
    own = self.context.inner.accumulates
    return int(self.settings.accumulate_steps or own or 1)

  @property
  def state(self) -> list[Any]:
    """The stages' own variables, which `replica_state` saves."""
    counts = [] if self.guard.count is None else [self.guard.count]
    return [*counts, *self.window.variables, *self.attached]

  @property
  def window_state(self) -> list[Any]:
    """State of an unfinished accumulation window.

    The members of a group have different values. The state is reset when the
    group's members change.
    """
    return list(self.window.variables)


def _make_update(
  context: context_lib.Context, tables: rows_lib.Tables
) -> replicated.Update:
  """Creates the kind of update for the settings."""
  settings, engine = context.settings, context.engine
  # float16 rounds small gradients to 0. So gradients that were divided by the
  # loss scale are multiplied by it while they are sent.
  is_float16 = settings.wire_dtype == tf.float16
  scale = context.inner.scaling.wire_scale if is_float16 else None
  wire = wire_lib.Wire(engine, settings.wire_dtype, scale)
  if settings.shard_update:
    kind = sharded.choose_kind(context.inner.innermost, settings.shard_update)
    # A program may load the optimizer on one device, whatever the groups are.
    if min(engine.groups.group_size, engine.num_replicas) > 1:
      return _SHARDED[kind](context, wire, tables)
  return replicated.ReplicatedUpdate(context, wire, tables)
