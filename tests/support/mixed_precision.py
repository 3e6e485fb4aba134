"""Trains a linear regression in mixed precision, with and without loss scaling.

A `Cell` is one combination of a Keras, a way to train, a policy, and whether
the user has a loss scaling optimizer. The data are multiples of powers of two,
so that half precision rounds nothing but the inputs: replicas and a whole batch
have the same bits. One row of one replica is NaN in one step.

The first part runs a cell, in the test's own process or in that of a worker.
The second part is what several workers run.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tests.support import testbed, training

KINDS = ("keras", "tf_keras")
WAYS = ("fit", "scale_loss", "minimize")
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
SCALINGS = ("none", "inside")

STEPS, EXAMPLES = 4, 2
# With these seeds no two replicas have the same data, and all sums are exact.
SEEDS = {2: 1, 4: 9}  # by the number of replicas
BAD_STEP, BAD_REPLICA = 1, 1
SCALE = 64.0  # the initial scale of the user's loss scaling optimizer
# The initial scale of the loss scaling optimizer that compile() adds.
SCALE_OF_COMPILE = 2.0**15


class Cell(NamedTuple):
  """One combination of settings."""

  kind: str  # of Keras
  way: str  # to train
  policy: str
  scaling: str  # whether the user's loss scaling optimizer is inside
  skips: bool  # whether our optimizer skips steps that are not finite

  @property
  def library(self) -> Any:
    """The Keras of the cell, a module."""
    return training.KERASES[self.kind][0]

  @property
  def scale(self) -> float | None:
    """The first loss scale; None if nothing scales the loss."""
    if self.scaling != "none":
      return SCALE
    is_added = self.policy == "mixed_float16" and self.way == "fit"
    return SCALE_OF_COMPILE if is_added else None

  @property
  def has_nan(self) -> bool:
    """Whether the data make one step nonfinite: yes if the cell can skip it."""
    return self.scale is not None or self.skips

  def scaled(self, optimizer: Any, scale: float | None) -> Any:
    """Returns `optimizer`, in a loss scaling optimizer if `scale` is given."""
    if scale is None:
      return optimizer
    kind = self.library.mixed_precision.LossScaleOptimizer
    return kind(optimizer, initial_scale=scale)

  def plain(self) -> Any:
    """Returns SGD with momentum, which also acts where gradients are zero."""
    return self.library.optimizers.SGD(0.5, momentum=0.5)

  def sharded(self, groups: Any) -> Any:
    """Returns our optimizer."""
    _, package = training.KERASES[self.kind]
    return package.CrossShardOptimizer(
      self.scaled(self.plain(), SCALE if self.scaling == "inside" else None),
      group_assignment=groups,
      skip_nonfinite=self.skips,
    )


class Data(NamedTuple):
  """Examples of each step and replica, and the initial weights."""

  x: np.ndarray  # [steps, replicas, examples, 2]
  y: np.ndarray  # [steps, replicas, examples, 1]
  kernel: np.ndarray  # [2, 1]
  bias: np.ndarray  # [1]

  def batches(self) -> tf.data.Dataset:
    """Returns a dataset.

    Each batch has the examples of all replicas in a step.
    """
    size = self.x.shape[1] * self.x.shape[2]
    return tf.data.Dataset.from_tensor_slices(
      (self.x.reshape(-1, 2), self.y.reshape(-1, 1))
    ).batch(size, drop_remainder=True)


@functools.cache
def data(replicas: int, has_nan: bool) -> Data:
  """Returns data that differ between replicas."""
  rng = np.random.default_rng(SEEDS[replicas])
  shape = (STEPS, replicas, EXAMPLES)
  x = rng.integers(-1, 2, size=(*shape, 2)).astype("float32")
  y = rng.integers(-2, 3, size=(*shape, 1)).astype("float32") / 4
  kernel = rng.integers(-1, 2, size=(2, 1)).astype("float32") / 4
  bias = rng.integers(-1, 2, size=(1,)).astype("float32") / 4
  # Half precision rounds this away, so that a policy makes a difference.
  x *= 1 + 2.0**-13
  if has_nan:
    x[BAD_STEP, BAD_REPLICA, 0, 0] = np.nan
  both = np.concatenate([x, y], axis=-1)
  for a, b in itertools.combinations(range(replicas), 2):
    assert (both[:, a] != both[:, b]).any(axis=(1, 2)).all(), "same data"
  return Data(x, y, kernel, bias)


@contextlib.contextmanager
def policy(cell: Cell) -> Iterator[None]:
  """Sets the global policy to the policy of the cell inside the context."""
  precision = cell.library.mixed_precision
  get = getattr(precision, "global_policy", None) or precision.dtype_policy
  before = get()
  precision.set_global_policy(cell.policy)
  try:
    yield
  finally:
    precision.set_global_policy(before)


def model_of(library: Any, given: Data) -> Any:
  """Returns a linear regression with the current global policy."""
  dense = library.layers.Dense(1)
  model = library.Sequential(
    [
      library.Input((2,)),
      dense,
      # As Keras advises: tf_keras would take the loss in half precision.
      library.layers.Activation("linear", dtype="float32"),
    ]
  )
  dense.set_weights([given.kernel, given.bias])
  return model


def mean_square(model: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
  """Returns the squared error, averaged over the given examples."""
  predicted = tf.cast(model(x, training=True), tf.float32)
  return tf.reduce_mean((predicted - y) ** 2)


def _held(cell: Cell, model: Any, optimizer: Any) -> list[list[np.ndarray]]:
  """Returns each replica's weights, iterations, loss scale and skipped steps.

  Skipped steps are included only if our optimizer can skip steps.
  """
  scaling = cell.library.mixed_precision.LossScaleOptimizer
  chain, scales, counts = [optimizer], [], []
  while hasattr(chain[-1], "inner_optimizer"):
    chain.append(chain[-1].inner_optimizer)
  for each in chain:
    if isinstance(each, scaling):
      is_keras3 = cell.kind == "keras"
      loss_scale = None if is_keras3 else each._loss_scale.current_loss_scale
      scales = [each.dynamic_scale if is_keras3 else loss_scale]
    if hasattr(type(each), "skipped_steps") and each.skip_nonfinite:
      counts = [each.skipped_steps]
  counted = [chain[-1].iterations, *scales, *counts]
  assert len(scales) == (cell.scale is not None)
  return training.by_replica([*model.trainable_variables, *counted])


def run(
  cell: Cell, strategy: tf.distribute.Strategy, groups: Any, given: Data
) -> list[list[np.ndarray]]:
  """Trains a cell; returns each replica's values, see `_held`."""
  with policy(cell), strategy.scope():
    model = model_of(cell.library, given)
    optimizer = cell.sharded(groups)
    compute_dtype = model.layers[0].compute_dtype
    assert compute_dtype == cell.policy.removeprefix("mixed_")
    if cell.way == "fit":
      model.compile(optimizer, "mse")
      testbed.fit(model, given.batches())
      return _held(cell, model, model.optimizer)
    optimizer.build(model.trainable_variables)

  replicas = strategy.num_replicas_in_sync

  def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
    if cell.way == "minimize":
      optimizer.minimize(
        lambda: mean_square(model, x, y), var_list=model.trainable_variables
      )
    else:
      _step_with_tape(cell, model, optimizer, x, y, replicas)

  step = training.on_rows(strategy, replica_step)
  for x, y in zip(given.x, given.y, strict=True):
    step(x, y)
  return _held(cell, model, optimizer)


