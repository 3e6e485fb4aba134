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
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import clipping, indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base, fused_update, row_variables

# What both Kerases call the weight of an `Embedding`.
_EMBEDDINGS: Final = "embeddings"

# Keras' classes that change no row without a gradient, if they have no momentum
# and no weight decay.
_EXACT: Final = ("Adagrad", "SGD")

# Lets the encapsulated optimizer apply sums to variables, once.
ApplyOnce = Callable[[Sequence[Gradient], Sequence[Any]], None]


def check(inner: base.InnerOptimizer, settings: settings_lib.Settings) -> None:
  """Raises `ValueError` where `lazy_rows` cannot be had."""
  lazy_rows = settings.lazy_rows
  if inner.accumulates:
    raise ValueError(
      f"`lazy_rows` is {lazy_rows!r}, and with gradient_accumulation_steps of"
      " `opt` gradients are dense. Use `accumulate_steps` of this one."
    )
  last = base.innermost(inner.optimizer)
  kind = type(last).__name__
  fused_update.check_is_one(last, "lazy_rows", lazy_rows)
  if not hasattr(last, "build"):
    raise ValueError(
      f"`lazy_rows` is {lazy_rows!r}, and {kind} is one of"
      " tf_keras.optimizers.legacy, which have rows of their own. Leave it out,"
      " or use one of tf_keras.optimizers."
    )
  known = fused_update.ELEMENTWISE
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
  # SGD of tf_keras writes a slot for each row in each step, momentum or not.
  return fused_update.keras_class(last) in _EXACT and not (
    getattr(last, "momentum", 0)
    or getattr(last, "momentums", None)
    or last.weight_decay
  )


class Tables:
  """Variables of which the rows that occur are updated: none."""

  def is_table(self, variable: Any) -> bool:
    """Whether a variable is updated by rows, known before its gradient is."""
    del variable
    return False

  def is_by_rows(self) -> bool:
    """Whether rows that do not occur stay as they are, at this place."""
    return False

  def add(self, var_list: Any, var_names: Any) -> None:
    """Says of variables that they are tables.

    Raises:
      ValueError: If nothing is updated by rows.
    """
    del var_list, var_names
    raise ValueError(
      "`update_by_rows` was called, and `opt` updates all rows in each step."
      " Set lazy_rows=True."
    )

  def to_dense(self, grad: Gradient, variable: Any) -> Gradient:
    """Returns the dense gradient of a variable that is no table."""
    return indexed_slices.to_dense(grad, variable)

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: ApplyOnce,
  ) -> None:
    """Applies sums to variables."""
    apply_once(sums, variables)


class RowTables(Tables):
  """Tables, of which every member keeps all rows."""

  def __init__(
    self,
    settings: settings_lib.Settings,
    inner: base.InnerOptimizer,
    engine: engines.Engine,
  ) -> None:
    self._inner = inner
    self._engine = engine
    self._is_lazy = bool(settings.lazy_rows)
    self._table_names: list[str] = []
    self._table_list: list[Any] = []  # Their ids stay theirs.
    inner.row_step = self._update_rows

  def is_table(self, variable: Any) -> bool:
    """Whether it is a weight of a Keras `Embedding`, or was said to be one."""
    native = variables_lib.native(variable)
    path = variables_lib.path_of(variable)
    is_known = any(native is table for table in self._table_list)
    return self._engine.keeps_rows and (
      is_known
      or path.rpartition("/")[2] == _EMBEDDINGS
      or any(name in path for name in self._table_names)
    )

  def add(self, var_list: Any, var_names: Any) -> None:
    """Says of variables that they are tables."""
    self._table_list += map(variables_lib.native, var_list or ())
    self._table_names += var_names or ()

  def to_dense(self, grad: Gradient, variable: Any) -> Gradient:
    """Returns the dense gradient of a variable that is no table.

    Raises:
      ValueError: If rows would be updated that do not occur.
    """
    is_sparse = isinstance(grad, tf.IndexedSlices)
    if self._is_lazy and is_sparse and self.is_by_rows():
      path = variables_lib.path_of(variable)
      raise ValueError(
        f"The gradient of {path} has rows, and with `accumulate_steps` or"
        " `shard_update` there is room for tables that are known when the"
        " optimizer is built only. Call"
        f" optimizer.update_by_rows(var_names=[{path!r}]) before that."
      )
    return super().to_dense(grad, variable)

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: ApplyOnce,
  ) -> None:
    """Applies the sums to the variables, of tables to their rows."""
    tables = [
      variable
      for total, variable in zip(sums, variables, strict=True)
      if isinstance(total, tf.IndexedSlices)
    ]
    if not tables or not self.is_by_rows():
      apply_once(sums, variables)
      return
    # Keras would clip whole tables, and let them decay.
    with (
      self._inner.clipping_by(_clip),
      self._inner.without_decay(tables),
    ):
      apply_once(sums, variables)

  def is_by_rows(self) -> bool:
    """Whether rows are updated here; momentum and decay may be assigned."""
    optimizer = self._inner.optimizer
    return not fused_update.is_compiled(base.innermost(optimizer)) and (
      self._is_lazy or is_exact(optimizer)
    )

  def _update_rows(
    self,
    update_step: Callable[..., None],
    grad: tf.IndexedSlices,
    variable: Any,
    *rate: Any,
  ) -> None:
    """Runs the optimizer's own `update_step` on the rows that occur."""
    last = base.innermost(self._inner.optimizer)
    if not self.is_by_rows():
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


def make(
  settings: settings_lib.Settings,
  inner: base.InnerOptimizer,
  engine: engines.Engine,
) -> Tables:
  """Returns the tables that the settings and the optimizer ask for.

  Raises:
    ValueError: If rows are to be updated, and cannot be.
  """
  if settings.lazy_rows:
    check(inner, settings)
  elif not is_exact(inner.optimizer):
    return Tables()
  return RowTables(settings, inner, engine)


def _clip(optimizer: Any, grads: Sequence[Gradient]) -> list[Gradient]:
  """Clips sums by an optimizer's own limits."""
  limits: dict[str, Any] = {}
  for name in settings_lib.LIMITS:
    limit = getattr(optimizer, name)  # In Keras 0 and less clip nothing.
    limits[name] = limit if limit and limit > 0 else None
  return clipping.clip(grads, **limits)


def _unknown_length(value: Any) -> tf.Tensor:
  """Returns a tensor whose number of rows is not known in a graph."""
  tensor = tf.convert_to_tensor(value)
  shape = [None, *tensor.shape[1:]]
  return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)
