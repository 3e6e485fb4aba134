"""The numbers of `tf.compat.v1.train`, where Keras has others.

A rule is a pure function: it takes a gradient, a variable's value and the
values of its slots, and answers the new ones. Keras differs in four things:

- Its momentum sums up `-learning_rate * grad`, version 1 sums up `grad`, so
  that a rate that changes works on all that was gathered before.
- Its moving average of squares starts at 0 in RMSprop, in version 1 at 1.
- Adam's powers of beta are products that are rounded in every step, and lose
  half of the digits where they are subtracted from 1.
- Under a row-sparse gradient it decays, moves or divides all rows, or sees each
  of them; version 1 touches the rows of the gradient only, of the slots too.

Hyperparameters are rounded to float32 first and to the variable's type then,
as version 1 rounds them.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

Values = dict[str, tf.Tensor]
Rule = Callable[[tf.Tensor, tf.Tensor, Values], tuple[tf.Tensor, Values]]


def update(
  rule: Rule, grad: Any, variable: Any, slots: Mapping[str, Any]
) -> None:
  """Applies a rule to a variable and its slots, or to those rows of them."""
  if isinstance(grad, tf.IndexedSlices):
    rows, values = grad.indices, grad.values

    def read(source: Any) -> tf.Tensor:
      return tf.gather(source, rows)

    def write(target: Any, value: tf.Tensor) -> None:
      target.scatter_update(tf.IndexedSlices(value, rows))
  else:
    values = grad

    def read(source: Any) -> tf.Tensor:
      return tf.convert_to_tensor(source)

    def write(target: Any, value: tf.Tensor) -> None:
      target.assign(value)

  # All is read before anything is written.
  old = {name: read(slot) for name, slot in slots.items()}
  var, changed = rule(tf.cast(values, variable.dtype), read(variable), old)
  for name, value in changed.items():
    write(slots[name], value)
  write(variable, var)


def momentum(
  grad: tf.Tensor,
  var: tf.Tensor,
  slots: Values,
  *,
  rate: Any,
  momentum: Any,
  nesterov: bool = False,
) -> tuple[tf.Tensor, Values]:
  """Moves along a decaying sum of gradients.

  accum = momentum * accum + grad
  var   = var - rate * accum
  var   = var - rate * (grad + momentum * accum)    with Nesterov's
  """
  rate, kept = _cast(var, rate, momentum)
  accum = grad
  if "accum" in slots:
    accum = kept * slots["accum"] + grad
  direction = grad + kept * accum if nesterov else accum
  return var - rate * direction, dict.fromkeys(slots, accum)


def adam(
  grad: tf.Tensor,
  var: tf.Tensor,
  slots: Values,
  *,
  rate: Any,
  betas: tuple[Any, Any],
  powers: tuple[tf.Tensor, tf.Tensor],
  epsilon: Any,
) -> tuple[tf.Tensor, Values]:
  """Divides a moving average by the root of one of squares.

  m   = m + (1 - beta1) * (grad - m)
  v   = v + (1 - beta2) * (grad^2 - v)
  var = var - rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m
              / (sqrt(v) + epsilon)
  """
  rate, beta1, beta2, epsilon = _cast(var, rate, *betas, epsilon)
  power1, power2 = (tf.cast(power, var.dtype) for power in powers)
  one = tf.ones([], var.dtype)
  m = slots["m"] + (grad - slots["m"]) * (one - beta1)
  v = slots["v"] + (grad * grad - slots["v"]) * (one - beta2)
  rate = rate * tf.sqrt(one - power2) / (one - power1)
  return var - m * rate / (tf.sqrt(v) + epsilon), {"m": m, "v": v}


def power(beta: float, steps: Any) -> tf.Tensor:
  """`beta^(steps + 1)` as version 1 has it: multiplied up, step by step."""
  beta = float(np.float32(beta))
  steps = tf.convert_to_tensor(steps)
  known = _table(beta, steps)
  last = int(known.shape[0]) - 1
  multiplied = tf.gather(known, tf.minimum(steps, last))
  # Where the table ends the digits that are lost no longer matter.
  computed = tf.pow(
    tf.constant(beta, tf.float32), tf.cast(steps + 1, tf.float32)
  )
  return tf.where(steps > last, computed, multiplied)


def _table(beta: float, steps: tf.Tensor) -> tf.Tensor:
  """The powers as a tensor, once per graph and not once per variable."""
  graph: Any = tf.compat.v1.get_default_graph()
  # In version 1's graphs what a branch makes is out of reach beside it.
  if tf.executing_eagerly() or not graph.building_function:
    return tf.constant(_powers(beta))
  # Replicas in one graph do not wait for each other's tables.
  key = beta, steps.device
  # What is no string is left out where a graph is written to a file.
  tables = graph.get_collection_ref((__name__, "powers"))
  for known, table in tables:
    # Branches have their outer graph's collections, and cannot share.
    if known == key and table.graph is graph:
      return table
  tables.append((key, tf.constant(_powers(beta))))
  return tables[-1][1]


@functools.cache
def _powers(beta: float) -> np.ndarray:
  """The powers until they vanish beside 1; at most 2^18, a megabyte."""
  count = 1
  if 0.0 < beta < 1.0:
    count = math.ceil(math.log(2.0**-25) / math.log(beta))
  factors = np.full(min(count, 1 << 18), beta, np.float32)
  return np.multiply.accumulate(factors)


def adagrad(
  grad: tf.Tensor,
  var: tf.Tensor,
  slots: Values,
  *,
  rate: Any,
  epsilon: Any,
) -> tuple[tf.Tensor, Values]:
  """Divides by the root of a sum of squares.

  accum = accum + grad^2
  var   = var - rate * grad / sqrt(accum + epsilon)
  """
  rate, epsilon = _cast(var, rate, epsilon)
  accum = slots["accum"] + grad * grad
  step = grad * rate * tf.math.rsqrt(accum + epsilon)
  return var - step, {"accum": accum}


def rmsprop(
  grad: tf.Tensor,
  var: tf.Tensor,
  slots: Values,
  *,
  rate: Any,
  rho: Any,
  momentum: Any,
  epsilon: Any,
) -> tuple[tf.Tensor, Values]:
  """Divides by the root of a moving average of squares.

  rms  = rho * rms + (1 - rho) * grad^2
  mean = rho * mean + (1 - rho) * grad              if centered
  mom  = momentum * mom + rate * grad / sqrt(rms - mean^2 + epsilon)
  var  = var - mom
  """
  rate, rho, kept, epsilon = _cast(var, rate, rho, momentum, epsilon)
  new = {"rms": slots["rms"] + (1 - rho) * (grad * grad - slots["rms"])}
  variance = new["rms"]
  if "mean" in slots:
    new["mean"] = rho * slots["mean"] + (1 - rho) * grad
    variance -= new["mean"] * new["mean"]
  step = rate * grad / tf.sqrt(variance + epsilon)
  if "mom" in slots:
    step = new["mom"] = kept * slots["mom"] + step
  return var - step, new


def adadelta(
  grad: tf.Tensor,
  var: tf.Tensor,
  slots: Values,
  *,
  rate: Any,
  rho: Any,
  epsilon: Any,
) -> tuple[tf.Tensor, Values]:
  """Makes steps as large as past ones relative to past gradients.

  accum = rho * accum + (1 - rho) * grad^2
  step  = grad * sqrt(moved + epsilon) / sqrt(accum + epsilon)
  moved = rho * moved + (1 - rho) * step^2
  var   = var - rate * step
  """
  rate, rho, epsilon = _cast(var, rate, rho, epsilon)
  accum = rho * slots["accum"] + (1 - rho) * grad * grad
  moved = slots["moved"]
  step = grad * tf.sqrt(moved + epsilon) * tf.math.rsqrt(accum + epsilon)
  moved = rho * moved + (1 - rho) * step * step
  return var - rate * step, {"accum": accum, "moved": moved}


def ftrl(
  grad: tf.Tensor,
  var: tf.Tensor,
  slots: Values,
  *,
  rate: Any,
  power: Any,
  l1: Any,
  l2: Any,
  shrinkage: Any,
  beta: Any,
) -> tuple[tf.Tensor, Values]:
  """Follows the regularized leader.

  new    = accum + grad^2
  linear = linear + grad + 2 * shrinkage * var
           - (new^-power - accum^-power) / rate * var
  curve  = new^-power / rate + 2 * l2 + beta / rate
  var    = (sign(linear) * l1 - linear) / curve     if |linear| > l1
  var    = 0                                        otherwise
  """
  rate, power, l1, l2, shrinkage, beta = _cast(
    var, rate, power, l1, l2, shrinkage, beta
  )
  accum = slots["accum"] + grad * grad
  grown = tf.pow(accum, -power) - tf.pow(slots["accum"], -power)
  penalized = grad + 2 * shrinkage * var
  linear = slots["linear"] + penalized - grown / rate * var
  # Version 1 too keeps the rate from 0 here, and only here.
  floor = tf.maximum(rate, tf.cast(1e-36, rate.dtype))
  curve = tf.pow(accum, -power) / rate + 2 * (l2 + beta / (2 * floor))
  # Within l1 it is 0, even where there is no curve yet. So says the kernel for
  # dense gradients; the one for sparse ones divides 0 by 0 then.
  moved = (l1 * tf.sign(linear) - linear) / curve
  var = tf.where(tf.abs(linear) > l1, moved, tf.zeros_like(var))
  return var, {"accum": accum, "linear": linear}


def linear_cosine(
  step: Any,
  *,
  initial_learning_rate: float,
  decay_steps: float,
  num_periods: float,
  alpha: float,
  beta: float,
  initial_variance: float = 0.0,
  variance_decay: float = 0.0,
) -> tf.Tensor:
  """The learning rate that decays along a line times a cosine.

      line = 1 - step / decay_steps + noise
      wave = (1 + cos(2 pi * num_periods * step / decay_steps)) / 2
      rate = initial_learning_rate * ((alpha + line) * wave + beta)

  The noise is normal, of variance
  `initial_variance / (1 + step)^variance_decay`. It depends on the step alone,
  so that all replicas have the same; in version 1 each has its own.
  """
  step = tf.minimum(tf.cast(step, tf.float32), float(decay_steps))
  done = step / decay_steps
  line = 1.0 - done
  if initial_variance:
    variance = initial_variance / tf.pow(1.0 + step, variance_decay)
    seed = tf.stack([tf.constant(0, tf.int32), tf.cast(step, tf.int32)])
    line += tf.sqrt(variance) * tf.random.stateless_normal([], seed)
  wave = 0.5 * (1.0 + tf.cos(2.0 * math.pi * num_periods * done))
  return initial_learning_rate * ((alpha + line) * wave + beta)


def _cast(var: tf.Tensor, *numbers: Any) -> list[tf.Tensor]:
  """Hyperparameters in the variable's type, by way of float32."""
  return [tf.cast(tf.convert_to_tensor(x), var.dtype) for x in numbers]
