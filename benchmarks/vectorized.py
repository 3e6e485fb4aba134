"""Compares several models in one `fit` with separate fits of plain Keras.

    python -m benchmarks.vectorized
    python -m benchmarks.vectorized --cases="16 tiny" --rounds=5

Each model of a `VectorizedStrategy` has its own learning rate. The figure of a
case is the CPU time of a step of `fit`, divided by that of the same number of
separate fits: 0.2 means that a step of all networks takes a fifth of the CPU
time. Both run in turns, and the smallest time of each counts, since other
processes only add to it.

For dense networks, a second figure is the CPU time of a step of `fit`, divided
by that of the arithmetic alone: one function with the matrix products of the
forward and the backward pass and Adam's kernel, on the weights of all models.

Where jax is installed, the part "vmap" compares a step of the first case
without `fit` with a step of the same networks by `jax.vmap`.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before TensorFlow.

import dataclasses
import importlib.util
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks import timing
from tf_cross_shard import (
  CrossShardOptimizer,
  VectorizedStrategy,
  schedules,
)

_CASES = flags.DEFINE_list("cases", [], "Cases to measure; all by default.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each case.", 1)
_JSON = flags.DEFINE_string("json", None, "File to write the results to.")
_STEPS, _EPOCHS = 40, 5  # Of each `fit`.
_layers = tf.keras.layers


def _dense(*sizes: int) -> Callable[[], Any]:
  first, *hidden, last = sizes
  return lambda: tf.keras.Sequential(
    [
      tf.keras.Input((first,)),
      *(_layers.Dense(size, "relu") for size in hidden),
      _layers.Dense(last),
    ]
  )


def _lstm() -> Any:
  return tf.keras.Sequential(
    [tf.keras.Input((10, 8)), _layers.LSTM(32), _layers.Dense(3)]
  )


def _transformer() -> Any:
  x = y = tf.keras.Input((16, 32))
  for _ in range(2):
    y = _layers.LayerNormalization()(
      y + _layers.MultiHeadAttention(2, 16)(y, y)
    )
    feed = _layers.Dense(32)(_layers.Dense(64, "relu")(y))
    y = _layers.LayerNormalization()(y + feed)
  return tf.keras.Model(
    x, _layers.Dense(3)(_layers.GlobalAveragePooling1D()(y))
  )


def _convolutions() -> Any:
  return tf.keras.Sequential(
    [
      tf.keras.Input((16, 16, 1)),
      _layers.Conv2D(8, 3, activation="relu"),
      _layers.MaxPooling2D(),
      _layers.Conv2D(16, 3, activation="relu"),
      _layers.Flatten(),
      _layers.Dense(3),
    ]
  )


@dataclasses.dataclass(frozen=True)
class Case:
  """What is compared.

  Attributes:
    models: The number of networks.
    shape: The shape of an example.
    batch: The number of examples in a network's batch.
    make: Creates a network with three outputs, or more.
    jit: Whether XLA compiles the vectorized step.
    sizes: The widths of a dense network; empty for others.
  """

  models: int
  shape: tuple[int, ...]
  batch: int
  make: Callable[[], Any]
  jit: bool
  sizes: tuple[int, ...] = ()


def _network(models: int, jit: bool, *sizes: int) -> Case:
  return Case(models, sizes[:1], 64, _dense(*sizes), jit, sizes)


_TINY = 20, 64, 64, 64, 3
_WIDE = 100, 256, 256, 256, 10
_WIDEST = 784, 1024, 1024, 3
CASES = {
  "16 tiny": _network(16, False, *_TINY),
  "16 tiny, XLA": _network(16, True, *_TINY),
  "4 tiny": _network(4, False, *_TINY),
  "4 tiny, XLA": _network(4, True, *_TINY),
  "16 of 256": _network(16, False, *_WIDE),
  "16 of 256, XLA": _network(16, True, *_WIDE),
  "4 of 1024": _network(4, False, *_WIDEST),
  "4 of 1024, XLA": _network(4, True, *_WIDEST),
  "16 LSTMs": Case(16, (10, 8), 32, _lstm, False),
  "16 transformers": Case(16, (16, 32), 32, _transformer, False),
  "16 transformers, XLA": Case(16, (16, 32), 32, _transformer, True),
  "8 CNNs": Case(8, (16, 16, 1), 32, _convolutions, False),
}


def _data(case: Case) -> tf.data.Dataset:
  rng = np.random.default_rng(0)
  x = rng.normal(size=(_STEPS * case.batch, *case.shape)).astype("float32")
  y = rng.integers(0, 3, size=len(x))
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(case.batch).cache()


def _compiled(case: Case, optimizer: Any, jit: bool) -> Any:
  tf.keras.utils.set_random_seed(0)
  model = case.make()
  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(optimizer, loss, jit_compile=jit)
  return model


def _vectorized(case: Case) -> Any:
  rates = np.geomspace(1e-3, 1e-2, case.models).tolist()
  with VectorizedStrategy(case.models).scope():
    adam = tf.keras.optimizers.Adam(schedules.PerGroup(rates))
    return _compiled(case, CrossShardOptimizer(adam), case.jit)


def _arithmetic(case: Case) -> Callable[[], Any]:
  """Returns a function with the matrix products and Adam's kernel alone."""
  rng = np.random.default_rng(0)
  shapes = [(case.models, m, n) for m, n in itertools.pairwise(case.sizes)]
  kernels = [
    tf.Variable(rng.normal(size=s).astype("float32") / s[1] ** 0.5)
    for s in shapes
  ]
  updated = [*kernels, *(tf.Variable(tf.zeros([s[0], s[2]])) for s in shapes)]
  slots = [[tf.Variable(tf.zeros(v.shape)) for _ in "mv"] for v in updated]
  x = tf.constant(rng.normal(size=(case.batch, case.sizes[0])), tf.float32)

  @tf.function(autograph=False)
  def step() -> None:
    inputs = [tf.broadcast_to(x, [case.models, *x.shape])]
    for kernel in kernels:
      inputs.append(inputs[-1] @ kernel)
    upstream, grads = inputs.pop(), []
    for i in reversed(range(len(kernels))):
      bias = upstream[:, 0]
      grads.append((kernels[i], tf.matmul(inputs[i], upstream, True)))
      grads.append((updated[len(kernels) + i], bias))
      if i:
        upstream = tf.matmul(upstream, kernels[i], transpose_b=True)
    for variable, grad in grads:
      [place] = [i for i, v in enumerate(updated) if v is variable]
      first, second = slots[place]
      tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=first.handle,
        v=second.handle,
        beta1_power=0.9,
        beta2_power=0.999,
        lr=1e-9,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-7,
        grad=grad,
      )

  return step


