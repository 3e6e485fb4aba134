"""The same numbers everywhere: the matrix against plain Keras and NumPy.

{ungrouped, groupings} x {mean, sum} x {fit, custom loop, minimize}
  x {optimizers} x {eager, tf.function}
"""
# keras: both

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import oracle, testbed
from tf_cross_shard import CrossShardOptimizer

WAYS = ("custom_loop", "minimize", "keras_minimize")
# By variable, what each replica holds of it.
Held = list[list[np.ndarray]]


def _cells(*others: Sequence[Any]) -> Iterator[Any]:
  """{groupings} x {mean, sum} x {SGD, Adam} x others.

  Not of every day is Adam with a sum: it divides by the gradient's size and so
  hardly feels a factor, while SGD does. The oracle's test has this pair, too.
  """
  for grouping, reduction, optimizer, *values in itertools.product(
    testbed.GROUPINGS, ("mean", "sum"), ("SGD", "Adam"), *others
  ):
    is_blind = (reduction, optimizer) == ("sum", "Adam")
    marks = [pytest.mark.slow] if is_blind else []
    yield pytest.param(grouping, reduction, optimizer, *values, marks=marks)


@functools.cache
def _task(seed: int = 7) -> testbed.Regression:
  """Data that differ between replicas."""
  return testbed.Regression(seed)


@functools.cache
def _train(
  task: testbed.Regression,
  optimizer_name: str,
  grouping: str,
  reduction: str,
  way: str,
  mode: str,
  loss_averaged_over: str | None = None,
) -> Held:
  """Trains under MirroredStrategy on data that differs between replicas.

  Cached, since Keras and the oracle judge the same run: to trace one takes far
  longer than to judge it.
  """
  options: dict[str, Any] = {}
  if loss_averaged_over is not None:
    options["loss_averaged_over"] = loss_averaged_over
  strategy = testbed.mirrored()
  with strategy.scope():
    variables = task.variables()
    optimizer = CrossShardOptimizer(
      testbed.OPTIMIZERS[optimizer_name](),
      reduction,
      group_assignment=testbed.GROUPINGS[grouping],
      **options,
    )
    optimizer.build(variables)

  def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
    mine = testbed.replica_id()
    x, y = x[mine], y[mine]

    def loss() -> tf.Tensor:
      return task.loss(variables, x, y)

    if way == "custom_loop":
      pairs = optimizer.compute_gradients(loss, variables)
      optimizer.apply_gradients(pairs)
    elif way == "minimize":
      optimizer.minimize(loss, var_list=variables)
    else:
      # Keras' way: a loss averaged over all replicas' examples.
      with tf.GradientTape() as tape:
        value = loss() / testbed.REPLICAS
      optimizer.minimize(value, variables, tape=tape)

  def step(x: tf.Tensor, y: tf.Tensor) -> None:
    strategy.run(replica_step, args=(x, y))

  run = tf.function(step, autograph=False) if mode == "function" else step
  for x, y in zip(task.x, task.y, strict=True):
    run(tf.constant(x), tf.constant(y))
  return [testbed.copies(variable) for variable in variables]


@functools.cache
def _plain(
  task: testbed.Regression,
  optimizer: str,
  members: Sequence[int],
  factor: float = 1.0,
) -> list[np.ndarray]:
  """Plain Keras on a group's concatenated batch."""
  plain = testbed.OPTIMIZERS[optimizer]()
  return testbed.train_plain(task, members, plain, factor)


def _check(
  variables: Held,
  grouping: str,
  expected: Callable[[Sequence[int]], list[np.ndarray]],
  exact: bool,
) -> None:
  """Every replica holds what its group was to learn; members bitwise."""
  groups = testbed.groups_of(testbed.GROUPINGS[grouping])
  for members in groups:
    for held, value in zip(variables, expected(members), strict=True):
      assert len(held) == testbed.REPLICAS > 1
      for replica in members:
        assert (held[replica] == held[members[0]]).all()
        if exact:
          np.testing.assert_array_equal(held[replica], value)
        testbed.assert_close(held[replica], value, f"replica {replica}")
  if groups.num_groups > 1:
    held = variables[0]
    first, second = groups.assignment[0][0], groups.assignment[1][0]
    assert (held[first] != held[second]).any(), "groups did not differ"


@pytest.mark.parametrize(
  ("grouping", "reduction", "optimizer", "way", "mode"),
  _cells(WAYS, ("eager", "function")),
)
def test_against_plain_keras_on_the_groups_batch(
  grouping: str, reduction: str, optimizer: str, way: str, mode: str
) -> None:
  variables = _train(_task(), optimizer, grouping, reduction, way, mode)

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    factor = 1.0 if reduction == "mean" else float(len(members))
    return _plain(_task(), optimizer, members, factor)

  _check(variables, grouping, expected, exact=optimizer == "SGD")


@pytest.mark.parametrize("optimizer", testbed.OPTIMIZERS)
@pytest.mark.parametrize("grouping", ["ungrouped", "strided"])
def test_every_optimizer(optimizer: str, grouping: str) -> None:
  if testbed.IS_TF_KERAS and optimizer == "Nadam":
    pytest.skip("tf_keras' own Nadam is wrong in functions; see below")
  variables = _train(
    _task(), optimizer, grouping, "mean", "custom_loop", "function"
  )

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    return _plain(_task(), optimizer, members)

  _check(variables, grouping, expected, exact=False)


