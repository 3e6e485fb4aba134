"""Two Kerases, mixed precision and loss scaling, in every pair of settings.

{Keras 3, tf_keras, its older optimizers} x {fit, custom loop, minimize} x
  engines x {float32, mixed_float16, mixed_bfloat16} x {no loss scaling of the
  user's, inside of ours, around ours} x {skip_nonfinite or not}

A cell trains a linear regression whose data are multiples of powers of two, so
that half precision rounds nothing but the inputs: replicas and a whole batch
have the same bits. One row of one replica is NaN in one step.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from tests.support import covering, testbed
from tf_cross_shard import keras3 as sharded_keras3
from tf_cross_shard import tf_keras as sharded_tf_keras

KERASES = ("keras3", "tf_keras", "tf_keras_legacy")
WAYS = ("fit", "loop", "minimize")
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
SCALINGS = ("plain", "inside", "outside")

Grouping = list[list[int]] | None
GROUPINGS: dict[str, dict[str, Grouping]] = {
  "mirrored": {"contiguous": [[0, 1], [2, 3]]},
  "multi_worker": {"ungrouped": None, "singletons": [[0], [1]]},
  "virtual_tpu": {"strided": [[0, 2], [1, 3]]},
  "one_device": {"ungrouped": None},
}
REPLICAS = {"mirrored": 4, "multi_worker": 2, "virtual_tpu": 4, "one_device": 1}

STEPS = 4
EXAMPLES = 2  # of each replica and step
# With which no two replicas have the same data in a step, and all is exact.
SEEDS = {1: 0, 2: 1, 4: 9}
BAD_STEP = 1  # in which one replica has a NaN
SCALE = 64.0  # at first, of a loss scaling optimizer of the user's
SCALE_OF_COMPILE = 2.0**15  # of the one that compile() adds


@dataclasses.dataclass(frozen=True)
class Cell:
  """One combination; its parts are keys of the tables above."""

  kind: str  # of Keras
  way: str  # to train; the last two are loops
  engine: str
  policy: str
  scaling: str  # where the user's loss scaling optimizer is

  def __str__(self) -> str:
    return "-".join(dataclasses.astuple(self))

  @property
  def scale(self) -> float | None:
    """The first loss scale; None where nobody scales."""
    if self.scaling != "plain":
      return SCALE
    is_added = self.policy == "mixed_float16" and self.way == "fit"
    return SCALE_OF_COMPILE if is_added else None

  @property
  def is_possible(self) -> bool:
    """Whether Keras itself has it."""
    if self.kind == "keras3":  # Its LossScaleOptimizer has no `minimize`.
      return (self.way, self.scaling) != ("minimize", "outside")
    return self.engine != "virtual_tpu" or (
      self.policy != "mixed_float16" and self.scaling == "plain"
    )


def covering_cells(*engines: str) -> list[tuple[Cell, bool]]:
  """Cells with every pair of settings, and whether each skips by itself."""
  rows = covering.pairwise(
    [KERASES, WAYS, engines, POLICIES, SCALINGS, (False, True)],
    lambda row: Cell(*row[:-1]).is_possible,
  )
  return [(Cell(*row[:-1]), row[-1]) for row in rows]


class Data(NamedTuple):
  """Examples for each replica and step, and where the weights start."""

  x: np.ndarray  # [steps, replicas, examples, 2]
  y: np.ndarray  # [steps, replicas, examples, 1]
  kernel: np.ndarray  # [2, 1]
  bias: np.ndarray  # [1]


@functools.cache
def data(replicas: int, with_nan: bool) -> Data:
  """Data that differ between replicas; exact but for the rounding of x."""
  rng = np.random.default_rng(SEEDS[replicas])
  shape = (STEPS, replicas, EXAMPLES)
  x = rng.integers(-1, 2, size=(*shape, 2)).astype("float32")
  y = rng.integers(-2, 3, size=(*shape, 1)).astype("float32") / 4
  kernel = rng.integers(-1, 2, size=(2, 1)).astype("float32") / 4
  bias = rng.integers(-1, 2, size=(1,)).astype("float32") / 4
  # So that a policy makes a difference: half precision rounds this away.
  x *= 1 + 2.0**-13
  if with_nan:
    x[BAD_STEP, bad_replica(replicas), 0, 0] = np.nan
  both = np.concatenate([x, y], axis=-1)
  for a, b in itertools.combinations(range(replicas), 2):
    assert (both[:, a] != both[:, b]).any(axis=(1, 2)).all(), "same data"
  return Data(x, y, kernel, bias)


def tiny_data() -> Data:
  """A step of one replica, whose gradients float16 makes 0, if not scaled."""
  small = np.float32(2.0**-13)
  x = np.array([[1, -1], [1, -1]], "float32") * small
  y = np.array([[1 / 2], [1 / 4]], "float32") * small
  return Data(
    x[None, None], y[None, None], np.zeros((2, 1), "f4"), np.zeros(1, "f4")
  )


def bad_replica(replicas: int) -> int:
  """Whose data hold the NaN."""
  return min(1, replicas - 1)


def keras_of(kind: str) -> Any:
  """The Keras that models and optimizers are from."""
  return keras if kind == "keras3" else tf_keras


def _loss_scaling(kind: str) -> Any:
  """The class of loss scaling optimizers."""
  return keras_of(kind).mixed_precision.LossScaleOptimizer


def plain(kind: str, scale: float | None) -> Any:
  """An optimizer of Keras alone."""
  module = keras_of(kind).optimizers
  if kind == "tf_keras_legacy":
    module = module.legacy
  # The momentum goes on in a step that is applied with gradients of zero.
  optimizer = module.SGD(0.5, momentum=0.5)
  if scale is None:
    return optimizer
  return _loss_scaling(kind)(optimizer, initial_scale=scale)


def sharded(cell: Cell, grouping: Grouping, **options: Any) -> Any:
  """Ours, encapsulating and encapsulated as the cell says."""
  is_keras3 = cell.kind == "keras3"
  module = sharded_keras3 if is_keras3 else sharded_tf_keras
  inner = plain(cell.kind, SCALE if cell.scaling == "inside" else None)
  optimizer = module.CrossShardOptimizer(
    inner, group_assignment=grouping, **options
  )
  if cell.scaling == "outside":
    return _loss_scaling(cell.kind)(optimizer, initial_scale=SCALE)
  return optimizer


@contextlib.contextmanager
def policy(kind: str, name: str) -> Iterator[None]:
  """Everything made in it has the policy."""
  precision = keras_of(kind).mixed_precision
  get = getattr(precision, "global_policy", None) or precision.dtype_policy
  before = get()
  precision.set_global_policy(name)
  try:
    yield
  finally:
    precision.set_global_policy(before)


def model_of(kind: str, given: Data) -> Any:
  """A linear regression in the policy that is in force."""
  module = keras_of(kind)
  return module.Sequential(
    [
      module.Input((2,)),
      module.layers.Dense(
        1,
        kernel_initializer=lambda shape, dtype=None: tf.constant(
          given.kernel, dtype
        ),
        bias_initializer=lambda shape, dtype=None: tf.constant(
          given.bias, dtype
        ),
      ),
      # As Keras advises: tf_keras would take the loss in half precision.
      module.layers.Activation("linear", dtype="float32"),
    ]
  )


def mean_square(model: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
  """The squared error, averaged over the examples handed in."""
  predicted = tf.cast(model(x, training=True), tf.float32)
  return tf.reduce_mean((predicted - y) ** 2)


@dataclasses.dataclass
class Step:
  """What there is after a step; each list has an item per replica."""

  weights: list[list[np.ndarray]]  # each variable of the model
  iterations: list[int]  # of the encapsulated optimizer
  scales: list[float]  # the loss scale in use; empty if there is none
  skipped: list[int]  # `skipped_steps`; empty if they are not counted


@dataclasses.dataclass
class Run:
  """What came of a cell."""

  steps: list[Step]
  compute_dtype: str


def look(kind: str, variables: Sequence[Any], optimizer: Any) -> Step:
  """Every replica's values now."""
  chain = [optimizer]
  while hasattr(chain[-1], "inner_optimizer"):
    chain.append(chain[-1].inner_optimizer)
  scales: list[float] = []
  for each in chain:  # Of two loss scales the inner one is used.
    if isinstance(each, _loss_scaling(kind)):
      scale = (
        each.dynamic_scale
        if kind == "keras3"
        else each._loss_scale.current_loss_scale
      )
      scales = [float(copy) for copy in testbed.copies(scale)]
  counts = [
    each.skipped_steps
    for each in chain
    if hasattr(type(each), "skipped_steps") and each.skip_nonfinite
  ]
  by_variable = [testbed.copies(variable) for variable in variables]
  return Step(
    weights=[list(each) for each in zip(*by_variable, strict=True)],
    iterations=[int(copy) for copy in testbed.copies(chain[-1].iterations)],
    scales=scales,
    skipped=[int(copy) for each in counts for copy in testbed.copies(each)],
  )


