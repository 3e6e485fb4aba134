"""Dropout with a rate for each group."""

import abc
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import (
  group_context,
  group_value,
  settings,
  validation,
)
from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib

# Keras' layer creates a random number generator if its rate is not 0.
_ANY_RATE: Final = 0.5


# `layers.GroupDropout` of each Keras derives from this class and then from the
# `Dropout` of this Keras.
class GroupDropoutBase(abc.ABC):
  """Keras' `Dropout` layer, except that each group has its own rate.

  In training, an element of the input is set to 0 with the probability `rate`
  of the group, and multiplied by `1 / (1 - rate)` otherwise. Outside training,
  the layer returns its input.

  The state of the random numbers is a variable of the layer. A `fit` that
  resumes from `callbacks.BackupAndRestore` draws the numbers that it would have
  drawn without the interruption. Plain models, as from
  `Models(model)[i]`, have Keras' `Dropout` with the rate of the group
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

  # As the layers of Keras 3 and tf_keras have them.
  dtype: Any
  noise_shape: Any

  def __init__(
    self, rates: Any, groups: Any = None, seed: Any = None, **kwargs: Any
  ) -> None:
    """Creates the layer.

    Args:
      rates: One number for each group, from 0 to less than 1: a list, an array
        or a variable; or a `value` of `callbacks.OptunaSearch`.
      groups: A `Groups`, a `group_assignment`, or a `CrossShardOptimizer`. None
        stands for the groups of the strategy's CrossShardOptimizer; without
        such an optimizer, each model of a `VectorizedStrategy` is a group.
      seed: The seed of the random numbers. None draws a seed.
      **kwargs: Other arguments of Keras' `Dropout`, such as `name`.

    Raises:
      TypeError: If `rates` is not a list, or a rate is not a number.
      ValueError: If there is not one rate for each group, if a rate is out of
        range, or if `groups` is malformed. If `groups` are not those of the
        strategy's CrossShardOptimizer, the first step raises the error.
    """
    if hasattr(groups, "apply_gradients"):
      groups = nested_lib.groups_of(groups)
    groups = settings.as_groups(groups)
    if not isinstance(rates, group_value.GroupValue):
      rates = _checked(rates, groups)
    layer: Any = super()
    layer.__init__(_ANY_RATE, seed=seed, **kwargs)
    self.rate = None  # Keras' layer has one rate.
    # Keras would track a variable that is an attribute.
    self._read_rates: Callable[[], Any] = lambda: rates
    self._groups = groups

  @property
  def rates(self) -> list[float]:
    """The present rate of each group."""
    rates = self._read_rates()
    if isinstance(rates, group_value.GroupValue):
      return [] if rates.numbers is None else rates.numbers.read()
    return _decimals(rates)

  @property
  def groups(self) -> list[list[int]] | None:
    """The groups as lists of replica ids; None for those of the optimizer."""
    return None if self._groups is None else self._groups.to_lists()

  def call(self, inputs: Any, training: Any = None) -> Any:
    """Returns the inputs, in training with elements that are set to 0."""
    if not training:
      return inputs
    rates = self._read_rates()
    if isinstance(rates, group_value.GroupValue):
      rate = tf.convert_to_tensor(rates)
    else:
      rate = group_context.row_of_group(rates, self._groups, "rates")
    return tf.nn.experimental.stateless_dropout(
      inputs,
      tf.cast(rate, inputs.dtype),
      self._next_seed(),
      noise_shape=self._shape_of_noise(inputs),
    )

  def _shape_of_noise(self, inputs: Any) -> Any:
    """Returns the argument `noise_shape`, with sizes for None; or None."""
    if self.noise_shape is None:
      return None
    sizes = tf.shape(inputs)
    return [
      sizes[i] if size is None else size
      for i, size in enumerate(self.noise_shape)
    ]

  @abc.abstractmethod
  def _next_seed(self) -> tf.Tensor:
    """Returns the seed of this call, two integers, and advances the state."""

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments of the constructor, with rates as numbers."""
    config = super().get_config()  # type: ignore[misc]  # of Keras' layer
    config.pop("rate")
    return {**config, "rates": self.rates, "groups": self.groups}

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> Any:
    """Creates a layer from what `get_config` returned."""
    config = dict(config)
    if "group_assignment" in config:  # The name in version 1.0.0.
      config["groups"] = config.pop("group_assignment")
    return cls(**config)


def _checked(rates: Any, groups: groups_lib.Groups | None) -> Any:
  """Returns rates, a list or a variable, or raises an error."""
  if not isinstance(rates, tf.Variable):
    try:
      rates = list(rates)
    except TypeError as error:
      raise TypeError(
        "`rates` must be a list with one rate for each group, such as"
        f" [0.1, 0.2]; got {rates!r}. For one rate in all groups, use Keras'"
        " Dropout."
      ) from error
    if not all(map(validation.is_number, rates)):
      raise TypeError(f"`rates` must contain numbers; got {rates!r}.")
  numbers = _decimals(rates)
  if groups is not None and len(numbers) != groups.num_groups:
    raise ValueError(
      f"`rates` must contain one number for each of the {groups.num_groups}"
      f" groups {groups.to_lists()}; got {numbers}."
    )
  if not all(0 <= rate < 1 for rate in numbers):
    raise ValueError(
      f"`rates` must be at least 0 and less than 1; got {numbers}."
    )
  return rates


def _decimals(rates: Any) -> list[float]:
  """Returns rates as decimal numbers: 0.1, not 0.10000000149011612."""
  rates = np.asarray(tf.convert_to_tensor(rates, tf.float32))
  return [float(str(rate)) for rate in rates]
