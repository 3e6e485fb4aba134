"""The predictions of all models.

x [rows, ...] ─ one program for all models ─▶ [num_groups, rows, ...]
"""

import weakref
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import single_program, validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.models import group_state, plain_models

# The program that predicts with all models, for each Keras model.
_programs: Final[weakref.WeakKeyDictionary[Any, Any]] = (
  weakref.WeakKeyDictionary()
)


def predict(model: Any, x: Any, optimizer: Any, batch_size: int) -> Any:
  """Returns `[num_models, rows, ...]`; see `Models.predict`."""
  keras_private.keras_of(model)
  validation.check_integer("batch_size", batch_size, "It counts rows.")
  state = group_state.GroupState(optimizer, model, with_optimizer=False)
  data = x if isinstance(x, tf.data.Dataset) else _rows_of(x, batch_size)
  if data.cardinality() in (0, tf.data.INFINITE_CARDINALITY):
    raise ValueError(
      "`x` must be of one row at least and have an end; got"
      f" {type(x).__name__}. Remove repeat(), or use take(steps)."
    )
  if single_program.are_models(model.distribute_strategy):
    group_state.warn_if_collapsed(optimizer)
    return tf.nest.map_structure(
      lambda *parts: np.concatenate(parts, axis=1),
      *_of_models(model, x, data, state),
    )
  groups = []
  for i in range(state.groups.num_groups):
    plain = plain_models.load(model, i, optimizer)
    with variables_lib.outside_of_strategies():
      arguments = {} if data is x else {"batch_size": batch_size}
      groups.append(plain.predict(x, verbose=0, **arguments))
  return tf.nest.map_structure(lambda *of_groups: np.stack(of_groups), *groups)


def _of_models(
  model: Any, x: Any, data: tf.data.Dataset, state: group_state.GroupState
) -> list[Any]:
  """Returns the predictions of all groups for each batch."""
  strategy = model.distribute_strategy
  program = _programs.get(model)
  if program is None:
    # A reference to the model would keep it in the dictionary.
    live = weakref.ref(model)

    # The name does not say "predict", of which the strategy warns.
    def step(batch: Any) -> Any:
      return live().predict_step(batch)  # type: ignore[union-attr]

    program = _programs[model] = tf.function(
      lambda batch: strategy.run(step, args=(batch,)), autograph=False
    )

  def as_batch(element: Any) -> Any:
    """Returns what Keras' `predict` gives to the model for a batch of `x`."""
    return element if data is x else (tf.nest.pack_sequence_as(x, element),)

  # One trace, also for the last batch, which may be smaller.
  traced = program.get_concrete_function(as_batch(data.element_spec))
  first = [members[0] for members in state.groups]

  def of_groups(values: Any) -> Any:
    rows = strategy.experimental_local_results(values)
    return np.stack([np.asarray(rows[replica]) for replica in first])

  return [
    tf.nest.map_structure(of_groups, traced(as_batch(element)))
    for element in data
  ]


def _rows_of(x: Any, batch_size: int) -> tf.data.Dataset:
  """Returns batches of the arrays in a structure, as one flat tuple."""
  floatx = tf.keras.backend.floatx()

  def as_array(leaf: Any) -> Any:
    if tf.is_tensor(leaf):
      return leaf
    array = np.asarray(leaf)
    # Keras converts floating-point arrays, too.
    return array.astype(floatx) if array.dtype.kind == "f" else array

  leaves = tuple(map(as_array, tf.nest.flatten(x)))
  if not leaves or not all(len(leaf.shape) for leaf in leaves):
    raise TypeError(
      "`x` must be an array, a structure of arrays or a tf.data.Dataset; got"
      f" {type(x).__name__}. Pass np.asarray(x) for a list of rows, or"
      " tf.data.Dataset.from_generator for a generator of batches."
    )
  return tf.data.Dataset.from_tensor_slices(leaves).batch(batch_size)
