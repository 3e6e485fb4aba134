"""Bad input is refused with argument, value and remedy; good input passes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard import CrossShardOptimizer, callbacks


def tf_variable(value: Any = 1.0, **options: Any) -> tf.Variable:
  return tf.Variable(value, name="v", **options)


def keras_variable(value: Any = 1.0, **options: Any) -> tf.keras.Variable:
  return tf.keras.Variable(value, name="w", **options)


def make() -> Any:
  """Returns an optimizer that subtracts gradients."""
  return CrossShardOptimizer(tf.keras.optimizers.SGD(1.0), "sum")


def words_of(error: type[Exception], call: Callable[[], Any]) -> str:
  """Returns the message of an error, whose type must be exactly `error`."""
  with pytest.raises(error, match="`") as caught:
    call()
  assert caught.type is error
  return str(caught.value)


# Tensors are made inside the tests, so that no device is used before.


def _tensor() -> tf.Tensor:
  return tf.constant(1.5)


# Pairs.


@pytest.mark.parametrize("form", [list, iter, lambda pairs: map(list, pairs)])
def test_pairs_are_taken_in_order(form: Any) -> None:
  v, w = tf_variable(), keras_variable([1.0, 2.0])
  pairs = [(None, v), (tf.constant([2.0, 3.0]), w)]
  make().apply_gradients(form(pairs))
  assert float(v) == 1.0
  assert w.numpy().tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
  "gradient",
  [
    lambda: 1.5,
    lambda: np.array(1.5, np.float32),
    _tensor,
    lambda: tf.Variable(1.5),
  ],
)
def test_what_converts_to_a_tensor_is_a_gradient(gradient: Any) -> None:
  weight = tf_variable()
  make().apply_gradients([(gradient(), weight)])
  assert float(weight) == -0.5


def test_shapes_known_only_when_the_program_runs_pass() -> None:
  tables = [tf_variable(tf.zeros([5, 2])) for _ in range(3)]
  optimizer = make()
  optimizer.build(tables)

  @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, 2])])
  def step(unknown: tf.Tensor, partly: tf.Tensor) -> None:
    slices = tf.IndexedSlices(partly[:1], tf.constant([0]), [5, 2])
    pairs = zip([unknown, partly, slices], tables, strict=True)
    optimizer.apply_gradients(pairs)

  step(tf.ones([5, 2]), tf.ones([5, 2]))
  assert [float(tf.reduce_sum(table)) for table in tables] == [-10, -10, -2]


def _reference_variable() -> Any:
  """Returns a reference variable of TensorFlow 1, which Keras does not know."""
  with tf.Graph().as_default():
    return tf.compat.v1.get_variable("x", initializer=1.0, use_resource=False)


def _rows(*shape: int) -> tf.IndexedSlices:
  return tf.IndexedSlices(tf.ones(shape), tf.range(shape[0]))


BAD_PAIRS: list[Any] = [
  (lambda: [], ValueError, ["at least one (gradient, variable) pair"]),
  (lambda: [1.0], ValueError, ["pairs; got 1.0", "zip(grads, variables)"]),
  (lambda: [(1.0, 2.0, 3.0)], ValueError, ["got (1.0, 2.0, 3.0)"]),
  (lambda: None, TypeError, ["None"]),
  (
    # Keras' own words, which people search for.
    lambda: [(None, tf_variable())],
    ValueError,
    ["not None", "No gradients provided for any variable: ['v']"],
  ),
  (lambda: [(1.0, 2.0)], TypeError, ["tf.Variable or keras.Variable", "2.0"]),
  (lambda: [(1.0, _tensor())], TypeError, ["not its value"]),
  (
    lambda: [(tf_variable(), _tensor())],
    TypeError,
    ["begins with the variable v", "zip(grads, variables)"],
  ),
  (lambda: [(1.0, _reference_variable())], TypeError, ["use_resource=True"]),
  (
    lambda: [(tf.zeros([3]), tf_variable([1.0, 2.0]))],
    ValueError,
    ["gradient of v has shape (3,)", "(2,)"],
  ),
  (
    lambda: [(_rows(3, 4), tf_variable(tf.zeros([5, 2])))],
    ValueError,
    ["gradient of v has shape (None, 4)", "(5, 2)"],
  ),
  (lambda: [(tf.constant([1, 2]), tf_variable())], TypeError, ["floating"]),
]


# Lists of variables.


def test_accepted_forms_of_var_list() -> None:
  v, w = tf_variable(), keras_variable()
  for form in (
    *([v, w], iter([v, w]), lambda: [v, w], {1: v, 2: w}.values()),
    *(v, lambda: w),
  ):
    found = [
      id(variable)
      for _, variable in make().compute_gradients(lambda: v * w, form)
    ]
    is_one = form is v or (callable(form) and form() is w)
    assert found == ([id(v if form is v else w)] if is_one else [id(v), id(w)])
  [(grad, variable)] = make().compute_gradients(lambda: 2.0 * v)
  assert (float(grad), variable is v) == (2.0, True)


BAD_LISTS: list[Any] = [
  (lambda: [], ValueError, ["at least one variable", "None"]),
  (
    lambda: [tf_variable(), tf_variable(trainable=False)],
    ValueError,
    ["v has trainable=False"],
  ),
  (lambda: ["w"], TypeError, ["got 'w'", "not its value"]),
  (_tensor, TypeError, ["1.5"]),
]


# The global step, the loss, known variables.


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_integer_steps_are_accepted(dtype: str) -> None:
  weight, step = tf_variable(), tf.Variable(0, dtype=dtype)
  make().apply_gradients([(1.0, weight)], step)
  assert int(step) == 1


STEP = ["`global_step` must be an integer", "tf.Variable(0, dtype=tf.int64)"]
BAD_STEPS: list[Any] = [
  (lambda: tf.Variable(0.0), TypeError, [*STEP, "dtype=float32"]),
  (lambda: keras_variable(0.0), TypeError, [*STEP, "dtype=float32"]),
  (lambda: 0, TypeError, [*STEP, "got 0"]),
  (_tensor, TypeError, [*STEP, "got <tf.Tensor"]),
]


@pytest.mark.parametrize(
  ("argument", "value", "error", "words"),
  [
    *(("grads_and_vars", *case) for case in BAD_PAIRS),
    *(("var_list", *case) for case in BAD_LISTS),
    *(("global_step", *case) for case in BAD_STEPS),
  ],
)
def test_bad_arguments_are_refused(
  argument: str, value: Any, error: type[Exception], words: list[str]
) -> None:
  given, weight = value(), tf_variable()
  call = {
    "grads_and_vars": lambda: make().apply_gradients(given),
    "var_list": lambda: make().compute_gradients(lambda: weight * 1.0, given),
    "global_step": lambda: make().apply_gradients([(1.0, weight)], given),
  }[argument]
  text = words_of(error, call)
  for part in (f"`{argument}`", *words):
    assert part in text
  assert float(weight) == 1.0


def test_integers_of_python_and_numpy_are_accepted() -> None:
  for value in (2, np.int64(2), np.uint8(2)):
    callbacks.OuterOptimizer(every=value)
  for value in (True, np.bool_(True), 2.0, np.float32(2.0), "2", None, 0):
    with pytest.raises(ValueError, match=r"`every` must .* got "):
      callbacks.OuterOptimizer(every=value)
