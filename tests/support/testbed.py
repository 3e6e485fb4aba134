"""What distributed tests share: strategies, models and data that differ."""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import virtual_tpu
from tf_cross_shard.callbacks import base

REPLICAS = 4
GROUPINGS: dict[str, list[list[int]] | None] = {
  "ungrouped": None,
  "contiguous": [[0, 1], [2, 3]],
  "strided": [[0, 2], [1, 3]],
  "singletons": [[0], [1], [2], [3]],
}
# TF_USE_LEGACY_KERAS=1 makes `tf.keras` tf_keras, and the same tests run in it.
IS_TF_KERAS = not hasattr(tf.keras, "Variable")


RATES: dict[str, dict[str, float]] = {
  "SGD": {"learning_rate": 0.125},
  "Momentum": {"learning_rate": 0.125, "momentum": 0.5},
  "Adam": {"learning_rate": 0.01},
  "AdamW": {"learning_rate": 0.01, "weight_decay": 0.1},
  "RMSprop": {"learning_rate": 0.01},
  "Adagrad": {"learning_rate": 0.1},
  "Adadelta": {"learning_rate": 1.0},
  "Adamax": {"learning_rate": 0.01},
  "Nadam": {"learning_rate": 0.01},
  "Ftrl": {"learning_rate": 0.1},
  "Lion": {"learning_rate": 0.01},
  "Lamb": {"learning_rate": 0.01},
  "Adafactor": {"learning_rate": 0.01},
}


def optimizers_of(library: Any) -> dict[str, Callable[..., Any]]:
  """Makers of those optimizers that a Keras has, by name."""
  found = {}
  homes = {"": library.optimizers}
  if not hasattr(library, "Variable"):
    homes["legacy "] = library.optimizers.legacy
  for prefix, home in homes.items():
    for name, options in RATES.items():
      kind = getattr(home, "SGD" if name == "Momentum" else name, None)
      if kind is not None:
        found[prefix + name] = functools.partial(kind, **options)
  # Muon came with Keras 3.9. In 3.12 its update asks for what TensorFlow's
  # variables do not have, so that plain Keras cannot use it either.
  muon = getattr(library.optimizers, "Muon", None)
  if muon and "_should_use_adamw" not in inspect.getsource(muon.update_step):
    found["Muon"] = functools.partial(muon, 0.01)
  return found


OPTIMIZERS = optimizers_of(tf.keras)


@functools.cache
def mirrored(num_replicas: int = REPLICAS) -> tf.distribute.MirroredStrategy:
  """MirroredStrategy over logical CPUs; asserts that it is distributed."""
  devices = [f"CPU:{i}" for i in range(num_replicas)]
  # Keys of collectives belong to the process: strategies of two sizes that both
  # met in them would take each other's.
  meet = None
  if num_replicas != REPLICAS:
    meet = tf.distribute.ReductionToOneDevice()
  strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=meet)
  assert strategy.num_replicas_in_sync == num_replicas > 1
  return strategy


def replica_id() -> tf.Tensor:
  """This replica's number, as an int32 tensor."""
  context = tf.distribute.get_replica_context()
  return tf.convert_to_tensor(context.replica_id_in_sync_group)


def mark() -> tf.Tensor:
  """1, 2, 4 or 8: a gradient that tells which replicas were summed."""
  return tf.constant([1.0, 2.0, 4.0, 8.0])[replica_id()]


def run(step: Callable[[], Any], mode: str = "function") -> list[Any]:
  """Runs a replica step on four replicas; returns each replica's result."""
  strategy = mirrored()

  def run_all() -> Any:
    return strategy.run(step)

  call = (
    tf.function(run_all, autograph=False) if mode == "function" else run_all
  )
  return list(strategy.experimental_local_results(call()))


def copies(variable: Any) -> list[np.ndarray]:
  """Every replica's value of a `tf.Variable` or `keras.Variable`."""
  if hasattr(variable, "whole_copies"):  # A slot that is kept in shards.
    return list(variable.whole_copies())
  value = getattr(variable, "value", variable)
  value = variable if callable(value) else value
  strategy = getattr(value, "distribute_strategy", None)
  if strategy is None:
    return [value.numpy()]
  return [copy.numpy() for copy in strategy.experimental_local_results(value)]


def variable(
  value: Any, name: str | None = None, library: Any = tf.keras
) -> Any:
  """A variable of a Keras; tf_keras has TensorFlow's."""
  return getattr(library, "Variable", tf.Variable)(value, name=name)


