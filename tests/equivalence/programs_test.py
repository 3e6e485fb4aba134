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
  IN_FIT,
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


class ClippedPolicy(Program):
  """PPO: actors push points toward 0; the updates stop at a limit of KL."""

  actors, length = 8, 6

  def build(self) -> Any:
    return Networks(actor=dense(1, 8, 2), critic=dense(1, 8, 1))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> Any:
    weights = [
      *model.actor.trainable_variables,
      *model.critic.trainable_variables,
    ]
    with strategy.scope():
      optimizer = wrap(adam(0.03))
      optimizer.build(weights)
      updates = tf.Variable(0)
    start = tf.constant(normal(self.actors, 1))

    def roll_out() -> Any:
      state, rows = start, []
      for _ in range(self.length):
        logits = model.actor(state)
        action = keras.random.categorical(logits, 1, seed=model.random)
        then = state + 0.3 * (2.0 * tf.cast(action, "float32") - 1.0)
        row = (state, action, tf.nn.log_softmax(logits), -abs(then))
        rows.append((*row, model.critic(state)))
        state = then
      return [tf.stack(column) for column in zip(*rows, strict=True)]

    def advantages(rewards: Any, values: Any) -> Any:
      gains, gain, future = [], 0.0, 0.0
      for t in reversed(range(self.length)):
        gain = rewards[t] + 0.9 * future - values[t] + 0.8 * gain
        future = values[t]
        gains.append(gain)
      return tf.stack(gains[::-1])

    def improve(
      states: Any, actions: Any, old: Any, gains: Any, goal: Any
    ) -> Any:
      with tf.GradientTape() as tape:
        new = tf.nn.log_softmax(model.actor(states))
        gap = tf.gather(new - old, actions, batch_dims=1)
        ratio = tf.exp(gap)
        clipped = tf.clip_by_value(ratio, 0.8, 1.2)
        surrogate = tf.minimum(ratio * gains, clipped * gains)
        error = tf.square(model.critic(states) - goal)
        loss = tf.reduce_mean(error - surrogate)
      _apply(optimizer, tape, loss, weights)
      return -tf.reduce_mean(gap)

    def iteration() -> None:
      states, actions, old, rewards, values = roll_out()
      gains = advantages(rewards, values)
      columns = (states, actions, old, gains, gains + values)
      rows = [tf.reshape(column, [-1, column.shape[-1]]) for column in columns]
      kl, epoch = tf.constant(0.0), tf.constant(0)
      while epoch < 8 and kl < 0.01:
        kl = improve(*rows)
        epoch += 1
      updates.assign_add(epoch)

    run = tf.function(lambda: strategy.run(iteration))
    for _ in range(5):
      run()
    return [updates]


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


class Sampling(keras.layers.Layer):  # type: ignore[misc]
  """Draws from a normal distribution, and adds its KL divergence as a loss."""

  def __init__(self) -> None:
    super().__init__()
    self.random = keras.random.SeedGenerator()

  def call(self, x: Any) -> Any:
    mean, log_variance = keras.ops.split(x, 2, axis=-1)
    kl = keras.ops.exp(log_variance) + mean**2 - 1.0 - log_variance
    self.add_loss(0.05 * keras.ops.mean(kl))
    noise = keras.random.normal(keras.ops.shape(mean), seed=self.random)
    return mean + keras.ops.exp(0.5 * log_variance) * noise


class Autoencoder(Program):
  """A variational autoencoder, in `fit`."""

  options = IN_FIT

  def build(self) -> Any:
    return keras.Sequential(
      [keras.Input((6,)), dense(6, 8, 4), Sampling(), dense(2, 8, 6)]
    )

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    with strategy.scope():
      model.compile(wrap(adam()), "mse")
    x = normal(40, 6)
    model.fit(x, x, batch_size=8, epochs=3, shuffle=False, verbose=0)


class Perturbed(keras.Model):  # type: ignore[misc]
  """Sharpness-aware minimization: the gradient at the worst point nearby."""

  def train_step(self, data: Any) -> Any:
    x, y = data
    weights = self.trainable_variables
    with tf.GradientTape() as tape:
      loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    grads = tape.gradient(loss, weights)
    scale = 0.05 / (tf.linalg.global_norm(grads) + 1e-12)
    for weight, grad in zip(weights, grads, strict=True):
      weight.assign_add(scale * grad)
    with tf.GradientTape() as tape:
      nearby = self.compute_loss(y=y, y_pred=self(x, training=True))
    sharp = tape.gradient(nearby, weights)
    for weight, grad in zip(weights, grads, strict=True):
      weight.assign_sub(scale * grad)
    self.optimizer.apply_gradients(zip(sharp, weights, strict=True))
    return {"loss": loss}


