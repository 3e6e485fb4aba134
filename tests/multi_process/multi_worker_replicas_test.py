"""Several replicas in each of several processes, as with several GPUs each."""
# bazel: size=large timeout=long tags=exclusive

from typing import Any

import numpy as np
import pytest

from tests.support import multi_worker_cases as cases
from tests.support import testbed, workers

STEPS = 2


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
  """What the two processes answered."""
  done = workers.run("local_replicas", 2, arguments={"steps": STEPS})
  assert len(done) == 2
  return [worker.result for worker in done]


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("grouping", cases.GROUPINGS[4])
def test_two_replicas_in_each_of_two_processes(
  found: list[dict[Any, Any]], grouping: str, wire_dtype: str | None
) -> None:
  """Powers of two: exact, and each sum tells whose gradients are in it."""
  groups = testbed.groups_of(cases.GROUPINGS[4][grouping], 4)
  for process, results in enumerate(found):
    result = results[grouping, wire_dtype]
    assert result["counter"] == STEPS
    assert len(result["weights"]) == len(result["tables"]) == 2
    for local in range(2):
      members = groups.members_of(2 * process + local)
      table = np.zeros([cases.ROWS, 2])
      for member in members:
        table[: member + 1] -= STEPS * 2.0**member
      weight = -STEPS * sum(2.0**member for member in members)
      np.testing.assert_array_equal(result["weights"][local], [weight] * 3)
      np.testing.assert_array_equal(result["tables"][local], table)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
