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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import (
  base,
  kernels,
  optimizer_state,
  v1_update,
)

Names = Mapping[str, str] | Callable[[str], str | None] | None
Slots = str | Mapping[str, str] | None
Shapes = dict[str, tuple[int, ...]]

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of TensorFlow 2 only
_ITERATIONS = "iterations"
_GLOBAL_STEP = r"(.*/)?global_step"
# Of tf_keras' older kind, in version 1's order; a class of the user's has more.
_LEGACY_SLOTS = {
  "SGD": ("momentum",),
  "Adam": ("m", "v"),
  "Adagrad": ("accumulator",),
  "RMSprop": ("rms", "mg", "momentum"),
  "Adadelta": ("accum_grad", "accum_var"),
  "Ftrl": ("accumulator", "linear"),
}
_POWER = r"(.*/)?beta[12]_power(_\d+)?"


@dataclasses.dataclass(frozen=True)
class Conversion:
  """What `convert_checkpoint` did.

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
    """A table."""
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
  names: Names = None,
  slots: Slots = None,
  iterations: int | None = None,
  allow_unmatched: bool | Collection[str] = False,
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
  changes, lists what is left on both sides and shows which argument to write.

  Only state is converted. Give the optimizer the learning rate, betas and the
  like that version 1 had. Keras' SGD has the learning rate in its momentum, so
  that it continues alike as long as that rate stays as it is.

  On several machines convert on one, and restore on all.

  Args:
    src: The prefix of version 1's checkpoint, or a folder, of which the latest
      is taken. It is only read.
    dst: The prefix of the new one, in a folder that is there.
    model: A Keras model or tf.Module with its variables made, or a list of
      variables.
    optimizer: A CrossShardOptimizer or another optimizer of Keras 3 or
      tf_keras. One that is not built is built on the trainable variables.
    names: For what has another name now, a dictionary from names in model and
      optimizer ("dense/kernel", "dense/kernel/momentum", "iterations") to names
      in the checkpoint. Or a function of a weight's name, which may return
      None. A second variable of the same name is known as "name#2".
    slots: Where version 1 has the first slot of a weight: the name that the
      optimizer was given there, such as "my_adam" or, of a second Adam,
      "Adam_2". With {} for the weight's name in the checkpoint, anything:
      "scope/{}/Adam". Where version 1 named each slot, a dictionary from the
      names of the optimizer's slots, {"momentum": "adam_m"}.
    iterations: The number of steps that version 1 had made; None for what the
      checkpoint's only `global_step` is.
    allow_unmatched: What need not have a counterpart: True for anything, or
      names and regular expressions that match whole names, of either side.

  Returns:
    What was matched and what was not.

  Raises:
    ValueError: If something has no counterpart, another shape or dtype, or
      more than one; if not one weight has a value, whatever is allowed; if
      `src` is a checkpoint of TensorFlow 2; if `model` has no variables; if a
      learning rate that changes would spoil the momentum.
    TypeError: If an argument is something else.
    FileExistsError: If there is a checkpoint at `dst`.
    FileNotFoundError: If there is none at `src`, or no folder for `dst`.
    RuntimeError: If called in a tf.function, or by a replica.
  """
  if not tf.executing_eagerly() or not (
    tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
  ):
    raise RuntimeError(
      "A checkpoint is converted eagerly, outside `strategy.run`; this is in a"
      " tf.function, a graph or a replica. Call it before training."
    )
  target = _target(dst)
  plan = _Plan(_source(src), model, names, _allowed(allow_unmatched))
  weights = plan.find_weights()
  _build(optimizer, plan.trained, weights)
  plan.find_state(optimizer, slots, iterations)
  plan.check_unmatched()
  values = {n: plan.value(n, source) for n, source in plan.matched.items()}
  for name, value in values.items():
    variable = plan.wanted[name]
    with _scope(variable):
      variable.assign(value)
  last = base.innermost(optimizer)
  if hasattr(last, "_compute_current_learning_rate"):
    last._compute_current_learning_rate()  # which tf_keras shows
  tf.train.Checkpoint(model=model, optimizer=optimizer).write(target)
  return Conversion(
    target, plan.matched, plan.left_in_checkpoint, plan.left_in_model
  )


