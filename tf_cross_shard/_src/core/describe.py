"""Describes what a CrossShardOptimizer does to a program, as a table.

The table asks the objects that do the step: the update, the engine and the plan
of kernels. Its few rules of its own say why settings have no effect, and what
to do.
"""

import copy
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_cross_shard._src.core import pipeline as pipeline_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.gradients import compression
from tf_cross_shard._src.core.keras_types import Variable
from tf_cross_shard._src.core.update import sharded
from tf_cross_shard._src.core.wrapped import fused, kernels


class Row(NamedTuple):
  """A variable; `CrossShardOptimizer.describe` documents the fields."""

  path: str
  shape: list[int]
  dtype: str
  updated_by: str
  reason: str
  elements: list[int]


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
    content = self._content
    lines = [content["optimizer"]]
    lines += _align([(f"  {k}", v) for k, v in _summary(content)])
    if content["variables"]:
      title = "variable", "shape", "dtype", "updated by", "members", "why"
      lines += ["", *_align([title, *map(_cells, content["variables"])])]
    reasons = [f"{x['asked']}: {x['reason']}" for x in content["not_in_force"]]
    lines += ["", "Settings that have no effect:"] if reasons else []
    for reason in reasons:
      lines += textwrap.wrap(f"  - {reason}", 80, subsequent_indent="    ")
    return "\n".join(lines)

  __repr__ = __str__


def describe(
  pipeline: pipeline_lib.GradientPipeline, optimizer: str
) -> Description:
  """Returns what the step of an optimizer does; `optimizer` is its `repr`."""
  settings, engine = pipeline.settings, pipeline.engine
  wrapped = pipeline.wrapped
  whole = wrapped.whole
  weights = list(whole.trainable_variables) if wrapped.is_built else []
  rows = _rows(pipeline, weights)
  nonfinite = "skipped and counted" if settings.skip_nonfinite else "applied"
  if wrapped.skips_overflows:
    nonfinite = "skipped by the LossScaleOptimizer"
  return Description(
    {
      "optimizer": optimizer,
      "strategy": validation.strategy_in_words(engine.strategy),
      "is_built": wrapped.is_built,
      "groups": engine.groups.to_lists(),
      "group_size": engine.groups.group_size,
      "sums": engine.method if engine.groups.group_size > 1 else None,
      "wire_dtype": settings.read("wire_dtype"),
      "reduction": settings.reduction,
      "clipping": list(_clipping(pipeline)),
      "loss_averaged_over": settings.loss_averaged_over,
      "loss_factors": pipeline.convention.factors,
      "scale_gradients": settings.scale_gradients,
      "calls_per_step": pipeline.calls_per_step,
      "nonfinite": nonfinite,
      "sharding": pipeline.update.sharding,
      "variables": [row._asdict() for row in rows],
      "not_in_force": [
        {"asked": f"{name}={settings.read(name)!r}", "reason": reason}
        for name, reason in _not_in_force(pipeline, rows)
      ],
    }
  )


def _rows(
  pipeline: pipeline_lib.GradientPipeline, weights: Sequence[Variable]
) -> list[Row]:
  """Returns what a step does to each of the weights, in this order.

  Gradients of the weights of `Embedding` and of declared tables are assumed to
  be row-sparse, and all others dense.
  """
  update, members = pipeline.update, pipeline.engine.groups.group_size
  buckets: Sequence[sharded.WeightBucket] = []
  tables = weights
  if isinstance(update, sharded.ShardedUpdate):
    buckets, tables = update.buckets, update.unsharded_tables
  methods = _methods(pipeline, [bucket.shard for bucket in buckets], tables)
  rows = {id(v): _row(v, methods[id(v)], members) for v in tables}
  for bucket in buckets:
    for index, weight in enumerate(bucket.variables):
      method = methods[id(bucket.shard)]
      if pipeline.tables.is_embedding(weight):
        method = _with_ids(method, sums_first=True)
      row = _row(weight, method, members)
      rows[id(weight)] = row._replace(
        elements=[
          sum(cut.size for cut in cuts if cut.index == index)
          for cuts in bucket.layout.cuts
        ]
      )
  return [rows[id(weight)] for weight in weights]


