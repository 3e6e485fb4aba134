"""Converts a checkpoint of TensorFlow 1 to one of TensorFlow 2 and Keras.

TensorFlow 1, by name                     Keras, by object
dense/kernel                         ──▶  weight of the model
dense/kernel/Adam, .../Adam_1        ──▶  its slots momentum and velocity
global_step                          ──▶  optimizer.iterations
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import keras_classes, keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib
from tf_cross_shard._src.models import archive

_Names = Mapping[str, str | None]
_Shapes = Mapping[str, tuple[int, ...]]

# By Keras' class: TensorFlow 1's name of the optimizer, and Keras' attributes
# for its slots, in the order in which TensorFlow 1 created and numbered them.
_SLOTS: Final = {
  "SGD": ("Momentum", ["momentums"]),
  "Adam": ("Adam", ["_momentums", "_velocities"]),
  "Adagrad": ("Adagrad", ["_accumulators"]),
  "RMSprop": ("RMSProp", ["_velocities", "_average_gradients", "_momentums"]),
  "Adadelta": ("Adadelta", ["_accumulated_grads", "_accumulated_delta_vars"]),
  "Ftrl": ("Ftrl", ["_accumulators", "_linears"]),
}


@dataclasses.dataclass(frozen=True)
class Conversion:
  """Result of `convert_checkpoint`; printing it gives a table.

  Attributes:
    path: The prefix of the checkpoint that was written.
    matched: The name in the old checkpoint of each variable's value.
    unmatched_in_checkpoint: Shapes of the values that no variable received.
    unmatched_in_model: Shapes of the variables that kept their values.
  """

  path: str
  matched: Mapping[str, str]
  unmatched_in_checkpoint: _Shapes
  unmatched_in_model: _Shapes

  def __str__(self) -> str:
    width = max(map(len, self.matched), default=0)
    lines = [f"{self.path}: {len(self.matched)} variables"]
    lines += [f"  {n:<{width}}  {s}" for n, s in self.matched.items()]
    lines += _listed("in the checkpoint only", self.unmatched_in_checkpoint)
    lines += _listed("in model and optimizer only", self.unmatched_in_model)
    return "\n".join(lines)


def convert_checkpoint(
  src: str | os.PathLike[str],
  dst: str | os.PathLike[str],
  model: Any,
  optimizer: Any,
  *,
  names: _Names | None = None,
  iterations: int | None = None,
) -> Conversion:
  """Converts weights, slots and the number of steps from TensorFlow 1.

  Afterwards, the model and the optimizer hold the values on every replica, and
  `dst` is a checkpoint of TensorFlow 2 that another program can read with

      tf.train.Checkpoint(model=model, optimizer=optimizer).read(dst)

  See `tf_cross_shard.migration` for an example. Give the new optimizer the
  hyperparameters of the old one, which are not in a checkpoint. The momentum of
  a Keras SGD contains the learning rate: do not change the learning rate.

  A weight is found by its own name, with or without the name of the model
  before it; a slot by the name that TensorFlow 1 gave it, such as `weight/Adam`
  and `weight/Adam_1`; the number of steps by the name `global_step`. Under a
  schedule, the momentum of a Keras SGD gets the learning rate of that step.

  Args:
    src: The prefix of the old checkpoint, or a folder with its latest one.
    dst: The prefix of the new checkpoint. Its folder is created if necessary.
    model: A Keras model or a tf.Module, built, or a list of variables.
    optimizer: A CrossShardOptimizer or another Keras optimizer. If it is not
      built, it is built on the trainable variables.
    names: Names in the checkpoint of what is not found by itself, by the names
      in the model and the optimizer ("dense/kernel", "dense/kernel/momentum",
      "iterations"; "name#2" for a second one). "{}" stands for every weight, as
      in {"{}": "scope/{}"} and {"{}/momentum": "{}/my_adam"}. Map a name of
      either side to None to skip it. There, "{}" matches any text, as in
      {"{}/ExponentialMovingAverage": None}.
    iterations: The number of steps that the old program had made. None (the
      default) reads the only `global_step` of the checkpoint.

  Raises:
    ValueError: If something has no counterpart or more than one, or another
      shape or dtype, in which case no value has changed.
    FileExistsError: If there is a checkpoint at `dst`.
  """
  replicas_lib.check_between_steps()
  target = os.fspath(archive.as_path(dst, "dst"))
  if tf.io.gfile.exists(f"{target}.index"):
    raise FileExistsError(
      f"`dst` is {target!r}, but a checkpoint with this name already exists."
      " Choose a different prefix, or delete the existing checkpoint."
    )
  reader = _open(src)
  shapes = {n: tuple(s) for n, s in reader.get_variable_to_shape_map().items()}
  weights = _weights(model, shapes)
  strategy = replicas_lib.strategy_of(weights[0].variable)
  scope = (strategy or tf.distribute.get_strategy()).scope
  listed = [w.variable for w in weights if w.variable.trainable]
  variables = list(getattr(model, "trainable_variables", listed))
  if not keras_private.is_built(wrapped_lib.base_optimizer(optimizer)):
    with scope():
      optimizer.build(variables)
  by_id = {id(weight.variable): weight for weight in weights}
  trained = [by_id[id(variable)] for variable in variables]
  names = names or {}
  of_weights = _sources(weights, names, shapes)
  step = iterations
  if step is None:
    source = names.get("iterations") or _only_scalar("global_step", shapes)
    step = reader.get_tensor(source) if shapes.get(source or "") == () else 0
  wanted = [*weights, *_state(optimizer, trained, of_weights, shapes, step)]
  labels = variables_lib.unique([each.name for each in wanted])
  wanted = [w._replace(name=n) for w, n in zip(wanted, labels, strict=True)]
  sources = _sources(wanted, names, shapes)
  if iterations is not None:
    sources.setdefault(wanted[-1].name, f"iterations={iterations}")
  done = Conversion(
    target,
    sources,
    {n: s for n, s in shapes.items() if n not in sources.values()},
    {w.name: w.variable.shape for w in wanted if w.name not in sources},
  )
  _check(done, wanted, names, reader)
  # Read all values first: a damaged file is an error before any value changes.
  values = [
    (each.variable, _read(reader, sources[each.name], each))
    for each in wanted
    if sources.get(each.name) in shapes
  ]
  if iterations is not None:
    values.append((wanted[-1].variable, iterations))
  with scope():
    for variable, value in values:
      variable.assign(value)
  tf.train.Checkpoint(model=model, optimizer=optimizer).write(target)
  return done


class _Wanted(NamedTuple):
  """A variable of the program, and where its value is looked for."""

  name: str  # In `names` and in `Conversion`.
  variable: Any
  default: str | None  # In the checkpoint, unless `names` has another name.
  pattern: str = ""  # The key of `names` for all of these: "{}/momentum".
  stem: str = ""  # The text for "{}" in the value of that entry.
  factor: float = 1.0  # What the value is multiplied by.


def _read(reader: Any, source: str, wanted: _Wanted) -> Any:
  dtype = tf.as_dtype(wanted.variable.dtype).as_numpy_dtype
  return np.asarray(reader.get_tensor(source), dtype) * dtype(wanted.factor)


def _open(src: Any) -> Any:
  """Opens a checkpoint; for a folder, its latest one."""
  path = os.fspath(archive.as_path(src, "src"))
  if not tf.io.gfile.exists(f"{path}.index"):
    path = tf.train.latest_checkpoint(path) or path
  # `load_checkpoint` would prefer a folder of this name.
  reader: Any = tf.compat.v1.train.NewCheckpointReader(path)
  if reader.has_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"):
    raise ValueError(
      f"`src` must be a checkpoint of TensorFlow 1; {path} is one of"
      " TensorFlow 2. Read it with tf.train.Checkpoint(model=model,"
      " optimizer=optimizer).read(src)."
    )
  return reader


def _weights(model: Any, shapes: _Shapes) -> list[_Wanted]:
  """Returns the variables that a checkpoint of TensorFlow 1 may hold."""
  if isinstance(model, (list, tuple)):
    variables = list(model)
  elif not getattr(model, "built", True):
    variables = []
  else:
    # `variables` of a Keras model includes metrics and random states. Ask the
    # class: `weights` of a model that has none yet may raise an error.
    is_keras = hasattr(type(model), "weights")
    variables = list(model.weights if is_keras else model.variables)
  if not variables:
    raise ValueError(
      f"`model` has no variables yet: got {type(model).__name__}. Build it with"
      " model.build(input_shape), or call it on one batch."
    )
  variables = list({id(variable): variable for variable in variables}.values())
  prefix = f"{getattr(model, 'name', None)}/"
  paths = [variables_lib.path_of(v).removeprefix(prefix) for v in variables]
  labels = variables_lib.unique(paths)
  weights = []
  for label, path, variable in zip(labels, paths, variables, strict=True):
    # The checkpoint has the name with or without the model's, but not both,
    # and no other weight has the same name: otherwise `names` must decide.
    fits = {path, prefix + path} & shapes.keys()
    is_sure = paths.count(path) == 1 and len(fits) == 1
    default = fits.pop() if is_sure else None
    weights.append(_Wanted(label, variable, default, "{}", path))
  return weights


def _state(
  optimizer: Any,
  trained: Sequence[_Wanted],
  sources: Mapping[str, str],
  shapes: dict[str, tuple[int, ...]],
  step: Any,
) -> Iterator[_Wanted]:
  """Yields slots, other variables, and the number of steps as the last one."""
  base_optimizer = wrapped_lib.base_optimizer(optimizer)
  # With `shard_update`, slots are in parts; this state has whole slots.
  state = nested_lib.sharded_state(optimizer) or wrapped_lib.WrappedOptimizer(
    base_optimizer
  )
  v1_names = _v1_names(base_optimizer)
  is_sgd = "Momentum" in v1_names.values()
  # tf_keras creates slots for an SGD without momentum, too.
  is_idle = is_sgd and not float(base_optimizer.momentum)
  factor = 1.0
  if is_sgd and not is_idle:
    factor = _factor_of_momentum(base_optimizer, step)
  rates = nested_lib.rate_variables(base_optimizer)
  known = {id(base_optimizer.iterations), *map(id, rates)}
  for weight in trained:
    source = sources.get(weight.name)
    slots = state.slots(weight.variable)
    known |= set(map(id, slots.values()))
    if source is None or is_idle:
      continue
    for name, slot in slots.items():
      v1_name = v1_names.get(id(getattr(slot, "parts", slot)))
      default = f"{source}/{v1_name or name}"
      scale = factor if v1_name else 1.0
      label = f"{weight.name}/{name}"
      yield _Wanted(label, slot, default, f"{{}}/{name}", source, scale)
  # Keras' Adam computes the powers of its betas from `iterations`.
  powers = r"(.*/)?beta[12]_power(_\d+)?"
  for name in [n for n in shapes if re.fullmatch(powers, n)]:
    del shapes[name]
  for other in state.variables:
    if id(other) not in known:
      name = variables_lib.path_of(other).rpartition("/")[2]
      yield _Wanted(name, other, _only_scalar(rf"{name}(_\d+)?", shapes))
  yield _Wanted(
    "iterations", base_optimizer.iterations, _only_scalar("global_step", shapes)
  )


def _v1_names(optimizer: Any) -> dict[int, str]:
  """Returns TensorFlow 1's names of slots ("Adam", "Adam_1"), by their ids."""
  kinds = map(keras_classes.name_in_keras, type(optimizer).__mro__)
  kind = next((kind for kind in kinds if kind in _SLOTS), None)
  if kind is None:
    return {}
  name, attributes = _SLOTS[kind]
  if not getattr(optimizer, "centered", True):
    attributes = [a for a in attributes if a != "_average_gradients"]
  # A slot that Keras does not have is counted, too.
  return {
    id(slot): f"{name}_{number}" if number else name
    for number, attribute in enumerate(attributes)
    for slot in getattr(optimizer, attribute, None) or ()
  }


