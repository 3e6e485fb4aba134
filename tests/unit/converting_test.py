"""AutoGraph rewrites the user's loss, which this package calls."""

from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer


@pytest.mark.parametrize("way", ["minimize", "compute_gradients"])
@pytest.mark.parametrize("start", [3.0, -3.0])
def test_a_loss_may_branch_on_tensors(start: float, way: str) -> None:
  """Python's `if` on a tensor, which only AutoGraph makes possible."""
  strategy = testbed.mirrored()
  with strategy.scope():
    weight = tf.Variable(start)
    optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(1.0), "sum")
    optimizer.build([weight])

  def loss() -> Any:
    if weight > 0:
      value = 2.0 * weight
    else:
      value = -0.5 * weight
    return value

  @tf.function
  def step() -> None:
    def replica_step() -> None:
      if way == "minimize":
        optimizer.minimize(loss, var_list=[weight])
      else:
        optimizer.apply_gradients(optimizer.compute_gradients(loss, [weight]))

    strategy.run(replica_step)

  step()
  slope = 2.0 if start > 0 else -0.5
  expected = [start - slope * testbed.REPLICAS] * testbed.REPLICAS
  assert testbed.copies(weight) == expected
  assert testbed.REPLICAS > 1


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
