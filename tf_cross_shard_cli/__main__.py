"""The command line: `tf-cross-shard`, or `python -m tf_cross_shard`.

groups              draws a grouping
compile             compiles a step for a TPU slice, without a TPU
convert-checkpoint  brings a checkpoint of TensorFlow 1 over
launch              starts a program as several workers on this machine

Arguments are checked before anything imports `tf_cross_shard`, and with it
TensorFlow: help and mistakes do not take seconds.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from tf_cross_shard_cli import launch


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns the exit status."""
  parser = _parser()
  options = parser.parse_args(argv)
  try:
    if options.command is launch.run:  # Whose workers' environment stays.
      return launch.run(options)
    # TensorFlow is to print errors only; oneDNN's words come before it knows.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    print(options.command(options))
  except _mistakes() as error:
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 2
  return 0


def _mistakes() -> tuple[type[Exception], ...]:
  """Returns errors whose words are enough."""
  tensorflow = sys.modules.get("tensorflow")
  own = [tensorflow.errors.OpError] if tensorflow else []
  return (ImportError, OSError, TypeError, ValueError, *own)


def _parser() -> argparse.ArgumentParser:
  """Returns the commands and their options."""
  parser = argparse.ArgumentParser(
    prog="tf-cross-shard", description="Averages gradients over replica groups."
  )
  version = f"tf-cross-shard {_version()}"
  parser.add_argument("--version", action="version", version=version)
  commands = parser.add_subparsers(required=True, metavar="COMMAND")

  command = commands.add_parser("groups", help="draw a grouping")
  command.set_defaults(command=_groups)
  add = command.add_mutually_exclusive_group(required=True).add_argument
  rows = "such as '[[0, 1], [2, 3]]'"
  add("--assignment", nargs=1, type=table, metavar="ROWS", help=rows)
  for kind in ("--contiguous", "--strided"):
    add(kind, nargs=2, type=int, metavar=("REPLICAS", "GROUP_SIZE"))
  add("--singletons", nargs=1, type=int, metavar="REPLICAS")
  along = "replicas of --topology that differ in this coordinate only"
  add("--along", choices=("x", "y", "z", "core"), help=along)
  command.add_argument("--topology", help="a TPU slice, such as v5e:4x2")
  command.add_argument("--names", nargs="+", help="a name for each group")

  command = commands.add_parser(
    "compile", help="compile a step for a TPU slice, without a TPU"
  )
  command.set_defaults(command=_compile)
  add = command.add_argument
  step = "what strategy.run receives, or a function that calls it once"
  add("step", type=_function_name, metavar="MODULE:FUNCTION", help=step)
  add("--topology", required=True, help="such as v5e:4x2")
  spec = "one replica's argument, such as 'float32[8, 64]'; once for each"
  of_inputs: Any = {"action": "append", "default": [], "metavar": "SPEC"}
  add("--input", **of_inputs, type=_input, help=spec)
  add("--json", action="store_true", help="print JSON, not a table")
  add("--hlo", metavar="FILE", help="also write the program")

  command = commands.add_parser(
    "convert-checkpoint", help="bring a checkpoint of TensorFlow 1 over"
  )
  command.set_defaults(command=_convert_checkpoint)
  add = command.add_argument
  add("src", metavar="SRC", help="its prefix, or a folder")
  add("dst", metavar="DST", help="the prefix of the new one")
  program = "MODULE:FUNCTION, which returns the model and the optimizer"
  add("--program", required=True, type=_function_name, help=program)
  names = "names in the model and, for each, the name in the checkpoint"
  add("--names", type=_names, metavar="FILE.json", help=names)
  steps = "how many steps version 1 had made, if no global_step tells"
  add("--iterations", type=int, metavar="STEPS", help=steps)

  about = "start a program as several workers on this machine"
  launch.add_arguments(commands.add_parser("launch", help=about))
  return parser


def _version() -> str:
  """Returns the version that is installed."""
  try:
    return metadata.version("tf-cross-shard")
  except metadata.PackageNotFoundError:
    return "0+source"


def table(text: str) -> Any:
  """Returns the groups of an `--assignment`; errors say `invalid table`."""
  return json.loads(text)