def run(
  cell: Cell,
  strategy: tf.distribute.Strategy,
  grouping: Grouping,
  given: Data,
  **options: Any,
) -> Run:
  """Trains a cell."""
  assert strategy.num_replicas_in_sync == REPLICAS[cell.engine]
  with policy(cell.kind, cell.policy):
    with strategy.scope():
      model = model_of(cell.kind, given)
      optimizer = sharded(cell, grouping, **options)
    train = _fit if cell.way == "fit" else _loop
    return train(cell, strategy, model, optimizer, given)


def batches(given: Data) -> tf.data.Dataset:
  """The examples of all replicas in a step as one batch."""
  size = given.x.shape[1] * given.x.shape[2]
  return tf.data.Dataset.from_tensor_slices(
    (given.x.reshape(-1, 2), given.y.reshape(-1, 1))
  ).batch(size, drop_remainder=True)


def _fit(
  cell: Cell,
  strategy: tf.distribute.Strategy,
  model: Any,
  optimizer: Any,
  given: Data,
) -> Run:
  """Keras' own loop; under mixed_float16 it adds a loss scale."""
  with strategy.scope():
    model.compile(optimizer, "mse")
  done = Run([], model.layers[0].compute_dtype)

  def after_step(batch: int, logs: Any) -> None:
    done.steps.append(
      look(cell.kind, model.trainable_variables, model.optimizer)
    )

  callback = keras_of(cell.kind).callbacks.LambdaCallback(
    on_train_batch_end=after_step
  )
  testbed.fit(model, batches(given), callbacks=[callback])
  return done


