"""The gradients of all towers as one for each variable.

Keras may wrap one variable in several objects, and one variable may stand in a
list twice.
"""

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import arguments, sparse
from tf_cross_shard.clipping import Gradient


def total(
  towers: Sequence[tuple[Sequence[Gradient], Sequence[Any]]],
  variables: Sequence[Any],
) -> list[Gradient]:
  """Adds up what towers have for each variable.

  >>> one, other = tf.Variable(0.0), tf.Variable(0.0)
  >>> first = [tf.constant(1.0), tf.constant(2.0)], [one, other]
  >>> second = [tf.constant(4.0), tf.constant(8.0)], [other, one]
  >>> [float(grad) for grad in total([first, second], [one, other])]
  [9.0, 6.0]

  Args:
    towers: Of each its gradients and their variables, in any order.
    variables: The order wanted; as many as each tower has.

  Returns:
    For each variable the sum, row-sparse if all terms are; None without any.
  """
  terms: dict[tuple[int, int], list[Gradient]] = {}
  for grads, theirs in towers:
    for grad, at in zip(grads, _places(theirs), strict=True):
      terms.setdefault(at, []).append(grad)
  return [
    _add(terms[at], variable)
    for at, variable in zip(_places(variables), variables, strict=True)
  ]


def key(variable: Any) -> int:
  """What a variable is known by, whatever wraps it.

  >>> weight = tf.Variable(1.0)
  >>> key(weight) == id(weight)
  True

  Args:
    variable: A variable.

  Returns:
    A number that no other has as long as this one lives.
  """
  return id(arguments.native(variable))


def counted(variables: Sequence[Any]) -> collections.Counter[int]:
  """Which variables these are, and how often each stands there.

  Args:
    variables: Any.

  Returns:
    The count of each key.
  """
  return collections.Counter(map(key, variables))


def names(variables: Sequence[Any]) -> list[str]:
  """The names of variables, for errors.

  Args:
    variables: Any.

  Returns:
    As many names.
  """
  return [str(getattr(v, "path", None) or v.name) for v in variables]


def tensors(grads: Sequence[Gradient]) -> list[tf.Tensor]:
  """What has to be there before gradients can be added.

  Args:
    grads: Dense or row-sparse gradients, or None.

  Returns:
    A tensor for each that is not None.
  """
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
    present = [sparse.cast(grad, variable) for grad in present]
  if all(isinstance(grad, tf.IndexedSlices) for grad in present):
    rows = tf.IndexedSlices(
      tf.concat([grad.values for grad in present], axis=0),
      tf.concat([grad.indices for grad in present], axis=0),
      present[0].dense_shape,
    )
    return sparse.merge_duplicates(rows)
  return tf.add_n(
    [
      sparse.to_dense(grad, variable)
      if isinstance(grad, tf.IndexedSlices)
      else grad
      for grad in present
    ]
  )