def _methods(
  pipeline: pipeline_lib.GradientPipeline,
  weights: Sequence[Variable],
  tables: Sequence[Variable],
) -> dict[int, fused.UpdateMethod]:
  """Returns how a member updates variables that it applies, by their `id`."""
  wrapped, engine = pipeline.wrapped, pipeline.engine
  optimizer, variables = wrapped.base_optimizer, [*weights, *tables]
  plan = fused.plan(
    optimizer,
    wrapped.fused,
    engine.is_compiled or fused.is_compiled(optimizer),
    in_function=True,
  )
  # Accumulated gradients are dense.
  is_sparse = pipeline.tables.keeps_rows and pipeline.calls_per_step == 1
  is_sparse &= not pipeline.tables.clips_to_dense(variables)
  are_sparse = [False] * len(weights)
  are_sparse += [is_sparse and pipeline.tables.is_embedding(v) for v in tables]
  methods = list(
    map(plan.method, map(variables_lib.native, variables), are_sparse)
  )
  for i, variable in enumerate(variables):
    if pipeline.tables.is_embedding(variable):
      name, reason = methods[i]
      if are_sparse[i] and pipeline.tables.is_by_rows:
        name, reason = "rows", "only the rows in the batch"
      sums_rows = plan.sums_rows or pipeline.tables.is_lazy or wrapped.sums_rows
      methods[i] = _with_ids(
        fused.UpdateMethod(name, reason), sums_rows or not are_sparse[i]
      )
  return dict(zip(map(id, variables), methods, strict=True))


def _with_ids(
  method: fused.UpdateMethod, sums_first: bool
) -> fused.UpdateMethod:
  """Adds to the reason how ids that a batch has several times are updated."""
  how = "summed first" if sums_first else "as in plain Keras, not summed first"
  reasons = filter(None, (method.reason, f"repeated ids {how}"))
  return fused.UpdateMethod(method.name, "; ".join(reasons))


def _row(variable: Variable, method: fused.UpdateMethod, members: int) -> Row:
  """Returns the row of a variable that all members update as a whole."""
  native = variables_lib.native(variable)
  shape = [int(size) for size in native.shape]
  name, dtype = variables_lib.path_of(variable), kernels.dtype_of(native).name
  elements = [math.prod(shape)] * members
  return Row(name, shape, dtype, method.name, method.reason, elements)


def _not_in_force(
  pipeline: pipeline_lib.GradientPipeline, rows: Sequence[Row]
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
    dtypes = [tf.as_dtype(row.dtype) for row in rows]
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
  by_rows = [row for row in rows if row.updated_by == "rows"]
  if settings.lazy_rows and engine.is_single_program:
    yield (
      "lazy_rows",
      "one program has no shapes that depend on data, so all rows change",
    )
  elif settings.lazy_rows and not pipeline.tables.is_by_rows:
    yield "lazy_rows", "XLA compiles the step, so all rows change"
  elif settings.lazy_rows and rows and not by_rows:
    yield "lazy_rows", "no table is known, by `Embedding` or update_by_rows()"
  if settings.fused_update:
    plain = [row for row in rows if row.updated_by in ("Keras", "rows")]
    for reason in dict.fromkeys(row.reason for row in plain):
      count = sum(row.reason == reason for row in plain)
      yield "fused_update", f"{count} of {len(rows)} variables: {reason}"
  by_group = settings.per_model or {}
  for name in settings_lib.LIMITS:
    if name in by_group and getattr(settings, name) is not None:
      yield name, "`per_model` has a limit for each group"
  if by_group and groups.num_groups == 1:
    yield "per_model", "there is one group, which has these numbers"


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


def _summary(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
  groups = content["groups"]
  shown = textwrap.shorten(str(groups), 50, placeholder=" ...]")
  yield "strategy", content["strategy"]
  yield "groups", f"{len(groups)} x {content['group_size']} replicas: {shown}"
  factors = content["loss_factors"]
  chosen = content["loss_averaged_over"]
  target = "gradients" if content["scale_gradients"] else "loss"
  shown = " or ".join(
    f'{factors[over]:g} for "{over}"'
    for over in ([chosen] if chosen else factors)
  )
  yield "reduction", f"{content['reduction']}: {target} times {shown}"
  yield "clipping", " and ".join(content["clipping"]) or "none"
  dtype = content["wire_dtype"] or "the gradients' dtype"
  sums = content["sums"]
  yield "sums", f"{sums}, in {dtype}" if sums else "no gradients are exchanged"
  calls = content["calls_per_step"]
  yield "accumulation", f"{calls} calls make a step" if calls > 1 else "none"
  yield "NaN or infinity", content["nonfinite"]
  yield "sharding", content["sharding"] or "none"
  if not content["variables"]:
    built_early = "unknown: `opt` was built before it was wrapped"
    yield "variables", built_early if content["is_built"] else "not built yet"


def _cells(row: dict[str, Any]) -> Sequence[str]:
  parts = [str(i) for i, size in enumerate(row["elements"]) if size]
  members = f"part {'-'.join(dict.fromkeys((*parts[:1], *parts[-1:])))}"
  if set(row["elements"]) == {math.prod(row["shape"])}:
    members = "all"
  names = row["path"], str(tuple(row["shape"])), row["dtype"], row["updated_by"]
  return *names, members, row["reason"]


def _align(table: Sequence[Sequence[str]]) -> list[str]:
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  return [
    "  ".join(
      cell.ljust(width) for cell, width in zip(line, widths, strict=True)
    ).rstrip()
    for line in table
  ]