def _factor_of_momentum(sgd: Any, step: Any) -> float:
  """Returns v / a, for the momentum a of TensorFlow 1 and v of Keras' SGD."""
  # With the gradient g and the weight w:
  #     TensorFlow 1   a = momentum * a + g           w = w - rate * a
  #     Keras          v = momentum * v - rate * g    w = w + v
  # Under a schedule, this is exact for the next step.
  [rate] = keras_private.rates_and_schedules(sgd)
  rate = rate(step) if callable(rate) else rate
  return -float(tf.convert_to_tensor(rate))


def _only_scalar(name: str, shapes: _Shapes) -> str | None:
  """Returns the only scalar of a name, in any scope; None if it is not one."""
  scalars = [n for n, shape in shapes.items() if shape == ()]
  fits = [n for n in scalars if re.fullmatch(rf"(.*/)?{name}", n)]
  return fits[0] if len(fits) == 1 else None


def _sources(
  wanted: Sequence[_Wanted], names: _Names, shapes: _Shapes
) -> dict[str, str]:
  """Returns the name in the checkpoint of each variable that has one there."""
  sources: dict[str, str] = {}
  for each in wanted:
    # An entry for this variable comes before an entry for all such variables.
    source = names.get(each.name)
    if source is not None and source not in shapes:
      raise ValueError(
        f"`names` says that `{each.name}` is {source!r}, which the checkpoint"
        f" does not have. It has {', '.join(sorted(shapes))}."
      )
    if source is None and not _is_excluded(each.name, names):
      general = (names.get(each.pattern) or "").replace("{}", each.stem)
      default = each.default or ""
      is_left_out = _is_excluded(default, names)
      source = general if general in shapes or is_left_out else default
    if source in sources.values():
      raise ValueError(
        f"`{source}` of the checkpoint would be the value of {each.name} and of"
        " another variable. Choose one of them with `names`."
      )
    if source is not None and source in shapes:
      sources[each.name] = source
  return sources


