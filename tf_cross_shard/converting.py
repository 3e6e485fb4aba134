"""What AutoGraph is not to rewrite of what runs inside a tf.function.

It is this package: its Python branches on no tensor, and rewriting it makes
tracing half as long again. The user's own functions are rewritten as anywhere,
and so is the little of this package that calls them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

_Method = TypeVar("_Method", bound=Callable[..., Any])


def not_ours(method: _Method) -> _Method:
  """Keeps AutoGraph away from a method and all that it calls.

  >>> @not_ours
  ... def twice(x):
  ...   return x + x
  >>> int(tf.function(twice)(tf.constant(2)))
  4

  Args:
    method: One of this package that calls no function of the user's.

  Returns:
    The same, to be called as it is.
  """
  unconverted: _Method = tf.autograph.experimental.do_not_convert(method)
  return unconverted
