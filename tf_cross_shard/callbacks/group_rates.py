"""The learning rate of each group, read and written between epochs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import group_schedule
from tf_cross_shard.inner_optimizer import optimizer_state
from tf_cross_shard.replica_state import group_state, replica_values


def prepare(model: Any, caller: str) -> None:
  """Makes the rates of an optimizer's groups ones that can be set.

  PerGroup's are multiplied by a variable, which is made here: in a loop of
  one's own before the first step is traced.
  """
  rates = group_schedule.rates_of(model.optimizer)
  if rates is not None and rates.rate_factor is None:
    if any(map(callable, rates.rates)):
      raise TypeError(
        f"{caller} sets numbers, and PerGroup holds schedules: {rates.rates}."
        " Give it numbers."
      )
    if 0 in rates.rates:
      raise ValueError(
        f"{caller} multiplies rates, and PerGroup holds 0: {rates.rates}. Give"
        " it a small number."
      )
    with model.distribute_strategy.scope():
      rates.rate_factor = tf.Variable(1.0, trainable=False, name="rate_factor")
    model.make_train_function(force=True)  # An earlier `fit` has traced.
  if not is_one_number(model):
    raise TypeError(
      f"{caller} needs an optimizer with one learning rate that can be set: a"
      " number, or schedules.PerGroup of numbers. Its schedule decides"
      " otherwise."
    )


def is_one_number(model: Any) -> bool:
  """Returns whether an optimizer has one rate, which can be set."""
  return len(optimizer_state.learning_rates(model.optimizer)) == 1


def read(model: Any) -> list[float]:
  """Returns each group's rate."""
  [variable] = optimizer_state.learning_rates(model.optimizer)
  copies = replica_values.Copies(model.distribute_strategy)
  groups = group_state.groups_of(model.optimizer, copies.engine.num_replicas)
  first = copies.read(variable, [members[0] for members in groups])
  scales = _scales(model, groups.num_groups)
  return [float(r) * scale for r, scale in zip(first, scales, strict=True)]


def write(model: Any, rates: Sequence[float]) -> None:
  """Gives each group its rate."""
  [variable] = optimizer_state.learning_rates(model.optimizer)
  copies = replica_values.Copies(model.distribute_strategy)
  groups = group_state.groups_of(model.optimizer, copies.engine.num_replicas)
  scales = _scales(model, groups.num_groups)
  dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
  factors = np.divide(rates, scales).astype(dtype)
  here = copies.engine.replicas_here
  copies.write(variable, [factors[groups.index_of(r)] for r in here])


def _scales(model: Any, num_groups: int) -> list[float]:
  """Returns what the variable is multiplied by in each group."""
  per_group = group_schedule.rates_of(model.optimizer)
  ones = [1.0] * num_groups
  return ones if per_group is None else list(map(float, per_group.rates))
