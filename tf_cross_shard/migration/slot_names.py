"""What TensorFlow 1 called its slots, and what Keras calls them.

Version 1 put a slot beside its variable, under the optimizer's name, and
numbered the second and third that it made:

    dense/kernel    dense/kernel/Adam    dense/kernel/Adam_1

A second optimizer of the same name numbered on, with Adam_2 and Adam_3.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

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
# No name of version 1 has it: a letter of a scope that is not known.
_UNKNOWN: Final = "*"


@dataclasses.dataclass(frozen=True)
class Family:
  """The slots that one optimizer of version 1 made."""

  scope: str
  name: str
  first: int = 0
  heads: Mapping[str, str] = dataclasses.field(
    default_factory=dict, repr=False, compare=False
  )

  @property
  def called(self) -> str:
    """What `slots` is to be if it is meant."""
    return _with_number(self.name, self.first)

  def slot(self, variable: str, number: int) -> str:
    """The name of a slot."""
    head = self.heads.get(variable, f"{self.scope}{variable}")
    return f"{head}/{_with_number(self.name, self.first + number)}"


Families = dict[Family, dict[str, int]]
# By scope, name and first number.
_Found = dict[tuple[str, str, int], dict[str, int]]


def kind_of(optimizer: Any) -> str | None:
  """Keras' class of an optimizer, of those that version 1 had as well."""
  for base in type(optimizer).__mro__:
    if base.__module__.split(".")[0] in _OURS:
      name = _SAME_SLOTS.get(base.__name__, base.__name__)
      if name in _ORDERS:
        return name
  return None


def order_of(kind: str, count: int) -> tuple[frozenset[str], ...]:
  """What each of version 1's slots is in Keras."""
  return _ORDERS[kind].get(count, ())


def default_of(kind: str) -> str:
  """The name that version 1's optimizer has unless it was given another."""
  return _V1_NAMES[kind]


def is_dropped(kind: str, names: frozenset[str]) -> bool:
  """Whether a slot of version 1 may be left out where Keras has none.

  Version 1's RMSProp keeps a momentum even where it is 0, and then does not
  use it.
  """
  return kind == "RMSprop" and "momentum" in names


def size_of(kind: str, optimizer: Any) -> int:
  """How many slots of a variable version 1 made for such an optimizer."""
  return (max if getattr(optimizer, "centered", False) else min)(_ORDERS[kind])


def families(
  kind: str,
  owners: Collection[str],
  others: Collection[str],
  asked: str | None = None,
  *,
  known: Collection[str] = (),
  size: int | None = None,
  is_left_out: Callable[[str], bool] = lambda name: False,
) -> Families:
  """The optimizers that may have made what stands beside the variables."""
  counts = sorted(_ORDERS[kind])
  not_this = {name for k, name in _V1_NAMES.items() if k != kind} | _NEVER
  found: _Found = {}
  heads: dict[tuple[str, str], str] = {}
  for (scope, owner, head), lasts in _beside(owners, others, asked).items():
    heads[scope, owner] = head
    for name, wanted, numbers in _runs(lasts, asked):
      if asked is None and name in not_this:
        continue
      starts, count = [0], len(numbers)
      if wanted or numbers[0] or count not in counts:
        left = [
          number
          for number in numbers
          if not is_left_out(f"{head}/{_with_number(name, number)}")
        ]
        count = size or counts[0]
        starts = _starts(numbers, left, count)
        if asked is not None:
          # It is meant also where a pattern leaves out all of that name.
          starts += _starts(numbers, numbers, count)
          starts = [wanted] if wanted in starts else []
        if name in not_this or (len(starts) > 1 and name not in known):
          continue  # They may be anything.
      for start in starts:
        found.setdefault((scope, name, start), {})[owner] = count
      if starts and asked is not None:
        break
  _join(found, heads)
  return {
    Family(scope, name, first, {o: heads[scope, o] for o in made}): made
    for (scope, name, first), made in found.items()
  }


def _beside(
  owners: Collection[str], others: Collection[str], asked: str | None
) -> dict[tuple[str, str, str], set[str]]:
  """By scope, variable and what they stand behind: names with numbers."""
  found: dict[tuple[str, str, str], set[str]] = {}
  owners, others = set(owners), set(others)
  for name in sorted(others):
    head, last = _split(name, asked)
    place = _place(head, owners, others)
    # Of a variable in several parts each has slots of its own, under names
    # that end in 0, 1 and so on, and none of them is whole.
    is_part = place is not None and place[0].startswith(_UNKNOWN)
    if place and not (is_part and f"{head[:-1]}1/{last}" in others):
      found.setdefault((*place, head), set()).add(last)
  return found


