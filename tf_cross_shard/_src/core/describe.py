"""Describes what a CrossShardOptimizer does to a program, as a table.

The table asks the objects that do the step: the update, the window, the engine
and the plan of kernels. Its few rules of its own say why settings have no
effect, and what to do.
"""

import copy
import dataclasses
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import step as step_lib
from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core.inner import names as names_lib
from tf_cross_shard._src.core.update import described, table_warnings
from tf_cross_shard._src.core.update import rows as rows_lib

# The heading of each column, and the field of a row.
_COLUMNS = {
  "variable": "path",
  "shape": "shape",
  "dtype": "dtype",
  "updated by": "updated_by",
  "members": "elements",
  "sent": "bytes_sent",
  "state": "state_bytes",
  "why": "reason",
}


class Description:
  """A description of what an optimizer does; `print` shows a table.

  `CrossShardOptimizer.describe` documents the content.
  """

  def __init__(self, content: dict[str, Any]) -> None:
    """Creates a description from the result of `to_dict`."""
    self._content = content

  def rows(self) -> list[dict[str, Any]]:
    """Returns a dictionary for each variable; empty before `build`."""
    rows: list[dict[str, Any]] = self.to_dict()["variables"]
    return rows

  def to_dict(self) -> dict[str, Any]:
    """Returns the whole description, in types that JSON has."""
    return copy.deepcopy(self._content)

  def __str__(self) -> str:
    """Returns the description as a table."""
    content = self._content
    lines = [content["optimizer"]]
    lines += _align([(f"  {k}", v) for k, v in _summary(content)])
    if rows := content["variables"]:
      headings = [
        heading
        for heading, field in _COLUMNS.items()
        if field != "reason" or any(row[field] for row in rows)
      ]
      cells = [
        [_cell(row, _COLUMNS[name]) for name in headings] for row in rows
      ]
      lines += ["", *_align([headings, *cells])]
    not_in_force = [
      f"{x['asked']}: {x['reason']}" for x in content["not_in_force"]
    ]
    for title, texts in (
      ("Settings that have no effect:", not_in_force),
      ("Notes:", content["notes"]),
    ):
      if texts:
        lines += ["", title]
      for text in texts:
        lines += textwrap.wrap(
          text, 80, initial_indent="  - ", subsequent_indent="    "
        )
    return "\n".join(lines)

  __repr__ = __str__


def describe(step: step_lib.Step, optimizer: str) -> Description:
  """Returns what a step does.

  Args:
    step: The step of an optimizer, which is built or not.
    optimizer: The optimizer in words.
  """
  settings, engine = step.settings, step.context.engine
  wrapped = step.context.inner
  is_built = wrapped.is_built
  whole = wrapped.whole
  variables = list(whole.trainable_variables) if is_built else []
  rows = _rows(step, variables)
  described_update = described.DescribedUpdate(step.update)
  kept = [
    *names_lib.kept_variables(wrapped.optimizer),
    *described_update.shards,
    *step.state,
  ]
  kept = list({id(variable): variable for variable in kept}.values())
  sent = [row.bytes_sent or 0 for row in rows]
  padding = described_update.padding_sent
  return Description(
    {
      "optimizer": optimizer,
      "strategy": validation.strategy_in_words(engine.strategy),
      "is_built": is_built,
      "groups": engine.groups.to_lists(),
      "group_size": engine.groups.group_size,
      "sums": engine.method if engine.groups.group_size > 1 else None,
      "wire_dtype": settings.read("wire_dtype"),
      "reduction": settings.reduction,
      "loss_averaged_over": settings.loss_averaged_over,
      "loss_factors": step.convention.factors(),
      "scale_gradients": settings.scale_gradients,
      "calls_per_step": step.calls,
      "nonfinite": _nonfinite(step),
      "sharding": step.update.sharding,
      "bytes_sent": sum(sent) + padding if rows else None,
      "padding_sent": padding,
      "state_bytes": described.num_bytes(kept) if is_built else None,
      "variables": [_as_json(row) for row in rows],
      "not_in_force": [
        {"asked": f"{name}={settings.read(name)!r}", "reason": reason}
        for name, reason in _not_in_force(step, rows)
      ],
      "notes": list(_notes(step, variables, rows)),
    }
  )


