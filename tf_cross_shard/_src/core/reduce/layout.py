"""Divides the elements of tensors among the members of a group.

tensors    a a a a a a b b c c c c c c c d
members    0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3    parts of equal sizes
"""

import dataclasses
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

  def pack(
    self, member: int, read: Callable[[Cut], tf.Tensor], dtype: tf.DType
  ) -> tf.Tensor:
    """Creates the part of a member: its cuts' elements, then zeros."""
    cuts = self.cuts[member]
    missing = self.part_size - sum(cut.size for cut in cuts)
    return _concat(packing.flatten(list(map(read, cuts))), missing, dtype)

  def row(self, values: Sequence[Any]) -> tf.Tensor:
    """Creates the parts of all members, one after the other."""
    flat = packing.flatten(list(map(tf.convert_to_tensor, values)))
    return _concat(flat, self._padding, values[0].dtype)

  def split(self, row: tf.Tensor) -> list[tf.Tensor]:
    """Returns the flat tensors, given the parts of all members as one row."""
    # One split instead of thousands of slices, whose tracing takes seconds.
    return tf.split(row, [*self.sizes, self._padding])[:-1]

  def join(self, parts: Sequence[tf.Tensor]) -> list[Any]:
    """Returns the flat tensors, given the parts of all members."""
    # To concatenate the parts first would copy all of them once more.
    pieces: list[list[tf.Tensor]] = [[] for _ in self.sizes]
    for cuts, part in zip(self.cuts, parts, strict=True):
      sizes = [cut.size for cut in cuts]
      split = tf.split(part, [*sizes, self.part_size - sum(sizes)])[:-1]
      for cut, piece in zip(cuts, split, strict=True):
        pieces[cut.index].append(piece)
    return [_concat(of_tensor, 0, parts[0].dtype) for of_tensor in pieces]

  @property
  def _padding(self) -> int:
    return self.part_size * len(self.cuts) - sum(self.sizes)


def _concat(
  pieces: list[tf.Tensor], missing: int, dtype: tf.DType
) -> tf.Tensor:
  """Concatenates flat tensors, and as many zeros as are missing."""
  if missing or not pieces:
    pieces = [*pieces, tf.zeros([missing], dtype)]
  return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
