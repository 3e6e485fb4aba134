"""Islands: groups that train apart and meet only every few steps.

    anchor ─┬─ group 0: H steps ─▶ w_0 ─┐
            │                           ├─ D = mean(anchor - w_i)
            └─ group 1: H steps ─▶ w_1 ─┘
    anchor = outer optimizer(anchor, gradient D);  w_0 = w_1 = anchor

What travels between groups travels once in H steps: all of it at once, or in
fragments that meet in turn, and are waited for later (`fragments`, `delay`).

References:
  Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
  Models, 2023 (arXiv 2311.08105). With SGD(1.0) as the outer optimizer it is
  local SGD: Stich, 2018 (arXiv 1805.09767); with warmup, post-local SGD: Lin et
  al., 2018 (arXiv 1808.07217).
  Douillard et al., Streaming DiLoCo with Overlapping Communication, 2025 (arXiv
  2501.18512): fragments, delay and the mixture of a late result.
  Karimireddy et al., Error Feedback Fixes SignSGD, 2019 (arXiv 1901.09847).
"""

import sys
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard import optimizer as optimizer_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.callbacks import base
from tf_cross_shard.callbacks import fragments as fragments_lib
from tf_cross_shard.coordination import agreement
from tf_cross_shard.gradients import packing
from tf_cross_shard.inner_optimizer import libraries, optimizer_state
from tf_cross_shard.replica_state import (
  group_models,
  group_state,
  replica_values,
)


