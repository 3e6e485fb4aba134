"""`check_loss` accepts the right setting, names it, and changes nothing."""

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed
from tf_cross_shard import keras3
from tf_cross_shard import tf_keras as ours_tf_keras

LIBRARIES = [(keras, keras3), (tf_keras, ours_tf_keras)]
_dice = np.random.default_rng(3)
X = _dice.integers(-3, 4, (16, 3)).astype("float32")
Y = _dice.integers(-3, 4, (16, 1)).astype("float32")


class Loop:
  """A loop with a tape, whose loss is an average of a given kind."""

  def __init__(
    self,
    library: Any,
    package: Any,
    loss: str,
    scale: bool,
    *,
    has_state: bool = False,
    **options: Any,
  ) -> None:
    with testbed.mirrored().scope():
      normalization = library.layers.BatchNormalization(momentum=0.5)
      self.model = library.Sequential(
        [*([normalization] if has_state else []), library.layers.Dense(1)]
      )
      self.model.build((None, 3))
      self.optimizer = package.CrossShardOptimizer("adam", **options)
      self.optimizer.build(self.model.trainable_variables)
      self.metric = library.metrics.Mean()
    self._loss = loss
    self._scale = scale
    self._square = library.losses.MeanSquaredError(
      reduction="sum_over_batch_size" if library is keras else "none"
    )
    self._is_keras3 = library is keras

  def step(self, x: Any, y: Any) -> None:
    variables = self.model.trainable_variables
    with tf.GradientTape() as tape:
      # In inference, the whole batch is normalized like its parts.
      prediction = self.model(x, training=False)
      self.model(x, training=True)  # Changes the moving averages.
      loss = self._compute(y, prediction)
      self.metric.update_state(loss)
      if self._scale:
        loss = self.optimizer.scale_loss(loss)
    grads = tape.gradient(loss, variables)
    self.optimizer.apply_gradients(zip(grads, variables, strict=True))

  def _compute(self, y: Any, prediction: Any) -> Any:
    if self._loss == "replica":
      return tf.reduce_mean((y - prediction) ** 2)
    if self._loss == "other":
      return tf.reduce_mean((y - prediction) ** 2) / y.shape[0] ** 0.5
    if self._is_keras3:
      return self._square(y, prediction)
    return tf.nn.compute_average_loss(
      self._square(y, prediction), global_batch_size=len(X)
    )

  def state(self) -> list[Any]:
    variables = [
      *self.model.variables,
      *self.optimizer.variables,
      *self.metric.variables,
    ]
    return [copy.tolist() for v in variables for copy in testbed.copies(v)]


@pytest.mark.parametrize(
  ("library", "package", "grouping", "loss"),
  [
    (*LIBRARIES[0], "strided", "replica"),
    (*LIBRARIES[0], "singletons", "global"),
    (*LIBRARIES[1], "ungrouped", "replica"),
    (*LIBRARIES[1], "strided", "global"),
  ],
)
def test_the_right_setting_is_accepted_and_another_refused(
  library: Any, package: Any, grouping: str, loss: str
) -> None:
  groups = testbed.GROUPINGS[grouping]
  for chosen in ("replica", "global"):
    loop = Loop(
      library,
      package,
      loss,
      True,
      has_state=True,
      loss_averaged_over=chosen,
      group_assignment=groups,
    )
    before = loop.state()
    if chosen == loss:
      assert loop.optimizer.check_loss(loop.step, (X, Y)) == loss
    else:
      ratio = "4" if loss == "replica" else "0.25"
      expected = rf'is {ratio} times .* Pass loss_averaged_over="{loss}"\.'
      with pytest.raises(ValueError, match=expected):
        loop.optimizer.check_loss(tf.function(loop.step), (X, Y))
    assert loop.state() == before


