"""A model function that runs once on each device, as one.

features, labels -> split -> tower_0: model_fn -+-> merged TowerSpec
                          -> tower_1: model_fn -+
                          -> ...
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard.gradients import loss_factor
from tf_cross_shard.towers import (
  batch,
  gradient_collector,
  refusing,
  shared_variables,
)
from tf_cross_shard.towers import tower_spec as spec_lib

_OPTIONAL: Final = ("labels", "mode", "params", "config")
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
    """Checks the arguments, which `replicate_model_fn` explains.

    Args:
      model_fn: The function of one tower.
      loss_reduction: `"mean"` or `"sum"`, in any accepted spelling.
      devices: Names of devices; None for those of this machine.

    Raises:
      ValueError: If the last two have no valid value, or `model_fn` is
        replicated already.
      TypeError: If `model_fn` is no function.
    """
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
    self._takes = _parameters(model_fn)
    self._reduction = _loss_reduction(loss_reduction)
    self._devices = None if devices is None else _as_devices(devices)
    self._shared = shared_variables.SharedVariables()
    self._metrics: dict[tuple[str, str], Any] = {}
    self._orders: gradient_collector.Orders = {}

  @property
  def devices(self) -> list[str]:
    """Where the towers run: given, or this machine's GPUs, or its CPUs."""
    return list(self._devices or _local_devices())

  @property
  def variables(self) -> list[Any]:
    """What model_fn made so far: `tf.Variable` objects, each once."""
    return list(self._shared.variables)

  def reset_metrics(self) -> None:
    """Sets all metrics that model_fn answered so far back to their start."""
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
    """Runs the towers and merges what they answer.

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
      RuntimeError: If it is called where towers cannot run.
    """
    devices = self._check(labels, mode)
    parts = batch.split("features", features, len(devices))
    labels_parts = batch.split("labels", labels, len(devices))
    batch.check_alike(features, labels)
    options = self._options({"mode": mode, "params": params, "config": config})
    trains = mode == spec_lib.ModeKeys.TRAIN
    towers = gradient_collector.Towers(
      len(devices),
      self._reduction,
      trains,
      self._shared.updating,
      self._orders,
    )
    specs = []
    with self._shared.kept():
      for tower, device in enumerate(devices):
        if "labels" in self._takes:
          options["labels"] = labels_parts[tower]
        with self._in_tower(towers, tower, device):
          answer = self._model_fn(parts[tower], **_own(options))
        specs.append(spec_lib.check(answer, tower, mode))
      merged = self._merge(towers, specs, devices)
    return merged

  @tf.autograph.experimental.do_not_convert
  def _check(self, labels: Any, mode: Any) -> list[str]:
    """Checks place and arguments; answers the devices."""
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
    if not tf.executing_eagerly() and not tf.inside_function():
      raise RuntimeError(
        "A replicated `model_fn` was called in a version 1 graph. Call it"
        " eagerly or inside tf.function."
      )
    if mode not in _MODES:
      raise ValueError(
        f"`mode` must be one of {list(_MODES)}; got {mode!r}. Use ModeKeys."
      )
    if labels is not None and "labels" not in self._takes:
      raise ValueError(
        f"`labels` were given, and {self._model_fn!r} takes none. Add an"
        " argument `labels`, or leave them out."
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
  def _options(self, options: dict[str, Any]) -> dict[str, Any]:
    """Those that the model function takes, and has not better ones of its own.

    None is for what the caller left out: a default, or what functools.partial
    has bound, is to stay.
    """
    return {
      name: value
      for name, value in options.items()
      if name in self._takes
      and not (value is None and _has_default(self._model_fn, name))
    }

  @contextlib.contextmanager
  @tf.autograph.experimental.do_not_convert
  def _in_tower(
    self, towers: gradient_collector.Towers, tower: int, device: str
  ) -> Iterator[None]:
    """The device, the names, the variables and the gradients of one tower."""
    scope = tf.compat.v1.get_variable_scope()
    with (
      _on(device),
      tf.name_scope(f"tower_{tower}"),
      # For get_variable, which refuses a name that is there already.
      tf.compat.v1.variable_scope(
        scope, reuse=tf.compat.v1.AUTO_REUSE, auxiliary_name_scope=False
      ),
      self._shared.reused(),
      refusing.plain_optimizers(towers.count),
      towers.one(),
    ):
      yield

  @tf.autograph.experimental.do_not_convert
  def _merge(
    self,
    towers: gradient_collector.Towers,
    specs: Sequence[spec_lib.TowerSpec],
    devices: Sequence[str],
  ) -> spec_lib.TowerSpec:
    """Applies what was collected, and makes one answer of all."""
    train = specs[0].mode == spec_lib.ModeKeys.TRAIN
    if train and towers.count > 1 and not towers.has_calls:
      raise ValueError(
        "`model_fn` must apply gradients through a TowerOptimizer when it is"
        f" replicated; no TowerOptimizer was called in {towers.count} towers"
        f" in mode {specs[0].mode!r}. Use TowerOptimizer(optimizer), and call"
        " its minimize or apply_gradients."
      )
    # All that can be wrong with the answers is found before the update.
    merged = spec_lib.merge(specs, self._reduction)
    for name, metric in (specs[-1].metrics or {}).items():
      self._metrics[specs[-1].mode, name] = metric
    if not towers.has_calls:
      return merged
    answers = tf.nest.flatten(merged, expand_composites=True)
    with (
      _on(devices[0]),  # where the variables are
      tf.name_scope(f"tower_{towers.count - 1}"),
      self._shared.reused(),
    ):
      # Slots may be made outside of the program: they depend on nothing in it.
      towers.prepare()
      # Nothing is to go wrong after the update in a graph either.
      with tf.control_dependencies(list(filter(tf.is_tensor, answers))):
        return merged.having_applied(towers.apply())


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
  model_fn makes itself. These are made by the first call, on the first device;
  afterwards they are known by their names, and where Keras gave those, by their
  order. A tf.function makes variables in its first call only: use one for each
  mode, or call without tf.function first. What is made outside keeps its own.

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


def _own(options: dict[str, Any]) -> dict[str, Any]:
  """Arguments for one tower: what it changes is not to be another's."""
  return {
    name: _copied(value) if name == "params" else value
    for name, value in options.items()
  }


def _copied(value: Any) -> Any:
  """A copy of dictionaries and lists; what they hold stays what it is."""
  if isinstance(value, dict):
    again = copy.copy(value)  # of its own class, which may order its keys
    again.update({key: _copied(each) for key, each in value.items()})
    return again
  return list(map(_copied, value)) if type(value) is list else value


def _on(device: str) -> contextlib.AbstractContextManager[Any]:
  """Puts operations on a device; leaves them where they are for `""`."""
  context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
  return tf.device(device) if device else context


def _parameters(model_fn: Callable[..., Any]) -> list[str]:
  """Which of the optional arguments a model function takes."""
  parameters = inspect.signature(model_fn).parameters.values()
  if any(each.kind is each.VAR_KEYWORD for each in parameters):
    return list(_OPTIONAL)
  names = [each.name for each in parameters]
  return [name for name in _OPTIONAL if name in names]


def _has_default(model_fn: Callable[..., Any], name: str) -> bool:
  """Whether an argument of a model function may be left out."""
  parameter = inspect.signature(model_fn).parameters.get(name)
  return parameter is not None and parameter.default is not parameter.empty


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
  try:
    given = [devices] if isinstance(devices, str) else list(devices)
    names = [getattr(each, "name", each) for each in given]
    if not all(isinstance(name, (str, type(None))) for name in names):
      raise TypeError
  except TypeError:
    raise TypeError(
      f"`devices` must hold names of devices; got {devices!r}. Use for example"
      ' ["GPU:0", "GPU:1"], or tf.config.list_logical_devices("GPU").'
    ) from None
  if not names:
    raise ValueError(
      "`devices` must name at least one device; got []. Leave it None to take"
      " all of this machine."
    )
  there = [device.name for device in tf.config.list_logical_devices()]
  specs = [tf.DeviceSpec.from_string(name) for name in there]
  for name in names:
    try:
      wanted = tf.DeviceSpec.from_string(name or "")
    except (AttributeError, ValueError):
      wanted = None
    if name and not any(_is_in(wanted, spec) for spec in specs):
      raise ValueError(
        f"`devices` must name devices of this machine; got {name!r}, there are"
        f" {there}. Use their names, or tf.config.set_logical_device_"
        "configuration to make more."
      )
  return [name or "" for name in names]


def _is_in(wanted: tf.DeviceSpec | None, device: tf.DeviceSpec) -> bool:
  """Whether a device is what a name asks for."""
  if wanted is None or wanted.device_type != device.device_type:
    return False
  return all(
    getattr(wanted, part) in (getattr(device, part), None)
    for part in ("job", "replica", "task", "device_index")
  )


def _local_devices() -> list[str]:
  """This machine's GPUs; without any its CPUs."""
  for kind in ("GPU", "CPU"):
    devices = tf.config.list_logical_devices(kind)
    if devices:
      return [device.name for device in devices]
  return [""]
