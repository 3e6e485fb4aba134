"""Finds the variables of TensorFlow and Keras, and their names.

    keras.Variable ── .value ──▶ tf.Variable under a strategy ──▶ copy 0, 1, ...

Optimizers know one of the first two; tapes and graphs report one of the others.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core.keras_types import Variable

# A name, and the number at its end if there is one.
_NUMBERED: Final = re.compile(r"(.*?)(?:_(\d+))?")


def is_variable(value: object) -> bool:
  """Returns whether `value` is a `tf.Variable` or a `keras.Variable`."""
  # Do not import Keras: if it is not imported, no Keras variable exists.
  keras_variable = getattr(sys.modules.get("keras"), "Variable", ())
  return isinstance(value, (tf.Variable, keras_variable))


def each_once(variables: Iterable[Variable]) -> list[Variable]:
  """Returns the variables without repetitions; they cannot be in a set."""
  return list({id(variable): variable for variable in variables}.values())


def native(variable: Variable) -> Variable:
  """Returns the `tf.Variable` of a `tf.Variable` or `keras.Variable`."""
  # `value` is an attribute of Keras' variables, and a method of TensorFlow's.
  value = getattr(variable, "value", variable)
  return variable if callable(value) else value


def distributed(variable: Variable) -> Variable:
  """Returns the variable that holds the copies of all replicas."""
  return tf.distribute.get_strategy().extended.value_container(native(variable))


@tf.autograph.experimental.do_not_convert
def read_by_graph() -> list[Variable]:
  """Returns the trainable variables that the traced graph has read so far."""
  if not tf.inside_function():
    return list(tf.compat.v1.trainable_variables())
  # The public `trainable_variables` of a function is empty during tracing.
  graph = tf.compat.v1.get_default_graph()
  watched = graph._watched_variables  # noqa: SLF001
  trainable = [variable for variable in watched if variable.trainable]
  # All replicas need the same order: gradients are summed by position.
  return sorted(trainable, key=_creation_order)


def _creation_order(variable: Variable) -> tuple[int, str]:
  """Returns the number that TensorFlow gave to a variable, and its name."""
  # No public member says in which order variables were created.
  name = distributed(variable)._unique_id  # noqa: SLF001
  number = name.rpartition("_")[2]
  return (int(number) if number.isdigit() else 0, name)


def path_of(variable: Variable) -> str:
  """Returns the name of a variable, with the names of its layers if known."""
  return str(getattr(variable, "path", None) or variable.name).split(":")[0]


def unique(names: Sequence[str]) -> list[str]:
  """Returns the names, with numbers for repeated names: `weight#2`."""
  counts: dict[str, int] = {}
  numbered = []
  for name in names:
    count = counts[name] = counts.get(name, 0) + 1
    numbered.append(name if count == 1 else f"{name}#{count}")
  return numbered


def renumbered(names: Sequence[str]) -> list[str]:
  """Renumbers the names that Keras generated, from 0 in their order."""
  # Keras numbers a layer by how many of its class the program has created. The
  # numbers differ between workers, for example if only the chief has a second
  # model for evaluation, but not their order. The user's names are kept.
  automatic = _automatic_names()
  numbers: dict[str, set[int]] = {}
  for name in names:
    for base, number in _split(name, automatic):
      numbers.setdefault(base, set()).add(number)
  # dense_7 and dense_9 become dense and dense_1.
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
  """Yields each part of a name with its number from Keras, or with 0."""
  for part in name.split("/"):
    match = _NUMBERED.fullmatch(part)
    assert match is not None  # The expression matches any line.
    # Keras' Bidirectional puts these words before the name of a layer.
    kind = match[1].removeprefix("forward_").removeprefix("backward_")
    if match[2] and kind.replace("_", "").lower() in automatic:
      yield match[1], int(match[2])
    else:
      yield part, 0


def _automatic_names() -> set[str]:
  """Returns the names that Keras generates, without "_" and numbers."""
  found = {"variable", "seedgenerator"}
  kinds: list[type[Any]] = []
  for package in ("keras", "tf_keras"):
    keras = sys.modules.get(package)
    if keras is not None:
      kinds += [keras.layers.Layer, keras.optimizers.Optimizer]
  while kinds:
    kind = kinds.pop()
    found.add(kind.__name__.replace("_", "").lower())
    kinds += type.__subclasses__(kind)
  return found


@contextlib.contextmanager
def outside_of_strategies() -> Iterator[None]:
  """A context in which no strategy's scope is active."""
  # TensorFlow keeps active scopes in the default graph, also eagerly.
  with tf.Graph().as_default(), tf.__internal__.eager_context.eager_mode():
    yield