def _milliseconds(model: Any, data: tf.data.Dataset) -> float:
  """Returns the CPU time of a step of `fit`."""
  start = time.process_time()
  model.fit(data, epochs=_EPOCHS, verbose=0)
  return 1e3 * (time.process_time() - start) / (_STEPS * _EPOCHS)


def measure(name: str) -> dict[str, Any]:
  """Measures a case, and prints its row."""
  case = CASES[name]
  plain = _compiled(case, tf.keras.optimizers.Adam(1e-3), False)
  ours = _vectorized(case)
  data = _data(case)
  start = time.perf_counter()
  ours.fit(data.take(1), epochs=1, verbose=0)
  first = time.perf_counter() - start
  taken: list[list[float]] = [[], []]
  for i in range(_ROUNDS.value + 1):
    for model, times in zip((plain, ours), taken, strict=True):
      used = _milliseconds(model, data)
      if i:  # The first round traces, and fills caches.
        times.append(used)
  one, all_models = map(min, taken)
  row = {
    "case": name,
    "ratio": all_models / one / case.models,
    "milliseconds": all_models,
    "first_step_seconds": first,
  }
  beside = ""
  if case.sizes:
    row["of_arithmetic"] = all_models / _cpu_time(_arithmetic(case))
    beside = f" {row['of_arithmetic']:.2f} of the arithmetic;"
  print(
    f"{name:22} {row['ratio']:.2f} of separate fits;{beside}"
    f" {all_models:.2f} ms; first step {first:.1f} s",
    flush=True,
  )
  return row


