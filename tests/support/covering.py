"""Pairwise covering arrays: every pair of settings, not every combination."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Row = tuple[Any, ...]


def pairs(row: Row) -> set[tuple[Any, ...]]:
  """Returns all pairs of settings in a row, each with its column."""
  return set(itertools.combinations(enumerate(row), 2))


def possible_rows(
  columns: Sequence[Sequence[Any]], is_possible: Callable[[Row], bool]
) -> list[Row]:
  """Returns all combinations of settings, except those that are impossible."""
  return [row for row in itertools.product(*columns) if is_possible(row)]


def pairwise(
  columns: Sequence[Sequence[Any]],
  is_possible: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
  """Returns few rows that contain every possible pair of settings.

  The choice is greedy: each step adds the first row that has the most missing
  pairs.

  >>> pairwise(["ab", "cd"])
  [('a', 'c'), ('a', 'd'), ('b', 'c'), ('b', 'd')]
  >>> len(pairwise(["abc"] * 4))  # instead of 81
  9
  """
  return cover({row: pairs(row) for row in possible_rows(columns, is_possible)})


def cover(pairs_of: dict[Any, set[Any]]) -> list[Any]:
  """Returns keys whose sets together contain every element.

  The choice is greedy: each step adds the key with the most missing elements.
  """
  missing = set().union(*pairs_of.values())
  chosen: list[Any] = []
  while missing:
    best = max(pairs_of, key=lambda key: len(pairs_of[key] & missing))
    missing -= pairs_of[best]
    chosen.append(best)
  return chosen
