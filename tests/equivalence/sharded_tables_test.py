"""Divided tables train as whole tables: every optimizer, and groups."""

from typing import Any

import numpy as np
import pytest

from tests.support import lazy_oracle, tables, testbed, training


@pytest.mark.parametrize("kind", lazy_oracle.KINDS)
@pytest.mark.parametrize("groups", [None, [[0, 3], [1, 2]]])
@training.in_both
def test_steps_are_those_of_whole_tables(
  which: str, groups: Any, kind: str
) -> None:
  strategy, layer, optimizer = tables.make(
    which, testbed.mirrored(4), kind, groups
  )
  tables.take_steps(strategy, layer, optimizer)
  for index, members in enumerate(groups or [range(4)]):
    batches = tables.batches(members)
    right = lazy_oracle.train(kind, tables.TABLE, batches)
    table = tables.whole(layer, index)
    np.testing.assert_allclose(table, right, rtol=2e-6, atol=2e-6)
