"""Flags of the examples, and fewer messages of TensorFlow."""

import argparse
import os
import pathlib
from typing import Any

# TensorFlow reads these variables when it is imported, so import this module
# before it. oneDNN is off because it rounds differently on different machines.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


def parse(about: str | None, **flags: tuple[Any, str]) -> Any:
  """Returns the values of the flags, as attributes.

  Args:
    about: What `--help` prints first.
    **flags: The default value and the meaning of each flag. An integer must be
      at least 1, or 0 if 0 is the default.
  """
  parser = argparse.ArgumentParser(
    description=about, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for name, (default, meaning) in flags.items():
    kind: dict[str, Any] = {"type": type(default)}
    if isinstance(default, bool):
      kind = {"action": argparse.BooleanOptionalAction}
    elif isinstance(default, int):
      kind = {"type": _count if default else int}
    elif default is None or name == "picture":
      kind = {"type": _file if default else str}
    text = f"{meaning} Default: {default}."
    parser.add_argument(f"--{name}", default=default, help=text, **kind)
  return parser.parse_args()


def _count(text: str) -> int:
  if int(text) < 1:
    raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
  return int(text)


def _file(text: str) -> str:
  if not pathlib.Path(text).absolute().parent.is_dir():
    raise argparse.ArgumentTypeError("must be a file in a folder that exists")
  return text
