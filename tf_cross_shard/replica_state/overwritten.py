"""Warnings that the values of groups were lost, or are about to be.

TensorFlow and Keras save the first replica's value of a variable, and what they
load or set they give to every replica. Where groups are trained apart, the
others' values are lost without a word.

Between two steps nothing but the optimizer should change the weights. So every
replica compares a number of one small variable with what its last step left:

                 group 0           group 1
    step k       left  = 0.3       left  = 0.7
    set_weights
    step k + 1   found = 0.3       found = 0.3     group 1 was changed

Replicas tell each other nothing for that, and nobody waits for a device: the
numbers are read when `fit` ends and when something is saved.
"""

import contextlib
import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard import variables as variables_lib

_SEEN: Final = 256  # elements of the smallest variable: enough, and cheap
_thread = threading.local()


class OverwriteWatch:
  """What an optimizer with groups warns of, each thing once."""

  def __init__(self, name: str, groups: Any, engine: Any) -> None:
    """Makes each replica's `left`, `before` and `found`; NaN is unknown."""
    self._name = name
    self._groups = groups
    self._engine = engine
    self._variable: Any = None
    self._said: set[str] = set()
    self._state: Any = None
    # Workers would have to wait for each other to make it, and to compare.
    is_one_process = len(engine.replicas_here) == engine.num_replicas > 1
    if groups.num_groups > 1 and is_one_process:
      with tf.init_scope(), engine.strategy.scope():
        self._state = tf.Variable([np.nan] * 3, trainable=False, name="left")

  def before_building(self, variables: Iterable[Any]) -> None:
    """Warns of batch normalization that mixes groups."""
    if self._groups.num_groups == 1:
      return
    trained = set(map(id, variables))
    if any(
      id(variables_lib.native(weight)) in trained
      for layer in _synchronized_layers()
      for weight in layer.trainable_weights
    ):
      self._say(
        "%s trains %d groups apart, but BatchNormalization(synchronized=True)"
        " normalizes over all replicas, so that groups see each other's"
        " examples. Use tf_cross_shard.layers.SyncBatchNormalization(groups).",
      )

  def before_step(self, variables: Iterable[Any]) -> tf.Tensor | None:
    """What others changed before this replica's step; for `after_step`."""
    if self._state is None:
      return None
    if self._variable is None:
      self._variable = min(
        variables,
        key=lambda v: tf.TensorShape(v.shape).num_elements() or np.inf,
      )
    state = self._state.read_value()
    now = _number(self._variable)
    changed = tf.stack([state[0], now])  # In a first step `before` is NaN.
    return tf.where(now != state[0], changed, state[1:])

  def after_step(self, found: tf.Tensor | None) -> None:
    """Notes what this replica's step left."""
    if found is not None:
      left = _number(self._variable)
      self._state.assign(tf.concat([[left], found], axis=0))

  def look(self) -> None:
    """Warns if others than the optimizer made groups equal that differed."""
    if self._variable is None or not is_between_steps():
      return
    [left, before, found] = np.stack(self._copies(self._state)).T
    now = [value.tobytes() for value in self._copies(self._variable)]
    # One member of each group, that of the first replica first.
    first, *others = sorted(min(members) for members in self._groups)
    changed = [i for i in (first, *others) if not np.isnan(before[i])]
    # It may be the first one's weights that all were given.
    is_each = changed == others or (
      changed == [first, *others] and _differ(before[changed])
    )
    if (len(set(now)) == 1 and _differ(left)) or (
      is_each and not _differ(found[changed])
    ):
      self._say(
        "%s trained %d groups apart, and then something else set the weights of"
        " all alike: set_weights(), EarlyStopping(restore_best_weights=True) or"
        " a checkpoint, say. Use tf_cross_shard.replica_state.save() and"
        " restore(), which keep each group's, or average().",
      )

  def forget(self) -> None:
    """Takes what groups have now as it is meant to be."""
    if self._state is not None:
      for copy in self._engine.strategy.experimental_local_results(self._state):
        copy.assign([np.nan] * 3)

  def before_saving(self) -> None:
    """Warns of what is lost, unless the saver keeps every group's values."""
    self.look()
    if self._groups.num_groups == 1 or getattr(_thread, "all_kept", False):
      return
    self._say(
      "%s trains %d groups, which differ in weights and slots. Checkpoints,"
      " model files, pickles and copies hold the first replica's only. Use"
      " tf_cross_shard.replica_state.save() and restore(), which keep all.",
    )

  def blends(self) -> None:
    """Warns that Keras evaluates or predicts rows by different groups."""
    if self._groups.num_groups > 1:
      self._say(
        "%s trains %d groups, and Keras' evaluate(), predict() and"
        " fit(validation_data=...) let each replica answer for its share of the"
        " rows by its own group's weights: the result belongs to no group. Use"
        " tf_cross_shard.callbacks.GroupMetrics, which judges every group on"
        " all rows; see docs/group_callbacks.md.",
      )

  def _say(self, text: str) -> None:
    """Warns once."""
    if text not in self._said:
      self._said.add(text)
      logging.warning(text, self._name, self._groups.num_groups)

  def _copies(self, variable: Any) -> list[Any]:
    """The replicas' values: the first few elements."""
    strategy = self._engine.strategy
    copies = strategy.experimental_local_results(variables_lib.native(variable))
    return [np.ravel(copy.numpy())[:_SEEN] for copy in copies]


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
  """A context for savers that keep every group's values."""
  before = getattr(_thread, "all_kept", False)
  _thread.all_kept = True
  try:
    yield
  finally:
    _thread.all_kept = before


def is_between_steps() -> bool:
  """Whether values of all replicas can be read here."""
  return tf.executing_eagerly() and (
    not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context()
  )


def _synchronized_layers() -> Iterator[Any]:
  """Keras' layers that reduce over all replicas.

  An optimizer is told of variables only, and these do not know their layers.
  """
  kinds = tuple(
    sys.modules[name].layers.Layer
    for name in ("keras", "tf_keras")
    if name in sys.modules
  )
  for found in gc.get_objects():
    # By its type: asking some objects for their class runs code of theirs.
    if (
      issubclass(type(found), kinds)
      and getattr(found, "synchronized", False)
      and not hasattr(found, "group_assignment")
    ):
      yield found


def _number(variable: Any) -> tf.Tensor:
  """A number that tells values of a variable from most others."""
  flat = tf.reshape(tf.convert_to_tensor(variable), [-1])[:_SEEN]
  flat = tf.cast(flat, tf.float32)
  # Not the mere sum: softmax keeps that of its biases.
  return tf.reduce_sum(flat * tf.range(1.0, (flat.shape[0] or 1) + 1.0))


def _differ(numbers: Any) -> bool:
  """Whether numbers are known, and not all equal."""
  return bool(np.min(numbers) < np.max(numbers))
