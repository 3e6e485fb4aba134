"""Copies of variables as bytes, where another process has some of them.

Real processes do this in replica_state_workers_test.py. Here the sum over all
workers is one in NumPy.
"""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard.replica_state import replica_values


def _worker(here: range, sent: list[Any], received: Any = None) -> Any:
  """Copies of which this process has those of some replicas."""
  found = replica_values.Copies(testbed.mirrored())
  engine = type(found.engine)

  def sum_of(words: Any) -> Any:
    sent.append(words.copy())
    return words if received is None else received[len(sent) - 1]

  patches = (
    mock.patch.object(engine, "replicas_here", here),
    mock.patch.object(found, "_sum_of", sum_of),
  )
  return found, patches


def _share(
  most: int, owners: list[int], sizes: list[int], here: range, received: Any
) -> tuple[list[bytes], list[Any]]:
  sent: list[Any] = []
  found, patches = _worker(here, sent, received)
  with (
    patches[0],
    patches[1],
    mock.patch.object(replica_values, "_MOST_WORDS", most),
  ):
    blobs = found.share(owners, sizes, lambda i: bytes([i + 1]) * sizes[i])
    return list(blobs), sent


@pytest.mark.parametrize("most", [1, 2, 3, 64, 1 << 22])
def test_each_worker_adds_its_own(most: int) -> None:
  """And the sum is everyone's, whatever is cut into how many parts."""
  rng = np.random.default_rng(most)
  sizes = [0, 1, 0, 4, 5, 4096, 3, *rng.integers(0, 40, 20).tolist(), 0]
  owners = rng.integers(0, 4, len(sizes)).tolist()
  halves = (range(0, 1), range(1, 4))
  parts = [_share(most, owners, sizes, half, None)[1] for half in halves]
  assert len(parts[0]) == len(parts[1]) >= 1
  total = [a + b for a, b in zip(*parts, strict=True)]
  for half in halves:
    blobs, _ = _share(most, owners, sizes, half, total)
    assert blobs == [bytes([i + 1]) * size for i, size in enumerate(sizes)]


def test_few_sizes_travel() -> None:
  """The runtime keeps something for each."""
  lengths = set()
  for size in range(1, 30_000, 997):
    _, sent = _share(1 << 12, [0], [size], range(0, 1), None)
    lengths |= {len(words) for words in sent}
  assert lengths <= {256, 512, 1024, 2048, 4096}
  assert len(lengths) > 2


def test_nothing_travels_in_one_process() -> None:
  sent: list[Any] = []
  found, patches = _worker(range(4), sent)
  with testbed.mirrored().scope():
    variable = tf.Variable(0.0)
  cases.spread(variable, [1.0, 2.0, 3.0, 4.0])
  with patches[1]:
    assert [float(a) for a in found.here(variable)] == [1.0, 2.0, 3.0, 4.0]
    wanted = [(variable, 3), (variable, 0)]
    assert [float(a) for a in found.read(wanted)] == [4.0, 1.0]
    assert len(set(found.digests([variable])[0])) == 4
  assert sent == []


def test_read_keeps_dtype_and_shape() -> None:
  """Also of what came as bytes."""
  with testbed.mirrored().scope():
    variables = [
      tf.Variable(np.arange(6).reshape(2, 3), dtype=dtype, trainable=False)
      for dtype in (tf.bfloat16, tf.int64, tf.uint8, tf.complex64)
    ] + [tf.Variable(True, trainable=False), tf.Variable(np.zeros([0, 2]))]
  found, patches = _worker(range(0, 3), [])
  with patches[0], patches[1]:
    arrays = list(found.read([(variable, 2) for variable in variables]))
  for array, variable in zip(arrays, variables, strict=True):
    expected = variable.numpy()
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == expected.tobytes()
    assert array.flags.writeable


def test_write_to_what_exists_once() -> None:
  variable = tf.Variable(1.0)
  found = replica_values.Copies(testbed.mirrored())
  assert [float(a) for a in found.here(variable)] == [1.0] * 4
  found.write(variable, [np.float32(2.0)] * 4)
  assert float(variable.numpy()) == 2.0


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
