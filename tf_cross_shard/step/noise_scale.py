"""The gradient noise scale: up to which batch more examples save steps.

With n members in a group, `g_r` the gradient of member r and `m` their mean,

    S   = (mean_r |g_r|^2 - |m|^2) / (1 - 1/n)      the noise of one member
    G^2 = (n |m|^2 - mean_r |g_r|^2) / (n - 1)      the gradient without noise

have no bias, and noise_scale = average(S) / average(G^2) over the last steps.
The mean of the steps' ratios would be wrong: a ratio of two estimates has a
bias, and G^2 of one step is often near 0.

`S / G^2` is in batches of one replica: times the examples that a replica has in
a step it is in examples. A negative one says that noise hides the gradient.
Gradients are measured as they are reduced, clipped if they are. Steps with a
NaN or an infinity do not count. `replica_state.group_values(
optimizer.noise_scale, optimizer)` reads all groups'.

>>> from tf_cross_shard import CrossShardOptimizer
>>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
>>> with strategy.scope():
...   weight = tf.Variable(0.0)
...   optimizer = CrossShardOptimizer("sgd", "sum", noise_scale=1)
...   optimizer.build([weight])
>>> @tf.function
... def step():
...   def replica_step():
...     replica = tf.distribute.get_replica_context().replica_id_in_sync_group
...     grad = 3.0 + tf.cast(replica, tf.float32)  # 3 and 4
...     return optimizer.apply_gradients([(grad, weight)])
...
...   return strategy.run(replica_step)
>>> _ = step()
>>> S, G2 = (12.5 - 3.5**2) / (1 - 1 / 2), (2 * 3.5**2 - 12.5) / (2 - 1)
>>> round(float(optimizer.noise_scale.numpy()), 5), round(S / G2, 5)
(0.04167, 0.04167)

References:
  McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv
  1812.06162), appendix A.1, for batches of one member and of n.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from tf_cross_shard import settings as settings_lib
from tf_cross_shard.collectives import base as engines
from tf_cross_shard.gradients import clipping, indexed_slices
from tf_cross_shard.gradients.clipping import Gradient
from tf_cross_shard.inner_optimizer import base

DECAY: Final = 0.99  # of an average, for each measurement: about 100 count
EVERY: Final = 32  # steps: norms read all gradients, and the scale moves slowly


class Calls(NamedTuple):
  """The calls of a window, of which gradients are the sums or means.

  Attributes:
    summed: How many calls' gradients each of them is the sum of; 1 for a mean.
    share: How many calls there were, divided by `accumulate_steps`.
  """

  summed: int = 1
  share: Any = 1.0


ONE_CALL: Final = Calls()


def squared_norm(grads: Sequence[Gradient], scale: Any = 1.0) -> tf.Tensor:
  """The sum of squares of all elements divided by `scale`, float32.

  Rows of a sparse gradient that share an index are added first.

  >>> float(squared_norm([tf.constant([3.0]), None, tf.constant([4.0])]))
  25.0
  """
  floats = []
  for grad in grads:
    if isinstance(grad, tf.IndexedSlices):
      grad = indexed_slices.merge_duplicates(grad).values
    if grad is None:
      continue
    is_complex = grad.dtype.is_complex
    parts = [tf.math.real(grad), tf.math.imag(grad)] if is_complex else [grad]
    for part in parts:
      if part.dtype != tf.float64:
        part = tf.cast(part, tf.float32)
      # Before the square, which may overflow.
      floats.append(indexed_slices.times(part, 1.0 / scale))
  return tf.cast(clipping.square_of_norm(floats), tf.float32)


class NoiseScale:
  """Measures what is reduced, before and after the sum.

  Attributes:
    noise_scale: The ratio, NaN before the first measurement; float32.
    gradient_norm: `|m|` of the last measurement, NaN before the first; float32.
    variables: These, the averages and the number of steps; each replica has its
      group's. Empty if nothing is measured.
  """

  def __init__(
    self,
    settings: settings_lib.Settings,
    inner: base.InnerOptimizer,
    engine: engines.Engine,
  ) -> None:
    """Makes the variables, if anything is to be measured."""
    every = settings.noise_scale
    self._every = EVERY if every is True else int(every)
    self.noise_scale: Any = None
    self.gradient_norm: Any = None
    self.variables: list[Any] = []
    self._inner = inner
    self._engine = engine
    self._groups = engine.groups
    self._is_mean = settings.is_mean
    if not self._every:
      return
    # Without a strategy it may have been loaded for inference only.
    if engine.num_replicas > 1:
      self._check_members()
    with engine.making_variables():
      self.variables = [
        tf.Variable(value, trainable=False, name=name)
        for value, name in (
          ([0.0, 0.0], "noise_averages"),
          (np.float32(np.nan), "noise_scale"),
          (np.float32(np.nan), "gradient_norm"),
          (np.int64(0), "noise_steps"),
        )
      ]
    self._averages, self.noise_scale, self.gradient_norm, self._steps = (
      self.variables
    )

  def of_replica(
    self, grads: Sequence[Gradient], calls: Calls = ONE_CALL
  ) -> list[tf.Tensor]:
    """Returns the squared norm of a replica's gradients, to travel beside them.

    It travels in every step, for a collective must not depend on the step.

    Args:
      grads: What is about to be reduced.
      calls: What each of them is the sum or mean of.
    """
    if not self._every:
      return []
    self._check_members()
    return [self._if_due(lambda: squared_norm(grads, self._scale(calls)))]

  def after_sum(
    self,
    sums: Sequence[Gradient],
    of_members: Sequence[tf.Tensor],
    calls: Calls = ONE_CALL,
  ) -> None:
    """Measures a step by its sums, and by the sum of `of_replica`'s."""
    if self._every:
      of_sum = self._if_due(lambda: squared_norm(sums, self._scale(calls)))
      self._step(of_members[0], of_sum, calls)

  def after_scatter(
    self,
    own: Sequence[tf.Tensor],
    parts: Sequence[tf.Tensor],
    whole: Sequence[Gradient],
    calls: Calls,
  ) -> None:
    """Measures a step of which each member has one part of the sum.

    Args:
      own: From `of_replica`.
      parts: The part that this member alone has.
      whole: The sums that all members have.
      calls: What all of them are the means of.
    """
    if self._every:
      scale, share = self._scale(calls), 1.0 / self._groups.group_size
      part = self._if_due(
        lambda: squared_norm(parts, scale) + squared_norm(whole, scale) * share
      )
      both = tf.stack([*own, part])
      [both] = self._engine.all_reduce_sum([both])
      self._step(both[0], both[1], calls)

  def _check_members(self) -> None:
    """Raises `ValueError` where there is nothing to compare."""
    if self._groups.group_size == 1:
      raise ValueError(
        "`noise_scale` compares the gradients of a group's members, and groups"
        " have one member here. Use larger groups, or leave it False."
      )

  def _is_due(self) -> tf.Tensor:
    """Whether this step is measured."""
    with self._engine.isolate():
      return tf.convert_to_tensor(self._steps) % self._every == 0

  def _if_due(self, norm: Callable[[], tf.Tensor]) -> tf.Tensor:
    """A squared norm; 0 in a step that is not measured."""
    if self._every == 1:
      return norm()
    return tf.cond(self._is_due(), norm, lambda: tf.constant(0.0))

  def _scale(self, calls: Calls) -> Any:
    """Returns the factor that gradients come in multiplied by."""
    return self._inner.scale_limit(calls.summed)

  def _step(self, of_members: Any, of_sum: tf.Tensor, calls: Calls) -> None:
    """Counts, and moves the averages if all that was measured is finite.

    Args:
      of_members: The members' squared norms, added up.
      of_sum: The squared norm of the sum of their gradients.
      calls: What the gradients are the sums or means of.
    """
    n = self._groups.group_size
    member = n if self._is_mean else 1  # how often it has what it sums
    own = of_members * (member**2 / n)
    mean = of_sum * (member / n) ** 2
    # That of a mean over m calls is 1/m of one call's.
    noise = calls.share * (own - mean) / (1.0 - 1.0 / n)
    signal = (n * mean - own) / (n - 1.0)
    is_valid = self._is_due() & tf.math.is_finite(of_members + of_sum)
    with self._engine.isolate():
      before = tf.convert_to_tensor(self._averages)
      averages = DECAY * before + (1.0 - DECAY) * tf.stack([noise, signal])
      news = averages, averages[0] / averages[1], tf.sqrt(mean)
      for variable, new in zip(self.variables, news, strict=False):
        old = tf.convert_to_tensor(variable)
        variable.assign(tf.where(is_valid, new, old))
      self._steps.assign(tf.convert_to_tensor(self._steps) + 1)
