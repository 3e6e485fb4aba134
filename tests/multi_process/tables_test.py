"""Tables whose rows the replicas of two workers divide."""

import pathlib

import numpy as np
import pytest

from tests.support import lazy_oracle, table_tasks, tables, testbed, workers
from tf_cross_shard import replica_state
from tf_cross_shard._src.replica_state import checkpoint


@pytest.mark.parametrize("has_two", [False, True])
def test_two_workers(has_two: bool, tmp_path: pathlib.Path) -> None:
  done = workers.run(
    "divided_tables",
    2,
    arguments={"folder": tmp_path, "has_two": has_two},
  )
  replicas = 4 if has_two else 2
  trained = 0
  for worker in done:
    for case in table_tasks.CASES:
      if case not in worker.result:
        continue
      _, kind, grouping = case
      groups = table_tasks.groups_of(grouping) or [range(replicas)]
      for members, table in zip(groups, worker.result[case], strict=True):
        right = lazy_oracle.train(kind, tables.TABLE, tables.batches(members))
        np.testing.assert_allclose(table, right, rtol=2e-6, atol=2e-6)
        trained += 1
    assert worker.result["part"] == (-(-tables.ROWS // replicas), tables.WIDTH)
  assert trained == (10 if has_two else 6)
  first, second = (worker.result for worker in done)
  np.testing.assert_array_equal(first["lookup"], second["lookup"])
  last = table_tasks.CASES[-1 if has_two else -2]
  np.testing.assert_array_equal(first["lookup"], first[last][0])
  # The file of the workers loads into four replicas of one process.
  _, layer, optimizer = tables.make("keras", testbed.mirrored(), "Adam")
  with testbed.mirrored().scope():
    optimizer.build(layer.trainable_variables)
  replica_state.restore(
    tmp_path / "state", optimizer, layer.trainable_variables
  )
  np.testing.assert_array_equal(tables.whole(layer), first["store"])
  # Backups: each worker's file has the table and two slots of its own members.
  part = -(-tables.ROWS // replicas)
  assert first["rows in the file"] == [part] * 3 * (replicas // 2)
  layer.set_weights([tables.TABLE])
  slots = [slot.numpy() for slot in optimizer.variables[2:]]
  for slot in optimizer.variables[2:]:
    slot.assign(np.zeros(slot.shape))
  one, two = tmp_path / "worker_0", tmp_path / "worker_1"
  state = optimizer, layer.trainable_variables
  if not has_two:  # Four members need the rows of both files.
    with pytest.raises(replica_state.CheckpointError, match="1 of 2 parts"):
      checkpoint.restore_file(one, *state)
    np.testing.assert_array_equal(tables.whole(layer), tables.TABLE)
  checkpoint.restore_file(one, *state, [two])
  np.testing.assert_array_equal(tables.whole(layer), first["store"])
  for slot, right in zip(optimizer.variables[2:], slots, strict=True):
    assert slot.shape[0] == tables.ROWS
    np.testing.assert_array_equal(slot.numpy(), right)
    assert right.any()
