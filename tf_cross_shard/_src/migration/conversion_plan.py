"""Decides which variable receives which value of a TensorFlow 1 checkpoint.

Names decide, and nothing else. Where the names leave a choice, the user makes
it with the argument `names` of `convert_checkpoint`.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import inner as inner_lib
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.core.inner import v1_update
from tf_cross_shard._src.migration import v1_slots

Names = Mapping[str, str | None]
Shapes = dict[str, tuple[int, ...]]

# Only checkpoints of TensorFlow 2 have a value of this name.
_OBJECT_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
_GLOBAL_STEP: Final = r"(.*/)?global_step"
_POWER: Final = r"(.*/)?beta[12]_power(_\d+)?"


class ConversionPlan:
  """Matches variables with values of a checkpoint; assigns nothing.

  Call `find_weights`, then `find_state`, then `check`.

  Attributes:
    wanted: Every variable of the model and the optimizer, by its name.
    matched: For each name in `wanted` that has a counterpart, the name in the
      checkpoint.
    trained: The variables that the model trains.
  """

  def __init__(self, path: str, model: Any, names: Names) -> None:
    """Reads the names, shapes and dtypes in the checkpoint at `path`."""
    # Not load_checkpoint: if there is also a folder of this name, it reads the
    # latest checkpoint of that folder.
    self._reader: Any = tf.compat.v1.train.NewCheckpointReader(path)
    shapes = self._reader.get_variable_to_shape_map()
    self._shapes: Shapes = {n: tuple(shapes[n]) for n in sorted(shapes)}
    self._dtypes = self._reader.get_variable_to_dtype_map()
    if _OBJECT_GRAPH in shapes:
      raise ValueError(
        f"`src` must be a checkpoint of TensorFlow 1; {path} is one of"
        " TensorFlow 2. Read it with tf.train.Checkpoint(model=model,"
        " optimizer=optimizer).read(src)."
      )
    self._model_name = getattr(model, "name", None)
    self._names = names
    self._unused_names = set(names)
    # Entries of `names` that leave out all names of a pattern.
    self._excluding = {
      key: re.compile(re.escape(key).replace(r"\{\}", ".*"))
      for key, source in names.items()
      if source is None and "{}" in key
    }
    # Names of either side that need no counterpart.
    self._optional: set[str] = set()
    self._factors: dict[str, float] = {}
    self._iterations: int | None = None
    self._count = ""  # The name of the number of steps in `wanted`.
    self.wanted: dict[str, Any] = {}
    self.matched: dict[str, str] = {}
    self.trained: list[Any] = []
    self._labels: dict[int, str] = {}

  def find_weights(self, model: Any) -> list[Any]:
    """Matches the variables of the model, and returns them."""
    weights = _weights(model)
    if isinstance(model, (list, tuple)):
      self.trained = [weight for weight in weights if weight.trainable]
    else:
      self.trained = list(model.trainable_variables)
    paths = [variables_lib.path_of(weight) for weight in weights]
    labels = names_lib.unique(paths)
    for label, path, weight in zip(labels, paths, weights, strict=True):
      self._labels[id(weight)] = label
      # The checkpoint has the name with or without the model's, but not both,
      # and no other weight has the same name: otherwise `names` must decide.
      found = {path, self._short(path)} & self._shapes.keys()
      is_sure = paths.count(path) == 1 and len(found) == 1
      default = found.pop() if is_sure else None
      self._match(label, weight, default, "{}", self._short(path))
    return weights

  def find_state(self, optimizer: Any, iterations: int | None) -> None:
    """Matches the optimizer's slots, other variables and number of steps."""
    innermost = inner_lib.innermost(optimizer)
    # With `shard_update`, slots are in parts; this state has whole slots.
    state = names_lib.sharded_state(optimizer) or (
      inner_lib.adapter_of(innermost)
    )
    known = self._find_slots(innermost, state)
    rates = names_lib.learning_rates(innermost)
    known |= {id(innermost.iterations), *map(id, rates)}
    for other in state.variables:
      if id(other) not in known:
        name = variables_lib.path_of(other).rpartition("/")[2]
        is_power = re.fullmatch(_POWER, name)
        power = self._only_scalar(rf"(.*/)?{name}(_\d+)?") if is_power else None
        self._match(name, other, power)
    if not isinstance(innermost, v1_update.V1Update):
      # Keras' Adam computes the powers of its betas from `iterations`.
      for name in [n for n in self._shapes if re.fullmatch(_POWER, n)]:
        del self._shapes[name]
    step = self._only_scalar(_GLOBAL_STEP)
    self._count = self._match("iterations", innermost.iterations, step)
    if iterations is not None:
      self._iterations = iterations
      self.matched.setdefault(self._count, f"iterations={iterations}")

  def _find_slots(self, innermost: Any, state: Any) -> set[int]:
    """Matches the slots of all weights; returns the ids of all slots."""
    v1_name, factor = v1_slots.name_and_factor(innermost)
    known: set[int] = set()
    for weight in self.trained:
      label = self._labels[id(weight)]
      source = self.matched.get(label)
      slots = state.slots(weight)
      numbers = v1_slots.numbers(innermost, slots)
      known |= set(map(id, slots.values()))
      for name, slot in slots.items():
        number, full = numbers.get(name), f"{label}/{name}"
        if source is None:  # Without the weight, its slots are missing, too.
          self.wanted[full] = slot
          self._optional.add(full)
        elif number is None:  # TensorFlow 1 had no such optimizer.
          self._match(full, slot, f"{source}/{name}", f"{{}}/{name}", source)
        elif not v1_slots.is_without_momentum(innermost):
          # TensorFlow 1 calls its slots "Adam", "Adam_1", "Adam_2", ...
          default = f"{source}/{v1_name}" + (f"_{number}" if number else "")
          full = self._match(full, slot, default, f"{{}}/{name}", source)
          self._factors[full] = factor
    return known

  def value(self, name: str) -> Any:
    """Returns the value to assign to the variable of a name."""
    dtype = tf.as_dtype(self.wanted[name].dtype).as_numpy_dtype
    if name == self._count and self._iterations is not None:
      return np.asarray(self._iterations, dtype)
    value = np.asarray(self._reader.get_tensor(self.matched[name]), dtype)
    return value * dtype(self._factors.get(name, 1.0))

  @property
  def unmatched_in_model(self) -> Shapes:
    """Names and shapes of the variables without a counterpart."""
    unmatched = self.wanted.keys() - self.matched.keys()
    return {name: tuple(self.wanted[name].shape) for name in sorted(unmatched)}

  @property
  def unmatched_in_checkpoint(self) -> Shapes:
    """Names and shapes of the values without a counterpart."""
    used = set(self.matched.values())
    return {n: shape for n, shape in self._shapes.items() if n not in used}

  def check(self) -> None:
    """Raises an error if shapes differ or a name has no counterpart."""
    self._check_shapes_and_dtypes()
    theirs, ours = (
      {
        name: shape
        for name, shape in unmatched.items()
        if not (self._is_excluded(name) or name in self._optional)
      }
      for unmatched in (self.unmatched_in_checkpoint, self.unmatched_in_model)
    )
    lines = [f"in `names` only: {name}" for name in sorted(self._unused_names)]
    lines += unmatched_lines(theirs, ours)
    if not lines:
      return
    # Show one entry of each kind that would help, with names of this model.
    remedies = ["iterations=STEPS"] if self._count in ours else []
    remedies += [f'names={{"{name}": "..."}}' for name in list(ours)[:1]]
    slots = [n for n in ours if n.rpartition("/")[0] in self.matched]
    for name in slots[:1]:
      slot = name.rpartition("/")[2]
      remedies.append(f'names={{"{{}}/{slot}": "{{}}/..."}}')
    remedies += [f'names={{"{name}": None}}' for name in [*theirs, *ours][:1]]
    raise ValueError(
      "Not everything has a counterpart:\n" + "\n".join(lines) + "\nPass"
      f" {' or '.join(remedies) or 'names that exist'}; or add the missing"
      " variables to the model or the optimizer."
    )

  def _match(
    self,
    name: str,
    variable: Any,
    default: str | None,
    pattern: str = "",
    own: str = "",
  ) -> str:
    """Records a variable and its counterpart in the checkpoint, if it has one.

    Args:
      name: The name of the variable.
      variable: The variable.
      default: The name in the checkpoint unless `names` has a different one.
      pattern: The key of `names` for all such variables, such as
        "{}/momentum".
      own: The text for "{}" in the value of that entry.

    Returns:
      The key in `wanted`: `name`, with a prefix if the model has a variable of
      the same name.
    """
    while name in self.wanted:
      name = f"optimizer/{name}"
    self.wanted[name] = variable
    source = self._source_in_names(name, pattern, own)
    if source is not None and default is not None:
      self._optional.add(default)
    if source is None and default in self._shapes:
      is_excluded = self._is_excluded(name) or self._is_excluded(default)
      source = None if is_excluded else default
    if source is None:
      return name
    others = [other for other, used in self.matched.items() if used == source]
    if others:
      raise ValueError(
        f"`{source}` of the checkpoint would be the value of both {others[0]}"
        f" and {name}. Choose one of them with `names`."
      )
    self.matched[name] = source
    return name

  def _source_in_names(self, name: str, pattern: str, own: str) -> str | None:
    """Returns the name in the checkpoint that `names` gives a variable."""
    # An entry for this variable comes before an entry for all such variables.
    for key in (name, self._short(name)):
      source = self._names.get(key)
      if source is not None:
        self._unused_names.discard(key)
        if source not in self._shapes:
          raise ValueError(
            f"`names` says that `{name}` is {source!r}, which the checkpoint"
            f" does not have. It has {', '.join(self._shapes)}."
          )
        return source
    source = (self._names.get(pattern) or "").replace("{}", own)
    if source not in self._shapes or self._is_excluded(name):
      return None
    self._unused_names.discard(pattern)
    return source

  def _is_excluded(self, name: str) -> bool:
    """Returns whether an entry of `names` with None leaves out a name."""
    names = (name, self._short(name))
    keys = {key for key in names if self._names.get(key, "") is None}
    keys |= {
      key
      for key, pattern in self._excluding.items()
      if any(map(pattern.fullmatch, names))
    }
    self._unused_names -= keys
    return bool(keys)

  def _only_scalar(self, pattern: str) -> str | None:
    """Returns the name of the only scalar that fits a pattern, or None."""
    scalars = [
      name
      for name, shape in self._shapes.items()
      if shape == () and re.fullmatch(pattern, name)
    ]
    return scalars[0] if len(scalars) == 1 else None

  def _short(self, path: str) -> str:
    """Returns a variable's name without the name of the model before it."""
    return path.removeprefix(f"{self._model_name}/")

  def _check_shapes_and_dtypes(self) -> None:
    """Raises an error unless matched variables and values are alike."""
    lines = []
    # The number of steps may have any integer dtype.
    for name in self.matched.keys() - {self._count}:
      variable, source = self.wanted[name], self.matched[name]
      own = tf.as_dtype(variable.dtype), tuple(variable.shape)
      other = self._dtypes[source], self._shapes[source]
      if own != other:
        lines.append(
          f"  {name} is {own[0].name} {list(own[1])}; {source} in the"
          f" checkpoint is {other[0].name} {list(other[1])}"
        )
    if lines:
      raise ValueError(
        "Shapes or dtypes differ:\n" + "\n".join(sorted(lines)) + "\nBuild the"
        " model as it was in TensorFlow 1, or match the variables with `names`."
      )


def unmatched_lines(
  in_checkpoint: Mapping[str, tuple[int, ...]],
  in_model: Mapping[str, tuple[int, ...]],
) -> list[str]:
  """Lists the names and shapes that only one side has, under headings."""
  sides = {
    "in the checkpoint": in_checkpoint,
    "in model and optimizer": in_model,
  }
  lines = []
  for side, shapes in sides.items():
    if shapes:
      lines.append(f"{side} only:")
      lines += [f"  {name} {list(shapes[name])}" for name in sorted(shapes)]
  return lines


def _weights(model: Any) -> list[Any]:
  """Returns the variables that a checkpoint of TensorFlow 1 may hold."""
  # Ask the class: `weights` of a model that has none yet may raise an error.
  is_keras = hasattr(type(model), "weights")
  if isinstance(model, (list, tuple)):
    variables = list(model)
  elif not getattr(model, "built", True):
    variables = []
  else:
    # `variables` of a Keras model includes metrics and random states.
    variables = list(model.weights if is_keras else model.variables)
  if not variables:
    raise ValueError(
      f"`model` has no variables yet: got {type(model).__name__}. Build it with"
      " model.build(input_shape), or call it on one batch."
    )
  return list({id(variable): variable for variable in variables}.values())
