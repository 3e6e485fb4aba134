"""The command line: `tf-cross-shard`, or `python -m tf_cross_shard`.

Each command checks its arguments before it imports `tf_cross_shard`, which
imports TensorFlow. So `--help` and mistakes do not take seconds.
"""

import argparse
import importlib
import inspect
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from tf_cross_shard_cli import doctor, launch


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns the exit status."""
  parser = _parser()
  options = parser.parse_args(argv)
  try:
    if options.command is launch.run:  # Its workers inherit the environment.
      return launch.run(options)
    # TensorFlow prints errors only. oneDNN needs its own variable, since
    # it prints a message before TensorFlow reads the level.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    print(options.command(options))
  except _user_errors() as error:
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 2
  return 0


def _user_errors() -> tuple[type[Exception], ...]:
  """Returns the errors that are printed without a traceback."""
  tensorflow = sys.modules.get("tensorflow")
  of_tensorflow = [tensorflow.errors.OpError] if tensorflow else []
  return (ImportError, OSError, TypeError, ValueError, *of_tensorflow)


def _parser() -> argparse.ArgumentParser:
  """Returns the parser of all commands and their options."""
  parser = argparse.ArgumentParser(
    prog="tf-cross-shard",
    description="Tools for training with tf_cross_shard.CrossShardOptimizer.",
  )
  number = doctor.version("tf-cross-shard") or "0+source"
  version = f"tf-cross-shard {number}"
  parser.add_argument("--version", action="version", version=version)
  commands = parser.add_subparsers(required=True, metavar="COMMAND")

  def command(name: str, run: Any) -> argparse.ArgumentParser:
    """Adds a command, whose help is the docstring of its function."""
    about = inspect.cleandoc(run.__doc__ or name)  # None with -OO
    first = about.splitlines()[0]
    added = commands.add_parser(name, help=first, description=about)
    added.set_defaults(command=run)
    return added

  of_program: Any = {"type": _function_name, "metavar": "MODULE:FUNCTION"}
  add = command("compile", _compile).add_argument
  step = "a function for strategy.run, or one that calls strategy.run once"
  add("step", **of_program, help=step)
  add("--topology", required=True, help="the TPU slice, such as v5e:4x2")
  spec = (
    "dtype and shape of an argument of the function on one replica, such as"
    " 'float32[8, 64]'; give the option once for each argument"
  )
  of_inputs: Any = {"action": "append", "default": [], "metavar": "SPEC"}
  add("--input", **of_inputs, type=_input, help=spec)
  add("--json", action="store_true", help="print JSON instead of a table")
  add("--hlo", metavar="FILE", help="write the compiled program to a file")

  add = command("convert-checkpoint", _convert_checkpoint).add_argument
  src = "prefix of the old checkpoint, or a folder: its latest checkpoint"
  add("src", metavar="SRC", help=src)
  add("dst", metavar="DST", help="prefix of the new checkpoint")
  program = "a function that returns the model and the optimizer"
  add("--program", **of_program, required=True, help=program)
  names = "a name in the checkpoint, or null, for each name in the model"
  add("--names", type=_names, metavar="FILE.json", help=names)
  steps = "steps of the checkpoint's training, if it has no single global_step"
  add("--iterations", type=int, metavar="STEPS", help=steps)

  launch.add_arguments(command("launch", launch.run))
  command("doctor", doctor.examine)
  return parser


def _function_name(text: str) -> str:
  if not re.fullmatch(r"[^:]+:[^:]+", text):
    raise argparse.ArgumentTypeError(f"must be MODULE:FUNCTION; got {text!r}.")
  return text


def _input(text: str) -> tuple[str, list[int]]:
  match = re.fullmatch(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*", text)
  if match is None:
    raise argparse.ArgumentTypeError(
      f"must be a dtype and a shape, such as 'float32[8, 64]'; got {text!r}."
    )
  return match[1], [int(n) for n in re.findall(r"\d+", match[2])]


def _names(path: str) -> dict[str, str | None]:
  try:
    return dict(json.loads(pathlib.Path(path).read_bytes()))
  except (OSError, TypeError, ValueError) as error:
    raise argparse.ArgumentTypeError(
      'must be a JSON file such as {"dense/kernel": "fc/weights"}; got'
      f" {path}: {error}."
    ) from None


def _compile(options: argparse.Namespace) -> str:
  """Compiles a training step for a TPU slice, without a TPU.

  Reports which data the replicas exchange and how much memory they need.
  """
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
  """Converts a checkpoint of TensorFlow 1 to one of TensorFlow 2.

  Prints for each variable of the model which value of the checkpoint it has.
  """
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
  """Imports MODULE:FUNCTION, also from the working directory."""
  module_name, _, name = text.partition(":")
  folder = os.getcwd()  # The module may change the working directory.
  sys.path.insert(0, folder)  # `python -m` does this, too.
  try:
    module = importlib.import_module(module_name)
  finally:
    sys.path.remove(folder)
  function = getattr(module, name, None)
  if not callable(function):
    raise ValueError(
      f"{module_name} has no function {name!r}. Name one of its functions."
    )
  return module, function


def _specs(options: argparse.Namespace, step: Any) -> Sequence[Any]:
  """Returns the arguments of a step, from `--input` or from its signature."""
  import tensorflow as tf

  signature = getattr(step, "input_signature", None)
  if not options.input and signature:
    return tuple(signature)
  specs = [tf.TensorSpec(shape, dtype) for dtype, shape in options.input]
  for spec, expected in zip(specs, signature or (), strict=False):
    if not expected.is_compatible_with(spec):
      raise ValueError(
        f"--input {spec} does not fit {expected} of {options.step}. Give the"
        " dtype and shape of its input_signature, or leave out --input."
      )
  return specs


if __name__ == "__main__":
  sys.exit(main())
