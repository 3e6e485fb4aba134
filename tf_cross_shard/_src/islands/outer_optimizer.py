"""DiLoCo: groups train independently and synchronize every H steps.

    group 0   θ ── H steps ──▶ θ_0 ─┐
                                    ├─▶ Δ = mean over the groups of (θ - θ_i)
    group 1   θ ── H steps ──▶ θ_1 ─┘

    θ = OuterOpt(θ, Δ);  θ_0 = θ_1 = θ

The callback in this file decides when groups synchronize, and checks that all
of them start from equal weights. `outer_state.py` holds the anchor θ and takes
the step that moves it.

References:
  Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
  Models, 2023 (arXiv 2311.08105), Algorithm 1.
  Stich, Local SGD Converges Fast and Communicates Little, 2018 (arXiv
  1805.09767): the special case with SGD(1.0) as the outer optimizer.
  Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018 (arXiv
  1808.07217): post-local SGD, which is local SGD after a synchronous warm-up.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import parts
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import packing
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.core.optimizer import CrossShardOptimizer
from tf_cross_shard._src.core.workers import agreement
from tf_cross_shard._src.fit import group_callback, keras_fit
from tf_cross_shard._src.islands import outer_state


class OuterOptimizer(group_callback.GroupCallback):
  """Trains groups independently and synchronizes them every H steps (DiLoCo).

  Use it where the network between the groups is slow. A CrossShardOptimizer
  sums gradients within its groups in every step. Between the groups, one
  tensor for each weight is sent every H steps.

  The algorithm is Algorithm 1 of the DiLoCo paper. With k groups, θ_i the
  weights of group i, and θ the anchor, from which all groups start, outer step
  t is

      θ_i  = θ(t-1), then H steps by group i     wrapped optimizer
      Δ    = 1/k Σ_i (θ(t-1) - θ_i)              outer gradient
      θ(t) = OuterOpt(θ(t-1), Δ)                 outer optimizer
      θ_i  = θ(t)                                in all groups

  After an outer step, all replicas have the same weights, bit for bit. Each
  group keeps its own slots and other state of the wrapped optimizer.
  Variables that are not trained, such as the statistics of batch normalization,
  are not synchronized.

  Pass an OuterOptimizer to `fit` as a callback. In your own training loop, call
  `build` before the first step and `step` after every step:

  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable(0.0)
  ...   optimizer = CrossShardOptimizer(
  ...     tf.keras.optimizers.SGD(1.0), group_assignment=[[0], [1]]
  ...   )
  >>> outer = callbacks.OuterOptimizer(2, tf.keras.optimizers.SGD(1.0))
  >>> outer.build(optimizer, [weight])
  >>> @tf.function
  ... def step():
  ...   def replica_step():
  ...     replica = tf.distribute.get_replica_context().replica_id_in_sync_group
  ...     grad = tf.cast(replica, tf.float32)  # 0 and 1
  ...     return optimizer.apply_gradients([(grad, weight)])
  ...
  ...   return strategy.run(replica_step)
  >>> for _ in range(2):
  ...   _ = step()
  ...   outer.step()
  ...   print([float(copy.numpy()) for copy in weight.values])
  [0.0, -1.0]
  [-1.0, -1.0]

  A step is one batch of `fit` or one call of `step`. With gradient
  accumulation, the batches or calls of one window are one step. Steps that a
  group skips (`skip_nonfinite`) count, so all groups synchronize at the
  same time. With `steps_per_execution`, groups synchronize at the end of the
  execution in which H steps are complete.

  `replica_state.save` and `restore` include the anchor, the state of the outer
  optimizer and the number of steps. Call `build` or `fit` before you save or
  restore.
  """

  _supports_tf_logs = True  # so that tf_keras does not convert the logs
  acts_on_batches = True
  follows_groups = True

  def __init__(
    self,
    every: int,
    optimizer: outer_state.KerasOptimizer | None = None,
    *,
    warmup: int = 0,
    wire_dtype: Literal["bfloat16", "float16"] | tf.DType | None = None,
  ) -> None:
    """Checks the arguments. `build` or `fit` creates the variables.

    Args:
      every: H, how many steps groups train independently.
      optimizer: The outer optimizer, or its name, from the Keras of your
        model. The attribute `optimizer` is a copy of it, created in the scope
        of the strategy. None means SGD(0.7, momentum=0.9, nesterov=True), the
        outer optimizer of the DiLoCo paper. With SGD(1.0), all groups receive
        the mean of their weights.
      warmup: How many steps at the start of the training are synchronous. After
        each of them, all groups receive the mean of their weights, without the
        outer optimizer. H counts from their end.
      wire_dtype: `"bfloat16"` or `"float16"`, to which differences from the
        anchor are rounded when groups send them to each other. None sends
        exact differences.

    Raises:
      ValueError: If `every`, `warmup` or `wire_dtype` has no valid value.
    """
    super().__init__()
    every = group_callback.check_count("every", every, 1, "steps")
    warmup = group_callback.check_count("warmup", warmup, 0, "steps")
    packing.as_wire_dtype(wire_dtype)
    self._every = every
    self._optimizer = optimizer
    self._warmup = warmup
    self._wire_dtype = wire_dtype
    self._state: outer_state.OuterState | None = None
    self._first_batch = 0  # of the execution that is running
    self._is_first_execution = False  # of this call of `fit`
    self._has_warned = False

  @property
  def optimizer(self) -> Any:
    """The outer optimizer, a CrossShardOptimizer. None before `build`.

    To change the outer learning rate, set `learning_rate` of this object. Its
    `skipped_steps` counts how often, after the warm-up, groups were not
    synchronized because the outer gradient was not finite.
    """
    return None if self._state is None else self._state.optimizer

  def build(self, optimizer: Any, model: Any) -> None:
    """Stores the weights of the model as the first anchor.

    `fit` calls this method. In your own loop, call it before the first step,
    and again whenever something else has set the weights, such as `set_weights`
    or a checkpoint. If all groups have equal weights, these weights become the
    anchor. Otherwise, a second call does nothing.

    Args:
      optimizer: The CrossShardOptimizer that trains the model, with at least
        two groups.
      model: A built model, of which the trainable variables are synchronized,
        or a list of variables.

    Raises:
      TypeError: If `optimizer` is not a CrossShardOptimizer.
      ValueError: If there is only one group, if groups start from different
        weights, or if this object was built for another model.
    """
    is_new = self._state is None
    state = self._state_for(optimizer, model)
    if not is_new:
      state.restart_from_weights()

  def step(self) -> None:
    """Counts a step, and synchronizes the groups after every H-th step.

    Call it after every training step, outside `strategy.run`. On several
    machines, all workers call it.

    Raises:
      RuntimeError: If `build` was not called, or inside of a `tf.function`.
    """
    self._count(1)

  def set_model(self, model: Any) -> None:
    """Makes the anchor when `fit` or your own loop sets the model.

    Args:
      model: A compiled and built model.
    """
    super().set_model(model)
    self._state_for(getattr(model, "optimizer", None), model)

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    self._is_first_execution = True

  def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
    """Remembers the first batch of an execution."""
    self._first_batch = batch
    if self._is_first_execution:
      # Not in on_train_begin, where other callbacks restore a checkpoint.
      self._is_first_execution = False
      self._built_state().restart_from_weights()

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    """Counts the batches of an execution."""
    if self.is_skipping_batches:
      return
    # Keras 3 reports a full execution even if the epoch ended within it.
    steps_per_epoch = (self.params or {}).get("steps") or np.inf
    left = steps_per_epoch - self._first_batch
    self._count(int(min(keras_fit.batches_per_call(self.model), left)))

  def _implements_train_batch_hooks(self) -> bool:
    return True

  def _count(self, calls: int) -> None:
    """Counts calls of the optimizer, and synchronizes the groups when due."""
    replicas_lib.check_between_steps()
    state = self._built_state()
    steps_before, steps = state.count(calls)
    # H counts from the end of the warm-up.
    before, now = steps_before - self._warmup, steps - self._warmup
    is_finite = True
    if before < 0:
      if before < now:
        is_finite = state.average()
    elif before // self._every < now // self._every:
      is_finite = state.take_outer_step()
    if not is_finite and not self._has_warned:
      self._has_warned = True
      logging.warning(
        "Groups were not synchronized after %d steps, and continue to train"
        " independently: the weights of a group are not finite, or too large"
        " for `wire_dtype`. OuterOptimizer.optimizer.skipped_steps counts how"
        " often this happens after the warm-up. To keep weights finite, give"
        " the CrossShardOptimizer skip_nonfinite=True.",
        steps,
      )

  def _built_state(self) -> outer_state.OuterState:
    """Returns the state; raises `RuntimeError` if there is none yet."""
    if self._state is None:
      raise RuntimeError(
        "OuterOptimizer has no anchor yet. Call build(optimizer, model) before"
        " the first step."
      )
    return self._state

  def _state_for(self, optimizer: Any, model: Any) -> outer_state.OuterState:
    """Returns the state for a model, which the first call creates."""
    trained_by = _find_optimizer_with_groups(optimizer)
    weights = _trained_weights(model)
    if self._state is None:
      self._state = self._make_state(trained_by, weights)
    elif not self._state.belongs_to(trained_by, weights):
      raise ValueError(
        "This OuterOptimizer belongs to another model or optimizer, or the"
        " model trains other variables now. Create a new OuterOptimizer for"
        " each model."
      )
    return self._state

  def _make_state(
    self,
    trained_by: CrossShardOptimizer,
    weights: Sequence[outer_state.Variable],
  ) -> outer_state.OuterState:
    """Makes the anchor, once all workers and all groups agree on the start."""
    if not weights:
      raise ValueError(
        "`model` has nothing to train. If it is not built, give it a"
        " tf.keras.Input, or call it on a batch."
      )
    outer = outer_state.make_outer_optimizer(
      trained_by, self._optimizer, self._wire_dtype
    )
    settings = agreement.setting_lines(
      every=self._every,
      warmup=self._warmup,
      wire_dtype=self._wire_dtype,
      optimizer=outer.get_config(),
    )
    copies = replicas_lib.Copies(parts.step_of(trained_by).engine.strategy)
    copies.compare_workers("the start of an OuterOptimizer", settings)
    _check_weights_are_equal(copies, weights)
    return outer_state.OuterState(
      trained_by, weights, outer, has_warmup=self._warmup > 0
    )


def _trained_weights(model: Any) -> list[outer_state.Variable]:
  """Returns the variables of a model, or of a list, that groups synchronize."""
  return [
    variables_lib.native(variable)
    for variable in getattr(model, "trainable_variables", model)
  ]


def _check_weights_are_equal(
  copies: replicas_lib.Copies, weights: Sequence[outer_state.Variable]
) -> None:
  """Raises `ValueError` unless all replicas have the same weights."""
  for weight, digests in zip(weights, copies.digests(weights), strict=True):
    if len(set(digests)) > 1:
      raise ValueError(
        "`model` must have the same weights in all groups at the start;"
        f" {variables_lib.path_of(weight)} differs. Call"
        " replica_state.average(optimizer, model), or continue with the"
        " OuterOptimizer that trained the groups."
      )


def _find_optimizer_with_groups(optimizer: Any) -> CrossShardOptimizer:
  """Returns the CrossShardOptimizer within an optimizer.

  Raises an error unless there is one, and it has several groups.
  """
  all_nested = [
    nested
    for nested in names_lib.nested_optimizers(optimizer)
    if isinstance(nested, CrossShardOptimizer)
  ]
  if not all_nested:
    raise TypeError(
      "`optimizer` must be a CrossShardOptimizer with groups; got"
      f" {type(optimizer).__name__}."
    )
  kinds = {nested.groups for nested in all_nested}
  if len(kinds) > 1 or all_nested[0].groups.num_groups == 1:
    raise ValueError(
      "`optimizer` must have several groups for OuterOptimizer to synchronize;"
      f" got {' and '.join(str(kind.to_lists()) for kind in kinds)}. Give the"
      " CrossShardOptimizer a `group_assignment`, for example [[0, 1], [2, 3]]."
    )
  return all_nested[0]
