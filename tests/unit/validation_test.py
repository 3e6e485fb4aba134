"""Bad input is refused by argument, value and remedy; good input passes."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard import validation


def variable_named(name: str, value: Any = 1.0, **options: Any) -> tf.Variable:
  return tf.Variable(value, name=name, **options)


def keras_variable(value: Any = 1.0, **options: Any) -> tf.keras.Variable:
  return tf.keras.Variable(value, name="weight", **options)


def words_of(error: type[Exception], call: Any, *args: Any) -> str:
  """The words of the error that a call raises, which is of just that type."""
  with pytest.raises(error, match="`") as caught:
    call(*args)
  assert caught.type is error
  return str(caught.value)


# is_variable.


def test_variables_are_told_from_other_things() -> None:
  mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  with mirrored.scope():
    distributed = [tf.Variable(1.0), keras_variable()]
  for variable in (tf.Variable(1.0), keras_variable(), *distributed):
    assert validation.is_variable(variable)
  for other in (tf.constant(1.0), np.ones(1), 1.0, "w", None, tf.Variable):
    assert not validation.is_variable(other)


# check_pairs.


def test_pairs_are_split_in_order() -> None:
  v, w = variable_named("v"), keras_variable([1.0, 2.0])
  grads, variables = validation.check_pairs(
    [(tf.constant(1.0), v), (tf.constant([2.0, 3.0]), w)]
  )
  assert [g.numpy().tolist() for g in grads] == [1.0, [2.0, 3.0]]
  assert variables[0] is v
  assert variables[1] is w


def test_any_iterable_of_any_pairs_will_do() -> None:
  v = variable_named("v")
  grad = tf.constant(1.0)
  for pairs in ([(grad, v)], ([grad, v],), zip([grad], [v], strict=True)):
    assert validation.check_pairs(pairs) == ([grad], [v])


# Tensors are made inside the tests: run as a program, this file is read before
# conftest.py has set the devices.


def _one_and_a_half() -> tf.Tensor:
  return tf.constant(1.5)


def _made(value: Any) -> Any:
  """What a parameter stands for: a function stands for what it makes."""
  return value() if callable(value) else value


@pytest.mark.parametrize(
  "gradient",
  [1.5, np.float32(1.5), np.array(1.5, np.float32), _one_and_a_half],
)
def test_what_converts_to_a_tensor_is_a_gradient(gradient: Any) -> None:
  pair = (_made(gradient), variable_named("v"))
  [grad], _ = validation.check_pairs([pair])
  assert tf.is_tensor(grad)
  assert float(grad) == 1.5


def test_a_variable_can_be_a_gradient() -> None:
  [grad], _ = validation.check_pairs([(tf.Variable(1.5), variable_named("v"))])
  assert float(grad) == 1.5


def test_none_passes_beside_a_gradient() -> None:
  v, w = variable_named("v"), variable_named("w")
  grads, variables = validation.check_pairs([(None, v), (1.0, w)])
  assert grads[0] is None
  assert float(grads[1]) == 1.0
  assert variables[0] is v
  assert variables[1] is w


def test_sparse_gradients_stay_what_they_are() -> None:
  table = variable_named("table", tf.zeros([5, 2]))
  slices = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, 4, 0]))
  [grad], _ = validation.check_pairs([(slices, table)])
  assert grad is slices
  [grad], _ = validation.check_pairs(
    [(slices, keras_variable(tf.zeros([5, 2])))]
  )
  assert grad is slices


def test_shapes_known_only_when_the_program_runs_pass() -> None:
  table = variable_named("table", tf.zeros([5, 2]))
  traced = []

  @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, 2])])
  def check(unknown: tf.Tensor, partly: tf.Tensor) -> None:
    slices = tf.IndexedSlices(partly, tf.constant([0]))
    grads, _ = validation.check_pairs(
      [(unknown, table), (partly, table), (slices, table)]
    )
    traced.append(len(grads))

  check(tf.zeros([5, 2]), tf.zeros([1, 2]))
  assert traced == [3]


@pytest.mark.parametrize("empty", [[], (), iter([]), {}])
def test_no_pairs_are_refused(empty: Any) -> None:
  text = words_of(ValueError, validation.check_pairs, empty)
  assert text == (
    "`grads_and_vars` must hold at least one (gradient, variable) pair; got"
    " []. Pass what compute_gradients() returned."
  )


@pytest.mark.parametrize(
  "item", [1.0, "gv", None, (1.0,), (1.0, 2.0, 3.0), {1: 2, 3: 4}]
)
def test_what_is_no_pair_is_refused(item: Any) -> None:
  text = words_of(ValueError, validation.check_pairs, [item])
  assert text == (
    "`grads_and_vars` must hold (gradient, variable) pairs; got"
    f" {item!r}. Use zip(grads, variables)."
  )


@pytest.mark.parametrize("value", [None, 3, 1.5])
def test_what_is_no_iterable_is_refused(value: Any) -> None:
  text = words_of(TypeError, validation.check_pairs, value)
  assert "`grads_and_vars`" in text
  assert repr(value) in text


def test_gradients_that_are_all_none_are_refused() -> None:
  v, w = variable_named("v"), keras_variable()
  text = words_of(ValueError, validation.check_pairs, [(None, v), (None, w)])
  assert "`grads_and_vars` must hold a gradient that is not None" in text
  # Keras' own words, which people search for.
  assert f"No gradients provided for any variable: ['v:0', '{w.path}']" in text
  assert "Compute the loss from the variables, inside the tape." in text


@pytest.mark.parametrize("other", [_one_and_a_half, 1.0, "w", None])
def test_what_is_no_variable_is_refused(other: Any) -> None:
  other = _made(other)
  for grad in (tf.constant(1.0), None):
    text = words_of(TypeError, validation.check_pairs, [(grad, other)])
    assert "`grads_and_vars` must hold tf.Variable or keras.Variable" in text
    assert f"got {other!r}." in text
    assert "Pass the variable itself, not its value." in text


def test_a_pair_the_wrong_way_round_is_refused() -> None:
  pair = (variable_named("v"), tf.constant(1.0))
  text = words_of(TypeError, validation.check_pairs, [pair])
  assert "Pass the variable itself" in text


@pytest.mark.parametrize(
  "gradient",
  [
    object(),
    {},
    lambda: tf.sparse.from_dense([1.0]),
    [[1.0], [2.0, 3.0]],
    "text",
    lambda: tf.constant([1, 2]),
    lambda: tf.constant(1j),
  ],
  ids=[
    "object",
    "dict",
    "SparseTensor",
    "ragged",
    "string",
    "integers",
    "complex",
  ],
)
def test_what_is_no_tensor_is_refused(gradient: Any) -> None:
  pair = (_made(gradient), variable_named("v"))
  text = words_of(TypeError, validation.check_pairs, [pair])
  assert text.startswith(
    "`grads_and_vars` must hold tensors of floating numbers, or of complex ones"
    " where the variable is complex; the gradient of v:0 is "
  )
  assert text.endswith(". Pass what a tape or compute_gradients() returned.")


def test_a_reference_variable_is_refused() -> None:
  """Version 1's kind, of which Keras knows nothing."""
  with tf.Graph().as_default():
    old = tf.compat.v1.get_variable("x", initializer=1.0, use_resource=False)
    pair = (tf.constant(1.0), old)
    text = words_of(TypeError, validation.check_pairs, [pair])
    assert "must hold resource variables; got <tf.Variable 'x:0'" in text
    assert "enable_resource_variables()" in text
    new = tf.compat.v1.get_variable("y", initializer=1.0, use_resource=True)
    validation.check_variable("var_list", new)


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
  table = variable_named("table", tf.zeros([2, 1]))
  rows = tf.IndexedSlices(tf.ones([2, 1]), [0, row])
  text = words_of(ValueError, validation.check_rows, rows, table)
  low, high = sorted((0, row))
  assert f"has 2, has the rows {low} to {high}. Look up" in text
  validation.check_rows(tf.IndexedSlices(tf.ones([2, 1]), [1, 0]), table)
  validation.check_rows(tf.IndexedSlices(tf.ones([0, 1]), []), table)


