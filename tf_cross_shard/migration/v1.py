"""What an optimizer of `tf.compat.v1.train` is in Keras.

Reads its class and its settings, and refuses what has no equal. This half
knows no Keras: `v1_keras3` and `v1_tf_keras` make what a `Recipe` says.
"""

import dataclasses
from typing import Any, Final

import numpy as np
import tensorflow as tf
from absl import logging

from tf_cross_shard.migration import v1_rates

_v1: Final = tf.compat.v1.train


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How to make the Keras optimizer."""

  kind: str
  rate: v1_rates.Rate
  settings: dict[str, Any]
  name: str
  source: str

  @property
  def start(self) -> int:
    """What the step count starts from."""
    return self.rate.start if isinstance(self.rate, v1_rates.Decay) else 0


@dataclasses.dataclass(frozen=True)
class _Kind:
  """Where an optimizer of version 1 keeps what Keras calls by other names."""

  name: str
  rate: str = "_learning_rate"
  settings: dict[str, str] = dataclasses.field(default_factory=dict)
  flags: dict[str, str] = dataclasses.field(default_factory=dict)
  fixed: dict[str, float] = dataclasses.field(default_factory=dict)


# By the class itself: a subclass of one of them may do anything.
_KINDS: Final[dict[type, _Kind]] = {
  _v1.GradientDescentOptimizer: _Kind("SGD"),
  _v1.MomentumOptimizer: _Kind(
    "Momentum",
    settings={"momentum": "_momentum"},
    flags={"nesterov": "_use_nesterov"},
  ),
  _v1.AdamOptimizer: _Kind(
    "Adam",
    rate="_lr",
    settings={"beta_1": "_beta1", "beta_2": "_beta2", "epsilon": "_epsilon"},
  ),
  _v1.AdagradOptimizer: _Kind(
    "Adagrad",
    settings={"initial_accumulator_value": "_initial_accumulator_value"},
    fixed={"epsilon": 0.0},
  ),
  _v1.RMSPropOptimizer: _Kind(
    "RMSProp",
    settings={"rho": "_decay", "momentum": "_momentum", "epsilon": "_epsilon"},
    flags={"centered": "_centered"},
  ),
  _v1.AdadeltaOptimizer: _Kind(
    "Adadelta",
    rate="_lr",
    settings={"rho": "_rho", "epsilon": "_epsilon"},
  ),
  _v1.FtrlOptimizer: _Kind(
    "Ftrl",
    settings={
      "learning_rate_power": "_learning_rate_power",
      "initial_accumulator_value": "_initial_accumulator_value",
      "l1_regularization_strength": "_l1_regularization_strength",
      "l2_regularization_strength": "_l2_regularization_strength",
      "l2_shrinkage_regularization_strength": (
        "_l2_shrinkage_regularization_strength"
      ),
      "beta": "_beta",
    },
  ),
}

_REFUSED: Final[dict[type, str]] = {
  _v1.ProximalGradientDescentOptimizer: (
    "no optimizer of Keras makes a proximal step. With strengths of 0 it is"
    " GradientDescentOptimizer; otherwise FtrlOptimizer has both penalties,"
    " with another formula"
  ),
  _v1.ProximalAdagradOptimizer: (
    "no optimizer of Keras makes a proximal step. With strengths of 0 it is"
    " AdagradOptimizer; otherwise FtrlOptimizer has both penalties, with"
    " another formula"
  ),
  _v1.AdagradDAOptimizer: (
    "no optimizer of Keras averages duals. FtrlOptimizer makes models sparse"
    " too, with another formula"
  ),
  _v1.SyncReplicasOptimizer: (
    "it waits for workers of a parameter server. CrossShardOptimizer keeps"
    " replicas in step itself: hand over the optimizer within"
  ),
  tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer: (
    "Keras scales losses itself. Convert the optimizer within, and put Keras'"
    " LossScaleOptimizer around what comes of it"
  ),
}


def is_v1(opt: object) -> bool:
  """Whether `opt` is an optimizer of `tf.compat.v1.train`, or around one."""
  return isinstance(opt, _v1.Optimizer)


def is_cross_shard(opt: object) -> bool:
  """Whether `opt` is a `tf.compat.v1.tpu.CrossShardOptimizer`."""
  return type(opt) is tf.compat.v1.tpu.CrossShardOptimizer


def within(opt: Any) -> tuple[Any, dict[str, Any]]:
  """The optimizer in version 1's CrossShardOptimizer, and its arguments."""
  arguments = {
    "reduction": opt._reduction,
    "name": _name(opt),
    "group_assignment": opt._group_assignment,
  }
  return opt._opt, arguments


