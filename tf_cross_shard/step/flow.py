"""One step of a CrossShardOptimizer, in each replica.

    loss ─ scale ─▶ gradients ─ scale, clip ─▶ window ─▶ reduce ─▶ apply once
                      this replica's own       k calls   of the group

Each stage is a file of this folder, and knows no other. Three come in kinds: a
window is one call or k calls long, the wire says what gradients are while they
travel, and the update what a member of a group keeps and applies. A new kind of
update is one more file, and one more line in `_kind_of_update`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import settings as settings_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import clipping, differentiation, indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base
from tf_cross_shard.replica_state import overwritten
from tf_cross_shard.step import (
  accumulation,
  flat_update,
  group_settings,
  int8_wire,
  loss_convention,
  noise_scale,
  nonfinite,
  owner_update,
  reduction,
  replica_checks,
  row_update,
  sharded_update,
  update,
)


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of `apply_gradients`, checked.

  Attributes:
    grads: This replica's gradients, or what they are reduced to.
    variables: Their variables.
    global_step: The user's count of steps, or None.
    name: The name scope of the operations; None for the optimizer's name.
    through_apply: Whether it was Keras 3's `apply`, which does not run what the
      user's class overrides in `apply_gradients`.
    is_reduced: Whether the gradients are the group's sums already.
  """

  grads: Sequence[Gradient]
  variables: Sequence[Any]
  global_step: Any = None
  name: str | None = None
  through_apply: bool = False
  is_reduced: bool = False


_SHARDED: Final = {
  "elementwise": flat_update.FlatUpdate,
  "by_variable": owner_update.OwnerUpdate,
}


def _kind_of_update(
  settings: settings_lib.Settings,
  inner: base.InnerOptimizer,
  engine: engines.Engine,
) -> type[update.Update]:
  """Chooses, once for all steps, what members keep and apply."""
  if settings.shard_update:
    way = sharded_update.check(inner.optimizer, settings.shard_update)
    # One device that loads a file has no members, whatever the groups are.
    if min(engine.groups.group_size, engine.num_replicas) > 1:
      return _SHARDED[way]
  return update.ReplicatedUpdate


def _wire(
  settings: settings_lib.Settings,
  inner: base.InnerOptimizer,
  engine: engines.Engine,
) -> reduction.Wire:
  """Chooses what gradients are while they travel."""
  dtype = settings.wire_dtype
  if dtype == tf.int8:
    return int8_wire.Int8Wire(engine, inner)
  # What float16 would round to 0 is multiplied by the loss scale meanwhile.
  scale = inner.wire_scale if dtype == tf.float16 else None
  return reduction.Wire(engine, dtype, scale)


