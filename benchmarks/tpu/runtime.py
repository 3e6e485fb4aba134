"""Measures steps per second on the virtual TPU, and whether state stays there.

A network learns scikit-learn's digits in a training loop as a user would write
it, with a distributed dataset and `strategy.run` inside a tf.function.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from sklearn import datasets

from benchmarks import timing
from benchmarks.tpu import contestants as contestants_lib
from benchmarks.tpu import models
from tf_cross_shard import virtual_tpu
from tf_cross_shard._src.virtual_tpu import xla

PART = "digits, steps in a tf.function"
_LARGEST_PIXEL = 16
_CHECKED_STEPS = 20

Loop = Callable[[int], float]


def measure(
  strategy: virtual_tpu.VirtualTPUStrategy,
  names: Sequence[str],
  num_steps: int,
  rounds: int,
) -> dict[str, Any]:
  """Times the contestants in turns, and checks where their variables are.

  Args:
    strategy: The strategy with the replicas.
    names: The contestants. Plain Keras is the baseline.
    num_steps: The number of steps in a turn.
    rounds: The number of turns.

  Returns:
    The rows of the table; steps per second, differences from plain Keras and
    the results of `check_state`, by contestant.
  """
  case = models.DIGITS
  contestants = {
    name: contestants_lib.make(name, strategy, case) for name in names
  }
  loops = {
    name: make_loop(contestant, strategy)
    for name, contestant in contestants.items()
  }
  for loop in loops.values():
    loop(_CHECKED_STEPS)
  apart = _differences(contestants)
  taken = timing.interleave(
    {name: lambda loop=loop: loop(num_steps) for name, loop in loops.items()},
    rounds,
  )
  rows = timing.compare(PART, taken, [contestants_lib.KERAS])
  timing.show(rows)
  rates = {row.case: 1e3 * num_steps / row.milliseconds for row in rows}
  states = {
    name: check_state(contestant, strategy, loops[name], case)
    for name, contestant in contestants.items()
  }
  _show(rates, apart, states)
  return {
    "rows": [vars(row) for row in rows],
    "steps_per_second": rates,
    "largest_difference_from_plain_keras": apart,
    "state": states,
  }


def make_loop(
  contestant: contestants_lib.Contestant,
  strategy: virtual_tpu.VirtualTPUStrategy,
) -> Loop:
  """Returns a training loop that continues in each call where it stopped.

  Args:
    contestant: The contestant to train.
    strategy: The strategy with the replicas.

  Returns:
    A function that takes the number of steps and returns the last step's loss.
  """
  batches = iter(strategy.experimental_distribute_dataset(_digits(strategy)))

  @tf.function
  def train_step(inputs: Any, labels: Any) -> tf.Tensor:
    losses = strategy.run(contestant.step, (inputs, labels))
    return strategy.reduce("MEAN", losses, axis=None)

  def run(num_steps: int) -> float:
    for _ in range(num_steps):
      loss = train_step(*next(batches))
    return float(loss)

  return run


def check_state(
  contestant: contestants_lib.Contestant,
  strategy: virtual_tpu.VirtualTPUStrategy,
  loop: Loop,
  case: models.Case,
) -> dict[str, Any]:
  """Checks that variables stay in the replicas' memory between steps.

  Args:
    contestant: The contestant to train.
    strategy: The strategy with the replicas.
    loop: The training loop of the contestant.
    case: The kind of model, which has the shapes of a batch.

  Returns:
    The number of variables; how many of them are at the same address after some
    steps; the bytes that a step moves into the replicas' memory and out of it;
    and, to compare, the bytes of a batch, of the losses and of all variables.
  """
  count = strategy.num_replicas_in_sync
  before = [_addresses(each) for each in contestant.state]
  with _counting() as moved:
    loop(_CHECKED_STEPS)
  after = [_addresses(each) for each in contestant.state]
  state = [each.take().array for each in contestant.state]
  return {
    "variables": len(before),
    "not_moved": sum(map(list.__eq__, before, after)),
    "state_bytes": count * sum(map(_num_bytes, state)),
    "bytes_in": moved["in"] / _CHECKED_STEPS,
    "batch_bytes": count * sum(map(_num_bytes, case.specs)),
    "bytes_out": moved["out"] / _CHECKED_STEPS,
    "loss_bytes": count * 4,
  }


def _addresses(variable: Any) -> list[int]:
  """Returns the address of each replica's copy of a variable."""
  return [
    copy.unsafe_buffer_pointer() for copy in variable.take().array._arrays
  ]


