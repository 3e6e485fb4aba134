"""Embedding tables that are updated by rows.

Only some rows of an embedding table W occur in a batch, so the gradient is
row-sparse. With i the indices of these rows without duplicates, g the rows of
the gradient and S the slots of W:

    W[i], S[i] = opt.update(W[i], S[i], g)        other rows do not change

Plain Keras' SGD without momentum and Adagrad, both without weight decay, change
no other rows either. For all other optimizers it is another update, which
`lazy_rows` asks for (LazyAdam of TensorFlow Addons). If an index occurs several
times in a batch, with gradients g_1, ..., g_k:

    Keras 3      v = ... + g_1^2 + ... + g_k^2
    lazy_rows    v = ... + (g_1 + ... + g_k)^2      and tf_keras
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.variables import Gradient, Optimizer, Variable
from tf_cross_shard._src.core.wrapped import (
  fused,
  keras_classes,
  row_variables,
)
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

# The name of the weight of an `Embedding` in Keras 3 and tf_keras.
_EMBEDDINGS: Final = "embeddings"

# Keras' classes that change only rows with a gradient, if they have no momentum
# and no weight decay.
_EXACT: Final = ("Adagrad", "SGD")


def check(wrapped: wrapped_lib.WrappedOptimizer, lazy_rows: bool | str) -> None:
  """Raises `ValueError` if the optimizer cannot update by rows."""
  if wrapped.accumulates:
    raise ValueError(
      f"`lazy_rows` is {lazy_rows!r}, but `opt` accumulates gradients"
      f" (gradient_accumulation_steps={wrapped.accumulates}), and accumulated"
      " gradients are dense. Set only one of these arguments."
    )
  keras_classes.check_elementwise(
    wrapped.base_optimizer, "lazy_rows", lazy_rows
  )


def is_exact(optimizer: Optimizer) -> bool:
  """Returns whether plain Keras also updates only rows with a gradient."""
  # tf_keras' SGD writes a slot for each row in each step, with momentum or not.
  return keras_classes.keras_class(optimizer) in _EXACT and not (
    getattr(optimizer, "momentum", 0)
    or getattr(optimizer, "momentums", None)
    or optimizer.weight_decay
  )


class Tables:
  """The embedding tables, whose rows in the batch all members update.

  They are the weights of Keras' `Embedding`, and what `add` declares.
  """

  def __init__(
    self,
    wrapped: wrapped_lib.WrappedOptimizer,
    engine: engine_lib.Engine,
    lazy_rows: bool | str,
  ) -> None:
    if lazy_rows:
      check(wrapped, lazy_rows)
    self._wrapped = wrapped
    self._engine = engine
    self.is_lazy = bool(lazy_rows)
    self._has_rows = self.is_lazy or is_exact(wrapped.base_optimizer)
    self._names: list[str] = []
    self._tables: list[Variable] = []
    self._has_warned = False

  def warn(self, grads: Sequence[Gradient]) -> None:
    """Warns once if `lazy_rows` is set, but the step changes all rows."""
    optimizer = self._wrapped.base_optimizer
    is_sparse = any(isinstance(grad, tf.IndexedSlices) for grad in grads)
    differs = self.is_lazy and not self.is_by_rows and not is_exact(optimizer)
    if is_sparse and differs and not self._has_warned:
      self._has_warned = True
      logging.warning(
        "lazy_rows changes all rows under %s and in steps that XLA compiles, as"
        " plain Keras does: another algorithm than for the rows in the batch.",
        type(self._engine.strategy).__name__,
      )

  @property
  def row_step(self) -> wrapped_lib.RowStep | None:
    """The update for row-sparse gradients; None for Keras' own."""
    return self._update_rows if self._has_rows else None

  def is_embedding(self, variable: Variable) -> bool:
    """Returns whether a variable is of an `Embedding`, or declared."""
    native = variables_lib.native(variable)
    path = variables_lib.path_of(variable)
    return (
      path.rpartition("/")[2] == _EMBEDDINGS
      or any(native is table for table in self._tables)
      or any(name in path for name in self._names)
    )

  def is_table(self, variable: Variable) -> bool:
    """Returns whether row-sparse gradients of a variable update its rows."""
    supports_rows = self._has_rows and not self._engine.is_single_program
    return supports_rows and self.is_embedding(variable)

  @property
  def is_by_rows(self) -> bool:
    """Returns whether the traced step updates only rows in the batch."""
    optimizer = self._wrapped.base_optimizer
    # The user may assign momentum and weight decay between two steps.
    has_rows = self.is_lazy or (self._has_rows and is_exact(optimizer))
    is_compiled = fused.is_compiled(optimizer)
    is_static = self._engine.is_single_program or is_compiled
    return has_rows and not is_static

  @property
  def keeps_rows(self) -> bool:
    """Whether a step reduces row-sparse gradients as they are."""
    # Replicas of one program have no shapes that depend on data, and a user's
    # class may have.
    is_static = bool(keras_classes.keras_class(self._wrapped.base_optimizer))
    return self._engine.supports_sparse and (
      is_static or not self._engine.is_single_program
    )

  def clips_to_dense(self, variables: Sequence[Variable]) -> bool:
    """Returns whether clipping by `opt` makes all row-sparse sums dense."""
    is_clipped_here = self.is_by_rows or wrapped_lib.has_several_dtypes(
      variables
    )
    return self._wrapped.clips_to_dense and not is_clipped_here

  def add(self, var_list: Sequence[Variable], var_names: Sequence[str]) -> None:
    """Declares variables as tables, and those whose path contains a name."""
    if not self._has_rows:
      raise ValueError(
        "`update_by_rows` was called, but `opt` updates all rows in each step."
        " Pass lazy_rows=True to the CrossShardOptimizer."
      )
    self._tables += map(variables_lib.native, var_list)
    self._names += var_names

  def to_dense(self, grad: Gradient, variable: Variable) -> Gradient:
    """Returns the dense gradient of a variable that is not a table."""
    is_sparse = isinstance(grad, tf.IndexedSlices)
    if self.is_lazy and is_sparse and self.is_by_rows:
      # A dense gradient would update rows that are not in the batch.
      path = variables_lib.path_of(variable)
      raise ValueError(
        f"The gradient of {path} is row-sparse (tf.IndexedSlices), but {path}"
        " was not declared as an embedding table. Before `build`, call"
        f" optimizer.update_by_rows(var_names=[{path!r}])."
      )
    return row_sparse.to_dense(grad, variable)

  @contextlib.contextmanager
  def in_force(
    self, sums: Sequence[Gradient], variables: Sequence[Variable]
  ) -> Iterator[Sequence[Gradient]]:
    """Makes the user's optimizer update only rows; yields the sums."""
    if not self.is_by_rows:
      yield (
        list(map(row_sparse.to_dense, sums, variables))
        if self.is_lazy
        else sums
      )
      return
    if self.is_lazy:
      sums = list(map(row_sparse.merge_duplicates, sums))
    tables = [
      variable
      for total, variable in zip(sums, variables, strict=True)
      if isinstance(total, tf.IndexedSlices)
    ]
    # `_update_rows` decays the rows in the batch alone.
    with self._wrapped.clipping_rows(self.is_lazy, tables):
      yield sums

  def _update_rows(
    self,
    update_step: Callable[..., None],
    grad: tf.IndexedSlices,
    variable: Variable,
    *rate: Any,
  ) -> None:
    """Runs the optimizer's own `update_step` on the rows in the batch."""
    optimizer = self._wrapped.base_optimizer
    if not self.is_by_rows:
      update_step(grad, variable, *rate)
      return
    g: Any
    if self.is_lazy:
      # One row for each index. Hide their number from Keras, which mistakes a
      # gradient with one row for the gradient of a bias.
      i, g = map(_hide_length, (grad.indices, grad.values))
    else:
      # The rows of the batch are a small table, and the gradient stays sparse.
      i, position = tf.unique(grad.indices)
      shape = tf.concat([tf.shape(i), tf.shape(grad.values)[1:]], axis=0)
      g = tf.IndexedSlices(grad.values, position, shape)
    decays = optimizer.weight_decay and self._wrapped.decays(variable)
    # Gather W[i] and S[i], and scatter them back at the end.
    with row_variables.gathered(self._wrapped, variable, i) as rows:
      if decays:
        # W[i] <- W[i] - weight_decay * learning_rate * W[i], before the update
        # as in Keras.
        factor = tf.cast(optimizer.weight_decay, rows.dtype)
        learning_rate = tf.cast(optimizer.learning_rate, rows.dtype)
        rows.assign_sub(rows * factor * learning_rate)
      update_step(g, rows, *rate)  # W[i], S[i] = opt.update(W[i], S[i], g)


def _hide_length(value: Any) -> tf.Tensor:
  tensor = tf.convert_to_tensor(value)
  shape = [None, *tensor.shape[1:]]
  return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)
