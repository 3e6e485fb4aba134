"""Runs a model function once on each device, as one training step.

features, labels ─▶ split ─┬▶ tower_0: model_fn ─┬▶ merged TowerSpec
                           ├▶ tower_1: model_fn ─┤
                           └▶ ...               ─┘
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard._src.core import loss_factor
from tf_cross_shard._src.towers import (
  batch_split,
  gradient_collector,
  shared_variables,
)

# For these reductions, the towers of TensorFlow 1 divided the sum by the number
# of towers, although the losses themselves have other denominators.
_MEANS: Final = (
  "weighted_sum_over_batch_size",
  "weighted_sum_by_nonzero_weights",
)


class ModeKeys:
  """The modes in which a model function is called, spelled as in TensorFlow 1.

  >>> from tf_cross_shard import ModeKeys
  >>> ModeKeys.PREDICT
  'infer'

  Attributes:
    TRAIN: Training.
    EVAL: Evaluation.
    PREDICT: Prediction.
  """

  TRAIN: Final = "train"
  EVAL: Final = "eval"
  PREDICT: Final = "infer"


class TowerSpec(NamedTuple):
  """Result of a model function, like `EstimatorSpec` in TensorFlow 1.

  Each tower returns a spec. A replicated model function returns one merged spec
  for all towers.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import TowerSpec
  >>> spec = TowerSpec("train", loss=tf.constant(2.0))
  >>> float(spec.loss), spec.predictions
  (2.0, None)

  Attributes:
    mode: One of `ModeKeys`.
    loss: A tensor. Merged: the sum or mean of the towers' losses.
    train_op: The iteration count that the optimizer returned. Merged: the count
      that the last optimizer returned after the update.
    predictions: A tensor or a nest of tensors, with the examples along axis 0.
      Merged: the predictions of all towers, concatenated in order.
    metrics: A dictionary of `tf.keras.metrics.Metric` objects that the tower
      has updated. Merged: the result of each metric over all towers.
    export_outputs: Like `predictions`.
  """

  mode: str
  loss: Any = None
  train_op: Any = None
  predictions: Any = None
  metrics: Any = None
  export_outputs: Any = None


class ReplicatedModelFn:
  """A model function that runs on several devices when you call it.

  `replicate_model_fn` makes it and documents the arguments.
  """

  def __init__(
    self, model_fn: Callable[..., Any], loss_reduction: Any, devices: Any
  ) -> None:
    self._model_fn = model_fn
    self._parameters = inspect.signature(model_fn).parameters
    self._reduction = (
      loss_factor.MEAN
      if loss_reduction in _MEANS
      else loss_factor.canonical_reduction(loss_reduction, "loss_reduction")
    )
    self._devices = None if devices is None else _as_devices(devices)
    self._shared = shared_variables.SharedVariables()
    self._metrics: dict[tuple[str, str], Any] = {}

  @property
  def devices(self) -> list[str]:
    """Names of the devices that the towers run on.

    The default is all GPUs of this machine, or all CPUs if it has no GPU.
    """
    if self._devices is not None:
      return list(self._devices)
    local = tf.config.list_logical_devices
    return [device.name for device in local("GPU") or local("CPU")]

  @property
  def variables(self) -> list[Any]:
    """All `tf.Variable` objects that model_fn has created so far."""
    return self._shared.variables

  def reset_metrics(self) -> None:
    """Resets all metrics that model_fn has returned so far."""
    for metric in self._metrics.values():
      metric.reset_state()

  def __call__(
    self,
    features: Any,
    labels: Any = None,
    mode: str = ModeKeys.TRAIN,
    params: Any = None,
    config: Any = None,
  ) -> TowerSpec:
    """Runs model_fn in every tower and merges the specs that it returns.

    Args:
      features: A nest of tensors with the examples of the batch along axis 0. A
        list of numbers, or of lists of numbers, is a tensor. Each tensor is
        divided by its own number of rows.
      labels: The same for labels, or None.
      mode: `"train"`, `"eval"` or `"infer"`.
      params: Passed on if model_fn has an argument of this name.
      config: Passed on if model_fn has an argument of this name.

    Returns:
      One `TowerSpec` of tensors. `TowerSpec` documents how each attribute is
      merged.

    Raises:
      ValueError: If the batch size is not divisible by the number of towers, if
        `mode` is unknown, if the towers differ, or if several towers train
        without a TowerOptimizer.
      TypeError: If model_fn does not return a TowerSpec.
    """
    devices = self._check(mode)
    parts = batch_split.split("features", features, len(devices))
    labels_parts = batch_split.split("labels", labels, len(devices))
    options = {"mode": mode, "params": params, "config": config}
    specs = []
    variables = shared_variables.CallVariables(self._shared, mode)
    collector = gradient_collector.GradientCollector(
      len(devices), self._reduction, variables, mode == ModeKeys.TRAIN
    )
    for tower, device in enumerate(devices):
      options["labels"] = labels_parts[tower]
      arguments = self._arguments(parts[tower], options)
      with (
        _on(device),
        tf.name_scope(f"tower_{tower}"),
        variables.tower(),
        collector.tower(),
      ):
        spec = self._model_fn(**arguments)
      _check_spec(spec)
      specs.append(spec)
      variables.check_tower(spec.metrics)
    return self._merge(collector, specs, devices[0])

  @tf.autograph.experimental.do_not_convert
  def _check(self, mode: Any) -> list[str]:
    """Checks the place and the mode of a call; returns the devices."""
    if gradient_collector.current() is not None:
      raise ValueError(
        "Towers cannot be nested: a replicated `model_fn` was called within a"
        " tower. Replicate only the outermost function, over all devices."
      )
    modes = [ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT]
    if mode not in modes:
      raise ValueError(f"`mode` must be one of {modes}; got {mode!r}.")
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if self._devices is None and replicas > 1:
      raise ValueError(
        f"`devices` must be given in each of {replicas} replicas; got None."
        ' Name the devices of one replica\'s towers, such as ["", ""] for two'
        " towers on the replica's own device."
      )
    return self.devices

  @tf.autograph.experimental.do_not_convert
  def _arguments(
    self, features: Any, options: dict[str, Any]
  ) -> dict[str, Any]:
    """Returns features and the options that model_fn has arguments for."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
    has_default = {
      p.name: p.default is not p.empty
      for p in self._parameters.values()
      if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    # An option that is None does not replace a default of model_fn.
    arguments = {
      name: value
      for name, value in options.items()
      if (name in has_default or takes_any)
      and not (value is None and has_default.get(name))
    }
    if "params" in arguments:  # A tower may change its own copy.
      arguments["params"] = copy.copy(arguments["params"])
    # Features go to the argument "features", or to the first required argument.
    required = [
      name
      for name, is_optional in has_default.items()
      if not is_optional and name not in options
    ]
    is_named = "features" in has_default or not required
    return {"features" if is_named else required[0]: features, **arguments}

  @tf.autograph.experimental.do_not_convert
  def _merge(
    self,
    collector: gradient_collector.GradientCollector,
    specs: Sequence[TowerSpec],
    device: str,
  ) -> TowerSpec:
    """Merges the specs of all towers, and applies the collected gradients."""
    if (
      collector.is_training and collector.count > 1 and not collector.has_calls
    ):
      raise ValueError(
        "`model_fn` must apply gradients through a TowerOptimizer when it is"
        f" replicated; {collector.count} towers called none. Use"
        " TowerOptimizer(optimizer), and call its minimize or apply_gradients."
      )
    # Merge first, so that an error in a spec is raised before the update.
    merged = _merged(specs, self._reduction)
    for name, metric in (specs[-1].metrics or {}).items():
      self._metrics[merged.mode, name] = metric
    if not collector.has_calls:
      return merged
    results = tf.nest.flatten(merged, expand_composites=True)
    # The variables are on the first device.
    with _on(device), tf.name_scope(f"tower_{collector.count - 1}"):
      # Call `prepare` before the control dependencies: slots may be created
      # outside the graph, where they cannot depend on tensors of the graph.
      collector.prepare()
      # In a graph, too, an error in a merged tensor comes before the update.
      with tf.control_dependencies(list(filter(tf.is_tensor, results))):
        return merged._replace(train_op=collector.apply())


def replicate_model_fn(
  model_fn: Callable[..., Any],
  loss_reduction: Any = loss_factor.SUM,
  devices: Sequence[str] | None = None,
) -> ReplicatedModelFn:
  """Runs a model function on several devices of one machine, as one step.

  The batch is split into equal parts along axis 0, one for each device. The
  copy of `model_fn` on a device is called a tower. With `L_i` the loss of tower
  `i` of `n`, a `TowerOptimizer` in model_fn applies the gradients of

      sum over i of L_i              loss_reduction="sum"
      (sum over i of L_i) / n        loss_reduction="mean"

  Nothing is applied before every tower has returned. In a tf.function, the
  towers run in parallel.

  All towers and all calls share the variables that model_fn creates. They are
  on the first device. Variables are matched by order: the i-th variable of a
  tower is the i-th variable of the first tower in the first call. You get an
  error if a tower creates a different number of variables, or variables of
  different shapes or dtypes. Only optimizers and `metrics` may differ
  between modes; create them after all other variables.
  `tf.compat.v1.get_variable` finds its variable by name.

  If you create layers or optimizers outside model_fn, build them before the
  first call. A tf.function creates variables in its first call only, so use one
  tf.function for each mode. If that call raises an error, replicate model_fn
  again: variables of a trace that failed have no values.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import TowerOptimizer, TowerSpec
  >>> from tf_cross_shard import replicate_model_fn
  >>> c = tf.Variable(10.0)
  >>> optimizer = TowerOptimizer(tf.keras.optimizers.SGD(1.0))
  >>> def model_fn(features, mode):
  ...   loss = tf.reduce_sum(c * features)
  ...   return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))
  >>> two = replicate_model_fn(model_fn, devices=["CPU:0", "CPU:1"])
  >>> spec = two(tf.constant([[1.0], [2.0]]), mode="train")
  >>> float(spec.loss), float(c.numpy())
  (30.0, 7.0)

  Args:
    model_fn: A function that returns a `TowerSpec`. It receives features and,
      if it has arguments of these names, labels, mode, params and config. If it
      has no argument named features, its first other argument receives them.
    loss_reduction: `"sum"` (the default) or `"mean"`. The spellings of
      `tf.compat.v1.losses.Reduction` and of Keras are accepted.
    devices: Names of devices, one for each tower. `""` means the device of the
      caller. None (the default) means all GPUs of this machine, or all CPUs if
      it has no GPU.

  Returns:
    A function of `(features, labels, mode, params, config)` that returns one
    merged `TowerSpec`.

  Raises:
    ValueError: If `loss_reduction` is `"none"` or unknown, or if `devices`
      names a device that this machine does not have.
    TypeError: If `model_fn` is not a function.

  References:
    tf.contrib.estimator.replicate_model_fn of TensorFlow 1.
  """
  return ReplicatedModelFn(model_fn, loss_reduction, devices)


def _check_spec(spec: Any) -> None:
  if not isinstance(spec, TowerSpec):
    raise TypeError(
      f"`model_fn` must return a TowerSpec; got {spec!r}. Return"
      " TowerSpec(mode, loss=loss, ...)."
    )
  # TensorFlow 1 used pairs of tensors instead of metric objects.
  metrics = (spec.metrics or {}).values()
  if not all(hasattr(metric, "update_state") for metric in metrics):
    raise TypeError(
      "`metrics` must be a dictionary of tf.keras.metrics.Metric objects; got"
      f" {spec.metrics!r}. Update a Metric in model_fn, and return it."
    )


def _merged(specs: Sequence[TowerSpec], reduction: str) -> TowerSpec:
  last = specs[-1]
  loss = None
  if any(spec.loss is not None for spec in specs):
    loss = tf.add_n([tf.convert_to_tensor(spec.loss) for spec in specs])
    if reduction == loss_factor.MEAN:
      loss = loss / tf.cast(len(specs), loss.dtype)
  metrics = last.metrics
  if metrics is not None:
    # All towers update the same variables of a metric, so the metric of
    # any tower has the result of all towers.
    metrics = {name: metric.result() for name, metric in metrics.items()}
  nests = {
    name: batch_split.concatenate([getattr(spec, name) for spec in specs])
    for name in ("predictions", "export_outputs")
  }
  return TowerSpec(last.mode, loss, last.train_op, metrics=metrics, **nests)


def _on(device: str) -> contextlib.AbstractContextManager[Any]:
  """Places operations on a device; `""` keeps the current device."""
  return tf.device(device) if device else contextlib.nullcontext()


def _as_devices(devices: Any) -> list[str]:
  """Returns the names of devices; checks that this machine has them all."""
  listed = [devices] if isinstance(devices, str) else list(devices)
  names = [getattr(device, "name", device) or "" for device in listed]
  local = [device.name for device in tf.config.list_logical_devices()]
  specs = [tf.DeviceSpec.from_string(name) for name in local]
  wanted = [tf.DeviceSpec.from_string(name) for name in names if name]
  # A local device fits a name if merging the name into its spec changes
  # nothing.
  are_local = [any(s.make_merged_spec(w) == s for s in specs) for w in wanted]
  if not names or not all(are_local):
    raise ValueError(
      f"`devices` must name devices of this machine, {local}, or be None for"
      f" all; got {devices!r}. tf.config.set_logical_device_configuration makes"
      " more."
    )
  return names
