"""Steps that train tables whose rows are divided among the members.

Each member has the gradients of its own rows only. Norms, and the search for
NaN, are about the whole table. So members exchange a few numbers before they
apply the gradients.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import context as context_lib
from tf_cross_shard._src.core import divided_rows
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import clipping, finite, row_sparse
from tf_cross_shard._src.core.gradients.clipping import Gradient


def check(
  context: context_lib.Context, variable: Any, why_not_lazy: str
) -> None:
  """Raises an error if an optimizer cannot train a divided table.

  Args:
    context: The settings, the optimizer and the engine.
    variable: The table.
    why_not_lazy: Why the optimizer cannot update by rows; "" if it can.

  Raises:
    ValueError: If the groups differ from those of the table, or if a setting
      needs whole tables.
  """
  path, settings = variables_lib.path_of(variable), context.settings
  owned = divided_rows.of(variable)
  groups = context.engine.groups
  if owned is not None and owned.groups != groups:
    raise ValueError(
      f"The rows of {path} are divided in the groups"
      f" {owned.groups.to_lists()}, but the optimizer has the groups"
      f" {groups.to_lists()}. Pass the same `group_assignment` to the layer and"
      " to the optimizer."
    )
  if why_not_lazy:
    raise ValueError(
      f"A ShardedEmbedding ({path}) is updated by rows, as with"
      f" lazy_rows=True, but `opt` cannot do this: {why_not_lazy}"
    )
  used = [
    name
    for name in ("accumulate_steps", "shard_update", *settings_lib.LIMITS)
    if getattr(settings, name, None)
  ]
  used += [
    n for n in settings_lib.LIMITS if n in (settings.group_settings or {})
  ]
  used += ["use_ema"] * bool(context.inner.averages)
  used += ["use_ema"] * bool(getattr(context.inner.innermost, "use_ema", False))
  if used:
    raise ValueError(
      f"`{used[0]}` does not work with a ShardedEmbedding ({path}). Remove it,"
      " or use layers.Embedding; `clipnorm`, `global_clipnorm` and `clipvalue`"
      " of `opt` do work."
    )


def clip_whole_tables(
  context: context_lib.Context,
  sums: Sequence[Gradient],
  variables: Sequence[Any],
) -> list[Gradient]:
  """Clips sums to the limits of `opt`. Norms are those of whole tables.

  If a step may be skipped, a NaN that one member found reaches all members.
  """
  is_owned = [divided_rows.of(variable) is not None for variable in variables]
  for total, variable, own in zip(sums, variables, is_owned, strict=True):
    if own and isinstance(total, tf.Tensor):
      raise ValueError(
        f"The gradient of {variables_lib.path_of(variable)} is dense, but each"
        " replica has only a part of this table. Read it through the"
        " ShardedEmbedding only."
      )
  # Rows of the same index are added up before anything squares them.
  sums = [
    row_sparse.merge_duplicates(total) if own and total is not None else total
    for total, own in zip(sums, is_owned, strict=True)
  ]
  if context.may_skip:
    # Times 1 changes no bit. Times NaN turns every element into NaN.
    marker = finite.zero_or_nan(sums, context.engine.all_reduce_sum)
    sums = [row_sparse.times(total, 1.0 + marker) for total in sums]
  for name, limit in clipping.limits_of(context.inner.innermost).items():
    if limit is None:
      continue
    limit = context.inner.scale_limit(limit)
    if name == "clipvalue":
      return clipping.clip(
        sums, clipvalue=limit, keep_infinite=context.may_skip
      )
    return _clip_by_norm(
      context, sums, is_owned, limit, is_global=name == "global_clipnorm"
    )
  return sums


def _clip_by_norm(
  context: context_lib.Context,
  sums: Sequence[Gradient],
  is_owned: Sequence[bool],
  limit: Any,
  is_global: bool,
) -> list[Gradient]:
  """Returns sums times c / max(norm, c), with c the limit.

  The squares of the norms of divided tables are added up over the members:

      ||g||^2 = sum over members i of ||g[i]||^2
  """
  squares = [
    tf.cast(clipping.square_of_norm([total]), tf.float64) for total in sums
  ]
  of_parts = tf.stack(
    [s for s, own in zip(squares, is_owned, strict=True) if own]
  )
  [totals] = context.engine.all_reduce_sum([of_parts])
  of_tables = iter(tf.unstack(totals))
  squares = [
    next(of_tables) if own else square
    for square, own in zip(squares, is_owned, strict=True)
  ]
  if is_global:
    squares = [tf.add_n(squares)] * len(squares)
  return [
    row_sparse.times(total, clipping.scale_to(limit, square))
    for total, square in zip(sums, squares, strict=True)
  ]
