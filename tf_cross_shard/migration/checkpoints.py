"""A checkpoint of TensorFlow 1 becomes one of TensorFlow 2 and Keras.

    TensorFlow 1, by name                     Keras, by object
    dense/kernel                         ──▶  model's weight
    dense/kernel/Adam, .../Adam_1        ──▶  its slots, momentum and velocity
    global_step                          ──▶  optimizer.iterations

Training goes on with the numbers that it would have had. Names decide, and
nothing else: where they leave a choice, it is the user's.
"""

import contextlib
import dataclasses
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import (
  base,
  kernels,
  optimizer_state,
  v1_update,
)

Names = Mapping[str, str | None]
Shapes = dict[str, tuple[int, ...]]

_OBJECT_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of TensorFlow 2 only
_GLOBAL_STEP: Final = r"(.*/)?global_step"
_POWER: Final = r"(.*/)?beta[12]_power(_\d+)?"


@dataclasses.dataclass(frozen=True)
class Conversion:
  """The result of `convert_checkpoint`.

  Attributes:
    path: The prefix of the checkpoint that was written.
    matched: For each variable that received a value, by its name, the
      checkpoint's name of the value. A slot has its variable's name and its
      own, as "dense/kernel/momentum"; the optimizer's count of steps is
      "iterations".
    unmatched_in_checkpoint: What nothing received: names and shapes.
    unmatched_in_model: Variables of the model and the optimizer that are as
      they were: names and shapes.
  """

  path: str
  matched: Mapping[str, str]
  unmatched_in_checkpoint: Mapping[str, tuple[int, ...]]
  unmatched_in_model: Mapping[str, tuple[int, ...]]

  def __str__(self) -> str:
    """Returns a table."""
    width = max(map(len, self.matched), default=0)
    lines = [f"{self.path}: {len(self.matched)} variables"]
    lines += [f"  {n:<{width}}  {s}" for n, s in self.matched.items()]
    lines += _listed("in the checkpoint", self.unmatched_in_checkpoint)
    lines += _listed("in model and optimizer", self.unmatched_in_model)
    return "\n".join(lines)


