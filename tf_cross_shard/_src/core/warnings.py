"""Warnings about groups, mainly that something overwrote their values.

TensorFlow and Keras save only the first replica's value of a variable. When
they load or set a value, they give it to every replica. With several groups,
which have different weights, the values of the other groups are then lost, and
no message says so. `GroupWarnings.check` notices it when `fit` ends and when
values of groups are saved or read.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import single_program
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.variables import Variable
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

_MIXED_EVALUATION: Final = (
  "%s trains %d groups, each with its own weights, but Keras' evaluate(),"
  " predict() and fit(validation_data=...) run each row through the weights of"
  " the replica that receives it, so the result describes none of the groups."
  " Use tf_cross_shard.callbacks.PerModelMetrics, which evaluates every model"
  " on all rows; see docs/callbacks.md."
)
_SHARDED_AVERAGES: Final = (
  "%s divides the moving averages among the replicas (`shard_update`), where"
  " Keras' SwapEMAWeights does not find them: fit(validation_data=...)"
  " evaluated other weights. Do not pass the callback; `fit` writes the"
  " averages into the model when it ends."
)
_RESTORED: Final = (
  "%s trains %d groups, and EarlyStopping(restore_best_weights=True) gives all"
  " groups the weights of group 0. Use"
  " tf_cross_shard.callbacks.PerModelEarlyStopping, which gives each model its"
  " own best weights."
)
# The attribute that remembers the groups of the last optimizer that was built
# on a variable.
_TRAINED_BY: Final = "_tf_cross_shard_groups"
_COLLAPSED: Final = (
  "%s trains %d groups, and all groups have the same weights. If the groups"
  " differ in their data or settings, something other than the optimizer, such"
  " as set_weights() or a checkpoint, gave all groups the same weights. Use"
  " tf_cross_shard.Models(model).save() and restore(), which keep the weights"
  " of each group, or average()."
)
_EQUAL_MODELS: Final = (
  "%s trains %d models, and all have the same weights: they began alike, and"
  " saw the same data and settings. Give them other initial weights"
  " (Models.initialize), other settings (schedules.PerModel or the"
  " argument per_model) or other data (tf_cross_shard.per_model)."
)


class GroupWarnings:
  """The warnings of an optimizer with groups, each given once."""

  def __init__(
    self,
    name: str,
    wrapped: wrapped_lib.WrappedOptimizer,
    engine: engine_lib.Engine,
  ) -> None:
    self._name = name
    self._wrapped = wrapped
    self._engine = engine
    self._groups = engine.groups
    # A strategy of models itself warns of what overwrites or drops values.
    self._are_models = single_program.are_models(engine.strategy)
    # Whether PerModelMetrics evaluates each model: `fit` needs no warning then.
    self.is_evaluated_by_group = False
    self._logged: set[str] = set()
    # The count of steps when groups were last meant to have these weights.
    self._accepted_at: int | None = None
    # Compare groups only in one process: workers would have to wait for each
    # other.
    self._is_one_process = len(engine.local_replicas) == engine.num_replicas > 1

  def check(self) -> None:
    """Warns if all groups have the same weights although they have trained."""
    # Groups that differ in their data or settings have different weights after
    # one step, unless all were overwritten: some, or steps ago, goes unnoticed.
    # The smallest variable is compared first, and usually differs.
    text = _EQUAL_MODELS if self._are_models else _COLLAPSED
    if (
      text in self._logged
      or self._groups.num_groups == 1
      or not self._is_one_process
      or not self._wrapped.is_built
      or not replicas_lib.is_between_steps()
      or self._count_steps() in (0, self._accepted_at)
      or (self._are_models and self._engine.strategy.extended.are_overwritten)
    ):
      return
    variables = sorted(
      self._wrapped.whole.trainable_variables,
      key=lambda v: tf.TensorShape(v.shape).num_elements() or 0,
    )
    if variables and self._are_equal(variables, is_alarm=True):
      self._log_once(text)

  def before_build(self, variables: Iterable[Variable]) -> None:
    """Remembers the groups that train variables; checks the members' values.

    They differ if an optimizer with different groups has trained a variable.
    """
    self._check_callbacks()
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
              " Models(model, optimizer).average() with that optimizer"
              " first, or use its groups."
            )
      setattr(variable, _TRAINED_BY, groups)

  def end_fit(self, has_sharded_averages: bool) -> None:
    """Warns if groups were overwritten, or if Keras evaluates wrong weights."""
    self.check()
    self._check_callbacks()  # Of a later `fit`, too.
    if (
      has_sharded_averages
      and _SHARDED_AVERAGES not in self._logged
      and keras_private.callback_of_fit("SwapEMAWeights")
    ):
      self._logged.add(_SHARDED_AVERAGES)
      logging.warning(_SHARDED_AVERAGES, self._name)

  def _check_callbacks(self) -> None:
    """Warns of an EarlyStopping that will give all groups the same weights."""
    stop = keras_private.callback_of_fit("EarlyStopping")
    if not self._are_models and getattr(stop, "restore_best_weights", False):
      self._log_once(_RESTORED)

  def accept(self) -> None:
    if self._groups.num_groups > 1 and self._wrapped.is_built:
      self._accepted_at = self._count_steps()

  def before_saving(self, variables: Iterable[Variable]) -> None:
    """Warns that saving loses values if the groups have different values."""
    self.check()
    if self._groups.num_groups == 1 or self._are_models:
      return
    if not self._are_equal(variables):
      self._log_once(
        "%s trains %d groups, which differ in weights and slots. Checkpoints,"
        " model files, pickles and copies hold only the first replica's values."
        " Use tf_cross_shard.Models(model).save() and restore(), which keep"
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
    """Warns unless groups were made alike, or each is evaluated alone."""
    # Keras evaluates each of the models of a strategy on all rows.
    is_right = self._are_models or self.is_evaluated_by_group
    if not is_right and self._accepted_at is None:
      self._log_once(_MIXED_EVALUATION)

  def _are_equal(
    self, variables: Iterable[Variable], is_alarm: bool = False
  ) -> bool:
    """Returns whether all groups are in this process and have equal values.

    For an alarm, weights that are NaN in all groups do not count as equal.
    """
    if not self._is_one_process or not replicas_lib.is_between_steps():
      return False
    copies = replicas_lib.Copies(self._engine.strategy)
    for variable in variables:
      values = copies.here(variable)
      if not replicas_lib.are_alike(values[m[0]] for m in self._groups):
        return False
      if is_alarm and np.isnan(values[0]).any():
        return False
    return True

  def _count_steps(self) -> int:
    return int(self._wrapped.iterations())

  def _log_once(self, text: str) -> None:
    if self._groups.num_groups > 1 and text not in self._logged:
      self._logged.add(text)
      logging.warning(text, self._name, self._groups.num_groups)
