"""Every public name is documented, and every example runs.

The rules for a public function:
- a docstring of one line names each argument in backticks;
- a longer one has Args for each argument, and Returns unless it returns None;
- each error that the body raises stands under Raises.
What overrides a documented method of this package inherits its words, but
documents its own errors.
"""
# bazel: data=//:sources

import ast
import doctest
import importlib
import io
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tensorflow as tf

import tf_cross_shard

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = Path(__file__).absolute().parent.parent
# Fewer means that the search for examples is broken, not that they are gone.
LEAST_EXAMPLES = 70

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

Function = ast.FunctionDef


# Examples.


def examples_of(thing: Any, name: str) -> list[doctest.DocTest]:
  """The docstrings with examples of a module, class or function."""
  finder = doctest.DocTestFinder(exclude_empty=True)
  return [test for test in finder.find(thing, name) if test.examples]


def run_examples(tests: list[doctest.DocTest]) -> tuple[int, str]:
  """Runs docstrings; answers how many examples ran, and what failed."""
  runner = doctest.DocTestRunner(verbose=False)
  output = io.StringIO()
  for test in tests:
    runner.run(test, out=output.write)
  results = runner.summarize(verbose=False)
  return results.attempted, output.getvalue()


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
  assert len(tf.config.list_logical_devices("CPU")) == 4
  module = importlib.import_module(name)
  tests = examples_of(module, name)
  attempted, failures = run_examples(tests)
  assert not failures, failures
  assert attempted == sum(len(test.examples) for test in tests)


def test_there_are_examples() -> None:
  total = 0
  for name in MODULES:
    tests = examples_of(importlib.import_module(name), name)
    total += sum(len(test.examples) for test in tests)
  assert total >= LEAST_EXAMPLES


def test_every_exported_name_is_there_and_has_an_example() -> None:
  assert {"CrossShardOptimizer", "Groups", "groups"} <= set(
    tf_cross_shard.__all__
  )
  for name in tf_cross_shard.__all__:
    thing = getattr(tf_cross_shard, name)
    if isinstance(thing, str):
      continue  # __version__
    where = thing.__name__ if isinstance(thing, types.ModuleType) else name
    assert thing.__doc__, name
    assert examples_of(thing, where), f"{name} has no example"


def test_a_failing_example_is_found() -> None:
  module = types.ModuleType("broken", ">>> 1 + 1\n3\n")
  attempted, failures = run_examples(examples_of(module, "broken"))
  assert attempted == 1
  assert "Expected:\n    3\nGot:\n    2" in failures


# Docstrings.


class Class(NamedTuple):
  """A class of the package and the names of what it derives from."""

  node: ast.ClassDef
  bases: list[str]

  def method(self, name: str) -> Function | None:
    for node in self.node.body:
      if isinstance(node, Function) and node.name == name:
        return node
    return None


def classes(trees: dict[str, ast.Module]) -> dict[str, Class]:
  """Every class of the package by its name."""
  return {
    node.name: Class(
      node, [ast.unparse(base).split(".")[-1] for base in node.bases]
    )
    for tree in trees.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
  }


def has_documented_base(
  name: str, method: str, known: dict[str, Class]
) -> bool:
  """Whether a method overrides one of this package that has a docstring."""
  for base in known[name].bases if name in known else []:
    if base in known:
      overridden = known[base].method(method)
      if overridden is not None and ast.get_docstring(overridden):
        return True
      if has_documented_base(base, method, known):
        return True
  return False


def is_public(name: str) -> bool:
  return not name.startswith("_")


def sections(docstring: str) -> dict[str, str]:
  """The text under each heading, `""` being the text before the first."""
  found = {"": ""}
  heading = ""
  for line in docstring.splitlines():
    match = re.fullmatch(r"(Args|Attributes|Returns|Yields|Raises):", line)
    if match:
      heading = match[1]
      found[heading] = ""
    elif re.fullmatch(r"\w[\w ]*:", line):
      heading = line
      found[heading] = ""
    else:
      if line[:1].strip():  # back at the margin
        heading = ""
      found[heading] += f"{line}\n"
  return found


def entries(section: str) -> set[str]:
  """The names that a section explains."""
  indents = [
    len(x) - len(x.lstrip()) for x in section.splitlines() if x.strip()
  ]
  least = min(indents, default=0)
  return set(re.findall(rf"(?m)^ {{{least}}}\**(\w+):", section))


def arguments_of(function: Function) -> list[str]:
  """The names of a function's arguments."""
  a = function.args
  every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
  names = [x.arg for x in every if x is not None]
  return [name for name in names if name not in ("self", "cls")]


def raised(function: Function) -> set[str]:
  """The errors that a function's own body raises."""
  found = set()
  todo: list[ast.AST] = list(function.body)
  while todo:
    node = todo.pop()
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
      continue
    if isinstance(node, ast.Raise) and node.exc is not None:
      error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
      found.add(ast.unparse(error).split(".")[-1])
    todo.extend(ast.iter_child_nodes(node))
  return found


def function_faults(
  function: Function, docstring: str, inherits: bool, is_property: bool
) -> Iterator[str]:
  """What the docstring of a function lacks."""
  parts = sections(docstring)
  if not inherits:
    one_line = len(docstring.splitlines()) == 1
    explained = entries(parts.get("Args", ""))
    if one_line:
      explained = set(re.findall(r"`(\w+)`", docstring))
    for argument in arguments_of(function):
      if argument not in explained and is_public(argument):
        yield f"does not explain the argument {argument}"
    returns = function.returns
    nothing = returns is not None and ast.unparse(returns) in ("None", '"None"')
    if (
      not one_line
      and not nothing
      and not is_property
      and function.name not in ("__init__", "__post_init__")
      and not {"Returns", "Yields"} & set(parts)
    ):
      yield "has neither Returns nor Yields"
  for error in sorted(raised(function) - entries(parts.get("Raises", ""))):
    yield f"raises {error} and does not say so"


