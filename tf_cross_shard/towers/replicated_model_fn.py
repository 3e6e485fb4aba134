"""A model function that runs once on each device, as one.

features, labels -> split -> tower_0: model_fn -+-> merged TowerSpec
                          -> tower_1: model_fn -+
                          -> ...
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard.gradients import loss_factor
from tf_cross_shard.towers import (
  batch_split,
  gradient_collector,
  shared_variables,
)
from tf_cross_shard.towers import tower_spec as spec_lib

_MODES: Final = (
  spec_lib.ModeKeys.TRAIN,
  spec_lib.ModeKeys.EVAL,
  spec_lib.ModeKeys.PREDICT,
)

# Version 1's towers took a mean for these, whatever it was divided by.
_MEANS: Final = (
  "weighted_sum_over_batch_size",
  "weighted_sum_by_nonzero_weights",
)


class ReplicatedModelFn:
  """What `replicate_model_fn` returns: call it like the model function.

  Attributes:
    devices: Where the towers run, in order.
  """

  def __init__(
    self, model_fn: Callable[..., Any], loss_reduction: Any, devices: Any
  ) -> None:
    """Checks the arguments, which `replicate_model_fn` explains."""
    if isinstance(model_fn, ReplicatedModelFn):
      raise ValueError(
        f"`model_fn` must be a function of one tower; got {model_fn!r}, which"
        " is replicated already. Replicate it once, over all devices."
      )
    if not callable(model_fn):
      raise TypeError(
        f"`model_fn` must be a function; got {model_fn!r}. It takes features,"
        " and labels, mode, params and config if it wants them, and returns a"
        " TowerSpec."
      )
    self._model_fn = model_fn
    self._parameters = inspect.signature(model_fn).parameters
    self._reduction = _loss_reduction(loss_reduction)
    self._devices = None if devices is None else _as_devices(devices)
    self._shared = shared_variables.SharedVariables()
    self._metrics: dict[tuple[str, str], Any] = {}

  @property
  def devices(self) -> list[str]:
    """Where the towers run: given, or this machine's GPUs, or its CPUs."""
    local = [
      [device.name for device in tf.config.list_logical_devices(kind)]
      for kind in ("GPU", "CPU")
    ]
    return list(self._devices or local[0] or local[1])

  @property
  def variables(self) -> list[Any]:
    """What model_fn made so far: `tf.Variable` objects, each once."""
    return self._shared.variables

  def reset_metrics(self) -> None:
    """Sets all metrics that model_fn returned so far back to their start."""
    for metric in self._metrics.values():
      metric.reset_state()

  def __call__(
    self,
    features: Any,
    labels: Any = None,
    mode: str = spec_lib.ModeKeys.TRAIN,
    params: Any = None,
    config: Any = None,
  ) -> spec_lib.TowerSpec:
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
      ValueError: If the batch does not divide, `mode` is unknown, the towers do
        not fit together, or in several towers gradients were applied by none
        or by another than a TowerOptimizer.
      TypeError: If model_fn does not return a TowerSpec.
      RuntimeError: If it is called in the cross-replica context.
    """
    devices = self._check(mode)
    parts = batch_split.split("features", features, len(devices))
    labels_parts = batch_split.split("labels", labels, len(devices))
    batch_split.check_alike(parts[0], labels_parts[0])
    options = {"mode": mode, "params": params, "config": config}
    specs = []
    with self._shared.call(mode) as variables:
      trains = mode == spec_lib.ModeKeys.TRAIN
      towers = gradient_collector.Towers(
        len(devices), self._reduction, variables, trains
      )
      for tower, device in enumerate(devices):
        options["labels"] = labels_parts[tower]
        with (
          _on(device),
          tf.name_scope(f"tower_{tower}"),
          variables.tower(),
          towers.tower(),
        ):
          spec = self._model_fn(parts[tower], **self._taken(options))
        specs.append(spec_lib.check(spec, tower, mode))
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
    if tf.distribute.in_cross_replica_context():
      raise RuntimeError(
        "A replicated `model_fn` was called in the cross-replica context"
        " (inside strategy.scope() but outside strategy.run). Call it inside"
        " the function given to `strategy.run`."
      )
    if mode not in _MODES:
      raise ValueError(
        f"`mode` must be one of {list(_MODES)}; got {mode!r}. Use ModeKeys."
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
  def _taken(self, options: dict[str, Any]) -> dict[str, Any]:
    """Those that the model function takes, and has not better ones of its own.

    None is for what the caller left out: a default, or what functools.partial
    has bound, is to stay. What one tower changes in `params` is not another's.
    """
    empty, any_name = inspect.Parameter.empty, inspect.Parameter.VAR_KEYWORD
    takes_all = any(p.kind is any_name for p in self._parameters.values())
    taken = {}
    for name, value in options.items():
      parameter = self._parameters.get(name)
      has_default = parameter is not None and parameter.default is not empty
      is_taken = parameter is not None or takes_all
      if is_taken and not (value is None and has_default):
        taken[name] = copy.copy(value) if name == "params" else value
    return taken

  @tf.autograph.experimental.do_not_convert
  def _merge(
    self,
    towers: gradient_collector.Towers,
    specs: Sequence[spec_lib.TowerSpec],
    device: str,
  ) -> spec_lib.TowerSpec:
    """Applies what was collected, and makes one spec of all."""
    if towers.trains and towers.count > 1 and not towers.has_calls:
      raise ValueError(
        "`model_fn` must apply gradients through a TowerOptimizer when it is"
        f" replicated; no TowerOptimizer was called in {towers.count} towers"
        f" in mode {specs[0].mode!r}. Use TowerOptimizer(optimizer), and call"
        " its minimize or apply_gradients."
      )
    # All that can be wrong with the specs is found before the update.
    merged = spec_lib.merge(specs, self._reduction)
    for name, metric in (specs[-1].metrics or {}).items():
      self._metrics[merged.mode, name] = metric
    if not towers.has_calls:
      return merged
    answers = tf.nest.flatten(merged, expand_composites=True)
    # Variables are on the first device.
    with _on(device), tf.name_scope(f"tower_{towers.count - 1}"):
      # Slots may be made outside of the program: they depend on nothing in it.
      towers.prepare()
      # Nothing is to go wrong after the update in a graph either.
      with tf.control_dependencies(list(filter(tf.is_tensor, answers))):
        return merged._replace(train_op=towers.apply())


def replicate_model_fn(
  model_fn: Callable[..., Any],
  loss_reduction: Any = loss_factor.SUM,
  devices: Sequence[str] | None = None,
) -> ReplicatedModelFn:
  """A function that runs `model_fn` once on each device, as one step.

  The batch is cut into equal parts along axis 0. With `L_i` the loss of tower
  `i` of `n`, the gradients that are applied are those of

      sum over i of L_i              loss_reduction="sum"
      (sum over i of L_i) / n        loss_reduction="mean"

  if model_fn applies them through a `TowerOptimizer`, whose compute_gradients,
  minimize and scale_loss do the division. Nothing is applied before every tower
  has returned. In a tf.function towers run in parallel.

  All towers, and all calls, share one set of variables, also those that
  model_fn makes itself, on the first device: the i-th that it makes is the i-th
  that its first call made, and another shape, dtype or number of them is an
  error. Optimizers and `metrics` may differ between modes if they are made
  after the others. Those of `tf.compat.v1.get_variable` go by name. Build what
  is made outside before the first call. A tf.function makes variables in its
  first call only: use one for each mode, or call without tf.function first.

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
    model_fn: Takes features and, by these names and only if it has them,
      labels, mode, params and config. Returns a `TowerSpec`.
    loss_reduction: `"sum"` or `"mean"`; the spellings of
      `tf.compat.v1.losses.Reduction` and of Keras are accepted.
    devices: Names of devices, one for each tower; `""` is where the caller is.
      None means all GPUs of this machine or, without any, all its CPUs.

  Returns:
    A function of `(features, labels, mode, params, config)`.

  Raises:
    ValueError: If `loss_reduction` is `"none"` or unknown, if `devices` holds
      no devices of this machine, or if `model_fn` is replicated already.
    TypeError: If `model_fn` is no function, or `devices` holds no names.

  References:
    tf.contrib.estimator.replicate_model_fn, which this brings to TensorFlow 2.
  """
  return ReplicatedModelFn(model_fn, loss_reduction, devices)


def _on(device: str) -> contextlib.AbstractContextManager[Any]:
  """Puts operations on a device; leaves them where they are for `""`."""
  context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
  return tf.device(device) if device else context


def _loss_reduction(loss_reduction: Any) -> str:
  """`"mean"` or `"sum"`."""
  if loss_reduction in _MEANS:
    return loss_factor.MEAN
  try:
    return loss_factor.canonical_reduction(loss_reduction)
  except ValueError as error:
    raise ValueError(
      str(error).replace("`reduction`", "`loss_reduction`")
    ) from None


def _as_devices(devices: Any) -> list[str]:
  """The names of devices that are there."""
  given = [devices] if isinstance(devices, str) else list(devices)
  names = [getattr(each, "name", each) or "" for each in given]
  if not names:
    raise ValueError(
      "`devices` must name at least one device; got []. Leave it None to take"
      " all of this machine."
    )
  there = [device.name for device in tf.config.list_logical_devices()]
  specs = list(map(tf.DeviceSpec.from_string, there))
  for name in filter(None, names):
    try:
      wanted = tf.DeviceSpec.from_string(name)
    except (AttributeError, ValueError):
      wanted = tf.DeviceSpec()
    # A spec of a local device goes on to be itself with what is asked for.
    if not wanted.device_type or not any(
      spec.make_merged_spec(wanted) == spec for spec in specs
    ):
      raise ValueError(
        f"`devices` must name devices of this machine; got {name!r}, there are"
        f" {there}. Use their names, or tf.config.set_logical_device_"
        "configuration to make more."
      )
  return names
