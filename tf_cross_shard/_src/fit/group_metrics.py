"""Evaluates every group on all of the validation data, as a separate model.

Under VectorizedStrategy, Keras evaluates all models in one program:

    evaluate ─▶ metric variables [n, ...] ─▶ val_loss/group_i

Elsewhere, each group is evaluated in a plain model:

    weights of group i ─▶ twin (a plain model) ─▶ evaluate ─▶ val_loss/group_i
    all groups ─▶ mean of their predictions ─▶ val_loss/ensemble
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard._src.core import (
  group_context,
  optimizer_state,
  single_program,
)
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.workers import agreement
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.fit import (
  group_callback,
  group_evaluation,
  keras_fit,
  progress,
)
from tf_cross_shard._src.replica_state import group_models, group_state

_NO_VALIDATION: Final = (
  "reads the metrics of fit(validation_data=...), and this `fit` has no"
  " validation_data. Pass it to `fit` or to GroupMetrics."
)


class GroupMetrics(group_callback.GroupCallback):
  """Adds the metrics of every group to the logs when an epoch ends.

  The metrics of each group are `val_loss/group_0`, `val_accuracy/group_0` and
  so on, or have the names of the groups (`groups.singletons(2, names=["a",
  "b"])`). You see them in the history, and below the progress bar, in one line
  for each metric. Callbacks of this package that come later in the list read
  them.

  **Under VectorizedStrategy**, `fit(validation_data=...)` evaluates all models
  in one program, and `GroupMetrics()` reads the metrics of each model:

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import VectorizedStrategy, callbacks, schedules
  >>> with VectorizedStrategy(2).scope():
  ...   model = tf.keras.Sequential([tf.keras.Input((1,))])
  ...   model.add(tf.keras.layers.Dense(1, kernel_initializer="zeros"))
  ...   sgd = tf.keras.optimizers.SGD(schedules.PerGroup([0.5, 0.25]))
  ...   model.compile(sgd, "mse")
  >>> x = np.ones([4, 1], "float32")
  >>> history = model.fit(
  ...   *(x, x),
  ...   validation_data=(x, x),
  ...   verbose=0,
  ...   callbacks=[callbacks.GroupMetrics()],
  ... ).history
  >>> history["val_loss/group_0"], history["val_loss/group_1"]
  ([1.0], [0.0])

  **Under other strategies**, use `GroupMetrics(data)` instead of
  `fit(validation_data=...)`: there, each replica evaluates its share of the
  rows with the weights of its own group, and the result is a mean that
  describes none of the groups. To evaluate a group, the callback loads its
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
  >>> metrics = callbacks.GroupMetrics((x, x))
  >>> history = model.fit(x, x, verbose=0, callbacks=[metrics]).history
  >>> sorted(key for key in history if "group_1" in key)
  ['loss/group_1', 'val_loss/group_1']

  With data, the callback also evaluates the mean of all groups' predictions, as
  `val_loss/ensemble`. It changes no variable of the model.

  `loss/group_0` and so on are the training losses of each group on its own
  examples; under VectorizedStrategy, there are all training metrics. On several
  machines, the first worker evaluates and sends the metrics to the other
  workers.

  Do not use Keras' ModelCheckpoint to keep the best weights: it saves group 0,
  whichever group it monitors.
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
        reads the metrics of `fit(validation_data=...)` under VectorizedStrategy
        instead; then all other arguments keep their defaults.
      ensemble: Whether to also evaluate the mean prediction of all groups, if
        there are several groups. Outside of VectorizedStrategy, this needs one
        more plain model for each group. If `per_replica` gives each model its
        own data, the ensemble is not evaluated.
      every: Evaluate after the first epoch, and then after each epoch whose
        number, counted from 1, is a multiple of `every`.
      twin: A function without arguments that returns a new plain model of the
        same architecture, for models that Keras cannot clone. If the function
        returns a compiled model, that model's loss and metrics are used. Under
        VectorizedStrategy, the model itself is evaluated.
      batch_size: As in `model.evaluate`, for arrays only.
      name: The prefix of the names of the metrics. A second GroupMetrics with
        other data needs a different name: `"test"` gives `test_loss/group_0`.
      steps: The number of batches of each evaluation; None for all. A dataset
        without end needs it.
    """
    super().__init__()
    group_callback.check_count("every", every, 1, "epochs")
    if steps is not None:
      group_callback.check_count("steps", steps, 1, "batches")
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
            " GroupMetrics((x, y), ...)."
          )
      self._data = None
    else:
      self._data = _checked_data(validation_data, batch_size, steps)
    self.prefix = f"{name}_"
    self._name = name
    self._ensemble = ensemble
    self.every = every
    self._twin = twin
    self.diverged: set[str] = set()
    self._names: list[str] = []
    # The metrics of training and of the validation of `fit`, in this epoch.
    self._training: dict[str, Any] = {}
    self._validation: dict[str, Any] = {}
    # Of models that are one program: reads the metrics of each of them.
    self._of_models: group_evaluation.MetricsOfModels | None = None
    # Elsewhere: the twin, and a twin of each group for the ensemble.
    self._plain: Any = None
    self._members: list[Any] = []
    self._mean: Any = None
    self._is_prepared = False
    self._programs: dict[int, Callable[[], Any]] = {}
    self._receivers: dict[int, dict[str, Any]] = {}
    # The names of the metrics, without prefix and group; None if unknown.
    self._known: list[str] | None = None

  def on_train_begin(self, logs: Any = None) -> None:
    super().on_train_begin(logs)
    self._check_strategy()
    for warnings in optimizer_state.group_warnings_of(self.model.optimizer):
      warnings.is_evaluated_by_group = True
    if self.prefix in self.prefixes_before():
      raise ValueError(
        "`name` must not be that of another GroupMetrics in the list of"
        f" callbacks; got {self._name!r} twice. Give the second one a name:"
        ' GroupMetrics(test_data, name="test").'
      )
    # The first one writes the metrics of training, too, with any name.
    prefix = self.prefix if self.prefixes_before() else ""
    progress.show_in_own_lines([prefix], self.keys, lambda: self._names)
    self._is_prepared = False
    self._known = None
    self.diverged = set()
    if self._data is None:
      if not keras_fit.may_validate():
        logging.warning("GroupMetrics() %s", _NO_VALIDATION)
    elif self.model.built:  # An unbuilt model has no weights to evaluate yet.
      self._prepare()
      self._known = self._try()

  def _check_strategy(self) -> None:
    """Finds out whether Keras evaluates the groups; checks the arguments."""
    strategy = self.model.distribute_strategy
    self._of_models = None
    if single_program.are_models(strategy):
      self._of_models = group_evaluation.MetricsOfModels()
      if self._twin is not None:
        raise ValueError(
          "`twin` must be None under VectorizedStrategy, where the model itself"
          f" is evaluated; got {self._twin!r}. Compile the model with the loss"
          " and the metrics."
        )
    elif self._data is None:
      raise ValueError(
        "`validation_data` must be given under"
        f" {type(strategy).__name__}, because each replica evaluates its share"
        " of the rows in fit(validation_data=...); got None. Use"
        " GroupMetrics((x, y)), which evaluates each group on all rows."
      )

  def check_monitor(self, monitor: str, callback: str) -> None:
    """Raises `ValueError` if no metric has this name, as far as is known."""
    if self._data is None and not keras_fit.may_validate():
      raise ValueError(
        f"{callback} has monitor={monitor!r}, but GroupMetrics()"
        f" {_NO_VALIDATION}"
      )
    metric = monitor.removeprefix(self.prefix)
    names, is_known = self._known, (self._known or ()).__contains__
    if names is None and self._twin is None:
      # Keras adds the name of the output, and numbers repeated names.
      names = keras_fit.names_of_metrics(self.model)
      base = re.sub(r"_\d+$", "", metric)
      is_known = lambda name: any(  # noqa: E731
        f"_{x}".endswith(f"_{y}") for x in (name, base) for y in names or ()
      )
    if names is not None and not is_known(metric):
      raise ValueError(
        f"{callback} has monitor={monitor!r}, but `model` is compiled with the"
        f" metrics {sorted(f'{self.prefix}{name}' for name in set(names))}."
        " Monitor one of them, or add the metric to `metrics` of compile()."
      )

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Clears the metrics of the previous epoch."""
    self._training, self._validation = {}, {}

  def on_test_begin(self, logs: Any = None) -> None:
    """Reads the training metrics, which Keras is about to reset."""
    super().on_test_begin(logs)
    self._training = self._training or self._metrics_of_training()

  def on_test_end(self, logs: Any = None) -> None:
    """Reads the metrics of each model that `fit` has evaluated."""
    if self._data is None and self._of_models is not None:
      self._validation = self._named(self.prefix, logs)

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Evaluates, and adds the metrics to the logs for later callbacks."""
    self._names = group_callback.group_names(self.model.optimizer)
    if logs is not None:
      training = self._training or self._metrics_of_training()
      reported = [*logs]
      for name, value in training.items():
        if name.rpartition("/")[0] in reported or self._of_models is None:
          logs[name] = value
    if self._data is None:
      metrics = self._validation
    elif epoch and (epoch + 1) % self.every:
      return
    else:
      metrics = self._evaluate_groups()
    self._warn_of_diverged(epoch, metrics)
    if logs is not None:
      logs.update(metrics)

  def _evaluate_groups(self) -> dict[str, Any]:
    if not self._is_prepared:
      self._prepare()
    self._state.compare_workers("evaluating groups")
    group_state.warn_if_collapsed(self.model.optimizer)
    if self._of_models is None:
      return self._one_by_one()
    with self._keeping_state():
      logs = self.model.evaluate(**self._batches, verbose=0, return_dict=True)
      metrics = self._named(self.prefix, logs)
      if self._mean is not None:
        metrics |= self._evaluate(self._mean, "ensemble")
    return metrics

  def _one_by_one(self) -> dict[str, Any]:
    """Evaluates the groups one after the other, and then the ensemble."""
    metrics: dict[str, Any] = {}
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

  def _named(
    self, prefix: str, reported: Mapping[str, Any] | None
  ) -> dict[str, Any]:
    """Returns each model's metrics; only those that are `reported`, if given.

    Keras reports no metric that a step of the user's own does not return.
    """
    assert self._of_models is not None
    values = self._of_models.read(self.model)
    groups = nested_lib.groups_of(self.model.optimizer)
    return {
      f"{prefix}{name}/{key}": of_model[members[0]]
      for name, of_model in values.items()
      if reported is None or name in group_evaluation.flat(reported)
      for key, members in zip(self.keys, groups, strict=True)
    }

  @contextlib.contextmanager
  def _keeping_state(self) -> Iterator[None]:
    """Restores what layers store when they are evaluated."""
    copies = replicas_lib.Copies(self.model.distribute_strategy)
    variables = [
      v for v in group_state.variables_of(self.model) if not v.trainable
    ]
    for layer in keras_private.layers(self.model):
      # Keras does not list the states of a stateful recurrent layer.
      states = tf.nest.flatten(getattr(layer, "states", None))
      variables += filter(variables_lib.is_variable, states)
    kept = [(variable, copies.here(variable)) for variable in variables]
    yield
    for variable, arrays in kept:
      copies.write(variable, arrays)

  def _warn_of_diverged(self, epoch: int, metrics: dict[str, Any]) -> None:
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
        "These groups diverged: %s, in epoch %d. GroupEarlyStopping"
        " and GroupCheckpoint count a diverged group as the worst.",
        ", ".join(f"{name} ({self.prefix}loss {new[name]})" for name in new),
        epoch,
      )

  def _metrics_of_training(self) -> dict[str, Any]:
    """Returns what `fit` has counted for each group in this epoch.

    These are all metrics of models that are one program. Elsewhere, it is the
    training loss alone, from the model's metric "loss":

    loss of a group = sum of its members' totals / sum of their counts

    It is Keras' own metric, or that of a model with its own `train_step`.
    """
    if not self.same_fit() or self.prefixes_before():
      return {}
    if self._of_models is not None:
      return self._named("", None)
    trackers = [
      metric.variables
      for metric in self.model.metrics
      if metric.name == "loss" and len(metric.variables) == 2
    ]
    if not trackers:
      return {}
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

  def _prepare(self) -> None:
    """Creates what is evaluated besides the model itself."""
    self._is_prepared = True
    self._programs = {}
    self._state = self.state_of_groups()
    self._members, self._mean = [], None
    has_ensemble = self._ensemble and self._state.groups.num_groups > 1
    with variables_lib.outside_of_strategies(), group_context.as_group(0):
      # The group whose weights the twin has. It is a variable so that the
      # evaluation is traced once, and not once for each group.
      self._group = tf.Variable(0, trainable=False, dtype=tf.int32)
      if self._of_models is None:
        self._create_twins(has_ensemble)
      elif has_ensemble and not self._is_by_model:
        self._mean = _mean_of(_of_models(self.model), self.model)
        _compile_like(self.model, self._mean)

  def _create_twins(self, has_ensemble: bool) -> None:
    """Creates the twins, and compiles those that are evaluated."""
    model, optimizer = self.model, self.model.optimizer

    def make() -> Any:
      twin = None if self._twin is None else self._twin()
      return group_models.load_group(model, 0, optimizer, into=twin)

    self._plain = make()
    if keras_fit.compile_arguments(self._plain) is None:
      _compile_like(model, self._plain)
    self._receivers = {
      id(self._plain): group_models.receivers(self._state, self._plain)
    }
    if has_ensemble:
      self._members = [make() for _ in range(self._state.groups.num_groups)]
      self._mean = _mean_of(_of_members(self._members), self._plain)
      for twin in self._members:
        receivers = group_models.receivers(self._state, twin)
        self._receivers[id(twin)] = receivers
      _compile_like(self._plain, self._mean)

  @property
  def _is_by_model(self) -> bool:
    """Whether `per_replica` gives each model its own part of the data."""
    spec = getattr(self._batches["x"], "element_spec", None)
    return any(
      isinstance(leaf, tf.TypeSpec)
      and issubclass(leaf.value_type, tf.distribute.DistributedValues)
      for leaf in tf.nest.flatten(spec)
    )

  @functools.cached_property
  def _batches(self) -> dict[str, Any]:
    """The data as arguments of `evaluate`, with NumPy arrays as one dataset.

    From arrays, Keras builds a new dataset in each evaluation. For a small
    model, this takes several times longer than the evaluation itself.
    """
    assert self._data is not None
    *arrays, batch_size, steps = self._data.values()
    data = arrays[0]
    if not isinstance(data, tf.data.Dataset):
      if not all(
        isinstance(a, np.ndarray) and a.dtype.kind in "fiub" for a in arrays
      ):
        return self._data
      if len(set(map(len, arrays))) > 1:
        return self._data  # Keras' error says what is wrong.
      # Keras converts floating-point arrays to `floatx`, but not datasets.
      floatx = tf.keras.backend.floatx()
      rows = tuple(
        a.astype(floatx) if a.dtype.kind == "f" else a for a in arrays
      )
      data = tf.data.Dataset.from_tensor_slices(rows).batch(batch_size or 32)
    elif len(arrays) > 1 or batch_size:
      return self._data
    return {"x": data if steps is None else data.take(steps)}

  def _try(self) -> list[str]:
    """Evaluates one batch, to find mistakes before training starts.

    Returns the names of the metrics, without prefix and group.
    """
    if self._of_models is None:
      for model in filter(None, (self._plain, self._mean)):
        found = self._evaluate(model, "one batch", is_trial=True)
    else:
      batches = {**self._batches, "steps": 1}
      with self._keeping_state():
        logs = self.model.evaluate(**batches, verbose=0, return_dict=True)
        found = self._named(self.prefix, logs)
        if self._mean is not None:
          self._evaluate(self._mean, "one batch", is_trial=True)
    names = [name.rpartition("/")[0] for name in found]
    return [name.removeprefix(self.prefix) for name in dict.fromkeys(names)]

  def _evaluate(
    self, model: Any, run: str, is_trial: bool = False
  ) -> dict[str, Any]:
    """Returns a plain model's metrics, which the first worker computes.

    A trial evaluates one batch.
    """
    workers = agreement.of_strategy(self.model.distribute_strategy)
    metrics: dict[str, Any] = {}
    if workers is None or workers.index == 0:
      with (
        variables_lib.outside_of_strategies(),
        group_context.as_group(self._group),
      ):
        program = self._program(model)
        if program is None:
          batches = {**self._batches, **({"steps": 1} if is_trial else {})}
          result = model.evaluate(**batches, verbose=0, return_dict=True)
        elif is_trial:  # Creating the program has evaluated a batch.
          result = model.get_metrics_result()
        else:
          result = program()
      flat = group_evaluation.flat(result)
      metrics = {n: group_evaluation.as_value(v) for n, v in flat.items()}
    if workers is not None:
      text = json.dumps({n: np.asarray(v).tolist() for n, v in metrics.items()})
      [text, *_] = agreement.exchange(
        workers, f"evaluating {run}", text, workers.step_timeout
      )
      received = json.loads(text).items()
      metrics = {n: group_evaluation.as_value(v) for n, v in received}
    return {
      f"{self.prefix}{key}/{run}": value for key, value in metrics.items()
    }

  def _program(self, model: Any) -> Any:
    """Returns a function that evaluates all of the data in one call.

    None where the user's code or other data than a dataset need `evaluate`.
    """
    if (
      set(self._batches) != {"x"}
      or not isinstance(self._batches["x"], tf.data.Dataset)
      or self._of_models is not None
      or not group_evaluation.is_traceable(model)
    ):
      return None
    if id(model) not in self._programs:
      data = self._batches["x"]
      self._programs[id(model)] = group_evaluation.program(model, data)
    return self._programs[id(model)]


def _checked_data(
  validation_data: Any, batch_size: int | None, steps: int | None
) -> dict[str, Any]:
  """Returns data as arguments of `evaluate`; raises an error for wrong data."""
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
  if (
    steps is None
    and isinstance(validation_data, tf.data.Dataset)
    and validation_data.cardinality() == tf.data.INFINITE_CARDINALITY
  ):
    raise ValueError(
      "`steps` must be given for `validation_data` without end; got None. Pass"
      " the number of batches, for example steps=100, or remove repeat()."
    )
  data = dict(zip(("x", "y", "sample_weight"), given, strict=False))
  return {**data, "batch_size": batch_size, "steps": steps}


def _of_members(members: list[Any]) -> Callable[[Any], Any]:
  """Returns a function that gives outputs and losses of each plain model."""

  def predict(inputs: Any) -> Any:
    results = []
    for i, member in enumerate(members):
      with group_context.as_group(i):
        outputs = member(inputs, training=False)
        results.append((outputs, list(member.losses)))
    return tf.nest.map_structure(
      lambda *of_replicas: tf.add_n(of_replicas) / len(of_replicas), *results
    )

  return predict


def _of_models(model: Any) -> Callable[[Any], Any]:
  """Returns a function that gives mean outputs and losses of all models."""
  strategy = model.distribute_strategy

  def of_one(inputs: Any) -> Any:
    return model(inputs, training=False), list(model.losses)

  def predict(inputs: Any) -> Any:
    # Each model is its own group again.
    with group_context.as_group(None), strategy.scope():
      results = strategy.run(of_one, args=(inputs,))
      return tf.nest.map_structure(
        lambda values: strategy.reduce("MEAN", values, axis=None), results
      )

  return predict


def _mean_of(predict: Callable[[Any], Any], like: Any) -> Any:
  """Returns a model of the mean predictions and added losses of all groups.

  `replica_state.ensemble` is of no use here: it clones the models again, and it
  supports functional models only.

  Args:
    predict: Returns the mean outputs, and a list of losses that are added.
    like: The model whose outputs these are.
  """
  keras = keras_private.keras_of(like)
  added: list[Any] = []

  class Mean(keras.Model):  # type: ignore[name-defined]
    def call(self, inputs: Any) -> Any:
      outputs, added[:] = predict(inputs)
      return outputs

    @property
    def losses(self) -> Any:
      return list(added)

  mean = Mean()
  # Keras assigns losses and metrics to several outputs by these names.
  mean.output_names = getattr(like, "output_names", None)
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