def recipe(opt: Any) -> Recipe:
  """What a version 1 optimizer is in Keras."""
  source = f"{type(opt).__module__}.{type(opt).__qualname__}"
  if is_cross_shard(opt):
    raise ValueError(
      "`opt` must not be or contain a tf.compat.v1.tpu.CrossShardOptimizer;"
      f" got {opt.get_name()!r}. Gradients would be reduced twice. Convert all"
      " of it: tf_cross_shard.migration.from_v1(opt)."
    )
  kind = _KINDS.get(type(opt))
  if kind is None:
    reason = _REFUSED.get(
      type(opt),
      "only the classes of tf.compat.v1.train themselves are known: a class"
      " of another origin, or derived from one of them, may compute anything."
      " Write it as a Keras optimizer with an update_step of its own",
    )
    raise TypeError(
      f"`opt` cannot be converted; got {source} {opt.get_name()!r}: {reason}."
    )
  source = f"tf.compat.v1.train.{type(opt).__name__}"
  _check_types(opt, kind, source)
  numbers = {
    name: v1_rates.number(getattr(opt, attribute), attribute.strip("_"), source)
    for name, attribute in kind.settings.items()
  }
  if numbers.get("momentum", 0.0) < 0.0:  # Keras would take it for 0.
    raise ValueError(
      f"`momentum` of {source} must not be negative; got"
      f" {numbers['momentum']}. Pass one in [0, 1]."
    )
  flags = {
    name: bool(getattr(opt, attribute))
    for name, attribute in kind.flags.items()
  }
  found = Recipe(
    kind=kind.name,
    rate=v1_rates.rate(getattr(opt, kind.rate), source),
    settings=numbers | flags | kind.fixed,
    name=_name(opt),
    source=source,
  )
  _warn(opt, found)
  return found


def said(optimizer: Any, recipe: Recipe) -> None:
  """Logs what became what."""
  kind = type(optimizer)
  own = next(c for c in kind.__mro__ if c.__module__ != kind.__module__)
  rate: object = recipe.rate
  if isinstance(rate, v1_rates.Decay):
    rate = f"{rate.kind} from iteration {rate.start}"
  settings = {"learning_rate": rate} | recipe.settings
  logging.info(
    "%s %r became %s, a kind of %s.%s, with %s.",
    *(recipe.source, recipe.name, kind.__name__),
    *(own.__module__.split(".")[0], own.__name__),
    ", ".join(f"{name}={value}" for name, value in settings.items()),
  )


def _name(opt: Any) -> str:
  """Its name as Keras 3 takes it: without slashes."""
  return str(opt.get_name()).replace("/", "_")


def _check_types(opt: Any, kind: _Kind, source: str) -> None:
  """Refuses or tells of numbers that version 1 keeps in their own type.

  NumPy's numbers and tensors have one; Python's become float32.
  """
  for name, attribute in kind.settings.items():
    value = getattr(opt, attribute)
    dtype = getattr(value, "dtype", None)
    if dtype is None or callable(value) or hasattr(value, "assign"):
      continue  # A variable is refused for what it is.
    dtype = tf.as_dtype(dtype)
    if not dtype.is_floating or dtype == tf.float32:
      continue
    if name in ("beta_1", "beta_2"):
      raise ValueError(
        f"`{attribute.strip('_')}` of {source} must be a Python number or"
        f" float32; got {dtype.name}, in which version 1 multiplies its powers:"
        " those of float32 are other numbers. Pass float(x), and see that"
        " results are as good."
      )
    if dtype == tf.float64 and float(value) != float(np.float32(value)):
      logging.warning(
        "`%s` of %s is float64, and becomes float32 here. Variables of float64"
        " are updated by less precise numbers than in version 1; others are"
        " not affected.",
        *(attribute.strip("_"), source),
      )


def _warn(opt: Any, recipe: Recipe) -> None:
  """Says what is lost, once."""
  names = ("accum_name", "linear_name")
  if any(getattr(opt, f"_{name}", None) for name in names):
    logging.warning(
      "The slots' names of %s %r, its accum_name and linear_name, are not kept."
      " tf_cross_shard.migration.convert_checkpoint does not know them either:"
      " before you convert a checkpoint, name its slots after the optimizer,"
      " such as weight/%s and weight/%s_1.",
      *(recipe.source, recipe.name, opt.get_name(), opt.get_name()),
    )
  if opt.variables() or opt._deferred_slot_restorations:
    logging.warning(
      "%s %r was used before: its slots are not carried over, and training"
      " goes on from new ones. Save a checkpoint of it and convert that:"
      " tf_cross_shard.migration.convert_checkpoint.",
      *(recipe.source, recipe.name),
    )
  elif recipe.kind == "Adam" and recipe.start:
    logging.warning(
      "The schedule of %s %r starts at %d, and so do Keras' `iterations`, by"
      " which Adam corrects its bias; version 1 counts its own steps for that."
      " This is right after a checkpoint was restored. Otherwise the first"
      " steps differ: make the schedule with a `global_step` of 0.",
      *(recipe.source, recipe.name, recipe.start),
    )
