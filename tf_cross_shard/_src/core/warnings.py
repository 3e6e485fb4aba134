"""Warnings about groups, mainly that something overwrote their values.

TensorFlow and Keras save only the first replica's value of a variable. When
they load or set a value, they give it to every replica. With several groups,
which have different weights, the values of the other groups are then lost, and
no message says so.

Between two steps only the optimizer should change the weights. So every replica
computes a number (a checksum) from one small variable at the end of a step, and
compares it at the start of the next step:

                 group 0         group 1
    step k       end   = 0.3     end   = 0.7
    set_weights
    step k + 1   start = 0.3     start = 0.3     group 1 was overwritten

Replicas exchange nothing for the checksums, and the host does not wait for a
device in any step: the host reads the numbers when `fit` ends and when you
save.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import keras_private

_MIXED_EVALUATION: Final = (
  "%s trains %d groups, each with its own weights, but Keras' evaluate(),"
  " predict() and fit(validation_data=...) run each row through the weights of"
  " the replica that receives it, so the result describes none of the groups."
  " Use tf_cross_shard.callbacks.GroupMetrics, which evaluates every group on"
  " all rows; see docs/group_callbacks.md."
)
_SHARDED_AVERAGES: Final = (
  "%s divides the moving averages among the replicas (`shard_update`), but"
  " Keras' SwapEMAWeights cannot read such averages, and evaluated different"
  " weights. Remove SwapEMAWeights: `fit` writes the averages into the model"
  " when it ends."
)
# The attribute that remembers the groups of the last optimizer that was built
# on a variable.
_TRAINED_BY: Final = "_tf_cross_shard_groups"
# The checksum reads at most this number of elements of the smallest variable,
# which is enough and costs little.
_CHECKSUM_ELEMENTS: Final = 256


class GroupWarnings:
  """The warnings of an optimizer with groups, each given once."""

  def __init__(self, name: str, engine: Any) -> None:
    """Creates the warnings of the optimizer with this name and this engine."""
    self._name = name
    self._groups = groups = engine.groups
    self._engine = engine
    self._variable: Any = None  # The variable of the checksums.
    # Whether a callback evaluates every group. Then `fit` needs no warning.
    self.is_evaluated_by_group = False
    self._logged: set[str] = set()
    # Each replica's checksums [end of the last step, before, after]; NaN means
    # unknown. `before` and `after` describe the last change between two steps.
    self._checksums: Any = None
    # Watch only in one process: workers would have to wait for each other to
    # create the variable, and to compare.
    self._is_one_process = len(engine.replicas_here) == engine.num_replicas > 1
    if groups.num_groups > 1 and self._is_one_process:
      with tf.init_scope(), engine.strategy.scope():
        self._checksums = tf.Variable(
          [np.nan] * 3, trainable=False, name="checksums"
        )

  @contextlib.contextmanager
  def step(self, variables: Iterable[Any]) -> Iterator[None]:
    """Notes checksums before and after the step of a replica."""
    if self._checksums is None:
      yield
      return
    with self._engine.isolate():
      if self._variable is None:
        self._variable = min(
          map(variables_lib.distributed, variables),
          key=lambda v: tf.TensorShape(v.shape).num_elements() or np.inf,
        )
      checksums = self._checksums.read_value()
      last_end = checksums[0]  # NaN in the first step
      start = _checksum(self._variable)
      # Keep (before, after) of the last change that no step made.
      change = tf.where(
        start != last_end, tf.stack([last_end, start]), checksums[1:]
      )
    yield
    with self._engine.isolate():
      end = _checksum(self._variable)
      self._checksums.assign(tf.concat([[end], change], axis=0))

  def check(self) -> None:
    """Warns if something else has made the weights of all groups equal."""
    if self._variable is None or not replicas_lib.is_between_steps():
      return
    copies = replicas_lib.Copies(self._engine.strategy)
    # One checksum for each replica.
    [end, before, after] = np.stack(copies.here(self._checksums)).T
    values = [value.tobytes() for value in copies.here(self._variable)]
    # Case 1: at the end of the last step groups differed, and now they are
    # equal.
    are_equal_now = len(set(values)) == 1 and _differ(end)
    # Case 2: the change happened before some earlier step. Look at one replica
    # of each group; the first is replica 0.
    first, *others = sorted(min(members) for members in self._groups)
    changed = [i for i in (first, *others) if not np.isnan(before[i])]
    # Replica 0's group looks unchanged if every group received the weights of
    # replica 0's group.
    were_all_set = changed == others or (
      changed == [first, *others] and _differ(before[changed])
    )
    if are_equal_now or (were_all_set and not _differ(after[changed])):
      self._log_once(
        "%s trains %d groups, each with its own weights, but something other"
        " than the optimizer, such as set_weights(),"
        " EarlyStopping(restore_best_weights=True) or a checkpoint, gave all"
        " groups the same weights. Use tf_cross_shard.replica_state.save() and"
        " restore(), which keep the weights of each group, or average().",
      )

  def before_build(self, variables: Iterable[Any]) -> None:
    """Remembers the groups that train variables; checks the members' values.

    Raises:
      ValueError: If an optimizer with different groups has trained a variable,
        and the copies of the members of a group now differ.
    """
    groups = self._groups
    for variable in map(variables_lib.distributed, variables):
      earlier = getattr(variable, _TRAINED_BY, groups)
      if (
        earlier != groups
        and self._is_one_process
        and replicas_lib.is_between_steps()
      ):
        copies = replicas_lib.Copies(self._engine.strategy).here(variable)
        for members in groups:
          if not replicas_lib.are_alike(copies[i] for i in members):
            raise ValueError(
              f"`group_assignment` is {groups.to_lists()}, but"
              f" {variable.name} differs between the replicas {list(members)},"
              " because an optimizer with the groups"
              f" {earlier.to_lists()} has trained it. Call"
              " replica_state.average(optimizer, model) with that optimizer"
              " first, or use its groups."
            )
      setattr(variable, _TRAINED_BY, groups)

  def end_fit(self, has_sharded_averages: bool) -> None:
    """Warns if groups were overwritten, or if Keras evaluated wrong weights.

    Args:
      has_sharded_averages: Whether each member keeps one part of the moving
        averages.
    """
    self.check()
    arguments = keras_private.arguments_of_fit()
    has_validated = arguments.get("validation_data") is not None
    if has_validated and not self.is_evaluated_by_group:
      self._log_once(_MIXED_EVALUATION)
    used = getattr(arguments.get("callbacks"), "callbacks", ())
    swaps = any(type(c).__name__ == "SwapEMAWeights" for c in used)
    if has_sharded_averages and swaps and _SHARDED_AVERAGES not in self._logged:
      self._logged.add(_SHARDED_AVERAGES)
      logging.warning(_SHARDED_AVERAGES, self._name)

  def accept(self) -> None:
    """Resets all checksums, so that an intended change gives no warning."""
    if self._checksums is not None:
      copies = self._engine.strategy.experimental_local_results(self._checksums)
      for copy in copies:
        copy.assign([np.nan] * 3)

  def before_saving(self, variables: Iterable[Any]) -> None:
    """Warns that saving loses values if the groups have different values."""
    self.check()
    if self._groups.num_groups > 1 and not self._are_equal(variables):
      self._log_once(
        "%s trains %d groups, which differ in weights and slots. Checkpoints"
        " and model files hold only the first replica's values."
        " Use tf_cross_shard.replica_state.save() and restore(), which keep"
        " the values of all groups.",
      )

  def check_layers(self, layers: Iterable[Any]) -> None:
    """Warns about batch normalization over the examples of several groups."""
    if self._groups.num_groups > 1 and any(
      getattr(layer, "synchronized", False)
      and not hasattr(layer, "group_assignment")
      for layer in layers
    ):
      self._log_once(
        "%s trains %d separate groups, but"
        " BatchNormalization(synchronized=True) normalizes over all replicas,"
        " so groups see each other's examples. Use"
        " tf_cross_shard.layers.SyncBatchNormalization(groups).",
      )

  def before_evaluating(self) -> None:
    """Warns that Keras evaluates or predicts rows with different groups."""
    self._log_once(_MIXED_EVALUATION)

  def _are_equal(self, variables: Iterable[Any]) -> bool:
    """Returns whether all groups are in this process and have equal values."""
    if self._checksums is None or not replicas_lib.is_between_steps():
      return False
    copies = replicas_lib.Copies(self._engine.strategy)
    for variable in variables:
      values = copies.here(variable)
      if not replicas_lib.are_alike(values[m[0]] for m in self._groups):
        return False
    return True

  def _log_once(self, text: str) -> None:
    """Logs a warning once, if there are several groups."""
    if self._groups.num_groups > 1 and text not in self._logged:
      self._logged.add(text)
      logging.warning(text, self._name, self._groups.num_groups)


def _checksum(variable: Any) -> tf.Tensor:
  """Returns a number that almost always changes when the variable changes."""
  flat = tf.reshape(tf.convert_to_tensor(variable), [-1])[:_CHECKSUM_ELEMENTS]
  flat = tf.cast(flat, tf.float32)
  # Use a weighted sum: gradients of a softmax do not change the plain sum of
  # its biases.
  return tf.reduce_sum(flat * tf.range(1.0, (flat.shape[0] or 1) + 1.0))


def _differ(numbers: Any) -> bool:
  """Returns whether the numbers differ and none is NaN."""
  return bool(np.min(numbers) < np.max(numbers))
