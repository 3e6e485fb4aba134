"""The state of an OuterOptimizer: the anchor, and the step that moves it.

All groups start from the same weights, the anchor θ. Group i then trains for H
steps, which gives it its own weights θ_i. An outer step treats the mean
distance from the anchor as a gradient:

    group 0   θ ── H steps ──▶ θ_0 ─┐
                                    ├─▶ Δ = mean over the groups of (θ - θ_i)
    group 1   θ ── H steps ──▶ θ_1 ─┘

    θ   = OuterOpt(θ, Δ)      on every replica, with the same Δ
    θ_i = θ                   so that all groups continue from the same weights

The outer optimizer is also a CrossShardOptimizer. Its groups connect the groups
of the user: where replicas `[[0, 1], [2, 3]]` train together, the outer
optimizer averages over `[[0, 2], [1, 3]]`.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import parts
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.core.optimizer import CrossShardOptimizer
from tf_cross_shard._src.replica_state import group_state

# Classes of TensorFlow and Keras, which have no types.
KerasOptimizer: TypeAlias = Any  # of Keras 3 or tf_keras; or the name of one
Variable: TypeAlias = Any  # a tf.Variable or a keras.Variable

# ----------------------------------------------------------- outer optimizer


def make_outer_optimizer(
  optimizer: CrossShardOptimizer,
  outer: KerasOptimizer | None,
  wire_dtype: str | tf.DType | None = None,
) -> CrossShardOptimizer:
  """Wraps a copy of the outer optimizer; the copy averages over the groups.

  Args:
    optimizer: The optimizer that trains the groups.
    outer: An optimizer of the same Keras, or its name. None for the optimizer
      of the DiLoCo paper.
    wire_dtype: The dtype in which groups send the differences.
  """
  keras = sys.modules[parts.package_of(optimizer)].optimizers
  if outer is None:
    outer = keras.SGD(0.7, momentum=0.9, nesterov=True)
  with parts.step_of(optimizer).engine.making_variables():
    outer = keras.get(outer)
    config = outer.get_config()
    if "name" in config:
      # A checkpoint finds variables by name. Keras would number its own name.
      config["name"] = "outer"
    return _package_class(optimizer)(
      type(outer).from_config(config),
      "mean",
      "OuterOptimizer",
      _across(optimizer.groups),
      loss_averaged_over="replica",
      wire_dtype=wire_dtype,
      skip_nonfinite=True,
      scale_gradients=True,
    )


def _package_class(
  optimizer: CrossShardOptimizer,
) -> Callable[..., CrossShardOptimizer]:
  """Returns this package's class of an optimizer, not a subclass of it."""
  return next(
    kind
    for kind in type(optimizer).__mro__
    if kind.__module__.split(".")[0] == "tf_cross_shard"
  )


def _across(groups: groups_lib.Groups) -> groups_lib.Groups:
  """Returns groups with one member of each of the given groups.

  >>> _across(groups_lib.contiguous(4, 2)).to_lists()
  [[0, 2], [1, 3]]

  Floating-point sums of three or more terms depend on their order, which is the
  order of the replicas. If that order visits the given groups differently in
  two of the new groups, members of a given group would receive different bits.
  In that case all replicas form one group, which has the same mean.
  """
  rows = [sorted(row) for row in zip(*map(sorted, groups), strict=True)]
  orders = {tuple(map(groups.index_of, row)) for row in rows}
  if groups.num_groups > 2 and len(orders) > 1:
    return groups_lib.contiguous(groups.num_replicas, groups.num_replicas)
  return groups_lib.Groups(tuple(map(tuple, rows)))


def _make_step(
  outer: CrossShardOptimizer,
  anchors: Sequence[Variable],
  weights: Sequence[Variable],
) -> Callable[[], Any]:
  """Returns a function that takes one outer step on all replicas.

  The function returns a boolean for each replica: whether the outer gradient
  was finite. If it was not, the step changes nothing on any replica.
  """
  engine = parts.step_of(outer).engine
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


# --------------------------------------------------------------------- state


