"""Tests tables whose rows the replicas of several workers divide."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import lazy_oracle, table_tasks, tables, testbed, workers
from tf_cross_shard import replica_state
from tf_cross_shard._src.replica_state import checkpoint


@pytest.mark.parametrize(
  ("count", "has_two"), [(2, False), (2, True), (4, False)]
)
def test_workers_divide_a_table(
  count: int, has_two: bool, tmp_path: pathlib.Path
) -> None:
  done = workers.run(
    "divided_tables",
    count,
    arguments={"folder": tmp_path, "has_two": has_two},
  )
  each = 2 if has_two else 1
  replicas = count * each
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
  assert trained == count * (5 if replicas == 4 else 3)
  first, second = (worker.result for worker in done[:2])
  np.testing.assert_array_equal(first["lookup"], second["lookup"])
  last = table_tasks.CASES[-1 if replicas == 4 else -2]
  np.testing.assert_array_equal(first["lookup"], first[last][0])
  for worker in done:
    assert worker.result["full disk"]["error"] == "OSError"
    assert "No space left" in worker.result["full disk"]["message"]
    assert worker.result["full disk"]["is unchanged"]
    assert worker.result["full disk for export"]["error"] == "OSError"
    assert "disk is full" in worker.result["full disk for export"]["message"]
    # For one id, for any number of ids, and for ids of another dtype.
    assert worker.result["traces"] <= 3 * each
  served = tf.saved_model.load(tmp_path / "served").signatures
  ids = tf.range(tables.ROWS, dtype=tf.int64)
  np.testing.assert_array_equal(
    served["serving_default"](ids=ids)["rows"], first["store"]
  )
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
  assert first["rows in the file"] == [part] * 3 * each
  layer.set_weights([tables.TABLE])
  slots = [slot.numpy() for slot in optimizer.variables[2:]]
  for slot in optimizer.variables[2:]:
    slot.assign(np.zeros(slot.shape))
  one, *others = (tmp_path / f"worker_{i}" for i in range(count))
  state = optimizer, layer.trainable_variables
  if not has_two:  # Four members need the rows of all files.
    missing = f"1 of {count} parts"
    with pytest.raises(replica_state.CheckpointError, match=missing):
      checkpoint.restore_file(one, *state)
    np.testing.assert_array_equal(tables.whole(layer), tables.TABLE)
  checkpoint.restore_file(one, *state, others)
  np.testing.assert_array_equal(tables.whole(layer), first["store"])
  for slot, right in zip(optimizer.variables[2:], slots, strict=True):
    assert slot.shape[0] == tables.ROWS
    np.testing.assert_array_equal(slot.numpy(), right)
    assert right.any()


def test_four_workers_go_on_after_two_were_killed(
  tmp_path: pathlib.Path,
) -> None:
  """A plain Keras model on one device predicts as they do."""

  def run(count: int, name: str, killed_after: int | None) -> Any:
    killed = range(count) if killed_after else ()
    arguments = {"folder": tmp_path / name, "killed_after": killed_after}
    return workers.run(
      "fitted_tables", count, arguments=arguments, may_fail=killed
    )[0]

  undisturbed = run(2, "undisturbed", None).result
  assert run(2, "backups", 13).returncode == -9
  resumed = run(4, "backups", None).result
  assert resumed["epochs"] == [1, 2]  # The first epoch was complete.
  for name in ("table", "outputs"):
    np.testing.assert_allclose(
      resumed[name], undisturbed[name], rtol=1e-5, atol=1e-7
    )
  np.testing.assert_allclose(resumed["plain"], resumed["outputs"], rtol=1e-5)
