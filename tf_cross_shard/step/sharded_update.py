"""Sharded updates: each member of a group updates one part of the weights.

    g[i] = reduce(grads)[i]         the group's sum, member i's part of it
    W[i] = opt.update(W[i], g[i])   each member its own part
    W    = gather(W[i])             all members all of the weights

`flat_update` cuts elements into equal parts, `owner_update` gives each variable
whole to one member. Tables that are updated by rows are in no part: all members
update the rows that occur.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients import clipping, indexed_slices, packing
from tf_cross_shard.gradients import layout as layouts
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, fused_update
from tf_cross_shard.step import (
  noise_scale,
  nonfinite,
  row_update,
  sharded_state,
  update,
)


@dataclasses.dataclass(frozen=True)
class Weights:
  """Weights of one dtype that travel together.

  Attributes:
    variables: The user's, in their order.
    natives: The same as `tf.Variable`s.
    layout: Which elements each member has.
    shard: The variable that the encapsulated optimizer is built on, [part];
      None if it is built on the weights themselves.
  """

  variables: list[Any]
  natives: list[Any]
  layout: layouts.Layout
  shard: Any = None


class ShardedUpdate(update.Update):
  """Each member updates one part of the weights."""

  # The limits of the encapsulated optimizer that are not left to it.
  _clipped: tuple[str, ...] = ("global_clipnorm",)

  def _prepare(self) -> None:
    """Makes room for the layout, and takes the optimizer's place in files."""
    self._weights: list[Weights] = []
    self._whole: list[Any] = []  # Tables, which are in no part.
    self._variables: list[Any] = []  # All, in the user's order.
    children = sharded_state.Children({}, self._inner.optimizer)
    self._inner.checkpointed = children

  def build(self, variables: Sequence[Any]) -> None:
    """Lays out the weights, and builds the encapsulated optimizer."""
    if self._variables:
      return
    if any(map(self._inner.is_overwritten, variables)):
      raise NotImplementedError(
        "Variables with `overwrite_with_gradient` (Keras' float8 scales) cannot"
        " be sharded. Leave `shard_update` out."
      )
    kinds: dict[Hashable, list[Any]] = {}
    for variable in variables:
      if self._tables.is_table(variable):
        self._whole.append(variable)
      else:
        kinds.setdefault(self._kind(variable), []).append(variable)
    self._variables = list(variables)
    self._weights = [
      self._lay_out(row, number)
      for of_kind in kinds.values()
      for number, row in enumerate(self._rows(of_kind))
    ]
    with self._engine.making_variables():
      self._inner.whole_state = self._build()
    self._inner.checkpointed.add(self._inner.whole_state.children)

  @abc.abstractmethod
  def _kind(self, variable: Any) -> Hashable:
    """Returns what variables must have in common to travel together."""

  def _rows(self, variables: list[Any]) -> list[list[Any]]:
    """Returns the variables that travel together, of those that may."""
    return [variables]

  @abc.abstractmethod
  def _lay_out(self, variables: list[Any], number: int) -> Weights:
    """Decides which elements of the number-th row each member has."""

  @abc.abstractmethod
  def _build(self) -> sharded_state.PlainState:
    """Builds the encapsulated optimizer; returns its state as savers see it."""

  @abc.abstractmethod
  def _updated(self) -> list[Any]:
    """Returns the variables, but tables, that this member's step updates."""

  @abc.abstractmethod
  def _sums_of(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns this member's gradients of `_updated`, from its parts."""

  @abc.abstractmethod
  def _part_of(self, weights: Weights) -> tf.Tensor:
    """Returns this member's part of weights that it updated; isolated."""

  def reduce(
    self,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    calls: noise_scale.Calls,
  ) -> list[Gradient]:
    """Returns the group's sums of this member's parts, clipped for `opt`."""
    tables, pieces = self._split(grads, variables)
    flat = [piece for of_weights in pieces for piece in of_weights]
    own = self._noise.of_replica([*flat, *tables], calls)
    sums, _ = self._wire.sum(tables, self._whole)
    parts: list[tf.Tensor] = []
    left: list[Any] = []
    # The last layers' gradients exist first.
    for weights, row in zip(self._weights[::-1], pieces[::-1], strict=True):
      part, of_part = self._wire.sum_part(
        row, weights.variables, weights.layout
      )
      parts.insert(0, part)
      left += of_part
    self._noise.after_scatter(own, self._counted(parts), sums, calls)
    parts = self._agree_on_finite(parts, sums)
    self._wire.keep(left, [*parts, *sums])
    return self._clip(parts, sums)

  def own_part(
    self, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[Gradient]:
    """Returns this member's parts of sums that all members have, clipped."""
    tables, pieces = self._split(sums, variables)
    parts = [
      self._engine.own_part(of_weights, weights.layout)
      for weights, of_weights in zip(self._weights, pieces, strict=True)
    ]
    return self._clip(self._agree_on_finite(parts, tables), tables)

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: row_update.ApplyOnce,
  ) -> None:
    """Updates this member's parts of the weights, and gathers all parts."""
    updated = [*self._updated(), *self._whole]
    last = base.innermost(self._inner.optimizer)
    with update.without_clipping(last, *self._clipped):
      self._tables.apply(sums, updated, apply_once)
    self._gather(nonfinite.all_finite(sums) if self._may_skip else True)

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Gives all replicas the moving averages for weights, where there are."""
    del variables
    if not (self._variables and self._inner.finalizes):
      return

    def finalize() -> None:
      self._updated()
      with self._engine.isolate():
        self._inner.write_averages(self._inner.trainable_variables)
      self._gather(False)

    self._run(finalize)

  @property
  def _may_skip(self) -> bool:
    """Whether a step may be left out because of a NaN or an infinity."""
    return self._settings.skip_nonfinite or self._inner.scales_dynamically

  def _gather(self, is_step: Any) -> None:
    """Gives each replica the weights that the members' parts make."""
    del is_step
    for weights in self._weights:
      with self._engine.isolate():
        part = tf.identity(self._part_of(weights))
      pieces = self._engine.gather_parts(part, weights.layout, weights.natives)
      with self._engine.isolate():
        for weight, piece in zip(weights.natives, pieces, strict=True):
          weight.assign(piece)

  def _run(self, step: Callable[[], None]) -> None:
    """Runs a step once on all replicas; TensorFlow warns of eager ones."""
    # Not a lambda: TensorFlow would warn of its retracing.
    run = functools.partial(self._engine.strategy.run, step)
    tf.function(run, autograph=False)()

  def _split(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> tuple[list[Gradient], list[list[tf.Tensor]]]:
    """Returns gradients of tables, and flat ones in the order of the weights.

    Raises:
      ValueError: If a variable has no gradient, or two.
    """
    given = {
      id(variables_lib.native(variable)): grad
      for grad, variable in zip(grads, variables, strict=True)
    }
    if len(given) < len(grads):
      raise ValueError(
        "`grads_and_vars` must hold each variable once under `shard_update`;"
        f" got {len(grads)} gradients of {len(given)} variables. Add up those"
        " of one variable."
      )

    def find(variable: Any) -> Gradient:
      native = variables_lib.native(variable)
      grad = given.get(id(native))
      if grad is None:
        raise ValueError(
          "`grads_and_vars` must hold a gradient for every variable that the"
          f" optimizer was built on under `shard_update`; {native.name} has"
          " none. Build it on the variables that are trained."
        )
      return grad

    return list(map(find, self._whole)), [
      # Flat here: TensorFlow would rewrite a gradient and its sum as one.
      packing.flatten(
        [
          indexed_slices.cast(self._tables.to_dense(find(v), v), v)
          for v in weights.variables
        ]
      )
      for weights in self._weights
    ]

  def _counted(self, parts: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns parts without what other members have too."""
    return parts

  def _agree_on_finite(
    self, parts: list[tf.Tensor], tables: Sequence[Gradient]
  ) -> list[tf.Tensor]:
    """Makes all parts NaN on all members if a sum of any is not finite."""
    if not self._may_skip:
      return parts
    is_odd = tf.cast(~nonfinite.all_finite([*parts, *tables]), tf.float32)
    [count] = self._engine.all_reduce_sum([is_odd])
    nan = tf.where(count > 0, float("nan"), 0.0)
    return [part + tf.cast(nan, part.dtype) for part in parts]

  def _clip(
    self, parts: list[tf.Tensor], tables: Sequence[Gradient]
  ) -> list[Gradient]:
    """Returns sums clipped by the global limit of `opt`."""
    sums = [*self._sums_of(parts), *tables]
    limit = base.innermost(self._inner.optimizer).global_clipnorm
    if not (limit and limit > 0):
      return sums
    # All members have the tables' sums.
    share = 1.0 / self._engine.groups.group_size
    squares = [
      tf.cast(clipping.square_of_norm(grads), tf.float64) * weight
      for grads, weight in ((self._counted(parts), 1.0), (tables, share))
    ]
    [total] = self._engine.all_reduce_sum([tf.add_n(squares)])
    limit = tf.cast(self._inner.scale_limit(limit), total.dtype)
    scale = limit / tf.maximum(tf.sqrt(total), limit)
    return [indexed_slices.times(grad, scale) for grad in sums]


def check(optimizer: Any, shard_update: Any) -> str:
  """Returns how an optimizer is updated in parts.

  Returns:
    `"elementwise"` or `"by_variable"`.

  Raises:
    ValueError: If it cannot be.
  """
  last = base.innermost(optimizer)
  kind = type(last).__name__
  fused_update.check_is_one(last, "shard_update", shard_update)
  if not hasattr(last, "build"):
    raise ValueError(
      f"`shard_update` is {shard_update!r}, and {kind} is one of"
      " tf_keras.optimizers.legacy, which cannot be built on parts of weights."
      " Use one of tf_keras.optimizers."
    )
  keras_class = fused_update.keras_class(last)
  is_elementwise = keras_class in fused_update.ELEMENTWISE
  way = shard_update
  if shard_update is True:
    if not is_elementwise and keras_class not in fused_update.BY_VARIABLE:
      raise ValueError(
        f"`shard_update` is True, and nothing is known of {kind}. Use"
        ' "by_variable" if it updates each variable by itself, or "elementwise"'
        " if each element."
      )
    way = "elementwise" if is_elementwise else "by_variable"
  remedies = {
    "gradient_accumulation_steps": "Use `accumulate_steps` of this one.",
  }
  # What a class of the user's does before it clips is not known.
  if not is_elementwise and way == "elementwise":
    for limit in ("clipnorm", "global_clipnorm"):
      remedies[limit] = "Clip in your class, or before."
  for argument, remedy in remedies.items():
    if getattr(last, argument, None):
      raise ValueError(
        f"`shard_update` is {shard_update!r}, and `opt` has {argument}="
        f"{getattr(last, argument)}, which needs whole variables. {remedy}"
      )
  return str(way)
