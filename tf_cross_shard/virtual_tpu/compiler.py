"""The real TPU compiler, on a step that no TPU has run.

step --run, recorded--> program --lower--> XLA module --libtpu--> report
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard.virtual_tpu import binding, report, runtime, xla
from tf_cross_shard.virtual_tpu import strategy as strategy_lib


def compile_for(
  topology: str,
  fn: Callable[..., Any],
  args: Sequence[Any] = (),
  *,
  strategy: strategy_lib.VirtualTPUStrategy | None = None,
  num_replicas: int | None = None,
) -> report.Report:
  """Compiles a step for a TPU slice; needs libtpu but no TPU.

  Nothing is run and no variable changes.

  >>> def step(x):
  ...   context = tf.distribute.get_replica_context()
  ...   return context.all_reduce("SUM", x)
  >>> report = compile_for("v5e:2x2", step, [tf.TensorSpec([8, 64])])
  >>> report.collectives[0].kind, report.collectives[0].groups
  ('all-reduce', ((0, 1, 2, 3),))
  >>> report.wire_bytes  # 8 x 64 numbers of 4 bytes
  2048

  Args:
    topology: Generation and chips in each direction, such as "v5e:4x2".
    fn: The function that `strategy.run` is given, or one that calls
      `strategy.run` once.
    args: Its arguments: tensors, arrays or `tf.TensorSpec`, of the shapes
      that one replica sees, or structures of these; a Keras model's
      `train_step` takes one pair.
    strategy: Whose variables `fn` uses. None means the strategy whose scope
      this is called in, the one that `fn` calls `run` of, or a new one.
    num_replicas: If given, checked against the topology.

  Returns:
    The compiler's report; printing it gives a table.

  Raises:
    ValueError: If there is no such topology, if its number of devices is not
      the number of replicas, or if `fn` does not call `strategy.run` exactly
      once.
    TypeError: If `fn` cannot be called or `strategy` is of another kind.
    ImportError: If libtpu or jaxlib is missing or of an untested version.
    TPUCompileError: If a TPU cannot run the step.
  """
  if not callable(fn):
    raise TypeError(f"`fn` must be a function; got {fn!r}.")
  where = xla.topology(topology)
  size = len(where.devices)
  here = tf.distribute.get_strategy()
  if strategy is None and isinstance(here, strategy_lib.VirtualTPUStrategy):
    strategy = here
  if strategy is None:
    strategy = strategy_lib.VirtualTPUStrategy(num_replicas or size)
  if not isinstance(strategy, strategy_lib.VirtualTPUStrategy):
    raise TypeError(
      "`strategy` must be a VirtualTPUStrategy, under which the variables of"
      f" `fn` were made; got {type(strategy).__name__}."
    )
  for name, count in (
    ("num_replicas", num_replicas),
    ("strategy", strategy.num_replicas_in_sync),
  ):
    if count is not None:
      _check_size(topology, size, name, count)
  recorded, call = _record(fn, args, strategy)
  count = recorded.replicas.num_replicas
  _check_size(topology, size, "fn", count)
  shapes = [spec.shape for spec in call.specs]
  shapes += [tensor.shape for tensor in recorded.traced.captured]
  for shape in shapes:
    if not shape.is_fully_defined():
      raise ValueError(
        "`args` must have known shapes, for a TPU program is compiled for one"
        f" shape; got {shape}. Give for example tf.TensorSpec([8, 64])."
      )
  lowered = recorded.lower(shapes)
  return report.make(where, xla.compile_for_tpu(lowered.module, where))


def _record(
  fn: Callable[..., Any],
  args: Sequence[Any],
  strategy: strategy_lib.VirtualTPUStrategy,
) -> tuple[runtime.Program, binding.Call]:
  """The one program that a step runs, not run."""
  specs = [
    tf.TensorSpec(arg.shape, arg.dtype)
    if isinstance(arg, (tf.Tensor, np.ndarray))
    else arg
    for arg in args
  ]
  found: list[tuple[runtime.Program, binding.Call]] = []
  # A tf.function that was traced before would not call `run` again.
  fn = getattr(fn, "python_function", fn)

  def on_host(*tensors: Any) -> Any:
    return fn(*tensors)

  def on_replicas(*tensors: Any) -> Any:
    return strategy.run(fn, tensors)

  with binding.recording(lambda *each: found.append(each)):
    try:
      tf.function(on_replicas).get_concrete_function(*specs)
    except strategy_lib.NestedRunError:
      found.clear()
      tf.function(on_host).get_concrete_function(*specs)
  if len(found) != 1:
    raise ValueError(
      f"`fn` must be one step: the function given to strategy.run, or one that"
      f" calls strategy.run once; this one called it {len(found)} times."
    )
  return found[0]


def _check_size(topology: str, size: int, name: str, count: int) -> None:
  """Raises an error unless each replica has a device and no device is idle."""
  if count != size:
    raise ValueError(
      f"`topology` {topology!r} has {size} devices, one per replica; `{name}`"
      f" has {count} replicas. Choose a topology of {count} devices, or make"
      f" everything under VirtualTPUStrategy({size})."
    )
