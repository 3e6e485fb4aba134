"""BUILD files say what the sources import, no less and no more.

Reads both by itself rather than with tools/update_build.py, which wrote them.
"""
# bazel: size=small data=//:sources

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = Path(__file__).absolute().parent.parent.parent
ROOTS = ("tf_cross_shard", "tests", "examples", "benchmarks", "tools")


class Target(NamedTuple):
  """A rule in a BUILD file."""

  kind: str
  attributes: dict[str, Any]
  build: str

  @property
  def deps(self) -> set[str]:
    return {
      full_label(dep, Path(self.build).parent)
      for dep in self.attributes.get("deps", [])
    }


def full_label(label: str, package: Path) -> str:
  """Returns '//a/b:c' for ':c' in a/b, and '//a/b:b' for '//a/b'."""
  if label.startswith(":"):
    return f"//{package.as_posix()}{label}"
  return label if ":" in label else f"{label}:{label.split('/')[-1]}"


def label_of(source: Path) -> str:
  """Returns the label a source file must have."""
  package = source.parent
  name = package.name if source.stem == "__init__" else source.stem
  return f"//{package.as_posix()}:{name}"


def sources(project: Path) -> list[Path]:
  """Lists the Python files, relative to `project`."""
  found = [f for root in ROOTS for f in (project / root).rglob("*.py")]
  return sorted(f.relative_to(project) for f in found)


def targets(project: Path) -> Iterator[Target]:
  """Reads the BUILD files: Starlark's calls are Python's."""
  for root in ROOTS:
    for build in sorted((project / root).rglob("BUILD")):
      for statement in ast.parse(build.read_text()).body:
        assert isinstance(statement, ast.Expr), build
        call = statement.value
        assert isinstance(call, ast.Call), build
        if not ast.unparse(call.func).startswith("py_"):
          continue
        attributes = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
        place = build.relative_to(project).as_posix()
        yield Target(ast.unparse(call.func), attributes, place)


class Imports(ast.NodeVisitor):
  """Collects the files of the project that a source file imports."""

  def __init__(self, project: Path, source: Path) -> None:
    self.project, self.source = project, source
    self.files: set[Path] = set()
    self.visit(ast.parse((project / source).read_text()))

  def visit_If(self, node: ast.If) -> None:
    if ast.unparse(node.test).endswith("TYPE_CHECKING"):
      node.body = []
    self.generic_visit(node)

  def visit_Import(self, node: ast.Import) -> None:
    for alias in node.names:
      self.add(Path(*alias.name.split(".")))

  def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
    # One dot is the directory of the file, be it an __init__.py or not.
    base = Path(*(node.module or "").split("."))
    if node.level:
      base = Path(self.source.parents[node.level - 1], base)
    for alias in node.names:
      self.add(base / alias.name if self.file(base / alias.name) else base)

  def file(self, module: Path) -> Path | None:
    """Returns the file of a module given as a path without suffix."""
    for candidate in (Path(f"{module}.py"), module / "__init__.py"):
      if (self.project / candidate).is_file():
        return candidate
    return None

  def add(self, module: Path) -> None:
    if module.parts and module.parts[0] in ROOTS:
      file = self.file(module)
      if file is not None:
        self.files.add(file)
      # The packages that are entered on the way, if one is not in them.
      for parent in module.parents:
        file = self.file(parent)
        if file is not None and parent not in self.source.parents:
          self.files.add(file)


def expected_deps(project: Path, source: Path) -> set[str]:
  """Returns the labels that the target of `source` must depend on."""
  files = Imports(project, source).files
  if source.name.endswith("_test.py"):
    files.add(Path("tools/hermetic/sitecustomize.py"))
    for parent in source.parents:
      files |= {parent / "__init__.py", parent / "conftest.py"}
  labels = {label_of(f) for f in files - {source} if (project / f).is_file()}
  for line in (project / source).read_text().splitlines():
    if line.startswith("# bazel:"):
      for word in line.split():
        if word.startswith("deps="):
          listed = word.removeprefix("deps=").split(",")
          labels |= {full_label(dep, source.parent) for dep in listed}
  return labels


