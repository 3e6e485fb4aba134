"""Trains the layers of Keras' own tests as three models, and compares.

    python -m tests.support.layer_conformance --all
    python -m tests.support.layer_conformance GRU Dense

Keras ships the tests of its layers, and most of them call `run_layer_test` with
a class, its arguments, and inputs. This module runs these tests with another
`run_layer_test`, which trains the layer for three steps in two ways: as three
models of one VectorizedStrategy, each with its learning rate, and in three fits
of plain Keras. Weights and random states must be equal afterwards.

    input * trainable scale -> layer -> trainable head -> bounded loss

The program prints a table with a row for each class of layers, then the first
line of each error, and why plain Keras cannot train the others.
"""

import argparse
import ast
import collections
import contextlib
import functools
import gc
import importlib
import os
import pathlib
import sys
import time
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from keras.src import testing, tree
from keras.src.testing import test_case

from tests.support import testbed
from tf_cross_shard import VectorizedStrategy, schedules

RATES = (0.1, 0.03, 0.01)
# For layers whose weights overflow with RATES.
SMALL_RATES = (1e-4, 3e-5, 1e-5)
STEPS = 3
# Longer axes of inputs, which only sounds have, are cut.
LONGEST = 2048
# If all weights move less than this in the fit with the largest learning rate,
# nothing is compared. It is ten times the absolute tolerance.
LEAST_MOVE = 1e-4
OUTCOMES = (
  *("equal", "different", "raised"),
  "random",  # Plain fits differ, too: stateful operations draw numbers.
  "rounding",  # Plain fits differ, too, if the last bits of weights change.
  "cannot train",
)
_LAYERS = pathlib.Path(keras.__file__).parent / "src" / "layers"
_NAME = "run_layer_test"
_HALF = ("float16", "bfloat16")


class Case(NamedTuple):
  """One call of `run_layer_test`: a layer, and how it is called."""

  layer: type[Any]
  settings: dict[str, Any]
  inputs: Any  # a structure of tensors
  call: dict[str, Any]  # further arguments of the call
  custom_objects: dict[str, Any]


class Result(NamedTuple):
  """What became of a case."""

  layer: str  # the name of the class
  test: str
  outcome: str  # one of OUTCOMES
  why: str = ""
  reaches_inputs: bool = False  # whether the scales of the inputs moved


class CannotTrainError(Exception):
  """Plain Keras cannot train the layer."""


class _Found(Exception):  # noqa: N818 - it ends a test, and is no error
  """Ends a test of Keras early: the layer that was looked for is compared."""


# ------------------------------------------------------------------- the model


class TrainedLayer(keras.Model):
  """Multiplies float inputs by trainable scales, and outputs by random numbers.

  Its output is its loss. The derivative of the loss by what the head adds up is
  at most 1, so that images of 255 and numbers of 0.1 train alike.
  """

  def __init__(self, case: Case) -> None:
    super().__init__(autocast=False)
    self._structure = case.inputs
    self._call_settings = case.call
    with keras.saving.custom_object_scope(case.custom_objects):
      self.layer = case.layer(**_fresh(case.settings))
    leaves = _leaves(case.inputs)
    self.scales = {
      str(i): self.add_weight(
        shape=leaf.shape[-1:] if leaf.shape.rank > 1 else (),
        # At most 1: some layers take float inputs for indices.
        initializer=keras.initializers.RandomUniform(0.9, 1.0, seed=i),
        name=f"scale_{i}",
      )
      for i, leaf in enumerate(leaves)
      if _is_scaled(leaf)
    }
    outputs = self._outputs(leaves)
    if not outputs:
      raise CannotTrainError("returns no numbers")
    self.heads = [
      self.add_weight(
        # Normalized outputs add up to zero: give each example its own head.
        shape=output.shape,
        initializer=keras.initializers.RandomNormal(seed=i, stddev=1.0),
        name=f"head_{i}",
      )
      for i, output in enumerate(outputs)
    ]

  def _outputs(self, leaves: Sequence[Any]) -> list[Any]:
    """Returns the layer's outputs that are numbers, as dense float tensors."""
    leaves = [
      leaf * tf.cast(self.scales[str(i)], leaf.dtype)
      if str(i) in self.scales
      else leaf
      for i, leaf in enumerate(leaves)
    ]
    rest = iter(leaves)
    inputs = tree.map_structure(
      lambda leaf: None if leaf is None else next(rest), self._structure
    )
    if isinstance(inputs, dict):
      outputs = self.layer(**inputs, **self._call_settings)
    else:
      outputs = self.layer(inputs, **self._call_settings)
    dense = map(_dense, tree.flatten(outputs))
    return [tf.cast(each, tf.float32) for each in dense if each is not None]

  def call(self, leaves: Sequence[Any]) -> Any:
    loss = tf.zeros([])
    for head, output in zip(self.heads, self._outputs(leaves), strict=True):
      size = tf.cast(tf.maximum(tf.size(output), 1), tf.float32)
      total = tf.reduce_sum(output * head) / tf.sqrt(size)
      loss += tf.sqrt(1 + (total - 0.5) ** 2)
    return loss

  def compute_loss(
    self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
  ) -> Any:
    return y_pred + sum(self.losses)


