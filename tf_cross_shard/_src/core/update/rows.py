"""Embedding tables that are updated by rows.

Only some rows of an embedding table W occur in a batch, so the gradient is
row-sparse. With i the indices of these rows, g the rows of the gradient (rows
of the same index are added up) and S the slots of W:

    W[i], S[i] = opt.update(W[i], S[i], g)        other rows do not change

So the cost of a step depends on the rows of the batch, not on the size of the
table. Plain Keras' SGD without momentum and Adagrad, both without weight decay,
also change no other rows. For these optimizers, the update by rows computes the
same numbers as plain Keras. For all other optimizers it is a different update,
which you ask for with `lazy_rows`. A row that is not in the batch keeps its
slots and does not decay, but Adam's bias correction still counts the step.

References:
  LazyAdam of TensorFlow Addons: Adam with `lazy_rows=True` is LazyAdam.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core import divided_rows
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import clipping, row_sparse
from tf_cross_shard._src.core.gradients.clipping import Gradient
from tf_cross_shard._src.core.inner import fused, row_variables
from tf_cross_shard._src.core.inner import inner as inner_lib
from tf_cross_shard._src.core.update import divided_tables, table_warnings

# The name of the weight of an `Embedding` in Keras 3 and tf_keras.
_EMBEDDINGS: Final = "embeddings"

# Keras' classes that change only rows with a gradient, if they have no momentum
# and no weight decay.
_EXACT: Final = ("Adagrad", "SGD")

# Lets the wrapped optimizer apply sums to variables, once.
ApplyOnce = Callable[[Sequence[Gradient], Sequence[Any]], None]


def check(context: context_lib.Context) -> None:
  """Raises `ValueError` if the optimizer cannot update by rows."""
  lazy_rows = context.settings.lazy_rows
  optimizer = context.inner.innermost
  accumulates = context.inner.accumulates
  if accumulates:
    raise ValueError(
      f"`lazy_rows` is {lazy_rows!r}, but `opt` accumulates gradients"
      f" (gradient_accumulation_steps={accumulates}), and accumulated gradients"
      " are dense. Set only one of these arguments."
    )
  kind = type(optimizer).__name__
  fused.check_is_one(optimizer, "lazy_rows", lazy_rows)
  fused.check_vouched_for(optimizer, "lazy_rows", lazy_rows)
  if not hasattr(optimizer, "build"):
    raise ValueError(
      f"`lazy_rows` is {lazy_rows!r}, but {kind} is an optimizer of"
      " tf_keras.optimizers.legacy, which handles row-sparse gradients itself."
      " Remove `lazy_rows`, or use an optimizer of tf_keras.optimizers."
    )
  known = fused.ELEMENTWISE
  if lazy_rows is True and fused.keras_class(optimizer) not in known:
    raise ValueError(
      f"`lazy_rows` is True, but {kind} may use norms or shapes of whole"
      f" variables. Use one of {', '.join(known)}, or pass"
      ' lazy_rows="elementwise" if each element of your class\'s update depends'
      " only on that element."
    )


def why_not_lazy(context: context_lib.Context) -> str:
  """Returns why `lazy_rows=True` would raise an error; "" if it would not."""
  try:
    settings = dataclasses.replace(context.settings, lazy_rows=True)
    check(dataclasses.replace(context, settings=settings))
  except ValueError as error:
    return str(error)
  return ""


def is_exact(optimizer: Any) -> bool:
  """Returns whether plain Keras also updates only rows with a gradient."""
  # tf_keras' SGD writes a slot for each row in each step, with momentum or not.
  return fused.keras_class(optimizer) in _EXACT and not (
    getattr(optimizer, "momentum", 0)
    or getattr(optimizer, "momentums", None)
    or optimizer.weight_decay
  )


class Tables(context_lib.Stage):
  """Updates tables by rows whose rows are divided among the members.

  All other variables are updated as the optimizer does without this package.
  `RowTables` also updates other tables by rows.

  Attributes:
    row_step: The update for row-sparse gradients; None for Keras' own.
  """

  row_step: inner_lib.RowStep | None = None

  def is_embedding(self, variable: Any) -> bool:
    """Returns whether a variable is of an `Embedding` layer, or divided.

    Its gradient is row-sparse, unless the loss also uses the whole table.
    """
    path = variables_lib.path_of(variable)
    is_of_layer = path.rpartition("/")[2] == _EMBEDDINGS
    return is_of_layer or divided_rows.of(variable) is not None

  def is_table(self, variable: Any) -> bool:
    """Returns whether a variable is a table; does not look at its gradient."""
    del variable
    return False

  def is_by_rows(self, variable: Any = None) -> bool:
    """Returns whether the step updates only rows of a variable."""
    return variable is not None and divided_rows.of(variable) is not None

  def clips_to_dense(self, variables: Sequence[Any]) -> bool:
    """Returns whether clipping by `opt` makes all row-sparse sums dense.

    `variables` are those of a step. In some steps, `apply` clips instead of
    Keras, and keeps the sums row-sparse.
    """
    is_clipped_here = _has_several_dtypes(variables) or any(
      map(self.is_by_rows, variables)
    )
    return self.inner.clips_to_dense and not is_clipped_here

  def prepare_divided(self, variables: Sequence[Any]) -> None:
    """Prepares for variables that are divided among the members."""
    for variable in variables:
      if divided_rows.of(variable) is not None:
        # `make` has checked the optimizer already if `lazy_rows` is set.
        is_checked = self.settings.lazy_rows
        why_not = "" if is_checked else why_not_lazy(self.context)
        divided_tables.check(self.context, variable, why_not)
        self.row_step = self._update_rows

  def add(self, var_list: Any, var_names: Any) -> None:
    """Declares variables as tables, and those whose path contains a name.

    Raises:
      ValueError: If the optimizer updates all rows.
    """
    del var_list, var_names
    raise ValueError(
      "`update_by_rows` was called, but `opt` updates all rows in each step."
      " Pass lazy_rows=True to the CrossShardOptimizer."
    )

  def to_dense(self, grad: Gradient, variable: Any) -> Gradient:
    """Returns the dense gradient of a variable that is not a table."""
    return row_sparse.to_dense(grad, variable)

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: ApplyOnce,
  ) -> None:
    """Applies sums to variables; updates only rows of row-sparse sums.

    Args:
      sums: The sums over the group.
      variables: Their variables.
      apply_once: Lets the wrapped optimizer update the variables.
    """
    tables = [
      variable
      for total, variable in zip(sums, variables, strict=True)
      if isinstance(total, tf.IndexedSlices) and self.is_by_rows(variable)
    ]
    # Keras cannot clip gradients of different dtypes by one norm, and would
    # clip whole tables. In these cases, clip here.
    is_mixed = _has_several_dtypes([s for s in sums if s is not None])
    clips_here = bool(
      tables or (is_mixed and self.inner.innermost.global_clipnorm)
    )
    clip = _clip_by_limits_of_opt
    if tables and divided_rows.any_of(variables):
      if fused.is_compiled(self.inner.innermost):
        raise ValueError(
          "XLA cannot compile a step with a ShardedEmbedding. Pass"
          " jit_compile=False."
        )
      sums, clip = (
        divided_tables.clip_whole_tables(self.context, sums, variables),
        _keep,
      )
    with contextlib.ExitStack() as stack:
      if clips_here:
        stack.enter_context(self.inner.clipping_by(clip))
      if tables:
        # `_update_rows` applies weight decay to the rows in the batch alone.
        stack.enter_context(self.inner.without_decay(tables))
      apply_once(sums, variables)

  def _update_rows(
    self,
    update_step: Callable[..., None],
    grad: tf.IndexedSlices,
    variable: Any,
    *rate: Any,
  ) -> None:
    """Runs the optimizer's own `update_step` on the rows in the batch.

    Args:
      update_step: Keras' method.
      grad: The group's sum of the gradients of a table W, without duplicate
        indices: one row g for each index i.
      variable: The table W.
      *rate: The learning rate, if Keras passes it to `update_step`.
    """
    optimizer = self.inner.innermost
    if not self.is_by_rows(variable):
      update_step(grad, variable, *rate)
      return
    # Hide the number of rows from Keras, which mistakes a gradient with one row
    # for the gradient of a bias.
    i, g = map(_hide_length, (grad.indices, grad.values))
    decays = optimizer.weight_decay and self.inner.decays(variable)
    # Gather W[i] and S[i], and scatter them back at the end.
    with row_variables.gathered(self.inner, variable, i) as rows:
      if decays:
        # W[i] <- W[i] - weight_decay * learning_rate * W[i], before the update
        # as in Keras.
        factor = tf.cast(optimizer.weight_decay, rows.dtype)
        learning_rate = tf.cast(optimizer.learning_rate, rows.dtype)
        rows.assign_sub(rows * factor * learning_rate)
      update_step(g, rows, *rate)  # W[i], S[i] = opt.update(W[i], S[i], g)


class RowTables(Tables):
  """Embedding tables: every member of a group updates the rows in the batch.

  Every member holds the whole table. The weights of Keras' `Embedding` are
  tables. `add` declares more tables.
  """

  def __init__(self, context: context_lib.Context) -> None:
    """Creates an update by rows without declared tables."""
    super().__init__(context)
    self._is_lazy = bool(self.settings.lazy_rows)
    self._table_names: list[str] = []
    self._table_list: list[Any] = []
    self._warnings = table_warnings.TableWarnings()
    self.row_step = self._update_rows

  def is_embedding(self, variable: Any) -> bool:
    """Returns whether a variable is of an `Embedding`, divided, or declared."""
    native = variables_lib.native(variable)
    path = variables_lib.path_of(variable)
    return (
      super().is_embedding(variable)
      or any(native is table for table in self._table_list)
      or any(name in path for name in self._table_names)
    )

  def is_table(self, variable: Any) -> bool:
    """Returns whether a variable is updated by rows of a row-sparse gradient.

    It does not look at the gradient.
    """
    return self.engine.supports_sparse and self.is_embedding(variable)

  def add(self, var_list: Any, var_names: Any) -> None:
    """Declares variables as tables."""
    self._table_list += map(variables_lib.native, var_list or ())
    self._table_names += var_names or ()

  def to_dense(self, grad: Gradient, variable: Any) -> Gradient:
    """Returns the dense gradient of a variable that is not a table.

    Raises:
      ValueError: If `lazy_rows` is set and the gradient is row-sparse: a dense
        gradient would update rows that are not in the batch.
    """
    is_sparse = isinstance(grad, tf.IndexedSlices)
    if self._is_lazy and is_sparse and self.is_by_rows():
      path = variables_lib.path_of(variable)
      raise ValueError(
        f"The gradient of {path} is row-sparse (tf.IndexedSlices), but {path}"
        " was not declared as an embedding table. Before `build`, call"
        f" optimizer.update_by_rows(var_names=[{path!r}])."
      )
    return super().to_dense(grad, variable)

  def apply(
    self,
    sums: Sequence[Gradient],
    variables: Sequence[Any],
    apply_once: ApplyOnce,
  ) -> None:
    """Applies sums to variables; updates only rows of row-sparse sums."""
    if self._is_lazy:
      is_compiled = fused.is_compiled(self.inner.innermost)
      for total, variable in zip(sums, variables, strict=True):
        is_sparse = isinstance(total, tf.IndexedSlices)
        if is_sparse or (total is not None and self.is_table(variable)):
          self._warnings.check(variable, total, is_compiled)
    super().apply(sums, variables, apply_once)

  def is_by_rows(self, variable: Any = None) -> bool:
    """Returns whether the traced step updates only rows in the batch.

    Steps that XLA compiles update all rows. Momentum and weight decay are read
    in each call, because the user may assign them.
    """
    optimizer = self.inner.innermost
    return not fused.is_compiled(optimizer) and (
      self._is_lazy or is_exact(optimizer) or super().is_by_rows(variable)
    )


def make(context: context_lib.Context) -> Tables:
  """Returns the tables for the settings and the optimizer.

  Raises:
    ValueError: If `lazy_rows` is set and the optimizer cannot update by rows.
  """
  if context.settings.lazy_rows:
    check(context)
  elif not is_exact(context.inner.innermost):
    return Tables(context)
  return RowTables(context)


def _has_several_dtypes(values: Sequence[Any]) -> bool:
  """Returns whether gradients or variables have different dtypes."""
  return len({tf.as_dtype(value.dtype) for value in values}) > 1


def _clip_by_limits_of_opt(
  optimizer: Any, grads: Sequence[Gradient]
) -> list[Gradient]:
  """Returns sums clipped by an optimizer's own limits."""
  return clipping.clip(grads, **clipping.limits_of(optimizer))


def _keep(optimizer: Any, grads: Sequence[Gradient]) -> list[Gradient]:
  """Returns sums that are clipped already."""
  del optimizer
  return list(grads)


def _hide_length(value: Any) -> tf.Tensor:
  """Returns a tensor whose static shape has an unknown number of rows."""
  tensor = tf.convert_to_tensor(value)
  shape = [None, *tensor.shape[1:]]
  return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)
