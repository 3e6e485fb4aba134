"""Functions for the command lines of the examples."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags


def run(main: Callable[[Sequence[str]], Any]) -> None:
  """Runs `main` like `app.run`, except that `--help` exits with status 0."""
  app.run(main, flags_parser=_parse)


def define_picture(default: str, about: str) -> flags.FlagHolder[str]:
  """Defines `--picture`. Parsing fails if the folder of the file is missing."""
  holder = flags.DEFINE_string("picture", default, about)
  flags.register_validator(
    holder,
    lambda path: Path(path).absolute().parent.is_dir(),
    "must be a file in a folder that exists",
  )
  return holder


def _parse(argv: Sequence[str]) -> list[str]:
  """Parses the flags; returns the other arguments."""
  try:
    rest: list[str] = app.parse_flags_with_usage(argv)
  except SystemExit:
    if {"--help", "-help", "-?", "--helpfull", "--helpshort"} & set(argv):
      sys.exit(0)
    raise
  return rest
