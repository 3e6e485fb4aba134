"""Dropout with a rate for each group.

    groups     0      1      2
    rates     0.0    0.2    0.5

Each call draws a seed from a state that is a variable of the layer, so that
backups and `replica_state.save` contain it.
"""

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import group_numbers, settings, validation


# `layers.GroupDropout` of each Keras derives from this class and then from the
# base class of Keras' layers.
class GroupDropoutBase(abc.ABC):
  """Keras' `Dropout` layer, except that each group has its own rate.

  In training, an element of the input is set to 0 with the probability `rate`
  of the group, and multiplied by `1 / (1 - rate)` otherwise. Outside training,
  the layer returns its input.

  The state of the random numbers is a variable of the layer. A `fit` that
  resumes from `callbacks.BackupAndRestore` draws the numbers that it would have
  drawn without the interruption. Plain models, as from
  `replica_state.load_group`, have Keras' `Dropout` with the rate of the group
  in place of this layer, so you can load them without this package.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import groups, layers
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   layer = layers.GroupDropout([0.0, 0.5], groups.singletons(2), seed=1)
  ...   layer.build((None, 3))
  >>> x = tf.ones([1, 3])
  >>> dropped = strategy.run(lambda: layer(x, training=True))
  >>> strategy.experimental_local_results(dropped)[0].numpy()  # rate 0.0
  array([[1., 1., 1.]], dtype=float32)
  """

  dtype: Any  # As the layers of Keras 3 and tf_keras have it.

  def __init__(
    self, rates: Any, group_assignment: Any, seed: Any = None, **kwargs: Any
  ) -> None:
    """Creates the layer.

    Args:
      rates: One number for each group, from 0 to less than 1: a list, an array,
        or a variable.
      group_assignment: The groups of the optimizer: a `Groups` or a
        `group_assignment`.
      seed: The seed of the random numbers. None draws a seed.
      **kwargs: Other arguments of Keras' layers, such as `name`.

    Raises:
      TypeError: If a rate is not a number.
      ValueError: If there is not one rate for each group, if a rate is out of
        range, or if `group_assignment` is malformed.
    """
    groups = settings.required_groups(group_assignment)
    if not isinstance(rates, tf.Variable):
      rates = list(rates)
      if not all(map(validation.is_number, rates)):
        raise TypeError(f"`rates` must contain numbers; got {rates!r}.")
    # Keras would track a variable that is an attribute.
    self._read_rates: Callable[[], Any] = lambda: rates
    numbers = self.rates
    if len(numbers) != groups.num_groups:
      raise ValueError(
        f"`rates` must contain one number for each of the {groups.num_groups}"
        f" groups {groups.to_lists()}; got {numbers}."
      )
    if not all(0 <= rate < 1 for rate in numbers):
      raise ValueError(
        f"`rates` must be at least 0 and less than 1; got {numbers}."
      )
    super().__init__(**kwargs)
    self._groups = groups
    self.seed = seed
    self.supports_masking = True

  @property
  def rates(self) -> list[float]:
    """The present rate of each group."""
    rates = tf.convert_to_tensor(self._read_rates(), tf.float32)
    # Read as decimal numbers: 0.1 is not 0.10000000149011612.
    return [float(str(rate)) for rate in np.asarray(rates)]

  @property
  def group_assignment(self) -> list[list[int]]:
    """The groups as lists of replica ids."""
    return self._groups.to_lists()

  def call(self, inputs: Any, training: Any = None) -> Any:
    """Returns the inputs, in training with elements that are set to 0."""
    if not training:
      return inputs
    rate = group_numbers.per_group(self._read_rates(), self._groups)
    rate = tf.cast(rate, inputs.dtype)
    return tf.nn.experimental.stateless_dropout(inputs, rate, self._next_seed())

  @abc.abstractmethod
  def _next_seed(self) -> tf.Tensor:
    """Returns the seed of this call, two integers, and advances the state."""

  def compute_output_shape(self, input_shape: Any) -> Any:
    return input_shape

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments of the constructor, with rates as numbers."""
    return {
      **super().get_config(),  # type: ignore[misc]  # of Keras' layer
      "rates": self.rates,
      "group_assignment": self.group_assignment,
      "seed": self.seed,
    }