@pytest.mark.parametrize(
  ("gradient", "shape", "expected"),
  [
    ([3], "(3,)", "(2,)"),
    ([2, 1], "(2, 1)", "(2,)"),
    ([], "()", "(2,)"),
  ],
)
@pytest.mark.parametrize("make", [variable_named, keras_variable])
def test_another_shape_is_refused(
  gradient: list[int], shape: str, expected: str, make: Any
) -> None:
  if make is variable_named:
    variable = variable_named("v", tf.zeros([2]))
    name = "v:0"
  else:
    variable = keras_variable(tf.zeros([2]))
    name = variable.path
  pair = (tf.zeros(gradient), variable)
  text = words_of(ValueError, validation.check_pairs, [pair])
  assert "must hold gradients of their variables' shapes" in text
  assert f"the gradient of {name} has shape {shape}" in text
  assert f"the variable {expected}." in text
  assert "Pair each gradient with its own variable." in text


def test_rows_of_another_shape_are_refused() -> None:
  table = variable_named("table", tf.zeros([5, 2]))
  slices = tf.IndexedSlices(tf.ones([3, 4]), tf.constant([0, 4, 0]))
  text = words_of(ValueError, validation.check_pairs, [(slices, table)])
  assert (
    "the gradient of table:0 has shape (None, 4), the variable (5, 2)." in text
  )


def test_rows_of_a_variable_without_rows_are_refused() -> None:
  slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]))
  pairs = [(slices, variable_named("v"))]
  text = words_of(ValueError, validation.check_pairs, pairs)
  assert "the gradient of v:0 has" in text


# check_var_list.


def test_accepted_forms_of_var_list() -> None:
  v, w = variable_named("v"), keras_variable()
  assert validation.check_var_list(None) is None
  assert validation.check_var_list(lambda: None) is None
  for form in (
    [v, w],
    (v, w),
    iter([v, w]),
    lambda: [v, w],
    {"a": v, "b": w}.values(),
  ):
    checked = validation.check_var_list(form)
    assert checked is not None
    assert [id(x) for x in checked] == [id(v), id(w)]
  for one in (v, w):
    for form in (one, lambda one=one: one):
      [checked_one] = validation.check_var_list(form) or []
      assert checked_one is one


