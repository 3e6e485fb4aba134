"""Tables that partition the replicas are accepted, others are refused."""

import copy
import dataclasses
import json
import pickle
import types
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer
from tf_cross_shard import groups as groups_lib
from tf_cross_shard.groups import Groups

Table = list[list[int]]


@st.composite
def tables(
  draw: st.DrawFn, min_groups: int = 1, min_size: int = 1, largest: int = 6
) -> Table:
  """Draws any valid table: a permutation of the replicas, cut into rows."""
  num_groups = draw(st.integers(min_groups, largest))
  size = draw(st.integers(min_size, largest))
  replicas = draw(st.permutations(range(num_groups * size)))
  return [replicas[i * size : (i + 1) * size] for i in range(num_groups)]


def refusal(value: Any, num_replicas: int = -1) -> str:
  with pytest.raises(ValueError, match=r"^`group_assignment` must") as error:
    Groups(value, num_replicas)
  text = str(error.value)
  assert "such as [[0, 1], [2, 3]]" in text  # the remedy
  return text


# Accepted tables.


@hypothesis.given(tables())
def test_any_partition_is_accepted(table: Table) -> None:
  groups = Groups(table, len(table) * len(table[0]))
  assert groups.num_groups == len(table)
  assert groups.group_size == len(table[0])
  assert groups.num_replicas == len(table) * len(table[0])
  assert groups.to_lists() == table
  assert list(groups) == [tuple(row) for row in table]
  for i, row in enumerate(table):
    for replica in row:
      assert groups.index_of(replica) == i
      assert groups.members_of(replica) == tuple(sorted(row))


@hypothesis.given(tables())
def test_every_accepted_form_is_the_same_table(table: Table) -> None:
  groups = Groups(table)
  forms: list[Any] = [
    tuple(map(tuple, table)),
    [np.array(row) for row in table],
    [list(map(np.int32, row)) for row in table],
    groups,
    tf.constant(table),
    tf.Variable(table),
    *(np.array(table, dtype) for dtype in (np.int8, np.int64, np.uint64)),
  ]
  for form in forms:
    same = Groups(form)
    assert same == groups
    assert hash(same) == hash(groups)
    ids = [replica for row in same for replica in row]
    assert {type(replica) for replica in ids} == {int}


def test_65536_replicas() -> None:
  """A quadratic check would take minutes."""
  table = np.random.default_rng(0).permutation(65_536).reshape(-1, 32)
  assert Groups(table).num_replicas == 65_536


# Refused tables.


@hypothesis.given(tables(min_size=2), st.data())
def test_another_id_in_a_place_is_refused(
  table: Table, data: st.DataObject
) -> None:
  """A duplicate, also if the number of ids is right; and an unknown id."""
  row = data.draw(st.integers(0, len(table) - 1))
  column = data.draw(st.integers(0, len(table[0]) - 1))
  total = len(table) * len(table[0])
  other = data.draw(st.integers().filter(lambda i: i != table[row][column]))
  table[row][column] = other
  fault = "in it twice" if 0 <= other < total else "out of range"
  assert f"replica {other} is {fault}: [[" in refusal(table)


@hypothesis.given(tables(min_groups=2), st.data())
def test_a_missing_row_is_refused(table: Table, data: st.DataObject) -> None:
  total = len(table) * len(table[0])
  gone = table.pop(data.draw(st.integers(0, len(table) - 1)))
  assert f"replica {min(gone)} is missing" in refusal(table, total)


@hypothesis.given(tables(min_groups=2, min_size=2), st.data())
def test_uneven_groups_are_refused_as_such(
  table: Table, data: st.DataObject
) -> None:
  """The message is about the size, whichever row and ids are wrong."""
  row = data.draw(st.integers(0, len(table) - 1))
  table[row].pop(data.draw(st.integers(0, len(table[0]) - 1)))
  text = refusal(table)
  assert "uneven groups are not supported" in text
  assert f"groups of {sorted(set(map(len, table)))}: " in text


@pytest.mark.parametrize("odd", [1.0, True, np.True_, np.float32(1), None, "1"])
def test_other_numbers_than_integers_are_refused(odd: Any) -> None:
  text = refusal([[0, odd], [2, 3]])
  assert "must contain integers" in text
  assert f"{odd!r} in " in text