class _Plan:
  """Which variable receives which value; nothing is assigned here.

  Attributes:
    wanted: Every variable of model and optimizer, by name.
    matched: By the same names, the checkpoint's.
    trained: The variables that the model trains.
  """

  def __init__(
    self, path: str, model: Any, names: Names, allowed: Callable[[str], bool]
  ) -> None:
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
    if not (names is None or isinstance(names, Mapping) or callable(names)):
      raise TypeError(
        "`names` must be a dictionary from names in model and optimizer to"
        f" names in the checkpoint, or a function; got {names!r}."
      )
    self._model = model
    self._names = names
    self._allowed = allowed
    self._factors: dict[str, float] = {}
    self._ignored: set[str] = set()
    self._iterations: int | None = None
    self._count = _ITERATIONS
    self.wanted: dict[str, Any] = {}
    self.matched: dict[str, str] = {}
    self.trained: list[Any] = []
    self._labels: dict[int, str] = {}

  def find_weights(self) -> list[Any]:
    """Matches the model's variables."""
    weights = _weights(self._model)
    listed = isinstance(self._model, (list, tuple))
    self.trained = (
      [w for w in weights if w.trainable]
      if listed
      else list(self._model.trainable_variables)
    )
    paths = [variables_lib.path_of(weight) for weight in weights]
    labels = optimizer_state.unique(paths)
    for label, path, weight in zip(labels, paths, weights, strict=True):
      self._labels[id(weight)] = label
      both = {path, self._short(path)} & self._shapes.keys()
      is_sure = paths.count(path) == 1 and len(both) == 1
      self._want(label, weight, both.pop() if is_sure else None, True)
    self._check_forms()
    left = [name for name in self.left_in_model if not self._allowed(name)]
    if left or not self.matched:
      self.check_unmatched()
      raise ValueError(
        f"`src` has no value for any weight of `model`; it holds"
        f" {', '.join(self._shapes) or 'nothing'}. Name the checkpoint of this"
        " model, or say with `names` which variables belong together."
      )
    return weights

  def find_state(
    self, optimizer: Any, slots: Slots, iterations: int | None
  ) -> None:
    """Matches slots, other variables of the optimizer and the count."""
    last = base.innermost(optimizer)
    is_v1 = isinstance(last, v1_update.V1Update)
    known = self._find_slots(last, slots)
    known |= {id(last.iterations), id(getattr(last, "_learning_rate", None))}
    variables = last.variables
    for other in variables() if callable(variables) else variables:
      if id(other) not in known:
        name = variables_lib.path_of(other).rpartition("/")[2]
        is_power = re.fullmatch(_POWER, name)
        power = self._only(rf"(.*/)?{name}(_\d+)?") if is_power else None
        self._want(name, other, power)
    if not is_v1:  # Keras' Adam has its powers from `iterations`.
      self._ignored = {n for n in self._shapes if re.fullmatch(_POWER, n)}
    step = self._only(_GLOBAL_STEP)
    self._count = self._want(_ITERATIONS, last.iterations, step)
    if iterations is not None:
      self._iterations = iterations
      self.matched.setdefault(self._count, f"iterations={iterations}")
    self._check_forms()
    if isinstance(self._names, Mapping):
      full = {self._short(label) for label in self.wanted} | self.wanted.keys()
      unknown = sorted(set(map(str, self._names)) - full)
      if unknown:
        raise ValueError(
          "`names` has keys that model and optimizer have not:"
          f" {', '.join(unknown)}. They have {', '.join(self.wanted)}."
        )

  def _find_slots(self, last: Any, slots: Slots) -> set[int]:
    """Matches slots; returns the ids of all that there are."""
    asked: Mapping[str, Any] = (
      slots if isinstance(slots, Mapping) else {"": slots}  # of all
    )
    if slots is not None and not all(
      isinstance(text, str) and text for text in asked.values()
    ):
      raise TypeError(
        "`slots` must be the name of version 1's optimizer, such as"
        ' "my_adam", a dictionary such as {"momentum": "adam_m"}, or None; got'
        f" {slots!r}."
      )
    default, factor = _default_slots(last)
    name_of_all = asked.get("")
    known: set[int] = set()
    found: dict[str, list[str]] = {"": []}
    for weight in self.trained:
      label = self._labels[id(weight)]
      source = self.matched.get(label, "")
      numbered, own = _slots_of(last, weight)
      known |= {id(slot) for slot in (*numbered.values(), *own.values())}
      if _is_idle(last):
        numbered = {}
      elif name_of_all and not default:
        numbered, own = own, {}
      first = _first_slot(name_of_all or default, source)
      for k, (name, slot) in enumerate({**numbered, **own}.items()):
        if slot is None:
          continue
        theirs = f"{source}/{name}"
        if name in asked:
          theirs = _first_slot(asked[name], source)
        elif name in numbered:
          theirs = self._slot(first, k)
        full = self._want(f"{label}/{name}", slot, theirs)
        found.setdefault(name, []).append(full)
        if name in numbered:
          found[""].append(full)
          self._factors[full] = factor
      again = self._slot(_first_slot(default, source), len(numbered))
      if numbered.keys() - asked and not name_of_all and again in self._shapes:
        raise ValueError(
          f"`slots` is needed: {again!r} of the checkpoint may be the first"
          f" slot of another optimizer. Say slots={default!r}, or"
          f" slots={again.removeprefix(source + '/')!r}."
        )
    for name in asked if slots is not None else ():
      if name not in found:
        raise ValueError(
          f"`slots` has {name}, which is no slot of {type(last).__name__}; it"
          f" has {', '.join(filter(None, found)) or 'none'}."
        )
      if not self.matched.keys() & set(found[name]):
        raise ValueError(
          f"`slots` is {slots!r}, and no weight has slots of the name"
          f" {asked[name]}. The checkpoint holds"
          f" {', '.join(self.left_in_checkpoint)}."
        )
    return known

  def value(self, name: str, source: str) -> Any:
    """What to assign."""
    dtype = tf.as_dtype(self.wanted[name].dtype).as_numpy_dtype
    if name == self._count and self._iterations is not None:
      return np.asarray(self._iterations, dtype)
    value = np.asarray(self._reader.get_tensor(source), dtype)
    return value * dtype(self._factors.get(name, 1.0))

  @property
  def left_in_model(self) -> Shapes:
    """Variables without a counterpart."""
    left = self.wanted.keys() - self.matched.keys()
    return {name: tuple(self.wanted[name].shape) for name in sorted(left)}

  @property
  def left_in_checkpoint(self) -> Shapes:
    """Values without a counterpart."""
    used = self._ignored | set(self.matched.values())
    return {n: shape for n, shape in self._shapes.items() if n not in used}

  def check_unmatched(self) -> None:
    """Raises an error if something has no counterpart and must have one."""
    theirs, ours = (
      {n: shape for n, shape in left.items() if not self._allowed(n)}
      for left in (self.left_in_checkpoint, self.left_in_model)
    )
    if not theirs and not ours:
      return
    lines = _listed("in the checkpoint", theirs)
    lines += _listed("in model and optimizer", ours)
    remedies = ["iterations=STEPS"] if self._count in ours else []
    labels = self._labels.values()
    slots = [n for n in ours if n.rpartition("/")[0] in labels]
    if self._factors.keys() & set(slots):
      remedies.append('slots="{}/NAME"')
    if slots:
      remedies.append(f'slots={{"{slots[0].rpartition("/")[2]}": "NAME"}}')
    remedies += [f'names={{"{n}": "..."}}' for n in list(ours)[:1]]
    remedies.append(f"allow_unmatched={[*theirs, *ours][:1]}")
    raise ValueError(
      "Not everything has a counterpart:\n" + "\n".join(lines) + "\nWrite"
      f" {' or '.join(remedies)}, or give the model and the optimizer what they"
      " lack."
    )

  def _want(
    self, name: str, variable: Any, default: str | None, is_weight: bool = False
  ) -> str:
    """Notes a variable and its counterpart; returns the name it is known by."""
    while name in self.wanted:  # The model has one of this name too.
      name = f"optimizer/{name}"
    self.wanted[name] = variable
    asked = None
    if isinstance(self._names, Mapping):
      asked = self._names.get(name, self._names.get(self._short(name)))
    elif self._names is not None and is_weight:
      asked = self._names(name)
    source = default if asked is None else asked
    if source not in self._shapes:
      if asked is None:
        return name
      raise ValueError(
        f"`names` says that `{name}` is {asked!r}, which the checkpoint has"
        f" not. It holds {', '.join(self._shapes)}."
      )
    both = [other for other, used in self.matched.items() if used == source]
    if both:
      raise ValueError(
        f"`{source}` of the checkpoint would be the value of both {both[0]} and"
        f" {name}. Say which it is with `names`."
      )
    self.matched[name] = source
    return name

  def _only(self, pattern: str) -> str | None:
    """The only single number of such a name."""
    found = [
      name
      for name, shape in self._shapes.items()
      if shape == () and re.fullmatch(pattern, name)
    ]
    return found[0] if len(found) == 1 else None

  def _slot(self, first: str, k: int) -> str:
    """The k-th slot of a weight; version 1 numbered what it made later on."""
    if not k:
      return first
    name, number = f"{first}_{k}", re.fullmatch(r"(.*)_(\d+)", first)
    if name in self._shapes or number is None:
      return name
    return f"{number[1]}_{int(number[2]) + k}"

  def _short(self, path: str) -> str:
    """A variable's name without that of the model around it."""
    name = getattr(self._model, "name", None)
    return path.removeprefix(f"{name}/") if isinstance(name, str) else path

  def _check_forms(self) -> None:
    """Raises an error unless shapes and dtypes are alike."""
    lines = []
    for name, source in self.matched.items():
      if name == self._count:
        continue  # of any type of whole numbers
      variable = self.wanted[name]
      dtype, shape = tf.as_dtype(variable.dtype), tuple(variable.shape)
      found = self._dtypes[source], self._shapes[source]
      if found != (dtype, shape):
        lines.append(
          f"  {name} is {dtype.name} {list(shape)}; {source} in the checkpoint"
          f" is {found[0].name} {list(found[1])}"
        )
    if lines:
      raise ValueError(
        "Shapes or dtypes differ:\n" + "\n".join(lines) + "\nBuild the model as"
        " it was in version 1, or say with `names` which variables belong"
        " together."
      )


