"""Describes what a CrossShardOptimizer does to a program, as a table.

The table asks the objects that do the step: update, engine and plan of kernels.
"""

import copy
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import pipeline as pipeline_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import compression
from tf_cross_shard._src.core.update import sharded
from tf_cross_shard._src.core.variables import Variable
from tf_cross_shard._src.core.wrapped import fused, kernels

_Row = dict[str, Any]  # `CrossShardOptimizer.describe` documents the keys.


class Description:
  """A description of what an optimizer does; `print` shows a table."""

  def __init__(self, content: dict[str, Any]) -> None:
    """Creates a description from the result of `to_dict`."""
    self._content = content

  def rows(self) -> list[dict[str, Any]]:
    """Returns a dictionary for each variable; empty before `build`."""
    return list(self.to_dict()["variables"])

  def to_dict(self) -> dict[str, Any]:
    """Returns the whole description, in types that JSON has."""
    return copy.deepcopy(self._content)

  def __str__(self) -> str:
    """Returns the description as a table."""
    title, *settings, (_, rows), (_, ignored) = self._content.items()
    lines = [title[1]]
    lines += _align([(f"  {name}", _short(value)) for name, value in settings])
    table = [map(_short, line) for line in [*rows[:1], *map(dict.values, rows)]]
    lines += ["", *(_align(table) or ["No variables: not built yet."])]
    lines += ["", "Settings that have no effect:"] if ignored else []
    for each in ignored:
      line = f"  - {each['asked']}: {each['reason']}"
      lines += textwrap.wrap(line, 80, subsequent_indent="    ")
    return "\n".join(lines)

  __repr__ = __str__


def describe(
  pipeline: pipeline_lib.GradientPipeline, optimizer: str
) -> Description:
  """Returns what the step of an optimizer does; `optimizer` is its `repr`."""
  settings, engine = pipeline.settings, pipeline.engine
  wrapped = pipeline.wrapped
  weights = list(wrapped.whole.trainable_variables) if wrapped.is_built else []
  rows = _rows(pipeline, weights)
  nonfinite = "skipped and counted" if settings.skip_nonfinite else "applied"
  if wrapped.skips_overflows:
    nonfinite = "skipped by the LossScaleOptimizer"
  factors = pipeline.convention.factors
  if (over := settings.loss_averaged_over) is not None:
    factors = {over: factors[over]}
  return Description(
    {
      "optimizer": optimizer,
      "strategy": validation.strategy_in_words(engine.strategy),
      "groups": engine.groups.to_lists(),
      "sums": engine.method if engine.groups.group_size > 1 else None,
      "wire_dtype": settings.read("wire_dtype"),
      "reduction": settings.reduction,
      "loss_factors": factors,
      "scale_gradients": settings.scale_gradients,
      "clipping": list(_clipping(pipeline)),
      "calls_per_step": pipeline.calls_per_step,
      "nonfinite": nonfinite,
      "sharding": pipeline.update.sharding,
      "variables": rows,
      "not_in_force": [
        {"asked": f"{name}={settings.read(name)!r}", "reason": reason}
        for name, reason in _not_in_force(pipeline, rows)
      ],
    }
  )


def _rows(
  pipeline: pipeline_lib.GradientPipeline, weights: Sequence[Variable]
) -> list[_Row]:
  """Returns what a step does to each of the weights, in this order."""
  update, members = pipeline.update, pipeline.engine.groups.group_size
  buckets: Sequence[sharded.WeightBucket] = []
  tables = weights
  if isinstance(update, sharded.ShardedUpdate):
    buckets, tables = update.buckets, update.unsharded_tables
  shards = [bucket.shard for bucket in buckets]
  methods = _methods(pipeline, shards, tables)
  rows = {
    id(v): _row(v, method, [math.prod(v.shape)] * members)
    for v, method in zip(tables, methods[len(shards) :], strict=True)
  }
  for bucket, method in zip(buckets, methods, strict=False):
    for index, weight in enumerate(bucket.variables):
      elements = [
        sum(cut.size for cut in cuts if cut.index == index)
        for cuts in bucket.layout.cuts
      ]
      rows[id(weight)] = _row(weight, method, elements)
  return [rows[id(weight)] for weight in weights]


