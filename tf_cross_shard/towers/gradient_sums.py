"""The gradients of all towers as one for each variable.

Keras may wrap one variable in several objects, and one variable may stand in a
list twice.
"""

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard.gradients import indexed_slices
from tf_cross_shard.gradients.clipping import Gradient


def total(
  towers: Sequence[tuple[Sequence[Gradient], Sequence[Any]]],
  variables: Sequence[Any],
) -> list[Gradient]:
  """Adds up what towers have for each variable."""
  terms: dict[tuple[int, int], list[Gradient]] = {}
  for grads, theirs in towers:
    for grad, at in zip(grads, _places(theirs), strict=True):
      terms.setdefault(at, []).append(grad)
  return [
    _add(terms[at], variable)
    for at, variable in zip(_places(variables), variables, strict=True)
  ]


def key(variable: Any) -> int:
  """What a variable is known by, whatever wraps it."""
  return id(validation.native(variable))


def counted(variables: Sequence[Any]) -> collections.Counter[int]:
  """Which variables these are, and how often each stands there."""
  return collections.Counter(map(key, variables))


def names(variables: Sequence[Any]) -> list[str]:
  """The names of variables, for errors."""
  return [str(getattr(v, "path", None) or v.name) for v in variables]


def tensors(grads: Sequence[Gradient]) -> list[tf.Tensor]:
  """What has to be there before gradients can be added."""
  return [
    grad.values if isinstance(grad, tf.IndexedSlices) else grad
    for grad in grads
    if grad is not None
  ]


def _places(variables: Sequence[Any]) -> list[tuple[int, int]]:
  """A key for each; of one that stands there twice the second has another."""
  seen: collections.Counter[int] = collections.Counter()
  places = []
  for number in map(key, variables):
    places.append((number, seen[number]))
    seen[number] += 1
  return places


def _add(grads: Sequence[Gradient], variable: Any) -> Gradient:
  """A sum that stays row-sparse if all terms are; None without any."""
  present = [grad for grad in grads if grad is not None]
  if not present:
    return None
  if len({grad.dtype for grad in present}) > 1:
    present = [indexed_slices.cast(grad, variable) for grad in present]
  if all(isinstance(grad, tf.IndexedSlices) for grad in present):
    rows = tf.IndexedSlices(
      tf.concat([grad.values for grad in present], axis=0),
      tf.concat([grad.indices for grad in present], axis=0),
      present[0].dense_shape,
    )
    return indexed_slices.merge_duplicates(rows)
  return tf.add_n(
    [
      indexed_slices.to_dense(grad, variable)
      if isinstance(grad, tf.IndexedSlices)
      else grad
      for grad in present
    ]
  )
