"""Reads and sets the learning rate of each group between epochs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import per_group as per_group_lib
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core.inner import names as names_lib


def prepare(model: Any, caller: str) -> None:
  """Makes the learning rates of an optimizer's groups settable.

  The learning rates of a PerGroup are constants of the traced step. This
  function creates a variable by which each group multiplies its constant. In a
  training loop of your own, call it before the first step is traced. Errors
  name the `caller`.

  Raises:
    TypeError: If the optimizer has a learning rate schedule.
    ValueError: If a learning rate of a PerGroup is 0, which no factor
      can change.
  """
  rates = per_group_lib.rates_of(model.optimizer)
  if rates is not None and rates.rate_factor is None:
    if any(map(callable, rates.rates)):
      raise TypeError(
        f"{caller} sets learning rates, but PerGroup holds schedules:"
        f" {rates.rates}. Pass numbers to PerGroup."
      )
    if 0 in rates.rates:
      raise ValueError(
        f"{caller} multiplies learning rates, but PerGroup holds 0:"
        f" {rates.rates}. Use a small number instead of 0."
      )
    per_group_lib.create_rate_factor(model.optimizer)
    # An earlier `fit` may have traced steps without the variable.
    model.make_train_function(force=True)
  if not is_one_number(model):
    raise TypeError(
      f"{caller} needs an optimizer with one learning rate that can be set, not"
      " a schedule. Give it a number, or schedules.PerGroup of numbers."
    )


def is_one_number(model: Any) -> bool:
  """Returns whether the optimizer has one learning rate that can be set."""
  return len(names_lib.rate_variables(model.optimizer)) == 1


def read(model: Any) -> list[float]:
  rates = per_group_lib.rates_of(model.optimizer)
  if rates is not None:
    return rates.values(step=0)  # They are numbers.
  [variable] = names_lib.rate_variables(model.optimizer)
  copies = replicas_lib.Copies(model.distribute_strategy)
  groups = names_lib.groups_of(model.optimizer, copies.engine.strategy)
  first = copies.read(variable, [members[0] for members in groups])
  return list(map(float, first))


def write(model: Any, rates: Sequence[float]) -> None:
  [variable] = names_lib.rate_variables(model.optimizer)
  copies = replicas_lib.Copies(model.distribute_strategy)
  groups = names_lib.groups_of(model.optimizer, copies.engine.strategy)
  per_group = per_group_lib.rates_of(model.optimizer)
  dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
  factors = np.divide(rates, 1.0 if per_group is None else per_group.rates)
  here = copies.engine.replicas_here
  copies.write(
    variable, [factors[groups.index_of(r)].astype(dtype) for r in here]
  )