def _loop(
  cell: Cell,
  strategy: tf.distribute.Strategy,
  model: Any,
  optimizer: Any,
  given: Data,
) -> Run:
  """A loop as Keras documents it for each kind of loss scaling."""
  variables = model.trainable_variables
  with strategy.scope():
    optimizer.build(variables)

  def minimize(x: tf.Tensor, y: tf.Tensor) -> None:
    optimizer.minimize(lambda: mean_square(model, x, y), var_list=variables)

  def with_tape(x: tf.Tensor, y: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
      loss = mean_square(model, x, y)
      # As Keras' losses: averaged over all replicas' examples.
      loss = scaled_loss(cell, optimizer, loss / strategy.num_replicas_in_sync)
    grads = tape.gradient(loss, model.trainable_weights)
    if cell.kind != "keras3" and cell.scaling != "plain":
      grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(zip(grads, variables, strict=True))

  def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
    mine = testbed.replica_id()
    train = minimize if cell.way == "minimize" else with_tape
    train(x[mine], y[mine])

  @tf.function(autograph=False)
  def step(x: tf.Tensor, y: tf.Tensor) -> None:
    strategy.run(replica_step, args=(x, y))

  done = Run([], model.layers[0].compute_dtype)
  for x, y in zip(given.x, given.y, strict=True):
    step(tf.constant(x), tf.constant(y))
    done.steps.append(look(cell.kind, variables, optimizer))
  return done


def scaled_loss(cell: Cell, optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
  """The loss to differentiate, by the methods that each Keras has for it."""
  if cell.kind == "keras3" or cell.scaling == "plain":
    return optimizer.scale_loss(loss)
  if cell.scaling == "inside":
    loss = optimizer.scale_loss(loss)
  return optimizer.get_scaled_loss(loss)


@functools.cache
def expected(
  kind: str,
  policy_name: str,
  scale: float | None,
  replicas: int,
  members: tuple[int, ...],
  with_nan: bool,
) -> list[Step]:
  """Plain Keras, with no strategy, on the group's concatenated batches.

  Without a loss scale the step that is not finite is left out.
  """
  given = data(replicas, with_nan)
  rows = list(members)
  with policy(kind, policy_name):
    model = model_of(kind, given)
  optimizer = plain(kind, scale)
  variables = model.trainable_variables
  testbed.build(optimizer, variables)
  steps: list[Step] = []
  for x, y in zip(given.x[:, rows], given.y[:, rows], strict=True):
    if scale is None and not np.isfinite(x).all():
      steps.append(steps[-1])
      continue
    with tf.GradientTape() as tape:
      loss = mean_square(
        model,
        tf.constant(np.concatenate(x)),
        tf.constant(np.concatenate(y)),
      )
      scaled = loss
      if scale is not None:
        scaled = (
          optimizer.scale_loss(loss)
          if kind == "keras3"
          else optimizer.get_scaled_loss(loss)
        )
    grads = tape.gradient(scaled, model.trainable_weights)
    if scale is not None and kind != "keras3":
      grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    steps.append(look(kind, variables, optimizer))
  return steps


def check(cell: Cell, done: Run, grouping: Grouping, with_nan: bool) -> None:
  """Each replica has, after each step, what its group was to learn."""
  replicas = REPLICAS[cell.engine]
  groups = testbed.groups_of(grouping, replicas)
  assert done.compute_dtype == cell.policy.removeprefix("mixed_")
  assert len(done.steps) == STEPS
  for members in groups:
    right = expected(
      cell.kind, cell.policy, cell.scale, replicas, tuple(members), with_nan
    )
    hit = with_nan and bad_replica(replicas) in members
    for step, (found, wanted) in enumerate(zip(done.steps, right, strict=True)):
      assert len(found.weights) == replicas
      for replica in members:
        where = f"{cell}: replica {replica}, step {step}"
        firsts = found.weights[members[0]]
        _check_weights(
          cell, found.weights[replica], firsts, wanted.weights[0], where
        )
        assert found.iterations[replica] == wanted.iterations[0], where
        _check_counts(cell, found, replica, step, hit)
    assert (right[-1].weights[0][0] != right[0].weights[0][0]).any()
  firsts = [done.steps[-1].weights[members[0]][0] for members in groups]
  for one, other in itertools.combinations(firsts, 2):
    assert np.abs(one - other).max() > 1e-2


def _check_weights(
  cell: Cell,
  mine: Sequence[np.ndarray],
  firsts: Sequence[np.ndarray],
  wanted: Sequence[np.ndarray],
  where: str,
) -> None:
  """A replica's are its group's to the bit, and plain Keras'."""
  for one, first, right in zip(mine, firsts, wanted, strict=True):
    assert one.dtype == np.float32
    assert np.isfinite(one).all(), where
    assert one.tobytes() == first.tobytes(), where
    if cell.policy == "float32":
      testbed.assert_close(one, right, where)
    else:
      np.testing.assert_array_equal(one, right, where)


def _check_counts(
  cell: Cell, found: Step, replica: int, step: int, hit: bool
) -> None:
  """A group with a NaN halves its loss scale once, and counts what it left."""
  was_hit = hit and step >= BAD_STEP
  if cell.scale is None:
    assert not found.scales
  else:
    assert found.scales[replica] == cell.scale * (0.5 if was_hit else 1.0)
  if found.skipped:
    assert found.skipped[replica] == int(was_hit)
  # tf_keras' loss scaling optimizers count what they leave out as well.
  left_out = was_hit and (cell.scale is None or cell.kind == "keras3")
  assert found.iterations[replica] == step + 1 - int(left_out)


def join(parts: Sequence[Run]) -> Run:
  """What several workers have, as if one program had seen it."""
  steps = [
    Step(
      weights=[each for step in same for each in step.weights],
      iterations=[each for step in same for each in step.iterations],
      scales=[each for step in same for each in step.scales],
      skipped=[each for step in same for each in step.skipped],
    )
    for same in zip(*(part.steps for part in parts), strict=True)
  ]
  return dataclasses.replace(parts[0], steps=steps)
