"""Updates in shards: each member of a group keeps one part of the state.

With n members in a group and W all weights of one dtype in a row, padded to n
equal parts, member i does

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
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import indexed_slices, packing
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, fused_update
from tf_cross_shard.step import nonfinite, sharded_state

# Keras' classes whose update of an element depends on that element only.
_ELEMENTWISE: Final = (
  *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
  *("Ftrl", "Lion", "Nadam", "RMSprop", "SGD"),
)


@dataclasses.dataclass(frozen=True)
class Row:
  """Weights that lie in a row: of one dtype, all with weight decay or none.

  Attributes:
    weights: Native variables, in their order.
    sizes: Their numbers of elements.
    part: The number of elements of each member's part.
    shard: The variable that the encapsulated optimizer is built on, [part].
  """

  weights: list[Any]
  sizes: list[int]
  part: int
  shard: Any


def check(optimizer: Any, shard_update: Any) -> bool:
  """Returns whether updates are sharded; raises where they cannot be."""
  if shard_update in (False, None):
    return False
  if shard_update not in (True, "elementwise"):
    raise ValueError(
      '`shard_update` must be True, False or "elementwise"; got'
      f" {shard_update!r}."
    )
  last = base.innermost(optimizer)
  kind = type(last).__name__
  if not hasattr(last, "build"):
    raise ValueError(
      f"`shard_update` is {shard_update!r}, and {kind} is one of"
      " tf_keras.optimizers.legacy, which cannot be built on parts of weights."
      " Use one of tf_keras.optimizers."
    )
  is_elementwise = fused_update.keras_class(last) in _ELEMENTWISE
  if not is_elementwise and shard_update is True:
    raise ValueError(
      f"`shard_update` is True, and {kind} may use norms or shapes of"
      " whole variables, which a part of them does not have. Use one of"
      f" {', '.join(_ELEMENTWISE)}, or, if each element of your class's update"
      ' depends on that element only, shard_update="elementwise".'
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
  return True


class ShardedUpdate:
  """The parts of weights and state that replicas keep.

  Attributes:
    rows: Empty until built.
  """

  def __init__(
    self, inner: base.InnerOptimizer, engine: Any, groups: groups_lib.Groups
  ) -> None:
    self._inner = inner
    self._engine: engines.Engine = engine
    self._groups = groups
    self.rows: list[Row] = []
    self.variables: list[Any] = []  # whole, in the user's order
    self._inner.checkpointed = sharded_state.Children({}, inner.optimizer)

  @property
  def shards(self) -> list[Any]:
    """What the encapsulated optimizer is built on."""
    return [row.shard for row in self.rows]

  def build(self, variables: Sequence[Any]) -> None:
    """Lays weights in rows and builds the encapsulated optimizer on parts."""
    if self.rows:
      return
    last = base.innermost(self._inner.optimizer)
    kinds: dict[tuple[tf.DType, bool], list[Any]] = {}
    for variable in variables:
      native = variables_lib.native(variable)
      decays = not last.weight_decay or last._use_weight_decay(variable)
      kinds.setdefault((native.dtype, decays), []).append(native)
    for (dtype, decays), weights in kinds.items():
      sizes = [int(np.prod(weight.shape)) for weight in weights]
      part = -(-sum(sizes) // self._groups.group_size)
      name = f"shard_{dtype.name}" + ("" if decays else "_without_decay")
      with self._engine.making_variables():
        shard = self._inner.make_variable(tf.zeros([part], dtype), name)
      if not decays:
        last.exclude_from_weight_decay(var_list=[shard])
      self.rows.append(Row(weights, sizes, part, shard))
    self.variables = list(variables)
    self._start_alike(self.cut)
    with self._engine.making_variables():
      self._inner.build(self.shards)
      self._inner.plain = sharded_state.PlainState(
        self._inner,
        self.variables,
        [self._place_of(variable) for variable in variables],
        self.shards,
        self._groups,
        self._engine.strategy,
      )
    if last.use_ema:
      self._start_alike(self._start_averages)
    self._inner.checkpointed.add(self._inner.plain.children)

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
    """Keras made them of the first replica's part."""
    pairs = zip(self._inner.averages, self.shards, strict=True)
    for average, shard in pairs:
      native = variables_lib.native(shard)
      variables_lib.native(average).assign(tf.convert_to_tensor(native))

  def _place_of(self, variable: Any) -> tuple[int, int]:
    """The row of a variable, and where in it the variable begins."""
    native = variables_lib.native(variable)
    for i, row in enumerate(self.rows):
      start = 0
      for weight, size in zip(row.weights, row.sizes, strict=True):
        if weight is native:
          return i, start
        start += size
    raise KeyError(variable)

  def rows_of(
    self, grads: Sequence[Gradient], variables: Sequence[Any]
  ) -> list[list[tf.Tensor]]:
    """Flat gradients by rows, in the order of the weights.

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
    rows = []
    for row in self.rows:
      pieces = []
      for weight in row.weights:
        grad, variable = given.get(id(weight), (None, None))
        if grad is None:
          raise ValueError(
            "`grads_and_vars` must hold a gradient for every variable that the"
            f" optimizer was built on under `shard_update`; {weight.name} has"
            " none. Build it on the variables that are trained."
          )
        grad = indexed_slices.to_dense(grad, variable)
        pieces.append(_flat(indexed_slices.cast(grad, variable)))
      rows.append(pieces)
    return rows

  def scatter(
    self,
    rows: Sequence[Sequence[tf.Tensor]],
    wire_dtype: tf.DType | None,
    wire_scale: Any,
  ) -> list[tf.Tensor]:
    """The group's sums of this replica's parts."""
    scale = 1.0 if wire_scale is None else wire_scale
    flat = [
      self._padded(pieces, row)
      for pieces, row in zip(rows, self.rows, strict=True)
    ]
    scaled = flat if wire_scale is None else [each * scale for each in flat]
    narrow = packing.narrow(scaled, wire_dtype)
    parts = self._engine.reduce_scatter(narrow, self._groups)
    parts = packing.widen(parts, flat)
    return parts if wire_scale is None else [part / scale for part in parts]

  def own_parts(self, rows: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
    """This replica's parts of rows that all members have, of any shapes."""
    place = self._engine.position(self._groups)
    parts = []
    for values, row in zip(rows, self.rows, strict=True):
      if not isinstance(place, int):
        whole = self._padded(list(map(_flat, values)), row)
        parts.append(tf.slice(whole, [place * row.part], [row.part]))
        continue
      # Only what lies in the part is read and copied.
      mine, start = [], -place * row.part
      for value, size in zip(values, row.sizes, strict=True):
        if start < row.part and start + size > 0:
          piece, end = _flat(value), row.part - start
          is_whole = start >= 0 and size <= end
          mine.append(piece if is_whole else piece[max(-start, 0) : end])
        start += size
      if start < row.part:
        missing = row.part - max(start, 0)
        mine.append(tf.zeros([missing], row.shard.dtype))
      parts.append(tf.concat(mine, 0))
    return parts

  def alike(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """`parts`, all NaN on all members if one of any member is not finite."""
    is_odd = tf.cast(~nonfinite.all_finite(parts), tf.float32)
    [count] = self._engine.all_reduce_sum([is_odd], self._groups)
    nan = tf.where(count > 0, float("nan"), 0.0)
    return [part + tf.cast(nan, part.dtype) for part in parts]

  def clip_each(
    self, parts: Sequence[tf.Tensor], limit: Any
  ) -> list[tf.Tensor]:
    """Clips the gradient of each weight by its own norm."""
    squares = []
    for part, row in zip(parts, self.rows, strict=True):
      if part.dtype.size < tf.float32.size:
        part = tf.cast(part, tf.float32)
      # A weight may lie in several parts; zeros add nothing to a norm.
      whole = self._engine.spread(tf.square(part), self._groups)
      pieces = self._split(whole, row)
      squares.append(tf.stack([tf.reduce_sum(piece) for piece in pieces]))
    scales = []
    totals = self._engine.all_reduce_sum(squares, self._groups)
    for part, row, total in zip(parts, self.rows, totals, strict=True):
      bound = tf.cast(limit, total.dtype)
      scale = tf.cast(bound / tf.maximum(tf.sqrt(total), bound), part.dtype)
      each = zip(row.sizes, tf.unstack(scale), strict=True)
      scales.append([tf.fill([size], one) for size, one in each])
    own = self.own_parts(scales)
    return [part * scale for part, scale in zip(parts, own, strict=True)]

  def clip(self, parts: Sequence[tf.Tensor], limit: Any) -> list[tf.Tensor]:
    """Clips by the norm of all parts of all rows together."""
    squares = [tf.reduce_sum(tf.square(part)) for part in parts]
    wide = tf.float64 if tf.float64 in {s.dtype for s in squares} else None
    total = tf.add_n([tf.cast(s, wide or tf.float32) for s in squares])
    [total] = self._engine.all_reduce_sum([total], self._groups)
    limit = tf.cast(limit, total.dtype)
    scale = limit / tf.maximum(tf.sqrt(total), limit)
    return [part * tf.cast(scale, part.dtype) for part in parts]

  def cut(self) -> None:
    """Takes this replica's parts of the weights; isolated."""
    parts = self.own_parts([row.weights for row in self.rows])
    for row, part in zip(self.rows, parts, strict=True):
      variables_lib.native(row.shard).assign(part)

  def join(self) -> list[tf.Tensor]:
    """The weights that the members' parts make, by rows; not isolated."""
    with self._engine.isolate():
      parts = [
        tf.identity(tf.convert_to_tensor(variables_lib.native(row.shard)))
        for row in self.rows
      ]
    return self._engine.all_gather_parts(parts, self._groups)

  def write(self, joined: Sequence[tf.Tensor], is_step: Any) -> None:
    """Gives this replica the weights, constrained after a step; isolated."""
    for row, whole in zip(self.rows, joined, strict=True):
      pieces = self._split(whole, row)
      for weight, piece in zip(row.weights, pieces, strict=True):
        is_flat = len(weight.shape) == 1
        weight.assign(piece if is_flat else tf.reshape(piece, weight.shape))
    for variable in self.variables:
      constraint = getattr(variable, "constraint", None)
      if constraint is not None:
        native = variables_lib.native(variable)
        value = tf.convert_to_tensor(native)
        native.assign(tf.where(is_step, constraint(value), value))

  def write_averages(self) -> None:
    """Gives all replicas the moving averages for weights, where there are."""
    if not self.rows or not base.innermost(self._inner.optimizer).use_ema:
      return
    self._inner.optimizer.finalize_variable_values(self.shards)

    def join() -> None:
      joined = self.join()
      with self._engine.isolate():
        self.write(joined, is_step=False)

    self._run(join)

  def _padding(self, row: Row) -> int:
    """How many zeros equal parts need at the end of a row."""
    return row.part * self._groups.group_size - sum(row.sizes)

  def _split(self, whole: tf.Tensor, row: Row) -> list[tf.Tensor]:
    """The weights' pieces of a padded row."""
    pieces = tf.split(whole, [*row.sizes, self._padding(row)])
    return list(pieces[:-1])

  def _padded(self, pieces: Sequence[tf.Tensor], row: Row) -> tf.Tensor:
    """Pieces in a row, with zeros behind them for equal parts."""
    missing = self._padding(row)
    if missing:
      pieces = [*pieces, tf.zeros([missing], pieces[0].dtype)]
    return tf.concat(pieces, 0)


def _flat(value: Any) -> tf.Tensor:
  """A tensor or variable as a tensor of one dimension."""
  tensor = tf.convert_to_tensor(value)
  return tensor if len(tensor.shape) == 1 else tf.reshape(tensor, [-1])