@pytest.mark.parametrize(
  ("loss", "options", "words"),
  [
    ("replica", {}, 'loss_averaged_over="replica", and call scale_loss'),
    ("global", {}, None),
    ("replica", {"scale_gradients": True}, 'averaged_over="replica"\\.'),
    ("other", {}, "which neither value"),
  ],
)
def test_a_loss_that_was_never_scaled(
  loss: str, options: dict[str, Any], words: str | None
) -> None:
  loop = Loop(keras, keras3, loss, False, **options)
  if words is None:
    assert loop.optimizer.check_loss(loop.step, (X, Y)) == "global"
    return
  with pytest.raises(ValueError, match=words):
    loop.optimizer.check_loss(loop.step, (X, Y))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_minimize_of_a_function(reduction: str) -> None:
  with testbed.mirrored().scope():
    weight = tf.Variable([1.0, 2.0, 3.0])
    optimizer = keras3.CrossShardOptimizer(
      "sgd", reduction, group_assignment=testbed.GROUPINGS["contiguous"]
    )
    optimizer.build([weight])

  def step(x: Any) -> None:
    optimizer.minimize(lambda: tf.reduce_mean(x * weight), var_list=[weight])

  assert optimizer.check_loss(step, X) == "replica"
  # Training goes on as if nothing had been tried.
  assert testbed.copies(weight)[3].tolist() == [1.0, 2.0, 3.0]
  testbed.run(lambda: step(X))
  assert testbed.copies(weight)[3].tolist() != [1.0, 2.0, 3.0]


@pytest.mark.parametrize("fails", [False, True])
def test_variables_that_the_step_changes_are_restored(fails: bool) -> None:
  strategy = testbed.mirrored()
  with strategy.scope():
    weight = tf.Variable([1.0, 2.0, 3.0])
    count = tf.Variable(0, trainable=False)
    state = tf.Variable(
      1.0,
      trainable=False,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
    )
    optimizer = keras3.CrossShardOptimizer("sgd")
    optimizer.build([weight])
  for replica, copy in enumerate(strategy.experimental_local_results(state)):
    copy.assign(float(replica))
  dataset = iter(tf.data.Dataset.from_tensors(1.0).repeat())
  table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)

  @tf.function(jit_compile=True)
  def compiled(x: Any) -> Any:
    count.assign_add(1, read_value=False)
    state.assign_add(tf.reduce_max(x))
    weight.assign(weight * 2.0)
    return tf.reduce_mean(x * weight)

  def loss(x: Any) -> Any:
    value = compiled(x * next(dataset) * table.lookup(tf.constant(0, tf.int64)))
    one = tf.cast(tf.math.is_finite(value), tf.float32)
    return value * tf.debugging.check_numerics(one / (not fails), "a fault")

  def step(x: Any) -> None:
    optimizer.minimize(lambda: loss(x), var_list=[weight])

  if fails:
    with pytest.raises(tf.errors.InvalidArgumentError, match="a fault"):
      optimizer.check_loss(step, X)
  else:
    assert optimizer.check_loss(step, X) == "replica"
  copies = [testbed.copies(v) for v in (weight, count, state)]
  assert np.array_equal(copies[0], [[1.0, 2.0, 3.0]] * 4)
  assert np.array_equal(copies[1], [0] * 4)
  assert np.array_equal(copies[2], [0.0, 1.0, 2.0, 3.0])


def test_one_replica_needs_no_check() -> None:
  def step(x: Any) -> None:
    raise AssertionError(x)

  assert keras3.CrossShardOptimizer("sgd").check_loss(step, X) == "replica"


@pytest.mark.parametrize(
  ("step", "rows", "words"),
  [
    (lambda _: None, 16, "`step` must apply gradients"),
    (lambda _: None, 15, "`batch` must have rows for 4 replicas"),
  ],
)
def test_bad_arguments(step: Callable[..., Any], rows: int, words: str) -> None:
  with testbed.mirrored().scope():
    optimizer = keras3.CrossShardOptimizer("sgd")
  with pytest.raises(ValueError, match=re.escape(words)):
    optimizer.check_loss(step, X[:rows])


def test_a_distributed_batch() -> None:
  strategy = testbed.mirrored()
  data = tf.data.Dataset.from_tensors(X)
  [batch] = strategy.experimental_distribute_dataset(data)
  with strategy.scope():
    optimizer = keras3.CrossShardOptimizer("sgd")
  with pytest.raises(ValueError, match=r"`batch` .*is distributed already"):
    optimizer.check_loss(lambda _: None, batch)
