"""Copies and pickles keep what `exclude_from_weight_decay` excluded."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tests.support.training import KERASES

VALUES = {"kernel": [4.0, 8.0], "bias": [4.0, 16.0]}
BY: dict[str, Callable[[Any], dict[str, Any]]] = {
  "var_names": lambda _: {"var_names": ["bias"]},
  "var_list": lambda weights: {"var_list": [weights[1]]},
}


def pickled(optimizer: Any) -> Any:
  with optimizer.inner_optimizer._distribution_strategy.scope():
    return pickle.loads(pickle.dumps(optimizer))


def copied_twice(optimizer: Any) -> Any:
  with optimizer.inner_optimizer._distribution_strategy.scope():
    return copy.deepcopy(copy.deepcopy(optimizer))


def make(which: str, by: str, **options: Any) -> tuple[list[Any], Any]:
  """Weights of two replicas, and an optimizer that excludes `bias`."""
  library, package = KERASES[which]
  with testbed.mirrored(2).scope():
    weights = training.make_weights(which, VALUES)
    sgd = library.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer = package.CrossShardOptimizer(sgd, "sum", **options)
    optimizer.exclude_from_weight_decay(**BY[by](weights))
  return weights, optimizer


def check_decay(which: str, optimizer: Any) -> None:
  """Takes a step with new weights.

  Checks that the kernel decays by a quarter, and that the bias does not.
  """
  strategy = testbed.mirrored(2)
  with strategy.scope():
    weights = training.make_weights(which, VALUES)
    optimizer.build(weights)
  training.train(
    *(weights, optimizer, [np.zeros([1, 2, 2]), np.ones([1, 2, 2])]),
    strategy=strategy,
  )
  for weight, expected in zip(weights, ([3.0, 6.0], [3.0, 15.0]), strict=True):
    replicas = testbed.copies(weight)
    assert len(replicas) == 2
    for value in replicas:
      np.testing.assert_array_equal(value, expected)


@training.in_both
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("shard_update", [False, "elementwise", "by_variable"])
def test_pickle_of_built_optimizer_keeps_exclusions(
  which: str, by: str, shard_update: Any
) -> None:
  weights, optimizer = make(which, by, shard_update=shard_update)
  optimizer.build(weights)
  for again in (pickled(optimizer), copied_twice(optimizer)):
    check_decay(which, again)


@training.in_both
def test_pickle_before_build_keeps_names_only(which: str) -> None:
  """Exclusions by name are kept; exclusions by variable raise an error."""
  _, optimizer = make(which, "var_names")
  check_decay(which, copied_twice(optimizer))
  _, optimizer = make(which, "var_list")
  with pytest.raises(ValueError, match=r"cannot be pickled .*build\("):
    copy.deepcopy(optimizer)


@training.in_both
def test_built_before_it_was_encapsulated(which: str) -> None:
  library, package = KERASES[which]
  with testbed.mirrored(2).scope():
    weights = training.make_weights(which, VALUES)
    sgd = library.optimizers.SGD(0.5, weight_decay=0.5)
    sgd.exclude_from_weight_decay(var_list=[weights[1]])
    sgd.build(weights)
    optimizer = package.CrossShardOptimizer(sgd, "sum")
  check_decay(which, pickled(optimizer))


@training.in_both
def test_exclusions_after_unpickling_are_added(which: str) -> None:
  library, package = KERASES[which]
  kernel, bias = (testbed.variable([4.0], n, library) for n in ("w", "bias"))
  optimizer = package.CrossShardOptimizer(
    library.optimizers.SGD(0.5, weight_decay=0.5)
  )
  optimizer.exclude_from_weight_decay(var_list=[bias])
  optimizer.build([kernel, bias])
  again = pickled(optimizer)
  again.exclude_from_weight_decay(var_list=[kernel])
  again.apply_gradients([(tf.zeros(1), v) for v in (kernel, bias)])
  assert float(kernel.numpy()[0]) == float(bias.numpy()[0]) == 4.0


def test_other_variables_are_refused() -> None:
  """The error is raised before any slot is created."""
  weights, optimizer = make("keras", "var_list")
  optimizer.build(weights)
  again = pickled(optimizer)
  with pytest.raises(ValueError, match=r"variables \[1\] of 2 .* got 1 var"):
    again.build(weights[:1])
  assert not again.inner_optimizer.built