def _rows(
  step: step_lib.Step, variables: Sequence[Any]
) -> list[described.VariableUpdate]:
  """Returns the rows of the update, for all calls that make a step."""
  # If Keras accumulates sums, every call reduces.
  reductions = step.calls if step.window is None else 1
  described_update = described.DescribedUpdate(step.update)
  rows = described_update.rows(variables, is_dense=step.calls > 1)
  return [
    dataclasses.replace(
      row,
      bytes_sent=row.bytes_sent and row.bytes_sent * reductions,
      state_bytes=row.state_bytes
      + (0 if step.window is None else described.num_bytes([variable])),
    )
    for row, variable in zip(rows, variables, strict=True)
  ]


def _nonfinite(step: step_lib.Step) -> str:
  """Returns what happens to a step with a NaN or an infinity."""
  if step.context.inner.skips_overflows:
    return "skipped by the LossScaleOptimizer"
  return "skipped and counted" if step.settings.skip_nonfinite else "applied"


def _not_in_force(
  step: step_lib.Step, rows: Sequence[described.VariableUpdate]
) -> Iterator[tuple[str, str]]:
  """Yields the names of settings that change nothing here, and the reasons."""
  settings, engine = step.settings, step.context.engine
  groups = engine.groups
  is_rounded = described.DescribedUpdate(step.update).is_rounded
  alone = "each group has one replica"
  if engine.num_replicas == 1:
    alone = "there is one replica"
  if groups.num_replicas != engine.num_replicas:
    yield (
      "group_assignment",
      f"it is for {groups.num_replicas} replicas, and a step raises an error",
    )
  if settings.shard_update and step.update.sharding is None:
    yield "shard_update", f"{alone}, so nothing is divided"
  if settings.wire_dtype is not None:
    if groups.group_size == 1:
      yield "wire_dtype", f"{alone}, so nothing is sent"
    elif rows and not any(map(is_rounded, rows)):
      yield "wire_dtype", "no gradient has a wider dtype"
  if settings.accumulate_steps == 1:
    yield "accumulate_steps", "one call is a step, as with None"
  if settings.skip_nonfinite and step.context.inner.skips_overflows:
    yield (
      "skip_nonfinite",
      "the LossScaleOptimizer skips such steps anyway; they are only counted",
    )
  if settings.lazy_rows and (why := _why_no_rows(step, rows)):
    yield "lazy_rows", why
  if settings.fused_update:
    plain = [row for row in rows if row.updated_by in ("Keras", "rows")]
    for reason in dict.fromkeys(row.reason for row in plain):
      count = sum(row.reason == reason for row in plain)
      yield "fused_update", f"{count} of {len(rows)} variables: {reason}"
  by_group = settings.group_settings or {}
  for name in settings_lib.LIMITS:
    if name in by_group and getattr(settings, name) is not None:
      yield name, "`group_settings` has a limit for each group"
  if by_group and groups.num_groups == 1:
    yield "group_settings", "there is one group, which has these numbers"


def _why_no_rows(
  step: step_lib.Step, rows: Sequence[described.VariableUpdate]
) -> str:
  """Returns why no table is updated by rows; "" if one is, or may be."""
  if not step.context.engine.supports_sparse:
    return "TPU programs have no shapes that depend on data: all rows change"
  if not step.tables.is_by_rows:
    return "XLA compiles the step, so all rows change"
  if not rows or any(row.updated_by == "rows" for row in rows):
    return ""
  if step.update.sharding is not None:
    return (
      "no variable is known to be a table, so all are divided; call"
      " update_by_rows() before build()"
    )
  return "no `Embedding` is trained, so no gradient is known to be row-sparse"


