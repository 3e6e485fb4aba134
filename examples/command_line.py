"""What the examples' command lines have in common."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags


def run(main: Callable[[Sequence[str]], Any]) -> None:
  """Runs `main` as `app.run` does, but for `--help`, which succeeds."""
  app.run(main, flags_parser=_parse)


def define_picture(default: str, what: str) -> flags.FlagHolder[str]:
  """Defines `--picture`: a file in a folder that there is, before training."""
  holder = flags.DEFINE_string("picture", default, what)
  flags.register_validator(
    holder,
    lambda path: Path(path).absolute().parent.is_dir(),
    "must be a file in a folder that exists",
  )
  return holder


def _parse(argv: Sequence[str]) -> list[str]:
  """Returns what is left without flags."""
  try:
    rest: list[str] = app.parse_flags_with_usage(argv)
  except SystemExit:
    if {"--help", "-help", "-?", "--helpfull", "--helpshort"} & set(argv):
      sys.exit(0)
    raise
  return rest