def _step_with_tape(
  cell: Cell,
  model: Any,
  optimizer: Any,
  x: tf.Tensor,
  y: tf.Tensor,
  replicas: int = 1,
) -> None:
  """Takes a step with our optimizer or with plain Keras.

  The loss is scaled as the documentation of each Keras version describes.
  """
  is_scaled_by_tf_keras = cell.kind != "keras" and cell.scale is not None
  with tf.GradientTape() as tape:
    # As Keras' losses: averaged over the examples of all replicas.
    loss = mean_square(model, x, y) / replicas
    if hasattr(optimizer, "scale_loss"):  # Not of an optimizer of tf_keras.
      loss = optimizer.scale_loss(loss)
    if is_scaled_by_tf_keras:
      loss = optimizer.get_scaled_loss(loss)
  grads = tape.gradient(loss, model.trainable_weights)
  if is_scaled_by_tf_keras:
    grads = optimizer.get_unscaled_gradients(grads)
  pairs = zip(grads, model.trainable_variables, strict=True)
  optimizer.apply_gradients(pairs)


@functools.cache
def expected(
  cell: Cell, replicas: int, members: tuple[int, ...]
) -> list[np.ndarray]:
  """Returns what `_held` returns for plain Keras on a group's whole batches.

  Without a loss scale, this function leaves out the step that is not finite.
  """
  given, rows, skipped = data(replicas, cell.has_nan), list(members), 0
  with policy(cell):
    model = model_of(cell.library, given)
  optimizer = cell.scaled(cell.plain(), cell.scale)
  optimizer.build(model.trainable_variables)
  for x, y in zip(given.x[:, rows], given.y[:, rows], strict=True):
    is_bad = not np.isfinite(x).all()
    skipped += is_bad
    if cell.scale is None and is_bad:
      continue
    whole = tf.constant(np.concatenate(x)), tf.constant(np.concatenate(y))
    _step_with_tape(cell, model, optimizer, *whole)
  [held] = _held(cell, model, optimizer)
  return [*held, *[np.array(skipped)] * cell.skips]