def is_legacy(optimizer: Any) -> bool:
  """Whether it is one of `tf_keras.optimizers.legacy`, encapsulated or not."""
  optimizer = getattr(optimizer, "inner_optimizer", optimizer)
  return "legacy" in type(optimizer).__module__


def build(optimizer: Any, variables: Sequence[Any]) -> None:
  """Makes the slots, also where there is no public way to."""
  if hasattr(optimizer, "build"):
    optimizer.build(variables)
  else:
    optimizer._create_all_weights(variables)


def variables_of(optimizer: Any) -> list[Any]:
  """All variables of an optimizer of any Keras, in one order."""
  found = optimizer.variables
  found = list(found() if callable(found) else found)
  # Of older optimizers they stand in the order in which they were made.
  return sorted(found, key=lambda v: v.name) if is_legacy(optimizer) else found


def groups_of(
  grouping: Sequence[Sequence[int]] | None, num_replicas: int = REPLICAS
) -> groups_lib.Groups:
  """The groups in force for a `group_assignment`."""
  if grouping is None:
    return groups_lib.contiguous(num_replicas, num_replicas)
  return groups_lib.Groups(grouping)


class Regression:
  """A linear regression whose arithmetic is exact for a few SGD steps.

  Weights, data and step size are small multiples of powers of two, so that
  float32 sums are exact and the order of summation cannot matter.
  """

  examples = 2  # per replica and step
  steps = 3

  def __init__(self, seed: int = 7, num_replicas: int = REPLICAS) -> None:
    rng = np.random.default_rng(seed)
    shape = (self.steps, num_replicas, self.examples)
    self.x = rng.integers(-1, 2, size=(*shape, 3)).astype("float32")
    self.y = rng.integers(-2, 3, size=(*shape, 2)).astype("float32")
    self.initial = [
      rng.integers(-2, 3, size=(3, 2)).astype("float32"),
      rng.integers(-2, 3, size=(2,)).astype("float32"),
    ]
    flat = self.x.reshape(self.steps, num_replicas, -1)
    assert not (flat == flat[:, :1]).all(axis=(0, 2))[1:].any(), "same data"

  def variables(self, library: Any = tf.keras) -> list[Any]:
    """New weights with the initial values."""
    return [
      variable(value, name, library)
      for value, name in zip(self.initial, ("kernel", "bias"), strict=True)
    ]

  def loss(self, variables: Sequence[Any], x: Any, y: Any) -> tf.Tensor:
    """Half the squared error, averaged over the examples handed in."""
    error = tf.matmul(x, variables[0]) + variables[1] - y
    return tf.reduce_mean(tf.reduce_sum(error * error, axis=-1)) / 2.0

  def group_batch(
    self, step: int, members: Sequence[int]
  ) -> tuple[np.ndarray, np.ndarray]:
    """The examples of all members of a group, concatenated."""
    rows = list(members)
    return (
      np.concatenate(self.x[step, rows]),
      np.concatenate(self.y[step, rows]),
    )


def train_plain(
  task: Regression,
  members: Sequence[int],
  optimizer: Any,
  factor: float = 1.0,
  library: Any = tf.keras,
) -> list[np.ndarray]:
  """Plain Keras, without a strategy, on a group's concatenated batch."""
  variables = task.variables(library)
  build(optimizer, variables)
  for step in range(task.steps):
    x, y = task.group_batch(step, members)
    with tf.GradientTape() as tape:
      loss = factor * task.loss(variables, x, y)
    grads = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(grads, variables, strict=True))
  return [each.numpy() for each in variables]


def train_replicas(
  task: Regression,
  strategy: tf.distribute.Strategy,
  optimizer: Any,
  variables: Sequence[Any],
  eager: bool,
) -> None:
  """Minimizes each replica's own loss, eagerly or in one function."""

  def step(x: tf.Tensor, y: tf.Tensor) -> None:
    def replica_step() -> None:
      mine = replica_id()
      optimizer.minimize(
        lambda: task.loss(variables, x[mine], y[mine]), var_list=variables
      )

    strategy.run(replica_step)

  run = step if eager else tf.function(step, autograph=False)
  for x, y in zip(task.x, task.y, strict=True):
    run(tf.constant(x), tf.constant(y))


