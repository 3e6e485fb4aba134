"""The command line: `tf-cross-shard`, or `python -m tf_cross_shard`.

groups              draws a grouping
compile             compiles a step for a TPU slice, without a TPU
convert-checkpoint  brings a checkpoint of TensorFlow 1 over
launch              starts a program as several workers on this machine

A command imports what it needs when it runs: only `compile` and
`convert-checkpoint` need TensorFlow, and `groups` for a topology.
"""

import argparse
import ast
import difflib
import importlib
import inspect
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tf_cross_shard
from tf_cross_shard.multi_worker import launch

_DTYPES: Final = (
  *("bool", "int4", "int8", "int16", "int32", "int64"),
  *("uint4", "uint8", "uint16", "uint32", "uint64"),
  *("half", "bfloat16", "float16", "float32", "float64", "double"),
  *("float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)


class Input(NamedTuple):
  """What one `--input` says."""

  text: str  # "--input number 1, 'float32[8, 64]',"
  dtype: str
  shape: list[int]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns the exit status."""
  parser = _parser()
  options = parser.parse_args(argv)
  # An error is all that is printed, not what TensorFlow tells of itself. From
  # its oneDNN it tells before it has read how much it is to tell.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
  try:
    done = options.command(options)
  except _mistakes() as error:
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 2
  if isinstance(done, int):  # It has printed by itself.
    return done
  print(done)
  return 0


def _mistakes() -> tuple[type[Exception], ...]:
  """Errors whose words are enough; TensorFlow's own where it is in use."""
  tensorflow = sys.modules.get("tensorflow")
  own = [tensorflow.errors.OpError] if tensorflow else []
  return (ImportError, OSError, TypeError, ValueError, *own)


def _parser() -> argparse.ArgumentParser:
  """The commands and their options."""
  is_script = pathlib.Path(sys.argv[0]).stem == "tf-cross-shard"
  parser = argparse.ArgumentParser(
    prog="tf-cross-shard" if is_script else "python -m tf_cross_shard",
    description="Averages gradients over replica groups.",
  )
  version = f"tf-cross-shard {tf_cross_shard.__version__}"
  parser.add_argument("--version", action="version", version=version)
  commands = parser.add_subparsers(required=True, metavar="COMMAND")

  command = commands.add_parser("groups", help="draw a grouping")
  command.set_defaults(command=_groups)
  add = command.add_mutually_exclusive_group(required=True).add_argument
  add("--assignment", metavar="TABLE", help="such as '[[0, 1], [2, 3]]'")
  for kind in ("--contiguous", "--strided"):
    add(kind, nargs=2, type=int, metavar=("REPLICAS", "GROUP_SIZE"))
  add("--singletons", type=int, metavar="REPLICAS")
  along = "replicas of --topology that differ in this coordinate only"
  add("--along", choices=("x", "y", "z", "core"), help=along)
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

  about = "start a program as several workers on this machine"
  launch.add_arguments(commands.add_parser("launch", help=about))
  return parser


def _groups(options: argparse.Namespace) -> str:
  """Draws a grouping."""
  from tf_cross_shard import groups as groups_lib

  coordinates = None
  if options.topology:
    from tf_cross_shard import virtual_tpu

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
  inputs = [_input(*each) for each in enumerate(options.input)]
  module, step = _load(options.step, "the step")
  from tf_cross_shard import virtual_tpu

  strategies = [
    value
    for value in vars(module).values()
    if isinstance(value, virtual_tpu.VirtualTPUStrategy)
  ]
  specs = _specs(inputs, options.step, step)
  try:
    report = virtual_tpu.compile_for(
      options.topology,
      step,
      specs,
      strategy=strategies[0] if len(strategies) == 1 else None,
    )
  except (TypeError, ValueError) as error:
    if "in user code" not in str(error):
      raise
    given = ", ".join(str(spec) for spec in specs)
    words = f"{options.step} fails for {given}: {str(error).strip()}"
    raise ValueError(words) from error
  if options.hlo:
    pathlib.Path(options.hlo).write_text(report.hlo_text, encoding="utf-8")
  return report.to_json() if options.json else str(report)


def _convert_checkpoint(options: argparse.Namespace) -> str:
  """Converts a checkpoint and describes what was matched."""
  from tf_cross_shard import migration

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
  # The module may load a model: see tf_cross_shard/__init__.py.
  getattr(tf_cross_shard, "CrossShardOptimizer")  # noqa: B009
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


def _input(at: int, text: str) -> Input:
  """What an `--input` says, checked as far as it goes without TensorFlow."""
  shown = f"--input number {at + 1}, {text!r},"
  match = re.fullmatch(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*", text)
  if match is None:
    raise ValueError(
      f"{shown} must be a dtype and a shape, such as 'float32[8, 64]'."
    )
  dtype, numbers = match.groups()
  if dtype not in _DTYPES:
    close = difflib.get_close_matches(dtype, _DTYPES, 1) or ["float32"]
    raise ValueError(
      f"{shown} has the dtype {dtype!r}, which there is not. Did you mean"
      f" {close[0]!r}?"
    )
  return Input(shown, dtype, [int(n) for n in re.findall(r"\d+", numbers)])


def _specs(inputs: Sequence[Input], name: str, step: Any) -> Sequence[Any]:
  """What a step receives: the inputs, checked, or by its own signature."""
  import tensorflow as tf

  signature = getattr(step, "input_signature", None)
  if not inputs and signature:
    return tuple(signature)
  specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs]
  try:
    takes = inspect.signature(getattr(step, "python_function", step))
    takes.bind(*specs)
  except TypeError as error:
    raise ValueError(
      f"{name}{takes} cannot be called with {len(inputs)} of --input: {error}."
    ) from None
  for each, spec, wanted in zip(inputs, specs, signature or (), strict=False):
    if isinstance(wanted, tf.TensorSpec) and not wanted.is_compatible_with(
      spec
    ):
      raise ValueError(
        f"{each.text} does not fit the signature of {name}, which has"
        f" {wanted.dtype.name} of shape {wanted.shape} there."
      )
  return specs


if __name__ == "__main__":
  sys.exit(main())
