"""The public classes: help, signature, repr and names for completion."""

import ast
import inspect
import pathlib
from typing import Any

import pytest
import tensorflow as tf

import tf_cross_shard
from tests.support import training
from tf_cross_shard import CrossShardOptimizer, TowerOptimizer

KERAS = [
  pytest.param(package, library, id=name)
  for name, (library, package) in training.KERASES.items()
]


@pytest.mark.parametrize(("home", "its_keras"), KERAS)
@pytest.mark.parametrize("name", ["CrossShardOptimizer", "TowerOptimizer"])
def test_help_is_whole(home: Any, its_keras: Any, name: str) -> None:
  del its_keras
  cls = getattr(home, name)
  # The classes for both versions of Keras derive from the documented class.
  base = next(each for each in cls.__mro__[1:] if each.__name__ == name)
  text = inspect.getdoc(getattr(home, name)) or ""
  lines = text.splitlines()
  for part in (base, vars(base)["__init__"]):
    # Both texts begin with the same line.
    _, *shared = (inspect.getdoc(part) or "").splitlines()
    assert [x for x in shared if x and x not in lines] == []
  for parameter in list(inspect.signature(base).parameters):
    assert f"\n  {parameter}: " in text
  assert lines[0] == (inspect.getdoc(base) or "").splitlines()[0]
  assert lines.count(lines[0]) == 1
  assert text.count("\nArgs:\n") == text.count("\nReferences:\n") == 1
  assert text.count("\n\n\n") == 0
  assert "Arguments and members" not in text


def test_a_subclass_keeps_its_docstring() -> None:
  class Mine(CrossShardOptimizer):  # type: ignore[misc, valid-type]
    """Mine."""

  assert inspect.getdoc(Mine) == "Mine."


def test_public_arguments_have_types() -> None:
  for thing in (
    CrossShardOptimizer,
    CrossShardOptimizer.compute_gradients,
    CrossShardOptimizer.__mro__[1].apply_gradients,
    CrossShardOptimizer.minimize,
    TowerOptimizer,
  ):
    parameters = inspect.signature(thing).parameters.values()
    plain = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    untyped = [p.name for p in plain if p.annotation in (Any, p.empty)]
    assert untyped in ([], ["self"], ["self", "grad_loss"])


@pytest.mark.parametrize(("home", "its_keras"), KERAS)
def test_arguments_by_position_are_those_of_tensorflow_1(
  home: Any, its_keras: Any
) -> None:
  """Calls of TensorFlow 1's class mean the same; others name what they set."""
  del its_keras
  parameters = inspect.signature(home.CrossShardOptimizer).parameters.values()
  by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
  original = inspect.signature(tf.compat.v1.tpu.CrossShardOptimizer)
  assert by_position == list(original.parameters)


@pytest.mark.parametrize(("home", "its_keras"), KERAS)
def test_repr_has_what_differs_from_defaults(home: Any, its_keras: Any) -> None:
  """settings_test.py has all arguments."""
  del its_keras
  make = home.CrossShardOptimizer
  named = make("sgd", "sum", "mine", clipnorm=1.0, accumulate_steps=2)
  assert repr(named) == (
    "CrossShardOptimizer(SGD, reduction='sum', name='mine', clipnorm=1.0,"
    " accumulate_steps=2)"
  )
  towers = home.TowerOptimizer(named)
  assert repr(towers) == f"TowerOptimizer({named!r})"
  assert towers.get_name() == "mine"
  assert "object at 0x" in repr(make.__new__(make))  # As in a debugger.


@pytest.mark.parametrize(("home", "its_keras"), KERAS)
def test_a_rate_per_model(home: Any, its_keras: Any) -> None:
  decay = its_keras.optimizers.schedules.CosineDecay(0.5, 10)
  assert repr(home.PerModel([0.5, decay])) == "PerModel([0.5, CosineDecay])"


def test_modules_complete_public_names_only() -> None:
  """Editors such as jedi read the source, and do not see `__dir__`."""
  root = pathlib.Path(tf_cross_shard.__file__).parent
  for file in root.glob("*.py"):
    tree = ast.parse(file.read_text())
    public = {"main", "sys"} if file.name == "__main__.py" else set()
    for node in tree.body:
      if "__all__" in ast.unparse(node).split(" ")[0]:
        public = set(ast.literal_eval(node.value))
    imported = {
      alias.asname or alias.name
      for node in ast.walk(tree)
      if isinstance(node, ast.Import | ast.ImportFrom)
      for alias in node.names
    }
    shown = {name for name in imported if not name.startswith("_")}
    assert shown <= public, file.name


@pytest.mark.parametrize(("home", "its_keras"), KERAS)
def test_names_for_completion(home: Any, its_keras: Any) -> None:
  opt = its_keras.optimizers.Adam()
  names = dir(home.CrossShardOptimizer(opt))
  assert {"get_slot", "groups", "iterations", "skipped_steps"} <= set(names)
  # With these names, savers would save twice: see docs/limits.md.
  assert not {"inner_optimizer", "get_slot_names"} & set(names)
