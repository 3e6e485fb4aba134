#!/usr/bin/env python3
"""Writes the BUILD files from the imports, so that they cannot be wrong.

    python tools/update_build.py            # rewrite what differs
    python tools/update_build.py --check    # exit 1, with a diff, instead

One `py_library` per module, one `py_test` per `*_test.py`. Bazel gives a test
nothing but its dependencies, so which import gives which dependency matters:

- A module that is imported, also inside a function, is a dependency. What
  stands under `if TYPE_CHECKING:` never runs and is none.
- `import a.b.c` runs `a/__init__.py` and `a/b/__init__.py` first, so those are
  dependencies too, but not where the importing file lies inside `a` itself:
  they are running already, and most often `a/__init__.py` imports that very
  file, which would be a cycle. So within the package the dependencies are the
  picture of who uses whom, while a test gets all that `tf_cross_shard`'s
  `__init__` imports.
- `from a import name`, where the name is no module, is always a dependency on
  `a/__init__.py`, also inside `a`: Bazel then shows the cycle there is.
- A test depends on its `conftest.py` and on pytest's settings in setup.cfg.

A line like this in a file adds to its target; every key is optional:

    # bazel: size=large timeout=long tags=exclusive data=//:sources deps=//a:b

Lists are separated by commas. `//:sources` is every source and BUILD file.
"""

import argparse
import ast
import difflib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOTS = (
  *("tf_cross_shard", "tf_cross_shard_cli"),
  *("tests", "examples", "benchmarks", "tools"),
)
SOURCE_SUFFIXES = (".bzl", ".ipynb", ".md", ".py", ".sh", ".typed")
HEADER = """\
# Made by tools/update_build.py from the imports: do not edit, run it.

package(default_visibility = ["//visibility:public"])
"""

OPTIONS = ("size", "timeout", "tags", "data", "deps")

# The value of an attribute: a string, a list of them, a flag.
Attribute = str | list[str] | bool


class Error(Exception):
  """A source file from which no target can be made; says which and why."""


def is_test(path: Path) -> bool:
  """Whether pytest collects it (`python_files` in setup.cfg)."""
  return path.name.endswith("_test.py")


def find_sources(project: Path) -> dict[str, Path]:
  """Maps the dotted name of every module to its path below `project`."""
  sources = {}
  for root in ROOTS:
    for path in sorted((project / root).rglob("*.py")):
      path = path.relative_to(project)
      if any(part.startswith(".") for part in path.parts):
        continue
      parts = path.parent.parts if path.stem == "__init__" else path.parts
      sources[".".join(parts).removesuffix(".py")] = path
  return sources


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
  """Walks over the tree, except for what only type checkers read."""
  for node in ast.iter_child_nodes(tree):
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      for other in node.orelse:
        yield other
        yield from running_nodes(other)
      continue
    yield node
    yield from running_nodes(node)


