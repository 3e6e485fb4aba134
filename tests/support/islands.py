"""Groups that train independently and are synchronized from time to time."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tf_keras

from tests.support import replica_state_cases, testbed, training
from tf_cross_shard import Models, callbacks

PAIRS = [[0, 1], [2, 3]]
STRIDED = [[0, 2], [1, 3]]
SINGLETONS = [[0], [1], [2], [3]]
NAMES = {keras: "keras", tf_keras: "tf_keras"}


class Islands:
  """Weights that groups train independently, and steps with given gradients.

  Attributes:
    weights: The variables, which start as zeros.
    optimizer: The CrossShardOptimizer of the groups.
    outer: The OuterOptimizer that synchronizes the groups; None for none.
  """

  def __init__(
    self,
    outer: callbacks.OuterOptimizer | None,
    shapes: Sequence[tuple[int, ...]],
    where: str = "mirrored",
    groups: Sequence[Sequence[int]] = PAIRS,
    library: Any = keras,
    opt: Callable[[Any], Any] = lambda library: library.optimizers.SGD(0.5),
    dtypes: Sequence[str] | None = None,
    **options: Any,
  ) -> None:
    strategy = testbed.STRATEGIES[where]()
    self.groups, self.outer = groups, outer
    kinds = zip(shapes, dtypes or ["f"] * len(shapes), strict=True)
    self.weights, self.optimizer = training.build(
      NAMES[library],
      opt,
      {f"weight{i}": np.zeros(*kind) for i, kind in enumerate(kinds)},
      strategy,
      group_assignment=groups,
      **options,
    )
    if outer is not None:
      outer.build(self.optimizer, self.weights)
    self._run = training.stepper(self.weights, self.optimizer, strategy)

  def train(self, *grads: np.ndarray) -> None:
    """Takes steps with each weight's gradients, [steps, replicas, ...]."""
    for rows in zip(*grads, strict=True):
      self._run(*rows)
      if self.outer is not None:
        self.outer.step()

  def saved(self) -> list[dict[str, np.ndarray]]:
    """Returns what `Models.save` writes of each replica."""
    return replica_state_cases.saved(self.optimizer, self.weights)

  def anchors(self) -> list[list[np.ndarray]]:
    """Returns the outer optimizer's anchor of each weight, for each replica."""
    saved = self.saved()
    return [
      [v for state in saved for k, v in state.items() if f" anchor{i}" in k]
      for i in range(len(self.weights))
    ]

  def values(self) -> list[list[np.ndarray]]:
    """Returns each group's values, by weight; checks that members are equal."""
    by_weight = []
    for weight in self.weights:
      copies = testbed.copies(weight)
      assert len(copies) == testbed.REPLICAS
      for members in self.groups:
        assert len({copies[r].tobytes() for r in members}) == 1
      by_weight.append([copies[members[0]] for members in self.groups])
    return by_weight


def check_resumes(
  start: Callable[[], Islands],
  grads: Sequence[np.ndarray],
  at: int,
  path: pathlib.Path,
) -> Islands:
  """Checks that groups continue with the same bits after they are restored.

  The groups are saved after `at` steps and restored into new groups. Then both
  take the remaining steps. Returns the groups that were saved.
  """
  whole, again = start(), start()
  whole.train(*(rows[:at] for rows in grads))
  Models(whole.weights, whole.optimizer).assert_in_sync()
  Models(whole.weights, whole.optimizer).save(path)
  Models(again.weights, again.optimizer).restore(path)
  for islands in (whole, again):
    islands.train(*(rows[at:] for rows in grads))
  np.testing.assert_equal(again.values(), whole.values())
  np.testing.assert_equal(again.saved(), whole.saved())
  return whole
