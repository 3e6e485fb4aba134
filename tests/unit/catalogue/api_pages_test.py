"""The tables of docs/api have each public name, and its docstring's line."""

import functools
import importlib
import inspect
import re

import tf_cross_shard
from tests.support import pages

ROWS = dict(
  re.findall(
    r"(?m)^\| `([\w.]+)` \| (.*) \|$",
    pages.text("docs/api/optimizer.md") + pages.text("docs/api/more.md"),
  )
)
OF_A_KERAS = {"keras3", "tf_keras"}  # The same names, for one Keras.


def _public() -> set[str]:
  """Returns the names of classes and functions, the shortest one of each."""
  found: dict[int, str] = {}
  package = pages.PROJECT / "tf_cross_shard"
  modules = {path.stem for path in package.glob("[a-z]*.py")} - OF_A_KERAS
  for module in ("", *sorted(modules)):
    home = importlib.import_module(f"tf_cross_shard.{module}".rstrip("."))
    for name in home.__all__:
      thing = getattr(home, name)
      if callable(thing):
        found.setdefault(id(thing), f"{module}.{name}".lstrip("."))
  return set(found.values())


def test_tables_have_the_first_line_of_each_docstring() -> None:
  optimizer, models = tf_cross_shard.CrossShardOptimizer, tf_cross_shard.Models
  methods = {f"Models.{name}" for name in vars(models) if name[0] != "_"}
  settings = {
    f"CrossShardOptimizer.{name}"
    for name in inspect.signature(optimizer.__mro__[1].__init__).parameters
    if isinstance(getattr(optimizer, name, None), property)
  }
  assert not (_public() | methods | settings) - ROWS.keys()
  for name, line in ROWS.items():
    thing = functools.reduce(getattr, name.split("."), tf_cross_shard)
    text = inspect.getdoc(thing) or ""
    assert text.partition("\n\n")[0].replace("\n", " ") == line, name
