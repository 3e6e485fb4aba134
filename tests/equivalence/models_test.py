"""n models of VectorizedStrategy against n separate fits of plain Keras."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import (
  CrossShardOptimizer,
  Models,
  VectorizedStrategy,
  per_model,
  schedules,
)

keras = tf.keras
RATES = [0.1, 0.03, 0.01]
N = len(RATES)


def _data() -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(0)
  x = rng.normal(size=(40, 6)).astype("float32")
  return x, (rng.uniform(size=(40, 3)) > 0.5).astype("float32")


def _network(outputs: int = 1) -> Any:
  keras.utils.set_random_seed(1)
  x = keras.Input((6,))
  y = keras.layers.Dense(8, "tanh", kernel_regularizer="l2")(x)
  y = keras.layers.BatchNormalization(synchronized=True)(y)
  y = keras.layers.Dropout(0.2, seed=3)(y)
  last = [keras.layers.Dense(3, "sigmoid")(y) for _ in range(outputs)]
  return keras.Model(x, last if outputs > 1 else last[0])


class OwnLoss(keras.Model):
  """Computes its loss itself, and a layer adds another loss."""

  def __init__(self) -> None:
    super().__init__()
    self.hidden = keras.layers.Dense(4, activity_regularizer="l2")
    self.last = keras.layers.Dense(3, "sigmoid")

  def call(self, x: Any) -> Any:
    return self.last(self.hidden(x))

  def compute_loss(
    self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any
  ) -> Any:
    return tf.reduce_sum((y - y_pred) ** 2) + sum(self.losses)


def _own_loss() -> Any:
  keras.utils.set_random_seed(1)
  model = OwnLoss()
  model(np.zeros([1, 6], "float32"))
  return model


def _fit(model: Any) -> None:
  x, y = _data()
  outputs = len(getattr(model, "outputs", None) or [y])
  targets = (y,) * outputs if outputs > 1 else y
  data = tf.data.Dataset.from_tensor_slices((x, targets))
  # Batches of 16, 16 and 8.
  model.fit(data.batch(16), epochs=2, verbose=0)


def _assert_equal_to_fits(
  make: Callable[[], Any],
  optimizer: Callable[[Any], Any],
  wrap: Callable[[Any], Any] = lambda opt: opt,
  rtol: float = 1e-5,
  loss: Any = "mse",
) -> None:
  strategy = VectorizedStrategy(N)
  assert strategy.num_replicas_in_sync == 1
  with strategy.scope():
    model = make()
    model.compile(wrap(optimizer(schedules.PerModel(RATES))), loss)
    _fit(model)
  models = zip(*map(testbed.copies, model.weights), strict=True)
  plain = make()
  plain.compile(optimizer(RATES[0]), loss)
  plain.optimizer.build(plain.trainable_variables)
  state = [*plain.variables, *plain.optimizer.variables]
  start = [np.array(variable) for variable in state]
  for rate, weights in zip(RATES, models, strict=True):
    for variable, value in zip(state, start, strict=True):
      variable.assign(value)
    plain.optimizer.learning_rate = rate
    _fit(plain)
    for own, other in zip(weights, plain.get_weights(), strict=True):
      np.testing.assert_allclose(own, other, rtol=rtol, atol=1e-6)


def _losses() -> list[Any]:
  return [
    "mse",
    keras.losses.MeanSquaredError(reduction="sum"),
    keras.losses.Dice(),
    keras.losses.Tversky(),
    lambda y, p: tf.reduce_mean((y - p) ** 2),
  ]


WRAPPERS: dict[str, Callable[[Any], Any]] = {
  "plain": lambda opt: opt,
  "wrapped": CrossShardOptimizer,
  "replica": lambda o: CrossShardOptimizer(o, loss_averaged_over="replica"),
  "gradients": lambda o: CrossShardOptimizer(o, "sum", scale_gradients=True),
}


class TestLosses:
  @pytest.mark.parametrize("wrapper", ["plain", "wrapped"])
  def test_of_compile(self, wrapper: str) -> None:
    """Each output has its own loss."""
    losses = _losses()
    make = functools.partial(_network, len(losses))
    _assert_equal_to_fits(
      make, keras.optimizers.SGD, WRAPPERS[wrapper], loss=losses
    )

  @pytest.mark.parametrize("wrapper", WRAPPERS)
  def test_of_the_model(self, wrapper: str) -> None:
    _assert_equal_to_fits(_own_loss, keras.optimizers.SGD, WRAPPERS[wrapper])

  @pytest.mark.parametrize("averaged_over", ["replica", "global", None])
  def test_of_a_loop_of_your_own(self, averaged_over: Any) -> None:
    """Keras' loss objects, compute_average_loss and a plain mean agree."""
    x, y = _data()
    strategy = VectorizedStrategy(2)
    with strategy.scope():
      weight = tf.Variable(np.ones([6, 3], "float32"))
      optimizer = CrossShardOptimizer(
        keras.optimizers.SGD(schedules.PerModel([1.0, 0.5])),
        loss_averaged_over=averaged_over,
      )

    def mean(pred: Any) -> Any:
      return tf.reduce_mean((y - pred) ** 2)

    def by_keras(pred: Any) -> Any:
      return keras.losses.MeanSquaredError()(y, pred)

    def average(pred: Any) -> Any:
      each = tf.reduce_mean((y - pred) ** 2, axis=1)
      return tf.nn.compute_average_loss(each)

    for loss in (mean, by_keras, average):
      weight.assign(np.ones([6, 3], "float32"))

      def step(loss: Any = loss) -> None:
        optimizer.minimize(lambda: loss(x @ weight), var_list=[weight])

      tf.function(lambda step=step: strategy.run(step))()
      with tf.GradientTape() as tape:
        start = tf.Variable(np.ones([6, 3], "float32"))
        value = mean(x @ start)
      grad = tape.gradient(value, start).numpy()
      for rate, own in zip([1.0, 0.5], testbed.copies(weight), strict=True):
        np.testing.assert_allclose(own, 1.0 - rate * grad, rtol=1e-5)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
  "Adam": lambda rate: keras.optimizers.Adam(rate, epsilon=1e-3),
  "AdamW with accumulation and averages": lambda rate: keras.optimizers.AdamW(
    rate, 0.1, epsilon=1e-3, use_ema=True, gradient_accumulation_steps=2
  ),
  "momentum and a norm": lambda rate: keras.optimizers.SGD(
    rate, momentum=0.9, global_clipnorm=0.1
  ),
  "Lion": lambda rate: keras.optimizers.Lion(rate),
}


