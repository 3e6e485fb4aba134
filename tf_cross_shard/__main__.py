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
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard import migration, virtual_tpu


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns the exit status."""
  parser = _parser()
  options = parser.parse_args(argv)
  try:
    print(options.command(options))
  except (
    ImportError,
    OSError,
    TypeError,
    ValueError,
    tf.errors.OpError,
  ) as error:
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 2
  return 0


def _parser() -> argparse.ArgumentParser:
  """The commands and their options."""
  parser = argparse.ArgumentParser(
    prog="python -m tf_cross_shard", description=__doc__.split("\n")[0]
  )
  commands = parser.add_subparsers(required=True, metavar="COMMAND")

  command = commands.add_parser("groups", help="draw a grouping")
  command.set_defaults(command=_groups)
  add = command.add_mutually_exclusive_group(required=True).add_argument
  add("--assignment", metavar="TABLE", help="such as '[[0, 1], [2, 3]]'")
  for kind in ("--contiguous", "--strided"):
    add(kind, nargs=2, type=int, metavar=("REPLICAS", "GROUP_SIZE"))
  add("--singletons", type=int, metavar="REPLICAS")
  along = "replicas of --topology that differ in this coordinate only"
  add("--along", choices=groups_lib.AXES, help=along)
  command.add_argument("--topology", help="a TPU slice, such as v5e:4x2")

  command = commands.add_parser(
    "compile", help="compile a step for a TPU slice, without a TPU"
  )
  command.set_defaults(command=_compile)
  add = command.add_argument
  step = "what strategy.run receives, or a function that calls it once"
  add("step", metavar="MODULE:FUNCTION", help=step)
  add("--topology", required=True, help="such as v5e:4x2")
  spec = "one replica's argument, such as 'float32[8, 64]'; once for each"
  add("--input", action="append", default=[], metavar="SPEC", help=spec)
  add("--json", action="store_true", help="print JSON, not a table")
  add("--hlo", metavar="FILE", help="also write the program")

  command = commands.add_parser(
    "convert-checkpoint", help="bring a checkpoint of TensorFlow 1 over"
  )
  command.set_defaults(command=_convert_checkpoint)
  add = command.add_argument
  add("src", metavar="SRC", help="its prefix, or a folder")
  add("dst", metavar="DST", help="the prefix of the new one")
  program = "a function that returns the model and the optimizer"
  add("--program", required=True, metavar="MODULE:FUNCTION", help=program)
  names = "names in the model and, for each, the name in the checkpoint"
  add("--names", metavar="FILE.json", help=names)
  unmatched = "leave what has no counterpart"
  add("--allow-unmatched", action="store_true", help=unmatched)
  slots = "the name that version 1's optimizer was given, or one for each slot"
  add("--slots", metavar="NAME|SLOT=NAME,...", help=slots)
  steps = "how many steps version 1 had made, if no global_step tells"
  add("--iterations", type=int, metavar="STEPS", help=steps)
  return parser


def _groups(options: argparse.Namespace) -> str:
  """Draws a grouping."""
  coordinates = None
  if options.topology:
    coordinates = virtual_tpu.coordinates(options.topology)
  if options.along:
    if coordinates is None:
      raise ValueError("--along needs --topology, whose coordinates it means.")
    groups = groups_lib.along(coordinates, options.along)
  elif options.assignment:
    try:
      groups = groups_lib.Groups(ast.literal_eval(options.assignment))
    except SyntaxError:
      raise ValueError(
        "--assignment must be a table such as '[[0, 1], [2, 3]]'; got"
        f" {options.assignment!r}."
      ) from None
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
  module, step = _load(options.step, "the step")
  strategies = [
    value
    for value in vars(module).values()
    if isinstance(value, virtual_tpu.VirtualTPUStrategy)
  ]
  report = virtual_tpu.compile_for(
    options.topology,
    step,
    inputs or getattr(step, "input_signature", None) or (),
    strategy=strategies[0] if len(strategies) == 1 else None,
  )
  if options.hlo:
    pathlib.Path(options.hlo).write_text(report.hlo_text, encoding="utf-8")
  return report.to_json() if options.json else str(report)


def _convert_checkpoint(options: argparse.Namespace) -> str:
  """Converts a checkpoint and describes what was matched."""
  names = _names(options.names) if options.names else None
  slots = options.slots
  if slots and "=" in slots:
    both = (each.partition("=") for each in slots.split(","))
    slots = {slot: name for slot, _, name in both}
  _, program = _load(options.program, "--program")
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
    slots=slots,
    iterations=options.iterations,
  )
  return str(done)


def _load(text: str, argument: str) -> tuple[Any, Any]:
  """A module in the path or the working directory, and a function of it."""
  module_name, _, name = text.partition(":")
  if not module_name or not name:
    raise ValueError(f"{argument} must be named MODULE:FUNCTION; got {text!r}.")
  folder = os.getcwd()  # The module may change it.
  sys.path.insert(0, folder)  # As `python -m` does for its own module.
  try:
    module = importlib.import_module(module_name)
  finally:
    sys.path.remove(folder)
  function = getattr(module, name, None)
  if not callable(function):
    raise ValueError(f"{module_name} has no function {name!r}.")
  return module, function


def _names(path: str) -> dict[str, str]:
  """The names in a JSON file."""
  try:
    return dict(json.loads(pathlib.Path(path).read_bytes()))
  except (TypeError, ValueError) as error:
    raise ValueError(
      '--names must be a file such as {"dense/kernel": "fc/weights"}; got'
      f" {path}: {error}."
    ) from None


def _spec(text: str) -> tf.TensorSpec:
  """Dtype and shape from the command line."""
  match = re.fullmatch(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*", text)
  try:
    dtype = tf.as_dtype(match[1] if match else None)
  except TypeError:
    raise ValueError(
      "--input must be a dtype and a shape, such as 'float32[8, 64]'; got"
      f" {text!r}."
    ) from None
  assert match is not None
  return tf.TensorSpec([int(n) for n in re.findall(r"\d+", match[2])], dtype)


if __name__ == "__main__":
  sys.exit(main())
