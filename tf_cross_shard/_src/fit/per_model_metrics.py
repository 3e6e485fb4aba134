"""Evaluates every model on all of the validation data, as a separate model.

Under VectorizedStrategy, Keras evaluates all models in one program:

    evaluate ─▶ metric variables [n, ...] ─▶ val_loss/model_i

Elsewhere, each model is evaluated in a plain model:

    weights of model i ─▶ twin (a plain model) ─▶ evaluate ─▶ val_loss/model_i
    all models ─▶ mean of their predictions ─▶ val_loss/ensemble
"""

import math
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from absl import logging

from tf_cross_shard._src.core import optimizer_state
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.fit import (
  evaluation_data,
  evaluators,
  keras_fit,
  per_model_callback,
)
from tf_cross_shard._src.models import group_state

# How numbers of up to 20 models are printed; of more, the first and the last.
_LINE: Final[dict[str, Any]] = {
  "formatter": {"float_kind": "{:.4g}".format},
  **{"threshold": 20, "max_line_width": sys.maxsize},
}


class PerModelMetrics(per_model_callback.PerModelReader):
  """Adds the metrics of every model to the logs when an epoch ends.

  The metrics of each model are `val_loss/model_0`, `val_accuracy/model_0` and
  so on, or have the names of the groups (`groups.singletons(2, names=["a",
  "b"])`). You find them in the history. Callbacks that come later in the list
  read them. Unless `verbose=0`, one line is printed for each metric, below
  Keras' line of the epoch.

  **Under VectorizedStrategy**, `fit(validation_data=...)` evaluates all models
  in one program, and `PerModelMetrics()` reads the metrics of each model:

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import VectorizedStrategy, callbacks, schedules
  >>> with VectorizedStrategy(2).scope():
  ...   model = tf.keras.Sequential([tf.keras.Input((1,))])
  ...   model.add(tf.keras.layers.Dense(1, kernel_initializer="zeros"))
  ...   sgd = tf.keras.optimizers.SGD(schedules.PerModel([0.5, 0.25]))
  ...   model.compile(sgd, "mse")
  >>> x = np.ones([4, 1], "float32")
  >>> history = model.fit(
  ...   *(x, x),
  ...   validation_data=(x, x),
  ...   verbose=0,
  ...   callbacks=[callbacks.PerModelMetrics()],
  ... ).history
  >>> history["val_loss/model_0"], history["val_loss/model_1"]
  ([1.0], [0.0])

  **Under other strategies**, use `PerModelMetrics(data)` instead of
  `fit(validation_data=...)`: there, each replica evaluates its share of the
  rows with the weights of its own model, and the result is a mean that
  describes none of the models. To evaluate a model, the callback loads its
  weights into a second model of the same architecture, the *twin*. The twin is
  a plain Keras model without replicas, compiled with copies of the model's loss
  and metrics.

  >>> from tf_cross_shard import CrossShardOptimizer
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   sgd = tf.keras.optimizers.SGD(0.1)
  ...   model.compile(
  ...     CrossShardOptimizer(sgd, group_assignment=[[0], [1]]), "mse"
  ...   )
  >>> metrics = callbacks.PerModelMetrics((x, x))
  >>> history = model.fit(x, x, verbose=0, callbacks=[metrics]).history
  >>> sorted(key for key in history if "model_1" in key)
  ['loss/model_1', 'val_loss/model_1']

  With data, the callback also evaluates the mean of all models' predictions, as
  `val_loss/ensemble`. It changes no variable of the model.

  `loss/model_0` and so on are the training losses of each model on its own
  examples; under VectorizedStrategy, there are all training metrics. On several
  machines, the first worker evaluates and sends the metrics to the other
  workers.

  Do not use Keras' ModelCheckpoint to keep the best weights: it saves model 0,
  whichever model it monitors.
  """

  def __init__(
    self,
    validation_data: Any = None,
    ensemble: bool = True,
    every: int = 1,
    twin: Callable[[], Any] | None = None,
    batch_size: int | None = None,
    name: str = "val",
    steps: int | None = None,
  ) -> None:
    """Sets the data and the way to evaluate.

    Args:
      validation_data: A dataset, `(x, y)` or `(x, y, sample_weight)`, as for
        `fit`. On several machines, the data of the first worker are used. None
        reads the metrics of `fit`, with or without its `validation_data`, under
        VectorizedStrategy; then all other arguments keep their defaults.
      ensemble: Whether to also evaluate the mean prediction of all models, if
        there are several. Outside of VectorizedStrategy, this needs one more
        plain model for each model. If `per_model` gives each model its
        own data, the ensemble is not evaluated.
      every: Evaluate after the first epoch, and then after each epoch whose
        number, counted from 1, is a multiple of `every`.
      twin: A function without arguments that returns a new plain model of the
        same architecture, for models that Keras cannot clone. If the function
        returns a compiled model, that model's loss and metrics are used. Under
        VectorizedStrategy, the model itself is evaluated.
      batch_size: As in `model.evaluate`, for arrays only.
      name: The prefix of the names of the metrics. A second PerModelMetrics
        with other data needs a different name: `"test"` gives
        `test_loss/model_0`.
      steps: The number of batches of each evaluation; None for all. A dataset
        without end needs it.
    """
    super().__init__()
    per_model_callback.check_count("every", every, 1, "epochs")
    if steps is not None:
      per_model_callback.check_count("steps", steps, 1, "batches")
    if not isinstance(ensemble, bool):
      raise TypeError(
        f"`ensemble` must be True or False; got {type(ensemble).__name__}."
        " Pass all data as one argument: PerModelMetrics((x, y))."
      )
    if not isinstance(name, str) or not name or "/" in name:
      raise ValueError(
        f"`name` must be a string without a slash; got {name!r}. Use for"
        " example 'test'."
      )
    if validation_data is None:
      for argument, value, default in (
        ("every", every, 1),
        ("twin", twin, None),
        ("batch_size", batch_size, None),
        ("name", name, "val"),
        ("steps", steps, None),
      ):
        if value != default:
          raise ValueError(
            f"`{argument}` must be {default!r} without `validation_data`,"
            f" because `fit` evaluates; got {value!r}. Pass the data:"
            " PerModelMetrics((x, y), ...)."
          )
      self._data = None
    else:
      self._data = evaluation_data.EvaluationData(
        validation_data, batch_size, steps
      )
    self.prefix = "" if validation_data is None else f"{name}_"
    self.name = name
    self._ensemble = ensemble
    self.every = every
    self._twin = twin
    self.diverged: set[str] = set()
    self._names: list[str] = []
    # The training losses in this epoch, where replicas are no models.
    self._losses: dict[str, Any] = {}
    # What evaluates the models on the data; None before the first evaluation.
    self._evaluator: (
      evaluators.ModelsEvaluator | evaluators.TwinEvaluator | None
    ) = None
    # The names of the metrics, without prefix and model; None if unknown.
    self._known: list[str] | None = None

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    self._check_strategy()
    for warnings in optimizer_state.group_warnings_of(self.model.optimizer):
      warnings.is_evaluated_by_group = True
    if self.name in [c.name for c in self._all() if c is not self]:
      raise ValueError(
        "`name` must not be that of another PerModelMetrics in the list of"
        f" callbacks; got {self.name!r} twice. Give the second one a name:"
        ' PerModelMetrics(test_data, name="test").'
      )
    self._evaluator = None
    self._known = None
    self.diverged = set()
    # An unbuilt model has no weights to evaluate yet.
    if self._data is not None and self.model.built:
      self._make_evaluator()
      assert self._evaluator is not None
      # One batch, to find mistakes before training starts.
      found = self._evaluator.evaluate(one_batch=True)
      self._known = list(dict.fromkeys(n.rpartition("/")[0] for n in found))

  def _all(self) -> list["PerModelMetrics"]:
    """Returns all PerModelMetrics of the `fit`."""
    every = self.same_fit() or [self]
    return [c for c in every if isinstance(c, PerModelMetrics)]

  def _check_strategy(self) -> None:
    """Checks the arguments that depend on the strategy."""
    if self.of_models is not None:
      if self._twin is not None:
        raise ValueError(
          "`twin` must be None under VectorizedStrategy, where the model itself"
          f" is evaluated; got {self._twin!r}. Compile the model with the loss"
          " and the metrics."
        )
    elif self._data is None:
      raise ValueError(
        "`validation_data` must be given under"
        f" {type(self.model.distribute_strategy).__name__}, because each"
        " replica evaluates its share of the rows in fit(validation_data=...);"
        " got None. Use PerModelMetrics((x, y)), which evaluates each model on"
        " all rows."
      )

  def check_monitor(self, monitor: str, callback: str) -> None:
    names = self._known
    if names is None and self._twin is None:
      names = keras_fit.names_of_metrics(self.model)
    keras_fit.check_monitor(
      *(callback, monitor, (self.prefix,), names), self._known is not None
    )

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    self._losses = {}

  def on_test_begin(self, logs: Any = None) -> None:
    """Reads the training metrics, which Keras is about to reset."""
    super().on_test_begin(logs)
    self._losses = self._losses or self._losses_of_training()

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Evaluates, and adds the metrics to the logs for later callbacks."""
    self._names = per_model_callback.group_names(self.model.optimizer)
    found = self.metrics_of_models({} if logs is None else logs)
    of_fit = {n: x for n, x in found.items() if n.startswith("val_")}
    if logs is not None:
      logs.update({n: x for n, x in found.items() if n not in of_fit})
      logs.update(self._losses or self._losses_of_training())
    if self._data is None:
      metrics = of_fit
    elif epoch and (epoch + 1) % self.every:
      return
    else:
      metrics = self._evaluate()
    self._warn_of_diverged(epoch, metrics)
    if logs is not None:
      logs.update(metrics)
    if (self.params or {}).get("verbose"):
      self._print(metrics)

  def _print(self, metrics: dict[str, Any]) -> None:
    """Prints a line for each metric, below what Keras prints of the epoch."""
    for name in dict.fromkeys(n.rpartition("/")[0] for n in metrics):
      of_name = {n: x for n, x in metrics.items() if n.startswith(f"{name}/")}
      ends = dict.fromkeys([next(iter(of_name)), next(reversed(of_name))])
      numbers = np.array2string(np.array([*of_name.values()]), **_LINE)
      print(" to ".join(ends), numbers.replace("\n", ""))

  def _evaluate(self) -> dict[str, Any]:
    if self._evaluator is None:
      self._make_evaluator()
    assert self._evaluator is not None
    self.state_of_groups().compare_workers("evaluating models")
    group_state.warn_if_collapsed(self.model.optimizer)
    found = self._evaluator.evaluate().items()
    return {f"{self.prefix}{name}": value for name, value in found}

  def _warn_of_diverged(self, epoch: int, metrics: dict[str, Any]) -> None:
    """Warns once of each model, or trial, whose loss is not finite."""
    told = self._all()[0].diverged  # One of several PerModelMetrics remembers.
    loss = f"{self.name}_loss"
    new = {
      name: metrics[f"{loss}/{key}"]
      for name, key in zip(self._names, self.keys, strict=True)
      if name not in told and not math.isfinite(metrics.get(f"{loss}/{key}", 0))
    }
    told.update(new)
    if new:
      logging.warning(
        "These models diverged: %s, in epoch %d. PerModelEarlyStopping and"
        " PerModelCheckpoint count a diverged model as the worst.",
        ", ".join(f"{name} ({loss} {new[name]})" for name in new),
        epoch,
      )

  def _losses_of_training(self) -> dict[str, Any]:
    """Returns sum of members' totals / sum of counts of the metric "loss"."""
    if self.of_models or not self.same_fit() or self._all()[0] is not self:
      return {}
    trackers = [
      metric.variables
      for metric in self.model.metrics
      if metric.name == "loss" and len(metric.variables) == 2
    ]
    copies = replicas_lib.Copies(self.model.distribute_strategy)
    replicas = range(copies.engine.num_replicas)
    groups = nested_lib.groups_of(self.model.optimizer, copies.engine.strategy)
    for tracker in trackers:
      # The tracker has two variables, with a value in each replica.
      total, count = (copies.read(v, replicas) for v in tracker)
      if all(count):
        return {
          f"loss/{key}": float(
            sum(total[r] for r in members) / sum(count[r] for r in members)
          )
          for key, members in zip(self.keys, groups, strict=True)
        }
    return {}

  def _make_evaluator(self) -> None:
    """Creates what is evaluated besides the model itself."""
    assert self._data is not None
    has_ensemble = self._ensemble and len(self.keys) > 1
    with variables_lib.outside_of_strategies():
      if self.of_models is None:
        self._evaluator = evaluators.TwinEvaluator(
          *(self.model, self.keys, self._data, self._twin, has_ensemble)
        )
      else:
        self._evaluator = evaluators.ModelsEvaluator(
          *(self.model, self.keys, self._data, self.of_models, has_ensemble)
        )
