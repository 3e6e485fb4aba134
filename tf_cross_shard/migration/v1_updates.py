"""How converted optimizers update: the rule, its settings and its slots.

Both Kerases call settings and lists of slots by the same names.
"""

import functools
from typing import Any

import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.migration import v1_rules


def momentum(
  optimizer: Any, index: int, grad: Any, var: Any, rate: Any
) -> None:
  """Updates as version 1's MomentumOptimizer."""
  rule = functools.partial(
    v1_rules.momentum,
    rate=rate,
    momentum=optimizer.momentum,
    nesterov=optimizer.nesterov,
  )
  _update(rule, grad, var, index, accum=optimizer.momentums)


def adam(optimizer: Any, index: int, grad: Any, var: Any, rate: Any) -> None:
  """Updates as version 1's AdamOptimizer: all rows, under sparse ones too."""
  if isinstance(grad, tf.IndexedSlices):
    grad = indexed_slices.to_dense(grad, validation.native(var))
  betas = optimizer.beta_1, optimizer.beta_2
  steps = tf.convert_to_tensor(validation.native(optimizer.iterations))
  rule = functools.partial(
    v1_rules.adam,
    rate=rate,
    betas=betas,
    powers=tuple(v1_rules.power(beta, steps) for beta in betas),
    epsilon=optimizer.epsilon,
  )
  _update(
    *(rule, grad, var, index),
    m=optimizer._momentums,
    v=optimizer._velocities,
  )


def adagrad(optimizer: Any, index: int, grad: Any, var: Any, rate: Any) -> None:
  """Updates as version 1's AdagradOptimizer."""
  rule = functools.partial(
    v1_rules.adagrad, rate=rate, epsilon=optimizer.epsilon
  )
  _update(rule, grad, var, index, accum=optimizer._accumulators)


def rmsprop(optimizer: Any, index: int, grad: Any, var: Any, rate: Any) -> None:
  """Updates as version 1's RMSPropOptimizer."""
  rule = functools.partial(
    v1_rules.rmsprop,
    rate=rate,
    rho=optimizer.rho,
    momentum=optimizer.momentum,
    epsilon=optimizer.epsilon,
  )
  _update(
    *(rule, grad, var, index),
    rms=optimizer._velocities,
    mom=optimizer._momentums,
    mean=optimizer._average_gradients,
  )


def adadelta(
  optimizer: Any, index: int, grad: Any, var: Any, rate: Any
) -> None:
  """Updates as version 1's AdadeltaOptimizer."""
  rule = functools.partial(
    v1_rules.adadelta,
    rate=rate,
    rho=optimizer.rho,
    epsilon=optimizer.epsilon,
  )
  _update(
    *(rule, grad, var, index),
    accum=optimizer._accumulated_grads,
    moved=optimizer._accumulated_delta_vars,
  )


def ftrl(optimizer: Any, index: int, grad: Any, var: Any, rate: Any) -> None:
  """Updates as version 1's FtrlOptimizer."""
  rule = functools.partial(
    v1_rules.ftrl,
    rate=rate,
    power=optimizer.learning_rate_power,
    l1=optimizer.l1_regularization_strength,
    l2=optimizer.l2_regularization_strength,
    shrinkage=optimizer.l2_shrinkage_regularization_strength,
    beta=optimizer.beta,
  )
  _update(
    *(rule, grad, var, index),
    accum=optimizer._accumulators,
    linear=optimizer._linears,
  )


def _update(
  rule: v1_rules.Rule, grad: Any, var: Any, index: int, **slots: Any
) -> None:
  """Updates a variable and its slots; a list without slots is left out."""
  # A Keras 3 variable holds the one of TensorFlow that rows are written to.
  own = {k: validation.native(each[index]) for k, each in slots.items() if each}
  v1_rules.update(rule, grad, validation.native(var), own)
