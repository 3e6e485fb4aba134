"""Finds the variables of TensorFlow and Keras, and their names.

    keras.Variable ── .value ──▶ tf.Variable under a strategy ──▶ copy 0, 1, ...

Optimizers know one of the first two; tapes and graphs report one of the others.
"""

import contextlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import tensorflow as tf

# What TensorFlow and Keras create; the classes have no types.
Variable: TypeAlias = Any  # A `tf.Variable` or a `keras.Variable`.
Optimizer: TypeAlias = Any  # Of Keras 3 or tf_keras.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


# A part of a path, and the number at its end.
_PART: Final = re.compile(r"([^/]+?)(?:_?(\d+))?(?=/|$)")


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
  """Returns the names, with the layers of each kind numbered from 0."""
  # Keras numbers a layer by how many of its class the program has created:
  # dense_7 and dense_9 become dense and dense_1.
  numbers: dict[str, set[int]] = {}
  for part, number in itertools.chain(*map(_PART.findall, names)):
    numbers.setdefault(part, set()).add(int(number or 0))
  ranks = {part: sorted(found).index for part, found in numbers.items()}

  def renumber(match: re.Match[str]) -> str:
    rank = ranks[match[1]](int(match[2] or 0))
    return f"{match[1]}_{rank}" if rank else match[1]

  return [_PART.sub(renumber, name) for name in names]


def misplaced(names: Sequence[str], others: Sequence[str]) -> int | None:
  """Returns the first place where `others` has a name of another place."""
  names, others = map(renumbered, (names, others))
  # A clone may make the states of random number generators in another order.
  known = set(itertools.filterfalse(is_seed, names))
  pairs = enumerate(zip(names, others, strict=True))
  places = (i for i, (a, b) in pairs if a != b and b in known)
  return next(places, None)


def is_seed(name: str) -> bool:
  """Returns whether a name is that of a random number generator's state."""
  return name.split("/")[-1].startswith("seed_generator_state")


@contextlib.contextmanager
def outside_of_strategies() -> Iterator[None]:
  """A context in which no strategy's scope is active."""
  # TensorFlow keeps active scopes in the default graph, also eagerly.
  with tf.Graph().as_default(), tf.__internal__.eager_context.eager_mode():
    yield
