"""A fragment of the weights, in which groups meet by themselves.

    step t      sent = anchor - w + kept        of each group
                mean of `sent` over the groups
    step t + V  anchor = outer optimizer(anchor, gradient mean)
                w = alpha * w + (1 - alpha) * anchor
                kept = sent - what of it has travelled, if that is int8

Without a delay V is 0, and nothing is kept for later. Where workers are CPUs,
the mean is made in a thread of its own while the V steps run. It is not part of
the state: what goes on from a file makes it anew, of `sent`.
"""

import concurrent.futures
import functools
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.callbacks import base
from tf_cross_shard.gradients import packing, quantization
from tf_cross_shard.inner_optimizer import optimizer_state
from tf_cross_shard.step import flow, reduction


def split(weights: Sequence[Any], count: int) -> list[list[int]]:
  """Returns the positions of the weights in each of `count` fragments.

  The largest first, each to the fragment with the fewest bytes: so the largest
  fragment, which is what a link has to carry at once, is small, whatever the
  order of layers.

  >>> split([tf.zeros(size) for size in (3, 8, 4, 1)], 2)
  [[1], [0, 2, 3]]
  """
  sizes = [w.dtype.size * (w.shape.num_elements() or 0) for w in weights]
  rows: list[list[int]] = [[] for _ in range(count)]
  for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    min(rows, key=lambda row: sum(sizes[j] for j in row)).append(i)
  return [sorted(row) for row in rows]


def outer_optimizer(inner: Any, given: Any, wire_dtype: Any) -> Any:
  """Encapsulates a copy of the outer optimizer that averages over groups."""
  optimizers = sys.modules[inner._package].optimizers
  if given is None:
    given = optimizers.SGD(0.7, momentum=0.9, nesterov=True)
  with base.engine_of(inner).making_variables():
    given = optimizers.get(given)
    config = given.get_config()
    if "name" in config:
      # Variables are found in files by a name that Keras does not number.
      config["name"] = "outer"
    given = type(given).from_config(config)
    # Not a subclass of the user's.
    kind = next(
      kind
      for kind in type(inner).__mro__
      if kind.__module__.split(".")[0] == "tf_cross_shard"
    )
    return kind(
      given,
      "mean",
      "OuterOptimizer",
      _across(inner.groups),
      loss_averaged_over="replica",
      wire_dtype=wire_dtype,
      skip_nonfinite=True,
      scale_gradients=True,
    )


