"""PerModelMetrics reads what Keras evaluates of each model of one program."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import callback_cases as cases
from tests.support import testbed
from tf_cross_shard import VectorizedStrategy, callbacks, per_model, schedules

N = 2
RATES = (0.01, 0.1)
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(48, 4)).astype("float32")
Y = np.eye(3, dtype="float32")[_RNG.integers(0, 3, 48)]
WEIGHTS = _RNG.integers(0, 3, (48, N)).astype("float32")  # of each model
VALIDATION, TEST = (X[:20] + 1, Y[:20]), (X[:9] - 1, Y[:9])


class Subclassed(tf.keras.Model):  # type: ignore[misc]
  """A model that Keras cannot clone, with statistics."""

  def __init__(self) -> None:
    super().__init__()
    layers = tf.keras.layers
    self.hidden = layers.Dense(5, "tanh", kernel_regularizer="l2")
    self.normalize = layers.BatchNormalization(momentum=0.5)
    self.last = layers.Dense(3, "softmax")

  def call(self, x: Any, training: bool = False) -> Any:
    return self.last(self.normalize(self.hidden(x), training=training))


def _compiled(rate: Any, **options: Any) -> Any:
  tf.keras.utils.set_random_seed(1)
  model = Subclassed()
  model(X[:1])
  metrics = ["accuracy", tf.keras.metrics.F1Score()]
  adam = tf.keras.optimizers.Adam(rate)
  model.compile(adam, "categorical_crossentropy", metrics=metrics, **options)
  return model


def _plain(rate: float) -> Any:
  return _compiled(rate, run_eagerly=True)


def _models() -> Any:
  with VectorizedStrategy(N).scope():
    return _compiled(schedules.PerModel(RATES))


def _data(model: int | None = None) -> tf.data.Dataset:
  """Returns batches with the weights of one model, or of all models."""
  weights = WEIGHTS if model is None else WEIGHTS[:, model]
  data = tf.data.Dataset.from_tensor_slices((X, Y, weights)).batch(16)
  if model is not None:
    return data
  return data.map(lambda x, y, w: (x, y, _by_model(w)))


def _by_model(rows: Any) -> Any:
  return per_model(tf.ensure_shape(tf.transpose(rows), [N, None]))


@pytest.mark.tf_keras_mode
def test_each_model_is_evaluated_as_by_plain_keras(
  tmp_path: pathlib.Path, said: list[str]
) -> None:
  """`fit` and PerModelMetrics(data) evaluate for later callbacks."""
  model = _models()
  stop = callbacks.PerModelEarlyStopping("val_accuracy", patience=9)
  history = model.fit(
    _data(),
    epochs=3,
    verbose=0,
    validation_data=VALIDATION,
    callbacks=[
      callbacks.PerModelMetrics(),
      callbacks.PerModelMetrics(TEST, name="test"),
      stop,
      callbacks.PerModelCheckpoint(tmp_path / "best", "test_loss"),
      callbacks.PerModelTensorBoard(tmp_path / "curves"),
    ],
  ).history
  for i, rate in enumerate(RATES):
    plain, expected = _plain(rate), {}
    for _ in range(3):
      logs = plain.fit(_data(i), validation_data=VALIDATION, verbose=0).history
      found = plain.evaluate(*TEST, verbose=0, return_dict=True)
      logs |= {f"test_{name}": [value] for name, value in found.items()}
      for name, [value] in logs.items():
        expected.setdefault(name, []).append(value)
    assert len(expected) == 9
    for name, right in expected.items():
      mine = history[f"{name}/model_{i}"]
      assert np.shape(mine) == ((3, 3) if "f1" in name else (3,))
      np.testing.assert_allclose(mine, right, rtol=2e-6, atol=2e-7)
    assert stop.best[i] == max(history[f"val_accuracy/model_{i}"])
    folder = tmp_path / "curves" / f"lr={rate:g}"
    curves = cases.curves(folder)
    vectors = history[f"val_f1_score/model_{i}"]
    for j in range(3):
      assert curves[f"val_f1_score_{j}"] == [v[j] for v in vectors]
  losses = [history[f"val_loss/model_{i}"][-1] for i in range(N)]
  assert np.ptp(losses) > 1e-3
  np.testing.assert_allclose(history["val_loss"][-1], np.mean(losses), 1e-6)
  assert not said


@pytest.mark.tf_keras_mode
def test_ensemble_is_the_mean_prediction() -> None:
  """Its loss has the mean of the regularizers of all models."""
  model = _models()
  data = tf.data.Dataset.from_tensor_slices(TEST).batch(4)
  history = model.fit(
    _data(),
    verbose=0,
    callbacks=[
      callbacks.PerModelMetrics(data),
      callbacks.PerModelMetrics(TEST, ensemble=False, name="alone"),
    ],
  ).history
  is_trained = [variable.trainable for variable in model.weights]
  outputs, penalties = [], []
  for own in zip(*map(testbed.copies, model.weights), strict=True):
    trained = [v for v, is_on in zip(own, is_trained, strict=True) if is_on]
    mean, variance = (
      v for v, is_on in zip(own, is_trained, strict=True) if not is_on
    )
    kernel, bias, gamma, beta, last, last_bias = trained
    hidden = np.tanh(TEST[0] @ kernel + bias)
    hidden = (hidden - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    logits = np.exp(hidden @ last + last_bias)
    outputs.append(logits / logits.sum(1, keepdims=True))
    penalties.append(0.01 * np.sum(kernel**2))
  mean_output = np.mean(outputs, axis=0)
  loss = -np.mean(np.log(np.sum(mean_output * TEST[1], axis=1)))
  np.testing.assert_allclose(
    history["val_loss/ensemble"], loss + np.mean(penalties), rtol=1e-5
  )
  accuracy = np.mean(mean_output.argmax(1) == TEST[1].argmax(1))
  assert history["val_accuracy/ensemble"] == [pytest.approx(accuracy)]
  assert not any(n.startswith("alone") and "ensemble" in n for n in history)


@pytest.mark.slow
def test_each_model_may_have_its_own_validation_data() -> None:
  """There is no ensemble of models that see different data."""
  model = _models()
  weights = WEIGHTS[: len(VALIDATION[0])]
  data = tf.data.Dataset.from_tensor_slices((*VALIDATION, weights)).batch(8)
  own = data.map(lambda x, y, w: (x, y, _by_model(w)))
  metrics = callbacks.PerModelMetrics(own)
  history = model.fit(_data(), verbose=0, callbacks=[metrics]).history
  assert "val_loss/ensemble" not in history
  for i, rate in enumerate(RATES):
    plain = _plain(rate)
    plain.fit(_data(i), verbose=0)
    each = data.map(lambda x, y, w, i=i: (x, y, w[:, i]))
    right = plain.evaluate(each, verbose=0, return_dict=True)["loss"]
    [mine] = history[f"val_loss/model_{i}"]
    assert mine == pytest.approx(right, rel=2e-6)


def test_stateful_layers() -> None:
  """Evaluating by the callback leaves the states of training unchanged."""
  x = _RNG.normal(size=(8, 4, 2)).astype("float32")
  data = tf.data.Dataset.from_tensor_slices((x, x[:, 0])).batch(4)

  def compiled(rate: Any, **options: Any) -> Any:
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.Input(batch_shape=(4, 4, 2))]
    layers += [tf.keras.layers.SimpleRNN(2, stateful=True, unroll=True)]
    model = tf.keras.Sequential(layers)
    model.compile(tf.keras.optimizers.SGD(rate), "mse", **options)
    return model

  with VectorizedStrategy(N).scope():
    model = compiled(schedules.PerModel(RATES))
  metrics = callbacks.PerModelMetrics(data)
  options = {"epochs": 2, "verbose": 0}
  history = model.fit(data, callbacks=[metrics], **options).history
  for i, rate in enumerate(RATES):
    plain = compiled(rate, run_eagerly=True)
    [state] = plain.layers[-1].states
    right = []
    for _ in range(2):
      plain.fit(data, verbose=0)
      before = state.numpy()
      right.append(plain.evaluate(data, verbose=0))
      assert (state.numpy() != before).any()
      state.assign(before)
    np.testing.assert_allclose(history[f"val_loss/model_{i}"], right, rtol=2e-6)
    [mine] = model.layers[-1].states
    np.testing.assert_allclose(
      testbed.values(mine)[i], before, rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_data_without_end_need_a_number_of_steps() -> None:
  data = tf.data.Dataset.from_tensor_slices(VALIDATION).batch(5)
  with pytest.raises(ValueError, match=r"`steps` must be given .*without end"):
    callbacks.PerModelMetrics(data.repeat())
  metrics = [
    callbacks.PerModelMetrics(data.repeat(), steps=2),
    callbacks.PerModelMetrics(tuple(a[:10] for a in VALIDATION), name="test"),
  ]
  history = _models().fit(_data(), verbose=0, callbacks=metrics).history
  for name in ("loss/model_0", "loss/model_1", "loss/ensemble"):
    [mine], [right] = history[f"val_{name}"], history[f"test_{name}"]
    assert mine == pytest.approx(right, rel=1e-6)


@pytest.mark.tf_keras_mode
def test_monitors_of_vectors_and_of_a_fit_without_validation() -> None:
  model = _models()
  judge = callbacks.PerModelMetrics(VALIDATION)
  vector = callbacks.PerModelEarlyStopping("val_f1_score")
  with pytest.raises(ValueError, match=r"'val_f1_score', of shape \[3\]"):
    model.fit(_data(), callbacks=[judge, vector], verbose=0)
  model = _models()
  used = [callbacks.PerModelEarlyStopping()]
  words = r"Stopping has monitor='val_loss', .* no validation_data\. Pass"
  with pytest.raises(ValueError, match=words):
    model.fit(_data(), verbose=0, callbacks=used)
  assert int(model.optimizer.iterations.numpy()) == 0
  # Not each epoch has a validation.
  options = {"validation_data": VALIDATION, "validation_freq": 2}
  model.fit(_data(), epochs=2, verbose=0, callbacks=used, **options)
  assert all(np.isfinite(used[0].best))


def test_arguments_that_do_not_fit_the_strategy(said: list[str]) -> None:
  with pytest.raises(ValueError, match=r"`validation_data` must be given"):
    cases.fit(cases.grouped(), callbacks.PerModelMetrics())
  model = _models()
  for metrics, words in (
    (callbacks.PerModelMetrics(TEST, twin=Subclassed), "`twin` must be None"),
    (
      callbacks.PerModelMetrics(tuple(a[:, :2] for a in TEST)),
      "dimension|shape",
    ),
  ):
    with pytest.raises(Exception, match=words):
      model.fit(_data(), verbose=0, callbacks=[metrics])
    assert int(model.optimizer.iterations.numpy()) == 0
  history = model.fit(
    _data(), verbose=0, callbacks=[callbacks.PerModelMetrics()]
  ).history
  assert "loss/model_0" in history
  assert not said
