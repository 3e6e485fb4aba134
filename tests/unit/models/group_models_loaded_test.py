"""Ensembles and winners of a search can be loaded without this package."""

import pathlib
from typing import Any

import numpy as np

from tests.support import programs, replica_state_cases, testbed
from tests.support.training import KERASES
from tf_cross_shard import Models

X = np.random.default_rng(3).integers(-4, 5, (8, 3)).astype("float32")

IDS = np.arange(8).reshape(4, 2)
PAIRS = [[0, 1], [2, 3]]

LOAD = """
import sys
sys.modules["tf_cross_shard"] = None  # It cannot be imported.
import keras, numpy as np, tensorflow as tf, tf_keras
folder = sys.argv[1]
right = np.load(f"{folder}/right.npz")
x = {key: right[key] for key in ("x", "y")}
for home in (keras, tf_keras):
  name = home.__name__
  loaded = home.models.load_model(f"{folder}/{name}.keras")
  names = [layer.name for layer in loaded.layers]
  assert {"model_0", "model_1"} <= set(names), names
  exported = tf.saved_model.load(f"{folder}/{name}")
  is_list = home is tf_keras  # Its `export` makes a list of inputs.
  served = exported.serve(list(x.values()) if is_list else x)
  for found in (loaded.predict(x, verbose=0), served):
    for key in ("sum", "probabilities"):
      np.testing.assert_array_equal(found[key], right[f"{name} {key}"])
  winner = home.models.load_model(f"{folder}/{name}_winner.keras")
  assert winner.get_layer("dropout").rate == 0.25
  found = winner.predict(right["ids"], verbose=0)
  np.testing.assert_array_equal(found, right[f"{name} winner"])
print("loaded")
"""


def _save_ensemble(library: str, folder: pathlib.Path) -> dict[str, Any]:
  """Saves an ensemble of groups that differ; returns its predictions.

  group_models_test.py tests the predictions.
  """
  home, wrapper = KERASES[library]
  with testbed.mirrored().scope():
    model = replica_state_cases.two_in_two_out(home)
    optimizer = wrapper.CrossShardOptimizer(
      "sgd", group_assignment=[[3, 0], [1, 2]]
    )
    rng = np.random.default_rng(0)
    for variable in model.variables:
      a, b = rng.integers(1, 5, (2, *variable.shape)).astype("float32")
      replica_state_cases.spread(variable, [a, b, b, a])
    ensemble = Models(model, optimizer).ensemble()
  found = ensemble.predict({"x": X, "y": X[::-1]}, verbose=0)
  assert found.keys() == {"sum", "probabilities"}
  ensemble.save(folder / f"{library}.keras")
  ensemble.export(str(folder / library))
  return {f"{library} {key}": value for key, value in found.items()}


def _save_winner(library: str, folder: pathlib.Path) -> dict[str, Any]:
  """Saves the better one of two groups; returns predictions.

  Its model has an embedding table and batch normalization.
  """
  home, package = KERASES[library]
  with testbed.mirrored().scope():
    model = home.Sequential(
      [
        home.Input((2,), dtype="int32"),
        package.Embedding(8, 3),
        package.SyncBatchNormalization(PAIRS),
        package.TunableDropout(0.25, name="dropout"),
        home.layers.Dense(1),
      ]
    )
    optimizer = package.CrossShardOptimizer(
      home.optimizers.SGD(package.PerModel([8.0, 0.25])), group_assignment=PAIRS
    )
    model.compile(optimizer, "mse")
  data = (IDS, np.ones([4, 2, 1], "float32"))
  model.fit(*data, batch_size=4, verbose=0, epochs=2)
  winner = Models(model, optimizer)[1]
  found = winner.predict(IDS, verbose=0)
  winner.save(folder / f"{library}_winner.keras")
  return {f"{library} winner": found}


def test_models_are_loaded_without_this_package(tmp_path: pathlib.Path) -> None:
  right: dict[str, Any] = {"x": X, "y": X[::-1], "ids": IDS}
  for library in KERASES:
    right |= _save_ensemble(library, tmp_path)
    right |= _save_winner(library, tmp_path)
  np.savez(tmp_path / "right.npz", **right)
  output = programs.run(["-c", LOAD, str(tmp_path)], tmp_path)
  assert output.splitlines()[-1] == "loaded"