@pytest.mark.skipif(not testbed.IS_TF_KERAS, reason="tf_keras only")
def test_nadam_of_tf_keras_is_wrong_in_functions() -> None:
  """It counts in Python how often it was traced, so that nobody equals it."""

  def train(in_function: bool) -> list[np.ndarray]:
    variables = testbed.Regression().variables()
    plain = testbed.OPTIMIZERS["Nadam"]()
    plain.build(variables)

    def step(grad: tf.Tensor) -> None:
      plain.apply_gradients([(grad * tf.ones_like(v), v) for v in variables])

    run = tf.function(step) if in_function else step
    for grad in (1.0, 3.0, -2.0):
      run(tf.constant(grad))
    return [v.numpy() for v in variables]

  eagerly, traced = train(False), train(True)
  furthest = max(
    float(np.abs(a - b).max()) for a, b in zip(eagerly, traced, strict=True)
  )
  assert furthest > 1e-4


@pytest.mark.parametrize("update", ["SGD", "Momentum", "Adam"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("grouping", testbed.GROUPINGS)
def test_against_the_oracle(grouping: str, reduction: str, update: str) -> None:
  task = _task()
  variables = _train(task, update, grouping, reduction, "minimize", "function")

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    return oracle.train(
      task.x, task.y, task.initial, members, reduction, update
    )

  exact = update in ("SGD", "Momentum")
  _check(variables, grouping, expected, exact=exact)


@pytest.mark.parametrize("update", ["SGD", "Momentum", "Adam"])
def test_the_oracle_is_right(update: str) -> None:
  task = testbed.Regression(seed=3)
  plain = testbed.train_plain(task, [0, 2], testbed.OPTIMIZERS[update]())
  by_hand = oracle.train(task.x, task.y, task.initial, [0, 2], "mean", update)
  for actual, expected in zip(plain, by_hand, strict=True):
    testbed.assert_close(actual, expected, update)


@pytest.mark.parametrize("averaged_over", ["replica", "global"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("grouping", ["ungrouped", "contiguous", "strided"])
def test_loss_averaged_over(
  grouping: str, reduction: str, averaged_over: str
) -> None:
  """Each cell of the table of factors, chosen by the keyword."""
  task = _task(seed=5)
  # `minimize(callable)` hands in a mean over the replica's own examples. Said
  # to be one over all replicas' examples, it counts num_replicas times.
  variables = _train(
    task,
    "SGD",
    grouping,
    reduction,
    "minimize",
    "function",
    loss_averaged_over=averaged_over,
  )

  def expected(members: Sequence[int]) -> list[np.ndarray]:
    factor = 1.0 if reduction == "mean" else float(len(members))
    if averaged_over == "global":
      factor *= testbed.REPLICAS
    return _plain(task, "SGD", members, factor)

  _check(variables, grouping, expected, exact=True)


STEPS, SHARE = 3, 2  # of `fit`; the share is a replica's, of a batch


def _model(seed: int = 1) -> Any:
  """A network with a nonlinearity; the same weights for the same seed."""
  tf.keras.utils.set_random_seed(seed)
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input((3,)),
      layers.Dense(4, activation="tanh"),
      layers.Dense(2),
    ]
  )


def _dataset(members: Sequence[int]) -> tf.data.Dataset:
  """These replicas' examples, a batch of all of them per step, in order."""
  rng = np.random.default_rng(0)
  shape = (STEPS, testbed.REPLICAS, SHARE)
  x, y = (rng.normal(size=(*shape, n)).astype("float32") for n in (3, 2))
  rows = list(members)
  arrays = x[:, rows].reshape(-1, 3), y[:, rows].reshape(-1, 2)
  data = tf.data.Dataset.from_tensor_slices(arrays).batch(len(rows) * SHARE)
  # Without an end no replica has to ask, in what is traced, if it has data.
  return data.repeat()


@functools.cache
def _twin(
  optimizer: str, members: Sequence[int], factor: float
) -> list[np.ndarray]:
  """What plain Keras' `fit` makes of a group's examples, without a strategy."""
  twin = _model()
  # A sum of k replicas' means is k times the mean of all their examples.
  twin.compile(testbed.OPTIMIZERS[optimizer](), "mse", loss_weights=[factor])
  twin.fit(_dataset(members), steps_per_epoch=STEPS, verbose=0)
  return [variable.numpy() for variable in twin.trainable_variables]


@pytest.mark.parametrize(
  ("grouping", "reduction", "optimizer", "run_eagerly"),
  _cells((False, True)),
)
def test_fit(
  grouping: str, reduction: str, optimizer: str, run_eagerly: bool
) -> None:
  """`model.fit`: MirroredStrategy cuts each batch into replicas' parts."""
  strategy = testbed.mirrored()
  with strategy.scope():
    model = _model()
    model.compile(
      CrossShardOptimizer(
        testbed.OPTIMIZERS[optimizer](),
        reduction,
        group_assignment=testbed.GROUPINGS[grouping],
      ),
      "mse",
      run_eagerly=run_eagerly,
    )
  data = _dataset(range(testbed.REPLICAS))
  model.fit(data, steps_per_epoch=STEPS, verbose=0)
  groups = testbed.groups_of(testbed.GROUPINGS[grouping])
  for members in groups:
    factor = 1.0 if reduction == "mean" else float(groups.group_size)
    for mine, theirs in zip(
      model.trainable_variables,
      _twin(optimizer, members, factor),
      strict=True,
    ):
      held = testbed.copies(mine)
      for replica in members:
        assert (held[replica] == held[members[0]]).all()
        testbed.assert_close(held[replica], theirs, f"{replica}")


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
