"""The `train_step` of docs/fit.md trains as Keras' own does."""

from typing import Any

import keras
import numpy as np
import pytest

from tests.support import pages, testbed
from tf_cross_shard.keras3 import CrossShardOptimizer

pytestmark = pytest.mark.slow

PAIRS = [[0, 1], [2, 3]]


def _class_of_the_page() -> Any:
  """The model class that the page shows."""
  names: dict[str, Any] = {"__name__": "page"}
  exec(pages.blocks("docs/fit.md", "python")[0], names)
  return names["CompiledGradients"]


def _train(kind: Any, policy: str, **settings: Any) -> tuple[Any, Any]:
  """Trains a model of a class; its losses and each replica's variables."""
  strategy = testbed.mirrored()
  keras.utils.set_random_seed(3)
  with strategy.scope():
    inputs = keras.Input((4,))
    outputs = inputs
    for layer in (
      keras.layers.Dense(8, "tanh", dtype=policy),
      keras.layers.BatchNormalization(dtype=policy),
      keras.layers.ActivityRegularization(0.01),
      keras.layers.Dense(1),
    ):
      outputs = layer(outputs)
    model = kind(inputs, outputs)
    optimizer: Any = keras.optimizers.SGD(0.05, momentum=0.5)
    if policy == "mixed_float16":
      optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 64.0)
    model.compile(
      CrossShardOptimizer(optimizer, loss_averaged_over="global", **settings),
      "mse",
      weighted_metrics=["mae"],
    )
  rng = np.random.default_rng(5)
  features = rng.normal(size=(64, 4)).astype("float32")
  targets = np.sin(features.sum(1, keepdims=True))
  history = model.fit(
    *(features, targets),
    batch_size=16,
    epochs=3,
    shuffle=False,
    sample_weight=rng.uniform(0.5, 1.5, 64),
    verbose=0,
  )
  copies = [testbed.copies(variable) for variable in model.variables]
  return history.history, copies


@pytest.mark.parametrize(
  ("policy", "settings"),
  [
    ("float32", {"accumulate_steps": 2, "group_assignment": PAIRS}),
    ("mixed_float16", {"group_assignment": PAIRS}),
  ],
)
def test_trains_as_keras_own_train_step(
  policy: str, settings: dict[str, Any]
) -> None:
  compiled = _train(_class_of_the_page(), policy, **settings)
  plain = _train(keras.Model, policy, **settings)
  # XLA rounds half precision where it likes.
  bound = 1e-5 if policy == "float32" else 1e-2
  assert compiled[0].keys() == plain[0].keys()
  for name, values in plain[0].items():
    np.testing.assert_allclose(compiled[0][name], values, rtol=bound)
  for ours, theirs in zip(compiled[1], plain[1], strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
  # What is compared is grouped.
  assert np.abs(plain[1][0][0] - plain[1][0][3]).max() > 1e-3
