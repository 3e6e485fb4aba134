"""Groups of replicas: which replicas sum their gradients together.

A `CrossShardOptimizer` reduces gradients inside each group. A group is a row of
a table of shape `[num_groups, group_size]`, which holds the number of each
replica exactly once. `Groups` is such a table. The functions of this module
create the usual tables:

- `contiguous`: neighboring replicas: `[[0, 1], [2, 3]]`
- `strided`: every n-th replica, with n groups: `[[0, 2], [1, 3]]`
- `singletons`: one replica in each group: `[[0], [1]]`
- `by_host`: the replicas of each host

>>> from tf_cross_shard import groups
>>> groups.contiguous(4, 2).to_lists()
[[0, 1], [2, 3]]
>>> groups.strided(4, 2).to_lists()
[[0, 2], [1, 3]]
>>> groups.singletons(2).to_lists()
[[0], [1]]
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.core.groups import (
  Groups,
  by_host,
  contiguous,
  singletons,
  strided,
)

__all__ = [
  "Groups",
  "by_host",
  "contiguous",
  "singletons",
  "strided",
]
__dir__ = _catalogue.publish(globals())
