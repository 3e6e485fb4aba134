"""Optimizer kernels whose numbers differ between replicas."""

import inspect
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import VectorizedStrategy
from tf_cross_shard._src.core.wrapped import kernels

N, SIZE = 3, 4
_STEPS = [2.0, 3.0, 4.0]


def _number(name: str, replica: int) -> float:
  """Returns a kernel's argument; learning rates and powers differ."""
  differ = {
    "lr": 0.1 * (replica + 1),
    "alpha": 0.1 * (replica + 1),
    "beta1_power": 0.9 ** _STEPS[replica],
    "beta2_power": 0.99 ** _STEPS[replica],
  }
  same = {
    "beta1": 0.9,
    "beta2": 0.99,
    "epsilon": 1e-3,
    "rho": 0.9,
    "momentum": 0.8,
    "lr_power": -0.5,
    "l1": 0.01,
    "l2": 0.02,
    "l2_shrinkage": 0.03,
  }
  return {**differ, **same}[name]


@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize("in_branch", [False, True])
def test_as_the_kernel_on_each_replica(name: str, in_branch: bool) -> None:
  """Compares with N calls of the kernel. In a branch, replica 1 is left out."""
  kernel = kernels.KERNELS[name]
  operation = getattr(tf.raw_ops, kernel.operation)
  arguments = set(inspect.signature(operation).parameters)
  arguments -= {"name", "use_locking", "update_slots"}
  arguments.discard("multiply_linear_by_lr")
  rng = np.random.default_rng(0)
  names = ["var", *kernel.slots]
  initial = {n: rng.uniform(0.5, 1.5, SIZE).astype("float32") for n in names}
  if "ms" in initial:  # Its mean square is larger than the square of its mean.
    initial["ms"] += 3.0
  grads = rng.normal(size=(N, SIZE)).astype("float32")

  def call(variables: dict[str, Any], grad: Any, number: Any) -> None:
    given = {n: v.handle for n, v in variables.items()}
    given[kernel.gradient] = grad
    for argument in arguments - given.keys():
      is_flag = argument == "use_nesterov"
      given[argument] = True if is_flag else number(argument)
    operation(**given)

  strategy = VectorizedStrategy(N)
  with strategy.scope():
    variables = {n: tf.Variable(value) for n, value in initial.items()}

  def replica_fn(grad: tf.Tensor, replica: tf.Tensor) -> None:
    def number(argument: str) -> tf.Tensor:
      values = [_number(argument, i) for i in range(N)]
      if len(set(values)) == 1:
        return tf.constant(values[0])
      return tf.constant(values)[replica]

    if in_branch:
      tf.cond(
        tf.not_equal(replica, 1),
        lambda: call(variables, grad, number),
        lambda: None,
      )
    else:
      call(variables, grad, number)

  replicas = testbed.per_replica(strategy, [0, 1, 2])
  strategy.run(
    replica_fn, (testbed.per_replica(strategy, list(grads)), replicas)
  )
  for i in range(N):
    plain = {n: tf.Variable(value) for n, value in initial.items()}
    if not in_branch or i != 1:
      call(plain, grads[i], lambda n, i=i: tf.constant(_number(n, i)))
    for n, variable in plain.items():
      copy = testbed.copies(variables[n])[i]
      np.testing.assert_allclose(copy, variable, rtol=1e-5, atol=1e-6)