def _is_idle(last: Any) -> bool:
  """Whether slots are of no use, which tf_keras makes all the same."""
  return (
    "SGD" in [each.__name__ for each in type(last).__mro__]
    and not isinstance(last, v1_update.V1Update)
    and not float(last.momentum)
  )


def _default_slots(last: Any) -> tuple[str, float]:
  """Version 1's name of an optimizer, and what its slots are multiplied by."""
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


def _slots_of(last: Any, weight: Any) -> tuple[dict[str, Any], dict[str, Any]]:
  """Slots by name: those that version 1 numbered, in its order, and others.

  One that Keras does without is None.
  """
  _, kind = _kind_of(last)
  own = _adapter(last).slots(weight)
  numbered: dict[str, Any] = {}
  if kind is None:
    return numbered, own
  if hasattr(last, "get_slot"):  # of the older kind, in tf_keras
    usual = [name for name in _LEGACY_SLOTS[kind.keras] if name in own]
    return {name: own.pop(name) for name in usual}, own
  keys = getattr(last, "_index_dict", None)
  keys = last._trainable_variables_indices if keys is None else keys
  index = keys.get(last._var_key(weight))
  centered = "Centered" if getattr(last, "centered", False) else ""
  kernel = kernels.KERNELS[centered + kind.kernel]
  for slot, attribute in kernel.slots.items():
    made = getattr(last, attribute, None)
    numbered[kind.slots[slot]] = (
      made[index] if made and index is not None else None
    )
  known = set(map(id, numbered.values()))
  return numbered, {n: v for n, v in own.items() if id(v) not in known}


