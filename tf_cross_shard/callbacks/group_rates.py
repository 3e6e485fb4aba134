"""The learning rate of each group, read and written between epochs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import group_schedule
from tf_cross_shard.inner_optimizer import optimizer_state
from tf_cross_shard.replica_state import group_state


def prepare(model: Any, caller: str) -> None:
  """Makes the rates of an optimizer's groups ones that can be set.

  PerGroup's are multiplied by a variable, which is made here: in a loop of
  one's own before the first step is traced.

  Args:
    model: A compiled model.
    caller: Who is to set them, for errors.

  Raises:
    TypeError: If a schedule decides about a rate.
    ValueError: If a rate is 0, which nothing can be multiplied to.
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
  if len(optimizer_state.learning_rates(model.optimizer)) != 1:
    raise TypeError(
      f"{caller} needs an optimizer with one learning rate that can be set: a"
      " number, or schedules.PerGroup of numbers. Its schedule decides"
      " otherwise."
    )


def read(model: Any, whole: group_state.GroupCopies) -> list[float]:
  """Returns each group's rate."""
  [variable] = optimizer_state.learning_rates(model.optimizer)
  replicas = whole.copies.read(variable, range(whole.groups.num_replicas))
  return [
    float(replicas[members[0]]) * scale
    for members, scale in zip(whole.groups, _scales(model, whole), strict=True)
  ]


def write(
  model: Any, whole: group_state.GroupCopies, rates: Sequence[float]
) -> None:
  """Gives each group its rate."""
  [variable] = optimizer_state.learning_rates(model.optimizer)
  replicas = whole.copies.read(variable, range(whole.groups.num_replicas))
  scales = _scales(model, whole)
  for members, rate, scale in zip(whole.groups, rates, scales, strict=True):
    for replica in members:
      replicas[replica] = np.asarray(rate / scale, replicas[replica].dtype)
  here = whole.copies.engine.replicas_here
  whole.copies.write(variable, replicas[here.start : here.stop])


def _scales(model: Any, whole: group_state.GroupCopies) -> list[float]:
  """Returns what the variable is multiplied by in each group."""
  per_group = group_schedule.rates_of(model.optimizer)
  ones = [1.0] * whole.groups.num_groups
  return ones if per_group is None else list(map(float, per_group.rates))