def _fresh(value: Any) -> Any:
  """Copies the layers in arguments; two models must not share them."""
  if isinstance(value, keras.layers.Layer):
    return type(value).from_config(value.get_config())
  if isinstance(value, dict):
    return {name: _fresh(each) for name, each in value.items()}
  if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
    return type(value)(map(_fresh, value))
  return value


def _leaves(inputs: Any) -> tuple[Any, ...]:
  return tuple(each for each in tree.flatten(inputs) if each is not None)


def _is_scaled(leaf: Any) -> bool:
  return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _dense(output: Any) -> Any:
  """Returns a dense tensor of numbers, or None for other outputs."""
  if isinstance(output, tf.SparseTensor):
    output = tf.sparse.to_dense(tf.sparse.reorder(output))
  if isinstance(output, tf.RaggedTensor):
    output = output.to_tensor()
  if output is None or output.dtype == tf.string:
    return None
  return tf.math.abs(output) if output.dtype.is_complex else output


# -------------------------------------------------------------- the comparison


def check(case: Case) -> bool:
  """Compares the case with plain fits; returns whether gradients reach inputs.

  Raises:
    CannotTrainError: If plain Keras fails, or nothing changes.
    AssertionError: If a number differs.
  """
  for rates in (RATES, SMALL_RATES):
    try:
      model, start, fits = _plain_fits(case, rates)
    except CannotTrainError:
      raise
    except Exception as error:
      raise CannotTrainError(f"plain Keras: {_first_line(error)}") from error
    if all(np.isfinite(value).all() for end in fits for value in end):
      break
  else:
    raise CannotTrainError("plain Keras: weights are not finite")
  variables = list(model.variables)
  moves = {
    variable.path: float(np.abs(right - value).max(initial=0))
    for variable, value, right in zip(variables, start, fits[0], strict=True)
    if variable.trainable
  }
  if max(moves.values()) < LEAST_MOVE:
    raise CannotTrainError("no weight moves")
  ends = _train_models(case, start, rates)
  for rate, end, right in zip(rates, ends, fits, strict=True):
    _compare(model, end, right, f"with the learning rate {rate}")
  return any(moves[each.path] > LEAST_MOVE for each in model.scales.values())


def _compare(
  model: TrainedLayer,
  values: Sequence[np.ndarray],
  expected: Sequence[np.ndarray],
  where: str = "",
) -> None:
  rtol, atol = _tolerance(model.layer)
  for variable, one, other in zip(
    model.variables, values, expected, strict=True
  ):
    message = f"{variable.path} {where}"
    if other.dtype.kind == "f":
      np.testing.assert_allclose(one, other, rtol, atol, err_msg=message)
    else:
      np.testing.assert_array_equal(one, other, err_msg=message)


def _why_different(case: Case) -> str:
  """Returns the outcome of a case whose weights differ."""
  _, _, (one, other) = _plain_fits(case, [RATES[0]] * 2)
  if any((a != b).any() for a, b in zip(one, other, strict=True)):
    return "random"
  _, _, fits = _plain_fits(case)
  for seed in range(3):
    model, _, others = _plain_fits(case, noise=np.random.default_rng(seed))
    try:
      for values, expected in zip(others, fits, strict=True):
        _compare(model, values, expected)
    except AssertionError:
      return "rounding"
  return "different"


