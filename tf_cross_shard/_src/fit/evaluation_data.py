"""The data on which callbacks evaluate groups."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf


class EvaluationData:
  """Data for the `evaluate` of a Keras model."""

  def __init__(
    self, validation_data: Any, batch_size: int | None, steps: int | None
  ) -> None:
    """Takes what PerModelMetrics takes; raises an error for wrong data."""
    is_tuple = isinstance(validation_data, (tuple, list))
    given = validation_data if is_tuple else (validation_data,)
    # An array has a shape; a dataset and a generator have none.
    is_wrong = hasattr(validation_data, "__next__") or hasattr(
      validation_data, "shape"
    )
    if is_wrong or len(given) > 3:
      raise TypeError(
        "`validation_data` must be a dataset, (x, y) or (x, y, sample_weight);"
        f" got {type(validation_data).__name__}. Add the targets of an array."
        " Turn a generator into a tf.data.Dataset with cache(), because every"
        " model reads the data."
      )
    if (
      steps is None
      and isinstance(validation_data, tf.data.Dataset)
      and validation_data.cardinality() == tf.data.INFINITE_CARDINALITY
    ):
      raise ValueError(
        "`steps` must be given for `validation_data` without end; got None."
        " Pass the number of batches, for example steps=100, or remove"
        " repeat()."
      )
    data = dict(zip(("x", "y", "sample_weight"), given, strict=False))
    self._arguments = {**data, "batch_size": batch_size, "steps": steps}

  def arguments(self, one_batch: bool = False) -> dict[str, Any]:
    """Returns the arguments of `evaluate`, for one batch or for all."""
    return {**self._batches, **({"steps": 1} if one_batch else {})}

  @property
  def is_by_model(self) -> bool:
    """Whether `per_model` gives each model its own part of the data."""
    spec = getattr(self._batches["x"], "element_spec", None)
    return any(
      isinstance(leaf, tf.TypeSpec)
      and issubclass(leaf.value_type, tf.distribute.DistributedValues)
      for leaf in tf.nest.flatten(spec)
    )

  @functools.cached_property
  def _batches(self) -> dict[str, Any]:
    # From arrays, Keras builds a new dataset in each evaluation, which takes
    # several times longer than the evaluation of a small model.
    *arrays, batch_size, steps = self._arguments.values()
    data = arrays[0]
    if not isinstance(data, tf.data.Dataset):
      if not all(
        isinstance(a, np.ndarray) and a.dtype.kind in "fiub" for a in arrays
      ):
        return self._arguments
      if len(set(map(len, arrays))) > 1:
        return self._arguments  # Keras' error says what is wrong.
      # Keras converts floating-point arrays to `floatx`, but not datasets.
      floatx = tf.keras.backend.floatx()
      rows = tuple(
        a.astype(floatx) if a.dtype.kind == "f" else a for a in arrays
      )
      data = tf.data.Dataset.from_tensor_slices(rows).batch(batch_size or 32)
    elif len(arrays) > 1 or batch_size:
      return self._arguments
    return {"x": data if steps is None else data.take(steps)}