@pytest.mark.parametrize(
  ("name", "wrapper"),
  [(name, ["plain", "wrapped"][i % 2]) for i, name in enumerate(OPTIMIZERS)],
)
def test_optimizers(name: str, wrapper: str) -> None:
  make, wrap = OPTIMIZERS[name], WRAPPERS[wrapper]
  _assert_equal_to_fits(_network, make, wrap, rtol=1e-4)


class TestOwnData:
  """Each model receives what `per_model` marks for it."""

  def test_weights_of_folds(self) -> None:
    x, y = _data()
    weights = np.random.default_rng(1).poisson(1, (40, N)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(16)
    with VectorizedStrategy(N).scope():
      model = _network()
      model.compile(keras.optimizers.SGD(0.1), "mse")
    own = data.map(lambda x, y, w: (x, y, per_model(tf.transpose(w))))
    model.fit(own, epochs=2, verbose=0)
    models = zip(*map(testbed.copies, model.weights), strict=True)
    for i, copies in enumerate(models):
      plain = _network()
      plain.compile(keras.optimizers.SGD(0.1), "mse")
      one = data.map(lambda x, y, w, i=i: (x, y, w[:, i]))
      plain.fit(one, epochs=2, verbose=0)
      for a, b in zip(copies, plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

  def test_whole_batches(self) -> None:
    x = np.arange(12.0, dtype="float32").reshape(3, 2, 2)
    data = tf.data.Dataset.from_tensors(x).map(
      lambda x: (per_model(x), per_model(x[..., :1]))
    )
    strategy = VectorizedStrategy(3)
    [pair] = strategy.experimental_distribute_dataset(data)
    result = strategy.run(lambda x, y: tf.reduce_sum(x) + y[0, 0], pair)
    assert testbed.per_replica_results(strategy, result) == [6.0, 26.0, 46.0]

  @pytest.mark.tf_keras_mode
  @pytest.mark.parametrize("wrapper", ["plain", "wrapped"])
  def test_own_batches_of_train_on_batch(self, wrapper: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 8, 4)).astype("float32")
    y = x[..., :1]

    def compiled() -> Any:
      dense = keras.layers.Dense(1, kernel_initializer="ones")
      model = keras.Sequential([keras.Input((4,)), dense])
      sgd = keras.optimizers.SGD(0.1)
      is_own = wrapper == "plain" or not tf.distribute.has_strategy()
      model.compile(sgd if is_own else CrossShardOptimizer(sgd), "mse")
      return model

    with VectorizedStrategy(2).scope():
      model = compiled()
    for _ in range(3):
      model.train_on_batch(per_model(x), per_model(y))
    losses, predictions = [], []
    for i in range(2):
      plain = compiled()
      for _ in range(3):
        plain.train_on_batch(x[i], y[i])
      for v, w in zip(model.weights, plain.get_weights(), strict=True):
        np.testing.assert_allclose(testbed.copies(v)[i], w, atol=1e-6)
      losses.append(plain.test_on_batch(x[i], y[i]))
      predictions.append(plain.predict_on_batch(x[i]))
    loss = model.test_on_batch(per_model(x), per_model(y))
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    predicted = model.predict_on_batch(per_model(x))
    np.testing.assert_allclose(predicted, np.concatenate(predictions), 1e-5)

  def test_arrays_of_fit_are_those_of_all_models(self) -> None:
    x = np.ones([4, 3], "float32")
    with VectorizedStrategy(2).scope():
      model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      model.compile("sgd", "mse", weighted_metrics=[])
    words = r"dataset_per_model"
    for y in (x[:, :1], x[:, 0]):
      for batch_size in (2, 4):
        with pytest.raises(ValueError, match=words):
          model.fit(x, y, batch_size, verbose=0, sample_weight=np.ones([4, 2]))
    own = per_model(np.ones([2, 4, 3], "float32"))
    for data in ((own, x[:, :1]), (x, per_model(np.ones([2, 4, 1])))):
      with pytest.raises(ValueError, match=words):
        model.fit(*data, verbose=0)
    model.fit(x, x[:, :1], sample_weight=np.ones([4, 1]), verbose=0)

  def test_another_number_of_rows(self) -> None:
    data = tf.data.Dataset.from_tensors(tf.zeros([2, 4])).map(per_model)
    strategy = VectorizedStrategy(3)
    with pytest.raises(ValueError, match=r"of 2 models, but .* has 3\."):
      strategy.experimental_distribute_dataset(data)
    with pytest.raises(ValueError, match=r"for 2 replicas, .* has 3"):
      strategy.run(lambda x: x, (per_model(tf.zeros([2, 4])),))
    unknown = tf.data.Dataset.from_tensors(tf.zeros([4, 2])).batch(1)
    with pytest.raises(ValueError, match=r"`values` .* known number of rows"):
      unknown.map(per_model)
    for change in (data.batch, data.padded_batch, data.window):
      with pytest.raises(ValueError, match=r"per_model .* after `batch`"):
        change(2)
    with pytest.raises(ValueError, match=r"per_model .* after `batch`"):
      data.unbatch()

  @pytest.mark.parametrize("kind", ["sparse", "ragged"])
  def test_composite_tensors_go_to_every_model(self, kind: str) -> None:
    dense = (np.arange(24).reshape(8, 3) % 3 == 0).astype("float32")
    x = {
      "sparse": lambda: tf.sparse.from_dense(dense),
      "ragged": lambda: tf.RaggedTensor.from_tensor(dense, padding=0.0),
    }[kind]()
    data = tf.data.Dataset.from_tensor_slices(x).batch(4)
    to_dense = {
      "sparse": tf.sparse.to_dense,
      "ragged": lambda x: x.to_tensor(shape=[None, 3]),
    }[kind]
    strategy = VectorizedStrategy(2)
    with strategy.scope():
      total = tf.Variable(tf.zeros([3]))
    number = testbed.per_replica(strategy, [1.0, 2.0])
    for batch in strategy.experimental_distribute_dataset(data):
      strategy.run(
        lambda x, i: total.assign_add(tf.reduce_sum(to_dense(x), 0) * i),
        (batch, number),
      )
    want = tf.reduce_sum(to_dense(x), axis=0).numpy()
    first, second = testbed.copies(total)
    np.testing.assert_array_equal(first, want)
    np.testing.assert_array_equal(second, 2 * want)


class TestWhatTheHostReads:
  def test_counts_are_those_of_one_model(self) -> None:
    def history(scope: Any) -> Any:
      with scope:
        model = keras.Sequential(
          [
            keras.Input((4,)),
            keras.layers.Dense(1, "sigmoid", kernel_initializer="ones"),
          ]
        )
        count = keras.metrics.TruePositives(name="count")
        model.compile("sgd", "mse", metrics=[count])
      x, y = np.ones([8, 4]), np.ones([8, 1])
      both = model.fit(x, y, validation_data=(x[:3], y[:3]), verbose=0).history
      return both["count"], both["val_count"], both["val_loss"]

    got = history(VectorizedStrategy(3).scope())
    assert got == history(contextlib.nullcontext())
    assert got[:2] == ([8.0], [3.0])

  def test_of_metrics_the_mean_of_weights_the_first(self) -> None:
    strategy = VectorizedStrategy(3)
    with strategy.scope():
      weight = tf.Variable(0.0)
      counter = tf.Variable(
        0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
      )
    numbers = testbed.per_replica(strategy, [1, 2, 6])
    strategy.run(
      lambda i: (weight.assign(tf.cast(i, "float32")), counter.assign_add(i)),
      (numbers,),
    )
    assert (float(weight.numpy()), int(counter.numpy())) == (1.0, 3)
    counter.assign(5)
    assert testbed.copies(counter) == [5, 5, 5]

  def test_copies_are_tensors(self) -> None:
    strategy = VectorizedStrategy(2)
    with strategy.scope():
      variable = tf.Variable([1.0, 2.0])
    strategy.run(
      lambda: variable.assign_add(
        [0.0, tf.cast(testbed.replica_id(), "float32")]
      )
    )
    copies = strategy.experimental_local_results(variable)
    assert all(isinstance(copy, tf.Tensor) for copy in copies)
    assert [copy.numpy().tolist() for copy in copies] == [
      [1.0, 2.0],
      [1.0, 3.0],
    ]

  def test_reduce_and_gather_are_over_the_models(self) -> None:
    strategy = VectorizedStrategy(3)
    numbers = testbed.per_replica(
      strategy, [[1.0, 2.0], [3.0, 4.0], [8.0, 9.0]]
    )
    values = strategy.run(lambda x: x * 1.0, (numbers,))
    assert strategy.reduce("SUM", values, None).numpy().tolist() == [12.0, 15.0]
    assert strategy.reduce("MEAN", values, axis=0).numpy() == 4.5
    assert strategy.gather(values, axis=0).shape == [6]

  def test_a_collective_returns_its_input(self) -> None:
    strategy = VectorizedStrategy(2)

    def step(x: Any) -> Any:
      context = tf.distribute.get_replica_context()
      total = context.all_reduce("SUM", x)
      gathered = context.all_gather(tf.reshape(x, [1]), axis=0)
      merged = context.merge_call(
        lambda strategy, x: strategy.reduce("MEAN", x, axis=None), (x,)
      )
      return tf.stack([total, gathered[0], merged])

    numbers = testbed.per_replica(strategy, [1.0, 2.0])
    result = strategy.run(step, (numbers,))
    got = testbed.per_replica_results(strategy, result)
    assert got == [[1.0] * 3, [2.0] * 3]


class TestMistakes:
  def test_groups_of_several_models(self) -> None:
    with (
      VectorizedStrategy(4).scope(),
      pytest.raises(ValueError, match=r"groups of one .* VirtualTPUStrategy"),
    ):
      CrossShardOptimizer("sgd", group_assignment=[[0, 1], [2, 3]])

  def test_compile_outside_of_the_scope(self) -> None:
    """Metrics of `compile` are created inside, and so those of one model."""
    with VectorizedStrategy(3).scope():
      model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, "sigmoid")]
      )
    model.compile(loss="mse", metrics=["mae"])
    x = np.ones([8, 4])
    got = model.evaluate(x, np.zeros([8, 1]), verbose=0)
    plain = Models(model)[0]
    plain.compile(loss="mse", metrics=["mae"])
    want = plain.evaluate(x, np.zeros([8, 1]), verbose=0)
    np.testing.assert_allclose(got, want, rtol=1e-6)

  def test_variables_from_outside_of_the_scope(self) -> None:
    """What all models add alike is added once: a counter of steps is right."""
    counter, strategy = tf.Variable(0.0), VectorizedStrategy(3)
    strategy.run(lambda: counter.assign_add(2.0))
    assert float(counter.numpy()) == 2.0
    numbers = testbed.per_replica(strategy, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"different values (.|\n)*scope\(\)"):
      strategy.run(counter.assign_add, (numbers,))
    assert float(counter.numpy()) == 2.0

  def test_metrics_from_outside_of_the_scope(self) -> None:
    metric = keras.metrics.MeanSquaredError()
    with VectorizedStrategy(2).scope():
      model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
      model.compile("sgd", "mse", metrics=[metric])
    with pytest.raises(ValueError, match=r"metrics and optimizers for compile"):
      model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)

  def test_export(self, tmp_path: Any) -> None:
    with VectorizedStrategy(2).scope():
      model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"one value .* 2 copies.*Models\(mod"):
      tf.saved_model.save(model, str(tmp_path / "model"))

  def test_equal_models_are_told_why(self, said: list[str]) -> None:
    with VectorizedStrategy(2).scope():
      model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
      model.compile(CrossShardOptimizer("sgd"), "mse")
    model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)
    [line] = said
    assert "began alike" in line
    assert "Models.initialize" in line
    assert "per_model" in line
    said.clear()
    model.set_weights([np.full(w.shape, np.nan) for w in model.get_weights()])
    model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)
    assert said == []


