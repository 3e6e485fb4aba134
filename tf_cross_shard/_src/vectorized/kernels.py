"""Converters of TensorFlow's optimizer kernels, such as ResourceApplyAdam.

A kernel takes one learning rate. So its formula is computed on the stacks or,
if it is linear in the gradient, gradients are multiplied by their model's rate.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.vectorized import converters, vectorizer
from tf_cross_shard._src.vectorized.vectorizer import Call

Values = Mapping[str, Any]


def _gradient_descent(x: Values) -> dict[str, Any]:
  return {"var": x["var"] - x["alpha"] * x["delta"]}


def _momentum(x: Values) -> dict[str, Any]:
  accum = x["momentum"] * x["accum"] + x["grad"]
  step = x["grad"] + x["momentum"] * accum if x["use_nesterov"] else accum
  return {"accum": accum, "var": x["var"] - x["lr"] * step}


def _keras_momentum(x: Values) -> dict[str, Any]:
  step = x["lr"] * x["grad"]
  accum = x["momentum"] * x["accum"] - step
  change = x["momentum"] * accum - step if x["use_nesterov"] else accum
  return {"accum": accum, "var": x["var"] + change}


def _adam(x: Values) -> dict[str, Any]:
  grad, beta1, beta2 = x["grad"], x["beta1"], x["beta2"]
  alpha = x["lr"] * tf.sqrt(1 - x["beta2_power"]) / (1 - x["beta1_power"])
  m = x["m"] + (grad - x["m"]) * (1 - beta1)
  v = x["v"] + (grad * grad - x["v"]) * (1 - beta2)
  top = beta1 * m + (1 - beta1) * grad if x["use_nesterov"] else m
  change = alpha * top / (tf.sqrt(v) + x["epsilon"])
  return {"m": m, "v": v, "var": x["var"] - change}


def _adamax(x: Values) -> dict[str, Any]:
  m = x["m"] + (x["grad"] - x["m"]) * (1 - x["beta1"])
  v = tf.maximum(x["beta2"] * x["v"], tf.abs(x["grad"]))
  change = x["lr"] / (1 - x["beta1_power"]) * (m / (v + x["epsilon"]))
  return {"m": m, "v": v, "var": x["var"] - change}


def _adagrad(x: Values) -> dict[str, Any]:
  accum = x["accum"]
  if x["update_slots"]:
    accum += x["grad"] * x["grad"]
  root = tf.sqrt(accum) + x.get("epsilon", 0.0)
  return {"accum": accum, "var": x["var"] - x["lr"] * x["grad"] / root}


def _rmsprop(x: Values) -> dict[str, Any]:
  grad, keep = x["grad"], 1 - x["rho"]
  new = {"ms": x["ms"] + (grad * grad - x["ms"]) * keep}
  variance = new["ms"]
  if "mg" in x:  # Centered.
    new["mg"] = x["mg"] + (grad - x["mg"]) * keep
    variance -= new["mg"] * new["mg"]
  step = x["lr"] * grad / tf.sqrt(variance + x["epsilon"])
  new["mom"] = x["momentum"] * x["mom"] + step
  return {**new, "var": x["var"] - new["mom"]}


def _adadelta(x: Values) -> dict[str, Any]:
  grad, rho, epsilon = x["grad"], x["rho"], x["epsilon"]
  accum = rho * x["accum"] + (1 - rho) * grad * grad
  root = tf.sqrt((x["accum_update"] + epsilon) / (accum + epsilon))
  update = root * grad
  accum_update = rho * x["accum_update"] + (1 - rho) * update * update
  return {
    "accum": accum,
    "accum_update": accum_update,
    "var": x["var"] - x["lr"] * update,
  }


def _ftrl(x: Values) -> dict[str, Any]:
  var, grad, lr = x["var"], x["grad"], x["lr"]
  accum = x["accum"] + grad * grad
  power, power_before = (tf.pow(a, -x["lr_power"]) for a in (accum, x["accum"]))
  shrunk = grad + 2 * x["l2_shrinkage"] * var if "l2_shrinkage" in x else grad
  linear = x["linear"] + shrunk - (power - power_before) / lr * var
  divisor = power / lr + 2 * x["l2"]
  moved = (x["l1"] * tf.sign(linear) - linear) / divisor
  var = tf.where(tf.abs(linear) > x["l1"], moved, tf.zeros_like(moved))
  return {"accum": accum, "linear": linear, "var": var}


_FORMULAS: Final[dict[str, Callable[[Values], dict[str, Any]]]] = {
  "GradientDescent": _gradient_descent,
  "Momentum": _momentum,
  "KerasMomentum": _keras_momentum,
  "Adam": _adam,
  "AdaMax": _adamax,
  "Adagrad": _adagrad,
  "AdagradV2": _adagrad,
  "RMSProp": _rmsprop,
  "CenteredRMSProp": _rmsprop,
  "Adadelta": _adadelta,
  "Ftrl": _ftrl,
  "FtrlV2": _ftrl,
}


# The rates of kernels that are linear in the gradient. With Adam in parts, a
# step of 4 networks 784-1024-1024-3 takes 0.86 of its time with
# Keras' operations.
_RATES: Final = {
  "ResourceApplyGradientDescent": "alpha",
  "ResourceApplyKerasMomentum": "lr",
  "ResourceApplyAdagradV2": "lr",  # Without an update of its slot.
}


def _converter(formula: Callable[[Values], dict[str, Any]]) -> Any:
  """Returns the converter of a kernel with this formula."""

  def convert(call: Call) -> Any:
    names = [argument.name for argument in call.op.op_def.input_arg]
    flags = {
      name: call.op.get_attr(name)
      for name in ("use_nesterov", "update_slots")
      if name in call.op.node_def.attr
    }
    is_variable = [x.t.dtype == tf.resource for x in call.inputs]
    handles = {
      name: x.t
      for name, x, is_handle in zip(
        names, call.inputs, is_variable, strict=True
      )
      if is_handle
    }
    if not all(
      vectorizer.has_stack(call, i) for i, x in enumerate(is_variable) if x
    ):
      raise vectorizer.cannot_vectorize(call.op_type)
    [grad] = {"grad", "delta"}.intersection(names)
    gradient = vectorizer.stacked(call, names.index(grad))
    values: dict[str, Any] = {**flags, **handles, grad: gradient}
    of_models = set()  # The names of numbers that each model has of its own.
    for name, given in zip(names, call.inputs, strict=True):
      if name not in values:
        values[name] = given.t
        if given.is_stacked:
          of_models.add(name)
          shape = [-1, *[1] * (gradient.shape.rank - 1)]
          values[name] = tf.reshape(given.t, shape)
    rate, program = _RATES.get(call.op_type), call.pfor
    is_whole = program.mask is None and program.source is None
    is_whole = is_whole and not flags.get("update_slots")
    if rate and is_whole and of_models <= {rate}:
      if of_models:
        values[grad], values[rate] = (
          gradient * values[rate],
          tf.ones([], gradient.dtype),
        )
      return getattr(tf.raw_ops, call.op_type)(**values)
    for i, name in enumerate(names):
      if name in handles:
        values[name] = converters.values_of(call, i)
      elif name not in (grad, *of_models):
        values[name] = _number(values[name])
    changed = formula(values)
    return tf.group(
      *(
        converters.assign_stack(call, handles[name], value)
        for name, value in changed.items()
      )
    )

  return convert


def _number(tensor: tf.Tensor) -> Any:
  """Returns a constant as the decimal number that it was written as."""
  # In float32, 1 - 0.999 would be 0.00099998713.
  static = tf.get_static_value(tensor)
  return tensor if static is None else float(str(static))


for _name, _formula in _FORMULAS.items():
  vectorizer.converts(f"ResourceApply{_name}")(_converter(_formula))