class SharpnessAware(Program):
  def build(self) -> Any:
    x = keras.Input((6,))
    y = keras.layers.Dropout(0.2)(dense(6, 12, 8)(x))
    return Perturbed(x, keras.layers.Dense(1)(y))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    with strategy.scope():
      model.compile(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    x = normal(40, 6)
    y = np.sin(x[:, :1])
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)


class MeanTeacher(Program):
  """The teacher is the average of the students of all steps before."""

  def build(self) -> Any:
    return Networks(student=dense(4, 8, 3), teacher=dense(4, 8, 3))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    with strategy.scope():
      optimizer = wrap(adam(0.03))
    student, teacher = model.student, model.teacher
    crossentropy = tf.nn.sparse_softmax_cross_entropy_with_logits

    def step(x: Any, labels: Any, unlabeled: Any, noise: Any) -> None:
      targets = tf.nn.softmax(teacher(unlabeled))
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(crossentropy(labels, student(x)))
        guesses = tf.nn.softmax(student(unlabeled + 0.1 * noise))
        loss += tf.reduce_mean(tf.square(guesses - targets))
      _apply(optimizer, tape, loss, student.trainable_variables)
      for mean, weight in zip(teacher.weights, student.weights, strict=True):
        mean.assign(0.9 * mean + 0.1 * weight)

    x = normal(40, 12)
    labels = np.argmax(x[:, :3], axis=1)
    data = _batches(x[:, :4], labels, x[:, 4:8], x[:, 8:])
    run_steps(strategy, step, data.repeat(3))


class GradNorm(Program):
  """Weights two losses so that both train the shared layer at one speed."""

  def build(self) -> Any:
    return Networks(shared=dense(4, 8), heads=dense(8, 6, 2))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> Any:
    with strategy.scope():
      optimizer, balancer = wrap(adam()), wrap(keras.optimizers.SGD(0.05))
      balance, first = tf.Variable([1.0, 1.0]), tf.Variable([0.0, 0.0])
    kernel = model.shared.trainable_variables[0]

    def step(x: Any, y: Any) -> None:
      with tf.GradientTape(persistent=True) as tape:
        outputs = model.heads(tf.tanh(model.shared(x)))
        losses = tf.reduce_mean(tf.square(outputs - y), axis=0)
        total = tf.reduce_sum(losses * balance)
        norms = [
          tf.norm(tape.gradient(losses[i] * balance[i], kernel))
          for i in range(2)
        ]
        first.assign(tf.where(first == 0.0, losses, first))
        pace = losses / first
        mean = tf.reduce_mean(norms)
        goal = tf.stop_gradient(mean * (pace / tf.reduce_mean(pace)) ** 1.5)
        gap = tf.reduce_sum(abs(norms - goal))
      _apply(optimizer, tape, total, model.trainable_variables)
      _apply(balancer, tape, gap, [balance])
      balance.assign(2.0 * balance / tf.reduce_sum(balance))

    x = normal(40, 4)
    data = _batches(x, np.stack([10.0 * np.sin(x[:, 0]), x[:, 1]], axis=1))
    run_steps(strategy, step, data.repeat(3))
    return [balance, first]


class LowRank(Program):
  """LoRA: updates of rank 2 for the kernels of attention and an embedding."""

  options = IN_FIT

  def build(self) -> Any:
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 8)(tokens)
    attend = keras.layers.MultiHeadAttention(2, 4)
    pooled = keras.layers.GlobalAveragePooling1D()(x + attend(x, x))
    model = keras.Model(tokens, keras.layers.Dense(1)(pooled))
    for layer in model._flatten_layers():
      if isinstance(layer, keras.layers.Embedding | keras.layers.EinsumDense):
        layer.enable_lora(2)
    return model

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    with strategy.scope():
      model.compile(wrap(adam(0.03)), "mse")
    tokens = np.random.default_rng(0).integers(0, 20, (40, 6))
    y = (tokens[:, :1] > 9).astype("float32")
    model.fit(tokens, y, batch_size=8, epochs=3, shuffle=False, verbose=0)


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


# Only these have the same numbers on any number of replicas: a replica of the
# others draws its own numbers, or uses its gradients before they are averaged.
DATA_PARALLEL = [GradientPenalty, LowRank, PhysicsInformed]
OTHERS = [
  Autoencoder,
  ClippedPolicy,
  DeepQ,
  GradNorm,
  MeanTeacher,
  SharpnessAware,
]


@pytest.mark.parametrize("program", [*DATA_PARALLEL, *OTHERS])
def test_models(program: Any) -> None:
  any_strategy.check_models(program())


@pytest.mark.parametrize("program", DATA_PARALLEL)
def test_replicas(program: Any) -> None:
  any_strategy.check_replicas(program())
