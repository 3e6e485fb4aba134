"""The parts of flat tensors that the members of a group have.

tensors    a a a a a a b b c c c c c c c d
parts      0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3    even
parts      1 1 1 1 1 1 2 2 0 0 0 0 0 0 0 3    whole: one member each
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard.gradients import packing


@dataclasses.dataclass(frozen=True)
class Cut:
  """The elements from `start` to before `stop` of the tensor at `index`."""

  index: int
  start: int
  stop: int

  @property
  def size(self) -> int:
    """The number of elements."""
    return self.stop - self.start

  def of(self, value: Any) -> tf.Tensor:
    """Returns these elements of a tensor or variable, flat if not all."""
    tensor = tf.convert_to_tensor(value)
    if self.size == tensor.shape.num_elements():
      return tensor
    [flat] = packing.flatten([tensor])
    return flat[self.start : self.stop]


@dataclasses.dataclass(frozen=True)
class Layout:
  """Which elements each member has.

  Attributes:
    sizes: The numbers of elements of the tensors.
    cuts: Of each member, the cuts that its part begins with; zeros follow.
    part: The number of elements of each part.
  """

  sizes: tuple[int, ...]
  cuts: tuple[tuple[Cut, ...], ...]
  part: int

  @classmethod
  def even(cls, sizes: Sequence[int], members: int) -> "Layout":
    """Cuts tensors into parts of equal sizes, one behind the other.

    >>> layout = Layout.even([3, 2], 2)
    >>> [[(c.index, c.start, c.stop) for c in cuts] for cuts in layout.cuts]
    [[(0, 0, 3)], [(1, 0, 2)]]
    """
    # One at least: engines do not carry tensors without elements.
    part = max(1, -(-sum(sizes) // members))
    cuts: list[list[Cut]] = [[] for _ in range(members)]
    begin = 0
    for index, size in enumerate(sizes):
      for member in range(members):
        start = max(0, member * part - begin)
        stop = min(size, (member + 1) * part - begin)
        if start < stop:
          cuts[member].append(Cut(index, start, stop))
      begin += size
    return cls(tuple(sizes), tuple(map(tuple, cuts)), part)

  @classmethod
  def whole(
    cls, sizes: Sequence[int], costs: Sequence[float], members: int
  ) -> "Layout":
    """Gives each tensor to the member with the least cost, dearest first.

    A member that is left without one repeats the work of the cheapest.

    >>> layout = Layout.whole([4, 1, 2, 2], [4, 1, 2, 2], 2)
    >>> [[cut.index for cut in cuts] for cuts in layout.cuts]
    [[0, 1], [2, 3]]
    """
    owned: list[list[int]] = [[] for _ in range(members)]
    spent = [0.0] * members
    by_cost = sorted(range(len(sizes)), key=lambda i: -costs[i])
    for index in by_cost:
      owner = spent.index(min(spent))
      owned[owner].append(index)
      spent[owner] += costs[index]
    cuts = tuple(
      tuple(Cut(i, 0, sizes[i]) for i in sorted(own or by_cost[-1:]))
      for own in owned
    )
    part = max(sum(cut.size for cut in of_member) for of_member in cuts)
    return cls(tuple(sizes), cuts, max(1, part))

  @functools.cached_property
  def owners(self) -> dict[int, int]:
    """The first member that has elements of each tensor, by its index."""
    found: dict[int, int] = {}
    for member, cuts in enumerate(self.cuts):
      for cut in cuts:
        found.setdefault(cut.index, member)
    return found

  def pack(
    self, member: int, read: Callable[[Cut], tf.Tensor], dtype: tf.DType
  ) -> tf.Tensor:
    """Joins what `read` returns for a member's cuts to its part."""
    pieces = packing.flatten([read(cut) for cut in self.cuts[member]])
    missing = self.part - sum(cut.size for cut in self.cuts[member])
    if missing:
      pieces.append(tf.zeros([missing], dtype))
    return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)

  def unpack(self, member: int, part: tf.Tensor) -> list[tf.Tensor]:
    """Returns a member's cuts out of its part."""
    sizes = [cut.size for cut in self.cuts[member]]
    # One operation: tracing thousands of slices takes seconds.
    return tf.split(part, [*sizes, self.part - sum(sizes)])[:-1]

  def join(self, parts: Sequence[tf.Tensor]) -> list[Any]:
    """Returns the tensors that the parts of all members make."""
    pieces: list[list[tf.Tensor]] = [[] for _ in self.sizes]
    filled = [0] * len(self.sizes)
    for member, part in enumerate(parts):
      own = self.unpack(member, part)
      for cut, piece in zip(self.cuts[member], own, strict=True):
        if cut.start == filled[cut.index]:  # Else it is another's, repeated.
          pieces[cut.index].append(piece)
          filled[cut.index] += cut.size
    empty = tf.zeros([0], parts[0].dtype)
    return [
      tf.concat(of_tensor, 0)
      if len(of_tensor) > 1
      else next(iter(of_tensor), empty)
      for of_tensor in pieces
    ]
