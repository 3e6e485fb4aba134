"""docs/migration.md: its Python runs, and its tables leave nothing out."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tf_cross_shard
from tests.support import pages, programs
from tf_cross_shard import migration

PAGE = "docs/migration.md"
MINIMIZE = (
  "global_step",
  "var_list",
  "gate_gradients",
  "aggregation_method",
  "colocate_gradients_with_ops",
  "name",
  "grad_loss",
)
v1 = tf.compat.v1.train
# The arguments of the optimizers of TensorFlow 1 that have no defaults.
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
  "AdagradDAOptimizer": lambda: {
    "learning_rate": 0.1,
    "global_step": tf.Variable(0, dtype=tf.int64),
  },
  "MomentumOptimizer": lambda: {"learning_rate": 0.1, "momentum": 0.9},
  "RMSPropOptimizer": lambda: {"learning_rate": 0.1, "momentum": 0.9},
  "SyncReplicasOptimizer": lambda: {
    "opt": v1.AdamOptimizer(),
    "replicas_to_aggregate": 2,
  },
}


def rows(table: str) -> list[list[str]]:
  """Returns the cells of a table between two comments."""
  [text] = re.findall(
    rf"<!-- {table} -->\n(.*?)<!-- /{table} -->", pages.text(PAGE), re.S
  )
  lines = text.strip().splitlines()
  assert re.fullmatch(r"[|-]+", lines[1])
  return [[cell.strip() for cell in x[1:-1].split("|")] for x in lines[2:]]


def run(program: str, folder: Path, **environment: str) -> str:
  """Runs a program in a separate process.

  Returns the output, and checks that this package has logged no warning.
  """
  (folder / "program.py").write_text(program)
  printed = programs.run(["program.py"], folder, **environment)
  assert "WARNING:absl" not in printed, printed
  return re.sub("(?m)^WARNING:.*\n", "", printed)


def make(name: str) -> Any:
  """Creates an optimizer of TensorFlow 1."""
  options = SETTINGS.get(name, dict)()
  kind = getattr(v1, name)
  if not options and "learning_rate" in inspect.signature(kind).parameters:
    options = {"learning_rate": 0.1}
  return kind(**options)


def test_cross_shard_program_continues(tmp_path: Path) -> None:
  before, after, towers, read = pages.blocks(PAGE, "python")
  assert "TowerOptimizer" in towers
  # The third block reads what it wrote into other variables.
  more = "\nfor v in model.trainable_variables: v.assign(0 * v)\n"
  more += read + "\nloss = tf.reduce_mean(model(tf.constant(rows)) ** 2)"
  more += "\nprint(f'{optimizer.iterations.numpy()} steps: {float(loss):.5f}')"
  printed = run(before + after + more, tmp_path)
  [expected, _] = pages.blocks(PAGE, "text")
  assert expected in printed
  lines = [line.split(": ")[1] for line in expected.splitlines()]
  assert lines[:2] == lines[2:]
  assert printed.splitlines()[-1] == f"3 steps: {lines[0]}"


@pytest.mark.parametrize("keras", ["0", "1"])
def test_towers_program(tmp_path: Path, keras: str) -> None:
  [_, expected] = pages.blocks(PAGE, "text")
  program = pages.blocks(PAGE, "python")[2]
  assert expected in run(program, tmp_path, TF_USE_LEGACY_KERAS=keras)


@pytest.mark.parametrize("name", ["CrossShardOptimizer", "TowerOptimizer"])
def test_members_of_the_page_are_there(name: str) -> None:
  kind = getattr(tf_cross_shard, name)
  optimizer, arguments = kind("sgd"), inspect.signature(kind).parameters
  minimize = list(inspect.signature(kind.minimize).parameters)
  assert minimize[1:9] == ["loss", *MINIMIZE]
  then = [re.findall(r"^`(\w+)|, `(\w+)`", cell) for cell, _ in rows(name)]
  members = {a or b for cell in then for a, b in cell} - {name}
  assert {*MINIMIZE, "get_slot", "GATE_GRAPH"} < members
  for member in members - {*minimize, *arguments, "replicate_model_fn"}:
    assert hasattr(optimizer, member), member
  assert optimizer.variables() == list(optimizer.variables)


def slots_of_v1(name: str) -> set[str]:
  """Returns the slot names of an optimizer of TensorFlow 1."""
  with tf.Graph().as_default():
    optimizer = make(name)
    weight = tf.compat.v1.get_variable("w", [2])
    optimizer.minimize(tf.reduce_sum(weight))
    return set(optimizer.get_slot_names())


def names_in(cell: str) -> set[str]:
  """Returns the slot names in a table cell."""
  return set() if cell == "none" else set(cell.split(", "))


@pytest.mark.parametrize("row", rows("optimizers"), ids=lambda row: row[0])
def test_optimizers_are_converted_as_in_the_table(row: list[str]) -> None:
  v1_name, kind, then, now, _ = row
  optimizer = migration.from_v1(make(v1_name.strip("`")))
  weight = tf.Variable([1.0, 2.0])
  optimizer.build([weight])
  inner = next(
    kind
    for kind in type(optimizer.inner_optimizer).__mro__
    if kind.__module__.startswith("keras.")
  )
  assert f"`{inner.__name__}`" == kind.removesuffix(", derived")
  derived = type(optimizer.inner_optimizer) is not inner
  assert derived == kind.endswith(", derived")
  assert names_in(then) == slots_of_v1(v1_name.strip("`"))
  assert names_in(now) == set(optimizer.get_slot_names())


@pytest.mark.parametrize("row", rows("refused"), ids=lambda row: row[0])
def test_other_optimizers_of_the_table_raise_an_error(row: list[str]) -> None:
  with pytest.raises(TypeError, match="cannot be converted"):
    migration.from_v1(make(row[0].strip("`")))


def test_every_optimizer_of_tensorflow_1_is_in_a_table() -> None:
  tables = rows("optimizers") + rows("refused")
  named = {row[0].strip("`") for row in tables}
  there = {
    name
    for name in dir(v1)
    if inspect.isclass(getattr(v1, name))
    and issubclass(getattr(v1, name), v1.Optimizer)
  }
  assert named == there - {"Optimizer"}
