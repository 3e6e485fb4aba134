"""Windows of accumulation that grow with the gradient noise scale.

noise of the gradients ──▶ batch that is worth it ──▶ calls in a window
of the group's members     ratio * noise scale        1 ... accumulate_steps
"""

import statistics
from typing import Any

import numpy as np

from tf_cross_shard.callbacks import base, group_rates, outer_optimizer
from tf_cross_shard.inner_optimizer import libraries, optimizer_state
from tf_cross_shard.replica_state import replica_values


class AdaptiveAccumulation(base.GroupCallback):
  """Makes windows as long as the gradient noise scale says that they pay.

  At the start, while steps are large and gradients clear, small batches give as
  much progress a step as large ones, for fewer examples; later ones do not. The
  optimizer has `accumulate_steps`, the longest window, and `noise_scale`. With
  n replicas in a group, `b` examples of each in a call, and the noise scale `B`
  in examples, a window of

      k = batch_ratio * B / (n * b)        1 <= k <= accumulate_steps

  calls has `batch_ratio` times the noise scale in its batch. The length goes
  there by a factor of two at most in one change, since early measurements are
  rough; where noise hides the gradient it doubles. All groups have one length,
  that of the median of their noise scales, or of the lower one of two in the
  middle. Nothing is traced again.

  >>> import numpy as np, tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1, use_bias=False)]
  ...   )
  ...   optimizer = CrossShardOptimizer(
  ...     tf.keras.optimizers.SGD(0.01), accumulate_steps=8, noise_scale=1
  ...   )
  ...   model.compile(optimizer, "mse")
  >>> x, y = np.ones([8, 1], "float32"), np.float32([[9], [-9]] * 4)
  >>> history = model.fit(  # The replicas' gradients are opposite: all noise.
  ...   *(x, y),
  ...   batch_size=2,
  ...   epochs=5,
  ...   verbose=0,
  ...   callbacks=[callbacks.AdaptiveAccumulation()],
  ... )
  >>> [int(length) for length in history.history["window_length"]]
  [2, 4, 8, 8, 8]

  The length is a variable that `replica_state.save` and `BackupAndRestore`
  keep. An open window goes on: it ends after the next call that makes it long
  enough, and takes the mean over the calls that it had.

  References:
    McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv
    1812.06162): a batch of the noise scale takes twice the fewest steps and
    twice the fewest examples.
    Gray et al., 2024 (arXiv 2411.00999): batches that grow with it.
  """

  acts_on_batches = True  # and so stands before BackupAndRestore
  follows_groups = True

  def __init__(
    self,
    shortest: int = 1,
    *,
    every: int | str = "epoch",
    batch_ratio: float = 1.0,
    rate_power: float = 0.0,
  ) -> None:
    """Takes what decides the length.

    Args:
      shortest: No window has fewer calls. Windows have as many until a noise
        scale is known.
      every: The length changes after so many batches of an epoch, or after each
        `"epoch"`.
      batch_ratio: A group's batch, divided by its noise scale. A smaller one
        takes more steps, and fewer examples.
      rate_power: Learning rates are those given times
        `(length / accumulate_steps) ** rate_power`. 0 leaves them as they are,
        so that a longer window is a calmer step; 1 is the linear rule of SGD
        (Goyal et al., 2017, arXiv 1706.02677), 0.5 that of Adam (Malladi et
        al., 2022, arXiv 2205.10287). Not with schedules or loss scaling.
    """
    super().__init__()
    base.check_count("shortest", shortest, 1, "calls")
    if every != "epoch":
      base.check_count("every", every, 1, 'batches, or is "epoch"')
    base.check_number("batch_ratio", batch_ratio)
    if not 0.0 < batch_ratio < np.inf:
      raise ValueError(
        f"`batch_ratio` must be a positive number; got {batch_ratio!r}. 1.0 is"
        " a batch of the noise scale."
      )
    base.check_number("rate_power", rate_power)
    if not 0.0 <= rate_power <= 1.0:
      raise ValueError(
        f"`rate_power` must be from 0 to 1; got {rate_power!r}. 0 leaves"
        " learning rates as they are, 1 is the linear rule."
      )
    self.shortest = shortest
    self.every = every
    self.batch_ratio = batch_ratio
    self.rate_power = rate_power
    self._optimizer: Any = None  # a CrossShardOptimizer
    self._batches = 0
    if every != "epoch":
      self.call_after_batches(self._end_batch)

  @property
  def length(self) -> int:
    """The calls of a window now; 0 before `fit`."""
    if self._optimizer is None:
      return 0
    return int(self._copies().here(self._optimizer._step.window_length())[0])

  def set_model(self, model: Any) -> None:
    """Takes the optimizer; from now on files have the length of its windows.

    In a loop of your own call it before `replica_state.restore`, and with
    `rate_power` before the first step is traced.
    """
    super().set_model(model)
    self._optimizer = _accumulating(model.optimizer)
    longest = self._optimizer.accumulate_steps
    if self.shortest > longest:
      raise ValueError(
        f"`shortest` must be at most accumulate_steps={longest} of the"
        f" optimizer, the longest window; got {self.shortest}."
      )
    self._optimizer._step.window_length()
    if self.rate_power:
      group_rates.prepare(model, "AdaptiveAccumulation(rate_power=)")

  def on_train_begin(self, logs: Any = None) -> None:
    """Makes windows the shortest, where no noise scale is known yet.

    Else they stay as long as they are in the first group: from a file in which
    each is at its best, others may have another length.
    """
    super().on_train_begin(logs)
    for callback in self.same_fit():
      if isinstance(callback, outer_optimizer.OuterOptimizer):
        raise ValueError(
          "OuterOptimizer counts windows of `accumulate_steps` calls, and"
          " AdaptiveAccumulation changes how many they have. Use one of them."
        )
    length, *_ = self._read(self._optimizer._step.window_length())
    is_new = np.isnan(self._read(self._optimizer.noise_scale)).all()
    self._write(self.shortest if is_new else int(length))

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Counts batches from 0."""
    self._batches = 0

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Changes the length, if it is time, and adds it to the logs."""
    if self.every == "epoch":
      self.adapt()
    if logs is not None:
      logs["window_length"] = self.length

  def _end_batch(self, batch: int, logs: Any = None) -> None:
    """Changes the length, if it is time."""
    before = self._batches
    self._batches += libraries.batches_per_call(self.model)
    every = int(self.every)
    if before // every < self._batches // every and not self.passes_over:
      self.adapt()

  def adapt(self) -> None:
    """Changes the length; in a loop of your own, call it between two steps.

    On several machines all workers call it.
    """
    scales = self._read(self._optimizer.noise_scale)
    if np.isnan(scales).all():
      return
    longest, groups = self._optimizer.accumulate_steps, self._optimizer.groups
    # A call of the group has the examples of `group_size` replicas; scales are
    # in those of one replica's longest window.
    calls = longest / groups.group_size * self.batch_ratio
    aim = statistics.median_low(
      scale * calls if scale > 0 else np.inf for scale in scales
    )
    length = self.length
    aim = round(float(np.clip(aim, length / 2, 2 * length)))
    self._write(int(np.clip(aim, self.shortest, longest)))

  def _copies(self) -> replica_values.Copies:
    """Returns the replicas' copies; the model may not be built yet."""
    return replica_values.Copies(base.engine_of(self._optimizer).strategy)

  def _read(self, variable: Any) -> list[float]:
    """Returns each group's value of a variable."""
    copies = self._copies()
    copies.agree("the length of windows")
    first = [members[0] for members in self._optimizer.groups]
    return list(map(float, copies.read(variable, first)))

  def _write(self, length: int) -> None:
    """Puts a length in force, and the learning rates that it has."""
    variable = self._optimizer._step.window_length()
    if self.rate_power:
      rates, before = group_rates.read(self.model), self._read(variable)
      factors = (length / np.array(before)) ** self.rate_power
      group_rates.write(self.model, list(rates * factors))
    copies = self._copies()
    here = copies.engine.replicas_here
    copies.write(variable, [np.array(length)] * len(here))


def _accumulating(optimizer: Any) -> Any:
  """Returns the CrossShardOptimizer whose windows may vary.

  Raises:
    ValueError: If there is none.
  """
  for layer in optimizer_state.nested_optimizers(optimizer):
    longest = getattr(layer, "accumulate_steps", None) or 1
    if longest > 1 and getattr(layer, "noise_scale", None) is not None:
      return layer
  raise ValueError(
    "AdaptiveAccumulation needs an optimizer that accumulates and measures its"
    f" noise; got {optimizer!r}. Use CrossShardOptimizer(opt,"
    " accumulate_steps=16, noise_scale=True); 16 is the longest window."
  )