def convert_checkpoint(
  src: str | os.PathLike[str],
  dst: str | os.PathLike[str],
  model: Any,
  optimizer: Any,
  *,
  names: Names | None = None,
  iterations: int | None = None,
) -> Conversion:
  """Brings weights, slots and the count of steps over from TensorFlow 1.

  Model and optimizer hold the values afterwards, on every replica. Elsewhere
  the new checkpoint is restored by

      tf.train.Checkpoint(model=model, optimizer=optimizer).read(dst)

  around an optimizer of the same class, built on the same variables, in a
  CrossShardOptimizer or not. TensorFlow does not notice another class: the
  momentum of what `from_v1` makes is another number than a plain SGD's.

  >>> import os, tempfile
  >>> v1 = tf.compat.v1
  >>> folder = tempfile.TemporaryDirectory()
  >>> src = os.path.join(folder.name, "v1")
  >>> with tf.Graph().as_default(), v1.Session() as session:
  ...   old = v1.get_variable("w", initializer=[1.0, 2.0])
  ...   step = v1.train.get_or_create_global_step()
  ...   adam = v1.train.AdamOptimizer(0.5)
  ...   train = adam.minimize(tf.reduce_sum(old), global_step=step)
  ...   session.run(v1.global_variables_initializer())
  ...   for _ in range(3):
  ...     session.run(train)
  ...   src = v1.train.Saver().save(session, src)
  >>> weight = tf.Variable([0.0, 0.0], name="w")
  >>> adam = tf.keras.optimizers.Adam(0.5, epsilon=1e-8)
  >>> dst = os.path.join(folder.name, "v2")
  >>> done = convert_checkpoint(src, dst, [weight], adam)
  >>> weight.numpy().round(3), int(adam.iterations)
  (array([-0.5,  0.5], dtype=float32), 3)
  >>> done.matched["iterations"]
  'global_step'
  >>> folder.cleanup()

  A weight is looked for under its own name, with or without the model's name
  before it, slots beside it under the name that version 1 gives to such an
  optimizer, and the count of steps under `global_step`. Version 1 had no Lamb
  and no class that you wrote: their slots are looked for under their own names,
  "dense/kernel/adam_m". Nothing else is guessed: the error, before any value
  changes, lists what is left on both sides and shows what to write.

  Only state is converted. Give the optimizer the learning rate, betas and the
  like that version 1 had. Keras' SGD has the learning rate in its momentum, so
  that it continues alike as long as that rate stays as it is.

  On several machines convert on one, and restore on all.

  Args:
    src: The prefix of version 1's checkpoint, or a folder, of which the latest
      is taken. It is only read.
    dst: The prefix of the new one; its folder is made if need be.
    model: A Keras model or tf.Module with its variables made, or a list of
      variables.
    optimizer: A CrossShardOptimizer or another optimizer of Keras 3 or
      tf_keras, of whose older kind there is none. One that is not built is
      built on the trainable variables.
    names: What is not found by itself, from names in model and optimizer
      ("dense/kernel", "dense/kernel/momentum", "iterations") to names in the
      checkpoint. A second variable of the same name is known as "name#2". "{}"
      stands for every weight: {"{}": "scope/{}"} for the weights themselves,
      {"{}/momentum": "{}/my_adam"} for a slot, where the second is the weight's
      name in the checkpoint. None leaves a name of either side out, and there
      "{}" stands for any text: {"{}/ExponentialMovingAverage": None}.
    iterations: The number of steps that version 1 had made; None for what the
      checkpoint's only `global_step` is.

  Returns:
    What was matched and what was not.

  Raises:
    ValueError: If something has no counterpart, another shape or dtype, or
      more than one; if an entry of `names` fits nothing; if `src` is a
      checkpoint of TensorFlow 2; if `model` has no variables; if a learning
      rate that changes would spoil the momentum.
    tf.errors.OpError: If there is no checkpoint at `src`.
    FileExistsError: If there is one at `dst`.
    TypeError: If `optimizer` is one of tf_keras' older kind.
    RuntimeError: If called in a tf.function.
  """
  if not tf.executing_eagerly():
    raise RuntimeError(
      "A checkpoint is converted eagerly; this is in a tf.function or a graph."
      " Call it before training."
    )
  target = os.fspath(dst)
  if tf.io.gfile.exists(f"{target}.index"):
    raise FileExistsError(
      f"`dst` is {target!r}, and there is a checkpoint of that name. Name"
      " another prefix, or remove that one."
    )
  plan = _Plan(_source(src), model, {} if names is None else names)
  weights = plan.find_weights(model)
  _build(optimizer, plan.trained, weights)
  plan.find_state(optimizer, iterations)
  plan.check()
  values = {name: plan.value(name) for name in plan.matched}
  for name, value in values.items():
    variable = plan.wanted[name]
    with _scope(variable):
      variable.assign(value)
  tf.train.Checkpoint(model=model, optimizer=optimizer).write(target)
  return Conversion(
    target, plan.matched, plan.left_in_checkpoint, plan.left_in_model
  )


