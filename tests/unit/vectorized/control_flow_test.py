"""Loops that models leave one by one, and loops inside of conditionals.

Each test compares the models with calls of the same function on variables
without a strategy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import VectorizedStrategy

TRIPS = [3, 0, 1, 4]
N = len(TRIPS)
START = np.random.default_rng(0).uniform(0.2, 0.9, [3, 3]).astype("f4")

# Receives a variable of the shape [3, 3], the number of the iteration, and a
# tensor of the shape [3, 3], and returns the next tensor.
Body = Callable[[Any, tf.Tensor, tf.Tensor], tf.Tensor]


def _compare(step: Any, jit: bool | None = None, rtol: float = 1e-5) -> None:
  """Compares the variables and results of `step(variable, trips, x)`.

  The results are a dictionary of tensors.
  """
  strategy = VectorizedStrategy(N)
  with strategy.scope():
    variable = tf.Variable(START)
  trips = testbed.per_replica(strategy, TRIPS)
  inputs = [START * (1 + i / 8) for i in range(N)]
  x = testbed.per_replica(strategy, inputs)

  def run(trips: Any, x: Any) -> Any:
    return strategy.run(lambda *args: step(variable, *args), (trips, x))

  result = tf.function(run, jit_compile=jit, autograph=False)(trips, x)
  plain = tf.Variable(START)
  alone = tf.function(lambda *args: step(plain, *args), autograph=False)
  for i in range(N):
    plain.assign(START)
    expected = alone(tf.constant(TRIPS[i]), tf.constant(inputs[i]))
    for name, want in expected.items():
      got = strategy.experimental_local_results(result[name])[i]
      np.testing.assert_allclose(got, want, rtol, 1e-6, err_msg=name)
    np.testing.assert_allclose(testbed.copies(variable)[i], plain, rtol, 1e-6)


def _loop(body: Body, v: Any, trips: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  return tf.while_loop(
    lambda i, _: i < trips,
    lambda i, a: (i + 1, body(v, i, a)),
    [tf.constant(0), x],
  )[1]


def _nested_loop(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  return tf.while_loop(
    lambda j, _: j < i, lambda j, b: (j + 1, tf.sin(b) + v), [0, a]
  )[1]


def _scattered(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  return tf.tensor_scatter_nd_add(a, [[i % 3, 0]], [1.0])


def _assigned(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  v.assign_add(tf.ones_like(a) * tf.cast(i + 1, tf.float32))
  return a * v


def _assigned_row(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  v[i % 3].assign(a[0])
  return a + 1.0


def _scattered_row(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  v.scatter_update(tf.IndexedSlices(a[:1], [i % 3]))
  return a + 1.0


def _written(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  array = tf.TensorArray(tf.float32, 5, element_shape=[3, 3])
  return array.write(i, a).stack()[i] * 2.0


def _asserted(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  """Fails in an iteration after the model's last one."""
  tf.debugging.assert_less(tf.reduce_max(a), 4.5)
  return a + 1.0