EMPTY = "must not be empty"


@pytest.mark.parametrize(
  ("other", "words"),
  [
    ([], EMPTY),
    ([[], []], EMPTY),
    (np.zeros((0, 2), int), EMPTY),
    (np.zeros((2, 0), int), EMPTY),
    ([0, 1], "got [0, 1]"),
    (3, "got 3"),
    (None, "got None"),
    ({0: [1]}, "got {0: [1]}"),
    ([[0], 1], "got [[0], 1]"),
    ([[[0], [1]]], "[0] in [[[0], [1]]]"),
    (np.arange(4), "got [0, 1, 2, 3]"),
    (np.array([[0.0, 1.0]]), "0.0 in [[0.0, 1.0]]"),
    # A long value is shown from its beginning.
    (np.zeros((1000, 2), int), "[[0, 0], [0, 0]"),
  ],
  ids=lambda value: str(value)[:20],
)
def test_other_types_are_refused(other: Any, words: str) -> None:
  text = refusal(other)
  assert words in text
  assert len(text) < 400


def test_too_many_replicas_are_refused() -> None:
  text = refusal([[0, 1], [2, 3]], num_replicas=2)
  assert "replica 2 is out of range: [[0, 1], [2, 3]]" in text


# The class.


def test_a_groups_is_immutable_and_equal_by_rows_in_order() -> None:
  table = [[0, 1], [2, 3]]
  groups = Groups(table)
  assert groups != Groups([[2, 3], [0, 1]])
  assert groups != Groups([[0, 1, 2, 3]])
  for name in ("assignment", "num_replicas"):
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(groups, name, ())
  with pytest.raises(ValueError, match=r"`replica` .*got 4"):
    groups.index_of(4)
  table[0][0] = 9
  groups.to_lists()[0][0] = 9
  assert groups.to_lists() == [[0, 1], [2, 3]]


def test_copies_are_equal_and_work() -> None:
  groups = Groups([[2, 0], [1, 3]])
  for same in (
    pickle.loads(pickle.dumps(groups)),
    copy.deepcopy(groups),
    eval(repr(groups)),
  ):
    assert same == groups
    assert hash(same) == hash(groups)
    assert same.members_of(0) == (0, 2)


def test_names() -> None:
  """Names are copied and drawn, and do not change the groups."""
  groups = groups_lib.strided(4, 2, names=["low", "high rate"])
  assert groups.names == ("low", "high rate")
  assert "names=('low', 'high rate')" in repr(groups)
  unnamed = Groups([[0, 2], [1, 3]])
  assert unnamed.names is None
  assert groups == unnamed
  assert hash(groups) == hash(unnamed)
  for same in (copy.deepcopy(groups), eval(repr(groups)), Groups(groups, 4)):
    assert same.names == groups.names
  assert Groups(groups, names=["a", "b"]).names == ("a", "b")
  assert groups.draw() == (
    "replica    0  1  2  3\nlow        o-----o\nhigh rate     o-----o"
  )
  assert groups.draw(9) == "low: 0 2\nhigh rate: 1 3"
  for build in (groups_lib.contiguous, groups_lib.strided):
    assert build(4, 2, ["a", "b"]).names == ("a", "b")
  assert groups_lib.singletons(2, ["a", "b"]).names == ("a", "b")
  for wrong in (["a"], ["a", "a"], [], "ab"):
    with pytest.raises(ValueError, match="`names` must contain a different"):
      Groups(unnamed, names=wrong)


def test_an_optimizer_keeps_the_names() -> None:
  """The configuration keeps the names; without names, it lists the rows.

  The property always lists the rows.
  """
  rows = [[0], [1], [2], [3]]
  groups = groups_lib.singletons(4, ["a", "b", "c", "d"])
  with testbed.mirrored().scope():
    for given, config in (
      (groups, {"assignment": rows, "names": ["a", "b", "c", "d"]}),
      (rows, rows),
    ):
      optimizer = CrossShardOptimizer("sgd", group_assignment=given)
      saved = json.loads(json.dumps(optimizer.get_config()))
      assert saved["group_assignment"] == config
      for same in (optimizer, CrossShardOptimizer.from_config(saved)):
        assert same.groups.names == getattr(given, "names", None)
        assert same.group_assignment == rows
  assert "names" not in repr(optimizer)


