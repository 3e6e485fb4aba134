"""Steps per second of the virtual TPU, and where the state is between steps.

A network learns scikit-learn's digits in a loop as a user would write it: a
distributed dataset, and `strategy.run` inside a tf.function.
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
from tf_cross_shard.virtual_tpu import xla

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
  """Times the contestants in turns, and looks where their state is.

  Args:
    strategy: The replicas.
    names: Contestants; plain Keras is the one to compare with.
    num_steps: Steps in each turn.
    rounds: Turns.

  Returns:
    The rows, steps per second by contestant, and what `check_state` found.
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
  """A training loop that goes on where it stopped.

  Args:
    contestant: What to train.
    strategy: The replicas.

  Returns:
    A function of the number of steps; answers the last step's loss.
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
  """Whether the variables stay in the replicas' memory between steps.

  Args:
    contestant: What is trained.
    strategy: The replicas.
    loop: Trains it.
    case: What it is fed with.

  Returns:
    How many of its variables are where they were before the steps, and the
    bytes that a step moves between host and replicas, against those of a batch,
    of the losses and of the state.
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
  """Where each replica's copy of a variable lies in memory."""
  return [
    copy.unsafe_buffer_pointer() for copy in variable.take().array._arrays
  ]


def is_on_device(state: Mapping[str, Any]) -> bool:
  """Whether nothing but batches and losses moved.

  Args:
    state: What `check_state` answered.

  Returns:
    False if a variable moved, or bytes that are neither.
  """
  return (
    state["not_moved"] == state["variables"]
    and state["bytes_in"] == state["batch_bytes"]
    and state["bytes_out"] == state["loss_bytes"]
  )


@contextlib.contextmanager
def _counting() -> Iterator[collections.Counter[str]]:
  """Counts the bytes that go into the replicas' memory and come out of it."""
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
  """All digits, again and again, in the same order for everyone."""
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
  """How far the weights are from plain Keras', at most."""
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
  """The size of an array's description."""
  dtype = tf.as_dtype(array.dtype)
  return int(np.prod(array.shape, dtype=int)) * int(dtype.size)


def _show(
  rates: Mapping[str, float],
  apart: Mapping[str, float],
  states: Mapping[str, Mapping[str, Any]],
) -> None:
  """Prints what does not stand in the table of times."""
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