def _notes(
  step: step_lib.Step,
  variables: Sequence[Any],
  rows: Sequence[described.VariableUpdate],
) -> Iterator[str]:
  """Yields what is not known yet, and what costs more than it has to."""
  if not step.context.inner.is_built:
    yield (
      "The variables are not known yet. Call"
      " build(model.trainable_variables), and describe() again."
    )
  elif not variables:
    yield (
      "The variables are not known, because `opt` was built before it was"
      " wrapped. Wrap a new optimizer."
    )
  if (
    step.context.inner.accumulates and step.update.engine.groups.group_size > 1
  ):
    yield (
      f"With gradient_accumulation_steps={step.calls} of `opt`, gradients are"
      f" reduced in every call. With accumulate_steps={step.calls} of the"
      " CrossShardOptimizer instead, they are reduced once per step."
    )
  if any(row.bytes_sent is None for row in rows):
    yield (
      "Replicas also send the rows of the batch, and their indices, of each"
      ' variable with "by batch" under "sent".'
    )
  for variable, row in zip(variables, rows, strict=True):
    is_large = described.num_elements(variable) >= table_warnings.LARGE
    is_table = step.tables.is_embedding(variable)
    if is_large and is_table and row.updated_by != "rows":
      yield f"Every step updates all rows of {row.path}. {_remedy(step)}"


def _remedy(step: step_lib.Step) -> str:
  """Returns how a table can be updated by rows, or why it cannot."""
  if not step.context.engine.supports_sparse:
    return "On TPUs, there is no other way."
  if step.calls > 1:
    return "Accumulated gradients are dense. Do not accumulate gradients."
  if step.settings.lazy_rows:
    return "Pass jit_compile=False."
  if why_not := rows_lib.why_not_lazy(step.context):
    return f"To update only rows of the batch, use a different `opt`: {why_not}"
  return (
    "To update only the rows of the batch, pass lazy_rows=True, and use"
    " tf_cross_shard.layers.Embedding in the model."
  )


def _as_json(row: described.VariableUpdate) -> dict[str, Any]:
  """Returns a row in types that JSON has."""
  fields = dataclasses.asdict(row)
  return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


def _summary(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields the lines above the table."""
  groups = content["groups"]
  shown = textwrap.shorten(str(groups), 50, placeholder=" ...]")
  yield "strategy", content["strategy"]
  yield "groups", f"{len(groups)} x {content['group_size']} replicas: {shown}"
  factors = content["loss_factors"]
  chosen = content["loss_averaged_over"]
  target = "gradients" if content["scale_gradients"] else "loss"
  by_convention = [
    f'{factors[over]:g} for "{over}"'
    for over in ([chosen] if chosen else factors)
  ]
  factor = f"{target} times {' or '.join(by_convention)}"
  yield "reduction", f"{content['reduction']}: {factor}"
  dtype = content["wire_dtype"] or "the gradients' dtype"
  sums = content["sums"]
  yield "sums", f"{sums}, in {dtype}" if sums else "no gradients are exchanged"
  calls = content["calls_per_step"]
  yield "accumulation", f"{calls} calls make a step" if calls > 1 else "none"
  yield "NaN or infinity", content["nonfinite"]
  yield "sharding", content["sharding"] or "none"
  for title, key, padding in (
    ("sent", "bytes_sent", content["padding_sent"]),
    ("state", "state_bytes", 0),
  ):
    size = content[key]
    more = f", {padding:,} of them padding" if padding else ""
    known = f"{size or 0:,} bytes by each replica{more}"
    yield title, "not known before build" if size is None else known


def _cell(row: dict[str, Any], field: str) -> str:
  """Returns the text of a cell."""
  value = row[field]
  if field == "shape":
    return str(tuple(value))
  if field == "elements":
    return _members(row)
  if field == "bytes_sent" and value is None:
    return "by batch"
  return f"{value:,}" if isinstance(value, int) else str(value)


def _members(row: dict[str, Any]) -> str:
  """Returns which members of a group update a variable."""
  if row["owner"] is not None:
    return f"owner {row['owner']}"
  elements = row["elements"]
  if set(elements) == {math.prod(row["shape"])}:
    return "all"
  parts = [str(i) for i, size in enumerate(elements) if size]
  return "part " + "-".join(dict.fromkeys((parts[0], parts[-1])))


def _align(table: Sequence[Sequence[str]]) -> list[str]:
  """Returns the lines of a table, in columns."""
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  return [
    "  ".join(
      cell.ljust(width) for cell, width in zip(line, widths, strict=True)
    ).rstrip()
    for line in table
  ]
