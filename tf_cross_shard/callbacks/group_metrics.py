"""Every group evaluated on all of the data, as a model of its own."""

import json
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_cross_shard import group_schedule, replica_state
from tf_cross_shard.callbacks import base
from tf_cross_shard.coordination import agreement
from tf_cross_shard.inner_optimizer import libraries
from tf_cross_shard.replica_state import (
  group_models,
  group_state,
  replica_values,
)


class GroupMetrics(base.GroupCallback):
  """Evaluates every group on all of the data, after epochs.

  With `validation_data` of `fit`, each replica would evaluate its share of the
  rows by its own group's weights: a mean over groups, which describes none.
  This loads one group after the other into a plain model, a *twin*, compiled
  with copies of the model's loss and metrics, and puts its metrics into the
  logs as `val_loss/group_0`, `val_accuracy/group_0` and so on; those of the
  mean over all groups' predictions as `val_loss/ensemble`. So the progress bar
  shows them, the history keeps them, and callbacks of this package that come
  later in the list use them. (Keras' ModelCheckpoint would save group 0,
  whichever group it monitors.)

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
  >>> sorted(key for key in history if "group_1" in key)
  ['loss/group_1', 'val_loss/group_1']

  `loss/group_0` and so on are the training loss of the group's own examples.
  On several machines the first worker evaluates, and tells the others.
  """

  def __init__(
    self,
    validation_data: Any,
    ensemble: bool = True,
    every: int = 1,
    twin: Callable[[], Any] | None = None,
    batch_size: int | None = None,
    name: str = "val",
  ) -> None:
    """Takes the data.

    Args:
      validation_data: What `fit` takes: a dataset, `(x, y)` or
        `(x, y, sample_weight)`. On several machines the first worker's counts.
      ensemble: Whether to evaluate the mean prediction of all groups too, if
        there are several, with one more twin for each group.
      every: Evaluate after epoch 1, and then after each epoch whose number,
        counted from 1, is a multiple.
      twin: A function of no arguments that returns a new plain model of the
        same architecture, for models that Keras cannot clone. One that it
        returns compiled is evaluated with its own loss and metrics.
      batch_size: As in `model.evaluate`: only for arrays.
      name: What the names of the metrics begin with. A second GroupMetrics,
        with other data, needs another: `"test"` for `test_loss/group_0`.
    """
    super().__init__()
    base.check_count("every", every, 1, "epochs")
    if not isinstance(ensemble, bool):
      raise TypeError(
        f"`ensemble` must be True or False; got {type(ensemble).__name__}. Hand"
        " in all data as one argument: GroupMetrics((x, y))."
      )
    if not isinstance(name, str) or not name or "/" in name:
      raise ValueError(
        f"`name` must be a string without a slash, say 'test'; got {name!r}."
      )
    is_tuple = isinstance(validation_data, (tuple, list))
    given = validation_data if is_tuple else (validation_data,)
    if hasattr(validation_data, "__next__") or len(given) > 3:
      raise TypeError(
        "`validation_data` must be a dataset, (x, y) or (x, y, sample_weight),"
        f" which every group reads anew; got {type(validation_data).__name__}."
        " Of a generator make a tf.data.Dataset, with cache()."
      )
    self._data = dict(zip(("x", "y", "sample_weight"), given, strict=False))
    self._data["batch_size"] = batch_size
    self.prefix = f"{name}_"
    self._name = name
    self._ensemble = ensemble
    self.every = every
    self._twin = twin
    self._plain: Any = None
    self._members: list[Any] = []
    self._mean: Any = None
    self._losses: dict[str, float] = {}

  def on_train_begin(self, logs: Any = None) -> None:
    """Makes the twins anew, and evaluates a batch, so that errors come now."""
    super().on_train_begin(logs)
    if self.prefix in self.prefixes_before():
      raise ValueError(
        f"`name` must not be that of another GroupMetrics in the list of"
        f" callbacks; got {self._name!r} twice. Name the second one, say"
        ' GroupMetrics(test_data, name="test").'
      )
    self._plain = None
    if self.model.built:  # Else it has no weights before the first step.
      self._build()
      for model in (self._plain, *([self._mean] if self._members else [])):
        self._evaluate(model, "one batch", steps=1)

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Forgets the losses of the last epoch."""
    self._losses = {}

  def on_test_begin(self, logs: Any = None) -> None:
    """Reads the training losses before validation data take their place."""
    super().on_test_begin(logs)
    self._losses = self._losses or self._training_losses()

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Evaluates, and adds to the logs, which later callbacks receive."""
    if logs is not None:
      logs.update(self._losses or self._training_losses())
    if epoch and (epoch + 1) % self.every:
      return
    model, optimizer = self.model, self.model.optimizer
    if self._plain is None:
      self._build()
    metrics: dict[str, float] = {}
    for i in range(group_state.groups_of(optimizer, None).num_groups):
      replica_state.load_group(i, optimizer, model, into=self._plain)
      self._group.assign(i)
      metrics |= self._evaluate(self._plain, f"group_{i}")
    for i, member in enumerate(self._members):
      replica_state.load_group(i, optimizer, model, into=member)
    if self._members:
      self._group.assign(0)
      metrics |= self._evaluate(self._mean, "ensemble")
    if logs is not None:
      logs.update(metrics)

  def _training_losses(self) -> dict[str, float]:
    """Returns what each group's replicas have in Keras' mean of the loss."""
    trackers = [
      metric.variables
      for metric in self.model.metrics
      if metric.name == "loss" and len(metric.variables) == 2
    ]
    if not trackers or not self.same_fit() or self.prefixes_before():
      return {}
    copies = replica_values.Copies(self.model.distribute_strategy)
    replicas = range(copies.engine.num_replicas)
    total, count = (copies.read(v, replicas) for v in trackers[0])
    groups = group_state.groups_of(self.model.optimizer, len(replicas))
    return {
      f"loss/group_{i}": float(
        sum(total[r] for r in members) / sum(count[r] for r in members)
      )
      for i, members in enumerate(groups)
    }

  def _build(self) -> None:
    """Makes the twins, and compiles those that are evaluated."""
    model, optimizer = self.model, self.model.optimizer
    num_groups = group_state.groups_of(optimizer, None).num_groups

    def make() -> Any:
      twin = None if self._twin is None else self._twin()
      return replica_state.load_group(0, optimizer, model, into=twin)

    with group_models.outside_of_strategies(), group_schedule.as_group(0):
      # The group of the twin's weights: what it computes is traced once.
      self._group = tf.Variable(0, trainable=False, dtype=tf.int32)
      self._plain = make()
      if libraries.compile_arguments(self._plain) is None:
        _compile_like(model, self._plain)
      self._members = []
      if self._ensemble and num_groups > 1:
        self._members = [make() for _ in range(num_groups)]
        self._mean = _mean_of(self._members)
        _compile_like(self._plain, self._mean)

  def _evaluate(
    self, model: Any, run: str, steps: int | None = None
  ) -> dict[str, float]:
    """Returns a plain model's metrics, on all workers those of the first."""
    workers = agreement.of_strategy(self.model.distribute_strategy)
    metrics: dict[str, float] = {}
    if workers is None or workers.index == 0:
      with (
        group_models.outside_of_strategies(),
        group_schedule.as_group(self._group),
      ):
        result = model.evaluate(
          **self._data, verbose=0, return_dict=True, steps=steps
        )
      metrics = {key: float(value) for key, value in result.items()}
    if workers is not None:
      [text, *_] = agreement.exchange(
        workers, f"evaluating {run}", json.dumps(metrics), math.inf
      )
      metrics = json.loads(text)
    return {
      f"{self.prefix}{key}/{run}": value for key, value in metrics.items()
    }