def _plain_fits(
  case: Case,
  rates: Sequence[float] = RATES,
  noise: np.random.Generator | None = None,
) -> tuple[TrainedLayer, list[np.ndarray], list[list[np.ndarray]]]:
  """Fits one model with each learning rate, always from the same weights.

  Returns the model, its values before all fits, and its values after each fit.

  With `noise`, the first values differ in their last bit or two.
  """
  keras.utils.set_random_seed(1)
  model = TrainedLayer(case)
  model(_leaves(case.inputs))
  variables = list(model.variables)
  start = [variable.numpy() for variable in variables]
  if noise is not None:
    start = [
      (value * (1 + noise.uniform(-1e-7, 1e-7, value.shape))).astype("f")
      if value.dtype == "float32"
      else value
      for value in start
    ]
  model.compile(keras.optimizers.SGD(rates[0]), jit_compile=False)
  fits = []
  for rate in rates:
    # The same model again, so that its step is traced once.
    _assign(variables, start)
    model.optimizer.learning_rate.assign(rate)
    _fit(model, case)
    fits.append([variable.numpy() for variable in variables])
  return model, start, fits


def _train_models(
  case: Case, start: Sequence[np.ndarray], rates: Sequence[float]
) -> list[list[np.ndarray]]:
  """Returns the values of each model."""
  keras.utils.set_random_seed(1)
  strategy = VectorizedStrategy(len(rates))
  with strategy.scope():
    model = TrainedLayer(case)
    model(_leaves(case.inputs))
    optimizer = keras.optimizers.SGD(schedules.PerModel(list(rates)))
    model.compile(optimizer, jit_compile=False)
    variables = list(model.variables)
    _assign(variables, start)
  _fit(model, case)
  copies = map(testbed.copies, variables)
  return [list(own) for own in zip(*copies, strict=True)]


def _assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
  for variable, value in zip(variables, values, strict=True):
    variable.assign(value)


def _fit(model: TrainedLayer, case: Case) -> None:
  data = tf.data.Dataset.from_tensors((_leaves(case.inputs),)).repeat(STEPS)
  options = tf.data.Options()
  options.autotune.enabled = False  # See conftest.py.
  model.fit(data.with_options(options), shuffle=False, verbose=0)


def _tolerance(layer: Any) -> tuple[float, float]:
  """Returns the relative and the absolute difference that rounding explains."""
  policies = {each.compute_dtype for each in layer._flatten_layers()}
  return (1e-2, 1e-3) if policies & {*_HALF} else (1e-4, 1e-5)


def _first_line(error: BaseException) -> str:
  """Returns the class of an error, and the first line that says something."""
  text = str(error)
  if text.startswith("Graph execution error"):
    # The lines of the Python code follow, and then the message.
    text = text.split("<stack traces unavailable>")[-1].split("Detected at")[-1]
    lines = [line for line in text.splitlines() if not line.startswith("  ")]
    text = "\n".join(lines[-4:])
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# ----------------------------------------------------------------- Keras' tests


def _case(
  layer_cls: type[Any],
  init_kwargs: dict[str, Any] | None,
  input_shape: Any = None,
  input_dtype: Any = None,
  input_sparse: bool = False,
  input_ragged: bool = False,
  input_data: Any = None,
  call_kwargs: dict[str, Any] | None = None,
  custom_objects: dict[str, Any] | None = None,
  **_: Any,
) -> Case | None:
  """Takes the arguments of `run_layer_test`. Without inputs, returns None."""
  if input_data is None:
    if input_shape is None:
      return None
    if input_dtype is None:
      input_dtype = tree.map_shape_structure(lambda _: "float32", input_shape)
    input_shape = tree.map_shape_structure(_shorten, input_shape)
    keras.utils.set_random_seed(0)
    input_data = test_case.create_eager_tensors(
      input_shape, input_dtype, input_sparse, input_ragged
    )
  inputs = tree.map_structure(_as_tensor, input_data)
  return Case(
    layer_cls,
    init_kwargs or {},
    inputs,
    call_kwargs or {},
    custom_objects or {},
  )


