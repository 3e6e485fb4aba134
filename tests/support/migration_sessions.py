"""Trains the same network with sessions of TensorFlow 1 and with Keras."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tf_cross_shard
from tests.support import testbed

Arrays = dict[str, np.ndarray]

v1 = tf.compat.v1
EXAMPLES = 8  # in a step, of all replicas
SHAPES = {
  "one/kernel": (4, 3),
  "one/bias": (3,),
  "two/kernel": (3, 2),
  "two/bias": (2,),
}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
  "SGD": lambda: v1.train.GradientDescentOptimizer(0.1),
  "Momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
  # TensorFlow 1 multiplies powers of betas, and Keras computes each of them.
  # Their values of 1 - 0.999**8 agree in 5 digits, and so do their learning
  # rates in that step.
  "Adam": lambda: v1.train.AdamOptimizer(0.001),
  "Adagrad": lambda: v1.train.AdagradOptimizer(0.1),
  "Adadelta": lambda: v1.train.AdadeltaOptimizer(1.0, 0.95, 1e-6),
  "RMSProp": lambda: v1.train.RMSPropOptimizer(0.01, 0.9, 0.5, 1e-10),
  "RMSProp centered only": lambda: v1.train.RMSPropOptimizer(
    0.01, 0.9, 0.0, 1e-10, centered=True
  ),
  "Ftrl": lambda: v1.train.FtrlOptimizer(
    0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.01
  ),
}
# The slot of TensorFlow 1 that the Keras optimizer does not have.
DROPPED = {"RMSProp centered only": "RMSProp_2"}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the examples of a step: inputs and targets."""
  rng = np.random.default_rng([2, step])
  x = rng.normal(size=(EXAMPLES, 4)).astype("float32")
  y = rng.normal(size=(EXAMPLES, 2)).astype("float32")
  return x, y


class Sessions:
  """A network that TensorFlow 1 trains."""

  def __init__(
    self, make: Callable[[], Any], with_step: bool = True, scope: str = ""
  ) -> None:
    """Creates the graph; `make` creates the optimizer inside `scope`."""
    rng = np.random.default_rng(1)
    self._graph = tf.Graph()
    with self._graph.as_default():
      self._x = v1.placeholder(tf.float32, (None, 4))
      self._y = v1.placeholder(tf.float32, (None, 2))
      w = {
        name: v1.get_variable(
          name, initializer=rng.normal(size=shape).astype("float32")
        )
        for name, shape in SHAPES.items()
      }
      hidden = tf.tanh(self._x @ w["one/kernel"] + w["one/bias"])
      out = hidden @ w["two/kernel"] + w["two/bias"]
      self._loss = tf.reduce_mean((out - self._y) ** 2)
      step = v1.train.get_or_create_global_step() if with_step else None
      with v1.variable_scope(scope or v1.get_variable_scope()):
        self._train = make().minimize(self._loss, global_step=step)
      self._saver = v1.train.Saver()
      self._session = v1.Session()
      self._session.run(v1.global_variables_initializer())

  def train(self, start: int, end: int) -> list[float]:
    """Trains on the batches of these steps.

    Returns the loss before each step.
    """
    losses = []
    for step in range(start, end):
      x, y = batch(step)
      feed = {self._x: x, self._y: y}
      loss, _ = self._session.run([self._loss, self._train], feed)
      losses.append(float(loss))
    return losses

  def values(self) -> Arrays:
    with self._graph.as_default():
      variables = {v.op.name: v for v in v1.global_variables()}
      return self._session.run(variables)

  def save(self, path: Path) -> str:
    with self._graph.as_default():
      return self._saver.save(self._session, str(path), write_meta_graph=False)


class Training:
  """The same network in Keras."""

  def __init__(
    self,
    optimizer: Callable[[], Any],
    strategy: tf.distribute.Strategy | None = None,
    model: Callable[[], Any] | None = None,
  ) -> None:
    """Creates the model and the optimizer, without building the optimizer."""
    self.strategy = strategy or tf.distribute.get_strategy()
    with self.strategy.scope():
      self.model = (model or network)()
      self.optimizer = optimizer()
    self._run = tf.function(self._step, autograph=False)

  def _step(self, xs: Any, ys: Any) -> Any:
    variables = self.model.trainable_variables

    def replica_step() -> Any:
      i = testbed.replica_id() if xs.shape[0] > 1 else 0
      x, y = tf.gather(xs, i), tf.gather(ys, i)

      def loss() -> Any:
        return tf.reduce_mean((self.model(x, training=True) - y) ** 2)

      if hasattr(self.optimizer, "compute_gradients"):
        pairs = self.optimizer.compute_gradients(loss, variables)
        self.optimizer.apply_gradients(pairs)
        return loss()
      with tf.GradientTape() as tape:
        value = loss()
      grads = tape.gradient(value, variables)
      self.optimizer.apply_gradients(zip(grads, variables, strict=True))
      return value

    return self.strategy.run(replica_step)

  def train(self, start: int, end: int) -> list[float]:
    """Trains on the batches of these steps.

    Returns the loss before each step.
    """
    losses = []
    replicas = self.strategy.num_replicas_in_sync
    for step in range(start, end):
      x, y = batch(step)
      losses.append(float(np.mean((self.model(x).numpy() - y) ** 2)))
      own = [part.reshape(replicas, -1, part.shape[-1]) for part in (x, y)]
      self._run(*map(tf.constant, own))
    return losses


def network(library: Any = tf.keras, first: str = "one") -> Any:
  layers = library.layers
  return library.Sequential(
    [
      library.Input((4,)),
      layers.Dense(3, activation="tanh", name=first),
      layers.Dense(2, name="two"),
    ],
    name="net",
  )


def plain(name: str, package: Any = tf_cross_shard) -> Any:
  """Returns the optimizer of Keras that one of TensorFlow 1 becomes."""
  return package.CrossShardOptimizer(OPTIMIZERS[name]()).inner_optimizer


def largest(first: Sequence[float], second: Sequence[float]) -> float:
  return float(np.abs(np.subtract(first, second)).max())
