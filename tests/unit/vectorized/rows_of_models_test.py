"""What each model sees of a dataset_per_model, and what it learns from it."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import VectorizedStrategy, dataset_per_model, per_model

N = 3
layers = tf.keras.layers


def _data() -> tuple[Any, Any]:
  """Float64 data, which `fit` casts; every third example is far away."""
  x = np.random.default_rng(0).normal(size=(34, 2))
  x[::N] += 10.0
  return x, x[:, :1] * x[:, 1:]


def _model(eagerly: bool = True) -> Any:
  tf.keras.utils.set_random_seed(0)
  model = tf.keras.Sequential(
    [
      tf.keras.Input((2,)),
      layers.BatchNormalization(momentum=0.5),
      layers.Dense(1),
    ]
  )
  sgd = tf.keras.optimizers.SGD(0.1)
  model.compile(sgd, "mse", run_eagerly=eagerly)
  return model


def _fit_models(data: tf.data.Dataset, **options: Any) -> tuple[list[Any], Any]:
  """Returns the weights of each model, and the history."""
  with VectorizedStrategy(N).scope():
    model = _model(eagerly=False)
  history = model.fit(data, epochs=2, verbose=0, **options).history
  copies = zip(*map(testbed.copies, model.weights), strict=True)
  return [list(weights) for weights in copies], history


def _assert_equal(weights: Any, plain: Any) -> None:
  for own, other in zip(weights, plain.get_weights(), strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def _seen(data: tf.data.Dataset) -> list[Any]:
  """What each model sees in one iteration over a dataset of one array."""
  batches = [[part.numpy() for part in batch.values] for batch in data]
  return [
    np.concatenate(parts).tolist() for parts in zip(*batches, strict=True)
  ]


@pytest.mark.tf_keras_mode
def test_folds_are_separate_fits() -> None:
  """In batch normalization and in validation, too."""
  x, y = _data()
  fold = np.arange(len(x) - 1) % N
  rows = [np.flatnonzero(fold != i) for i in range(N)]
  out = [np.flatnonzero(fold == i) for i in range(N)]
  train, test = (dataset_per_model((x, y), 8, rows=r) for r in (rows, out))
  models, history = _fit_models(train, validation_data=test)
  losses = []
  for weights, own, others in zip(models, rows, out, strict=True):
    plain = _model()
    plain.fit(
      *(x[own], y[own]), batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    _assert_equal(weights, plain)
    losses.append(plain.evaluate(x[others], y[others], verbose=0))
  np.testing.assert_allclose(history["val_loss"][-1], np.mean(losses), 1e-4)


@pytest.mark.tf_keras_mode
def test_own_bootstrap_samples_weights_and_orders_are_separate_fits() -> None:
  x, y = _data()
  rng = np.random.default_rng(1)
  rows = rng.integers(0, len(x), size=(N, 20))
  weights = per_model(rng.uniform(size=(N, len(x))))

  def make() -> tf.data.Dataset:
    return dataset_per_model((x, y, weights), 8, rows=rows, shuffle=5)

  models, _ = _fit_models(make())
  for i, trained in enumerate(models):
    plain = _model()
    alone = make().map(lambda *leaves, i=i: tuple(v.values[i] for v in leaves))
    if not testbed.IS_TF_KERAS:
      next(iter(alone))  # Under a strategy, Keras 3 reads a batch in advance.
    plain.fit(alone, epochs=2, verbose=0)
    _assert_equal(trained, plain)


def test_rows_of_every_array() -> None:
  numbers = np.arange(5)
  data = {
    "text": np.array(list("abcde")),
    "flag": ([False, False, False, True, True],),
    "own": per_model(np.stack([numbers, 10 * numbers])),
  }
  rows = [[4, 0, 0], np.array([1, 2, 3], "uint8")]
  made = dataset_per_model(data, 2, rows=rows)
  assert made.cardinality() == len(list(made)) == 2
  assert _seen(made.map(lambda leaf: leaf["own"])) == [[4, 0, 0], [10, 20, 30]]
  text = [[b"e", b"a", b"a"], [b"b", b"c", b"d"]]
  assert _seen(made.map(lambda leaf: leaf["text"])) == text
  flag = [[True, False, False], [False, False, True]]
  assert _seen(made.map(lambda leaf: leaf["flag"][0])) == flag


def test_batches_without_rows_are_one_tensor_for_all_models() -> None:
  numbers = np.arange(5.0)
  own = per_model(np.stack([numbers, -numbers]))
  made = dataset_per_model((numbers, own), 3)
  assert _seen(made.map(lambda shared, own: shared)) == [[0, 1, 2, 3, 4]] * 2
  assert _seen(made.map(lambda shared, own: own))[1] == [0, -1, -2, -3, -4]
  [shared, own] = next(iter(made))
  assert shared.tensor.shape == [3]
  assert own.tensor.shape == [2, 3]
  assert shared.tensor.dtype == own.tensor.dtype == tf.float32  # As in `fit`.


def test_shuffled_rows() -> None:
  """Other orders in each epoch and model, as the documented formula says."""
  rows = np.stack([np.arange(30), np.arange(30, 60)])
  first, second = (
    dataset_per_model(np.arange(60), 8, rows=rows, shuffle=3) for _ in range(2)
  )
  assert first.cardinality() == 4
  tf.random.set_seed(7)
  epochs = [_seen(first) for _ in range(2)]
  for k, epoch in enumerate(epochs):
    order = np.random.default_rng([3, k]).permuted(rows, axis=1)
    assert epoch == order.tolist()
  assert len(set(np.subtract(*epochs[0]))) > 1
  tf.random.set_seed(8)
  assert _seen(second.repeat(2)) == np.concatenate(epochs, axis=1).tolist()
  own = per_model(np.arange(10).reshape(2, 5))
  [one, two] = _seen(dataset_per_model(own, 8, shuffle=0))
  assert (sorted(one), sorted(two)) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
  assert np.subtract(two, one).tolist() != [5] * 5


def test_longer_rows_are_cut_with_one_warning(
  caplog: pytest.LogCaptureFixture,
) -> None:
  rows = [[0, 1, 2, 3], [4, 3], [2, 1, 0]]
  made = dataset_per_model(np.arange(5), 2, rows=rows)
  assert _seen(made) == [[0, 1], [4, 3], [2, 1]]
  [record] = [r for r in caplog.records if "dataset_per_model" in r.message]
  assert record.levelname == "WARNING"
  assert "sees 2 rows" in record.message
  assert "3 in total are left out" in record.message


X = np.zeros([4, 1])
MISTAKES: dict[str, tuple[Any, Any, str]] = {
  "out of range": (X, [[0], [1, 4]], r"`rows\[1\]\[1\]`.* 0 to 3; got 4"),
  "negative": (X, [[-1], [1]], r"`rows\[0\]\[0\]`.* got -1"),
  "a mask": (X, [X[:, 0] > 0], r"`rows\[0\]` .* integers.* bool.*flatnonzero"),
  "pairs": (
    X,
    (pair for pair in [([0, 1], [2]), ([2, 3], [0])]),
    r"`rows\[0\]` .* tuple of 2 arrays.*train for train, _ in",
  ),
  "empty": (X, [[0], []], r"`rows\[1\]` .* at least one"),
  "one array": (X, [0, 1], r"`rows\[0\]` .* shape \(\).* one list for each"),
  "other examples": ((X, X[1:]), [[0]], r"`data` .* got \[3, 4\]"),
  "a number": (1.0, [[0]], r"`data` .* got \[0\]"),
  "models": (per_model(X[None]), [[0], [1]], r"`rows` .* got \[1, 2\]"),
  "unknown": (X, None, r"got neither\. .* rows=\[range\(examples\)\] \* n"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
  data, rows, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    dataset_per_model(data, 2, rows=rows)


def test_numbers_that_are_wrong() -> None:
  with pytest.raises(ValueError, match=r"`batch_size` .* got 0"):
    dataset_per_model(X, 0, rows=[[0]])
  with pytest.raises(ValueError, match=r"`shuffle` .* got True"):
    dataset_per_model(X, 1, rows=[[0]], shuffle=True)


def test_another_number_of_models() -> None:
  for rows in ([[0], [1]], None):
    data = (X, per_model(np.zeros([2, 4])))
    made = dataset_per_model(data, 2, rows=rows)
    with pytest.raises(ValueError, match=r"of 2 models, but .* has 3\."):
      VectorizedStrategy(3).experimental_distribute_dataset(made)


def test_a_plain_model_does_not_take_them() -> None:
  model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
  model.compile("sgd", "mse")
  data = dataset_per_model((X, X), 2, rows=[[0], [1]])
  with pytest.raises(ValueError, match=r"Create the model inside .*scope"):
    model.fit(data, verbose=0)
