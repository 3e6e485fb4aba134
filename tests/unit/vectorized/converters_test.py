"""Operations on variables, control flow and random numbers, by replica.

Each test compares the replicas with calls of the same function on variables
without a strategy.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import VectorizedStrategy
from tf_cross_shard._src.core.gradients import row_sparse

N = 3
VALUES = [-1.5, 0.25, 2.0]
TABLE = np.arange(8, dtype=np.float32).reshape(4, 2)

Step = Callable[[Any, tf.Tensor], Any]


def _compare(
  step: Step,
  initial: Any = TABLE,
  jit: bool | None = None,
  rtol: float = 1e-6,
  alone: Step | None = None,
) -> None:
  """Compares results and variables with separate calls, of `alone` if given."""
  strategy = VectorizedStrategy(N)
  with strategy.scope():
    variable = tf.Variable(initial)
  given = testbed.per_replica(strategy, VALUES)

  def run(x: Any) -> Any:
    return strategy.run(lambda x: step(variable, x), (x,))

  result = tf.function(run, jit_compile=jit)(given)
  plain = tf.Variable(initial)
  alone = alone or tf.function(step)
  for i, value in enumerate(VALUES):
    plain.assign(initial)
    expected = alone(plain, tf.constant(value))
    np.testing.assert_allclose(testbed.copies(variable)[i], plain, rtol=rtol)
    if expected is not None:
      own = strategy.experimental_local_results(result)[i]
      np.testing.assert_allclose(own, expected, rtol=rtol)


def _index(x: tf.Tensor) -> tf.Tensor:
  """Returns 0 for the first two values and 2 for the third."""
  return tf.cast(tf.maximum(x, 0.0), tf.int32)


def _slices(x: tf.Tensor) -> tf.IndexedSlices:
  return tf.IndexedSlices([[x, 1.0], [2.0, x]], [_index(x), 3])


def _assign_row(variable: Any, x: tf.Tensor) -> None:
  variable[1].assign([x, 7.0])


ON_VARIABLES: dict[str, Step] = {
  "assign": lambda v, x: v.assign(v * x),
  "add": lambda v, x: v.assign_add(tf.fill([4, 2], x)),
  "sub": lambda v, x: v.assign_sub(tf.fill([4, 2], x)),
  "gather": lambda v, x: v.sparse_read([_index(x), 1]),
  "gather same": lambda v, x: v.sparse_read([1, 0]) + x,
  "gather_nd": lambda v, x: v.gather_nd([[_index(x), 1]]),
  "scatter add": lambda v, x: v.scatter_add(_slices(x)),
  "scatter sub": lambda v, x: v.scatter_sub(_slices(x)),
  "scatter update": lambda v, x: v.scatter_update(_slices(x)),
  "scatter max": lambda v, x: v.scatter_max(_slices(x)),
  "scatter_nd": lambda v, x: v.scatter_nd_add([[_index(x), 0]], [x]),
  "row": _assign_row,
  "shape": lambda v, x: tf.cast(tf.shape(v), tf.float32) * x,
}


@pytest.mark.parametrize("name", ON_VARIABLES)
@pytest.mark.parametrize("where", ["outside", "branch", "compiled"])
def test_operations_on_variables(name: str, where: str) -> None:
  """In a branch, only replicas with positive values take part."""
  operate = ON_VARIABLES[name]
  if where == "compiled" and name == "scatter max":
    pytest.skip("XLA has no ResourceScatterNdMax.")

  def step(variable: Any, x: tf.Tensor) -> Any:
    if where != "branch":
      result = operate(variable, x)
      return None if result is None else tf.convert_to_tensor(result)
    return tf.cond(
      x > 0.0,
      lambda: (operate(variable, x), tf.constant(1.0))[1],
      lambda: tf.constant(2.0),
    )

  _compare(step, jit=True if where == "compiled" else None)


def _nested(variable: Any, x: tf.Tensor) -> tf.Tensor:
  def positive() -> tf.Tensor:
    variable.assign_add(tf.ones([4, 2]))
    return tf.cond(
      x > 1.0,
      lambda: tf.reduce_sum(variable.assign_add(tf.ones([4, 2]))),
      lambda: tf.reduce_sum(variable) * 2.0,
    )

  return tf.cond(x > 0.0, positive, lambda: x)


def _add_one(variable: Any) -> tf.Tensor:
  return tf.identity(variable.assign_add(tf.ones([4, 2])))


def _branch_after_assertion(variable: Any, x: tf.Tensor) -> tf.Tensor:
  def positive() -> tf.Tensor:
    tf.debugging.assert_positive(x)
    return tf.cond(x > 1.0, lambda: _add_one(variable), lambda: variable * 1.0)

  return tf.cond(x > 0.0, positive, lambda: variable * 2.0)


def _assertion_in_branch(variable: Any, x: tf.Tensor) -> tf.Tensor:
  def small() -> tf.Tensor:
    return tf.cond(
      x > 0.0,
      lambda: (tf.debugging.assert_positive(x), _add_one(variable))[1],
      lambda: _add_one(variable) * x,
    )

  return tf.cond(x < 1.0, small, lambda: variable * 1.0)


def _gradient_after_assertion(variable: Any, x: tf.Tensor) -> tf.Tensor:
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.cond(
      x > 0.0,
      lambda: (tf.debugging.assert_positive(x), tf.tanh(variable * x))[1],
      lambda: variable * x,
    )
  return tape.gradient(y, x)


CONTROL_FLOW: dict[str, Step] = {
  "branch after an assertion": _branch_after_assertion,
  "assertion in a branch": _assertion_in_branch,
  "gradient after an assertion": _gradient_after_assertion,
  "powers": lambda v, x: (x * v)[..., tf.newaxis] ** [[[0.0, 1.0, 2.0]]],
  "nested branches": _nested,
  "an assertion": lambda v, x: tf.cond(
    x > 0.0,
    lambda: (tf.debugging.assert_positive(x), v.assign_add(v))[1] * 1.0,
    lambda: v * 3.0,
  ),
}


@pytest.mark.parametrize("jit", [None, True])
def test_the_counter_of_a_generator_carries(jit: bool | None) -> None:
  """Its low word is 5 below the end, and each number counts 256."""

  def step(state: Any, x: tf.Tensor) -> tf.Tensor:
    arguments = {
      "resource": state.handle,
      "alg": 1,
      "delta": tf.cast(tf.abs(x) * 4.0, tf.uint64),
    }
    # The second call sees what the first one has changed.
    return tf.stack([tf.raw_ops.RngReadAndSkip(**arguments) for _ in range(2)])

  _compare(step, initial=np.array([-5, 7, 11]), jit=jit, rtol=0)


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow(name: str) -> None:
  _compare(CONTROL_FLOW[name])


def test_replicas_add_up_different_numbers_of_rows() -> None:
  def step(_: Any, x: tf.Tensor) -> tf.Tensor:
    rows = tf.IndexedSlices([[x], [1.0]], [_index(x), 0])
    merged = row_sparse.merge_duplicates(rows)
    return tf.math.unsorted_segment_sum(merged.values**2, merged.indices, 4)

  _compare(step)


def test_gradients_of_branches() -> None:
  """Branches keep different tensors, which their gradients read."""

  def step(variable: Any, x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = tf.cond(
        x > 0.0,
        lambda: tf.reduce_sum(tf.tanh(variable * x)) * x,
        lambda: tf.reduce_sum(tf.sin(variable[0] * x) * tf.exp(variable[1])),
      )
    return tape.gradient(y, x)

  _compare(step, rtol=1e-5)


def test_a_variable_from_outside_in_a_branch() -> None:
  strategy, shared = VectorizedStrategy(N), tf.Variable(0.0)

  def step(x: tf.Tensor) -> None:
    tf.cond(x > 0.0, lambda: shared.assign_add(1.0), lambda: shared * 1.0)

  with pytest.raises(NotImplementedError, match=r"in a conditional that repl"):
    strategy.run(step, (testbed.per_replica(strategy, VALUES),))


def _gradient_of_nested(variable: Any, x: tf.Tensor) -> tf.Tensor:
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.cond(
      x > 0.0,
      lambda: tf.cond(x > 1.0, lambda: tf.tanh(x), lambda: tf.sin(x)),
      lambda: x * x,
    )
  return tape.gradient(y, x)


@pytest.mark.parametrize("jit", [None, True])
def test_gradients_of_nested_branches(jit: bool | None) -> None:
  _compare(_gradient_of_nested, jit=jit)


def test_a_choice_between_lists() -> None:
  def step(variable: Any, x: tf.Tensor) -> tf.Tensor:
    array = tf.TensorArray(tf.float32, 1)
    array = tf.cond(
      x > 0.0, lambda: array.write(0, x), lambda: array.write(0, 2.0 * x)
    )
    return array.read(0)

  with pytest.raises(NotImplementedError, match=r"chooses between lists"):
    _compare(step)


class TestRandomNumbers:
  def _draw(self, draw: Callable[[], tf.Tensor]) -> list[Any]:
    strategy = VectorizedStrategy(N)
    result = strategy.run(draw)
    return testbed.per_replica_results(strategy, result)

  def test_each_replica_draws_its_own(self) -> None:
    for draw in (
      lambda: tf.random.normal([]),
      lambda: tf.random.uniform([], seed=3),
      lambda: tf.nn.dropout(tf.ones([64]), 0.5),
    ):
      assert len({str(own) for own in self._draw(draw)}) == N

  def test_the_same_seed_gives_the_same_numbers(self) -> None:
    numbers = self._draw(lambda: tf.random.stateless_normal([2], [1, 2]))
    plain = tf.random.stateless_normal([2], [1, 2]).numpy().tolist()
    assert numbers == [plain] * N

  def test_seeds_of_replicas(self) -> None:
    def draw() -> tf.Tensor:
      seed = tf.stack([testbed.replica_id(), 5])
      return tf.random.stateless_uniform([2], seed)

    expected = [
      tf.random.stateless_uniform([2], [i, 5]).numpy().tolist()
      for i in range(N)
    ]
    assert self._draw(draw) == expected


_EXPLICIT = [[0, 0], [1, 2], [0, 1], [0, 0]]


@pytest.mark.parametrize(
  ("channels", "dtype", "padding", "same_batch", "jit"),
  [
    (2, "float32", "SAME", False, False),
    (2, "float32", "SAME", True, True),
    (1, "float32", "SAME", False, True),  # of four: two groups
    (1, "float32", "SAME", True, False),
    (2, "float64", "VALID", False, False),
    (2, "float32", _EXPLICIT, True, False),
    (2, "float32", _EXPLICIT, False, True),
  ],
)
def test_convolutions(
  channels: int, dtype: str, padding: Any, same_batch: bool, jit: bool
) -> None:
  """Exact, since all numbers are multiples of small powers of two."""
  images = (np.arange(4 * 6 * 6 * 2) % 5 - 2.0).reshape(4, 6, 6, 2)

  def step(filters: Any, x: tf.Tensor) -> tf.Tensor:
    x = tf.cast(x, dtype)
    filters.assign(filters * x)
    batch = tf.constant(images, dtype)
    if not same_batch:
      batch *= x
    with tf.GradientTape() as tape:
      tape.watch(batch)
      out = tf.nn.conv2d(batch, filters, [1, 2], padding, dilations=1)
      loss = tf.reduce_sum(out * out)
    of_batch, of_filters = tape.gradient(loss, [batch, filters])
    filters.assign(of_filters)
    return of_batch

  shape = 3, 2, channels, 4
  filters = (np.arange(24 * channels) % 7 - 3.0).reshape(shape).astype(dtype)
  # Without oneDNN, only XLA has gradients of grouped convolutions on CPUs.
  alone = tf.function(step, jit_compile=channels == 1)
  try:
    tf.function(step)(tf.Variable(filters), tf.constant(1.0))
  except tf.errors.InvalidArgumentError:
    if not jit:
      with pytest.raises(tf.errors.InvalidArgumentError, match="filter_size"):
        _compare(step, filters, rtol=0, alone=alone)
      return
  _compare(step, filters, jit=jit, rtol=0, alone=alone)


class TestSwitchCase:
  """Indices without a branch, here -5 and 10, choose the last branch."""

  @pytest.mark.parametrize(("same", "jit"), [(False, True), (True, False)])
  def test_assigns_and_differentiates(self, same: bool, jit: bool) -> None:
    def step(variable: Any, x: tf.Tensor) -> tf.Tensor:
      index = tf.constant(1) if same else tf.cast(x, tf.int32) * 5
      with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.switch_case(
          index,
          [
            lambda: tf.reduce_sum(variable.assign_add(variable)) * x,
            lambda: tf.reduce_sum(variable.assign(variable * x)),
            lambda: tf.reduce_sum(tf.sin(variable * x)) * x,
          ],
        )
      return tape.gradient(y, x)

    _compare(step, jit=jit, rtol=1e-5)


def test_the_loss_of_ctc() -> None:
  """It calls functions of TensorFlow 1."""
  logits = np.random.default_rng(0).normal(size=(6, 2, 4)).astype("f4")

  def step(variable: Any, x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      losses = tf.nn.ctc_loss(
        *([[1, 2], [2, 3]], variable * x, [2, 2], [6, 6]), blank_index=0
      )
    variable.assign(tape.gradient(losses, variable))
    return losses

  _compare(step, logits, rtol=1e-4)
  # What is not read may have a size that depends on the data.
  _compare(
    lambda v, x: tf.nn.ctc_greedy_decoder(v * x, [6, 6])[1], logits, rtol=1e-4
  )


class TestErrors:
  def test_sizes_that_depend_on_data(self) -> None:
    strategy = VectorizedStrategy(N)
    for numbers, sizes in ([1.0, 2.0, 3.0], [1, 1, 1]), (VALUES, [0, 1, 1]):
      given = testbed.per_replica(strategy, numbers)

      def count(x: tf.Tensor) -> tf.Tensor:
        return tf.size(tf.where(tf.reshape(x, [1]) > 0.0))

      run = tf.function(lambda x, f=count: strategy.run(f, (x,)))
      if len(set(sizes)) == 1:
        assert testbed.per_replica_results(strategy, run(given)) == sizes
      else:
        words = r"Where \(.* product with a mask.*converters_test\.py, line"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words) as info:
          strategy.run(count, (given,))
        # No traceback comes before the words that help.
        assert "File" not in str(info.value)

  def test_a_gradient_of_python_code(
    self, caplog: pytest.LogCaptureFixture
  ) -> None:
    """Names the operation and the line; the log has no pages of pfor's."""
    strategy = VectorizedStrategy(N)

    def step(x: tf.Tensor) -> Any:
      with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.py_function(lambda v: v * v, [x], tf.float32)
      return tape.gradient(y, x)

    with pytest.raises(NotImplementedError, match="py_function") as info:
      strategy.run(tf.function(step), (testbed.per_replica(strategy, VALUES),))
    assert "converters_test.py, line" in str(info.value)
    assert "pfor" not in caplog.text
