"""Evaluates every group on all of the validation data, as a separate model.

weights of group i ─▶ twin (a plain model) ─▶ evaluate ─▶ val_loss/group_i
all groups ─▶ mean of their predictions ─▶ val_loss/ensemble
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import group_numbers, single_program
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import keras_private
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.core.workers import agreement
from tf_cross_shard._src.fit import (
  group_callback,
  group_evaluation,
  keras_fit,
  progress,
)
from tf_cross_shard._src.replica_state import group_models, group_state

_GROUP: Final = "group"  # The name of the variable with the group's number.


class GroupMetrics(group_callback.GroupCallback):
  """Evaluates every group on all of the validation data when an epoch ends.

  This callback writes the metrics of each group into the logs, as
  `val_loss/group_0`, `val_accuracy/group_0` and so on, or with the names of the
  groups (`groups.singletons(2, names=["a", "b"])`). It writes the metrics of
  the mean of all groups' predictions as `val_loss/ensemble`. You see these
  metrics in the history, and below the progress bar, in one line for each
  metric. Callbacks of this package that come later in the list read them.

  Use it instead of `fit(validation_data=...)`. There, each replica evaluates
  its share of the rows with the weights of its own group, and the result is a
  mean that describes none of the groups.

  To evaluate a group, the callback loads its weights into a second model of the
  same architecture, the *twin*. The twin is a plain Keras model without
  replicas, compiled with copies of the model's loss and metrics.

  Do not use Keras' ModelCheckpoint to keep the best weights: it saves group 0,
  whichever group it monitors.

  >>> import numpy as np
  >>> import tensorflow as tf
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

  `loss/group_0` and so on are the training losses of each group on its own
  examples. On several machines, the first worker evaluates and sends the
  metrics to the other workers.
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
    """Sets the data and the way to evaluate.

    Args:
      validation_data: A dataset, `(x, y)` or `(x, y, sample_weight)`, as for
        `fit`. On several machines, the data of the first worker are used.
      ensemble: Whether to also evaluate the mean prediction of all groups, if
        there are several groups. This needs one more plain model for each
        group.
      every: Evaluate after the first epoch, and then after each epoch whose
        number, counted from 1, is a multiple of `every`.
      twin: A function without arguments that returns a new plain model of the
        same architecture, for models that Keras cannot clone. If the function
        returns a compiled model, that model's loss and metrics are used.
      batch_size: As in `model.evaluate`, for arrays only.
      name: The prefix of the names of the metrics. A second GroupMetrics with
        other data needs a different name: `"test"` gives `test_loss/group_0`.
    """
    super().__init__()
    group_callback.check_count("every", every, 1, "epochs")
    if not isinstance(ensemble, bool):
      raise TypeError(
        f"`ensemble` must be True or False; got {type(ensemble).__name__}."
        " Pass all data as one argument: GroupMetrics((x, y))."
      )
    if not isinstance(name, str) or not name or "/" in name:
      raise ValueError(
        f"`name` must be a string without a slash; got {name!r}. Use for"
        " example 'test'."
      )
    is_tuple = isinstance(validation_data, (tuple, list))
    given = validation_data if is_tuple else (validation_data,)
    # An array has a shape; a dataset and a generator have none.
    is_wrong = hasattr(validation_data, "__next__") or hasattr(
      validation_data, "shape"
    )
    if is_wrong or len(given) > 3:
      raise TypeError(
        "`validation_data` must be a dataset, (x, y) or (x, y, sample_weight);"
        f" got {type(validation_data).__name__}. Add the targets of an array."
        " Turn a generator into a tf.data.Dataset with cache(), because every"
        " group reads the data."
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
    # Where one program evaluates all groups; None to evaluate one by one.
    self._stacks: group_evaluation.Stacks | None = None
    self._programs: dict[int, Callable[[], Any]] = {}
    self._receivers: dict[int, dict[str, Any]] = {}
    self._losses: dict[str, float] = {}
    self.diverged: set[str] = set()
    self._names: list[str] = []

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    for warnings in names_lib.group_warnings_of(self.model.optimizer):
      warnings.is_evaluated_by_group = True
    if self.prefix in self.prefixes_before():
      raise ValueError(
        "`name` must not be that of another GroupMetrics in the list of"
        f" callbacks; got {self._name!r} twice. Give the second one a name:"
        ' GroupMetrics(test_data, name="test").'
      )
    is_first = not self.prefixes_before()
    progress.show_in_own_lines(
      [self.prefix, *["loss", "learning_rate"] * is_first],
      self.keys,
      lambda: self._names,
    )
    self._plain = None
    self.diverged = set()
    if self.model.built:  # An unbuilt model has no weights to evaluate yet.
      self._build()
      for model in filter(None, (self._plain, self._mean)):
        self._evaluate(model, "one batch", is_trial=True)

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Clears the training losses of the previous epoch."""
    self._losses = {}

  def on_test_begin(self, logs: Any = None) -> None:
    super().on_test_begin(logs)
    self._losses = self._losses or self._training_losses()

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Evaluates, and adds the metrics to the logs for later callbacks."""
    self._names = group_callback.group_names(self.model.optimizer)
    if logs is not None:
      logs.update(self._losses or self._training_losses())
    if epoch and (epoch + 1) % self.every:
      return
    if self._plain is None:
      self._build()
    self._state.compare_workers("evaluating groups")
    group_state.warn_if_collapsed(self.model.optimizer)
    if self._stacks is None:
      metrics = self._one_by_one()
    else:
      metrics = self._all_at_once(self._stacks)
    self._warn_of_diverged(epoch, metrics)
    if logs is not None:
      logs.update(metrics)

  def _one_by_one(self) -> dict[str, float]:
    """Evaluates the groups one after the other, and then the ensemble."""
    metrics: dict[str, float] = {}
    for i, key in enumerate(self.keys):
      members = self._state.groups.assignment[i]
      values = group_models.values_of(self._state, members)
      for twin in (self._plain, *self._members[i : i + 1]):
        for name, variable in self._receivers[id(twin)].items():
          variable.assign(values[name])
        group_models.finalize(twin)
      self._group.assign(i)
      metrics |= self._evaluate(self._plain, key)
    if self._mean is not None:
      self._group.assign(0)
      metrics |= self._evaluate(self._mean, "ensemble")
    return metrics

  def _all_at_once(self, stacks: group_evaluation.Stacks) -> dict[str, float]:
    """Evaluates all groups in one program."""
    values = group_models.values_of_groups(self._state)
    stacks.assign(values | {_GROUP: np.arange(stacks.groups, dtype=np.int32)})
    metrics: dict[str, float] = {}
    with (
      variables_lib.outside_of_strategies(),
      group_numbers.as_group(self._group),
    ):
      results = self._program(self._plain)()
      for i, key in enumerate(self.keys):
        metrics |= self._named(results, key, i)
      if self._mean is not None:
        results = self._program(self._mean)()
        metrics |= self._named(results, "ensemble", 0)
    return metrics

  def _named(self, results: Any, run: str, row: int) -> dict[str, float]:
    return {
      f"{self.prefix}{name}/{run}": float(values[row])
      for name, values in results.items()
    }

  def _warn_of_diverged(self, epoch: int, metrics: dict[str, float]) -> None:
    """Warns once of each group, or trial, whose loss is not finite."""
    diverged = {
      name: metrics[f"{self.prefix}loss/{key}"]
      for name, key in zip(self._names, self.keys, strict=True)
      if name and not math.isfinite(metrics.get(f"{self.prefix}loss/{key}", 0))
    }
    for other in self.same_fit() or [self]:
      if isinstance(other, GroupMetrics):
        new = {n: x for n, x in diverged.items() if n not in other.diverged}
        other.diverged.update(new)
        break  # One of several GroupMetrics in a `fit` remembers.
    if new:
      logging.warning(
        "These groups diverged: %s, in epoch %d. GroupEarlyStopping,"
        " GroupCheckpoint count a diverged group as the worst.",
        ", ".join(f"{name} ({self.prefix}loss {new[name]})" for name in new),
        epoch,
      )

  def _training_losses(self) -> dict[str, float]:
    """Returns each group's training loss, from the model's metric "loss".

    loss of a group = sum of its members' totals / sum of their counts

    It is Keras' own metric, or that of a model with its own `train_step`.
    """
    trackers = [
      metric.variables
      for metric in self.model.metrics
      if metric.name == "loss" and len(metric.variables) == 2
    ]
    if not trackers or not self.same_fit() or self.prefixes_before():
      return {}
    copies = replicas_lib.Copies(self.model.distribute_strategy)
    replicas = range(copies.engine.num_replicas)
    groups = names_lib.groups_of(self.model.optimizer, copies.engine.strategy)
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

  def _build(self) -> None:
    """Creates the twins, and compiles those that are evaluated."""
    model, optimizer = self.model, self.model.optimizer
    num_groups = names_lib.groups_of(optimizer).num_groups

    def make() -> Any:
      twin = None if self._twin is None else self._twin()
      return group_models.load_group(model, 0, optimizer, into=twin)

    self._programs = {}
    self._state = self.state_of_groups()
    with variables_lib.outside_of_strategies(), group_numbers.as_group(0):
      # The group whose weights the twin has. It is a variable so that the
      # evaluation is traced once, and not once for each group.
      self._group = tf.Variable(0, trainable=False, dtype=tf.int32)
      self._plain = make()
      if keras_fit.compile_arguments(self._plain) is None:
        _compile_like(model, self._plain)
      own = group_models.receivers(self._state, self._plain)
      self._receivers = {id(self._plain): own}
      self._members, self._mean, self._stacks = [], None, None
      if num_groups > 1 and self._is_vectorized():
        own = {_GROUP: self._group, **own}
        self._stacks = group_evaluation.Stacks(num_groups, own)
      if self._ensemble and num_groups > 1:
        if self._stacks is not None:
          self._mean = _mean_of([self._plain], num_groups)
        else:
          self._members = [make() for _ in range(num_groups)]
          self._mean = _mean_of(self._members)
          for twin in self._members:
            receivers = group_models.receivers(self._state, twin)
            self._receivers[id(twin)] = receivers
        _compile_like(self._plain, self._mean)

  def _is_vectorized(self) -> bool:
    """Returns whether one program can evaluate all groups.

    `finalize_state` of a layer computes values that are no variables.
    """
    return (
      single_program.is_vectorized(self.model.distribute_strategy)
      and self._has_program(self._plain)
      and not any(
        hasattr(layer, "finalize_state")
        for layer in keras_private.layers(self._plain)
      )
    )

  @functools.cached_property
  def _batches(self) -> dict[str, Any]:
    """The data as arguments of `evaluate`, with NumPy arrays as one dataset.

    From arrays, Keras builds a new dataset in each evaluation. For a small
    model, this takes several times longer than the evaluation itself.
    """
    *arrays, batch_size = self._data.values()
    if not all(
      isinstance(a, np.ndarray) and a.dtype.kind in "fiub" for a in arrays
    ):
      return self._data
    if len(set(map(len, arrays))) > 1:
      return self._data  # Keras' error says what is wrong.
    # Keras converts floating-point arrays to `floatx`, but not datasets.
    floatx = tf.keras.backend.floatx()
    rows = tuple(a.astype(floatx) if a.dtype.kind == "f" else a for a in arrays)
    data = tf.data.Dataset.from_tensor_slices(rows)
    return {"x": data.batch(batch_size or 32)}

  def _evaluate(
    self, model: Any, run: str, is_trial: bool = False
  ) -> dict[str, float]:
    """Returns a plain model's metrics, which the first worker computes.

    A trial evaluates one batch, to find mistakes before training starts.
    """
    workers = agreement.of_strategy(self.model.distribute_strategy)
    metrics: dict[str, float] = {}
    if workers is None or workers.index == 0:
      with (
        variables_lib.outside_of_strategies(),
        group_numbers.as_group(self._group),
      ):
        program = self._program(model)
        if program is None:
          steps = 1 if is_trial else None
          result = model.evaluate(
            **self._batches, verbose=0, return_dict=True, steps=steps
          )
        else:
          result = {} if is_trial else program()
      flat = group_evaluation.flat(result)
      metrics = {name: float(number) for name, number in flat.items()}
    if workers is not None:
      [text, *_] = agreement.exchange(
        workers, f"evaluating {run}", json.dumps(metrics), workers.step_timeout
      )
      metrics = json.loads(text)
    return {
      f"{self.prefix}{key}/{run}": value for key, value in metrics.items()
    }

  def _program(self, model: Any) -> Any:
    """Returns a function that evaluates all of the data in one call.

    None where the user's code or other data than a dataset need `evaluate`.
    """
    if not self._has_program(model):
      return None
    if id(model) not in self._programs:
      make = self._stacks.program if self._stacks else group_evaluation.program
      self._programs[id(model)] = make(model, self._batches["x"])
    return self._programs[id(model)]

  def _has_program(self, model: Any) -> bool:
    return (
      isinstance(self._batches["x"], tf.data.Dataset)
      and not set(self._batches) - {"x", "batch_size"}
      and not self._batches.get("batch_size")
      and group_evaluation.is_traceable(model)
    )


def _mean_of(members: list[Any], groups: int | None = None) -> Any:
  """Returns a model that averages the members' predictions and added losses.

  `replica_state.ensemble` is of no use here: it clones the models again, and it
  supports functional models only.

  Args:
    members: A plain model for each group.
    groups: The number of groups, if there is one member instead, and the
      program for all groups gives it the variables of each group.
  """
  keras = keras_private.keras_of(members[0])

  class Mean(keras.Model):  # type: ignore[name-defined]
    def __init__(self) -> None:
      super().__init__()
      self.members = members

    def call(self, inputs: Any) -> Any:
      if groups is not None:
        output = self.members[0](inputs, training=False)
        return tf.nest.map_structure(self.over_groups, output)
      outputs = []
      for i, member in enumerate(self.members):
        with group_numbers.as_group(i):
          outputs.append(member(inputs, training=False))
      return tf.nest.map_structure(
        lambda *own: tf.add_n(own) / len(own), *outputs
      )

    @property
    def losses(self) -> Any:
      if groups is not None:
        return list(map(self.over_groups, self.members[0].losses))
      losses = []
      for i, member in enumerate(self.members):
        with group_numbers.as_group(i):
          losses += [loss / len(members) for loss in member.losses]
      return losses

    def over_groups(self, tensor: tf.Tensor) -> tf.Tensor:
      return group_evaluation.mean_over_groups(tensor, groups or 1)

  mean = Mean()
  # Keras assigns losses and metrics to several outputs by these names.
  mean.output_names = getattr(members[0], "output_names", None)
  return mean


def _compile_like(source: Any, target: Any) -> None:
  config = keras_fit.compile_arguments(source)
  if config is None:
    raise ValueError(
      f"GroupMetrics copies loss and metrics of {type(source).__name__}, whose"
      " compile() of Keras was not called. Compile the model, or pass `twin`, a"
      " function that returns a compiled plain model."
    )
  del config["optimizer"]
  target.compile(**tf.nest.map_structure(_copy, config))


def _copy(value: Any) -> Any:
  """Returns a copy of a metric, because metrics have state; else `value`."""
  is_metric = hasattr(value, "update_state") and hasattr(value, "from_config")
  return value.from_config(value.get_config()) if is_metric else value