def _split(name: str, asked: str | None) -> tuple[str, str]:
  """What a slot may stand beside, and its optimizer's name with a number."""
  for text in _readings(asked) if asked is not None else ():
    # It may have slashes in it.
    match = re.fullmatch(rf"(.+)/({re.escape(text[0])}(?:_\d+)?)", name)
    if match is not None:
      return match[1], match[2]
  head, _, last = name.rpartition("/")
  return head, last


def _readings(asked: str) -> list[tuple[str, int]]:
  """An optimizer's name and a number: as it is, and of a slot's name."""
  match = re.fullmatch(r"(.+)_([1-9]\d*)", asked)
  return [(asked, 0)] + ([(match[1], int(match[2]))] if match else [])


def _place(
  head: str, owners: set[str], others: set[str]
) -> tuple[str, str] | None:
  """The scope and the variable beside which something stands."""
  if head in owners:
    return "", head
  if head in others:
    return None  # It stands beside a variable that the model has not.
  ends = [owner for owner in owners if head.endswith(f"/{owner}")]
  if ends:
    owner = max(ends, key=len)
    return head.removesuffix(owner), owner
  cuts = [owner for owner in owners if _tail(head, owner)]
  if not cuts:
    return None
  owner = max(cuts, key=len)
  tail = _tail(head, owner)  # As long as the scope, and may have its end in it.
  end = tail[: -len(f"{owner}/part_0")] or "/"
  return end.rjust(len(tail) + 1, _UNKNOWN), owner


def _tail(head: str, owner: str) -> str:
  """What is left of a scope and a partitioned variable's name; or "".

  Version 1 cut the length of `w/part_0/` off `SCOPE/w/part_0/Adam`, and put the
  rest behind `w`: as many letters too many as the scope has.
  """
  part = f"{owner}/part_0"
  tail = head.removeprefix(f"{owner}/")
  is_cut = part.endswith(tail) or tail.endswith(f"/{part}")
  return tail if is_cut and tail != head else ""


def _runs(
  names: set[str], asked: str | None
) -> Iterator[tuple[str, int, list[int]]]:
  """Names, the number that is asked for, and numbers without a gap."""
  if asked is None:
    for name in sorted(names):
      match = re.fullmatch(r"(.+)_\d+", name)
      if match is None or match[1] not in names:
        yield name, 0, _run(names, name, 0)
    return
  for name, wanted in _readings(asked):
    match = re.fullmatch(r"(.+)_\d+", name)
    if asked in names and (match is None or match[1] not in names):
      start = wanted
      while start and _with_number(name, start - 1) in names:
        start -= 1
      yield name, wanted, _run(names, name, start)


def _run(names: set[str], name: str, start: int) -> list[int]:
  """The numbers of a name, from one of them on, without a gap."""
  end = start
  while _with_number(name, end) in names:
    end += 1
  return list(range(start, end))


def _with_number(name: str, number: int) -> str:
  """How version 1 called what it made under a name."""
  return f"{name}_{number}" if number else name


def _starts(numbers: list[int], left: list[int], count: int) -> list[int]:
  """The first number of each optimizer that made so many slots."""
  starts: list[int] = []
  run: list[int] = []
  for number in left:
    run = [*run, number] if run and number == run[-1] + 1 else [number]
    if number + 1 not in left and len(run) % count == 0:
      starts += run[::count]
  if len(numbers) % count:
    return starts  # Another made another number of them.
  return [start for start in starts if (start - numbers[0]) % count == 0]


def _join(found: _Found, heads: dict[tuple[str, str], str]) -> None:
  """Puts what is in an unknown scope into the only one that it may be."""
  for key in [key for key in found if key[0].startswith(_UNKNOWN)]:
    alike = [
      other
      for other in found
      if other != key
      and other[1:] == key[1:]
      and len(other[0]) == len(key[0])
      and other[0].endswith(key[0].lstrip(_UNKNOWN))
    ]
    if len(alike) == 1 and not found[key].keys() & found[alike[0]].keys():
      made = found.pop(key)
      found[alike[0]].update(made)
      heads |= {(alike[0][0], owner): heads[key[0], owner] for owner in made}
