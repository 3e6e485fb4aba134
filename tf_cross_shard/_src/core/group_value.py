"""A number in layers and losses that differs between groups."""

from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import group_context, group_variable
from tf_cross_shard._src.core.reduce import isolation


class GroupValue:
  """The number of the calling replica's group, where it is read.

  It stands for a number in layers and losses: TensorFlow and Keras convert it
  to a scalar tensor, float32 unless they ask for another dtype. Outside
  replicas, it is the number of group 0, or of the group that `as_group` sets.

  Attributes:
    name: Its name.
    numbers: The numbers of all groups; None until the groups are known.
  """

  def __init__(self, name: str) -> None:
    self.name = name
    self.numbers: group_variable.GroupVariable | None = None

  def __repr__(self) -> str:
    numbers = None if self.numbers is None else self.numbers.read()
    return f"<value of {self.name!r} by group: {numbers}>"

  def create(self, num_groups: int, strategy: tf.distribute.Strategy) -> None:
    """Creates the numbers, which are 0, and their variable."""
    if self.numbers is None or len(self.numbers) != num_groups:
      self.numbers = group_variable.GroupVariable(
        f"values/{self.name}", [0.0] * num_groups
      )
    self.numbers.create(strategy)

  def __neg__(self) -> tf.Tensor:
    return -tf.convert_to_tensor(self)

  def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
    dtype = dtype or tf.float32
    strategy = tf.distribute.get_strategy()
    if self.numbers is None:
      groups = group_context.groups_of_strategy(strategy)
      if groups is None or isolation.current_replica() is None:
        return tf.zeros([], dtype, name=name)
      self.create(groups.num_groups, strategy)
    assert self.numbers is not None
    numbers, group = self.numbers.as_tensor(), group_context.current_group()
    groups = (
      None if group is not None else group_context.groups_of_strategy(strategy)
    )
    if groups is not None and groups.num_groups == len(self.numbers):
      group = group_context.group_here(groups)
    number = tf.gather(numbers, 0 if group is None else group)
    return tf.cast(number, dtype, name=name)


def _operator(name: str) -> Any:
  def operate(value: GroupValue, *others: Any) -> Any:
    dtypes = [other.dtype for other in others if tf.is_tensor(other)]
    return getattr(tf.convert_to_tensor(value, *dtypes), name)(*others)

  return operate


for _name in ("add", "sub", "mul", "truediv", "pow"):
  setattr(GroupValue, f"__{_name}__", _operator(f"__{_name}__"))
  setattr(GroupValue, f"__r{_name}__", _operator(f"__r{_name}__"))
