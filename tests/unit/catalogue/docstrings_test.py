"""Every example in a docstring runs, and every public name has one.

This file does not use `--doctest-modules`, because Bazel runs test files only,
and because pytest reads `conftest.py`, which creates the four devices, only for
modules in `tests`.
"""

import doctest
import importlib
import pkgutil
import types
from typing import Any

import pytest
import tensorflow as tf

import tf_cross_shard

MODULES = sorted(
  ["tf_cross_shard"]
  + [
    found.name
    for found in pkgutil.walk_packages(
      tf_cross_shard.__path__, "tf_cross_shard."
    )
    if not found.name.endswith("__main__")
  ]
)
PUBLIC = [name for name in tf_cross_shard.__all__ if name != "__version__"]


def _examples_of(thing: Any, name: str) -> list[doctest.DocTest]:
  """The docstrings with examples of a module, class or function."""
  found = doctest.DocTestFinder().find(thing, name)
  return [test for test in found if test.examples]


def _run(tests: list[doctest.DocTest]) -> tuple[int, str]:
  """Returns the number of examples that ran, and the failures."""
  runner = doctest.DocTestRunner(verbose=False)
  output: list[str] = []
  for test in tests:
    runner.run(test, out=output.append)
  return runner.summarize(verbose=False).attempted, "".join(output)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
  assert len(tf.config.list_logical_devices("CPU")) == 4
  tests = _examples_of(importlib.import_module(name), name)
  attempted, failures = _run(tests)
  assert not failures, failures
  assert attempted == sum(len(test.examples) for test in tests)


def test_every_public_name_has_an_example() -> None:
  """This includes the public names of `tf_cross_shard.tf_keras`."""
  assert {"tf_cross_shard.keras3", "tf_cross_shard.tf_keras"} <= set(MODULES)
  public = {name: getattr(tf_cross_shard, name) for name in PUBLIC}
  public["tf_keras"] = importlib.import_module("tf_cross_shard.tf_keras")
  for name, thing in public.items():
    where = thing.__name__ if isinstance(thing, types.ModuleType) else name
    assert thing.__doc__, name
    assert _examples_of(thing, where), f"{name} has no example"