def _function_name(text: str) -> str:
  """Returns MODULE:FUNCTION as it is."""
  if not re.fullmatch(r"[^:]+:[^:]+", text):
    raise argparse.ArgumentTypeError(f"must be MODULE:FUNCTION; got {text!r}.")
  return text


def _input(text: str) -> tuple[str, list[int]]:
  """Returns the dtype and the shape that an `--input` names."""
  match = re.fullmatch(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*", text)
  if match is None:
    raise argparse.ArgumentTypeError(
      f"must be a dtype and a shape, such as 'float32[8, 64]'; got {text!r}."
    )
  return match[1], [int(n) for n in re.findall(r"\d+", match[2])]


def _names(path: str) -> dict[str, str | None]:
  """Returns the names in a JSON file."""
  try:
    return dict(json.loads(pathlib.Path(path).read_bytes()))
  except (OSError, TypeError, ValueError) as error:
    raise argparse.ArgumentTypeError(
      'must be a file such as {"dense/kernel": "fc/weights"}; got'
      f" {path}: {error}."
    ) from None


def _groups_module() -> Any:
  """Returns `tf_cross_shard.groups`, loaded without the package around it."""
  package: Any = importlib.util.find_spec("tf_cross_shard")
  path = pathlib.Path(package.origin).with_name("groups.py")
  spec: Any = importlib.util.spec_from_file_location("groups", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _groups(options: argparse.Namespace) -> str:
  """Draws a grouping."""
  if options.along and not options.topology:
    raise ValueError("--along needs --topology, whose coordinates it means.")
  lib = _groups_module()
  groups = None
  for builder, arguments in (
    (lib.Groups, options.assignment),
    (lib.contiguous, options.contiguous),
    (lib.strided, options.strided),
    (lib.singletons, options.singletons),
  ):
    if arguments:
      groups = builder(*arguments)
  if options.topology:
    from tf_cross_shard import virtual_tpu

    coordinates = virtual_tpu.coordinates(options.topology)
    groups = groups or lib.along(coordinates, options.along)
    if len(coordinates) != groups.num_replicas:
      raise ValueError(
        f"--topology {options.topology} has {len(coordinates)} devices; the"
        f" groups hold {groups.num_replicas} replicas."
      )
  return str(lib.Groups(groups, names=options.names).draw())


def _compile(options: argparse.Namespace) -> str:
  """Compiles the named step and describes the result."""
  module, step = _load(options.step)
  from tf_cross_shard import virtual_tpu

  strategies = [
    value
    for value in vars(module).values()
    if isinstance(value, virtual_tpu.VirtualTPUStrategy)
  ]
  report = virtual_tpu.compile_for(
    options.topology,
    step,
    _specs(options, step),
    strategy=strategies[0] if len(strategies) == 1 else None,
  )
  if options.hlo:
    pathlib.Path(options.hlo).write_text(report.hlo_text, encoding="utf-8")
  return report.to_json() if options.json else str(report)


def _convert_checkpoint(options: argparse.Namespace) -> str:
  """Converts a checkpoint and describes what was matched."""
  program = _load(options.program)[1]()
  if not isinstance(program, tuple) or len(program) != 2:
    raise TypeError(
      f"--program {options.program} must return a model and an optimizer; got"
      f" {type(program).__name__}."
    )
  from tf_cross_shard import migration

  conversion = migration.convert_checkpoint(
    options.src,
    options.dst,
    *program,
    names=options.names,
    iterations=options.iterations,
  )
  return str(conversion)


def _load(text: str) -> tuple[Any, Any]:
  """Returns a module in the path or the working directory, and a function."""
  module_name, _, name = text.partition(":")
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


def _specs(options: argparse.Namespace, step: Any) -> Sequence[Any]:
  """Returns what a step receives: the inputs, or what its signature says."""
  import tensorflow as tf

  signature = getattr(step, "input_signature", None)
  if not options.input and signature:
    return tuple(signature)
  specs = [tf.TensorSpec(shape, dtype) for dtype, shape in options.input]
  for spec, expected in zip(specs, signature or (), strict=False):
    if not expected.is_compatible_with(spec):
      raise ValueError(
        f"--input {spec} does not fit {expected} of {options.step}."
      )
  return specs


if __name__ == "__main__":
  sys.exit(main())