def _fits(key: str, name: str) -> bool:
  return bool(re.fullmatch(re.escape(key).replace(r"\{\}", ".*"), name))


def _is_excluded(name: str, names: _Names) -> bool:
  """Returns whether an entry of `names` with None leaves out a name."""
  return any(names[key] is None and _fits(key, name) for key in names)


def _check(
  done: Conversion, wanted: Sequence[_Wanted], names: _Names, reader: Any
) -> None:
  """Raises an error if kinds differ or something lacks a counterpart."""
  shapes = reader.get_variable_to_shape_map()
  dtypes = reader.get_variable_to_dtype_map()
  lines: list[str] = []
  for each in wanted[:-1]:  # The number of steps may have any integer dtype.
    if (source := done.matched.get(each.name)) is not None:
      dtype = tf.as_dtype(each.variable.dtype).name
      expected = f"{dtype} {list(each.variable.shape)}"
      actual = f"{dtypes[source].name} {shapes[source]}"
      if expected != actual:
        lines += [] if lines else ["Shapes or dtypes differ:"]
        words = f"{expected} in the model, {actual} in {source}"
        lines.append(f"  {each.name}: {words}")
  # `names` has something else for a variable whose default is not used.
  defaults = {each.default for each in wanted}
  known = {*shapes, *done.matched, *done.unmatched_in_model}
  unused = [k for k in names if not any(_fits(k, name) for name in known)]
  theirs, ours = (
    {
      name: shape
      for name, shape in unmatched.items()
      if not _is_excluded(name, names) and name not in defaults
    }
    for unmatched in (done.unmatched_in_checkpoint, done.unmatched_in_model)
  )
  lines += _listed("in `names` only", dict.fromkeys(unused, ()))
  lines += _listed("in the checkpoint only", theirs)
  lines += _listed("in model and optimizer only", ours)
  if lines:
    raise ValueError(
      "Not everything has a counterpart:\n" + "\n".join(lines) + "\nPass"
      ' names={"in the model": "in the checkpoint"}, or None for what to leave'
      " out, or iterations=STEPS; or add the missing variables."
    )


def _listed(side: str, shapes: Mapping[str, Any]) -> list[str]:
  """Lists names and shapes under a heading; nothing if there are none."""
  lines = [f"  {name} {list(shapes[name])}" for name in sorted(shapes)]
  return [f"{side}:", *lines] if lines else []
