"""The sharded update: each member of a group keeps one part of the state.

With n members in a group and W the flat weights of one dtype, padded to n equal
parts, member i does

    g[i] = reduce_scatter(grads)[i]      the group's sum, this part of it
    W[i] = opt.update(W[i], g[i])        opt has state for W[i] only
    W    = all_gather(W[i])

So the state has 1/n of its size, and the encapsulated optimizer updates one
large variable where the model has many.

References:
  Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
  Training, 2020 (arXiv 2004.13336). Rajbhandari et al., ZeRO, 2020 (stage 1).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import settings as settings_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import indexed_slices, packing
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, fused_update
from tf_cross_shard.step import noise_scale, nonfinite, sharded_state, update


@dataclasses.dataclass(frozen=True)
class FlatWeights:
  """Weights of one dtype behind each other, all with weight decay or none.

  Attributes:
    weights: Native variables, in their order.
    sizes: Their numbers of elements.
    part: The number of elements of each member's part.
    shard: The variable that the encapsulated optimizer is built on, [part].
    padding: The number of zeros that equal parts need at the end.
  """

  weights: list[Any]
  sizes: list[int]
  part: int
  shard: Any
  padding: int

  def pad(self, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins flat pieces, with zeros behind them."""
    if self.padding:
      pieces = [*pieces, tf.zeros([self.padding], pieces[0].dtype)]
    return tf.concat(pieces, 0)

  def split(self, whole: tf.Tensor) -> list[tf.Tensor]:
    """Takes a padded whole apart into the weights' pieces."""
    pieces = tf.split(whole, [*self.sizes, self.padding])
    return list(pieces[:-1])


