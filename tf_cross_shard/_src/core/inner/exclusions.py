"""Exclusions from weight decay, in a form that can be pickled.

`exclude_from_weight_decay` of Keras keeps keys of variables, such as `id(v)`,
which mean nothing in another program or for a copy of the model. The index of a
variable among the trained variables is still valid there.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

from tf_cross_shard._src.core.inner import inner as inner_lib
from tf_cross_shard._src.core.inner import keras_private


class Exclusions(TypedDict):
  """The variables that weight decay leaves unchanged.

  Attributes:
    places: Their indices among the trained variables.
    count: The number of trained variables.
    patterns: Patterns of names that are also excluded.
  """

  places: list[int]
  count: int
  patterns: list[str]


def of_variables(
  inner: inner_lib.Inner, variables: Sequence[Any]
) -> Exclusions:
  """Returns the exclusions of an optimizer that will be built on variables."""
  excluded, patterns = keras_private.exclusions(inner.innermost)
  places = [
    place
    for place, variable in enumerate(variables if excluded else ())
    if keras_private.key(inner.innermost, variable) in excluded
  ]
  return {"places": places, "count": len(variables), "patterns": patterns}


def current(inner: inner_lib.Inner, waiting: Exclusions | None) -> Exclusions:
  """Returns the exclusions of an optimizer, to be pickled.

  Args:
    inner: The user's optimizer. It is not built, or was built before it was
      wrapped.
    waiting: The exclusions of an unpickled optimizer that is not built yet.

  Raises:
    ValueError: If variables are excluded whose indices are not known yet.
  """
  excluded, patterns = keras_private.exclusions(inner.innermost)
  if not inner.is_built and excluded:
    raise ValueError(
      f"{inner.name} cannot be pickled or copied yet: until `build`, the"
      " variables of exclude_from_weight_decay(var_list=...) are recorded by"
      " id(), and ids do not survive a copy. Call build(variables) first, or"
      " use `var_names`."
    )
  found: Exclusions = waiting or {"places": [], "count": 0, "patterns": []}
  if excluded:
    by_key = inner.places
    places = [by_key[key] for key in excluded if key in by_key]
    found = {"places": sorted(places), "count": len(by_key), "patterns": []}
  return {**found, "patterns": [*found["patterns"], *patterns]}


def exclude_again(
  inner: inner_lib.Inner,
  waiting: Exclusions,
  variables: Sequence[Any],
) -> None:
  """Excludes the variables that the pickled optimizer excluded.

  Call this function before `build`. Variables that were excluded after
  unpickling stay excluded.

  Raises:
    ValueError: If the number of variables is different.
  """
  if waiting["places"] and waiting["count"] != len(variables):
    raise ValueError(
      f"{inner.name} was unpickled or copied, and excludes variables"
      f" {waiting['places']} of {waiting['count']} from weight decay; got"
      f" {len(variables)} variables. Build it on the same variables as the"
      " optimizer that was pickled."
    )
  new = of_variables(inner, variables)
  if waiting["places"] or waiting["patterns"]:
    inner.innermost.exclude_from_weight_decay(
      var_list=[variables[i] for i in {*waiting["places"], *new["places"]}],
      var_names=[*waiting["patterns"], *new["patterns"]],
    )
