"""The programs in README.md and docs/, and how each is run."""

import contextlib
import io
import logging
import pathlib
import re
from collections.abc import Iterator
from unittest import mock

from tensorflow.python.data.ops import debug_mode

import tf_cross_shard

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent


def text(page: str) -> str:
  return (PROJECT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
  return re.findall(rf"```{language}\n(.*?)```", text(page), flags=re.DOTALL)


def programs(page: str) -> list[str]:
  """Returns the programs of a page.

  A diff counts as a program, with its changes applied. A Python block without
  an import continues the previous block.
  """
  found = [
    re.sub("(?m)^[+ ]", "", re.sub("(?m)^-.*\n", "", block))
    for block in blocks(page, "diff")
  ]
  for block in blocks(page, "python"):
    if re.search(r"(?m)^(import|from) ", block):
      found.append(block)
    else:
      found[-1] += block
  return found


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
  """Raises `AssertionError` if this package logs a warning in the context."""
  records: list[logging.LogRecord] = []
  handler = logging.Handler(logging.WARNING)
  handler.emit = records.append  # type: ignore[method-assign]
  logging.getLogger("absl").addHandler(handler)
  try:
    yield
  finally:
    logging.getLogger("absl").removeHandler(handler)
  package = pathlib.Path(tf_cross_shard.__file__).parent
  logged = [
    record.getMessage()
    for record in records
    if package in pathlib.Path(record.pathname).parents
    # A short program need not evaluate its groups.
    and "evaluate()" not in record.getMessage()
  ]
  assert not logged, logged


def check(
  page: str, program: str, folder: pathlib.Path, shown_after: str = ""
) -> None:
  """Runs a program in the current `folder`; it prints what the page says.

  The page shows the output below `shown_after`, or else below the program.
  """
  names: dict[str, object] = {"__name__": "__main__"}
  printed = io.StringIO()
  # What a page switches on in tf.data is off again for other tests.
  debug = mock.patch.object(debug_mode, "DEBUG_MODE", False)
  with contextlib.redirect_stdout(printed), no_warnings(), debug:
    # From a file, because tf.function reads the source of what it traces.
    (folder / "program.py").write_text(program)
    exec(compile(program, str(folder / "program.py"), "exec"), names)
  lines = printed.getvalue()
  # The page shows the output directly after the program. Times differ.
  follows = text(page).split(shown_after or program)[-1]
  shown = re.match(r"```\n\n```text\n(.*?)```", follows, re.DOTALL)
  if shown:
    assert shown[1].split("compile seconds")[0] in lines
