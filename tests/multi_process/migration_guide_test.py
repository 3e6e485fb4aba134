"""docs/migration.md: its Python runs, and its tables leave nothing out."""
# bazel: timeout=long data=//:sources deps=//tf_cross_shard/virtual_tpu

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tf_cross_shard
from tf_cross_shard import migration

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = Path(__file__).absolute().parent.parent.parent
PAGE = PROJECT / "docs" / "migration.md"
MINIMIZE = (
  "global_step",
  "var_list",
  "gate_gradients",
  "aggregation_method",
  "colocate_gradients_with_ops",
  "name",
  "grad_loss",
)
MEMBERS = (
  "apply_gradients",
  "compute_gradients",
  "get_name",
  "get_slot",
  "get_slot_names",
  "minimize",
  "variables",
  "GATE_GRAPH",
  "GATE_NONE",
  "GATE_OP",
)
# What the pages of TensorFlow 1 list: members, and arguments by name.
PAGES = {
  "CrossShardOptimizer": (
    *MEMBERS,
    *MINIMIZE,
    *("opt", "reduction", "group_assignment"),
  ),
  "TowerOptimizer": (
    *MEMBERS,
    *MINIMIZE,
    *("optimizer_or_optimizer_fn", "has_been_used"),
    "COLLECTION_FOR_GRAPH_STATES",
  ),
}
v1 = tf.compat.v1.train
# How to make each optimizer of version 1 that has no default for something.
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


def page() -> str:
  return PAGE.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
  """The page's code in a language."""
  return re.findall(rf"```{language}\n(.*?)```", page(), flags=re.DOTALL)


def rows(table: str) -> list[list[str]]:
  """The cells of a table that stands between comments."""
  [text] = re.findall(
    rf"<!-- {table} -->\n(.*?)<!-- /{table} -->", page(), re.S
  )
  lines = text.strip().splitlines()
  assert re.fullmatch(r"[|-]+", lines[1])
  return [[cell.strip() for cell in x[1:-1].split("|")] for x in lines[2:]]


def run(program: str, folder: Path, **environment: str) -> str:
  """Runs a program in a process of its own; answers what it prints."""
  # From the source tree, like the test itself.
  path = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
  done = subprocess.run(
    [sys.executable, "-c", path + "exec(sys.stdin.read())"],
    input=program,
    cwd=folder,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def make(name: str) -> Any:
  """An optimizer of version 1."""
  options = SETTINGS.get(name, dict)()
  kind = getattr(v1, name)
  if not options and "learning_rate" in inspect.signature(kind).parameters:
    options = {"learning_rate": 0.1}
  return kind(**options)


def test_cross_shard_program_goes_on(tmp_path: Path) -> None:
  before, after, towers, read = blocks("python")
  assert "TowerOptimizer" in towers
  # The third block reads what it wrote into other variables.
  more = "\nfor v in model.trainable_variables: v.assign(0 * v)\n"
  more += read + "\nloss = tf.reduce_mean(model(tf.constant(rows)) ** 2)"
  more += "\nprint(f'{optimizer.iterations.numpy()} steps: {float(loss):.5f}')"
  printed = run(before + after + more, tmp_path)
  [expected, _] = blocks("text")
  assert expected in printed
  lines = [line.split(": ")[1] for line in expected.splitlines()]
  assert lines[:2] == lines[2:]
  assert printed.splitlines()[-1] == f"3 steps: {lines[0]}"


@pytest.mark.parametrize("keras", ["0", "1"])
def test_towers_program(tmp_path: Path, keras: str) -> None:
  [_, expected] = blocks("text")
  printed = run(blocks("python")[2], tmp_path, TF_USE_LEGACY_KERAS=keras)
  assert printed == expected


@pytest.mark.parametrize("name", PAGES)
def test_every_member_has_a_row(name: str) -> None:
  then = [row[0] for row in rows(name)]
  assert all(len(row) == 2 and all(row) for row in rows(name))
  # What a row is about stands at its beginning, or is a constant in a list.
  known = {name}
  for cell in then:
    known.update(re.findall(r"`(\w+)`", cell))
    known.update(re.findall(r"^`(\w+)\(", cell))
    # Arguments of the constructor stand in its row.
    known.update(re.findall(rf"^`{name}\((\w+)\)", cell))
  assert set(PAGES[name]) - known == set()
  others = {name, "SyncReplicasOptimizer", "replicate_model_fn"}
  assert known - set(PAGES[name]) - others == set()


@pytest.mark.parametrize("name", PAGES)
def test_every_member_is_there(name: str) -> None:
  """What the tables say is the same is there, under the same name."""
  kind = getattr(tf_cross_shard, name)
  optimizer = kind("sgd")
  arguments = {
    *inspect.signature(kind).parameters,
    *inspect.signature(kind.minimize).parameters,
  }
  for member in PAGES[name]:
    assert hasattr(optimizer, member) or member in arguments, member
  assert list(inspect.signature(kind.minimize).parameters)[1:9] == [
    "loss",
    *MINIMIZE,
  ]
  assert optimizer.variables() == list(optimizer.variables)
  assert (kind.GATE_NONE, kind.GATE_OP, kind.GATE_GRAPH) == (0, 1, 2)


def slots_of_v1(name: str) -> set[str]:
  """What an optimizer of version 1 calls its slots."""
  with tf.Graph().as_default():
    optimizer = make(name)
    weight = tf.compat.v1.get_variable("w", [2])
    optimizer.minimize(tf.reduce_sum(weight))
    return set(optimizer.get_slot_names())


def names_in(cell: str) -> set[str]:
  """The names in a cell of slots."""
  return set() if cell == "none" else set(cell.split(", "))


@pytest.mark.parametrize("row", rows("optimizers"), ids=lambda row: row[0])
def test_optimizers_are_what_the_table_says(row: list[str]) -> None:
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
def test_optimizers_are_refused_as_the_table_says(row: list[str]) -> None:
  with pytest.raises(TypeError, match="cannot be converted"):
    migration.from_v1(make(row[0].strip("`")))


def test_every_optimizer_of_version_1_is_in_a_table() -> None:
  tables = rows("optimizers") + rows("refused")
  named = {row[0].strip("`") for row in tables}
  there = {
    name
    for name in dir(v1)
    if inspect.isclass(getattr(v1, name))
    and issubclass(getattr(v1, name), v1.Optimizer)
  }
  assert named == there - {"Optimizer"}


def links() -> Iterator[tuple[str, str]]:
  """File and heading of each link within the project."""
  for link in re.findall(r"\]\(([^)]+)\)", page()):
    file, _, heading = link.partition("#")
    yield file, heading


def test_page_names_what_there_is() -> None:
  headings = {
    re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
    for heading in re.findall(r"^#+ (.*)$", page(), re.MULTILINE)
  }
  assert len(list(links())) >= 5
  for file, heading in links():
    assert (PAGE.parent / file).exists(), file
    assert file or heading in headings, heading
  files = re.findall(r"(?:examples|tests|benchmarks)/[\w/]+\.py", page())
  assert [file for file in files if not (PROJECT / file).exists()] == []
  for script in re.findall(r"^python (\w+\.py)", "".join(blocks("sh")), re.M):
    assert (PROJECT / "examples/migration" / script).exists(), script


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