def _shorten(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of a short sound; ten seconds would take minutes."""
  return tuple(min(size, LONGEST) for size in shape)


def _as_tensor(value: Any) -> Any:
  if value is None or isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
    return value
  return tf.convert_to_tensor(value)


def _judge(test: str, arguments: Any, options: Any) -> Result:
  name = getattr(arguments[0], "__name__", str(arguments[0]))
  try:
    case = _case(*arguments, **options)
  except Exception as error:
    return Result(name, test, "cannot train", f"inputs: {_first_line(error)}")
  if case is None:
    return Result(name, test, "cannot train", "the test has no inputs")
  try:
    return Result(name, test, "equal", reaches_inputs=check(case))
  except CannotTrainError as error:
    return Result(name, test, "cannot train", str(error))
  except AssertionError as error:
    why = " | ".join(str(error).split("\n")[1:8])
    return Result(name, test, _why_different(case), why[:500])
  except Exception as error:
    return Result(name, test, "raised", _first_line(error))


@functools.cache
def files_of() -> dict[str, list[pathlib.Path]]:
  """Returns the test files in which each class of layers is tested, by name."""
  found: dict[str, list[pathlib.Path]] = {}
  for path in sorted(_LAYERS.rglob("*_test.py")):
    for name in sorted(set(_names_in(ast.parse(path.read_text())))):
      found.setdefault(name, []).append(path)
  return found


def _names_in(file: ast.AST) -> Iterator[str]:
  """Yields the names of the layers that a file passes to `run_layer_test`."""
  for node in ast.walk(file):
    if isinstance(node, ast.Call) and _is_layer_test(node.func):
      named = [k.value for k in node.keywords if k.arg == "layer_cls"]
      name = ast.unparse([*node.args[:1], *named][0]).split(".")[-1]
      if name[0].isupper():
        yield name
      else:  # A parameter, which a table `{"layer_class": layers.Add}` gives.
        yield from _values_in_tables(file, name)


def _is_layer_test(node: ast.AST) -> bool:
  return isinstance(node, ast.Attribute) and node.attr == _NAME


def _values_in_tables(file: ast.AST, key: str) -> Iterator[str]:
  for node in ast.walk(file):
    if isinstance(node, ast.Dict):
      for name, value in zip(node.keys, node.values, strict=True):
        if isinstance(name, ast.Constant) and name.value == key:
          yield ast.unparse(value).split(".")[-1]


def _run_file(
  path: pathlib.Path, run_layer_test: Callable[..., Any]
) -> Iterator[tuple[str, Exception]]:
  """Runs the tests of a file; yields the names of those that raise, and what.

  `run_layer_test` replaces the method of Keras.
  """
  with _modules_of_tests():
    module = importlib.import_module(_module_of(path))
  callers = tuple(_callers_in(path))
  for kind in vars(module).values():
    if not (isinstance(kind, type) and issubclass(kind, testing.TestCase)):
      continue
    for name in unittest.defaultTestLoader.getTestCaseNames(kind):
      # absl calls the parametrized tests of `test_a` "test_a0", "test_a_b" etc.
      is_skipped = _is_skipped(kind, getattr(kind, name))
      if is_skipped or not name.startswith(callers):
        continue
      try:
        with mock.patch.object(testing.TestCase, _NAME, run_layer_test):
          _run_test(kind(name), name)
      except _Found:
        return
      except Exception as error:
        yield f"{path.stem}.{name}", error


@contextlib.contextmanager
def _modules_of_tests() -> Iterator[None]:
  """Provides modules that the wheel of Keras lacks and its tests import.

  `conftest` marks tests that other backends skip. grain is a package of data
  sets, which no test that calls `run_layer_test` uses.
  """
  conftest: Any = types.ModuleType("conftest")
  conftest.skip_if_backend = lambda backend, reason: pytest.mark.skipif(
    keras.backend.backend() == backend, reason=reason
  )
  provided = {"conftest": conftest, "grain": types.ModuleType("grain")}
  missing = {k: v for k, v in provided.items() if k not in sys.modules}
  sys.modules.update(missing)
  try:
    yield
  finally:
    for name in missing:
      del sys.modules[name]


def _callers_in(path: pathlib.Path) -> Iterator[str]:
  """Yields the names of the tests that call `run_layer_test`."""
  for node in ast.walk(ast.parse(path.read_text())):
    is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    if is_test and any(map(_is_layer_test, ast.walk(node))):
      yield node.name


def _module_of(path: pathlib.Path) -> str:
  parts = path.with_suffix("").relative_to(_LAYERS.parent.parent.parent).parts
  return ".".join(parts)


def _is_skipped(*items: Any) -> bool:
  """Whether pytest would skip a class of tests or a method."""
  marks = [mark for item in items for mark in getattr(item, "pytestmark", [])]
  return any(mark.name == "skipif" and mark.args[0] for mark in marks)


def _run_test(test: Any, name: str) -> None:
  test.setUp()
  try:
    getattr(test, name)()
  except (unittest.SkipTest, pytest.skip.Exception):
    pass
  finally:
    test.tearDown()
    test.doCleanups()


def run_class(name: str) -> Result:
  """Compares the first case of a class that plain Keras can train.

  If Keras can train none, returns the result of the first case.
  """
  results: list[Result] = []

  def run_layer_test(self: Any, *args: Any, **kwargs: Any) -> None:
    arguments = _positional(args, kwargs)
    if getattr(arguments[0], "__name__", None) != name:
      return
    results.append(_judge(self.id(), arguments, kwargs))
    if results[-1].outcome != "cannot train":
      raise _Found

  for path in files_of()[name]:
    for _ in _run_file(path, run_layer_test):
      pass  # What else the test asks is no matter here.
    if results and results[-1].outcome != "cannot train":
      return results[-1]
  assert results, f"no test of Keras trains {name}"
  return results[0]


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
  """Moves the first two arguments out of the keyword arguments."""
  names = ("layer_cls", "init_kwargs")[len(args) :]
  return [*args, *(kwargs.pop(name) for name in names)]


def run_all() -> Iterator[Result]:
  """Compares the models in every call of `run_layer_test` of Keras' tests."""
  results: list[Result] = []

  def run_layer_test(self: Any, *args: Any, **kwargs: Any) -> None:
    arguments = _positional(args, kwargs)
    results.append(_judge(self.id(), arguments, kwargs))

  for path in sorted({path for paths in files_of().values() for path in paths}):
    # The models of a file are many cycles of objects, which hold gigabytes.
    gc.collect()
    for name, error in _run_file(path, run_layer_test):
      print(f"{name} ended early: {_first_line(error)}", flush=True)
    yield from results
    results.clear()


# ------------------------------------------------------------------ the program


def main() -> int:
  """Prints a table of results; returns 1 if one differs or raises."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--all", action="store_true", help="every case")
  parser.add_argument("classes", nargs="*", help="one case of each class")
  arguments = parser.parse_args()
  logging.set_verbosity(logging.ERROR)
  tf.get_logger().setLevel("ERROR")
  began = time.monotonic()
  found = []
  results = run_all() if arguments.all else map(run_class, arguments.classes)
  for result in results:
    found.append(result)
    if result.outcome != "equal":
      print(*result[:4], sep=" | ", flush=True)
  _print_table(found)
  print(f"{len(found)} cases in {time.monotonic() - began:.0f} s")
  return int(any(r.outcome in ("different", "raised") for r in found))


def _print_table(results: Sequence[Result]) -> None:
  counts: dict[str, collections.Counter[str]] = {}
  for result in results:
    counter = counts.setdefault(result.layer, collections.Counter())
    counter[result.outcome] += 1
  print(f"{'layer':45}", *(f"{name:>12}" for name in OUTCOMES))
  for name, counter in sorted(counts.items()):
    print(f"{name:45}", *(f"{counter[each]:12}" for each in OUTCOMES))
  total = sum(counts.values(), collections.Counter[str]())
  print(f"{'all':45}", *(f"{total[each]:12}" for each in OUTCOMES))
  print(
    f"gradients reach the inputs in {sum(r.reaches_inputs for r in results)}"
  )
  reasons = collections.Counter(
    result.why for result in results if result.outcome == "cannot train"
  )
  for why, count in reasons.most_common():
    print(f"cannot train, {count} times: {why}")


if __name__ == "__main__":
  sys.exit(main())