def _mean_of(members: list[Any]) -> Any:
  """Returns a model of mean predictions, and of the mean of added losses.

  Not `replica_state.ensemble`: that clones models anew, and only some.
  """
  keras = libraries.keras_of(members[0])

  class Mean(keras.Model):  # type: ignore[name-defined]
    def __init__(self) -> None:
      super().__init__()
      self.members = members

    def call(self, inputs: Any) -> Any:
      outputs = []
      for i, member in enumerate(self.members):
        with group_schedule.as_group(i):
          outputs.append(member(inputs, training=False))
      return tf.nest.map_structure(
        lambda *own: tf.add_n(own) / len(own), *outputs
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
  config = libraries.compile_arguments(source)
  if config is None:
    raise ValueError(
      f"GroupMetrics takes loss and metrics from {type(source).__name__}, whose"
      " compile() of Keras was not called. Compile it, or hand in `twin`, a"
      " function that returns a compiled plain model."
    )
  del config["optimizer"]
  target.compile(**tf.nest.map_structure(_copy, config))


def _copy(value: Any) -> Any:
  """Returns a metric's copy, since it keeps a state; else the value itself."""
  is_metric = hasattr(value, "update_state") and hasattr(value, "from_config")
  return value.from_config(value.get_config()) if is_metric else value
