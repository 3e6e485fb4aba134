"""Divides the elements of tensors among the members of a group.

tensors    a a a a a a b b c c c c c c c d
even       0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3    parts of equal sizes
by_tensor  1 1 1 1 1 1 2 2 0 0 0 0 0 0 0 3    each tensor has one member
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core.gradients import packing


@dataclasses.dataclass(frozen=True)
class Cut:
  """A range of elements of the flat tensor at `index` in a list of tensors."""

  index: int
  start: int
  stop: int

  @property
  def size(self) -> int:
    return self.stop - self.start

  def of(self, value: Any) -> tf.Tensor:
    """Returns these elements: the whole value, or a flat part of it."""
    tensor = tf.convert_to_tensor(value)
    if self.size == tensor.shape.num_elements():
      return tensor
    [flat] = packing.flatten([tensor])
    return flat[self.start : self.stop]


@dataclasses.dataclass(frozen=True)
class Layout:
  """The parts of all members: their cuts one after the other, then zeros."""

  sizes: tuple[int, ...]
  cuts: tuple[tuple[Cut, ...], ...]
  part_size: int

  @classmethod
  def even(cls, sizes: Sequence[int], members: int) -> "Layout":
    """Cuts concatenated tensors of these sizes into parts of equal sizes."""
    # At least one element: collectives do not accept empty tensors.
    part_size = max(1, -(-sum(sizes) // members))
    cuts: list[list[Cut]] = [[] for _ in range(members)]
    begin = 0  # The place of this tensor's first element among all elements.
    for index, size in enumerate(sizes):
      for member in range(members):
        # The member's part, relative to this tensor's first element.
        start = max(0, member * part_size - begin)
        stop = min(size, (member + 1) * part_size - begin)
        if start < stop:
          cuts[member].append(Cut(index, start, stop))
      begin += size
    return cls(tuple(sizes), tuple(map(tuple, cuts)), part_size)

  @classmethod
  def by_tensor(
    cls, sizes: Sequence[int], costs: Sequence[float], members: int
  ) -> "Layout":
    """Gives each tensor to one member, so that costs are balanced.

    Tensors are assigned in order of falling cost, each to the member whose
    tensors have the least total cost so far. Costs can have any unit. If
    there are fewer tensors than members, a member without a tensor repeats the
    update of the cheapest tensor, because no part may be empty.

    >>> layout = Layout.by_tensor([4, 1, 2, 2], [4, 1, 2, 2], 2)
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
      tuple(Cut(i, 0, sizes[i]) for i in sorted(indices or by_cost[-1:]))
      for indices in owned
    )
    part_size = max(sum(cut.size for cut in of_member) for of_member in cuts)
    return cls(tuple(sizes), cuts, max(1, part_size))

  @functools.cached_property
  def owners(self) -> dict[int, int]:
    """Maps a tensor's index to the first member that holds its elements."""
    found: dict[int, int] = {}
    for member, cuts in enumerate(self.cuts):
      for cut in cuts:
        found.setdefault(cut.index, member)
    return found

  def pack(
    self, member: int, read: Callable[[Cut], tf.Tensor], dtype: tf.DType
  ) -> tf.Tensor:
    """Creates the part of a member: its cuts' elements, then zeros."""
    pieces = packing.flatten([read(cut) for cut in self.cuts[member]])
    missing = self.part_size - sum(cut.size for cut in self.cuts[member])
    if missing:
      pieces.append(tf.zeros([missing], dtype))
    return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)

  def unpack(self, member: int, part: tf.Tensor) -> list[tf.Tensor]:
    """Returns the elements of a member's cuts, given its part."""
    sizes = [cut.size for cut in self.cuts[member]]
    # One split instead of thousands of slices, whose tracing takes seconds.
    return tf.split(part, [*sizes, self.part_size - sum(sizes)])[:-1]

  def join(self, parts: Sequence[tf.Tensor]) -> list[Any]:
    """Assembles the flat tensors, given the parts of all members."""
    pieces: list[list[tf.Tensor]] = [[] for _ in self.sizes]
    filled = [0] * len(self.sizes)  # How many elements are assembled so far.
    for member, part in enumerate(parts):
      of_member = self.unpack(member, part)
      for cut, piece in zip(self.cuts[member], of_member, strict=True):
        # A member without its own tensor repeats a different member's tensor,
        # which is then already complete.
        if cut.start == filled[cut.index]:
          pieces[cut.index].append(piece)
          filled[cut.index] += cut.size
    empty = tf.zeros([0], parts[0].dtype)
    return [
      tf.concat(of_tensor, 0)
      if len(of_tensor) > 1
      else next(iter(of_tensor), empty)
      for of_tensor in pieces
    ]