class OuterState:
  """Everything that an OuterOptimizer keeps for one model.

  Attributes:
    trained_by: The optimizer that trains the groups.
    weights: θ_i, the model's trained variables; each group has its own values.
    anchors: θ, one variable for each weight, with equal values on all replicas.
    optimizer: The outer optimizer, which `make_outer_optimizer` returned.
    calls: How often `apply_gradients` was called: an int64 variable.
  """

  def __init__(
    self,
    trained_by: CrossShardOptimizer,
    weights: Sequence[Variable],
    optimizer: CrossShardOptimizer,
    *,
    has_warmup: bool,
  ) -> None:
    """Creates the variables, with the weights as the first anchor.

    All groups have equal weights. If `has_warmup`, this also creates the
    optimizer that `average` needs.
    """
    self.trained_by = trained_by
    self.weights = list(weights)
    self.optimizer = optimizer
    step = parts.step_of(trained_by)
    with step.engine.making_variables():
      self.anchors = [
        step.inner.make_variable(tf.convert_to_tensor(weight), f"anchor{i}")
        for i, weight in enumerate(weights)
      ]
    self._outer_step = _make_step(optimizer, self.anchors, self.weights)
    if has_warmup:
      # SGD(1.0) moves the anchor to θ - mean(θ - θ_i), the mean of all θ_i.
      keras = sys.modules[parts.package_of(trained_by)]
      sgd = keras.optimizers.SGD(1.0)
      average = make_outer_optimizer(trained_by, sgd, optimizer.wire_dtype)
      self._averaging_step = _make_step(average, self.anchors, self.weights)
    # One variable on the host for all replicas: reading it waits for no device.
    with variables_lib.outside_of_strategies(), tf.device("CPU:0"):
      self.calls = tf.Variable(
        0, trainable=False, dtype=tf.int64, name="outer_calls"
      )
    outer_variables = [v for _, v in names_lib.state_variables(optimizer)]
    step.attached = (self.calls, *self.anchors, *outer_variables)

  def belongs_to(
    self, trained_by: CrossShardOptimizer, weights: Sequence[Variable]
  ) -> bool:
    """Returns whether this state belongs to an optimizer and these weights."""
    return trained_by is self.trained_by and list(map(id, weights)) == list(
      map(id, self.weights)
    )

  def count(self, calls: int) -> tuple[int, int]:
    """Counts calls of `apply_gradients`.

    Returns how many steps were complete before these calls, and are now.
    """
    before = int(self.calls.numpy())
    self.calls.assign_add(calls)
    window = parts.step_of(self.trained_by).calls_per_step
    return before // window, (before + calls) // window

  def take_outer_step(self) -> bool:
    """Moves the anchor, and all groups to it; see the top of this file.

    Returns whether the outer gradient was finite. If not, nothing changes.
    """
    return self._synchronize(self._outer_step)

  def average(self) -> bool:
    """Gives the anchor and all groups the mean of the groups' weights.

    Returns whether the mean was finite. If not, nothing changes.
    """
    return self._synchronize(self._averaging_step)

  def _synchronize(self, step: Callable[[], Any]) -> bool:
    """Takes a step that makes all groups equal; returns whether it did."""
    is_finite = step()
    # Otherwise you would get a warning that something made the groups equal.
    group_state.accept_values(self.trained_by)
    strategy = parts.step_of(self.trained_by).engine.strategy
    # All replicas return the same.
    return bool(strategy.experimental_local_results(is_finite)[0])

  def restart_from_weights(self) -> None:
    """Makes the weights the anchor if all groups have the same weights.

    Groups that are equal between two outer steps were set by something else,
    say by a checkpoint. Without a new anchor, the outer optimizer would take
    that change for a gradient. Where groups differ, nothing happens.
    """
    copies = replicas_lib.Copies(parts.step_of(self.trained_by).engine.strategy)
    copies.compare_workers("the anchor of an OuterOptimizer")
    if all(len(set(row)) == 1 for row in copies.digests(self.weights)):
      for anchor, weight in zip(self.anchors, self.weights, strict=True):
        copies.write(anchor, copies.here(weight))
