"""A covering array has every pair of settings that can be."""

import pytest

from tests.support import covering

COLUMNS = {
  "one size": ["abc"] * 4,
  "several sizes": ["abcd", "ab", "abcdef", "a", "abc"],
}


def _is_possible(row: covering.Row) -> bool:
  """Not every row: some pairs cannot be."""
  return row[0] != "a" or row[1] != "b"


@pytest.mark.parametrize("name", COLUMNS)
def test_every_pair_occurs_in_few_rows(name: str) -> None:
  columns = COLUMNS[name]
  for is_possible in (_is_possible, lambda row: True):
    rows = covering.pairwise(columns, is_possible)
    product = covering.possible_rows(columns, is_possible)
    found = set().union(*map(covering.pairs, rows))
    assert found == set().union(*map(covering.pairs, product))
    assert set(rows) <= set(product)
    assert len(set(rows)) == len(rows) <= len(product) / 3
    assert rows == covering.pairwise(columns, is_possible)


def test_pairs_know_their_columns() -> None:
  assert covering.pairs(("a", "b", "a")) == {
    ((0, "a"), (1, "b")),
    ((0, "a"), (2, "a")),
    ((1, "b"), (2, "a")),
  }


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
