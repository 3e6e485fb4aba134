"""Warnings that the values of groups were lost, or are about to be.

TensorFlow and Keras save the first replica's value of a variable, and what they
load or set they give to every replica. Where groups are trained apart, the
others' values are lost without a word.

Between two steps nothing but the optimizer should change the weights. So every
replica compares a number of one small variable with what its last step left:

                 group 0           group 1
    step k       left  = 0.3       left  = 0.7
    set_weights
    step k + 1   start = 0.3       start = 0.3     group 1 was changed

Replicas tell each other nothing for that, and nobody waits for a device: the
numbers are read when `fit` ends and when something is saved.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.replica_state import replica_values

_BLENDED: Final = (
  "%s trains %d groups, and Keras' evaluate(), predict() and"
  " fit(validation_data=...) let each replica answer for its share of the rows"
  " by its own group's weights: the result belongs to no group. Use"
  " tf_cross_shard.callbacks.GroupMetrics, which judges every group on all"
  " rows; see docs/group_callbacks.md."
)
_SEEN: Final = 256  # elements of the smallest variable: enough, and cheap


class OverwriteWatch:
  """The warnings of an optimizer with groups, each given once."""

  def __init__(self, name: str, engine: Any) -> None:
    """Makes each replica's `left`, `before` and `start`; NaN is unknown."""
    self._name = name
    self._groups = groups = engine.groups
    self._engine = engine
    self._variable: Any = None
    # Whether callbacks that know of groups look at them.
    self.is_judged_by_group = False
    self.accepted = 0  # how often others have set the groups' state
    self._said: set[Any] = set()
    self._state: Any = None
    # Workers would have to wait for each other to make it, and to compare.
    is_one_process = len(engine.replicas_here) == engine.num_replicas > 1
    if groups.num_groups > 1 and is_one_process:
      with tf.init_scope(), engine.strategy.scope():
        self._state = tf.Variable([np.nan] * 3, trainable=False, name="left")

  @contextlib.contextmanager
  def step(self, variables: Iterable[Any]) -> Iterator[None]:
    """Notes what others changed before a replica's step, and what it left."""
    if self._state is None:
      yield
      return
    with self._engine.isolate():
      if self._variable is None:
        self._variable = min(
          map(variables_lib.distributed, variables),
          key=lambda v: tf.TensorShape(v.shape).num_elements() or np.inf,
        )
      state = self._state.read_value()
      now = _number(self._variable)
      changed = tf.stack([state[0], now])  # In a first step `before` is NaN.
      start = tf.where(now != state[0], changed, state[1:])
    yield
    with self._engine.isolate():
      left = _number(self._variable)
      self._state.assign(tf.concat([[left], start], axis=0))

  def check(self) -> None:
    """Warns if others than the optimizer made groups equal that differed."""
    if self._variable is None or not replica_values.is_between_steps():
      return
    copies = replica_values.Copies(self._engine.strategy)
    [left, before, start] = np.stack(copies.here(self._state)).T
    now = [value.tobytes() for value in copies.here(self._variable)]
    # One member of each group, that of the first replica first.
    first, *others = sorted(min(members) for members in self._groups)
    changed = [i for i in (first, *others) if not np.isnan(before[i])]
    # It may be the first one's weights that all were given.
    is_each = changed == others or (
      changed == [first, *others] and _differ(before[changed])
    )
    if (len(set(now)) == 1 and _differ(left)) or (
      is_each and not _differ(start[changed])
    ):
      self._say(
        "%s trained %d groups apart, and then something else set the weights of"
        " all alike: set_weights(), EarlyStopping(restore_best_weights=True) or"
        " a checkpoint, say. Use tf_cross_shard.replica_state.save() and"
        " restore(), which keep each group's, or average().",
      )

  def end_fit(self) -> None:
    """Warns of what `fit` may have done, or its user may do next."""
    self.check()
    if not self.is_judged_by_group:
      self._say(_BLENDED, logging.info)

  def accept(self) -> None:
    """Takes what groups have now as it is meant to be."""
    self.accepted += 1
    if self._state is not None:
      for copy in self._engine.strategy.experimental_local_results(self._state):
        copy.assign([np.nan] * 3)

  def before_saving(self, variables: Iterable[Any]) -> None:
    """Warns of what is lost, unless groups have the same of `variables`."""
    self.check()
    if self._groups.num_groups > 1 and not self._are_equal(variables):
      self._say(
        "%s trains %d groups, which differ in weights and slots. Checkpoints,"
        " model files, pickles and copies hold the first replica's only. Use"
        " tf_cross_shard.replica_state.save() and restore(), which keep all.",
      )

  def check_layers(self, layers: Iterable[Any]) -> None:
    """Warns of batch normalization that mixes groups."""
    if self._groups.num_groups > 1 and any(
      getattr(layer, "synchronized", False)
      and not hasattr(layer, "group_assignment")
      for layer in layers
    ):
      self._say(
        "%s trains %d groups apart, but BatchNormalization(synchronized=True)"
        " normalizes over all replicas, so that groups see each other's"
        " examples. Use tf_cross_shard.layers.SyncBatchNormalization(groups).",
      )

  def before_evaluating(self) -> None:
    """Warns that Keras evaluates or predicts rows by different groups."""
    self._say(_BLENDED)

  def _are_equal(self, variables: Iterable[Any]) -> bool:
    """Whether all groups are in this process and have the same values."""
    if self._state is None or not replica_values.is_between_steps():
      return False
    copies = replica_values.Copies(self._engine.strategy)
    for variable in variables:
      values = copies.here(variable)
      if not replica_values.are_alike(values[m[0]] for m in self._groups):
        return False
    return True

  def _say(self, text: str, log: Callable[..., None] | None = None) -> None:
    """Warns once of what concerns groups."""
    if self._groups.num_groups > 1 and (text, log) not in self._said:
      self._said.add((text, log))
      (log or logging.warning)(text, self._name, self._groups.num_groups)


def _number(variable: Any) -> tf.Tensor:
  """Returns a number that tells values of a variable from most others."""
  flat = tf.reshape(tf.convert_to_tensor(variable), [-1])[:_SEEN]
  flat = tf.cast(flat, tf.float32)
  # Not the mere sum: softmax keeps that of its biases.
  return tf.reduce_sum(flat * tf.range(1.0, (flat.shape[0] or 1) + 1.0))


def _differ(numbers: Any) -> bool:
  """Whether numbers are known, and not all equal."""
  return bool(np.min(numbers) < np.max(numbers))
