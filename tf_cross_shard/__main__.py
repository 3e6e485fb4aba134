"""The command line: `python -m tf_cross_shard`.

groups              draws a grouping
compile             compiles a step for a TPU slice, without a TPU
convert-checkpoint  brings a checkpoint of TensorFlow 1 over
"""

import argparse
import ast
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import migration, virtual_tpu


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command."""
  parser = _parser()
  options = parser.parse_args(argv)
  try:
    print(options.command(options))
  except (
    ImportError,
    OSError,
    TypeError,
    ValueError,
    virtual_tpu.TPUCompileError,
  ) as error:
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 2
  return 0


def _parser() -> argparse.ArgumentParser:
  """What the commands take."""
  parser = argparse.ArgumentParser(
    prog="python -m tf_cross_shard", description=__doc__.split("\n")[0]
  )
  commands = parser.add_subparsers(required=True, metavar="COMMAND")

  groups = commands.add_parser("groups", help="draw a grouping")
  groups.set_defaults(command=_groups)
  kinds = groups.add_mutually_exclusive_group(required=True)
  kinds.add_argument(
    "--assignment", metavar="TABLE", help="such as '[[0, 1], [2, 3]]'"
  )
  for kind in ("contiguous", "strided"):
    kinds.add_argument(
      f"--{kind}", nargs=2, type=int, metavar=("REPLICAS", "GROUP_SIZE")
    )
  kinds.add_argument("--singletons", type=int, metavar="REPLICAS")
  kinds.add_argument(
    "--along",
    choices=groups_lib.AXES,
    help="replicas of --topology that differ in this coordinate only",
  )
  groups.add_argument("--topology", help="a TPU slice, such as v5e:4x2")

  compile_ = commands.add_parser(
    "compile", help="compile a step for a TPU slice, without a TPU"
  )
  compile_.set_defaults(command=_compile)
  compile_.add_argument(
    "step",
    metavar="MODULE:FUNCTION",
    help="what strategy.run is given, or a function that calls it once",
  )
  compile_.add_argument("--topology", required=True, help="such as v5e:4x2")
  compile_.add_argument(
    "--input",
    action="append",
    default=[],
    metavar="SPEC",
    help="one replica's argument, such as 'float32[8, 64]'; once for each",
  )
  compile_.add_argument(
    "--json", action="store_true", help="print JSON, not a table"
  )
  compile_.add_argument("--hlo", metavar="FILE", help="also write the program")

  convert = commands.add_parser(
    "convert-checkpoint", help="bring a checkpoint of TensorFlow 1 over"
  )
  convert.set_defaults(command=_convert_checkpoint)
  convert.add_argument("src", metavar="SRC", help="its prefix, or a folder")
  convert.add_argument("dst", metavar="DST", help="the prefix of the new one")
  convert.add_argument(
    "--program",
    required=True,
    metavar="MODULE:FUNCTION",
    help="what makes the model and the optimizer, and returns both",
  )
  convert.add_argument(
    "--names",
    metavar="FILE.json",
    help="names in the model and, for each, the name in the checkpoint",
  )
  convert.add_argument(
    "--allow-unmatched",
    action="store_true",
    help="leave what has no counterpart",
  )
  convert.add_argument(
    "--slots",
    metavar="NAME",
    help="the name that version 1's optimizer was given, if it was",
  )
  convert.add_argument(
    "--iterations",
    type=int,
    metavar="STEPS",
    help="how many steps version 1 had made, if no global_step tells",
  )
  return parser


def _groups(options: argparse.Namespace) -> str:
  """Draws a grouping as text."""
  coordinates = None
  if options.topology:
    coordinates = virtual_tpu.coordinates(options.topology)
  if options.along:
    if coordinates is None:
      raise ValueError("--along needs --topology, whose coordinates it means.")
    groups = groups_lib.along(coordinates, options.along)
  elif options.assignment:
    groups = groups_lib.Groups(_table(options.assignment))
  elif options.contiguous:
    groups = groups_lib.contiguous(*options.contiguous)
  elif options.strided:
    groups = groups_lib.strided(*options.strided)
  else:
    groups = groups_lib.singletons(options.singletons)
  if coordinates is not None and len(coordinates) != groups.num_replicas:
    raise ValueError(
      f"--topology {options.topology} has {len(coordinates)} devices; the"
      f" groups hold {groups.num_replicas} replicas."
    )
  return groups.draw()


def _compile(options: argparse.Namespace) -> str:
  """Compiles the named step and describes the result."""
  inputs = [_spec(text) for text in options.input]
  module, step = _named(options.step, "the step")
  strategies = [
    value
    for value in vars(module).values()
    if isinstance(value, virtual_tpu.VirtualTPUStrategy)
  ]
  report = virtual_tpu.compile_for(
    options.topology,
    step,
    inputs or _signature(step),
    strategy=strategies[0] if len(strategies) == 1 else None,
  )
  if options.hlo:
    with open(options.hlo, "w", encoding="utf-8") as file:
      file.write(report.hlo_text)
  return report.to_json() if options.json else str(report)


def _convert_checkpoint(options: argparse.Namespace) -> str:
  """Converts a checkpoint and describes what was matched."""
  names = None
  if options.names:
    with open(options.names, "rb") as file:
      names = _json(options.names, file.read())
  _, program = _named(options.program, "--program")
  if not callable(program):
    raise TypeError(
      f"--program {options.program} must name a function; got"
      f" {type(program).__name__}: {program!r}."
    )
  made = program()
  if not isinstance(made, tuple) or len(made) != 2:
    raise TypeError(
      f"--program {options.program} must return a model and an optimizer; got"
      f" {type(made).__name__}."
    )
  done = migration.convert_checkpoint(
    options.src,
    options.dst,
    *made,
    names=names,
    allow_unmatched=options.allow_unmatched,
    slots=options.slots,
    iterations=options.iterations,
  )
  return str(done)


def _named(text: str, what: str) -> tuple[Any, Any]:
  """A module in the path or the working directory, and a function of it."""
  module_name, _, name = text.partition(":")
  if not module_name or not name:
    raise ValueError(f"{what} must be named MODULE:FUNCTION; got {text!r}.")
  here = os.getcwd()  # The module may change it.
  sys.path.insert(0, here)  # As `python -m` does for its own module.
  try:
    module = importlib.import_module(module_name)
  finally:
    sys.path.remove(here)
  function = getattr(module, name, None)
  if function is None:
    raise ValueError(f"{module_name} has no function {name!r}.")
  return module, function


def _signature(step: Any) -> Sequence[Any]:
  """The arguments that a tf.function says it takes."""
  return tuple(getattr(step, "input_signature", None) or ())


def _table(text: str) -> Any:
  """A table of numbers from the command line."""
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    raise ValueError(
      f"--assignment must be a table such as '[[0, 1], [2, 3]]'; got {text!r}."
    ) from None


def _json(path: str, content: bytes) -> Any:
  """What a JSON file holds."""
  try:
    text = content.decode()
    found = json.loads(text)
    if not isinstance(found, dict):
      raise ValueError(f"it is {text.strip()}")
    for key, name in found.items():
      if not isinstance(name, str):
        raise ValueError(f"{key!r} has {name!r}, which is no name")
    return found
  except ValueError as error:
    raise ValueError(
      '--names must be a file such as {"dense/kernel": "fc/weights"}; got'
      f" {path}: {error}."
    ) from None


def _spec(text: str) -> Any:
  """Dtype and shape from the command line."""
  match = re.fullmatch(r"\s*(\w+)\s*\[\s*([\d\s,]*)\]\s*", text)
  try:
    if match is None:
      raise TypeError
    dtype = tf.as_dtype(match[1])
  except TypeError:
    raise ValueError(
      f"--input must be a dtype and a shape, such as 'float32[8, 64]'; got"
      f" {text!r}."
    ) from None
  return tf.TensorSpec([int(n) for n in re.findall(r"\d+", match[2])], dtype)


if __name__ == "__main__":
  sys.exit(main())