class _Plan:
  """Decides which variable receives which value; assigns nothing.

  Attributes:
    wanted: Every variable of model and optimizer, by name.
    matched: By the same names, the checkpoint's.
    trained: The variables that the model trains.
  """

  def __init__(self, path: str, model: Any, names: Names) -> None:
    """Reads the names in the checkpoint."""
    # Not load_checkpoint, which reads another one where there is a folder of
    # this name too.
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
    self._unused = set(names)
    self._patterns = {
      key: re.compile(re.escape(key).replace(r"\{\}", ".*"))
      for key, source in names.items()
      if source is None and "{}" in key
    }
    self._needless: set[str] = set()  # Names of either side.
    self._factors: dict[str, float] = {}
    self._iterations: int | None = None
    self._count = ""
    self.wanted: dict[str, Any] = {}
    self.matched: dict[str, str] = {}
    self.trained: list[Any] = []
    self._labels: dict[int, str] = {}

  def find_weights(self, model: Any) -> list[Any]:
    """Matches the model's variables."""
    weights = _weights(model)
    if isinstance(model, (list, tuple)):
      self.trained = [weight for weight in weights if weight.trainable]
    else:
      self.trained = list(model.trainable_variables)
    paths = [variables_lib.path_of(weight) for weight in weights]
    labels = optimizer_state.unique(paths)
    for label, path, weight in zip(labels, paths, weights, strict=True):
      self._labels[id(weight)] = label
      both = {path, self._short(path)} & self._shapes.keys()
      is_sure = paths.count(path) == 1 and len(both) == 1
      default = both.pop() if is_sure else None
      self._want(label, weight, default, "{}", self._short(path))
    return weights

  def find_state(self, optimizer: Any, iterations: int | None) -> None:
    """Matches slots, other variables of the optimizer and the count."""
    last = base.innermost(optimizer)
    # With `shard_update` slots are in parts.
    whole = optimizer_state.sharded_state(optimizer) or _adapter(last)
    known = self._find_slots(last, whole)
    rates = optimizer_state.learning_rates(last)
    known |= {id(last.iterations), *map(id, rates)}
    for other in whole.variables:
      if id(other) not in known:
        name = variables_lib.path_of(other).rpartition("/")[2]
        is_power = re.fullmatch(_POWER, name)
        power = self._only(rf"(.*/)?{name}(_\d+)?") if is_power else None
        self._want(name, other, power)
    if not isinstance(last, v1_update.V1Update):
      # Keras' Adam has its powers from `iterations`.
      for name in [n for n in self._shapes if re.fullmatch(_POWER, n)]:
        del self._shapes[name]
    step = self._only(_GLOBAL_STEP)
    self._count = self._want("iterations", last.iterations, step)
    if iterations is not None:
      self._iterations = iterations
      self.matched.setdefault(self._count, f"iterations={iterations}")

  def _find_slots(self, last: Any, whole: Any) -> set[int]:
    """Matches slots; returns the ids of all that there are."""
    usual, factor = _usual_slots(last)
    known: set[int] = set()
    for weight in self.trained:
      label = self._labels[id(weight)]
      source = self.matched.get(label)
      slots = whole.slots(weight)
      places = _places(last, slots)
      known |= set(map(id, slots.values()))
      for name, slot in slots.items():
        place, full = places.get(name), f"{label}/{name}"
        if source is None:  # What its weight has not, a slot has not.
          self.wanted[full] = slot
          self._needless.add(full)
        elif place is None:
          self._want(full, slot, f"{source}/{name}", f"{{}}/{name}", source)
        elif not _is_idle(last):
          default = f"{source}/{usual}" + (f"_{place}" if place else "")
          full = self._want(full, slot, default, f"{{}}/{name}", source)
          self._factors[full] = factor
    return known

  def value(self, name: str) -> Any:
    """Returns what to assign."""
    dtype = tf.as_dtype(self.wanted[name].dtype).as_numpy_dtype
    if name == self._count and self._iterations is not None:
      return np.asarray(self._iterations, dtype)
    value = np.asarray(self._reader.get_tensor(self.matched[name]), dtype)
    return value * dtype(self._factors.get(name, 1.0))

  @property
  def left_in_model(self) -> Shapes:
    """Variables without a counterpart."""
    left = self.wanted.keys() - self.matched.keys()
    return {name: tuple(self.wanted[name].shape) for name in sorted(left)}

  @property
  def left_in_checkpoint(self) -> Shapes:
    """Values without a counterpart."""
    used = set(self.matched.values())
    return {n: shape for n, shape in self._shapes.items() if n not in used}

  def check(self) -> None:
    """Raises an error if forms differ, or something has no counterpart."""
    self._check_forms()
    theirs, ours = (
      {
        name: shape
        for name, shape in left.items()
        if not (self._is_left_out(name) or name in self._needless)
      }
      for left in (self.left_in_checkpoint, self.left_in_model)
    )
    lines = [f"in `names` only: {name}" for name in sorted(self._unused)]
    lines += _listed("in the checkpoint", theirs)
    lines += _listed("in model and optimizer", ours)
    if not lines:
      return
    remedies = ["iterations=STEPS"] if self._count in ours else []
    remedies += [f'names={{"{name}": "..."}}' for name in list(ours)[:1]]
    slots = [n for n in ours if n.rpartition("/")[0] in self.matched]
    for name in slots[:1]:
      slot = name.rpartition("/")[2]
      remedies.append(f'names={{"{{}}/{slot}": "{{}}/..."}}')
    remedies += [f'names={{"{name}": None}}' for name in [*theirs, *ours][:1]]
    raise ValueError(
      "Not everything has a counterpart:\n" + "\n".join(lines) + "\nWrite"
      f" {' or '.join(remedies) or 'names that there are'}, or give the model"
      " and the optimizer what they lack."
    )

  def _want(
    self,
    name: str,
    variable: Any,
    default: str | None,
    pattern: str = "",
    own: str = "",
  ) -> str:
    """Notes a variable and its counterpart; returns the name it is known by.

    `default` is where the value is unless `names` says otherwise; `pattern` is
    the entry of `names` for all such variables, and `own` its "{}" here.
    """
    while name in self.wanted:  # The model has one of this name too.
      name = f"optimizer/{name}"
    self.wanted[name] = variable
    source = self._named(name, pattern, own)
    if source is not None and default is not None:
      self._needless.add(default)
    if source is None and default in self._shapes:
      left_out = self._is_left_out(name) or self._is_left_out(default)
      source = None if left_out else default
    if source is None:
      return name
    both = [other for other, used in self.matched.items() if used == source]
    if both:
      raise ValueError(
        f"`{source}` of the checkpoint would be the value of both {both[0]} and"
        f" {name}. Say which it is with `names`."
      )
    self.matched[name] = source
    return name

  def _named(self, name: str, pattern: str, own: str) -> str | None:
    """Returns the checkpoint's name of a variable by `names`, if there."""
    for key in (name, self._short(name)):
      source = self._names.get(key)
      if source is not None:
        self._unused.discard(key)
        if source not in self._shapes:
          raise ValueError(
            f"`names` says that `{name}` is {source!r}, which the checkpoint"
            f" has not. It holds {', '.join(self._shapes)}."
          )
        return source
    source = (self._names.get(pattern) or "").replace("{}", own)
    if source not in self._shapes or self._is_left_out(name):
      return None
    self._unused.discard(pattern)
    return source

  def _is_left_out(self, name: str) -> bool:
    """Whether `names` has None for a name of either side."""
    names = (name, self._short(name))
    keys = {key for key in names if self._names.get(key, "") is None}
    keys |= {
      key
      for key, pattern in self._patterns.items()
      if any(map(pattern.fullmatch, names))
    }
    self._unused -= keys
    return bool(keys)

  def _only(self, pattern: str) -> str | None:
    """Returns the only single number of such a name."""
    numbers = [
      name
      for name, shape in self._shapes.items()
      if shape == () and re.fullmatch(pattern, name)
    ]
    return numbers[0] if len(numbers) == 1 else None

  def _short(self, path: str) -> str:
    """Returns a variable's name without that of the model around it."""
    return path.removeprefix(f"{self._model_name}/")

  def _check_forms(self) -> None:
    """Raises an error unless shapes and dtypes are alike."""
    lines = []
    for name in self.matched.keys() - {self._count}:  # of any whole numbers
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
        " model as it was in version 1, or say with `names` which variables"
        " belong together."
      )


