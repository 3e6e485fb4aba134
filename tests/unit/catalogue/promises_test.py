"""Each promise in the table of tests/README.md has a test."""

import ast
import functools

from tests.support import pages

PROMISES = pages.text("tests/README.md").partition("\n## Promises\n")[2]


@functools.cache
def _tests_in(file: str) -> set[str]:
  """The tests of a file, those of a class as `Class::test`."""
  found = set()
  for node in ast.parse(pages.text(f"tests/{file}")).body:
    if isinstance(node, ast.FunctionDef):
      found.add(node.name)
    if isinstance(node, ast.ClassDef):
      methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
      found |= {f"{node.name}::{method.name}" for method in methods}
  return {name for name in found if name.rpartition("::")[2][:5] == "test_"}


def test_each_promise_has_a_test() -> None:
  lines = [line for line in PROMISES.splitlines() if line.startswith("|")]
  heads = {"| promise | test |", "|---|---|"}
  rows = [line.strip("| ").split(" | ") for line in lines if line not in heads]
  assert len(rows) > 100
  for row in rows:
    assert len(row) == 2, f"{row} has no test"
    promise, test = row
    file, _, name = test.partition("::")
    assert (pages.PROJECT / "tests" / file).exists(), f"{promise}: {file}"
    assert name in _tests_in(file), f"{promise}: {test}"