class ShardedUpdate(update.Update):
  """Each member keeps one part of the state and updates this part."""

  def __init__(
    self,
    settings: settings_lib.Settings,
    inner: base.InnerOptimizer,
    engine: engines.Engine,
    noise: noise_scale.NoiseScale,
  ) -> None:
    super().__init__(settings, inner, engine, noise)
    self._flat: list[FlatWeights] = []  # Empty until built.
    self._variables: list[Any] = []  # Whole, in the user's order.
    inner.checkpointed = sharded_state.Children({}, inner.optimizer)

  def build(self, variables: Sequence[Any]) -> None:
    """Lays weights behind each other, and builds the optimizer on parts."""
    if self._flat:
      return
    if any(map(self._inner.is_overwritten, variables)):
      raise NotImplementedError(
        "Variables with `overwrite_with_gradient` (Keras' float8 scales) cannot"
        " be sharded. Leave `shard_update` out."
      )
    last = base.innermost(self._inner.optimizer)
    kinds: dict[tuple[tf.DType, bool], list[Any]] = {}
    for variable in variables:
      native = variables_lib.native(variable)
      decays = self._inner.decays(variable)
      kinds.setdefault((native.dtype, decays), []).append(native)
    members = self._engine.groups.group_size
    for (dtype, decays), weights in kinds.items():
      sizes = [int(np.prod(weight.shape)) for weight in weights]
      # One at least: engines do not carry tensors without elements.
      part = max(1, -(-sum(sizes) // members))
      name = f"shard_{dtype.name}" + ("" if decays else "_without_decay")
      with self._engine.making_variables():
        shard = self._inner.make_variable(tf.zeros([part], dtype), name)
      if not decays:
        last.exclude_from_weight_decay(var_list=[shard])
      padding = part * members - sum(sizes)
      self._flat.append(FlatWeights(weights, sizes, part, shard, padding))
    self._variables = list(variables)
    self._start_alike(self._take_own_part)
    with self._engine.making_variables():
      self._inner.build(self._shards)
      self._inner.unsharded_state = sharded_state.PlainState(
        self._inner,
        self._variables,
        [self._place_of(variable) for variable in variables],
        self._shards,
        self._engine,
      )
    if last.use_ema:
      self._start_alike(self._start_averages)
    self._inner.checkpointed.add(self._inner.unsharded_state.children)

  def reduce(
    self, grads: Sequence[Gradient], variables: Sequence[Any], calls: int
  ) -> list[tf.Tensor]:
    """Returns the group's sums of this member's parts, clipped for `opt`."""
    del calls  # `check` refuses optimizers that accumulate.
    pieces = self._flatten(grads, variables)
    own = self._noise.of_replica([piece for flat in pieces for piece in flat])
    parts = self._scatter(pieces)
    self._noise.after_scatter(own, parts)
    return self._clip(self._agree_on_finite(parts))

  def own_part(
    self, sums: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[tf.Tensor]:
    """Returns this member's parts of sums that all members have, clipped."""
    parts = self._parts_of(self._flatten(sums, variables))
    return self._clip(self._agree_on_finite(parts))

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: update.ApplyOnce,
  ) -> None:
    """Updates this member's parts of the weights, and gathers all parts."""
    with self._engine.isolate():
      self._take_own_part()
    last = base.innermost(self._inner.optimizer)
    with update.without_clipping(last, "clipnorm"):
      apply_once(sums, self._shards)
    gathered = self._gather_parts()
    # Constraints belong to a step: not to one that is left out.
    is_step = nonfinite.all_finite(sums) if self._may_skip else True
    with self._engine.isolate():
      self._write(gathered, is_step)

  def write_averages(self, variables: Sequence[Any]) -> None:
    """Gives all replicas the moving averages for weights, where there are."""
    del variables
    if not self._flat or not base.innermost(self._inner.optimizer).use_ema:
      return
    self._inner.write_averages(self._shards)

    def gather() -> None:
      gathered = self._gather_parts()
      with self._engine.isolate():
        self._write(gathered, is_step=False)

    self._run(gather)

  @property
  def _shards(self) -> list[Any]:
    """The variables that the encapsulated optimizer is built on."""
    return [flat.shard for flat in self._flat]

  @property
  def _may_skip(self) -> bool:
    """Whether a step may be left out because of a NaN or an infinity."""
    return self._settings.skip_nonfinite or self._inner.scales_dynamically

  def _start_alike(self, start: Callable[[], None]) -> None:
    """Lets each replica give variables their first values."""
    if not tf.distribute.in_cross_replica_context():
      # tf_keras builds in the first step; all but averages start at constants.
      if base.innermost(self._inner.optimizer).use_ema:
        raise RuntimeError(
          "`opt` averages weights and `shard_update` is set: call"
          " optimizer.build(model.trainable_variables) inside `with"
          " strategy.scope():` before the first step."
        )
      return

    def start_isolated() -> None:
      with self._engine.isolate():
        start()

    with tf.init_scope():
      self._run(start_isolated)

  def _run(self, step: Callable[[], None]) -> None:
    """Runs a step once on all replicas; TensorFlow warns of eager ones."""
    # Not a lambda: TensorFlow would warn of its retracing.
    run = functools.partial(self._engine.strategy.run, step)
    tf.function(run, autograph=False)()

  def _start_averages(self) -> None:
    """Sets averages that Keras made of the first replica's part."""
    for average, shard in zip(self._inner.averages, self._shards, strict=True):
      native = variables_lib.native(shard)
      variables_lib.native(average).assign(tf.convert_to_tensor(native))

  def _place_of(self, variable: Any) -> tuple[int, int]:
    """Returns which flat weights hold a variable, and where it begins."""
    native = variables_lib.native(variable)
    for i, flat in enumerate(self._flat):
      start = 0
      for weight, size in zip(flat.weights, flat.sizes, strict=True):
        if weight is native:
          return i, start
        start += size
    raise KeyError(variable)

  def _flatten(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[list[tf.Tensor]]:
    """Returns flat gradients in the order of the flat weights.

    Raises:
      ValueError: If a variable has no gradient, or two.
    """
    given = {
      id(variables_lib.native(variable)): (grad, variable)
      for grad, variable in zip(grads, variables, strict=True)
    }
    if len(given) < len(grads):
      raise ValueError(
        "`grads_and_vars` must hold each variable once under `shard_update`;"
        f" got {len(grads)} gradients of {len(given)} variables. Add up those"
        " of one variable."
      )
    pieces: list[list[tf.Tensor]] = []
    for flat in self._flat:
      pieces.append([])
      for weight in flat.weights:
        grad, variable = given.get(id(weight), (None, None))
        if grad is None:
          raise ValueError(
            "`grads_and_vars` must hold a gradient for every variable that the"
            f" optimizer was built on under `shard_update`; {weight.name} has"
            " none. Build it on the variables that are trained."
          )
        grad = indexed_slices.to_dense(grad, variable)
        pieces[-1].append(_flat(indexed_slices.cast(grad, variable)))
    return pieces

  def _scatter(self, pieces: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns the group's sums of this member's parts."""
    scale = self._wire_scale()
    wholes = [
      flat.pad(of_flat)
      for flat, of_flat in zip(self._flat, pieces, strict=True)
    ]
    scaled = [whole if scale is None else whole * scale for whole in wholes]
    narrow = packing.narrow(scaled, self._settings.wire_dtype)
    parts = packing.widen(self._engine.reduce_scatter(narrow), wholes)
    return parts if scale is None else [part / scale for part in parts]

  def _parts_of(self, pieces: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
    """Returns this member's parts of what all members have, of any shapes."""
    place = self._engine.position()
    parts = []
    for values, flat in zip(pieces, self._flat, strict=True):
      if not isinstance(place, int):
        whole = flat.pad(list(map(_flat, values)))
        parts.append(tf.slice(whole, [place * flat.part], [flat.part]))
        continue
      # Only what lies in the part is read and copied.
      own, start = [], -place * flat.part
      for value, size in zip(values, flat.sizes, strict=True):
        if start < flat.part and start + size > 0:
          piece, end = _flat(value), flat.part - start
          is_whole = start >= 0 and size <= end
          own.append(piece if is_whole else piece[max(-start, 0) : end])
        start += size
      if start < flat.part:
        missing = flat.part - max(start, 0)
        own.append(tf.zeros([missing], flat.shard.dtype))
      parts.append(tf.concat(own, 0))
    return parts

  def _agree_on_finite(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Makes all parts NaN on all members if one of any is not finite."""
    if not self._may_skip:
      return parts
    is_odd = tf.cast(~nonfinite.all_finite(parts), tf.float32)
    [count] = self._engine.all_reduce_sum([is_odd])
    nan = tf.where(count > 0, float("nan"), 0.0)
    return [part + tf.cast(nan, part.dtype) for part in parts]

  def _clip(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Clips sums by the limits of the encapsulated optimizer."""
    last = base.innermost(self._inner.optimizer)
    if last.clipnorm and last.clipnorm > 0:
      parts = self._clip_each(parts, self._inner.scale_limit(last.clipnorm))
    if last.global_clipnorm and last.global_clipnorm > 0:
      limit = self._inner.scale_limit(last.global_clipnorm)
      parts = self._clip_together(parts, limit)
    return parts

  def _clip_each(
    self, parts: Sequence[tf.Tensor], limit: Any
  ) -> list[tf.Tensor]:
    """Clips the gradient of each weight by its own norm."""
    squares = []
    for part, flat in zip(parts, self._flat, strict=True):
      if part.dtype.size < tf.float32.size:
        part = tf.cast(part, tf.float32)
      # A weight may lie in several parts; zeros add nothing to a norm.
      whole = self._engine.place_among_zeros(tf.square(part))
      pieces = flat.split(whole)
      squares.append(tf.stack([tf.reduce_sum(piece) for piece in pieces]))
    scales = []
    totals = self._engine.all_reduce_sum(squares)
    for part, flat, total in zip(parts, self._flat, totals, strict=True):
      bound = tf.cast(limit, total.dtype)
      scale = tf.cast(bound / tf.maximum(tf.sqrt(total), bound), part.dtype)
      pairs = zip(flat.sizes, tf.unstack(scale), strict=True)
      scales.append([tf.fill([size], factor) for size, factor in pairs])
    own = self._parts_of(scales)
    return [part * scale for part, scale in zip(parts, own, strict=True)]

  def _clip_together(
    self, parts: Sequence[tf.Tensor], limit: Any
  ) -> list[tf.Tensor]:
    """Clips by the norm of all parts together."""
    squares = [tf.reduce_sum(tf.square(part)) for part in parts]
    wide = tf.float64 if tf.float64 in {s.dtype for s in squares} else None
    total = tf.add_n([tf.cast(s, wide or tf.float32) for s in squares])
    [total] = self._engine.all_reduce_sum([total])
    limit = tf.cast(limit, total.dtype)
    scale = limit / tf.maximum(tf.sqrt(total), limit)
    return [part * tf.cast(scale, part.dtype) for part in parts]

  def _take_own_part(self) -> None:
    """Copies this member's parts of the weights; isolated."""
    parts = self._parts_of([flat.weights for flat in self._flat])
    for flat, part in zip(self._flat, parts, strict=True):
      variables_lib.native(flat.shard).assign(part)

  def _gather_parts(self) -> list[tf.Tensor]:
    """Returns the flat weights that the members' parts make; not isolated."""
    with self._engine.isolate():
      parts = [
        tf.identity(tf.convert_to_tensor(variables_lib.native(shard)))
        for shard in self._shards
      ]
    return self._engine.all_gather_parts(parts)

  def _write(self, gathered: Sequence[tf.Tensor], is_step: Any) -> None:
    """Gives this replica the weights, constrained after a step; isolated."""
    for flat, whole in zip(self._flat, gathered, strict=True):
      for weight, piece in zip(flat.weights, flat.split(whole), strict=True):
        is_flat = len(weight.shape) == 1
        weight.assign(piece if is_flat else tf.reshape(piece, weight.shape))
    for variable in self._variables:
      constraint = getattr(variable, "constraint", None)
      if constraint is not None:
        native = variables_lib.native(variable)
        value = tf.convert_to_tensor(native)
        native.assign(tf.where(is_step, constraint(value), value))


def check(optimizer: Any, shard_update: Any) -> None:
  """Raises `ValueError` for an optimizer that cannot be updated in parts."""
  last = base.innermost(optimizer)
  kind = type(last).__name__
  if not hasattr(last, "build"):
    raise ValueError(
      f"`shard_update` is {shard_update!r}, and {kind} is one of"
      " tf_keras.optimizers.legacy, which cannot be built on parts of weights."
      " Use one of tf_keras.optimizers."
    )
  is_elementwise = fused_update.keras_class(last) in update.ELEMENTWISE
  if not is_elementwise and shard_update is True:
    raise ValueError(
      f"`shard_update` is True, and {kind} may use norms or shapes of"
      " whole variables, which a part of them does not have. Use one of"
      f" {', '.join(update.ELEMENTWISE)}, or, if each element of your class's"
      ' update depends on that element only, shard_update="elementwise".'
    )
  remedies = {
    "gradient_accumulation_steps": "Use `accumulate_steps` of this one.",
  }
  if not is_elementwise:  # What its class does first is not known.
    for limit in ("clipnorm", "global_clipnorm"):
      remedies[limit] = "Clip in your class, or before."
  for argument, remedy in remedies.items():
    if getattr(last, argument, None):
      raise ValueError(
        f"`shard_update` is {shard_update!r}, and `opt` has {argument}="
        f"{getattr(last, argument)}, which needs whole variables. {remedy}"
      )


def _flat(value: Any) -> tf.Tensor:
  """Returns a tensor or variable as a tensor of one dimension."""
  tensor = tf.convert_to_tensor(value)
  return tensor if len(tensor.shape) == 1 else tf.reshape(tensor, [-1])
