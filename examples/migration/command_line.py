"""`app.run`, but that `--help` succeeds."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app


def run(main: Callable[[Sequence[str]], Any]) -> None:
  """Parses flags and runs `main`."""
  app.run(main, flags_parser=_parse)


def _parse(argv: Sequence[str]) -> list[str]:
  """Returns what is left without flags."""
  try:
    rest: list[str] = app.parse_flags_with_usage(argv)
  except SystemExit:
    if {"--help", "-help", "-?", "--helpfull", "--helpshort"} & set(argv):
      sys.exit(0)
    raise
  return rest