def _adapter(last: Any) -> base.InnerOptimizer:
  """The form in which CrossShardOptimizer sees an optimizer of either Keras."""
  kinds = (each.__module__ for each in type(last).__mro__)
  is_tf_keras = any(kind.startswith("tf_keras.") for kind in kinds)
  # By name: that module imports this package, where it meets version 1's.
  home = importlib.import_module(
    f"tf_cross_shard.{'tf_keras' if is_tf_keras else 'keras3'}.adapter"
  )
  adapter = home.adapter if is_tf_keras else home.Keras3Optimizer
  made: base.InnerOptimizer = adapter(last)
  return made


def _kind_of(last: Any) -> tuple[str, v1_update.Kind | None]:
  """Version 1's name of what it had as well, by the class in Keras."""
  for each in type(last).__mro__:
    if each.__module__.split(".")[0] in ("keras", "tf_keras"):
      for v1_class, kind in v1_update.KINDS.items():
        if kind is not None and kind.keras == each.__name__:
          return v1_class.__name__.removesuffix("Optimizer"), kind
  return "", None


def _first_slot(slots: str, weight: str) -> str:
  """The name of a weight's first slot."""
  pattern = slots if "{}" in slots else f"{{}}/{slots}"
  return pattern.replace("{}", weight)


def _build(optimizer: Any, trained: Sequence[Any], weights: Any) -> None:
  """Makes the slots if they are not there."""
  last = base.innermost(optimizer)
  if not hasattr(last, "iterations"):
    raise TypeError(
      "`optimizer` must be a Keras optimizer; got"
      f" {type(optimizer).__name__}. Hand in the one that trains the model."
    )
  with _scope(weights[0]):
    if hasattr(optimizer, "build"):
      if not (getattr(last, "built", False) or getattr(last, "_built", False)):
        optimizer.build(list(trained))
    else:
      last._create_all_weights(list(trained))