def _inverse(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  return tf.linalg.inv(a + 3.0 * tf.eye(3))


def _chosen(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  return tf.cond(a[0, 0] > 0.5, lambda: tf.sin(a), lambda: a * v)


def _chosen_slice(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  """Slices beyond the end where the branch is not taken."""
  return tf.cond(i < 3, lambda: a * a[i], lambda: a * 0.5)


def _chosen_of_any_rank(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  b = tf.raw_ops.PlaceholderWithDefault(input=a, shape=None)
  result = tf.cond(i < 2, lambda: tf.sin(b) + v, lambda: b)
  return tf.ensure_shape(result, [3, 3])


def _chosen_assignment(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  return tf.cond(i < 2, lambda: a + v.assign_add(a), lambda: a * 1.5)


def _from_host(v: Any, i: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
  result = tf.numpy_function(lambda b: b * 2.0, [a], tf.float32)
  return tf.ensure_shape(result, [3, 3])


BODIES: dict[str, Body] = {
  "add": lambda v, i, a: a + v,
  "tanh": lambda v, i, a: tf.tanh(a),
  "exp and log": lambda v, i, a: tf.math.log(1.0 + tf.exp(a)),
  "pow": lambda v, i, a: a**1.5,
  "rsqrt": lambda v, i, a: tf.math.rsqrt(1.0 + a * a),
  "division": lambda v, i, a: a / (1.0 + v),
  "integer division": lambda v, i, a: a * tf.cast(7 // (i + 1), tf.float32),
  "floor": lambda v, i, a: a + tf.floor(a),
  "where": lambda v, i, a: tf.where(a > 0.5, a, v),
  "clip": lambda v, i, a: tf.clip_by_value(a + 0.5, 0.0, 1.0),
  "cast": lambda v, i, a: a * tf.cast(i, tf.float32),
  "sum": lambda v, i, a: a + tf.reduce_sum(a, 0),
  "mean": lambda v, i, a: a + tf.reduce_mean(a),
  "max": lambda v, i, a: a - tf.reduce_max(a, 1, keepdims=True),
  "logsumexp": lambda v, i, a: a - tf.reduce_logsumexp(a),
  "norm": lambda v, i, a: a / tf.norm(a),
  "argmax": lambda v, i, a: a + tf.cast(tf.argmax(a), tf.float32),
  "matmul": lambda v, i, a: tf.matmul(a, v),
  "matmul of own": lambda v, i, a: tf.matmul(a, a, transpose_b=True),
  "einsum": lambda v, i, a: tf.einsum("ij,jk->ki", a, v),
  "batch matmul": lambda v, i, a: (a[None] @ v[None])[0],
  "gather": lambda v, i, a: tf.gather(a, [2, 0, 1]),
  "gather own": lambda v, i, a: a + tf.gather(a, i % 3),
  "gather beyond the end": lambda v, i, a: (
    a + tf.gather(tf.constant([1.0, 2.0, 3.0, 4.0]), i)
  ),
  "slice own": lambda v, i, a: a + a[i % 3],
  "slice beyond the end": lambda v, i, a: a + tf.range(4.0)[i],
  "gather of a variable": lambda v, i, a: a + tf.gather(v, i % 3),
  "gather_nd": lambda v, i, a: a + tf.gather_nd(a, [[i % 3, 1]]),
  "scatter": _scattered,
  "one hot": lambda v, i, a: a + tf.one_hot(i, 3),
  "concat": lambda v, i, a: tf.concat([a[1:], v[:1]], 0),
  "stack": lambda v, i, a: tf.stack([a, v])[0] + tf.unstack(a)[1],
  "split": lambda v, i, a: tf.concat(tf.split(a, 3, 1)[::-1], 1),
  "transpose": lambda v, i, a: tf.transpose(a) + v,
  "reshape": lambda v, i, a: tf.reshape(tf.reshape(a, [-1])[::-1], [3, 3]),
  "tile": lambda v, i, a: tf.tile(a[:1], [3, 1]) * v,
  "pad": lambda v, i, a: tf.pad(a[:2], [[1, 0], [0, 0]]) + v,
  "squeeze": lambda v, i, a: a + tf.squeeze(a[:1]),
  "expand": lambda v, i, a: a[..., None][..., 0] * 2.0,
  "reverse": lambda v, i, a: tf.reverse(a, [0]),
  "roll": lambda v, i, a: tf.roll(a, 1, 0),
  "cumsum": lambda v, i, a: tf.cumsum(a) / 3.0,
  "sort": lambda v, i, a: tf.sort(a * v),
  "top k": lambda v, i, a: a + tf.math.top_k(a, 1)[0],
  "band": lambda v, i, a: tf.linalg.band_part(a, 1, 0) + v,
  "diagonal": lambda v, i, a: a + tf.linalg.diag(tf.linalg.diag_part(a)),
  "softmax": lambda v, i, a: tf.nn.softmax(a),
  "log softmax": lambda v, i, a: tf.nn.log_softmax(a),
  "relu": lambda v, i, a: tf.nn.relu(a - 0.5) + 0.1,
  "gelu": lambda v, i, a: tf.nn.gelu(a),
  "bias": lambda v, i, a: tf.nn.bias_add(a, v[0]),
  "cross entropy": lambda v, i, a: (
    a + tf.nn.softmax_cross_entropy_with_logits(v, a)
  ),
  "moments": lambda v, i, a: a - tf.nn.moments(a, [0])[0],
  "segments": lambda v, i, a: tf.math.unsorted_segment_sum(a, [0, 2, 0], 3),
  "convolution": lambda v, i, a: tf.nn.conv2d(
    a[None, ..., None], v[..., None, None], 1, "SAME"
  )[0, ..., 0],
  "inverse": _inverse,
  "cholesky": lambda v, i, a: tf.linalg.cholesky(
    a @ tf.transpose(a) + tf.eye(3)
  ),
  "stateless random": lambda v, i, a: (
    a + tf.random.stateless_uniform([3, 3], [i, 1])
  ),
  "nested loop": _nested_loop,
  "nested condition": _chosen,
  "condition of a slice": _chosen_slice,
  "condition of any rank": _chosen_of_any_rank,
  "array": _written,
}
EFFECTS: dict[str, Body] = {
  "assign": _assigned,
  "assign a row": _assigned_row,
  "scatter a row": _scattered_row,
  "assertion": _asserted,
  "assign in a condition": _chosen_assignment,
  "host": _from_host,
  "check": lambda v, i, a: tf.debugging.check_numerics(a, "") + 1.0,
}
# XLA has no such operations, or other random numbers.
_NOT_COMPILED = {"host", "assertion", "assign a row", "stateless random"}


# Names of bodies without a side effect, twelve of which are in one program.
_PURE = [list(BODIES)[i : i + 12] for i in range(0, len(BODIES), 12)]
_PROGRAMS = [*_PURE, *([name] for name in EFFECTS)]


def _check_loops(names: Sequence[str], jit: bool | None = None) -> None:
  bodies = {**BODIES, **EFFECTS}

  def step(v: Any, n: tf.Tensor, x: tf.Tensor) -> dict[str, tf.Tensor]:
    return {name: _loop(bodies[name], v, n, x) for name in names}

  _compare(step, jit)


@pytest.mark.parametrize("names", _PROGRAMS, ids=lambda names: names[0])
def test_loops_that_models_leave_one_by_one(names: Sequence[str]) -> None:
  _check_loops(names)


@pytest.mark.slow
@pytest.mark.parametrize("names", _PROGRAMS, ids=lambda names: names[0])
def test_compiled_loops_that_models_leave_one_by_one(
  names: Sequence[str],
) -> None:
  compiled = [name for name in names if name not in _NOT_COMPILED]
  if not compiled:
    pytest.skip("XLA has no such operation.")
  _check_loops(compiled, jit=True)


@pytest.mark.parametrize("names", _PROGRAMS[2:], ids=lambda names: names[0])
def test_loops_that_some_models_enter(names: Sequence[str]) -> None:
  bodies = {**BODIES, **EFFECTS}

  def step(v: Any, n: tf.Tensor, x: tf.Tensor) -> dict[str, tf.Tensor]:
    return {
      name: tf.cond(
        n > 1,
        lambda body=bodies[name]: _loop(body, v, tf.constant(2), x),
        lambda: x * 2.0,
      )
      for name in names
    }

  _compare(step)


def _check_gradients(some_enter: bool, names: Sequence[str]) -> None:
  def step(v: Any, n: tf.Tensor, x: tf.Tensor) -> dict[str, tf.Tensor]:
    gradients = {}
    for name in names:
      with tf.GradientTape() as tape:
        tape.watch(x)
        if some_enter:
          y = tf.cond(
            n > 1,
            lambda body=BODIES[name]: _loop(body, v, n, x),
            lambda: x * 2.0,
          )
        else:
          y = _loop(BODIES[name], v, n, x)
        loss = tf.reduce_sum(y * y)
      of_x, of_v = tape.gradient(loss, [x, v])
      gradients[f"{name}, x"] = of_x
      if of_v is not None:
        gradients[f"{name}, variable"] = tf.convert_to_tensor(of_v)
    return gradients

  _compare(step, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("names", _PURE, ids=lambda names: names[0])
def test_gradients_of_loops_that_some_models_enter(
  names: Sequence[str],
) -> None:
  # TensorFlow has no gradient of argmax.
  _check_gradients(True, [name for name in names if name != "argmax"])


def test_gradients_of_loops_that_all_models_enter() -> None:
  names = ["tanh", "gather own", "nested loop", "condition of a slice"]
  _check_gradients(False, names)