class Fragment:
  """Some weights, what they were at their last meeting, and how they meet.

  Attributes:
    sent: The differences of a meeting whose result is not applied yet; empty
      where it is applied at once.
    kept: What rounding left of earlier ones; empty unless int8 travels.
    variables: All that it keeps from step to step.
  """

  def __init__(
    self,
    outer: Any,
    anchors: Sequence[Any],
    weights: Sequence[Any],
    *,
    name: str = "",
    alpha: float | None = None,
    is_int8: bool = False,
    is_part: bool = False,
  ) -> None:
    """Makes the variables, and no function yet.

    Args:
      outer: The outer optimizer, built on the anchors.
      anchors: What the weights were, alike in all groups.
      weights: In the same order.
      name: What names of variables begin with.
      alpha: The share of a group's own weights when a late result is applied;
        None for a result that is not late.
      is_int8: Whether differences travel in eight bits.
      is_part: Whether `outer` updates other anchors too, so that this fragment
        has its own count of updates.
    """
    self._outer = outer
    self._engine = base.engine_of(outer)
    self._anchors, self._weights = list(anchors), list(weights)
    self._alpha = alpha
    self._shared = _shared_state(outer) if is_part else []
    with self._engine.making_variables():

      def copies(kind: str, values: Sequence[Any]) -> list[Any]:
        return [
          tf.Variable(value, trainable=False, name=f"{name}_{kind}{i}")
          for i, value in enumerate(map(tf.convert_to_tensor, values))
        ]

      zeros = [tf.zeros(w.shape, w.dtype) for w in weights]
      self.sent = [] if alpha is None else copies("sent", zeros)
      self.kept = copies("kept", zeros) if is_int8 else []
      self._own = copies("state", self._shared)
    self.variables = [*self.sent, *self.kept, *self._own]
    # Collectives of a thread of its own must not have the keys of others.
    self._wire = self._engine if alpha is None else self._engine.beside()
    self._thread: concurrent.futures.Executor | None = None
    self._result: concurrent.futures.Future[Any] | None = None
    self._send = self._on_replicas(self._send_replica)
    self._exchange = self._on_replicas(self._exchange_replica)
    self._apply = self._on_replicas(self._apply_replica)
    self._exchange_and_apply = self._on_replicas(self._join_replica)

  def _on_replicas(self, function: Any) -> Any:
    """Returns a function that calls another on each replica."""

    def run(function: Any, *args: Any) -> Any:
      return self._engine.strategy.run(function, args=args)

    # Not a lambda: TensorFlow would take those of several fragments for one
    # function, and warn of its retracing.
    return tf.function(functools.partial(run, function), autograph=False)

  def send(self) -> None:
    """Notes the differences, and begins to exchange them where it can."""
    self._send()
    if self._wire is not self._engine:
      self._thread = self._thread or concurrent.futures.ThreadPoolExecutor(1)
      # It is traced here: threads that trace would wait for each other.
      exchange = self._exchange.get_concrete_function()
      self._result = self._thread.submit(exchange)

  def join(self) -> Any:
    """Moves the anchors, and the weights to them.

    Returns whether it did, on each replica.
    """
    result = self._take()
    return (
      self._exchange_and_apply() if result is None else self._apply(*result)
    )

  def forget(self) -> None:
    """Has the next join exchange what is in `sent` then."""
    self._take()

  def _take(self) -> Any:
    """Waits for what the thread does, if it does something; returns it."""
    result, self._result = self._result, None
    return result and result.result()

  def _send_replica(self) -> None:
    """Notes this replica's differences."""
    with self._engine.isolate():
      for variable, value in zip(self.sent, self._differences(), strict=True):
        variable.assign(value)

  def _exchange_replica(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the means of all groups, and what rounding left here."""
    with self._engine.isolate():
      values = [variable.read_value() for variable in self.sent]
      values = values or self._differences()
    if self.kept:
      return _average_int8(values, self._wire)
    share = 1.0 / self._wire.groups.group_size
    wire_dtype = self._outer._step.settings.wire_dtype
    wire = reduction.Wire(self._wire, wire_dtype)
    means, _ = wire.sum([value * share for value in values])
    return means, []

  def _join_replica(self) -> tf.Tensor:
    """Exchanges and applies at once."""
    return self._apply_replica(*self._exchange_replica())

  def _differences(self) -> list[tf.Tensor]:
    """Returns how far this replica is behind its anchors."""
    natives = map(variables_lib.native, self._anchors)
    found = [a - w for a, w in zip(natives, self._weights, strict=True)]
    if self.kept:
      found = [d + kept for d, kept in zip(found, self.kept, strict=True)]
    return found

  def _apply_replica(
    self, means: Sequence[tf.Tensor], kept: Sequence[tf.Tensor]
  ) -> tf.Tensor:
    """Applies what all members have alike; returns whether it was finite."""
    outer, alpha = self._outer, self._alpha
    with self._engine.isolate():
      before = tf.convert_to_tensor(outer.skipped_steps)
      for shared, own in zip(self._shared, self._own, strict=True):
        shared.assign(own.read_value())
    outer._perform(flow.Call(means, self._anchors, is_reduced=True))
    with self._engine.isolate():
      is_done = tf.equal(outer.skipped_steps, before)
      for anchor, weight in zip(
        map(variables_lib.native, self._anchors), self._weights, strict=True
      ):
        joined = alpha * weight + (1.0 - alpha) * anchor if alpha else anchor
        weight.assign(tf.where(is_done, joined, weight))
      for variable, value in zip(self.kept, kept, strict=True):
        variable.assign(tf.where(is_done, value, variable))
      for own, shared in zip(self._own, self._shared, strict=True):
        own.assign(shared.read_value())
    return is_done


def _shared_state(outer: Any) -> list[Any]:
  """Returns what an optimizer has once for all anchors, without its rate.

  Its count of updates, for one, by which Adam corrects its moments.
  """
  inner = outer._inner
  known = {id(v) for v in optimizer_state.learning_rates(outer)}
  for anchor in inner.trainable_variables:
    known |= {id(slot) for slot in inner.slots(anchor).values()}
  return [
    variables_lib.native(v) for v in inner.variables if id(v) not in known
  ]


def _average_int8(
  values: Sequence[tf.Tensor], engine: Any
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
  """Returns means over the group, and what rounding left of `values`."""
  wide = [tf.cast(value, tf.float32) for value in values]
  members = engine.groups.group_size
  # In buckets, as gradients: a block may hold the end of one weight and the
  # beginning of the next.
  rows, unpack = packing.pack(wide, engine.bucket_bytes or packing.BUCKET_BYTES)
  means, rounded = [], []
  for row in rows:
    size = row.shape.num_elements()
    words = quantization.encode(row)
    joined = tf.split(engine.all_gather_part(words), members)
    total = tf.add_n([quantization.decode(part, size) for part in joined])
    means.append(total / members)
    rounded.append(quantization.decode(words, size))
  kept = [
    value - travelled
    for value, travelled in zip(
      values, packing.widen(unpack(rounded), values), strict=True
    )
  ]
  return packing.widen(unpack(means), values), kept


def _across(groups: groups_lib.Groups) -> groups_lib.Groups:
  """Member j of each group with member j of the others.

  >>> _across(groups_lib.contiguous(4, 2)).to_lists()
  [[0, 2], [1, 3]]

  Sums of three terms depend on their order, which is that of the replicas. If
  it would differ, all replicas are one group, which has the same mean.
  """
  rows = [sorted(row) for row in zip(*map(sorted, groups), strict=True)]
  orders = {tuple(map(groups.index_of, row)) for row in rows}
  if groups.num_groups > 2 and len(orders) > 1:
    return groups_lib.contiguous(groups.num_replicas, groups.num_replicas)
  return groups_lib.Groups(tuple(map(tuple, rows)))
