"""Ensembles and winners of a search can be loaded without this package."""

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.support import replica_state_cases, testbed
from tests.support.training import KERASES
from tf_cross_shard import callbacks, replica_state, trials

X = np.random.default_rng(3).integers(-4, 5, (8, 3)).astype("float32")

LOAD = """
import sys
sys.modules["tf_cross_shard"] = None  # It cannot be imported.
import keras, numpy as np, tensorflow as tf, tf_keras
folder = sys.argv[1]
right = np.load(f"{folder}/right.npz")
for home in (keras, tf_keras):
  name = home.__name__
  x = {key: right[key] for key in ("x", "y")}
  loaded = home.models.load_model(f"{folder}/{name}.keras")
  names = [layer.name for layer in loaded.layers]
  assert {"group_0", "group_1"} <= set(names), names
  exported = tf.saved_model.load(f"{folder}/{name}")
  is_list = home is tf_keras  # Its `export` makes a list of inputs.
  served = exported.serve(list(x.values()) if is_list else x)
  for found in (loaded.predict(x, verbose=0), served):
    for key in ("sum", "probabilities"):
      np.testing.assert_array_equal(found[key], right[f"{name} {key}"])
print("loaded")
"""


def _made(library: str) -> tuple[Any, Any]:
  """A model of two inputs and outputs whose groups differ."""
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
  return model, optimizer


def test_an_ensemble_is_loaded_without_this_package(
  tmp_path: pathlib.Path,
) -> None:
  """Loads the ensemble of both Keras versions.

  group_models_test.py tests its predictions.
  """
  data = {"x": X, "y": X[::-1]}
  right: dict[str, Any] = dict(data)
  for library in KERASES:
    model, optimizer = _made(library)
    with testbed.mirrored().scope():
      ensemble = replica_state.ensemble(model, optimizer)
    found = ensemble.predict(data, verbose=0)
    assert found.keys() == {"sum", "probabilities"}
    right |= {f"{library} {key}": value for key, value in found.items()}
    ensemble.save(tmp_path / f"{library}.keras")
    ensemble.export(str(tmp_path / library))
  np.savez(tmp_path / "right.npz", **right)
  done = subprocess.run(
    [sys.executable, "-c", LOAD, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )
  assert done.stdout.splitlines()[-1:] == ["loaded"], done.stderr[-3000:]


LOAD_WINNER = """
import sys
sys.modules["tf_cross_shard"] = None  # It cannot be imported.
import keras, numpy as np, tf_keras
folder = sys.argv[1]
right = np.load(f"{folder}/right.npz")
for home in (keras, tf_keras):
  loaded = home.models.load_model(f"{folder}/{home.__name__}.keras")
  assert loaded.get_layer("dropout").rate == 0.25
  found = loaded.predict(right["x"], verbose=0)
  np.testing.assert_array_equal(found, right[home.__name__])
print("loaded")
"""


def test_a_winner_is_loaded_without_this_package(
  tmp_path: pathlib.Path,
) -> None:
  """Loads the winner of a search over dropout rates.

  Its model has an embedding table and batch normalization.
  """
  right: dict[str, Any] = {"x": np.arange(8).reshape(4, 2)}
  pairs = [[0, 1], [2, 3]]
  for library, (home, package) in KERASES.items():
    with testbed.mirrored().scope():
      rates = [{"rate": rate, "learning_rate": rate} for rate in (8.0, 0.25)]
      table = trials.Table([{**r, "rate": r["rate"] % 1} for r in rates], pairs)
      model = home.Sequential(
        [
          home.Input((2,), dtype="int32"),
          package.Embedding(8, 3),
          package.SyncBatchNormalization(pairs),
          package.GroupDropout(table.values("rate"), pairs, name="dropout"),
          home.layers.Dense(1),
        ]
      )
      optimizer = package.CrossShardOptimizer(
        home.optimizers.SGD(0.1), group_assignment=pairs
      )
      model.compile(optimizer, "mse")
    data = (right["x"], np.ones([4, 2, 1], "float32"))
    halving = callbacks.Halving(table, tmp_path / library, epochs=2)
    judge = callbacks.GroupMetrics(data, ensemble=False)
    options = {"batch_size": 4, "verbose": 0, "callbacks": [judge, halving]}
    model.fit(*data, epochs=halving.total_epochs, **options)
    assert table.best.settings["rate"] == 0.25  # Group 0 diverged.
    winner = halving.best_model()
    right[library] = winner.predict(right["x"], verbose=0)
    loss = float(np.mean((right[library] - 1) ** 2))
    assert loss == pytest.approx(table.best.best, 1e-5)
    winner.save(tmp_path / f"{library}.keras")
  np.savez(tmp_path / "right.npz", **right)
  done = subprocess.run(
    [sys.executable, "-c", LOAD_WINNER, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )
  assert done.stdout.splitlines()[-1:] == ["loaded"], done.stderr[-3000:]