def is_on_device(state: Mapping[str, Any]) -> bool:
  """Returns whether only batches and losses moved between host and replicas.

  Args:
    state: The result of `check_state`.

  Returns:
    False if a variable moved, or any bytes beyond batches and losses.
  """
  return (
    state["not_moved"] == state["variables"]
    and state["bytes_in"] == state["batch_bytes"]
    and state["bytes_out"] == state["loss_bytes"]
  )


@contextlib.contextmanager
def _counting() -> Iterator[collections.Counter[str]]:
  """Counts the bytes that move into the replicas' memory and out of it."""
  moved: collections.Counter[str] = collections.Counter()
  put, to_numpy = xla.Client.put, xla.Buffers.to_numpy

  def counting_put(client: xla.Client, arrays: Sequence[np.ndarray]) -> Any:
    moved["in"] += sum(array.nbytes for array in arrays)
    return put(client, arrays)

  def counting_to_numpy(buffers: xla.Buffers, replica: int) -> np.ndarray:
    array = to_numpy(buffers, replica)
    moved["out"] += array.nbytes
    return array

  with (
    mock.patch.object(xla.Client, "put", counting_put),
    mock.patch.object(xla.Buffers, "to_numpy", counting_to_numpy),
  ):
    yield moved


def _digits(strategy: virtual_tpu.VirtualTPUStrategy) -> tf.data.Dataset:
  """Returns an endless dataset of digits, in the same order in every call."""
  digits = datasets.load_digits()
  images = (digits.data / _LARGEST_PIXEL).astype(np.float32)
  labels = digits.target.astype(np.int32)
  rows = models.DIGITS.specs[0].shape[0] * strategy.num_replicas_in_sync
  dataset = tf.data.Dataset.from_tensor_slices((images, labels)).cache()
  dataset = dataset.shuffle(len(images), seed=0).repeat()
  return dataset.batch(rows, drop_remainder=True).prefetch(4)


def _differences(
  contestants: Mapping[str, contestants_lib.Contestant],
) -> dict[str, float]:
  """Returns the largest difference of weights from plain Keras' weights."""
  weights = {
    name: np.concatenate([w.ravel() for w in contestant.model.get_weights()])
    for name, contestant in contestants.items()
  }
  reference = weights[contestants_lib.KERAS]
  return {
    name: float(np.abs(values - reference).max())
    for name, values in weights.items()
  }


def _num_bytes(array: Any) -> int:
  """Returns the bytes of an array, given the array or its shape and dtype."""
  dtype = tf.as_dtype(array.dtype)
  return int(np.prod(array.shape, dtype=int)) * int(dtype.size)


def _show(
  rates: Mapping[str, float],
  apart: Mapping[str, float],
  states: Mapping[str, Mapping[str, Any]],
) -> None:
  """Prints the results that are not in the table of times."""
  titles = ("steps/s", "difference", "in place", "bytes in/out", "of state")
  widths = (9, 12, 10, 14, 11)
  cells = (f"{title:>{w}}" for title, w in zip(titles, widths, strict=True))
  print("\n" + " " * 22 + "".join(cells))
  for name, state in states.items():
    row = (
      f"{rates[name]:.0f}",
      f"{apart[name]:.1e}",
      f"{state['not_moved']}/{state['variables']}",
      f"{state['bytes_in']:.0f}/{state['bytes_out']:.0f}",
      f"{state['state_bytes']:,}",
    )
    cells = (f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True))
    print(f"  {name:<20}" + "".join(cells), flush=True)
