"""The update by rows: a step costs what the batch touches of a table.

For a row-sparse gradient, `g` its rows with those of one index added up and `i`
their indices, of a table `W` with slots `S`:

    W[i], S[i] = opt.update(W[i], S[i], g)        all other rows stay

SGD without momentum and Adagrad, without weight decay, would not change other
rows in plain Keras either: there it is the same update. For all others it is
another one, the *lazy* update: a row's slots stay as they are while the row
does not occur, its weight decays when it occurs, and the bias correction of
Adam counts all steps.

References:
  LazyAdam of TensorFlow Addons, which `lazy_rows=True` is for Adam.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import settings as settings_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import clipping, indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, fused_update, row_variables
from tf_cross_shard.step import noise_scale, update

# Keras' classes that change no row without a gradient, if they have no momentum
# and no weight decay.
_EXACT: Final = ("Adagrad", "SGD")


def check(optimizer: Any, lazy_rows: Any) -> None:
  """Raises `ValueError` for an optimizer that cannot be updated by rows."""
  last = base.innermost(optimizer)
  kind = type(last).__name__
  if not hasattr(last, "build"):
    raise ValueError(
      f"`lazy_rows` is {lazy_rows!r}, and {kind} is one of"
      " tf_keras.optimizers.legacy, which have rows of their own. Leave it out,"
      " or use one of tf_keras.optimizers."
    )
  known = update.ELEMENTWISE
  if lazy_rows is True and fused_update.keras_class(last) not in known:
    raise ValueError(
      f"`lazy_rows` is True, and {kind} may use norms or shapes of whole"
      f" variables, which rows do not have. Use one of {', '.join(known)}, or,"
      " if each element of your class's update depends on that element only,"
      ' lazy_rows="elementwise".'
    )


def is_exact(optimizer: Any) -> bool:
  """Whether rows without a gradient would not change in plain Keras."""
  last = base.innermost(optimizer)
  return fused_update.keras_class(last) in _EXACT and not (
    getattr(last, "momentum", 0) or last.weight_decay
  )


class RowUpdate(update.ReplicatedUpdate):
  """Every member keeps whole tables, and updates the rows that occur."""

  def __init__(
    self,
    settings: settings_lib.Settings,
    inner: base.InnerOptimizer,
    engine: engines.Engine,
    noise: noise_scale.NoiseScale,
  ) -> None:
    super().__init__(settings, inner, engine, noise)
    self._is_lazy = bool(settings.lazy_rows)
    inner.row_step = self._update_rows

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: update.ApplyOnce,
  ) -> None:
    """Applies the sums to the variables, of tables to their rows."""
    tables = [
      variable
      for total, variable in zip(sums, variables, strict=True)
      if isinstance(total, tf.IndexedSlices)
    ]
    # Momentum and decay may have been assigned since.
    if not tables or not (self._is_lazy or is_exact(self._inner.optimizer)):
      apply_once(sums, variables)
      return
    last = base.innermost(self._inner.optimizer)
    # Keras would clip whole tables, and let them decay.
    clipped = clipping.clip(
      sums,
      **{
        name: self._inner.scale_limit(limit) if limit else None
        for name in settings_lib.LIMITS
        for limit in (getattr(last, name),)
      },
      keep_infinite=self._settings.skip_nonfinite
      or self._inner.scales_dynamically,
    )
    with (
      update.without_clipping(last, *settings_lib.LIMITS),
      self._inner.without_decay(tables),
    ):
      apply_once(clipped, variables)

  def _update_rows(
    self,
    update_step: Callable[..., None],
    grad: tf.IndexedSlices,
    variable: Any,
    *rate: Any,
  ) -> None:
    """Runs the optimizer's own `update_step` on the rows that occur."""
    last = base.innermost(self._inner.optimizer)
    if not (self._is_lazy or is_exact(self._inner.optimizer)):
      update_step(grad, variable, *rate)
      return
    grad = indexed_slices.merge_duplicates(grad)
    # Keras takes one row, where it knows of it, for the bias of a layer.
    indices, values = map(_unknown_length, (grad.indices, grad.values))
    decays = last.weight_decay and self._inner.decays(variable)
    with row_variables.gathered(self._inner, variable, indices) as rows:
      if decays:
        factor = tf.cast(last.weight_decay, rows.dtype)
        rows.assign_sub(rows * factor * tf.cast(last.learning_rate, rows.dtype))
      update_step(values, rows, *rate)


def _unknown_length(value: Any) -> tf.Tensor:
  """Returns a tensor whose number of rows is not known in a graph."""
  tensor = tf.convert_to_tensor(value)
  shape = [None, *tensor.shape[1:]]
  return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)
