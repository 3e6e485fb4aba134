"""Variables of TensorFlow and of both Kerases: which one it is, and its name.

Keras 3 has variables around TensorFlow's, strategies have variables that hold
one copy for each replica, and tapes and graphs may report either a copy or the
whole. Names that Keras numbers differ between programs that do the same.
"""

import re
import sys
from collections.abc import Iterator, Sequence, Set
from typing import Any, Final

import tensorflow as tf

_NUMBERED: Final = re.compile(r"(.*?)(?:_(\d+))?")


def is_variable(value: object) -> bool:
  """Whether `value` is a `tf.Variable` or a `keras.Variable`."""
  # Nobody has a variable of a Keras that is not loaded.
  keras_variable = getattr(sys.modules.get("keras"), "Variable", ())
  return isinstance(value, (tf.Variable, keras_variable))


def native(variable: Any) -> Any:
  """The `tf.Variable` of a `tf.Variable` or `keras.Variable`."""
  value = getattr(variable, "value", variable)
  return variable if callable(value) else value


def distributed(variable: Any) -> Any:
  """Returns the variable with the copies of all replicas, or itself.

  Graphs and tapes may report one replica's copy; optimizers know the whole.
  """
  return tf.distribute.get_strategy().extended.value_container(native(variable))


@tf.autograph.experimental.do_not_convert
def read_by_graph() -> list[Any]:
  """Trainable variables that the graph being built has read so far.

  They are in order of creation, like a tape's. All replicas must have the same
  order: gradients are summed by position, and slots are found by position.
  """
  if not tf.inside_function():
    return list(tf.compat.v1.trainable_variables())
  # The `trainable_variables` of a function are empty while it is traced.
  watched = tf.compat.v1.get_default_graph()._watched_variables
  trainable = [variable for variable in watched if variable.trainable]
  return sorted(trainable, key=_creation_order)


def _creation_order(variable: Any) -> tuple[int, str]:
  """The number that TensorFlow gave a variable, then its name."""
  name = distributed(variable)._unique_id
  number = name.rpartition("_")[2]
  return (int(number) if number.isdigit() else 0, name)


def path_of(variable: Any) -> str:
  """The name that Keras gave, with those of the layers around."""
  return str(getattr(variable, "path", None) or variable.name).split(":")[0]


def renumbered(names: Sequence[str]) -> list[str]:
  """Returns names whose numbers, where Keras gave them, tell the order only.

  Keras numbers layers by how many of a kind the program made before, which may
  differ between workers that train the same: a chief that evaluates, say. Names
  that the user chose stay as they are.
  """
  automatic = _automatic_names()
  numbers: dict[str, set[int]] = {}
  for name in names:
    for base, number in _split(name, automatic):
      numbers.setdefault(base, set()).add(number)
  ranks = {
    base: {number: rank for rank, number in enumerate(sorted(found))}
    for base, found in numbers.items()
  }
  return [
    "/".join(
      f"{base}_{ranks[base][number]}" if ranks[base][number] else base
      for base, number in _split(name, automatic)
    )
    for name in names
  ]


def _split(name: str, automatic: Set[str]) -> Iterator[tuple[str, int]]:
  """Yields the parts of a name and Keras' numbers behind them, 0 for none."""
  for part in name.split("/"):
    match = _NUMBERED.fullmatch(part)
    assert match is not None  # the expression takes any text of one line
    kind = match[1].removeprefix("forward_").removeprefix("backward_")
    if match[2] and kind.replace("_", "").lower() in automatic:
      yield match[1], int(match[2])
    else:
      yield part, 0


def _automatic_names() -> set[str]:
  """Returns what Keras calls objects without a name of their own, less "_".

  It is the name of the class; `Bidirectional` puts "forward_" before it.
  """
  found = {"variable", "seedgenerator"}
  kinds: list[type[Any]] = []
  for package in ("keras", "tf_keras"):
    keras = sys.modules.get(package)
    if keras is not None:
      kinds += [keras.layers.Layer, keras.optimizers.Optimizer]
      legacy = getattr(keras.optimizers, "legacy", None)
      kinds += [getattr(legacy, "Optimizer", keras.optimizers.Optimizer)]
  while kinds:
    kind = kinds.pop()
    found.add(kind.__name__.replace("_", "").lower())
    kinds += type.__subclasses__(kind)
  return found
