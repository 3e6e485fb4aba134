"""Models and losses of other libraries, with n models and with two replicas.

Each program is written once, as for one device. All weights must be those of
plain Keras; see `tests.support.any_strategy`. `tools/strangers.sh` installs the
libraries, in the versions of `strangers` in setup.cfg, and runs this file. In
other environments, the tests of a library that is not installed are skipped.
"""

import configparser
import importlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import any_strategy
from tests.support.any_strategy import (
  IN_FIT,
  SEEDS,
  Networks,
  Program,
  adam,
  dense,
  normal,
  run_steps,
)
from tf_cross_shard import VectorizedStrategy, per_model

keras = tf.keras
Strategy = tf.distribute.Strategy
Wrap = Callable[[Any], Any]
PROJECT = pathlib.Path(__file__).absolute().parents[2]
DISTRIBUTIONS = {
  "deepxde": "deepxde",
  "keras_hub": "keras-hub",
  "keras_rs": "keras-rs",
  "sonnet": "dm-sonnet",
  "tensorflow_probability": "tensorflow-probability",
}


def _library(module: str) -> Any:
  """Imports a library, or skips the test and says which version is missing."""
  # DeepXDE would ask on the terminal which framework it is for.
  os.environ.setdefault("DDE_BACKEND", "tensorflow")
  try:
    return importlib.import_module(module)
  except ImportError as error:
    config = configparser.ConfigParser(interpolation=None)
    config.read(PROJECT / "setup.cfg")
    pins = config["options.extras_require"]["strangers"].split()
    [pin] = [pin for pin in pins if pin.startswith(DISTRIBUTIONS[module])]
    reason = f"no {pin} with TensorFlow {tf.__version__}: {error}"
    if "STRANGERS_MUST_RUN" in os.environ:
      pytest.fail(reason)
    pytest.skip(f"{reason}. Run tools/strangers.sh.")


def _momentum(rate: float) -> Any:
  # Adam would hide a sum over replicas in place of a mean.
  return keras.optimizers.SGD(rate, momentum=0.9)


def _fit(model: Any, x: Any, y: Any, **options: Any) -> None:
  model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, **options)


def _mask(rng: np.random.Generator) -> np.ndarray:
  """Returns which of five tokens each sentence has."""
  # MirroredStrategy cannot take booleans, with plain Keras either.
  return (np.arange(5) < rng.integers(2, 6, (40, 1))).astype("int32")


class HubEncoder(Program):
  """keras-hub: BERT, with a head that classifies sentences."""

  options = IN_FIT

  def __init__(self, dropout: float) -> None:
    self.dropout = dropout

  def build(self) -> Any:
    models = _library("keras_hub").models
    sizes = {"hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 5}
    backbone = models.BertBackbone(20, 1, 2, dropout=self.dropout, **sizes)
    return models.BertTextClassifier(backbone, 3, dropout=self.dropout)

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (40, 5))
    x = {
      "token_ids": tokens,
      "segment_ids": np.tile([0, 0, 0, 1, 1], (40, 1)),
      "padding_mask": _mask(rng),
    }
    with strategy.scope():
      loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
      model.compile(wrap(adam()), loss)
    _fit(model, x, tokens[:, 0] % 3)


class HubDecoder(Program):
  """keras-hub: Llama, which predicts the next token."""

  options = IN_FIT

  def __init__(self, dropout: float) -> None:
    self.dropout = dropout

  def build(self) -> Any:
    models = _library("keras_hub").models
    sizes = {"hidden_dim": 8, "intermediate_dim": 16, "dropout": self.dropout}
    heads = {"num_query_heads": 2, "num_key_value_heads": 1}
    return models.LlamaCausalLM(models.LlamaBackbone(20, 1, **heads, **sizes))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (40, 6))
    mask = _mask(rng)
    with strategy.scope():
      loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
      model.compile(wrap(adam()), loss)
    x = {"token_ids": tokens[:, :-1], "padding_mask": mask}
    _fit(model, x, tokens[:, 1:], sample_weight=mask)