def fit(
  model: Any, data: tf.data.Dataset, epochs: int = 1, **options: Any
) -> Any:
  """`fit` with one iterator for all epochs, since making one takes longest.

  Without an end no replica has to ask, in what is traced, if it has data.
  """
  steps = int(data.cardinality())
  return model.fit(
    data.repeat(), epochs=epochs, steps_per_epoch=steps, verbose=0, **options
  )


def network(outputs: int = 2, dropout: float = 0.0) -> Any:
  """A network with a nonlinearity; the same weights each time."""
  tf.keras.utils.set_random_seed(1)
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input((3,)),
      layers.Dense(4, activation="tanh", name="hidden"),
      layers.Dropout(dropout),
      layers.Dense(outputs, name="last"),
    ]
  )


def one_weight() -> Any:
  """A model that multiplies by a weight, which begins as 0."""
  layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
  return tf.keras.Sequential([tf.keras.Input((1,)), layer])


def interrupt() -> None:
  """Ends the program that is running."""
  raise KeyboardInterrupt


class Interruption(base.GroupCallback):
  """Ends `fit`, or acts, as an epoch begins or after a batch of it."""

  def __init__(
    self,
    epoch: int,
    batch: int | None = None,
    act: Callable[[], None] = interrupt,
  ) -> None:
    super().__init__()
    self._at, self._act, self._epoch = (epoch, batch), act, 0

  def _implements_train_batch_hooks(self) -> bool:
    return True

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    self._epoch = epoch
    self.on_train_batch_end(None)

  def on_train_batch_end(self, batch: Any, logs: Any = None) -> None:
    if (self._epoch, batch) == self._at and not self.passes_over:
      self._act()


def assert_close(actual: np.ndarray, expected: np.ndarray, where: str) -> None:
  """At most 1e-6 apart, relative to the largest weight."""
  bound, difference = near(expected), float(np.abs(actual - expected).max())
  assert difference <= bound, f"{where}: {difference} > {bound}"


def near(value: np.ndarray, *_: Any) -> float:
  """The bound of `assert_close`, for `check_groups`."""
  return 1e-6 * max(1.0, float(np.abs(value).max()))


def check_groups(
  held: Sequence[Sequence[np.ndarray]],
  groups: groups_lib.Groups,
  expected: Callable[[Sequence[int]], Sequence[Any]],
  bound: Callable[..., Any] = lambda *_: 0.0,
) -> None:
  """Every replica holds what its group was to learn; members bitwise.

  Of `held`, [replicas, variables], a variable may be off by `bound`, which is
  given the right value, the variable's number and the members.
  """
  assert len(held) == groups.num_replicas > 1
  for members in groups:
    right = [np.asarray(value, "float64") for value in expected(members)]
    for replica in members:
      for i, (mine, first, value) in enumerate(
        zip(held[replica], held[members[0]], right, strict=True)
      ):
        assert mine.tobytes() == first.tobytes(), f"replica {replica}, {i}"
        off = np.abs(mine.astype("float64") - value)
        allowed = bound(value, i, members)
        assert (off <= allowed).all(), f"replica {replica}, {i}: {off.max()}"
  # A sum over the wrong members would have been seen.
  i = next(i for i in range(len(held[0])) if any(m[i].any() for m in held))
  for one, other in itertools.combinations(groups, 2):
    assert (held[one[0]][i] != held[other[0]][i]).any()


@functools.cache
def virtual(num_replicas: int) -> virtual_tpu.VirtualTPUStrategy:
  """A virtual TPU that tests share; asserts how many replicas it has."""
  strategy = virtual_tpu.VirtualTPUStrategy(num_replicas)
  assert strategy.num_replicas_in_sync == num_replicas
  return strategy


STRATEGIES: dict[str, Callable[[], Any]] = {
  "mirrored": mirrored,
  "virtual": lambda: virtual(REPLICAS),
}


def per_replica(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> Any:
  """The i-th of `values` as the i-th replica's tensor."""
  assert len(values) == strategy.num_replicas_in_sync > 1
  return strategy.experimental_distribute_values_from_function(
    lambda context: tf.convert_to_tensor(
      values[context.replica_id_in_sync_group]
    )
  )


def per_replica_results(strategy: tf.distribute.Strategy, value: Any) -> Any:
  """Each replica's result as lists and numbers, one item per replica."""
  results = strategy.experimental_local_results(value)
  assert len(results) == strategy.num_replicas_in_sync > 1
  return [np.asarray(result.numpy()).tolist() for result in results]
