"""A covering array has every pair of settings that can be."""

import pytest

from tests.support import covering

COLUMNS = ["abcd", "ab", "abcdef", "a", "abc"]


def test_every_pair_occurs_in_few_rows() -> None:
  def is_possible(row: covering.Row) -> bool:
    return row[0] != "a" or row[1] != "b"

  rows = covering.pairwise(COLUMNS, is_possible)
  product = covering.possible_rows(COLUMNS, is_possible)
  found = set().union(*map(covering.pairs, rows))
  assert found == set().union(*map(covering.pairs, product))
  assert set(rows) <= set(product)
  assert len(set(rows)) == len(rows) <= len(product) / 3
  # The columns count: these two pairs are not one.
  assert len(covering.pairs(("a", "b", "a"))) == 3


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
