"""What the core asks of a strategy whose replicas run one program.

    strategy              replicas
    ───────────────────────────────────────────────────
    TPUStrategy           data-parallel, compiled by XLA
    VirtualTPUStrategy    data-parallel, compiled by XLA
    VectorizedStrategy    models

Replicas that are models exchange nothing, and `num_replicas_in_sync` is 1.
"""

import abc
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import tensorflow as tf


class SingleProgram(abc.ABC):
  """The one program that all replicas of a strategy run."""

  num_copies: int  # Of each variable.
  are_models = False  # If not, XLA compiles all programs.

  @abc.abstractmethod
  def cross_replica_sum(
    self, tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
  ) -> tf.Tensor:
    """Sums a tensor over this replica's group."""

  @abc.abstractmethod
  def all_to_all(
    self, tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
  ) -> tf.Tensor:
    """Sends the i-th of equal slices to the i-th member of the group."""

  def same_on_all_replicas(self, value: tf.Tensor) -> tf.Tensor:
    """Declares that all replicas have this value, so they take one branch."""
    return value

  def first_of_group(
    self, tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
  ) -> tf.Tensor:
    """Returns the value that the first member of this replica's group has."""
    del group_assignment
    return tensor  # A TPU computes the same bits on all members.


@runtime_checkable
class SingleProgramStrategy(Protocol):
  """A strategy of this package whose replicas run one program."""

  @property
  def single_program(self) -> SingleProgram:
    """The program of all replicas."""


class TPUProgram(SingleProgram):
  """The program of TPUStrategy, which TensorFlow compiles for TPUs."""

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    self.num_copies = int(strategy.num_replicas_in_sync)

  def cross_replica_sum(
    self, tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
  ) -> tf.Tensor:
    return tf.raw_ops.CrossReplicaSum(
      input=tensor, group_assignment=group_assignment
    )

  def all_to_all(
    self, tensor: tf.Tensor, group_assignment: Sequence[Sequence[int]]
  ) -> tf.Tensor:
    return tf.raw_ops.AllToAll(
      input=tensor,
      group_assignment=group_assignment,
      concat_dimension=0,
      split_dimension=0,
      split_count=len(group_assignment[0]),
    )


def of_strategy(strategy: tf.distribute.Strategy) -> SingleProgram | None:
  """Returns the program of a strategy's replicas; None if they have several."""
  if isinstance(strategy, SingleProgramStrategy):
    return strategy.single_program
  if isinstance(
    strategy,
    (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
  ):
    return TPUProgram(strategy)
  return None


def are_models(strategy: tf.distribute.Strategy) -> bool:
  """Returns whether each replica of a strategy is a model of its own."""
  program = of_strategy(strategy)
  return program is not None and program.are_models


def num_copies(strategy: tf.distribute.Strategy) -> int:
  """Returns how many copies a strategy has of each variable."""
  program = of_strategy(strategy)
  if program is None:
    return int(strategy.num_replicas_in_sync)
  return program.num_copies
