"""Bad input is refused with argument, value and remedy; good input passes."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core import variables as variables_lib


def tf_variable(value: Any = 1.0, **options: Any) -> tf.Variable:
  return tf.Variable(value, name="v", **options)


def keras_variable(value: Any = 1.0, **options: Any) -> tf.keras.Variable:
  return tf.keras.Variable(value, name="w", **options)


def words_of(error: type[Exception], call: Any, *args: Any) -> str:
  """Returns the message of an error, whose type must be exactly `error`."""
  with pytest.raises(error, match="`") as caught:
    call(*args)
  assert caught.type is error
  return str(caught.value)


# Tensors are made inside the tests, so that no device is used before.


def _tensor() -> tf.Tensor:
  return tf.constant(1.5)


def _made(value: Any) -> Any:
  """Returns a value, or what a function makes."""
  return value() if callable(value) else value


def test_variables_are_told_from_other_things() -> None:
  mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  with mirrored.scope():
    distributed = [tf_variable(), keras_variable()]
  for variable in (tf_variable(), keras_variable(), *distributed):
    assert variables_lib.is_variable(variable)
  for other in (tf.constant(1.0), np.ones(1), 1.0, "w", None, tf.Variable):
    assert not variables_lib.is_variable(other)


# Pairs.


def test_pairs_are_split_in_order() -> None:
  v, w = tf_variable(), keras_variable([1.0, 2.0])
  grads = [None, tf.constant([2.0, 3.0])]
  for pairs in (
    list(zip(grads, [v, w], strict=True)),
    iter([[None, v], (grads[1], w)]),
  ):
    found, variables = validation.check_pairs(pairs)
    assert all(a is b for a, b in zip(found, grads, strict=True))
    assert variables[0] is v
    assert variables[1] is w


@pytest.mark.parametrize(
  "gradient",
  [1.5, np.array(1.5, np.float32), _tensor, lambda: tf.Variable(1.5)],
)
def test_what_converts_to_a_tensor_is_a_gradient(gradient: Any) -> None:
  [grad], _ = validation.check_pairs([(_made(gradient), tf_variable())])
  assert tf.is_tensor(grad)
  assert float(grad) == 1.5


def test_shapes_known_only_when_the_program_runs_pass() -> None:
  table = tf_variable(tf.zeros([5, 2]))
  traced = []

  @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, 2])])
  def check(unknown: tf.Tensor, partly: tf.Tensor) -> None:
    slices = tf.IndexedSlices(partly, tf.constant([0]))
    grads, _ = validation.check_pairs(
      [(unknown, table), (partly, table), (slices, table)]
    )
    assert grads[2] is slices
    validation.check_scalar(unknown, seeded=False)
    traced.append(len(grads))

  check(tf.zeros([5, 2]), tf.zeros([1, 2]))
  assert traced == [3]


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
  (lambda: [(tf_variable(), _tensor())], TypeError, ["not its value"]),
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
  assert validation.check_var_list(None) is None
  assert validation.check_var_list(lambda: None) is None
  for form in ([v, w], iter([v, w]), lambda: [v, w], {1: v, 2: w}.values()):
    checked = validation.check_var_list(form) or []
    assert [id(x) for x in checked] == [id(v), id(w)]
  for one in (v, w):
    for form in (one, lambda one=one: one):
      [checked_one] = validation.check_var_list(form) or []
      assert checked_one is one


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


def test_integer_steps_are_accepted() -> None:
  for dtype in ("int32", "int64", "uint8"):
    validation.check_global_step(tf.Variable(0, dtype=dtype))
  validation.check_global_step(keras_variable(0, dtype="int64"))
  validation.check_global_step(None)
  with tf.Graph().as_default():
    validation.check_global_step(tf.compat.v1.train.create_global_step())


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
  check = {
    "grads_and_vars": validation.check_pairs,
    "var_list": validation.check_var_list,
    "global_step": validation.check_global_step,
  }[argument]
  text = words_of(error, check, value())
  for part in (f"`{argument}`", *words):
    assert part in text


def test_scalars_and_weighted_losses_pass() -> None:
  validation.check_scalar(tf.constant(1.0), seeded=False)
  validation.check_scalar(tf.constant([1.0, 2.0]), seeded=True)
  for shape in ([1], [0], [2, 3]):
    text = words_of(ValueError, validation.check_scalar, tf.zeros(shape), False)
    assert "`loss` must be a scalar" in text
    assert f"got shape {tuple(shape)}" in text
    assert "tf.reduce_mean(loss)" in text


def test_an_unknown_variable_is_refused_by_name() -> None:
  v, w = tf_variable(), keras_variable()
  validation.check_known([v, w], lambda variable: True)
  for known, unknown, name in ((v, w, "w"), (w, v, "v")):
    text = words_of(
      ValueError,
      validation.check_known,
      [known, unknown],
      lambda variable, known=known: variable is known,
    )
    assert f"`grads_and_vars` holds {name}, which is not among" in text


def test_integers_of_python_and_numpy_are_accepted() -> None:
  for value in (2, np.int64(2), np.uint8(2)):
    found = validation.check_integer("every", value, "Pass 2.")
    assert (found, type(found)) == (2, int)
  for value in (True, np.bool_(True), 2.0, np.float32(2.0), "2", None, 0):
    with pytest.raises(ValueError, match=r"`every` must .* got .*\. Pass 2\."):
      validation.check_integer("every", value, "Pass 2.")
