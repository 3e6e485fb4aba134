"""The number of steps that a checkpoint of TensorFlow 1 tells.

`global_step` is one count, and the powers of Adam's betas imply another. Where
both are there they have to agree, since Keras has one for both.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from tf_cross_shard.migration import counting, matching, v1_file

_STEP: Final = r"(.*/)?global_step(_\d+)?"


class Steps(NamedTuple):
  """A number of steps."""

  number: int
  source: str
  confirmed_by: tuple[str, ...]


def find(
  file: v1_file.V1File,
  free: Sequence[str],
  betas: Sequence[float | None],
  allowed: matching.Allowed,
  asked: str | None = None,
) -> Steps | None:
  """Finds the number of steps."""
  integers = [name for name in free if file.dtypes[name].is_integer]
  name = asked
  if asked is None:
    name = _scalar("`global_step`", _STEP, file, integers, allowed)
  else:
    _check_count(file, asked)
  powers = _powers(file, free, betas, allowed)
  if name is not None:
    count = int(file.read(name))
    if all(power.fits(count) for power in powers):
      return Steps(count, name, tuple(power.name for power in powers))
    kept = [power for power in powers if not allowed.names(power.name)]
    if not kept:
      return Steps(count, name, ())
    if not allowed.names(name):
      raise ValueError(_disagreement(f"`{name}` is {count}", powers))
    powers = kept
  return _implied(powers)


def _check_count(file: v1_file.V1File, name: str) -> None:
  """Raises `ValueError` unless a value is a whole number."""
  found = "not there"
  if name in file.shapes:
    value = file.read(name)
    numeric = file.dtypes[name].is_integer or file.dtypes[name].is_floating
    if value.shape == () and numeric and value == int(value) >= 0:
      return
    found = f"{value.dtype} {list(value.shape)}"
  raise ValueError(
    f"`names` says that {name!r} of the checkpoint is the count of steps, which"
    f" must be a whole number; it is {found}. The checkpoint holds"
    f" {', '.join(file.shapes)}."
  )


def _implied(powers: Sequence[counting.Power]) -> Steps | None:
  """The number of steps that powers imply, which has to be the same."""
  useful = [power for power in powers if power.is_useful]
  if not useful:
    return None
  count = useful[0].steps()
  if count is None or not all(power.fits(count) for power in powers):
    raise ValueError(_disagreement("no `global_step` is used", powers))
  return Steps(count, useful[0].name, tuple(power.name for power in powers))


def _powers(
  file: v1_file.V1File,
  free: Sequence[str],
  betas: Sequence[float | None],
  allowed: matching.Allowed,
) -> list[counting.Power]:
  """What Adam multiplied in each step."""
  powers = []
  for number, beta in enumerate(betas, 1):
    pattern = rf"(.*/)?beta{number}_power(_\d+)?"
    floats = [name for name in free if file.dtypes[name].is_floating]
    what = f"`beta{number}_power`"
    if beta is not None:
      name = _scalar(what, pattern, file, floats, allowed)
      if name is not None:
        value = file.read(name)[()]
        powers.append(counting.Power(name, value, beta))
  return powers


def _scalar(
  what: str,
  pattern: str,
  file: v1_file.V1File,
  free: Sequence[str],
  allowed: matching.Allowed,
) -> str | None:
  """The one number of such a name."""
  options = [
    name
    for name in free
    if file.shapes[name] == () and re.fullmatch(pattern, name)
  ]
  return matching.choose(what, options, allowed, is_optional=True)


def _disagreement(begin: str, powers: Sequence[counting.Power]) -> str:
  """The words about counts that differ."""
  told = []
  for power in powers:
    count = power.steps()
    means = "no whole number of" if count is None else f"{count}"
    told.append(
      f"`{power.name}` is {power.value!s}, with a beta of {power.beta:.7g} that"
      f" of {means} steps"
    )
  return (
    f"The checkpoint's counts of steps disagree: {begin}; {'; '.join(told)}."
    " Keras has one count for all. Give the optimizer the betas of version 1,"
    " or name in `allow_unmatched` the counts to leave out."
  )