class Step:
  """The stages between a loss and the variables, with the state they keep.

  Attributes:
    settings: The optimizer's arguments; see `replace`.
    convention: What the loss was averaged over.
    tables: The variables that are updated by rows.
    wire: The way of gradients between members.
    update: What members of a group keep and apply.
    guard: Leaves out steps that are not finite, and counts them.
    noise: Measures the gradient noise scale.
    by_group: Settings that differ between groups.
    watch: Notices that something else changed the groups' weights.
    attached: Variables of others that `replica_state` saves with this state.
  """

  def __init__(
    self,
    settings: settings_lib.Settings,
    inner: base.InnerOptimizer,
    checks: replica_checks.ReplicaChecks,
  ) -> None:
    """Makes the stages that the settings ask for."""
    engine = checks.engine
    self.settings = settings
    self._inner = inner
    self._engine = engine
    self.convention = loss_convention.LossConvention(settings, engine.groups)
    self.noise = noise_scale.NoiseScale(settings, inner, engine)
    self.tables = row_update.make(settings, inner, engine)
    kind = _kind_of_update(settings, inner, engine)
    self.wire = _wire(settings, inner, engine)
    self.update = kind(
      settings, inner, engine, self.wire, self.noise, self.tables
    )
    self._window = accumulation.own_window(settings, inner, engine, self.tables)
    self.guard = nonfinite.NonfiniteGuard(
      settings.skip_nonfinite, inner, engine
    )
    self.by_group = group_settings.GroupSettings(settings, inner, engine)
    self.watch = overwritten.OverwriteWatch(settings.name, engine)
    self.attached: tuple[Any, ...] = ()

  def replace(self, **changes: Any) -> None:
    """Replaces settings that are looked at in every step, not what they made.

    Raises:
      ValueError: If there is no valid value; nothing is changed then.
    """
    settings = dataclasses.replace(self.settings, **changes)
    self.by_group = group_settings.GroupSettings(
      settings, self._inner, self._engine
    )
    self.settings = settings

  def differentiate(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: differentiation.GraphOptions,
  ) -> differentiation.Pairs:
    """Returns this replica's gradients of the scaled loss."""
    return differentiation.differentiate(
      self._inner,
      loss,
      var_list,
      tape,
      scale=lambda seed: self.scale(seed, default),
      options=options,
      scalar=self.settings.is_mean,
    )

  @tf.autograph.experimental.do_not_convert
  def scale(self, loss: Any, default: str) -> Any:
    """Returns a loss times the factor of the mean."""
    factor = self.convention.for_loss(default)
    return loss if factor == 1 else loss * factor

  def perform(self, call: Call) -> tf.Tensor:
    """Clips, sums, applies and counts; returns the iteration count."""
    with tf.name_scope(call.name or self.settings.name):
      with self.watch.step(call.variables):
        own = call.grads if call.is_reduced else self.clip(call)
        self.window(call).add(
          own,
          call.variables,
          lambda totals, calls: self.finish(call, totals, calls),
        )
      with self._engine.isolate():
        return tf.identity(self._inner.iterations())

  def clip(self, call: Call) -> list[Gradient]:
    """Returns this replica's own gradients as they are to be summed."""
    grads = reduction.make_reducible(call.grads, call.variables, self._engine)
    # A value that takes a gradient's place is neither scaled nor clipped.
    is_value = list(map(self._inner.is_overwritten, call.variables))
    factor = self.convention.for_gradients()
    clipped = clipping.clip(
      [
        None if value else indexed_slices.times(grad, factor)
        for grad, value in zip(grads, is_value, strict=True)
      ],
      # In Keras a limit of 0 does not clip.
      **{
        name: self._inner.scale_limit(limit) if limit else None
        for name, limit in self.by_group.limits(self.settings).items()
      },
      keep_infinite=self.guard.may_skip,
    )
    return [
      grad if value else own
      for grad, own, value in zip(grads, clipped, is_value, strict=True)
    ]

  def window(self, call: Call) -> accumulation.EveryCall:
    """Returns the calls that make one step."""
    return accumulation.in_force(
      self._window, self._inner, self._engine, self.by_group, call.variables
    )

  def finish(
    self, call: Call, totals: Sequence[Gradient], calls: noise_scale.Calls
  ) -> None:
    """Ends a window: sums over the group, and applies the sums once."""
    if call.is_reduced:
      sums = self.update.own_part(totals, call.variables)
    else:
      sums = self.update.reduce(totals, call.variables, calls)
    self.update.apply(
      sums,
      call.variables,
      lambda sums, variables: self.apply_once(call, sums, variables),
    )

  def apply_once(
    self, call: Call, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> None:
    """Lets the encapsulated optimizer apply sums that all members have."""

    def apply() -> None:
      self._inner.apply_reduced(sums, variables, call.through_apply)
      step = call.global_step
      if step is not None and self._engine.updates_here(step):
        step.assign_add(tf.cast(self.guard.is_step(sums), step.dtype))

    # Half a step is nothing that somebody with a backup goes on from.
    waits_for = () if self.settings.has_backup else sums
    with (
      self._engine.all_or_nothing(waits_for),
      self._engine.isolate(),
      self.by_group.in_force(),
    ):
      self.guard.apply_if_finite(sums, apply)

  def sum(self, call: Call) -> list[Gradient]:
    """Returns the group's sums of this replica's gradients, clipped."""
    calls = noise_scale.Calls(share=1.0 / (self.settings.accumulate_steps or 1))
    return self.update.all_reduce(self.clip(call), call.variables, calls)

  def window_length(self) -> Any:
    """Returns how many calls make one step: a variable, saved from now on.

    All replicas of all groups are to have the same: collectives depend on it.
    """
    return self._window.vary()

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the variables of the stages."""
    self.update.build(variables)
    self.wire.build([v for v in variables if not self.tables.is_table(v)])
    self._window.build(variables)

  @property
  def state(self) -> list[Any]:
    """The stages' own variables, which `replica_state` saves."""
    counts = [] if self.guard.count is None else [self.guard.count]
    return [*counts, *self.member_state, *self.attached]

  @property
  def window_state(self) -> list[Any]:
    """Those that wait for a later step; zeros where members are others."""
    return [*self._window.open_state, *self.wire.variables]

  @property
  def member_state(self) -> list[Any]:
    """Those of them that members of a group may have each for themselves."""
    # Norms: the order of their sums depends on the number of a machine's cores.
    return [
      *self._window.variables,
      *self.wire.variables,
      *self.noise.variables,
    ]
