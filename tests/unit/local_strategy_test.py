"""`local_strategy`; this process has four logical CPUs."""

import pathlib
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import tf_cross_shard
from tests.support import programs

# Devices can be divided only once in a process.
_PROGRAM = """
import tf_cross_shard
strategy = tf_cross_shard.local_strategy(3)
tf_cross_shard.local_strategy(2)
print(*strategy.extended.worker_devices)
"""


@pytest.mark.slow
def test_the_cpu_of_a_new_process_is_divided(tmp_path: pathlib.Path) -> None:
  output = programs.run(["-c", _PROGRAM], tmp_path)
  assert all(f"device:CPU:{i}" in output for i in range(3)), output


def test_devices_that_exist_are_used() -> None:
  for count in (4, 2, 1):
    strategy = tf_cross_shard.local_strategy(count)
    assert strategy.num_replicas_in_sync == count
    assert strategy.extended.worker_devices == tuple(
      f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(count)
    )


def test_too_late() -> None:
  tf.constant(0)
  with pytest.raises(
    RuntimeError, match=r"needs 5 .* already started with only 4"
  ):
    tf_cross_shard.local_strategy(5)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "4", None])
def test_no_positive_number(count: Any) -> None:
  with pytest.raises(ValueError, match=f"`num_replicas` must.* got {count!r}"):
    tf_cross_shard.local_strategy(count)


@pytest.mark.parametrize(
  ("gpus", "divided", "kind"), [(1, 1, "CPU"), (2, 1, "GPU"), (1, 3, "GPU")]
)
def test_gpus_if_there_are_enough(gpus: int, divided: int, kind: str) -> None:
  """Whole GPUs, or one that the program has divided; no GPU is needed here."""
  physical = [tf.config.PhysicalDevice(f"GPU:{i}", "GPU") for i in range(gpus)]
  cpus = tf.config.get_visible_devices("CPU")
  with (
    mock.patch.object(
      tf.config,
      "get_visible_devices",
      lambda kind: physical if kind == "GPU" else cpus,
    ),
    mock.patch.object(
      tf.config,
      "get_logical_device_configuration",
      lambda device: [None] * (divided if device in physical else 4),
    ),
    mock.patch.object(
      tf.distribute.MirroredStrategy, "__init__", return_value=None
    ) as create,
  ):
    tf_cross_shard.local_strategy(2)
  create.assert_called_once_with([f"{kind}:0", f"{kind}:1"])
