"""What TensorFlow 1 called its slots, and what Keras calls them.

Version 1 put a slot beside its variable, under the optimizer's name, and
numbered the second and third that it made:

    dense/kernel    dense/kernel/Adam    dense/kernel/Adam_1
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

# Keras 3.8 names these slots after the variable only; ours are then called by
# the list that they stand in.
_ACCUMULATOR: Final = frozenset(("accumulator", "accumulators"))
# By Keras' class and the number of slots that version 1 made: the k-th slot's
# names in Keras 3 and in tf_keras, newer and older.
_ORDERS: Final[Mapping[str, Mapping[int, tuple[frozenset[str], ...]]]] = {
  "SGD": {1: (frozenset(("momentum", "m")),)},
  "Adam": {2: (frozenset(("momentum", "m")), frozenset(("velocity", "v")))},
  "Adagrad": {1: (_ACCUMULATOR,)},
  "Adadelta": {
    2: (
      frozenset(("accumulated_grad", "accum_grad")),
      frozenset(("accumulated_delta_var", "accum_var")),
    )
  },
  "RMSprop": {
    2: (frozenset(("velocity", "rms")), frozenset(("momentum",))),
    3: (  # centered
      frozenset(("velocity", "rms")),
      frozenset(("average_gradient", "mg")),
      frozenset(("momentum",)),
    ),
  },
  "Ftrl": {2: (_ACCUMULATOR, frozenset(("linear", "linears")))},
}
_SAME_SLOTS: Final = {"AdamW": "Adam"}
# The names that version 1 gave unless told otherwise, by Keras' class.
_V1_NAMES: Final = {
  "SGD": "Momentum",
  "Adam": "Adam",
  "Adagrad": "Adagrad",
  "Adadelta": "Adadelta",
  "RMSprop": "RMSProp",
  "Ftrl": "Ftrl",
}
# Others that stand beside a variable, and are no slot of these.
_NEVER: Final = frozenset(
  ("ExponentialMovingAverage", "ProximalAdagrad", "AdagradDA")
)
_OURS: Final = ("keras", "tf_keras", "tf_cross_shard")


class Family(NamedTuple):
  """The slots that one optimizer of version 1 made.

  Attributes:
    scope: What stands before the variables' names, with its slash; or "".
    name: The optimizer's name.
  """

  scope: str
  name: str

  def slot(self, variable: str, number: int) -> str:
    """The name of a slot.

    >>> Family("", "Adam").slot("dense/kernel", 1)
    'dense/kernel/Adam_1'

    Args:
      variable: The variable's name in the checkpoint.
      number: Of the slot, from 0.

    Returns:
      The slot's name there.
    """
    suffix = f"_{number}" if number else ""
    return f"{self.scope}{variable}/{self.name}{suffix}"


Families = dict[Family, dict[str, int]]


def kind_of(optimizer: Any) -> str | None:
  """Keras' class of an optimizer, of those that version 1 had as well.

  >>> import tensorflow as tf
  >>> kind_of(tf.keras.optimizers.AdamW())
  'Adam'

  Args:
    optimizer: The innermost one; its class may be derived from Keras'.

  Returns:
    The name of the class; None if version 1 had none like it.
  """
  for base in type(optimizer).__mro__:
    if base.__module__.split(".")[0] in _OURS:
      name = _SAME_SLOTS.get(base.__name__, base.__name__)
      if name in _ORDERS:
        return name
  return None


def order_of(kind: str, count: int) -> tuple[frozenset[str], ...]:
  """What each of version 1's slots is in Keras.

  Args:
    kind: A class, from `kind_of`.
    count: How many slots version 1 made for a variable.

  Returns:
    For each, in the order of creation, all names that some Keras has for it;
    nothing if that optimizer never makes so many.
  """
  return _ORDERS[kind].get(count, ())


def default_of(kind: str) -> str:
  """The name that version 1's optimizer has unless it was given another.

  >>> default_of("SGD")
  'Momentum'

  Args:
    kind: A class, from `kind_of`.

  Returns:
    The name.
  """
  return _V1_NAMES[kind]


def is_dropped(kind: str, names: frozenset[str]) -> bool:
  """Whether a slot of version 1 may be left out where Keras has none.

  Version 1's RMSProp keeps a momentum even where it is 0, and then does not
  use it.

  Args:
    kind: A class, from `kind_of`.
    names: One slot's, from `order_of`.

  Returns:
    Whether nothing is lost without it.
  """
  return kind == "RMSprop" and "momentum" in names


def families(
  kind: str,
  owners: Collection[str],
  others: Collection[str],
  asked: str | None = None,
) -> Families:
  """The optimizers that may have made what stands beside the variables.

  >>> families("Adam", ["w"], ["w/Adam", "w/Adam_1", "w/Momentum", "step"])
  {Family(scope='', name='Adam'): {'w': 2}}

  Args:
    kind: The class in Keras, from `kind_of`.
    owners: The names that trained variables have in the checkpoint.
    others: The names in the checkpoint that belong to no variable of the model.
    asked: The name of the only one that is meant, whatever name it is.

  Returns:
    Those that made as many slots as that class does, each with the number of
    slots for each variable.
  """
  beside: dict[tuple[str, str], set[str]] = {}
  for name in sorted(others):
    head, last = _split(name, asked)
    owner = _owner(head, set(owners), set(others))
    if owner is not None:
      scope = head.removesuffix(owner)
      beside.setdefault((scope, owner), set()).add(last)
  not_this = {name for k, name in _V1_NAMES.items() if k != kind} | _NEVER
  found: Families = {}
  for (scope, owner), suffixes in beside.items():
    for name, count in _numbered(suffixes):
      is_meant = name not in not_this if asked is None else name == asked
      if count in _ORDERS[kind] and is_meant:
        found.setdefault(Family(scope, name), {})[owner] = count
  return found


def _split(name: str, asked: str | None) -> tuple[str, str]:
  """What a slot may stand beside, and its optimizer's name with a number."""
  if asked is not None:  # It may have slashes in it.
    match = re.fullmatch(rf"(.+)/({re.escape(asked)}(?:_\d+)?)", name)
    if match is not None:
      return match[1], match[2]
  head, _, last = name.rpartition("/")
  return head, last


def _owner(head: str, owners: set[str], others: set[str]) -> str | None:
  """The variable beside which something of this scope stands."""
  if head in owners:
    return head
  if head in others:
    return None  # It stands beside a variable that the model has not.
  ends = [owner for owner in owners if head.endswith(f"/{owner}")]
  return max(ends, key=len, default=None)


def _numbered(names: set[str]) -> Iterator[tuple[str, int]]:
  """Names, and how often each occurs, as `name`, `name_1` and so on."""
  for name in sorted(names):
    match = re.fullmatch(r"(.+)_\d+", name)
    if match is None or match[1] not in names:
      count = 1
      while f"{name}_{count}" in names:
        count += 1
      yield name, count
