"""DiLoCo: groups train independently and synchronize every H steps.

group 0   θ ── H steps ──▶ θ_0 ─┐
                                ├─▶ Δ = mean over the groups of (θ - θ_i)
group 1   θ ── H steps ──▶ θ_1 ─┘

θ = OuterOpt(θ, Δ);  θ_0 = θ_1 = θ
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import optimizer_state
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.core.gradients import compression
from tf_cross_shard._src.core.optimizer import CrossShardOptimizer
from tf_cross_shard._src.core.variables import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.fit import keras_fit, per_model_callback
from tf_cross_shard._src.models import group_state


class OuterOptimizer(per_model_callback.PerModelCallback):
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

  After an outer step, all replicas have exactly the same weights. Each
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

  `Models.save` and `restore` include the anchor, the state of the outer
  optimizer and the number of steps. Call `build` or `fit` before you save or
  restore.

  References:
    Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
    Models, 2023 (arXiv 2311.08105), Algorithm 1.
    Stich, Local SGD Converges Fast and Communicates Little, 2018 (arXiv
    1805.09767): the special case with SGD(1.0) as the outer optimizer.
    Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018 (arXiv
    1808.07217): post-local SGD, which is local SGD after a synchronous warm-up.
  """

  _supports_tf_logs = True  # so that tf_keras does not convert the logs
  acts_on_batches = True
  follows_groups = True

  def __init__(
    self,
    every: int,
    optimizer: Optimizer | str | None = None,
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
    every = per_model_callback.check_count("every", every, 1, "steps")
    warmup = per_model_callback.check_count("warmup", warmup, 0, "steps")
    compression.as_wire_dtype(wire_dtype)
    self._every = every
    self._given = optimizer
    self._warmup = warmup
    self._wire_dtype = wire_dtype
    self._outer: Any = None  # None until the anchor is made.
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
    return self._outer

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
    is_new = self._outer is None
    self._bind(optimizer, model)
    if not is_new:
      self._restart_from_weights()

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
    self._bind(getattr(model, "optimizer", None), model)

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    self._is_first_execution = True

  def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
    """Remembers the first batch of an execution."""
    self._first_batch = batch
    if self._is_first_execution:
      # Not in on_train_begin, where other callbacks restore a checkpoint.
      self._is_first_execution = False
      self._restart_from_weights()

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
    if self._outer is None:
      raise RuntimeError(
        "OuterOptimizer has no anchor yet. Call build(optimizer, model) before"
        " the first step."
      )
    calls_before = int(self._calls.numpy())
    self._calls.assign_add(calls)
    window = optimizer_state.pipeline_of(self._trained_by).calls_per_step
    steps = (calls_before + calls) // window
    # H counts from the end of the warm-up.
    before, now = calls_before // window - self._warmup, steps - self._warmup
    is_due = before // self._every < now // self._every
    if before < 0:
      is_due = before < now
    is_finite = not is_due or self._synchronize(is_warmup=before < 0)
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

  def _synchronize(self, is_warmup: bool) -> bool:
    """Moves the anchor and all groups to it; returns whether Δ was finite."""
    is_finite = self._averaging_step() if is_warmup else self._outer_step()
    # Otherwise you would get a warning that something made the groups equal.
    group_state.accept_values(self._trained_by)
    strategy = optimizer_state.pipeline_of(self._trained_by).engine.strategy
    # All replicas return the same.
    return bool(strategy.experimental_local_results(is_finite)[0])

  def _restart_from_weights(self) -> None:
    """Makes the weights the anchor if all groups have the same weights."""
    copies = _copies(self._trained_by)
    copies.compare_workers("the anchor of an OuterOptimizer")
    # Groups that are equal between two outer steps were set by something else,
    # say by a checkpoint. The outer optimizer would take that for a gradient.
    if all(len(set(row)) == 1 for row in copies.digests(self._weights)):
      for anchor, weight in zip(self._anchors, self._weights, strict=True):
        copies.write(anchor, copies.here(weight))

  def _bind(self, optimizer: Any, model: Any) -> None:
    """Makes the anchor of a model; later, checks that it is the same model."""
    trained_by = _find_optimizer_with_groups(optimizer)
    # Of a model, or of a list.
    trained = getattr(model, "trainable_variables", model)
    weights = list(map(variables_lib.native, trained))
    if self._outer is None:
      self._make_anchor(trained_by, weights)
    elif trained_by is not self._trained_by or (
      list(map(id, weights)) != list(map(id, self._weights))
    ):
      raise ValueError(
        "This OuterOptimizer belongs to another model or optimizer, or the"
        " model trains other variables now. Create a new OuterOptimizer for"
        " each model."
      )

  def _make_anchor(
    self, trained_by: CrossShardOptimizer, weights: list[Variable]
  ) -> None:
    """Makes the anchor, once all workers and all groups agree on the start."""
    if not weights:
      raise ValueError(
        "`model` has nothing to train. If it is not built, give it a"
        " tf.keras.Input, or call it on a batch."
      )
    outer = _make_outer_optimizer(trained_by, self._given, self._wire_dtype)
    settings = workers_lib.setting_lines(
      every=self._every,
      warmup=self._warmup,
      wire_dtype=self._wire_dtype,
      optimizer=outer.get_config(),
    )
    copies = _copies(trained_by)
    copies.compare_workers("the start of an OuterOptimizer", settings)
    _check_weights_are_equal(copies, weights)
    self._trained_by, self._weights = trained_by, weights  # θ_i
    pipeline = optimizer_state.pipeline_of(trained_by)
    make_variable = pipeline.wrapped.make_variable
    with pipeline.engine.making_variables():
      self._anchors = [  # θ
        make_variable(tf.convert_to_tensor(weight), f"anchor{i}")
        for i, weight in enumerate(weights)
      ]
    self._outer_step = _make_step(outer, self._anchors, weights)
    if self._warmup:
      # SGD(1.0) moves the anchor to θ - mean(θ - θ_i), the mean of all θ_i.
      sgd = pipeline.wrapped.keras.optimizers.SGD(1.0)
      average = _make_outer_optimizer(trained_by, sgd, self._wire_dtype)
      self._averaging_step = _make_step(average, self._anchors, weights)
    # One variable on the host for all replicas: reading it waits for no device.
    with variables_lib.outside_of_strategies(), tf.device("CPU:0"):
      self._calls = tf.Variable(
        0, trainable=False, dtype=tf.int64, name="outer_calls"
      )
    outer_variables = optimizer_state.state_variables(outer)
    pipeline.attached = (self._calls, *self._anchors, *outer_variables)
    self._outer = outer


def _copies(optimizer: CrossShardOptimizer) -> replicas_lib.Copies:
  engine = optimizer_state.pipeline_of(optimizer).engine
  return replicas_lib.Copies(engine.strategy)


def _check_weights_are_equal(
  copies: replicas_lib.Copies, weights: Sequence[Variable]
) -> None:
  for weight, digests in zip(weights, copies.digests(weights), strict=True):
    if len(set(digests)) > 1:
      raise ValueError(
        "`model` must have the same weights in all groups at the start;"
        f" {variables_lib.path_of(weight)} differs. Call"
        " Models(model).average(), or continue with the"
        " OuterOptimizer that trained the groups."
      )


def _find_optimizer_with_groups(optimizer: Any) -> CrossShardOptimizer:
  """Returns the CrossShardOptimizer in an optimizer; it has several groups."""
  all_nested = [
    nested
    for nested in nested_lib.nested_optimizers(optimizer)
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


def _make_outer_optimizer(
  optimizer: CrossShardOptimizer,
  outer: Optimizer | str | None,
  wire_dtype: str | tf.DType | None = None,
) -> CrossShardOptimizer:
  """Wraps a copy of the outer optimizer; the copy averages over the groups."""
  pipeline = optimizer_state.pipeline_of(optimizer)
  keras = pipeline.wrapped.keras.optimizers
  if outer is None:  # The outer optimizer of the paper.
    outer = keras.SGD(0.7, momentum=0.9, nesterov=True)
  with pipeline.engine.making_variables():
    copied: Optimizer = keras.get(outer)
    config = copied.get_config()
    if "name" in config:
      # A checkpoint finds variables by name. Keras would number its own name.
      config["name"] = "outer"
    # This package's class of the optimizer, not a subclass of it.
    package_class = next(
      kind
      for kind in type(optimizer).__mro__
      if kind.__module__.split(".")[0] == "tf_cross_shard"
    )
    return package_class(
      type(copied).from_config(config),
      "mean",
      "OuterOptimizer",
      _across(optimizer.groups),
      loss_averaged_over="replica",
      wire_dtype=wire_dtype,
      skip_nonfinite=True,
      scale_gradients=True,
    )


def _across(groups: groups_lib.Groups) -> groups_lib.Groups:
  """Returns groups across groups: [[0, 2], [1, 3]] for [[0, 1], [2, 3]]."""
  rows = [sorted(row) for row in zip(*map(sorted, groups), strict=True)]
  orders = {tuple(map(groups.index_of, row)) for row in rows}
  # Sums of three or more terms depend on the order of the replicas. If two of
  # the new groups visit the given groups in different orders, the members of a
  # given group would get different bits. One group of all has the same mean.
  if groups.num_groups > 2 and len(orders) > 1:
    return groups_lib.contiguous(groups.num_replicas, groups.num_replicas)
  return groups_lib.Groups(tuple(map(tuple, rows)))


def _make_step(
  outer: CrossShardOptimizer,
  anchors: Sequence[Variable],
  weights: Sequence[Variable],
) -> Callable[[], Any]:
  """Returns a function that takes an outer step, unless Δ is not finite."""
  engine = optimizer_state.pipeline_of(outer).engine
  with engine.making_variables():
    outer.build(anchors)
  natives = [variables_lib.native(anchor) for anchor in anchors]

  def replica_step() -> tf.Tensor:
    with engine.isolate():
      skipped = tf.convert_to_tensor(outer.skipped_steps)
      # θ - θ_i, of which the outer optimizer takes the mean: Δ.
      differences = [
        anchor - weight for anchor, weight in zip(natives, weights, strict=True)
      ]
    # θ = OuterOpt(θ, Δ)
    outer.apply_gradients(zip(differences, anchors, strict=True))
    with engine.isolate():
      is_finite = tf.equal(outer.skipped_steps, skipped)
      # θ_i = θ
      for anchor, weight in zip(natives, weights, strict=True):
        weight.assign(tf.where(is_finite, anchor, weight))
    return is_finite

  # A partial object instead of a lambda: TensorFlow identifies a lambda by its
  # code, and would warn that several OuterOptimizers retrace one function.
  run = functools.partial(engine.strategy.run, replica_step)
  return tf.function(run, autograph=False)