def _step_without_fit() -> float:
  """Returns the milliseconds of CPU time of a step of "16 tiny"."""
  case = CASES["16 tiny"]
  model = _vectorized(case)
  strategy = model.distribute_strategy
  model.fit(_data(case).take(1), verbose=0)
  data = strategy.experimental_distribute_dataset(_data(case))
  batch = next(iter(data))
  step = tf.function(
    lambda batch: strategy.run(model.train_step, args=(batch,))
  )
  return _cpu_time(lambda: step(batch))


def _step_by_vmap() -> float:
  """Returns the milliseconds of CPU time of the same networks in JAX."""
  import jax  # The only use of jax here.
  import jax.numpy as jnp

  case = CASES["16 tiny"]
  rng, sizes = np.random.default_rng(0), (20, 64, 64, 64, 3)
  weights = [
    (
      jnp.asarray(rng.normal(size=(16, m, n)) / m**0.5, jnp.float32),
      jnp.zeros([16, n]),
    )
    for m, n in itertools.pairwise(sizes)
  ]
  x = jnp.asarray(rng.normal(size=(case.batch, 20)), jnp.float32)
  y = jnp.asarray(rng.integers(0, 3, size=case.batch))

  def loss(weights: Any, x: Any, y: Any) -> Any:
    for kernel, bias in weights[:-1]:
      x = jax.nn.relu(x @ kernel + bias)
    logits = jax.nn.log_softmax(x @ weights[-1][0] + weights[-1][1])
    return -jnp.take_along_axis(logits, y[:, None], axis=1).mean()

  def step(weights: Any, m: Any, v: Any, t: Any, rate: Any) -> Any:
    # Adam, as in Kingma and Ba, Algorithm 1.
    grads = jax.grad(loss)(weights, *batch.pop())
    tree = jax.tree_util.tree_map
    m = tree(lambda m, g: m + 0.1 * (g - m), m, grads)
    v = tree(lambda v, g: v + 0.001 * (g * g - v), v, grads)
    alpha = rate * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    weights = tree(
      lambda w, m, v: w - alpha * m / (jnp.sqrt(v) + 1e-7), weights, m, v
    )
    return weights, m, v

  batch: list[Any] = []

  def one(
    weights: Any, m: Any, v: Any, rate: Any, x: Any, y: Any, t: Any
  ) -> Any:
    batch.append((x, y))
    return step(weights, m, v, t, rate)

  all_models = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, 0, None, None, None)))
  zeros = jax.tree_util.tree_map(jnp.zeros_like, weights)
  rates = jnp.geomspace(1e-3, 1e-2, 16)
  state = [weights, zeros, zeros]

  def run() -> None:
    state[:] = all_models(*state, rates, x, y, 1.0)
    jax.block_until_ready(state)

  return _cpu_time(run)


def _cpu_time(step: Callable[[], Any], steps: int = 200) -> float:
  """Returns the smallest CPU time of a step, of several turns."""
  turns = []
  for _ in range(_ROUNDS.value + 1):
    start = time.process_time()
    for _ in range(steps):
      step()
    turns.append(1e3 * (time.process_time() - start) / steps)
  return min(turns)


def main(argv: Sequence[str]) -> None:
  """Measures the cases, and prints a table."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
  print(timing.machine())
  results: dict[str, Any] = {
    "rows": [measure(name) for name in _CASES.value or CASES]
  }
  if not _CASES.value and importlib.util.find_spec("jax"):
    ours, vmap = _step_without_fit(), _step_by_vmap()
    results["vmap"] = {"ours": ours, "jax": vmap}
    print(
      f"16 tiny, a step without fit: {ours:.2f} ms, by jax.vmap {vmap:.2f} ms"
      f" ({vmap / ours:.2f} of ours)"
    )
  if _JSON.value:
    timing.write_json(_JSON.value, results)


if __name__ == "__main__":
  app.run(main)