def check(cell: Cell, held: Sequence[Any], groups: Any) -> None:
  """Compares all replicas with plain Keras; in half precision, exactly."""
  groups = testbed.groups_of(groups, len(held))
  right = functools.partial(expected, cell, len(held))
  bounds = [training.near] if cell.policy == "float32" else []
  training.check_groups(held, groups, lambda m: right(tuple(m)), *bounds)
  assert (right(groups.assignment[0])[0] != data(len(held), False).kernel).any()


# ------------------------------------------------------------------- workers

# Each pair of settings occurs once, with the groups of two workers.
TOGETHER, APART = None, [[0], [1]]
WORKER_CELLS = {
  Cell("keras", "scale_loss", "float32", "none", True): TOGETHER,
  Cell("keras", "fit", "mixed_float16", "inside", False): TOGETHER,
  Cell("keras", "scale_loss", "mixed_bfloat16", "inside", False): APART,
  Cell("tf_keras", "scale_loss", "float32", "inside", False): APART,
  Cell("tf_keras", "fit", "mixed_float16", "none", False): TOGETHER,
  Cell("tf_keras", "fit", "mixed_bfloat16", "none", False): TOGETHER,
  Cell("tf_keras", "fit", "float32", "inside", False): TOGETHER,
  Cell("tf_keras", "scale_loss", "mixed_float16", "none", True): APART,
}
# TensorFlow's own strategy, under which `fit` of Keras 3 fails.
OF_TENSORFLOW = Cell("tf_keras", "fit", "mixed_float16", "none", False)


def train_worker(
  strategy: tf.distribute.Strategy, cell: Cell
) -> list[list[np.ndarray]]:
  """Trains a cell as one of two workers; returns this worker's values."""
  given = data(strategy.num_replicas_in_sync, cell.has_nan)
  return run(cell, strategy, WORKER_CELLS[cell], given)


def evaluate_and_predict(strategy: tf.distribute.Strategy) -> Any:
  """Returns the loss and the predictions of a model of tf_keras."""
  given = data(strategy.num_replicas_in_sync, has_nan=False)
  library, _ = training.KERASES["tf_keras"]
  with strategy.scope():
    model = model_of(library, given)
    model.compile(loss="mse")
  return (
    model.evaluate(given.batches(), verbose=0),
    model.predict(given.batches(), verbose=0),
  )
