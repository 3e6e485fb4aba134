"""An ensemble can be loaded without this package."""

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.support import replica_state_cases, testbed
from tests.support.training import KERASES
from tf_cross_shard import replica_state

pytestmark = pytest.mark.slow
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
  is_list = home is tf_keras  # Its `export` takes inputs apart.
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
  """In both Kerases; `group_models_test.py` checks what it predicts."""
  data = {"x": X, "y": X[::-1]}
  right: dict[str, Any] = dict(data)
  for library in KERASES:
    model, optimizer = _made(library)
    with testbed.mirrored().scope():
      joined = replica_state.ensemble(optimizer, model)
    found = joined.predict(data, verbose=0)
    assert found.keys() == {"sum", "probabilities"}
    right |= {f"{library} {key}": value for key, value in found.items()}
    joined.save(tmp_path / f"{library}.keras")
    joined.export(str(tmp_path / library))
  np.savez(tmp_path / "right.npz", **right)
  done = subprocess.run(
    [sys.executable, "-c", LOAD, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=200,
    check=False,
  )
  assert done.stdout.splitlines()[-1:] == ["loaded"], done.stderr[-3000:]