def faults(project: Path) -> list[str]:
  """Compares the BUILD files of a project with its sources."""
  found = []
  owners: dict[Path, list[Target]] = {f: [] for f in sources(project)}
  for target in targets(project):
    for name in target.attributes["srcs"]:
      source = Path(target.build).parent / name
      if source in owners:
        owners[source].append(target)
      else:
        found.append(f"{target.build} names {name}, which is not there")
  for source, own in owners.items():
    kind = "py_test" if source.name.endswith("_test.py") else "py_library"
    if [target.kind for target in own] != [kind]:
      kinds = [target.kind for target in own] or "none"
      found.append(f"{source} must be in exactly one {kind}; it is in: {kinds}")
      continue
    wanted, there = expected_deps(project, source), own[0].deps
    for dep in sorted(wanted - there):
      found.append(f"{own[0].build}: {source} imports {dep}: add it to deps")
    for dep in sorted(there - wanted):
      found.append(f"{own[0].build}: {source} does not import {dep}: remove it")
  return found


def test_build_files_agree_with_imports() -> None:
  assert len(sources(PROJECT)) > 10, f"too few sources in {PROJECT}"
  found = faults(PROJECT)
  assert not found, "\n".join(
    ["", *found, "`python tools/update_build.py` rewrites the BUILD files."]
  )


def write_project(project: Path, library: str, test: str) -> None:
  """Writes a package of two modules, `b` importing `a`, and a test of `b`."""
  for name, text in {
    "tf_cross_shard/__init__.py": "import os\n",
    "tf_cross_shard/a.py": "",
    "tf_cross_shard/b.py": "from tf_cross_shard import a\n",
    "tf_cross_shard/BUILD": (
      'py_library(name = "tf_cross_shard", srcs = ["__init__.py"])\n'
      'py_library(name = "a", srcs = ["a.py"])\n' + library
    ),
    "tests/b_test.py": "def test_b():\n  import tf_cross_shard.b\n",
    "tests/BUILD": test,
  }.items():
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text(text)


LIBRARY = 'py_library(name = "b", srcs = ["b.py"], deps = [":a"])\n'
TEST = """py_test(name = "b_test", srcs = ["b_test.py"], deps = [
  "//tf_cross_shard", "//tf_cross_shard:b"])\n"""


@pytest.mark.parametrize(
  ("library", "test", "fault"),
  [
    (LIBRARY, TEST, None),
    (LIBRARY.replace('":a"', ""), TEST, "b.py imports //tf_cross_shard:a"),
    (LIBRARY, TEST.replace('cross_shard"', 'cross_shard:a"'), "not import"),
    (LIBRARY, "", "b_test.py must be in exactly one py_test; it is in: none"),
    (LIBRARY * 2, TEST, "b.py must be in exactly one py_library"),
    (LIBRARY.replace("b.py", "c.py"), TEST, "names c.py, which is not there"),
  ],
  ids=["none", "missing", "superfluous", "untested", "twice", "stale"],
)
def test_a_fault_is_found(
  tmp_path: Path, library: str, test: str, fault: str | None
) -> None:
  write_project(tmp_path, library, test)
  found = faults(tmp_path)
  if fault is None:
    assert found == []
  else:
    assert any(fault in line for line in found), found


def test_the_package_is_not_an_installed_copy() -> None:
  spec = importlib.util.find_spec("tf_cross_shard")
  assert spec is not None
  assert spec.origin == str(PROJECT / "tf_cross_shard" / "__init__.py")
  if "TEST_SRCDIR" in os.environ:  # Bazel: see tools/hermetic.
    finders = [getattr(finder, "__module__", "") for finder in sys.meta_path]
    assert not [name for name in finders if "__editable__" in name]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