def faults_in(name: str, node: ast.AST, known: dict[str, Class]) -> list[str]:
  """What the docstrings of a module or class and of what is in it lack."""
  assert isinstance(node, ast.Module | ast.ClassDef)
  faults = []
  if not ast.get_docstring(node):
    faults.append(f"{name} has no docstring")
  for child in node.body:
    if isinstance(child, ast.ClassDef) and is_public(child.name):
      faults += faults_in(f"{name}.{child.name}", child, known)
    if not isinstance(child, Function):
      continue
    initializes = child.name in ("__init__", "__post_init__")
    decorators = [ast.unparse(x) for x in child.decorator_list]
    if not (is_public(child.name) or initializes):
      continue
    if any(text.endswith((".setter", ".deleter")) for text in decorators):
      continue
    where = f"{name}.{child.name}"
    docstring = ast.get_docstring(child) or ""
    if initializes:  # the class may say it all
      docstring = f"{docstring}\n{ast.get_docstring(node) or ''}"
    if not docstring.strip():
      faults.append(f"{where} has no docstring")
      continue
    owner = node.name if isinstance(node, ast.ClassDef) else ""
    inherits = has_documented_base(owner, child.name, known)
    is_property = any("property" in text for text in decorators)
    found = function_faults(child, docstring, inherits, is_property)
    faults += [f"{where} {fault}" for fault in found]
  if isinstance(node, ast.ClassDef) and _is_dataclass(node):
    explained = entries(
      sections(ast.get_docstring(node) or "").get("Attributes", "")
    )
    for child in node.body:
      if isinstance(child, ast.AnnAssign) and isinstance(
        child.target, ast.Name
      ):
        field = child.target.id
        if is_public(field) and field not in explained:
          faults.append(f"{name} does not explain the attribute {field}")
  return faults


def _is_dataclass(node: ast.ClassDef) -> bool:
  return any("dataclass" in ast.unparse(x) for x in node.decorator_list)


def all_faults(project: Path) -> list[str]:
  """What the docstrings of a project lack."""
  trees = {
    file.relative_to(project).as_posix(): ast.parse(file.read_text())
    for file in sorted((project / "tf_cross_shard").rglob("*.py"))
  }
  assert trees, f"no sources in {project}"
  known = classes(trees)
  return [
    fault
    for name, tree in trees.items()
    for fault in faults_in(name, tree, known)
  ]


def test_docstrings_are_complete() -> None:
  assert all_faults(PROJECT) == []


def test_every_module_that_can_be_imported_was_read() -> None:
  files = {
    Path(str(importlib.import_module(name).__file__)).absolute()
    for name in MODULES
  }
  sources = set((PROJECT / "tf_cross_shard").rglob("*.py"))
  assert {f for f in sources if f.name != "__main__.py"} == files


COMPLETE = '''"""A module."""
import dataclasses

def public(value, *rest):
  """One line.

  Args:
    value: What it is.
      Other: not an argument.
    *rest: The rest.

  Returns:
    A number.

  Raises:
    ValueError: If it is no good.
  """
  raise ValueError

def brief(value):
  """Doubles `value`."""

def _private(value): pass

class Base:
  """A base.

  Args:
    x: What it is.
  """

  def __init__(self, x): pass

  def method(self, y):
    """Does it to `y`."""

  @property
  def size(self):
    """How large.

    In metres.
    """

class Derived(Base):
  """Derived."""

  def method(self, y):
    """Does it otherwise."""

@dataclasses.dataclass
class Data:
  """Data.

  Attributes:
    field: What it is.
  """

  field: int
'''


def test_complete_docstrings_have_no_faults(tmp_path: Path) -> None:
  (tmp_path / "tf_cross_shard").mkdir()
  (tmp_path / "tf_cross_shard/a.py").write_text(COMPLETE)
  assert all_faults(tmp_path) == []


@pytest.mark.parametrize(
  ("old", "new", "fault"),
  [
    ('"""A module."""', "", "a.py has no docstring"),
    (
      "    value: What it is.\n",
      "",
      "public does not explain the argument value",
    ),
    ("    *rest: The rest.\n", "", "public does not explain the argument rest"),
    ("public(value", "public(Other, value", "explain the argument Other"),
    ("  Returns:\n    A number.\n", "", "public has neither Returns nor"),
    (
      "  raise ValueError",
      "  raise TypeError('no')",
      "public raises TypeError",
    ),
    ("`value`", "it", "brief does not explain the argument value"),
    ('  """Doubles `value`."""', "  pass", "brief has no docstring"),
    ("    x: What it is.\n", "", "__init__ does not explain the argument x"),
    ('  """Derived."""\n', "", "Derived has no docstring"),
    ("(Base)", "", "Derived.method does not explain the argument y"),
    ("    field: What it is.\n", "", "Data does not explain the attribute"),
  ],
)
def test_a_fault_is_found(
  tmp_path: Path, old: str, new: str, fault: str
) -> None:
  assert old in COMPLETE
  (tmp_path / "tf_cross_shard").mkdir()
  (tmp_path / "tf_cross_shard/a.py").write_text(COMPLETE.replace(old, new))
  found = all_faults(tmp_path)
  assert any(fault in text for text in found), found


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