def imported_names(module: str, path: Path, text: str) -> Iterator[str]:
  """Yields what the file imports: 'a.b' or, for `from a import b`, 'a:b'."""
  for node in running_nodes(ast.parse(text, str(path))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        package = module.split(".")
        drop = node.level - (path.stem == "__init__")
        package = package[: len(package) - drop]
        base = ".".join([*package, base] if base else package)
      yield from (f"{base}:{alias.name}" for alias in node.names)


def dependencies(
  module: str, path: Path, text: str, sources: dict[str, Path]
) -> set[str]:
  """Returns the modules of this project that must be there to import it."""
  found = set()
  for name in imported_names(module, path, text):
    base, _, attribute = name.partition(":")
    submodule = f"{base}.{attribute}"
    target = submodule if submodule in sources else base
    if target.split(".")[0] not in ROOTS:
      continue
    # `from tests import oracle`: a directory needs no __init__.py.
    if target not in sources:
      raise Error(f"{path} imports {target}, but there is no such module.")
    found.add(target)
    parts = target.split(".")
    for parent in (".".join(parts[:n]) for n in range(1, len(parts))):
      if parent in sources and not f"{module}.".startswith(f"{parent}."):
        found.add(parent)
  return found - {module}


def label(module: str, sources: dict[str, Path], package: Path) -> str:
  """Returns the label of a module's target, as written in `package`."""
  path = sources[module]
  if path.stem == "__init__":
    name, short = path.parent.name, f"//{path.parent.as_posix()}"
  else:
    name, short = path.stem, f"//{path.parent.as_posix()}:{path.stem}"
  return f":{name}" if path.parent == package else short


def options(path: Path, text: str) -> dict[str, str]:
  """Returns the keys and values of the file's `# bazel:` lines."""
  result: dict[str, str] = {}
  for line in text.splitlines():
    if not line.startswith("# bazel:"):
      continue
    for word in line.removeprefix("# bazel:").split():
      key, _, value = word.partition("=")
      if key not in OPTIONS or not value:
        raise Error(
          f"{path}: {word!r} in a `# bazel:` line is not one of "
          f"{'=, '.join(OPTIONS)}=."
        )
      if key in result and key != "deps":
        raise Error(
          f"{path}: `# bazel:` lines set {key}= to {result[key]!r} and to "
          f"{value!r}. Write it once; lists are separated by commas."
        )
      result[key] = ",".join(filter(None, (result.get(key), value)))
  return result


def rule(kind: str, attributes: dict[str, Attribute]) -> str:
  """Returns one target in the layout of Bazel's own formatter."""
  lines = [f"{kind}("]
  for name, value in attributes.items():
    if isinstance(value, list) and len(value) > 1:
      lines += [
        f"    {name} = [",
        *(f'        "{v}",' for v in value),
        "    ],",
      ]
    elif isinstance(value, list):
      lines += [f'    {name} = ["{value[0]}"],'] if value else []
    elif isinstance(value, bool):
      lines += [f"    {name} = {value},"] if value else []
    else:
      lines += [f'    {name} = "{value}",'] if value else []
  return "\n".join([*lines, ")"]) + "\n"


def by_label(labels: Iterable[str]) -> list[str]:
  """Sorts labels: this package's own first."""
  return sorted(set(labels), key=lambda label: (label[0] != ":", label))


def target(
  project: Path, module: str, path: Path, sources: dict[str, Path]
) -> str:
  """Returns the one target of one source file."""
  text = (project / path).read_text(encoding="utf-8")
  extra = options(path, text)
  modules = dependencies(module, path, text, sources)
  data = extra.get("data", "").split(",") if "data" in extra else []
  attributes: dict[str, Attribute] = {
    "name": path.parent.name if path.stem == "__init__" else path.stem
  }
  if is_test(path):
    package = path.parent.parts
    for depth in range(1, len(package) + 1):
      parent = ".".join(package[:depth])
      modules |= {parent, f"{parent}.conftest"} & sources.keys()
    data.append("//:setup.cfg")
    attributes["size"] = extra.get("size", "medium")
    attributes["timeout"] = extra.get("timeout", "")
  else:
    # Bazel lets nothing else use tests.
    roots = {name.split(".")[0] for name in [module, *modules]}
    attributes["testonly"] = "tests" in roots
    if (
      path.stem == "__init__" and (project / path.parent / "py.typed").exists()
    ):
      data.append("py.typed")
  attributes["srcs"] = [path.name]
  if is_test(path):
    if "pytest.main(" not in text:
      raise Error(f"{path}: Bazel would run none of it. End it as others end.")
    attributes["main"] = path.name
  attributes["data"] = by_label(data)
  attributes["tags"] = (
    sorted(extra["tags"].split(",")) if "tags" in extra else []
  )
  labels = [label(name, sources, path.parent) for name in modules]
  labels += extra["deps"].split(",") if "deps" in extra else []
  attributes["deps"] = by_label(labels)
  return rule("py_test" if is_test(path) else "py_library", attributes)


def build_files(project: Path) -> dict[Path, str]:
  """Returns every BUILD file there should be, with its text."""
  sources = find_sources(project)
  targets: dict[Path, list[str]] = {}
  for module, path in sorted(sources.items(), key=lambda item: item[1]):
    target_text = target(project, module, path, sources)
    targets.setdefault(path.parent, []).append(target_text)

  files = {}
  for package, rules in targets.items():
    there = {entry.suffix for entry in (project / package).iterdir()}
    patterns = [f"*{suffix}" for suffix in SOURCE_SUFFIXES if suffix in there]
    listed = ", ".join(f'"{pattern}"' for pattern in [*patterns, "BUILD"])
    group = f'    name = "sources",\n    srcs = glob([{listed}]),\n'
    rules = [HEADER, *rules, f"filegroup(\n{group})\n"]
    files[package / "BUILD"] = "\n".join(rules)
  own = (
    '["*.cfg", "*.md", "*.py", "*.toml", "BUILD", "WORKSPACE", "docs/**/*.md"]'
  )
  packages = "".join(f'        "//{p.as_posix()}:sources",\n' for p in targets)
  files[Path("BUILD")] = (
    f'{HEADER}\nexports_files(glob(["*.cfg", "*.md"]))\n\n'
    f'filegroup(\n    name = "sources",\n    srcs = glob({own}) + [\n'
    f"{packages}    ],\n)\n"
  )
  return files


def main(arguments: list[str]) -> int:
  """Rewrites, or with --check compares; returns the exit status."""
  parser = argparse.ArgumentParser(description="BUILD files from the imports.")
  parser.add_argument("--check", action="store_true", help="change nothing")
  check = parser.parse_args(arguments).check
  project = Path(__file__).resolve().parent.parent
  try:
    wanted = build_files(project)
  except (Error, SyntaxError) as error:
    print(f"update_build: {error}", file=sys.stderr)
    return 1
  found = [p for root in ROOTS for p in (project / root).rglob("BUILD")]
  for path in sorted({*wanted, *(p.relative_to(project) for p in found)}):
    there = project / path
    old = there.read_text(encoding="utf-8") if there.exists() else ""
    new = wanted.get(path, "")
    if old == new:
      continue
    if check:
      lines = (old.splitlines(True), new.splitlines(True))
      diff = difflib.unified_diff(*lines, f"{path}", f"{path}, as it should be")
      sys.stdout.writelines(diff)
      print("update_build: run `python tools/update_build.py`", file=sys.stderr)
      return 1
    if new:
      there.write_text(new, encoding="utf-8")
    else:
      there.unlink()  # The sources it was for are gone.
    print(
      f"update_build: wrote {path}" if new else f"update_build: removed {path}"
    )
  return 0


if __name__ == "__main__":
  raise SystemExit(main(sys.argv[1:]))
