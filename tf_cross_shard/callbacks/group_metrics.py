"""Every group evaluated on all of the data, as a model of its own."""

import json
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_cross_shard import replica_state
from tf_cross_shard.callbacks import base
from tf_cross_shard.coordination import agreement
from tf_cross_shard.replica_state import group_models, group_state


class GroupMetrics(base.GroupCallback):
  """Evaluates every group on all of the data, after epochs.

  With `validation_data` of `fit`, each replica would evaluate its share of the
  rows by its own group's weights: a mean over groups, which describes none.
  This loads one group after the other into a plain model, a *twin*, compiled
  with copies of the model's loss and metrics, and puts its metrics into the
  logs as `val_loss/group_0`, `val_accuracy/group_0` and so on; those of the
  mean over all groups' predictions as `val_loss/ensemble`. So the progress bar
  shows them, the history keeps them, and callbacks that come later in the list
  use them: `ModelCheckpoint(monitor="val_loss/group_1", mode="min")`, say.

  >>> import numpy as np
  >>> from tf_cross_shard import CrossShardOptimizer, callbacks
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(0.1)
  ...   model.compile(
  ...     CrossShardOptimizer(sgd, group_assignment=[[0], [1]]), "mse"
  ...   )
  >>> x = np.ones([4, 1], "float32")
  >>> metrics = callbacks.GroupMetrics((x, x))
  >>> history = model.fit(x, x, verbose=0, callbacks=[metrics]).history
  >>> sorted(history)
  ['loss', 'val_loss/ensemble', 'val_loss/group_0', 'val_loss/group_1']

  On several machines the first worker evaluates, and tells the others.
  """

  def __init__(
    self,
    validation_data: Any,
    ensemble: bool = True,
    every: int = 1,
    twin: Callable[[], Any] | None = None,
    batch_size: int | None = None,
  ) -> None:
    """Takes the data.

    Args:
      validation_data: What `fit` takes: a dataset, `(x, y)` or
        `(x, y, sample_weight)`. On several machines the first worker's counts.
      ensemble: Whether to evaluate the mean prediction of all groups too, if
        there are several, with one more twin for each group.
      every: Evaluate after the first epoch of a `fit`, so that an error is not
        found late, and then after each epoch whose number, counted from 1, is
        a multiple.
      twin: A function of no arguments that returns a new plain model of the
        same architecture, for models that Keras cannot clone. One that it
        returns compiled is evaluated with its own loss and metrics.
      batch_size: As in `model.evaluate`: only for arrays.

    Raises:
      ValueError: If `every` is not a positive integer.
    """
    super().__init__()
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
      raise ValueError(
        f"`every` must be a positive integer; got {every!r}. Use 1 to evaluate"
        " after each epoch."
      )
    is_tuple = isinstance(validation_data, (tuple, list))
    given = validation_data if is_tuple else (validation_data,)
    self._data = dict(zip(("x", "y", "sample_weight"), given, strict=False))
    self._data["batch_size"] = batch_size
    self._has_ensemble = ensemble
    self._every = every
    self._make_twin = twin
    self._twin: Any = None
    self._members: list[Any] = []
    self._ensemble: Any = None

  def on_train_begin(self, logs: Any = None) -> None:
    """Forgets the twins, since the model may be compiled anew.

    Args:
      logs: Not used.
    """
    self._twin = None

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Evaluates, and adds to the logs.

    Args:
      epoch: The epoch that ended, from 0.
      logs: A dictionary that other callbacks receive too.

    Raises:
      ValueError: If the model is not compiled, or cannot be cloned.
      MissingWorkerError: If another worker does not call this too.
    """
    if self._twin is not None and (epoch + 1) % self._every:
      return
    model, optimizer = self.model, self.model.optimizer
    num_groups = group_state.groups_of(optimizer, None).num_groups
    if self._twin is None:
      self._build(num_groups)
    found: dict[str, float] = {}
    for i in range(num_groups):
      replica_state.load_group(model, i, optimizer, into=self._twin)
      found |= self._evaluate(self._twin, f"group_{i}")
    for i, member in enumerate(self._members):
      replica_state.load_group(model, i, optimizer, into=member)
    if self._members:
      found |= self._evaluate(self._ensemble, "ensemble")
    if logs is not None:
      logs.update(found)

  def _build(self, num_groups: int) -> None:
    """Makes the twins, and compiles those that are evaluated."""
    model, optimizer = self.model, self.model.optimizer

    def make() -> Any:
      if self._make_twin is None:
        return replica_state.load_group(model, 0, optimizer)
      return self._make_twin()

    with group_models.outside_of_strategies():
      twin = make()
      if not hasattr(twin, "_compile_config"):
        _compile_like(model, twin)
      self._members = []
      if self._has_ensemble and num_groups > 1:
        self._members = [make() for _ in range(num_groups)]
        self._ensemble = _mean_of(self._members)
        _compile_like(twin, self._ensemble)
    self._twin = twin

  def _evaluate(self, model: Any, name: str) -> dict[str, float]:
    """Returns a plain model's metrics, on all workers those of the first."""
    strategy = self.model.distribute_strategy
    workers = agreement.of_strategy(strategy)
    found: dict[str, float] = {}
    if workers is None or workers.index == 0:
      with group_models.outside_of_strategies():
        result = model.evaluate(**self._data, verbose=0, return_dict=True)
      found = {key: float(value) for key, value in result.items()}
    if workers is not None:
      told = agreement.exchange(
        workers, f"evaluating {name}", json.dumps(found), math.inf
      )
      found = json.loads(told[0])
    return {f"val_{key}/{name}": value for key, value in found.items()}


def _mean_of(members: list[Any]) -> Any:
  """A model that predicts the mean; with the mean of added losses, too.

  Not `replica_state.ensemble`: that clones models anew, and only some.
  """
  keras = group_models.keras_of(members[0])

  class Mean(keras.Model):  # type: ignore[name-defined]
    def __init__(self) -> None:
      super().__init__()
      self.members = members

    def call(self, inputs: Any) -> Any:
      outputs = [member(inputs, training=False) for member in self.members]
      return tf.nest.map_structure(
        lambda *each: tf.add_n(each) / len(each), *outputs
      )

    @property
    def losses(self) -> Any:
      return [loss / len(members) for loss in super().losses]

  mean = Mean()
  # By these, loss and metrics are found of a model with several outputs.
  mean.output_names = getattr(members[0], "output_names", None)
  return mean


def _compile_like(source: Any, target: Any) -> None:
  """Compiles with the same loss and copies of the metrics."""
  if not hasattr(source, "_compile_config"):
    raise ValueError(
      f"GroupMetrics takes loss and metrics from {type(source).__name__}, whose"
      " compile() of Keras was not called. Compile it, or hand in `twin`, a"
      " function that returns a compiled plain model."
    )
  config = dict(source._compile_config.config)
  del config["optimizer"]
  target.compile(**tf.nest.map_structure(_copy, config))


def _copy(value: Any) -> Any:
  """A metric's copy, since it keeps a state; else the value itself."""
  is_metric = hasattr(value, "update_state") and hasattr(value, "from_config")
  return value.from_config(value.get_config()) if is_metric else value