class OuterOptimizer(base.GroupCallback):
  """Lets groups train apart, and joins them every H steps.

  With `w_i` the weights of group i and `anchor` what all groups started from,
  every H-th step ends with

      D      = mean over groups of (anchor - w_i)
      anchor = update of the outer optimizer, with D as the gradient of anchor
      w_i    = anchor

  after which all replicas have the same weights, to the bit. With P fragments
  that is done with one P-th of the weights in every (H / P)-th step, and with a
  delay of V the new anchor of a meeting in step t comes in step t + V:

      w_i    = alpha * w_i + (1 - alpha) * anchor

  Slots and other state of the encapsulated optimizer stay each group's own, and
  so does what is not trained, say the statistics of batch normalization.

  A callback of `fit`; in a loop of your own call `build` before and `step`
  after each step:

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

  A step is a batch of `fit`, or a call of `step`; with accumulation it is a
  window. Steps that some group skips count too, so that all groups join at one
  place. With `steps_per_execution` they join at the end of the execution.

  `replica_state.save` and `restore` keep the anchor, the outer optimizer's
  state and the count of steps, once `build` or `fit` has made them.
  """

  _supports_tf_logs = True  # tf_keras need not read logs for it.
  acts_on_batches = True
  follows_groups = True

  def __init__(
    self,
    every: int,
    optimizer: Any = None,
    *,
    warmup: int = 0,
    wire_dtype: Any = None,
    fragments: int = 1,
    delay: int = 0,
    alpha: float | None = None,
  ) -> None:
    """Checks the arguments; nothing is made before `build` or `fit`.

    Args:
      every: H, how many steps groups train apart.
      optimizer: The outer optimizer, or its name. It is copied into the scope
        of the strategy, see the attribute `optimizer`. None for DiLoCo's,
        SGD(0.7, momentum=0.9, nesterov=True). SGD(1.0) gives all groups their
        mean.
      warmup: In how many steps at the start all groups take their mean after
        each, without the outer optimizer: there the training is synchronous.
      wire_dtype: `"bfloat16"`, `"float16"` or `"int8"`: what the differences
        from the anchor are rounded to where they travel. Of int8, blocks of
        256 have a scale each, and what is rounded away is added to the next
        difference. None leaves them exact.
      fragments: P, how many parts of about the same size the weights are in.
        Part i of them meets in step `H * (i + 1) // P` and every H later.
      delay: V, how many steps later the result of a meeting is applied; less
        than H.
      alpha: The share of a group's own weights in the mixture that a late
        result makes; None for 0.5, which weighs both alike. With 0 a group
        forgets what it did since the meeting.
    """
    super().__init__()
    base.check_count("every", every, 1, "steps")
    base.check_count("warmup", warmup, 0, "steps")
    base.check_count("fragments", fragments, 1, "parts of the weights")
    base.check_count("delay", delay, 0, "steps")
    if fragments > every or delay >= every:
      raise ValueError(
        "`fragments` must be at most `every` and `delay` less: each fragment"
        f" meets, and is done, once in `every` steps. Got {fragments=},"
        f" {delay=}, {every=}."
      )
    if alpha is not None:
      base.check_number("alpha", alpha)
      if not (delay and 0 <= alpha < 1):
        raise ValueError(
          "`alpha` must be at least 0 and less than 1, and needs a `delay`: a"
          f" result that is not late is not mixed. Got {alpha=}, {delay=}."
        )
    self._is_int8 = wire_dtype in ("int8", tf.int8)
    self._wire = packing.as_wire_dtype(None if self._is_int8 else wire_dtype)
    self._every = every
    self._optimizer = optimizer
    self._warmup = warmup
    self._wire_dtype = wire_dtype
    self._fragments = fragments
    self._delay = delay
    self._alpha = alpha
    self._inner: Any = None  # a CrossShardOptimizer
    self._weights: list[Any] = []
    self._calls: Any = None
    self._sent: Any = None  # by fragment: the step it met in, 0 for none
    self._outer: Any = None
    self._parts: list[fragments_lib.Fragment] = []
    self._average: Any = None  # all weights, in the warmup
    self._anchors: list[Any] = []
    self._accepted = 0  # how often something has set the groups' state
    self._first = 0  # step of an execution
    self._begins = False
    self._has_warned = False

  @property
  def optimizer(self) -> Any:
    """The outer optimizer: a CrossShardOptimizer; None before `build`.

    Set its `learning_rate` to change the outer rate. Its `skipped_steps` counts
    the times, after the warmup, that groups were not joined because a
    difference from the anchor was not finite.
    """
    return self._outer

  def build(self, optimizer: Any, model: Any) -> None:
    """Takes the weights as the first anchor.

    `fit` calls it. Call it again, with the same arguments, after weights were
    set from outside (`set_weights`, a checkpoint): if all groups have the same
    they are the next anchor, else nothing is done.

    Args:
      optimizer: What trains the groups: a CrossShardOptimizer with several.
      model: A built model, or the list of variables to join; those that it
        trains then.

    Raises:
      ValueError: If there is one group only, if groups have different weights,
        or if this object belongs to another model.
    """
    if not self._build(optimizer, model):
      self._renew()

  def _build(self, optimizer: Any, model: Any) -> bool:
    """Makes the anchor; returns False if it was made before."""
    inner = _encapsulating(optimizer)
    weights = [
      variables_lib.native(variable)
      for variable in getattr(model, "trainable_variables", model)
      if not getattr(variable, "overwrite_with_gradient", False)
    ]
    if self._inner is not None:
      if inner is self._inner and list(map(id, weights)) == list(
        map(id, self._weights)
      ):
        return False
      raise ValueError(
        "This OuterOptimizer belongs to another model or optimizer, or the"
        " model trains other variables now. Make a new one for each."
      )
    if not weights:
      raise ValueError(
        "`model` has nothing to train. If it is not built, give it a"
        " tf.keras.Input, or call it on a batch."
      )
    if self._fragments > len(weights):
      raise ValueError(
        f"`fragments` is {self._fragments}, and `model` trains {len(weights)}"
        " variables, which stay whole. Use as many fragments at most."
      )
    outer = fragments_lib.outer_optimizer(inner, self._optimizer, self._wire)
    self._check_start(inner, weights, outer)
    with base.engine_of(inner).making_variables():
      anchors = [
        inner._inner.make_variable(tf.convert_to_tensor(weight), f"anchor{i}")
        for i, weight in enumerate(weights)
      ]
      outer.build(anchors)
    alpha = 0.5 if self._alpha is None else self._alpha
    self._parts = [
      fragments_lib.Fragment(
        outer,
        [anchors[i] for i in rows],
        [weights[i] for i in rows],
        name=f"fragment{part}",
        alpha=alpha if self._delay else None,
        is_int8=self._is_int8,
        is_part=self._fragments > 1,
      )
      for part, rows in enumerate(fragments_lib.split(weights, self._fragments))
    ]
    if self._warmup:
      sgd = sys.modules[inner._package].optimizers.SGD(1.0)
      average = fragments_lib.outer_optimizer(inner, sgd, self._wire)
      with base.engine_of(inner).making_variables():
        average.build(anchors)
      self._average = fragments_lib.Fragment(average, anchors, weights)
    state = [variable for _, variable in optimizer_state.state_variables(outer)]
    state += [v for part in self._parts for v in part.variables]
    # On the host, once for all replicas: reading it waits for no device.
    with group_models.outside_of_strategies(), tf.device("CPU:0"):
      self._calls = tf.Variable(
        0, trainable=False, dtype=tf.int64, name="outer_calls"
      )
      if self._delay:
        self._sent = tf.Variable(
          tf.zeros([self._fragments], tf.int64),
          trainable=False,
          name="outer_sent",
        )
        state.append(self._sent)
    inner._step.attached = (self._calls, *anchors, *state)
    self._anchors = anchors
    self._inner, self._weights, self._outer = inner, weights, outer
    return True

  def step(self) -> None:
    """Counts a step, and joins the groups when H are done.

    Call it between two steps, outside `strategy.run`; on several machines all
    workers do.
    """
    if self._inner is None:
      raise RuntimeError(
        "This OuterOptimizer has no anchor. Call build(optimizer, model) before"
        " the first step."
      )
    self._count(1)

  def set_model(self, model: Any) -> None:
    """Makes the anchor if there is none; `fit` calls it, or who has a loop.

    Args:
      model: A compiled and built model.
    """
    super().set_model(model)
    self._build(getattr(model, "optimizer", None), model)

  def on_train_begin(self, logs: Any = None) -> None:
    """Has the first step take equal weights, if they were set, as anchor."""
    super().on_train_begin(logs)
    self._begins = True

  def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
    """Notes the number of the first batch of an execution."""
    self._first = batch
    if self._begins:  # Not before: callbacks restore when `fit` begins.
      self._begins = False
      self._renew()

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    """Counts the steps of an execution up to its last batch."""
    if self.passes_over:
      return
    # Keras 3 counts a whole execution where the epoch ends before.
    left = ((self.params or {}).get("steps") or np.inf) - self._first
    self._count(int(min(libraries.batches_per_call(self.model), left)))

  def _implements_train_batch_hooks(self) -> bool:
    """Says to tf_keras that the hooks above are to be called."""
    return True

  def _count(self, calls: int) -> None:
    """Counts calls of the optimizer, and joins groups if it is time."""
    replica_values.check_between_steps()
    inner = self._inner
    before = int(self._calls.numpy())
    self._calls.assign_add(calls)
    window = inner.accumulate_steps or inner._inner.accumulates or 1
    first, last = (n // window - self._warmup for n in (before, before + calls))
    watch = inner._step.watch
    if watch.accepted != self._accepted:  # `sent` may be that of a file.
      for part in self._parts:
        part.forget()
    joins = self._joins(first, last)
    if joins:
      group_state.accept_values(inner)
    self._accepted = watch.accepted
    # All members of a join have the same answer.
    strategy = base.engine_of(inner).strategy
    answers = [strategy.experimental_local_results(join)[0] for join in joins]
    if not all(map(bool, answers)) and not self._has_warned:
      self._has_warned = True
      logging.warning(
        "Groups were not joined after %d steps, and go on apart: the weights of"
        " one of them are not finite, or too large for `wire_dtype`. Such times"
        " after the warmup are counted in"
        " OuterOptimizer.optimizer.skipped_steps.",
        last + self._warmup,
      )

  def _joins(self, first: int, last: int) -> list[Any]:
    """Does what is due after `first` and up to step `last` of all groups.

    Returns whether each of the joins was done, on each replica.
    """
    if first < 0:
      return [self._average.join()] if first < last else []
    joins = []
    for i, part in enumerate(self._parts):
      start = self._every * (i + 1) // self._fragments
      is_due = (first - start) // self._every < (last - start) // self._every
      sent = int(self._sent[i].numpy()) if self._delay else 0
      if sent and (is_due or last >= sent + self._delay):
        joins.append(part.join())
        self._sent[i].assign(0)
      if is_due and self._delay:
        part.send()
        self._sent[i].assign(last)
      elif is_due:
        joins.append(part.join())
    return joins

  def _renew(self) -> None:
    """Takes weights that all groups have the same for the anchor.

    Between two joins they do if something else has set them, and what it has
    changed is nothing that the outer optimizer is to go on with. What was sent
    before, and what rounding has left of it, belongs to other weights.
    """
    copies = replica_values.Copies(base.engine_of(self._inner).strategy)
    copies.agree("the anchor of an OuterOptimizer")
    weights, anchors = map(copies.digests, (self._weights, self._anchors))
    # Weights that are the anchors were joined: what rounding has left counts.
    if weights != anchors and all(len(set(row)) == 1 for row in weights):
      for anchor, weight in zip(self._anchors, self._weights, strict=True):
        copies.write(anchor, copies.here(weight))
      if self._delay:
        self._sent.assign(tf.zeros_like(self._sent))
      for kept in (kept for part in self._parts for kept in part.kept):
        copies.write(kept, [np.zeros_like(a) for a in copies.here(kept)])

  def _check_start(self, inner: Any, weights: list[Any], outer: Any) -> None:
    """Raises an error unless all workers, and all replicas, start alike."""
    copies = replica_values.Copies(base.engine_of(inner).strategy)
    settings = {
      "every": self._every,
      "warmup": self._warmup,
      "wire_dtype": self._wire_dtype,
      "fragments": self._fragments,
      "delay": self._delay,
      "alpha": self._alpha,
      "optimizer": outer.get_config(),
    }
    lines = agreement.settings(**settings)
    copies.agree("the start of an OuterOptimizer", lines)
    digests = copies.digests(weights)
    for weight, row in zip(weights, digests, strict=True):
      if len(set(row)) > 1:
        raise ValueError(
          f"`model` must have the same weights in all groups at the start;"
          f" {variables_lib.path_of(weight)} differs. Call"
          " replica_state.average(optimizer, model), or go on with the"
          " OuterOptimizer that trained them."
        )


def _encapsulating(optimizer: Any) -> Any:
  """Returns the CrossShardOptimizer within an optimizer; it has groups."""
  layers = [
    layer
    for layer in optimizer_state.nested_optimizers(optimizer)
    if isinstance(layer, optimizer_lib.CrossShard)
  ]
  if not layers:
    raise TypeError(
      "`optimizer` must be a CrossShardOptimizer with groups; got"
      f" {type(optimizer).__name__}."
    )
  kinds = {layer.groups for layer in layers}
  if len(kinds) > 1 or layers[0].groups.num_groups == 1:
    raise ValueError(
      "`optimizer` must have several groups, which OuterOptimizer joins; got"
      f" {' and '.join(str(kind.to_lists()) for kind in kinds)}. Give the"
      " CrossShardOptimizer a `group_assignment`, say [[0, 1], [2, 3]]."
    )
  return layers[0]
