"""Reads and sets numbers of each model between epochs: learning rates."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core.per_model import schedule as per_model_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib


def check(model: Any, caller: str) -> None:
  """Raises `TypeError` unless the models' learning rates can be set."""
  rates = per_model_lib.rates_of(model.optimizer)
  if rates is not None and any(map(callable, rates.rates)):
    raise TypeError(
      f"{caller} sets learning rates, but PerModel holds schedules:"
      f" {rates.rates}. Pass numbers to PerModel."
    )
  if len(nested_lib.rate_variables(model.optimizer)) != 1:
    raise TypeError(
      f"{caller} needs an optimizer with one learning rate that can be set, not"
      " a schedule. Give it a number, or schedules.PerModel of numbers."
    )


def read(model: Any) -> list[float]:
  rates = per_model_lib.rates_of(model.optimizer)
  if rates is not None:
    return rates.values(step=0)  # They are numbers.
  [variable] = nested_lib.rate_variables(model.optimizer)
  return read_variable(model, variable)


def write(model: Any, rates: Sequence[float]) -> None:
  per_model = per_model_lib.rates_of(model.optimizer)
  if per_model is not None:
    per_model.assign(rates)
    return
  [variable] = nested_lib.rate_variables(model.optimizer)
  write_variable(model, variable, rates)


def read_variable(model: Any, variable: Any) -> list[float]:
  """Returns the number that each model has of a scalar variable."""
  copies = replicas_lib.Copies(model.distribute_strategy)
  groups = nested_lib.groups_of(model.optimizer, copies.engine.strategy)
  first = copies.read(variable, [members[0] for members in groups])
  return list(map(float, first))


def write_variable(model: Any, variable: Any, row: Sequence[float]) -> None:
  """Sets the number that each model has of a scalar variable."""
  copies = replicas_lib.Copies(model.distribute_strategy)
  groups = nested_lib.groups_of(model.optimizer, copies.engine.strategy)
  dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
  here = copies.engine.local_replicas
  copies.write(
    variable, [np.asarray(row[groups.index_of(r)], dtype) for r in here]
  )
