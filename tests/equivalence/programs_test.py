"""Well-known training programs, with VectorizedStrategy and MirroredStrategy.

Each program is written once, as for one device. All weights must be those of
plain Keras; see `tests.support.any_strategy`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import any_strategy
from tests.support.any_strategy import (
  OWN_LOSS_IN_FIT,
  Networks,
  Program,
  adam,
  dense,
  normal,
  run_steps,
)

keras = tf.keras
Strategy = tf.distribute.Strategy
Wrap = Callable[[Any], Any]


def _batches(*arrays: np.ndarray, size: int = 8) -> tf.data.Dataset:
  return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def _apply(optimizer: Any, tape: Any, loss: Any, weights: Any) -> None:
  grads = tape.gradient(loss, weights)
  optimizer.apply_gradients(zip(grads, weights, strict=True))


class DeepQ(Program):
  """Q-learning with a replay buffer and a target network.

  The agent walks in a corridor of five cells. A model stops as soon as it has
  walked straight to the goal twice in a row.
  """

  cells, most_steps = 5, 120

  def build(self) -> Any:
    sizes = (self.cells, 16, 2)
    return Networks(online=dense(*sizes), target=dense(*sizes))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> Any:
    weights = model.online.trainable_variables
    copied = model.target.weights, model.online.weights
    with strategy.scope():
      optimizer = wrap(adam(0.02))
      optimizer.build(weights)
      cell, moves, wins, last = (tf.Variable(0) for _ in range(4))
      # Cell, action, reward, next cell.
      buffer = tf.Variable(tf.zeros([32, 4]))

    def values(network: Any, cells: Any) -> Any:
      return network(tf.one_hot(tf.cast(cells, "int32"), self.cells))

    def act() -> Any:
      best = tf.argmax(values(model.online, cell[tf.newaxis])[0], -1, "int32")
      draw = keras.random.uniform([2], seed=model.random)
      is_random = draw[0] < 0.2
      return tf.where(is_random, tf.cast(draw[1] < 0.5, "int32"), best)

    def learn() -> None:
      now, action, reward, then = tf.unstack(buffer, axis=1)
      is_on = tf.cast(then < self.cells - 1, "float32")
      future = tf.reduce_max(values(model.target, then), axis=1)
      with tf.GradientTape() as tape:
        mask = tf.one_hot(tf.cast(action, "int32"), 2)
        value = tf.reduce_sum(values(model.online, now) * mask, axis=1)
        error = value - reward - 0.9 * is_on * future
        loss = tf.reduce_mean(keras.ops.square(error))
      _apply(optimizer, tape, loss, weights)

    def play(step: Any) -> Any:
      action = act()
      then = tf.clip_by_value(cell + 2 * action - 1, 0, self.cells - 1)
      is_goal = then == self.cells - 1
      row = [cell, action, tf.cast(is_goal, "int32"), then]
      buffer.scatter_nd_update([[step % 32]], [tf.cast(row, "float32")])
      learn()
      if step % 8 == 0:
        for a, b in zip(*copied, strict=True):
          a.assign(b)
      moves.assign_add(1)
      if is_goal:
        is_straight = moves == self.cells - 1
        wins.assign(tf.where(is_straight, wins + 1, 0))
        cell.assign(0)
        moves.assign(0)
      else:
        cell.assign(then)
      return step + 1

    def training() -> None:
      step = tf.constant(0)
      while step < self.most_steps and wins < 2:
        step = play(step)
      last.assign(step)

    tf.function(lambda: strategy.run(training))()
    return [last]


class GradientPenalty(Program):
  """WGAN-GP: penalizes gradients between real and generated points."""

  def build(self) -> Any:
    return Networks(generator=dense(2, 8, 2), critic=dense(2, 16, 1))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    with strategy.scope():
      sgd = keras.optimizers.SGD(0.05)
      optimizers = [wrap(adam()), wrap(sgd)]
    critic, generator = model.critic, model.generator

    def step(real: Any, noise: Any, share: Any) -> None:
      with tf.GradientTape() as tape:
        made = generator(noise)
        between = share * real + (1.0 - share) * made
        with tf.GradientTape() as inner:
          inner.watch(between)
          score = critic(between)
        slope = tf.norm(inner.gradient(score, between), axis=1)
        penalty = 10.0 * tf.reduce_mean(tf.square(slope - 1.0))
        loss = tf.reduce_mean(critic(made) - critic(real)) + penalty
      _apply(optimizers[0], tape, loss, critic.trainable_variables)
      with tf.GradientTape() as tape:
        loss = -tf.reduce_mean(critic(generator(noise)))
      _apply(optimizers[1], tape, loss, generator.trainable_variables)

    points, share = normal(64, 4), np.random.default_rng(1).random((64, 1))
    real = points[:, :2] / np.linalg.norm(points[:, :2], axis=1, keepdims=True)
    data = _batches(real, points[:, 2:], share.astype("float32"))
    run_steps(strategy, step, data.repeat(3))


class Poisson(keras.Model):  # type: ignore[misc]
  """Learns the solution of u''(x) = -sin(x), with u = 0 at 0 and at pi."""

  def compute_loss(self, x: Any, *others: Any, **options: Any) -> Any:
    with tf.GradientTape() as outer:
      outer.watch(x)
      with tf.GradientTape() as tape:
        tape.watch(x)
        u = x * (np.pi - x) * self(x, training=True)
      slope = tape.gradient(u, x)
    residual = outer.gradient(slope, x) + tf.sin(x)
    return tf.reduce_mean(tf.square(residual))


class PhysicsInformed(Program):
  """An ensemble of networks for a differential equation, in `fit`."""

  options = OWN_LOSS_IN_FIT

  def build(self) -> Any:
    x = keras.Input((1,))
    return Poisson(x, dense(1, 8, 8, 1)(x))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    with strategy.scope():
      # Adam would hide a sum in place of a mean.
      model.compile(wrap(keras.optimizers.SGD(0.01, momentum=0.9)))
    x = np.pi * np.random.default_rng(0).random((40, 1)).astype("float32")
    model.fit(x, x, batch_size=8, epochs=3, shuffle=False, verbose=0)


@pytest.mark.parametrize("program", [DeepQ, GradientPenalty, PhysicsInformed])
def test_models(program: Any) -> None:
  any_strategy.check_models(program())


# The agent draws its own numbers on each replica.
@pytest.mark.parametrize("program", [GradientPenalty, PhysicsInformed])
def test_replicas(program: Any) -> None:
  any_strategy.check_replicas(program())
