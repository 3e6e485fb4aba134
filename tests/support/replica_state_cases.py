"""Models and optimizers whose groups differ, to be saved and restored.

Tests use them in their own process and in the processes of several workers.
"""

import json
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, Models

EXAMPLES = 4  # of each replica in a step
N = testbed.REPLICAS
PAIRS = [[0, 1], [2, 3]]
STRATEGIES = {**testbed.STRATEGIES, "pair": lambda: testbed.virtual(2)}


class Training:
  """A small network with all kinds of state, and a step on each replica."""

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    groups: Sequence[Sequence[int]] | None,
    seed: int,
    optimizer: Any = tf.keras.optimizers.Adam,
    with_own_state: bool = True,
    units: int = 3,
    library: Any = tf.keras,
    wrapper: Any = CrossShardOptimizer,
  ) -> None:
    self.strategy = strategy
    self.replicas = strategy.num_replicas_in_sync
    rng = np.random.default_rng(seed)
    with strategy.scope():
      layers = [library.Input((4,)), library.layers.Dense(units)]
      if with_own_state:
        layers += [
          library.layers.BatchNormalization(momentum=0.5),
          library.layers.Dropout(0.25, seed=seed),
        ]
      self.model = library.Sequential([*layers, library.layers.Dense(2)])
      # Draw float32 numbers with NumPy, which are the same on every platform,
      # and not with Keras' generators.
      for weight in self.model.trainable_variables:
        weight.assign(rng.normal(size=weight.shape).astype("float32"))
      self.optimizer = wrapper(optimizer(0.01), group_assignment=groups)
      self.optimizer.build(self.model.trainable_variables)
    self.run = tf.function(self._run, autograph=False)

  def _run(self, x: tf.Tensor) -> None:
    def replica_step() -> None:
      mine = x[testbed.replica_id()]

      def loss() -> tf.Tensor:
        return tf.reduce_mean(self.model(mine, training=True) ** 2)

      self.optimizer.minimize(loss, var_list=self.model.trainable_variables)

    self.strategy.run(replica_step)

  def steps(self, start: int, end: int) -> None:
    """Trains on data that differ between replicas and between steps."""
    for step in range(start, end):
      rng = np.random.default_rng([1, step])
      shape = (self.replicas, EXAMPLES, 4)
      self.run(tf.constant(rng.normal(size=shape).astype("float32")))

  def state(self) -> dict[str, list[np.ndarray]]:
    """Returns the values of all variables on the replicas of this process."""
    variables = [*self.model.variables, *self.optimizer.variables]
    return {
      f"{i} {variable.name}": testbed.copies(variable)
      for i, variable in enumerate(variables)
    }

  def save(self, path: Any) -> None:
    Models(self.model, self.optimizer).save(path)

  def restore(self, path: Any) -> None:
    Models(self.model, self.optimizer).restore(path)


def saved(optimizer: Any, model: Any = None) -> list[dict[str, np.ndarray]]:
  """Returns each replica's values, by their keys and names."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "state.npz")
    Models(model, optimizer).save(path)
    with np.load(path, allow_pickle=False) as file:
      arrays = dict(file)
  about = json.loads(str(arrays["about"]))
  found = {}
  for i, members in enumerate(about["group_assignment"]):
    for j, replica in enumerate(members):
      found[replica] = {
        re.sub(r"_\d+", "", f"{key} {name}"): arrays.get(
          f"model_{i}/{key}", arrays.get(f"model_{i}/member_{j}/{key}")
        )
        for key, name in about["names"].items()
      }
  return [found[replica] for replica in sorted(found)]


def two_in_two_out(home: Any) -> Any:
  """Returns a model with two inputs, and a sum and probabilities as outputs."""
  inputs = {key: home.Input((3,), name=key) for key in ("x", "y")}
  first = home.layers.Dense(4)(inputs["x"])
  total = home.layers.Add()([first, home.layers.Dense(4)(inputs["y"])])
  return home.Model(
    inputs, {"sum": total, "probabilities": home.layers.Softmax()(first)}
  )


def differing(
  one: dict[str, list[np.ndarray]], other: dict[str, list[np.ndarray]]
) -> list[str]:
  assert len(one) == len(other) > 0
  return [
    name
    for (name, mine), theirs in zip(one.items(), other.values(), strict=True)
    if [(a.dtype, a.shape, a.tobytes()) for a in mine]
    != [(a.dtype, a.shape, a.tobytes()) for a in theirs]
  ]


def lists(arrays: Any) -> Any:
  """Converts arrays to lists of numbers; arrays without a shape to numbers."""
  return [np.asarray(array).tolist() for array in arrays]


def values(variable: Any) -> Any:
  return lists(testbed.values(variable))


def group_values(variable: Any, optimizer: Any) -> Any:
  return lists(Models(optimizer=optimizer).values(variable))


def spread(variable: Any, arrays: Sequence[Any]) -> None:
  """Gives each replica of this process its own value of a variable."""
  value = getattr(variable, "value", variable)
  value = variable if callable(value) else value
  if hasattr(value, "set_copies"):  # One stack of all copies.
    value.set_copies(arrays)
    return
  locals_ = value.distribute_strategy.experimental_local_results(value)
  assert len(locals_) == len(arrays)
  for copy, array in zip(locals_, arrays, strict=True):
    copy.assign(array)


def simple(
  where: str, groups: Any = PAIRS, make: Any = None
) -> tuple[Any, list[Any]]:
  """Returns an optimizer and two weights that differ between the groups."""
  with STRATEGIES[where]().scope():
    weights = [
      tf.keras.Variable([0.0, 0.0], name="weight"),
      tf.Variable(0.0, name="scale"),
    ]
    made = make() if make else tf.keras.optimizers.SGD(0.5, momentum=0.5)
    sharded = CrossShardOptimizer(made, group_assignment=groups)
    sharded.build(weights)
  for index, members in enumerate(groups):
    assert len(groups) * len(members) == (2 if where == "pair" else N)
    for variable in [*weights, *sharded.variables]:
      copies = testbed.copies(variable)
      for replica in members:
        copies[replica] = np.full_like(copies[replica], 10 * index + 10)
      spread(variable, copies)
  return sharded, weights