def _is_idle(last: Any) -> bool:
  """Whether slots are of no use, which tf_keras makes all the same."""
  return (
    "SGD" in [kind.__name__ for kind in type(last).__mro__]
    and not isinstance(last, v1_update.V1Update)
    and not float(last.momentum)
  )


def _usual_slots(last: Any) -> tuple[str, float]:
  """Returns version 1's name of slots, and what they are multiplied by."""
  if isinstance(last, v1_update.V1Update):
    return str(last.name), 1.0  # type: ignore[attr-defined]
  name, kind = _kind_of(last)
  if kind is None or kind.keras != "SGD" or _is_idle(last):
    return name, 1.0
  config = last.get_config()
  if isinstance(config["learning_rate"], dict) or config.get("decay"):
    raise ValueError(
      f"`optimizer` is {type(last).__name__}, whose momentum has the learning"
      " rate of each step in it, where version 1's has none: it cannot be"
      " converted for a learning rate that is a schedule. Hand in what"
      " tf_cross_shard.migration.from_v1 makes of version 1's optimizer."
    )
  # Keras: momentum = -rate * accumulator, variable += momentum.
  return name, -float(config["learning_rate"])


def _places(last: Any, slots: Mapping[str, Any]) -> dict[str, int]:
  """Returns the numbers that version 1 gave to slots of its own optimizers.

  One that Keras does without counts too.
  """
  _, kind = _kind_of(last)
  if kind is None:
    return {}
  centered = "Centered" if getattr(last, "centered", False) else ""
  places: dict[str, int] = {}
  kernel = kernels.KERNELS[centered + kind.kernel]
  for place, attribute in enumerate(kernel.slots.values()):
    of_all = set(map(id, getattr(last, attribute, None) or ()))
    for name, slot in slots.items():
      if id(getattr(slot, "parts", slot)) in of_all:
        places[name] = place
  return places