def _methods(
  pipeline: pipeline_lib.GradientPipeline,
  shards: Sequence[Variable],
  tables: Sequence[Variable],
) -> list[fused.UpdateMethod]:
  """Returns how a member updates the variables that it applies."""
  optimizer, given = pipeline.wrapped.base_optimizer, pipeline.tables
  is_compiled = pipeline.engine.is_compiled or fused.is_compiled(optimizer)
  plan = fused.plan(
    optimizer, pipeline.wrapped.fused, is_compiled, in_function=True
  )
  # Accumulated gradients are dense.
  keeps_rows = given.keeps_rows and pipeline.calls_per_step == 1
  keeps_rows &= not given.clips_to_dense([*shards, *tables])
  dense = [plan.kernel_or_parts(variables_lib.native(v), False) for v in shards]
  return dense + [
    fused.UpdateMethod("rows", "only the rows in the batch")
    if (is_sparse := keeps_rows and given.is_embedding(v)) and given.is_by_rows
    else plan.kernel_or_parts(variables_lib.native(v), is_sparse)
    for v in tables
  ]


def _row(
  variable: Variable, method: fused.UpdateMethod, elements: list[int]
) -> _Row:
  native = variables_lib.native(variable)
  return {
    "path": variables_lib.path_of(variable),
    "shape": [int(size) for size in native.shape],
    "dtype": kernels.dtype_of(native).name,
    "updated_by": method.name,
    "elements": elements,
    "reason": method.reason,
  }


def _not_in_force(
  pipeline: pipeline_lib.GradientPipeline, rows: Sequence[_Row]
) -> Iterator[tuple[str, str]]:
  """Yields the names of settings that change nothing here, and the reasons."""
  settings, engine = pipeline.settings, pipeline.engine
  groups = engine.groups
  alone = "each group has one replica"
  if engine.num_replicas == 1:
    alone = "there is one replica"
  if groups.num_replicas != engine.num_replicas:
    yield (
      "group_assignment",
      f"it is for {groups.num_replicas} replicas, and a step raises an error",
    )
  if settings.shard_update and pipeline.update.sharding is None:
    yield "shard_update", f"{alone}, so nothing is divided"
  if wire_dtype := settings.wire_dtype:
    dtypes = [tf.as_dtype(row["dtype"]) for row in rows]
    if groups.group_size == 1:
      yield "wire_dtype", f"{alone}, so nothing is sent"
    elif rows and not any(compression.is_wider(d, wire_dtype) for d in dtypes):
      yield "wire_dtype", "no gradient has a wider dtype"
  if settings.accumulate_steps == 1:
    yield "accumulate_steps", "one call is a step, as with None"
  if settings.skip_nonfinite and pipeline.wrapped.skips_overflows:
    yield (
      "skip_nonfinite",
      "the LossScaleOptimizer skips such steps anyway; they are only counted",
    )
  methods = {(row["updated_by"], row["reason"]) for row in rows}
  if settings.lazy_rows and not pipeline.tables.is_by_rows:
    reason = "a program without shapes that depend on data changes all rows"
    yield "lazy_rows", reason
  elif settings.lazy_rows and rows and "rows" not in dict(methods):
    yield "lazy_rows", "no table is known, by `Embedding` or update_by_rows()"
  if settings.fused_update:
    for updated_by, reason in sorted(methods):
      if updated_by in ("Keras", "rows"):
        yield "fused_update", f"not for all variables: {reason}"
  by_group = settings.per_model or {}
  for name in settings_lib.LIMITS:
    if name in by_group and getattr(settings, name) is not None:
      yield name, "`per_model` has a limit for each group"


def _clipping(pipeline: pipeline_lib.GradientPipeline) -> Iterator[str]:
  """Yields the limits in force: of each optimizer, the first that is set."""
  by_model = pipeline.settings.per_model or {}
  for place, limits in (
    ("before the sum", pipeline.settings),
    ("after the sum", pipeline.wrapped.base_optimizer),
  ):
    for name in settings_lib.LIMITS:
      limit = getattr(limits, name, None)
      if limits is pipeline.settings:
        limit = by_model.get(name, limit)
      if limit:
        yield f"{name}={limit} {place}"
        break


def _short(value: Any) -> str:
  return textwrap.shorten(str(value), 80, placeholder=" ...")


def _align(table: Sequence[Iterable[str]]) -> list[str]:
  lines = list(map(list, table))
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