class CrossNetwork(Program):
  """keras-rs: crosses and dot products of embeddings and numbers (DCN)."""

  options = IN_FIT

  def build(self) -> Any:
    layers = _library("keras_rs").layers
    user, items = (
      keras.Input((), dtype="int32"),
      keras.Input((3,), dtype="int32"),
    )
    numbers = keras.Input((4,))
    features = [
      layers.EmbedReduce(10, 4, combiner="sum")(user),
      layers.EmbedReduce(12, 4, combiner="mean")(items),
      keras.layers.Dense(4, "relu")(numbers),
    ]
    x = first = keras.layers.Concatenate()(features)
    for projection in (None, 3):
      x = layers.FeatureCross(projection)(first, x)
    x = keras.layers.Concatenate()([x, layers.DotInteraction()(features)])
    return keras.Model(
      [user, items, numbers], keras.layers.Dense(1, "sigmoid")(x)
    )

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    with strategy.scope():
      model.compile(wrap(_momentum(0.1)), "binary_crossentropy")
    rng, numbers = np.random.default_rng(0), normal(40, 4)
    x = [rng.integers(0, 10, 40), rng.integers(0, 12, (40, 3)), numbers]
    _fit(model, x, (numbers[:, :1] > 0.0).astype("float32"))


class SecondDerivatives(Program):
  """DeepXDE: u'' + sin(x), in a loop of your own."""

  def build(self) -> Any:
    nn = _library("deepxde").nn
    # The initializers that DeepXDE has names for give every network the same
    # weights, whatever the random seed.
    network = nn.FNN([1, 8, 8, 1], "tanh", keras.initializers.GlorotNormal())
    network.apply_output_transform(lambda x, u: x * (np.pi - x) * u)
    network(tf.zeros([1, 1]))
    return network

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    dde = _library("deepxde")
    with strategy.scope():
      optimizer = wrap(_momentum(0.01))

    def step(x: Any) -> None:
      with tf.GradientTape() as tape:
        residual = dde.grad.hessian(model(x, training=True), x) + tf.sin(x)
        loss = tf.reduce_mean(tf.square(residual))
      dde.grad.clear()
      weights = model.trainable_variables
      grads = tape.gradient(loss, weights)
      optimizer.apply_gradients(zip(grads, weights, strict=True))

    points = np.pi * np.random.default_rng(0).random((40, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((points,)).batch(8).repeat(3)
    run_steps(strategy, step, data)


class LibraryLoop(SecondDerivatives):
  """DeepXDE: its `Model.train`, with a step that runs on all models."""

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    dde = _library("deepxde")
    dde.config.set_random_seed(0)
    interval = dde.geometry.Interval(0.0, np.pi)

    def equation(x: Any, u: Any) -> Any:
      return dde.grad.hessian(u, x) + tf.sin(x)

    def is_border(x: Any, on_border: Any) -> Any:
      return on_border

    border = dde.icbc.DirichletBC(interval, lambda x: 0.0, is_border)
    data = dde.data.PDE(
      interval, equation, border, 16, 2, train_distribution="uniform"
    )
    training = dde.Model(data, model)
    with strategy.scope():
      training.compile(wrap(adam()), verbose=0)
    step = training.train_step
    training.train_step = tf.function(
      lambda *batch: strategy.run(step, batch), autograph=False
    )
    training.train(iterations=10, verbose=0)


class SonnetModule(Program):
  """Sonnet: a recurrent network, in a loop of your own."""

  def build(self) -> Any:
    snt = _library("sonnet")

    class Network(snt.Module):
      def __init__(self) -> None:
        super().__init__()
        self.core, self.last = snt.LSTM(4), snt.nets.MLP([6, 1])
        self(tf.zeros([1, 1, 3]))

      def __call__(self, x: Any) -> Any:
        start = self.core.initial_state(tf.shape(x)[1])
        y, _ = snt.dynamic_unroll(self.core, x, start)
        return self.last(y[-1])

      @property
      def weights(self) -> Any:
        return self.variables

    return Network()

  def initialize(self, model: Any, strategy: Strategy) -> None:
    values = []
    for seed in SEEDS:
      keras.utils.set_random_seed(seed)
      values.append(self.build().variables)
    for variable, *starts in zip(model.variables, *values, strict=True):
      strategy.run(variable.assign, (per_model(tf.stack(starts)),))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    with strategy.scope():
      optimizer = wrap(_momentum(0.05))
    weights: Sequence[Any] = model.trainable_variables

    def step(x: Any, y: Any) -> None:
      with tf.GradientTape() as tape:
        outputs = model(tf.transpose(x, [1, 0, 2]))
        loss = tf.reduce_mean(tf.square(outputs - y))
      grads = tape.gradient(loss, weights)
      optimizer.apply_gradients(zip(grads, weights, strict=True))

    x = normal(40, 5, 3)
    arrays = x, np.sin(x.sum(axis=1))[:, :1]
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(8).repeat(3)
    run_steps(strategy, step, data)


class MixtureDensity(Program):
  """TensorFlow Probability: the likelihood of a mixture of two normals."""

  options = IN_FIT

  def build(self) -> Any:
    return dense(2, 8, 6)

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    tfd = _library("tensorflow_probability").distributions

    def loss(y: Any, outputs: Any) -> Any:
      logits, means, scales = tf.split(outputs, 3, axis=-1)
      parts = tfd.Normal(means, 0.1 + tf.nn.softplus(scales))
      mixture = tfd.MixtureSameFamily(tfd.Categorical(logits), parts)
      return -mixture.log_prob(y[:, 0])

    with strategy.scope():
      model.compile(wrap(_momentum(0.02)), loss)
    x = normal(40, 2)
    _fit(model, x, np.sign(x[:, :1]) * x[:, 1:] ** 2)


class Variational(Program):
  """TensorFlow Probability: variational inference of a regression."""

  def build(self) -> Any:
    return Networks(mean=dense(3, 1), deviation=dense(3, 1))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> None:
    tfp = _library("tensorflow_probability")
    tfd = tfp.distributions
    with strategy.scope():
      optimizer = wrap(adam(0.05))
    kernels = [model.mean.weights[0], model.deviation.weights[0]]

    def step(x: Any, y: Any) -> None:
      def log_prob(kernel: Any) -> Any:
        prior = tfd.Normal(0.0, 1.0).log_prob(kernel)
        data = tfd.Normal(x @ kernel, 0.1).log_prob(y)
        return tf.reduce_sum(prior, [-2, -1]) + tf.reduce_sum(data, [-2, -1])

      seed = tf.cast(model.random.next(), "int32")
      with tf.GradientTape() as tape:
        mean, deviation = (tf.convert_to_tensor(k) for k in kernels)
        distribution = tfd.Normal(mean, tf.nn.softplus(deviation))
        loss = tfp.vi.monte_carlo_variational_loss(
          log_prob, tfd.Independent(distribution, 2), sample_size=5, seed=seed
        )
      grads = tape.gradient(loss, kernels)
      optimizer.apply_gradients(zip(grads, kernels, strict=True))

    x = normal(40, 3)
    arrays = x, x[:, :1] - x[:, 1:2]
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(20).repeat(5)
    run_steps(strategy, step, data)


class MarkovChain(Program):
  """TensorFlow Probability: Hamiltonian Monte Carlo; each model is a chain."""

  def build(self) -> Any:
    return Networks(position=dense(3, 1))

  def train(self, model: Any, strategy: Strategy, wrap: Wrap) -> Any:
    tfp = _library("tensorflow_probability")
    with strategy.scope():
      samples = tf.Variable(tf.zeros([20, 3, 1]))
      accepted = tf.Variable(0.0)

    def log_prob(x: Any) -> Any:
      return -0.5 * tf.reduce_sum(tf.square(x) * [[1.0], [4.0], [9.0]])

    def step() -> None:
      kernel = tfp.mcmc.HamiltonianMonteCarlo(log_prob, 0.5, 4)
      states, is_accepted = tfp.mcmc.sample_chain(
        20,
        tf.convert_to_tensor(model.position.weights[0]),
        kernel=kernel,
        trace_fn=lambda _, results: results.is_accepted,
        seed=tf.cast(model.random.next(), "int32"),
      )
      samples.assign(states)
      accepted.assign(tf.reduce_mean(tf.cast(is_accepted, "float32")))

    tf.function(lambda: strategy.run(step), autograph=False)()
    return [samples, accepted]


MODELS = [
  HubEncoder(0.1),
  HubDecoder(0.1),
  CrossNetwork(),
  SecondDerivatives(),
  LibraryLoop(),
  SonnetModule(),
  MixtureDensity(),
  Variational(),
  MarkovChain(),
]
REPLICAS = [
  HubEncoder(0.0),
  HubDecoder(0.0),
  CrossNetwork(),
  SecondDerivatives(),
  SonnetModule(),
  MixtureDensity(),
]


def _name(program: Program) -> str:
  return type(program).__name__


@pytest.mark.parametrize("program", MODELS, ids=_name)
def test_models(program: Program) -> None:
  any_strategy.check_models(program)


@pytest.mark.parametrize("program", REPLICAS, ids=_name)
def test_replicas(program: Program) -> None:
  any_strategy.check_replicas(program)


def test_sonnet_refuses_the_strategy() -> None:
  """Sonnet's optimizers run under Sonnet's strategies only: use Keras'."""
  snt = _library("sonnet")
  strategy = VectorizedStrategy(2)
  with strategy.scope():
    weight = tf.Variable(1.0)
  optimizer = snt.optimizers.Adam(0.1)
  with pytest.raises(ValueError, match="not compatible with `Vectorized"):
    strategy.run(lambda: optimizer.apply([tf.ones([])], [weight]))
