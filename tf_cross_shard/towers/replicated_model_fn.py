"""A model function that runs once on each device, as one.

features, labels -> split -> tower_0: model_fn -+-> merged TowerSpec
                          -> tower_1: model_fn -+
                          -> ...
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard.gradients import loss_factor
from tf_cross_shard.towers import (
  batch_split,
  gradient_collector,
  shared_variables,
)

# Version 1's towers took a mean for these, whatever it was divided by.
_MEANS: Final = (
  "weighted_sum_over_batch_size",
  "weighted_sum_by_nonzero_weights",
)


class ModeKeys:
  """Purposes of a call of a model function, spelled as in TensorFlow 1.

  >>> ModeKeys.PREDICT
  'infer'

  Attributes:
    TRAIN: To train.
    EVAL: To evaluate.
    PREDICT: To predict.
  """

  TRAIN: Final = "train"
  EVAL: Final = "eval"
  PREDICT: Final = "infer"


class TowerSpec(NamedTuple):
  """The result of a model function; `EstimatorSpec` for TensorFlow 2.

  >>> spec = TowerSpec("train", loss=tf.constant(2.0))
  >>> float(spec.loss), spec.predictions
  (2.0, None)

  Attributes:
    mode: One of `ModeKeys`.
    loss: A tensor. Merged: the sum or mean over the towers.
    train_op: The count that the optimizer returned. Merged: the count that
      the last optimizer returned after the update.
    predictions: A tensor or nest, the examples along axis 0. Merged: all
      towers' in order.
    metrics: A dictionary of `tf.keras.metrics.Metric` objects that the tower
      has updated. Merged: their results, once over all towers.
    export_outputs: Like `predictions`.
  """

  mode: str
  loss: Any = None
  train_op: Any = None
  predictions: Any = None
  metrics: Any = None
  export_outputs: Any = None


class ReplicatedModelFn:
  """A replicated model function: call it like the model function."""

  def __init__(
    self, model_fn: Callable[..., Any], loss_reduction: Any, devices: Any
  ) -> None:
    """Checks the arguments, which `replicate_model_fn` explains."""
    self._model_fn = model_fn
    self._parameters = inspect.signature(model_fn).parameters
    self._reduction = _loss_reduction(loss_reduction)
    self._devices = None if devices is None else _as_devices(devices)
    self._shared = shared_variables.SharedVariables()
    self._metrics: dict[tuple[str, str], Any] = {}

  @property
  def devices(self) -> list[str]:
    """Where the towers run: given, or this machine's GPUs, or its CPUs."""
    if self._devices is not None:
      return list(self._devices)
    local = tf.config.list_logical_devices
    return [device.name for device in local("GPU") or local("CPU")]

  @property
  def variables(self) -> list[Any]:
    """The `tf.Variable` objects that model_fn made so far, each once."""
    return self._shared.variables

  def reset_metrics(self) -> None:
    """Sets all metrics that model_fn returned so far back to their start."""
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
    """Runs the towers and merges what they return.

    Args:
      features: A nest of tensors, the batch along axis 0.
      labels: The same, or None.
      mode: `"train"`, `"eval"` or `"infer"`.
      params: Handed to a model function that takes it.
      config: Handed to a model function that takes it.

    Returns:
      One `TowerSpec` of tensors; see there how each member is merged.

    Raises:
      ValueError: If the batch does not divide, `mode` is unknown, the towers
        differ, or in several towers no TowerOptimizer applied the gradients.
      TypeError: If model_fn does not return a TowerSpec.
    """
    devices = self._check(mode)
    parts = batch_split.split("features", features, len(devices))
    labels_parts = batch_split.split("labels", labels, len(devices))
    batch_split.check_alike(parts[0], labels_parts[0])
    options = {"mode": mode, "params": params, "config": config}
    specs = []
    with self._shared.call(mode) as variables:
      towers = gradient_collector.Towers(
        len(devices), self._reduction, variables, mode == ModeKeys.TRAIN
      )
      for tower, device in enumerate(devices):
        options["labels"] = labels_parts[tower]
        arguments = self._arguments(parts[tower], options)
        with (
          _on(device),
          tf.name_scope(f"tower_{tower}"),
          variables.tower(),
          towers.tower(),
        ):
          spec = self._model_fn(**arguments)
        specs.append(_checked(spec, tower))
        variables.check_tower(specs[-1].metrics)
      return self._merge(towers, specs, devices[0])

  @tf.autograph.experimental.do_not_convert
  def _check(self, mode: Any) -> list[str]:
    """Checks place and arguments; returns the devices."""
    if gradient_collector.current() is not None:
      raise ValueError(
        "A replicated `model_fn` was called within a tower of another. Towers"
        " do not nest: replicate the outermost function, over all devices."
      )
    modes = [ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT]
    if mode not in modes:
      raise ValueError(
        f"`mode` must be one of {modes}; got {mode!r}. Use ModeKeys."
      )
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if self._devices is None and replicas > 1:
      raise ValueError(
        f"`devices` must be given where a replicated `model_fn` runs in each of"
        f" {replicas} replicas; got None. Give the towers of one replica, such"
        ' as ["", ""] for two on the device of the replica itself.'
      )
    return self.devices

  @tf.autograph.experimental.do_not_convert
  def _arguments(
    self, features: Any, options: dict[str, Any]
  ) -> dict[str, Any]:
    """Features and what else the model function takes, by name.

    None leaves a default as it is.
    """
    named = [
      p
      for p in self._parameters.values()
      if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
    optional = {p.name for p in named if p.default is not p.empty}
    arguments = {
      name: value
      for name, value in options.items()
      if (takes_any or name in self._parameters)
      and not (value is None and name in optional)
    }
    if "params" in arguments:  # A tower may change them for itself.
      arguments["params"] = copy.copy(arguments["params"])
    required = [p.name for p in named if p.name not in {*optional, *options}]
    is_named = "features" in self._parameters or not required
    return {"features" if is_named else required[0]: features, **arguments}

  @tf.autograph.experimental.do_not_convert
  def _merge(
    self,
    towers: gradient_collector.Towers,
    specs: Sequence[TowerSpec],
    device: str,
  ) -> TowerSpec:
    """Applies what was collected, and makes one spec of all."""
    if towers.trains and towers.count > 1 and not towers.has_calls:
      raise ValueError(
        "`model_fn` must apply gradients through a TowerOptimizer when it is"
        f" replicated; none was called in {towers.count} towers. Use"
        " TowerOptimizer(optimizer), and call its minimize or apply_gradients."
      )
    # All that can be wrong with the specs is found before the update.
    merged = _merged(specs, self._reduction)
    for name, metric in (specs[-1].metrics or {}).items():
      self._metrics[merged.mode, name] = metric
    if not towers.has_calls:
      return merged
    results = tf.nest.flatten(merged, expand_composites=True)
    # Variables are on the first device.
    with _on(device), tf.name_scope(f"tower_{towers.count - 1}"):
      # Slots may be made outside of the program: they depend on nothing in it.
      towers.prepare()
      # Nothing is to go wrong after the update in a graph either.
      with tf.control_dependencies(list(filter(tf.is_tensor, results))):
        return merged._replace(train_op=towers.apply())


def replicate_model_fn(
  model_fn: Callable[..., Any],
  loss_reduction: Any = loss_factor.SUM,
  devices: Sequence[str] | None = None,
) -> ReplicatedModelFn:
  """Makes a function that runs `model_fn` once on each device, as one step.

  The batch is cut into equal parts along axis 0. With `L_i` the loss of tower
  `i` of `n`, the gradients that are applied are those of

      sum over i of L_i              loss_reduction="sum"
      (sum over i of L_i) / n        loss_reduction="mean"

  if model_fn applies them through a `TowerOptimizer`. Nothing is applied before
  every tower has returned. In a tf.function towers run in parallel.

  Variables that model_fn makes are on the first device and shared by all towers
  and calls: the i-th is the i-th of the first call, and another shape, dtype or
  number of them is an error. Optimizers and `metrics` may differ between modes
  if they are made after the others. `tf.compat.v1.get_variable` goes by name.
  Build what is made outside before the first call. A tf.function makes
  variables in its first call only: use one for each mode.

  >>> from tf_cross_shard import TowerOptimizer, TowerSpec
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
    model_fn: Takes, by these names and in any order, features and, only if it
      has them, labels, mode, params and config. Without one named features, its
      first other argument gets them. Returns a `TowerSpec`.
    loss_reduction: `"sum"` or `"mean"`; the spellings of
      `tf.compat.v1.losses.Reduction` and of Keras are accepted.
    devices: Names of devices, one for each tower; `""` is where the caller is.
      None means all GPUs of this machine or, without any, all its CPUs.

  Returns:
    A function of `(features, labels, mode, params, config)`.

  Raises:
    ValueError: If `loss_reduction` is `"none"` or unknown, or if `devices`
      holds no devices of this machine.
    TypeError: If `model_fn` is no function.

  References:
    tf.contrib.estimator.replicate_model_fn, which this brings to TensorFlow 2.
  """
  return ReplicatedModelFn(model_fn, loss_reduction, devices)


def _checked(spec: Any, tower: int) -> TowerSpec:
  """Returns the spec of a tower; raises an error unless it can be merged."""
  if not isinstance(spec, TowerSpec):
    raise TypeError(
      f"`model_fn` must return a TowerSpec; in tower {tower} it returned"
      f" {spec!r}. Return TowerSpec(mode, loss=loss, ...)."
    )
  metrics = (spec.metrics or {}).values()  # In version 1 pairs of tensors.
  if not all(hasattr(metric, "update_state") for metric in metrics):
    raise TypeError(
      "`metrics` must be a dictionary of tf.keras.metrics.Metric objects; got"
      f" {spec.metrics!r}. Update a Metric in model_fn and return it by a name."
    )
  return spec


def _merged(specs: Sequence[TowerSpec], reduction: str) -> TowerSpec:
  """One spec of all towers' specs."""
  last = specs[-1]
  loss = None
  if any(spec.loss is not None for spec in specs):
    loss = tf.add_n([tf.convert_to_tensor(spec.loss) for spec in specs])
    if reduction == loss_factor.MEAN:
      loss = loss / tf.cast(len(specs), loss.dtype)
  metrics = last.metrics
  if metrics is not None:
    # The towers update the same variables: any of them has the result of all.
    metrics = {name: metric.result() for name, metric in metrics.items()}
  nests = {
    name: batch_split.concatenate([getattr(spec, name) for spec in specs])
    for name in ("predictions", "export_outputs")
  }
  return TowerSpec(last.mode, loss, last.train_op, metrics=metrics, **nests)


def _on(device: str) -> contextlib.AbstractContextManager[Any]:
  """Puts operations on a device; leaves them where they are for `""`."""
  return tf.device(device) if device else contextlib.nullcontext()


def _loss_reduction(loss_reduction: Any) -> str:
  """`"mean"` or `"sum"`."""
  if loss_reduction in _MEANS:
    return loss_factor.MEAN
  return loss_factor.canonical_reduction(loss_reduction, "loss_reduction")


def _as_devices(devices: Any) -> list[str]:
  """Returns the names of devices, each checked to be of this machine."""
  given = [devices] if isinstance(devices, str) else list(devices)
  names = [getattr(device, "name", device) or "" for device in given]
  local = [device.name for device in tf.config.list_logical_devices()]
  specs = [tf.DeviceSpec.from_string(name) for name in local]
  wanted = [tf.DeviceSpec.from_string(name) for name in names if name]
  # A spec of a local device goes on to be itself with what is asked for.
  are_local = [any(s.make_merged_spec(w) == s for s in specs) for w in wanted]
  if not names or not all(are_local):
    raise ValueError(
      f"`devices` must name devices of this machine; got {devices!r}, there are"
      f" {local}. Use their names, make more by tf.config."
      "set_logical_device_configuration, or leave it None to take all."
    )
  return names
