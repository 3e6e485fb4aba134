"""The group of the calling replica.

A step puts the number of the calling replica's group into a context variable.
`PerModel` and `PerModelSettings` read it while the wrapped optimizer updates
the weights:

    step ─ as_group(group_here(groups)) ─▶ PerModel       learning_rate[group]
                                           PerModelSettings  weight_decay[group]
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core.reduce import isolation

# An int, or a scalar tensor or variable. Each thread has its own value, because
# replicas may be threads.
_my_group: Final = contextvars.ContextVar[Any]("my_group", default=None)


def current_group() -> Any:
  """Returns the group of the replica that takes a step, or None."""
  return _my_group.get()


def group_here(groups: groups_lib.Groups) -> Any:
  """Returns the number of the calling replica's group; None outside of one."""
  replica = isolation.current_replica()
  if replica is None or isinstance(replica, int):
    return None if replica is None else groups.index_of(replica)
  group_of = [groups.index_of(r) for r in range(groups.num_replicas)]
  return tf.gather(group_of, replica)


@contextlib.contextmanager
def as_group(group: Any) -> Iterator[None]:
  """Sets the current group."""
  before = _my_group.set(group)
  try:
    yield
  finally:
    _my_group.reset(before)