# The drawing.


def test_drawings() -> None:
  assert Groups([[0, 3], [1, 2]]).draw() == (
    "replica  0  1  2  3\ngroup 0  o--------o\ngroup 1     o--o"
  )
  assert Groups([[0, 3], [1, 2]]).draw(19).startswith("replica")
  assert Groups([[0, 3], [1, 2]]).draw(18) == "group 0: 0 3\ngroup 1: 1 2"
  assert groups_lib.contiguous(128, 64).draw() == (
    "group 0: 0-63\ngroup 1: 64-127"
  )
  assert groups_lib.strided(128, 64).draw() == (
    "group 0: 0-126 step 2\ngroup 1: 1-127 step 2"
  )
  lines = Groups([[10, 0], [2, 1], [4, 3], [6, 5], [8, 7], [9, 11]]).draw()
  assert lines.splitlines()[0].endswith("   9  10  11")
  assert lines.splitlines()[1].endswith("---o")
  assert lines.splitlines()[6].endswith("   o-------o")


# Builders.


def test_contiguous_strided_and_singletons() -> None:
  pairs = groups_lib.contiguous(6, 2)
  assert pairs.to_lists() == [[0, 1], [2, 3], [4, 5]]
  assert groups_lib.strided(6, 2).to_lists() == [[0, 3], [1, 4], [2, 5]]
  assert groups_lib.singletons(3).to_lists() == [[0], [1], [2]]


@pytest.mark.parametrize(
  ("build", "arguments", "words"),
  [
    ("contiguous", (6, 4), "`group_size` must divide .* 4 does not divide 6"),
    ("strided", (6, 4), "`group_size` must divide .* 4 does not divide 6"),
    ("strided", (4, True), "`group_size` must be an integer .* got True"),
    ("contiguous", ("4", 2), "`num_replicas` must be an integer .* got '4'"),
    ("singletons", (0,), "`num_replicas` must be an integer .* got 0"),
  ],
)
def test_builders_refuse_what_does_not_divide(
  build: str, arguments: Any, words: str
) -> None:
  with pytest.raises(ValueError, match=words):
    getattr(groups_lib, build)(*arguments)


def strategy_of(devices: list[str], num_replicas: int | None = None) -> Any:
  """An object with the attributes of a strategy that `by_host` reads."""
  return types.SimpleNamespace(
    num_replicas_in_sync=len(devices) if num_replicas is None else num_replicas,
    extended=types.SimpleNamespace(worker_devices=tuple(devices)),
  )


def tpus(*counts: int) -> list[str]:
  """Names of the devices of TPU hosts, which have `counts` devices each."""
  return [
    f"/job:worker/replica:0/task:{task}/device:TPU:{i}"
    for task, count in enumerate(counts)
    for i in range(count)
  ]


@pytest.mark.parametrize(
  ("devices", "num_replicas", "table"),
  [
    (["/device:CPU:0"], None, [[0]]),
    (tpus(*[1] * 11), None, [[i] for i in range(11)]),
    # Two kinds of devices on one host, and hosts that take turns.
    (
      [f"/job:a/replica:0/task:0/device:{d}PU:0" for d in "CG"],
      None,
      [[0, 1]],
    ),
    ([tpus(2, 2)[i] for i in (0, 2, 1, 3)], None, [[0, 2], [1, 3]]),
    # Between graphs, a process sees its own devices only.
    (tpus(2), 6, [[0, 1], [2, 3], [4, 5]]),
  ],
)
def test_by_host(
  devices: list[str], num_replicas: int | None, table: Table
) -> None:
  strategy = strategy_of(devices, num_replicas)
  assert groups_lib.by_host(strategy).to_lists() == table


def test_by_host_refuses_uneven_hosts() -> None:
  with pytest.raises(ValueError, match=r"groups of one size .* \[1, 2\]: "):
    groups_lib.by_host(strategy_of(tpus(1, 2)))
  with pytest.raises(ValueError, match="3 does not divide 8"):
    groups_lib.by_host(strategy_of(tpus(3), num_replicas=8))