def _adapter(last: Any) -> base.InnerOptimizer:
  """Returns an optimizer of either Keras as CrossShardOptimizer sees it."""
  modules = (kind.__module__ for kind in type(last).__mro__)
  is_tf_keras = any(module.startswith("tf_keras.") for module in modules)
  # By name: neither Keras is imported for the other.
  home = importlib.import_module(
    f"tf_cross_shard.{'tf_keras' if is_tf_keras else 'keras3'}.adapter"
  )
  adapter = home.adapter if is_tf_keras else home.Keras3Optimizer
  made: base.InnerOptimizer = adapter(last)
  return made


def _kind_of(last: Any) -> tuple[str, v1_update.Kind | None]:
  """Returns version 1's name of an optimizer that it had, too, and its kind."""
  for keras_class in type(last).__mro__:
    if keras_class.__module__.split(".")[0] in ("keras", "tf_keras"):
      for v1_class, kind in v1_update.KINDS.items():
        if kind is not None and kind.keras == keras_class.__name__:
          return v1_class.__name__.removesuffix("Optimizer"), kind
  return "", None


def _build(optimizer: Any, trained: Sequence[Any], weights: Any) -> None:
  """Makes the slots if they are not there."""
  last = base.innermost(optimizer)
  if any("optimizers.legacy" in kind.__module__ for kind in type(last).__mro__):
    raise TypeError(
      f"`optimizer` is {type(last).__name__}, one of"
      " tf_keras.optimizers.legacy. Hand in that of tf_keras.optimizers, or"
      " what tf_cross_shard.migration.from_v1 makes of version 1's."
    )
  if not _adapter(last).is_built:
    with _scope(weights[0]):
      optimizer.build(list(trained))


def _scope(variable: Any) -> contextlib.AbstractContextManager[Any]:
  """Returns the scope of the strategy whose replicas have a variable."""
  strategy = getattr(
    variables_lib.native(variable), "distribute_strategy", None
  )
  return strategy.scope() if strategy else contextlib.nullcontext()


def _weights(model: Any) -> list[Any]:
  """Returns what a checkpoint of version 1 may have; not random states."""
  # Asked of the class: where there are none yet, the model may raise an error.
  is_keras = hasattr(type(model), "weights")
  if isinstance(model, (list, tuple)):
    variables = list(model)
  elif not getattr(model, "built", True):
    variables = []
  else:
    # Keras' `variables` are metrics and random states as well.
    variables = list(model.weights if is_keras else model.variables)
  if not variables:
    raise ValueError(
      f"`model` has no variables yet: got {type(model).__name__}. Build it with"
      " model.build(input_shape), or call it on one batch."
    )
  return list({id(variable): variable for variable in variables}.values())


def _listed(where: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
  """Returns lines about what is on one side only."""
  lines = [f"  {name} {list(shapes[name])}" for name in sorted(shapes)]
  return [f"{where} only:", *lines] if lines else []


def _source(src: Any) -> str:
  """Returns the prefix of a checkpoint's files, a folder's latest."""
  path = os.fspath(src)
  is_prefix = tf.io.gfile.exists(f"{path}.index")
  latest = None if is_prefix else tf.train.latest_checkpoint(path)
  return latest or path
