"""Reads and sets the learning rate of each group between epochs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import per_model as per_model_lib
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib


def check(model: Any, caller: str) -> None:
  """Raises `TypeError` unless the groups' learning rates can be set.

  The error names the `caller`.
  """
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
  variable, copies, groups = _of_number(model)
  first = copies.read(variable, [members[0] for members in groups])
  return list(map(float, first))


def write(model: Any, rates: Sequence[float]) -> None:
  per_group = per_model_lib.rates_of(model.optimizer)
  if per_group is not None:
    per_group.assign(rates)
    return
  variable, copies, groups = _of_number(model)
  dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
  here = copies.engine.local_replicas
  copies.write(
    variable, [np.asarray(rates[groups.index_of(r)], dtype) for r in here]
  )


def _of_number(
  model: Any,
) -> tuple[Any, replicas_lib.Copies, groups_lib.Groups]:
  """Returns the variable of a learning rate, its copies, and the groups."""
  [variable] = nested_lib.rate_variables(model.optimizer)
  copies = replicas_lib.Copies(model.distribute_strategy)
  groups = nested_lib.groups_of(model.optimizer, copies.engine.strategy)
  return variable, copies, groups