def _scope(variable: Any) -> contextlib.AbstractContextManager[Any]:
  """Of the strategy whose replicas have a variable."""
  strategy = getattr(
    variables_lib.native(variable), "distribute_strategy", None
  )
  return strategy.scope() if strategy else contextlib.nullcontext()


def _weights(model: Any) -> list[Any]:
  """The variables that a model is to have back; not its random states."""
  # Asked of the class: where there are none yet, the model may raise an error.
  is_keras = hasattr(type(model), "weights")
  if isinstance(model, (list, tuple)):
    variables = list(model)
  elif not is_keras and not isinstance(model, tf.Module):
    raise TypeError(
      "`model` must be a Keras model, a tf.Module or a list of variables; got"
      f" {type(model).__name__}."
    )
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


def _allowed(allow_unmatched: bool | Collection[str]) -> Callable[[str], bool]:
  """What need not have a counterpart."""
  if isinstance(allow_unmatched, bool):
    return lambda name: bool(allow_unmatched)
  if isinstance(allow_unmatched, str) or not all(
    isinstance(text, str) for text in allow_unmatched
  ):
    raise TypeError(
      "`allow_unmatched` must be True, False, or names and regular"
      f" expressions; got {allow_unmatched!r}. Write a list, such as"
      ' [".*/ExponentialMovingAverage"].'
    )
  return lambda name: any(
    text == name or re.fullmatch(text, name) for text in allow_unmatched
  )


def _listed(where: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
  """Lines about what is on one side only."""
  lines = [f"  {name} {list(shapes[name])}" for name in sorted(shapes)]
  return [f"{where} only:", *lines] if lines else []


def _source(src: Any) -> str:
  """The prefix of a checkpoint's files."""
  path = os.fspath(src)
  if tf.io.gfile.isdir(path) and not tf.io.gfile.exists(f"{path}.index"):
    path = tf.train.latest_checkpoint(path) or path
  if not _is_there(path):
    raise FileNotFoundError(
      f"`src` is no checkpoint and no folder of one: got {src!r}. Name the"
      ' prefix of its files, such as "folder/model.ckpt-1000".'
    )
  return path


def _target(dst: Any) -> str:
  """The prefix to write, of which there is nothing yet."""
  path = os.fspath(dst)
  folder, name = os.path.split(path)
  if not name or not tf.io.gfile.isdir(folder or "."):
    raise FileNotFoundError(
      f"`dst` must be the prefix of files in a folder that is there; got"
      f' {dst!r}. Make the folder first, and name one such as "{folder}/new".'
    )
  if _is_there(path):
    raise FileExistsError(
      f"`dst` is {path!r}, and there is a checkpoint of that name. Name another"
      " prefix, or remove that one."
    )
  return path


def _is_there(path: str) -> bool:
  """Whether there is a checkpoint; of the oldest kind it is one file."""
  exists = tf.io.gfile.exists
  is_part = re.search(r"\.(index|meta|data-\d+-of-\d+)$", path)
  is_file = exists(path) and not tf.io.gfile.isdir(path) and not is_part
  return bool(exists(f"{path}.index") or is_file)