@pytest.mark.parametrize("empty", [[], (), lambda: []])
def test_an_empty_var_list_is_refused(empty: Any) -> None:
  assert words_of(ValueError, validation.check_var_list, empty) == (
    "`var_list` must hold at least one variable; got []. Leave it None to take"
    " every trainable variable that the loss touches."
  )


def test_a_variable_that_is_not_trainable_is_refused() -> None:
  frozen = variable_named("frozen", trainable=False)
  trained = variable_named("trained")
  text = words_of(ValueError, validation.check_var_list, [trained, frozen])
  assert text == (
    "`var_list` must hold trainable variables; frozen:0 has trainable=False."
    " Leave it out or make it trainable."
  )
  frozen = keras_variable(trainable=False)
  text = words_of(ValueError, validation.check_var_list, frozen)
  assert f"{frozen.path} has trainable=False" in text


@pytest.mark.parametrize("other", [_one_and_a_half, 1.0, "w", None])
def test_a_var_list_of_other_things_is_refused(other: Any) -> None:
  other = _made(other)
  text = words_of(TypeError, validation.check_var_list, [other])
  assert "`var_list` must hold tf.Variable or keras.Variable objects" in text
  assert f"got {other!r}." in text
  assert "Pass the variable itself, not its value." in text


@pytest.mark.parametrize("value", [3, _one_and_a_half], ids=["int", "tensor"])
def test_a_var_list_that_is_no_list_is_refused(value: Any) -> None:
  value = _made(value)
  text = words_of(TypeError, validation.check_var_list, value)
  assert "`var_list`" in text
  assert repr(value) in text


# check_global_step.


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_integer_steps_are_accepted(dtype: str) -> None:
  validation.check_global_step(tf.Variable(0, dtype=dtype))
  validation.check_global_step(keras_variable(0, dtype=dtype))
  validation.check_global_step(None)


def test_the_global_step_of_version_1_is_accepted() -> None:
  with tf.Graph().as_default():
    validation.check_global_step(tf.compat.v1.train.create_global_step())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool"])
def test_a_step_that_is_no_integer_is_refused(dtype: str) -> None:
  zero = tf.zeros([], dtype)
  for step in (tf.Variable(zero), keras_variable(zero, dtype=dtype)):
    assert words_of(TypeError, validation.check_global_step, step) == (
      f"`global_step` must be an integer variable; its dtype is {dtype}. Use"
      " tf.Variable(0, dtype=tf.int64), or `var_list=` for what is to be"
      " trained."
    )


@pytest.mark.parametrize("step", [0, "step", _one_and_a_half, [1, 2]])
def test_a_step_that_is_no_variable_is_refused(step: Any) -> None:
  step = _made(step)
  assert words_of(TypeError, validation.check_global_step, step) == (
    f"`global_step` must be an integer variable or None; got {step!r}. Use"
    " tf.Variable(0, dtype=tf.int64)."
  )


# check_scalar.


def test_scalars_and_weighted_losses_pass() -> None:
  validation.check_scalar(tf.constant(1.0), seeded=False)
  validation.check_scalar(tf.constant([1.0, 2.0]), seeded=True)
  traced = []

  @tf.function(input_signature=[tf.TensorSpec(None)])
  def check(loss: tf.Tensor) -> None:
    validation.check_scalar(loss, seeded=False)
    traced.append(loss.shape.rank)

  check(tf.constant(1.0))
  assert traced == [None]


@pytest.mark.parametrize("shape", [[1], [0], [2, 3]])
def test_a_loss_with_dimensions_is_refused(shape: list[int]) -> None:
  with pytest.raises(ValueError, match="`loss` must be a scalar") as error:
    validation.check_scalar(tf.zeros(shape), seeded=False)
  text = str(error.value)
  assert 'when `reduction` is "mean"' in text
  assert f"got shape {tuple(shape)}, whose" in text
  assert "whose gradient would be that of the sum" in text
  assert "Use tf.reduce_mean(loss), or pass `grad_loss`." in text


# check_known.


def test_known_variables_pass() -> None:
  asked = []

  def is_known(variable: Any) -> bool:
    asked.append(variable)
    return True

  v, w = variable_named("v"), variable_named("w")
  validation.check_known([v, w], is_known)
  assert [id(x) for x in asked] == [id(v), id(w)]
  validation.check_known([], lambda variable: False)


def test_an_unknown_variable_is_refused_by_name() -> None:
  v, w = variable_named("v"), keras_variable()
  for known, unknown, name in ((v, w, w.path), (w, v, "v:0")):
    text = words_of(
      ValueError,
      validation.check_known,
      [known, unknown],
      lambda variable, known=known: variable is known,
    )
    assert text == (
      f"Unknown variable: `grads_and_vars` holds {name}, which is not among the"
      " variables that the optimizer was built on. Call build() with all"
      " variables first, or make a new optimizer."
    )


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
