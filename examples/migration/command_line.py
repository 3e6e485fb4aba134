"""`app.run`, except that `--help` exits with status 0."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app


def run(main: Callable[[Sequence[str]], Any]) -> None:
  """Parses the flags and runs `main`."""
  app.run(main, flags_parser=_parse)


def _parse(argv: Sequence[str]) -> list[str]:
  """Parses the flags; returns the other arguments."""
  try:
    rest: list[str] = app.parse_flags_with_usage(argv)
  except SystemExit:
    if {"--help", "-help", "-?", "--helpfull", "--helpshort"} & set(argv):
      sys.exit(0)
    raise
  return rest
