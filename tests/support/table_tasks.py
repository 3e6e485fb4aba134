"""What each of several workers does with a divided table."""

import pathlib
from typing import Any

import numpy as np

from tests.support import multi_worker_cases, tables
from tf_cross_shard import replica_state
from tf_cross_shard._src.replica_state import archive, group_state

CASES = [
  ("keras", "SGD", None),
  ("keras", "Adam", None),
  ("tf_keras", "Adagrad", None),
  ("keras", "Adagrad", "strided"),
]


def groups_of(grouping: str | None) -> Any:
  """Returns the groups of four replicas by name."""
  return None if grouping is None else [[0, 2], [1, 3]]


def run(strategy: Any, folder: pathlib.Path) -> dict[Any, Any]:
  """Returns tables after training, and writes files of one of them."""
  found: dict[Any, Any] = {}
  for case in CASES:
    which, kind, grouping = case
    groups = groups_of(grouping)
    if groups and strategy.num_replicas_in_sync != 4:
      continue
    _, layer, optimizer = tables.make(which, strategy, kind, groups)
    tables.take_steps(strategy, layer, optimizer)
    number = 1 if groups is None else 2
    found[case] = [tables.whole(layer, i) for i in range(number)]
  # A plain `lookup` outside a step, on all workers.
  found["lookup"] = layer.lookup(np.arange(tables.ROWS)).numpy()
  _, layer, optimizer = tables.make("keras", strategy, "Adam")
  tables.take_steps(strategy, layer, optimizer, tables.IDS[:1])
  state = optimizer, layer.trainable_variables
  replica_state.save(folder / "state", *state)
  # What `BackupAndRestore` writes: each worker the rows of its own members.
  own = group_state.GroupState(*state)
  differing = own.names_that_differ("a backup")
  path = folder / f"worker_{multi_worker_cases.place_of(strategy)}"
  archive.write(path, own.arrays(differing, own=True), own.about({}))
  found["rows in the file"] = [
    array.shape[0]
    for name, array in own.arrays(differing, own=True).items()
    if "embeddings" in name
  ]
  store: dict[str, Any] = {}
  layer.save_own_variables(store)
  found["store"] = store["0"]
  found["part"] = tuple(layer.embeddings.shape)
  return found