class TestOneValueForModelsThatDiffer:
  """What keeps or sets one value says so, with a plain optimizer, too."""

  @pytest.mark.parametrize("wrapper", ["plain", "wrapped"])
  @pytest.mark.parametrize(
    "way", ["EarlyStopping", "set_weights", "load_weights", "restore"]
  )
  def test_sets(
    self, way: str, wrapper: str, said: list[str], tmp_path: Any
  ) -> None:
    model = _differing(wrapper)
    checkpoint = tf.train.Checkpoint(model=model)
    path = str(tmp_path / "x.weights.h5")
    model.evaluate(*_line(), verbose=0)  # tf_keras creates metrics.
    model.save_weights(path)
    saved = checkpoint.write(str(tmp_path / "saved"))
    assert said == []  # The models are equal.
    stop = keras.callbacks.EarlyStopping(
      "loss", mode="max", patience=1, restore_best_weights=True
    )
    acts = {
      "set_weights": lambda: model.set_weights(model.get_weights()),
      "load_weights": lambda: model.load_weights(path),
      "restore": lambda: checkpoint.restore(saved).expect_partial(),
    }
    for _ in range(2):
      calls = [stop] if way == "EarlyStopping" else []
      model.fit(*_line(), epochs=3, verbose=0, callbacks=calls)
      acts.get(way, lambda: None)()
    kernels = testbed.copies(model.weights[0])
    np.testing.assert_array_equal(kernels[0], kernels[1])
    [line] = [line for line in said if "the same weights" in line]
    assert line.startswith(way)
    assert "Models(model).set_weights" in line
    assert not [line for line in said if "began alike" in line]

  @pytest.mark.parametrize("wrapper", ["plain", "wrapped"])
  def test_keeps(self, wrapper: str, said: list[str], tmp_path: Any) -> None:
    model = _differing(wrapper)
    model.fit(*_line(), verbose=0)
    assert said == []
    acts: dict[str, Callable[[], Any]] = {
      "get_weights": model.get_weights,
      "save_weights": lambda: model.save_weights(
        str(tmp_path / "x.weights.h5")
      ),
      "save": lambda: model.save(str(tmp_path / "x.keras")),
      "write": lambda: tf.train.Checkpoint(model=model).write(
        str(tmp_path / "x")
      ),
    }
    for name, act in acts.items():
      act()
      act()
      [line] = said
      assert line.startswith(f"{name} reads the values of model 0 only")
      assert "Models(model).save" in line
      said.clear()

  def test_what_keeps_each_models_own(
    self, said: list[str], tmp_path: Any
  ) -> None:
    model = _differing("plain")
    models = Models(model)
    for _ in range(2):
      model.fit(*_line(), validation_data=_line(), verbose=0)
      model.evaluate(*_line(), verbose=0)
      models.save(tmp_path / "models")
      models.restore(tmp_path / "models")
      models.set_weights(1, models[0])
      models.values(model.weights[0])
      models.predict(_line()[0])
      models.average()
      model.optimizer.iterations.assign(0)
    assert said == []


def _line() -> tuple[np.ndarray, np.ndarray]:
  x = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
  return x, x[:, :1]


def _differing(wrapper: str) -> Any:
  """Returns two compiled models with learning rates of their own."""
  with VectorizedStrategy(2).scope():
    model = keras.Sequential(
      [
        keras.Input((3,)),
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
      ]
    )
    sgd = keras.optimizers.SGD(schedules.PerModel([0.1, 0.01]), momentum=0.5)
    wrapped = CrossShardOptimizer(sgd) if wrapper == "wrapped" else sgd
    model.compile(wrapped, "mse", metrics=["mae"])
  return model
