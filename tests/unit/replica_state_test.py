"""Values of replicas and groups: read, saved, restored, averaged, compared.

In one process; several workers are in replica_state_workers_test.py.
"""
# bazel: size=large timeout=long

import functools
import importlib
import pathlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, replica_state
from tf_cross_shard.replica_state import archive, group_state

N = testbed.REPLICAS
PAIRS = [[0, 1], [2, 3]]
STRATEGIES: dict[str, Callable[[], Any]] = {
  "mirrored": testbed.mirrored,
  "virtual": functools.partial(testbed.virtual, N),
}
ALONE: dict[str, Callable[[], Any]] = {
  "none": tf.distribute.get_strategy,
  "one device": functools.partial(tf.distribute.OneDeviceStrategy, "CPU:1"),
  "one mirrored": functools.partial(tf.distribute.MirroredStrategy, ["CPU:0"]),
}
everywhere = pytest.mark.parametrize("where", STRATEGIES)


def _lists(arrays: Any) -> Any:
  return [np.asarray(array).tolist() for array in arrays]


def _simple(
  where: str, groups: Any = PAIRS, make: Any = None
) -> tuple[Any, list[Any]]:
  """An optimizer and two weights of which each replica has its group's own."""
  with STRATEGIES[where]().scope():
    weights = [
      tf.keras.Variable([0.0, 0.0], name="weight"),
      tf.Variable(0.0, name="scale"),
    ]
    made = make() if make else tf.keras.optimizers.SGD(0.5, momentum=0.5)
    sharded = CrossShardOptimizer(made, group_assignment=groups)
    sharded.build(weights)
  for index, members in enumerate(groups):
    assert len(groups) * len(members) == N > 1
    for variable in [*weights, *sharded.variables]:
      copies = testbed.copies(variable)
      for replica in members:
        copies[replica] = np.full_like(copies[replica], 10 * index + 10)
      cases.spread(variable, copies)
  return sharded, weights


# ----------------------------------------------------------------------- values


@pytest.mark.parametrize(
  ("where", "dtype", "kind"),
  [
    ("mirrored", "float32", "keras"),
    ("mirrored", "bfloat16", "tensorflow"),
    ("virtual", "bfloat16", "keras"),
    ("virtual", "float64", "tensorflow"),
    ("mirrored", "bool", "tensorflow"),
  ],
)
def test_values_of_each_replica(where: str, dtype: str, kind: str) -> None:
  numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
  mine = [np.array([i, 0, i * i % 5]).astype(numpy_dtype) for i in range(N)]
  with STRATEGIES[where]().scope():
    if kind == "keras":
      variable = tf.keras.Variable(mine[0], dtype=dtype, trainable=False)
    else:
      variable = tf.Variable(mine[0], dtype=dtype)
  assert _lists(replica_state.values(variable)) == _lists(mine[:1] * N)
  cases.spread(variable, mine)
  found = replica_state.values(variable)
  assert [array.dtype for array in found] == [numpy_dtype] * N
  assert _lists(found) == _lists(mine)


@everywhere
def test_values_are_bits_and_copies(where: str) -> None:
  bits = [[0x7FC00001 + i, 0x80000000, 1] for i in range(N)]
  arrays = [np.array(each, "uint32").view("float32") for each in bits]
  with STRATEGIES[where]().scope():
    variable = tf.Variable(arrays[0])
  cases.spread(variable, arrays)
  found = replica_state.values(variable)
  assert [array.view("uint32").tolist() for array in found] == bits
  for array in found:
    array[:] = 7.0
  found = replica_state.values(variable)
  assert [array.view("uint32").tolist() for array in found] == bits


def test_values_of_a_slot() -> None:
  optimizer, [weight, _] = _simple("mirrored")
  slot = optimizer.get_slot(weight, "momentum")
  expected = [[10.0] * 2, [10.0] * 2, [20.0] * 2, [20.0] * 2]
  assert _lists(replica_state.values(slot)) == expected
  assert _lists(replica_state.group_values(slot, optimizer)) == [
    [10.0] * 2,
    [20.0] * 2,
  ]


@everywhere
def test_values_of_a_sum_are_each_replicas_part(where: str) -> None:
  strategy = STRATEGIES[where]()
  with strategy.scope():
    metric = tf.keras.metrics.Sum()
    total = tf.Variable(
      0.0,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
    )

  @tf.function
  def step() -> None:
    strategy.run(
      lambda: total.assign_add(2.0 ** tf.cast(testbed.replica_id(), tf.float32))
    )

  step()
  assert float(total.read_value()) == 15.0
  assert _lists(replica_state.values(total)) == [1.0, 2.0, 4.0, 8.0]
  assert len(replica_state.values(metric.variables[0])) == N


@pytest.mark.parametrize("where", ALONE)
def test_values_of_one_replica(where: str, tmp_path: pathlib.Path) -> None:
  with ALONE[where]().scope():
    weight = tf.keras.Variable([1.0, 2.0])
    optimizer = CrossShardOptimizer("adam")
    optimizer.build([weight])
  assert _lists(replica_state.values(weight)) == [[1.0, 2.0]]
  assert _lists(replica_state.group_values(weight, optimizer)) == [[1.0, 2.0]]
  replica_state.assert_in_sync(optimizer, [weight])
  replica_state.save(tmp_path / "a", optimizer, [weight])
  weight.assign([7.0, 7.0])
  replica_state.average(optimizer, [weight], slots=True)
  assert _lists(replica_state.values(weight)) == [[7.0, 7.0]]
  replica_state.restore(tmp_path / "a", optimizer, [weight])
  assert _lists(replica_state.values(weight)) == [[1.0, 2.0]]


def test_a_variable_outside_any_scope_exists_once() -> None:
  variable = tf.Variable([3.0])
  assert _lists(replica_state.values(variable)) == [[3.0]]
  optimizer, _ = _simple("mirrored")
  with testbed.mirrored().scope():
    assert _lists(replica_state.values(variable)) == [[3.0]]
    found = replica_state.group_values(variable, optimizer)
  assert _lists(found) == [[3.0], [3.0]]


@pytest.mark.parametrize("groups", [[[2, 3], [0, 1]], [[3], [2], [1], [0]]])
def test_group_values_are_in_the_order_of_groups(groups: Any) -> None:
  optimizer, [weight, _] = _simple("mirrored")
  other, _ = _simple("mirrored", groups)
  per_replica = replica_state.values(weight)
  expected = [per_replica[members[0]] for members in groups]
  found = replica_state.group_values(weight, other)
  assert _lists(found) == _lists(expected)
  plain = tf.keras.optimizers.SGD()
  assert _lists(replica_state.group_values(weight, plain)) == [[10.0, 10.0]]
  with testbed.mirrored(2).scope():
    small = tf.Variable(1.0)
  with pytest.raises(ValueError, match=r"groups of 4 replicas.*have 2"):
    replica_state.group_values(small, optimizer)


@pytest.mark.parametrize(
  ("variable", "words"),
  [
    (tf.constant(1.0), r"`variable` must be a tf\.Var"),
    ("weight", r"`variable` must be a tf\.Var"),
    (tf.Variable("text"), r"numbers.*string"),
  ],
)
def test_what_is_no_variable_of_numbers(variable: Any, words: str) -> None:
  with pytest.raises(TypeError, match=words):
    replica_state.values(variable)


def test_where_it_may_not_be_called() -> None:
  optimizer, weights = _simple("mirrored")
  calls = (
    lambda: replica_state.values(weights[0]),
    lambda: replica_state.average(optimizer, weights),
    lambda: replica_state.assert_in_sync(optimizer, weights),
    lambda: replica_state.save("/nowhere/a", optimizer, weights),
    lambda: replica_state.restore("/nowhere/a", optimizer, weights),
  )
  for call in calls:
    with pytest.raises(RuntimeError, match=r"eagerly.*between two steps"):
      tf.function(lambda call=call: call(), autograph=False)()
    with pytest.raises(RuntimeError, match=r"outside `strategy\.run`"):
      testbed.mirrored().run(lambda call=call: call() and None)


# ------------------------------------------------------------ save and restore


@everywhere
def test_a_restored_run_goes_on_to_the_bit(
  where: str, tmp_path: pathlib.Path
) -> None:
  """10 steps, saved, 10 more; against 10 more after restoring elsewhere."""
  strategy = STRATEGIES[where]()
  one = cases.Training(strategy, PAIRS, seed=1)
  one.steps(0, 10)
  saved = one.state()
  one.save(tmp_path / "a")
  assert not cases.same(saved, one.state())
  one.steps(10, 20)
  kernel = replica_state.group_values(one.model.variables[0], one.optimizer)
  assert (kernel[0] != kernel[1]).any()

  other = cases.Training(strategy, PAIRS, seed=2)
  other.steps(0, 3)
  assert len(cases.same(saved, other.state())) > 10
  other.restore(tmp_path / "a")
  assert not cases.same(saved, other.state())
  other.steps(10, 20)
  assert not cases.same(one.state(), other.state())
  replica_state.assert_in_sync(other.optimizer, other.model)
  [mean] = [v for v in one.model.variables if v.path.endswith("moving_mean")]
  first, second, *_ = replica_state.values(mean)
  assert (first != second).any()  # each replica's own, and restored


@everywhere
@pytest.mark.parametrize("groups", [[[2, 3], [0, 1]], [[0, 2], [3, 1]]])
def test_group_i_goes_to_group_i(
  where: str, groups: Any, tmp_path: pathlib.Path
) -> None:
  optimizer, weights = _simple(where)
  replica_state.save(tmp_path / "a", optimizer, weights)
  other, others = _simple(where, groups)
  for variable in [*others, *other.variables]:
    variable.assign(tf.zeros_like(variable))
  replica_state.restore(tmp_path / "a", other, others)
  for variable in [*others, *other.variables]:
    found = replica_state.values(variable)
    for index, members in enumerate(groups):
      for replica in members:
        assert (found[replica] == 10 * index + 10).all(), (variable, replica)


def test_from_one_strategy_to_another(tmp_path: pathlib.Path) -> None:
  """Mirrored to virtual, and to groups of another size."""
  optimizer, weights = _simple("mirrored")
  replica_state.save(tmp_path / "a", optimizer, weights)
  other, others = _simple("virtual", [[3, 0], [1, 2]])
  replica_state.restore(tmp_path / "a", other, others)
  expected = [[10.0] * 2, [20.0] * 2, [20.0] * 2, [10.0] * 2]
  assert _lists(replica_state.values(others[0])) == expected
  with testbed.virtual(2).scope():
    weights = [
      tf.keras.Variable([0.0, 0.0], name="weight"),
      tf.Variable(0.0, name="scale"),
    ]
    small = CrossShardOptimizer(
      tf.keras.optimizers.SGD(momentum=0.5), group_assignment=[[1], [0]]
    )
    small.build(weights)
  replica_state.restore(tmp_path / "a", small, weights)
  assert _lists(replica_state.values(weights[0])) == [[20.0] * 2, [10.0] * 2]


def test_once_per_group_and_not_per_replica(tmp_path: pathlib.Path) -> None:
  sizes = []
  for groups in ([[0, 1, 2, 3]], PAIRS, [[0], [1], [2], [3]]):
    strategy = testbed.virtual(N)
    with strategy.scope():
      weight = tf.keras.Variable(np.zeros([100_000]), dtype="float32")
      optimizer = CrossShardOptimizer("sgd", group_assignment=groups)
      optimizer.build([weight])
    replica_state.save(tmp_path / "a", optimizer, [weight])
    sizes.append((tmp_path / "a").stat().st_size // 400_000)
  assert sizes == [1, 2, 4]


def test_what_members_have_of_their_own(tmp_path: pathlib.Path) -> None:
  """In the file once per member, and only that."""
  training = cases.Training(testbed.mirrored(), PAIRS, seed=1)
  training.steps(0, 2)
  training.save(tmp_path / "a")
  with archive.reading(tmp_path / "a") as found:
    own = {n.split("/", 2)[2] for n in found if "/member_" in n}
    shared = [n for n in found if "/member_" not in n]
  assert {n.rpartition("/")[2] for n in own} == {
    "moving_mean",
    "moving_variance",
  }
  assert len(set(shared)) % 2 == 0
  one_group = cases.Training(testbed.virtual(2), [[0], [1]], seed=1)
  with pytest.raises(
    replica_state.CheckpointError,
    match=r"moving_mean` for each of 2 members.*groups have 1",
  ):
    one_group.restore(tmp_path / "a")


def test_metrics_are_not_saved(tmp_path: pathlib.Path) -> None:
  training = cases.Training(testbed.virtual(2), [[0], [1]], seed=1)
  with training.strategy.scope():
    training.model.compile("sgd", "mse", metrics=["mae"])
  training.model.evaluate(np.ones([4, 4]), np.ones([4, 2]), verbose=0)
  assert training.model.metrics_variables
  training.save(tmp_path / "a")
  with archive.reading(tmp_path / "a") as found:
    names = found.about["names"]
  kinds = {name.rpartition("/")[2] for name in names}
  assert {"kernel", "seed_generator_state", "moving_mean"} <= kinds
  assert {"iteration", "learning_rate", "velocity"} <= kinds
  assert not {"total", "count"} & kinds


def test_the_names_are_those_of_another_program_too(
  tmp_path: pathlib.Path,
) -> None:
  """Keras counts layers: the second model's are called dense_2, dense_3."""
  names = []
  for _ in range(2):
    training = cases.Training(testbed.virtual(2), None, seed=1)
    training.save(tmp_path / "a")
    with archive.reading(tmp_path / "a") as found:
      names.append(found.about["names"])
  assert names[0] == names[1]
  assert len(set(names[0])) == len(names[0]) > 10
  assert "model/sequential/dense_1/kernel" in names[0]
  assert "optimizer/adam/sequential/dense_1/kernel/velocity" in names[0]


def test_each_variable_once(tmp_path: pathlib.Path) -> None:
  """Also one that is in optimizer and model; arrays by group and member."""
  with testbed.mirrored().scope():
    trained = tf.Variable([0.0, 0.0], name="trained")
    other = tf.Variable([0.0], name="other", trainable=False)
    optimizer = CrossShardOptimizer("sgd", group_assignment=[[3, 1], [0, 2]])
    optimizer.build([trained])
  cases.spread(trained, [[2.0] * 2, [1.0] * 2, [2.0] * 2, [1.0] * 2])
  cases.spread(other, [[5.0], [6.0], [7.0], [8.0]])
  model = [trained, other, trained, optimizer.iterations.value]
  replica_state.save(tmp_path / "a", optimizer, model)
  with archive.reading(tmp_path / "a") as found:
    arrays = {name: found[name].tolist() for name in found}
  assert {n: a for n, a in arrays.items() if "model/" in n} == {
    "group_0/model/trained": [1.0, 1.0],
    "group_1/model/trained": [2.0, 2.0],
    "group_0/member_0/model/other": [8.0],
    "group_0/member_1/model/other": [6.0],
    "group_1/member_0/model/other": [5.0],
    "group_1/member_1/model/other": [7.0],
  }
  assert {n for n in arrays if n.startswith("group_1/optimizer")} == {
    "group_1/optimizer/sgd/iteration",
    "group_1/optimizer/sgd/learning_rate",
  }


# ----------------------------------------------------------- what is not right


def _assert_refused(
  optimizer: Any, weights: Any, path: Any, words: str
) -> None:
  """A `CheckpointError` with these words, and nothing changed."""
  variables = [*(weights or []), *optimizer.variables]
  before = [testbed.copies(variable) for variable in variables]
  with pytest.raises(replica_state.CheckpointError, match=words) as info:
    replica_state.restore(path, optimizer, weights)
  assert isinstance(info.value, ValueError)
  assert str(path) in str(info.value)
  after = [testbed.copies(variable) for variable in variables]
  for mine, then in zip(before, after, strict=True):
    assert [a.tobytes() for a in mine] == [a.tobytes() for a in then]


def test_another_number_of_groups(tmp_path: pathlib.Path) -> None:
  optimizer, weights = _simple("mirrored")
  replica_state.save(tmp_path / "a", optimizer, weights)
  for groups in ([[0, 1, 2, 3]], [[0], [1], [2], [3]]):
    other, others = _simple("mirrored", groups)
    words = (
      r"holds 2 groups, \[\[0, 1\], \[2, 3\]\]; the optimizer has"
      rf" {len(groups)}, .*as many groups"
    )
    _assert_refused(other, others, tmp_path / "a", words)


def test_another_model_or_optimizer(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a"
  optimizer, weights = _simple("mirrored")
  replica_state.save(path, optimizer, weights)
  for chosen, words in (
    ([], "has, and the program has not, model/weight, model/scale.*given then"),
    (weights[:1], "has, and the program has not, model/scale"),
  ):
    _assert_refused(optimizer, chosen or None, path, words)
  with testbed.mirrored().scope():
    others = {
      "lacks model/extra": tf.keras.Variable(0.0, name="extra"),
      r"`model/scale` as float32 \[\]; .* float32 \[3\]": tf.keras.Variable(
        [0.0] * 3, name="scale"
      ),
      r"`model/scale` as float32 \[\]; .* float16 \[\]": tf.keras.Variable(
        0.0, name="scale", dtype="float16"
      ),
    }
  for words, variable in others.items():
    same_name = variable.name == "scale"
    chosen = [weights[0], *([] if same_name else weights[1:]), variable]
    _assert_refused(optimizer, chosen, path, words)
  adam, others = _simple("mirrored", make=tf.keras.optimizers.Adam)
  _assert_refused(
    adam, others, path, "lacks optimizer/adam/iteration, .* and 1 more"
  )
  replica_state.save(path, optimizer)
  _assert_refused(
    optimizer, weights, path, "lacks model/weight, model/scale.*None then"
  )


def test_damaged_files(tmp_path: pathlib.Path) -> None:
  """Each byte of a file is in archive_test.py."""
  path = tmp_path / "a"
  optimizer, weights = _simple("mirrored")
  replica_state.save(path, optimizer, weights)
  data = path.read_bytes()
  flipped = bytearray(data)
  flipped[data.index(np.full(2, 20, "float32").tobytes())] ^= 4
  for damaged in (bytes(flipped), data[:-1], data[: len(data) // 2], b""):
    path.write_bytes(damaged)
    _assert_refused(optimizer, weights, path, "is damaged.*Nothing was changed")
  archive.write(path, {"x": np.zeros(2)}, {})
  _assert_refused(optimizer, weights, path, "holds something else")
  path.write_bytes(data)
  replica_state.restore(path, optimizer, weights)


def test_a_read_error_changes_nothing(tmp_path: pathlib.Path) -> None:
  """Also when the last array cannot be read: all are read before."""
  optimizer, weights = _simple("mirrored")
  path = tmp_path / "a"
  replica_state.save(path, optimizer, weights)
  for variable in weights:
    variable.assign(tf.ones_like(variable))
  real = archive.Archive.__getitem__

  def read(file: Any, name: str) -> Any:
    if name == "group_1/model/scale":
      raise OSError(5, "Input/output error")
    return real(file, name)

  with (
    mock.patch.object(archive.Archive, "__getitem__", read),
    pytest.raises(OSError, match="Input/output"),
  ):
    replica_state.restore(path, optimizer, weights)
  assert _lists(replica_state.values(weights[0])) == [[1.0, 1.0]] * N
  with pytest.raises(FileNotFoundError, match="cannot be read"):
    replica_state.restore(tmp_path / "none", optimizer, weights)


def test_what_is_not_built_or_something_else(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a"
  optimizer, weights = _simple("mirrored")
  with testbed.mirrored().scope():
    fresh = CrossShardOptimizer("adam")
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
  with pytest.raises(ValueError, match=r"not built.*Call build\(model"):
    replica_state.save(path, fresh, weights)
  with pytest.raises(ValueError, match=r"`model` has no variables yet\. B"):
    replica_state.save(path, optimizer, model)
  with pytest.raises(TypeError, match="`optimizer` must be a Keras optimizer"):
    replica_state.save(path, "adam", weights)
  with pytest.raises(TypeError, match="`model` must have variables"):
    replica_state.save(path, optimizer, 3)
  with pytest.raises(TypeError, match="`path` must be"):
    replica_state.save(None, optimizer)
  with pytest.raises(ValueError, match="different strategies"):
    replica_state.save(path, optimizer, _simple("virtual")[1])
  assert not path.exists()


def test_a_variable_that_exists_once(tmp_path: pathlib.Path) -> None:
  """It is every group's; it cannot receive two values."""
  optimizer, weights = _simple("mirrored")
  outside = tf.Variable([4.0, 4.0], name="weight")
  path = tmp_path / "a"
  replica_state.save(path, optimizer, [outside, weights[1]])
  outside.assign([0.0, 0.0])
  replica_state.restore(path, optimizer, [outside, weights[1]])
  assert outside.numpy().tolist() == [4.0, 4.0]
  replica_state.save(path, optimizer, weights)
  _assert_refused(
    optimizer, [outside, weights[1]], path, "`model/weight`.*exists once"
  )


# ------------------------------------------------------------ average, compare


@everywhere
@pytest.mark.parametrize("slots", [False, True])
def test_average(where: str, slots: bool) -> None:
  optimizer, weights = _simple(where)
  with STRATEGIES[where]().scope():
    count = tf.Variable(3, trainable=False, name="count")
    half = tf.Variable([1.0], dtype=tf.bfloat16, name="half")
  cases.spread(count, [1, 2, 3, 4])
  cases.spread(half, [np.array([2.0**i], ml_dtypes.bfloat16) for i in range(4)])
  model = [*weights, count, half]
  cases.spread(weights[1], [1.0, 2.0, 4.0, 8.0])
  replica_state.average(optimizer, model, slots=slots)
  assert _lists(replica_state.values(weights[0])) == [[15.0, 15.0]] * N
  assert _lists(replica_state.values(weights[1])) == [3.75] * N
  assert _lists(replica_state.values(half)) == [[3.75]] * N
  assert _lists(replica_state.values(count)) == [1, 2, 3, 4]
  momentum = replica_state.values(optimizer.get_slot(weights[0], "momentum"))
  assert momentum[0].tolist() == ([15.0] * 2 if slots else [10.0] * 2)
  assert momentum[3].tolist() == ([15.0] * 2 if slots else [20.0] * 2)
  for own in (optimizer.iterations, optimizer.learning_rate):
    assert _lists(replica_state.values(own)) == [10, 10, 20, 20]


def test_averages_have_the_same_bits_everywhere() -> None:
  """Added in replica order, in float64: not what tf.distribute would do."""
  # In float32 the ones are lost, in any order but from the last.
  arrays = np.float32([[2.0**24, 0.1], [1.0, 0.2], [1.0, 0.3], [1.0, 0.7]])
  total = np.zeros(2)
  for array in arrays:
    total = total + array
  expected = (total / N).astype("float32")
  assert expected[0] > 2.0**22
  for where in STRATEGIES:
    optimizer, weights = _simple(where)
    cases.spread(weights[0], arrays)
    replica_state.average(optimizer, weights)
    for found in replica_state.values(weights[0]):
      assert found.tobytes() == expected.tobytes()


def test_slots_of_an_optimizer_that_has_none_to_name() -> None:
  weight = tf.Variable(1.0)
  plain = tf.keras.optimizers.SGD()
  plain.build([weight])
  replica_state.average(plain, [weight])
  with pytest.raises(ValueError, match="`slots` needs a CrossShardOptimizer"):
    replica_state.average(plain, [weight], slots=True)


def test_members_that_are_not_equal(tmp_path: pathlib.Path) -> None:
  optimizer, weights = _simple("mirrored")
  replica_state.assert_in_sync(optimizer, weights)
  cases.spread(weights[0], [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.25, -4.0]])
  with pytest.raises(
    AssertionError,
    match=r"`model/weight` differs within group 1 \[2, 3\] at assert_in_sync:"
    r" replicas 2 and 3 differ by up to 8\. Members",
  ) as info:
    replica_state.assert_in_sync(optimizer, weights)
  assert isinstance(info.value, replica_state.OutOfSyncError)
  with pytest.raises(replica_state.OutOfSyncError, match="at saving a:"):
    replica_state.save(tmp_path / "a", optimizer, weights)
  assert not (tmp_path / "a").exists()
  replica_state.assert_in_sync(optimizer)
  cases.spread(optimizer.iterations, [0, 1, 0, 0])
  with pytest.raises(
    AssertionError,
    match=r"`optimizer/sgd/iteration` differs within group 0 .* up to 1\."
    " So do 1 more",
  ):
    replica_state.assert_in_sync(optimizer, weights)
  replica_state.average(optimizer, weights)
  cases.spread(optimizer.iterations, [0, 0, 1, 1])
  replica_state.assert_in_sync(optimizer, weights)


@pytest.mark.parametrize(
  ("bits", "words"),
  [
    ([0x7FC00001, 0x7FC00001], None),
    ([0x7FC00001, 0x7FC00002], "differ in bits only"),
    ([0x00000000, 0x80000000], "differ in bits only"),
    ([0x7FC00000, 0x3F800000], "and in 1 NaN"),
    ([0x7F800000, 0x3F800000], "up to inf"),
  ],
)
def test_bits_are_compared(bits: list[int], words: str | None) -> None:
  optimizer, weights = _simple("mirrored")
  pair = [np.array(one, "uint32").view("float32") for one in bits]
  cases.spread(weights[1], pair + [np.float32(1.0)] * 2)
  if words is None:
    replica_state.assert_in_sync(optimizer, weights)
    return
  with pytest.raises(replica_state.OutOfSyncError, match=re.escape(words)):
    replica_state.assert_in_sync(optimizer, weights)


@pytest.mark.parametrize(
  ("one", "other", "words"),
  [
    ([True], [False], "differ by up to 1"),
    ([3 + 4j], [0j], "differ by up to 5"),
    ([np.nan, 2.0], [np.nan, 1.0], "differ by up to 1"),
  ],
)
def test_differences_in_words(one: Any, other: Any, words: str) -> None:
  found = group_state._apart_by(np.array(one), np.array(other))
  assert found == words


def test_what_is_not_trained_may_differ() -> None:
  training = cases.Training(testbed.mirrored(), PAIRS, seed=1)
  training.steps(0, 2)
  replica_state.assert_in_sync(training.optimizer, training.model)
  kernel = training.model.trainable_variables[0]
  mine = testbed.copies(kernel)
  mine[1] = mine[1] + 1.0
  cases.spread(kernel, mine)
  with pytest.raises(AssertionError, match="dense/kernel` differs within gro"):
    replica_state.assert_in_sync(training.optimizer, training.model)


# ---------------------------------------------------- optimizers of other kinds


def test_a_loss_scale_optimizer_around(tmp_path: pathlib.Path) -> None:
  sharded, weights = _simple("mirrored")
  with testbed.mirrored().scope():
    scaled = tf.keras.optimizers.LossScaleOptimizer(sharded)
    scaled.build(weights)
  cases.spread(scaled.dynamic_scale, [4.0, 4.0, 8.0, 8.0])
  cases.spread(scaled.step_counter, [1, 1, 2, 2])
  replica_state.save(tmp_path / "a", scaled, weights)
  for variable in [*scaled.variables, *weights]:
    variable.assign(tf.zeros_like(variable))
  replica_state.restore(tmp_path / "a", scaled, weights)
  found = replica_state.values(scaled.dynamic_scale)
  assert _lists(found) == [4.0, 4.0, 8.0, 8.0]
  assert _lists(replica_state.values(scaled.step_counter)) == [1, 1, 2, 2]
  assert _lists(replica_state.values(sharded.iterations)) == [10, 10, 20, 20]
  assert _lists(replica_state.group_values(weights[1], scaled)) == [10.0, 20.0]
  replica_state.average(scaled, weights, slots=True)
  found = replica_state.values(sharded.get_slot(weights[0], "momentum"))
  assert _lists(found) == [[15.0, 15.0]] * N


def test_a_plain_optimizer_has_one_group(tmp_path: pathlib.Path) -> None:
  with testbed.mirrored().scope():
    weight = tf.keras.Variable([1.0, 2.0], name="weight")
    plain = tf.keras.optimizers.Adam()
    plain.build([weight])
    sharded = CrossShardOptimizer(tf.keras.optimizers.Adam())
    sharded.build([weight])
  replica_state.save(tmp_path / "a", plain, [weight])
  weight.assign([0.0, 0.0])
  replica_state.restore(tmp_path / "a", sharded, [weight])
  assert _lists(replica_state.values(weight)) == [[1.0, 2.0]] * N
  cases.spread(weight, [[1.0, 2.0]] * 3 + [[1.0, 3.0]])
  with pytest.raises(AssertionError, match=r"group 0 \[0, 1, 2, 3\].*up to 1"):
    replica_state.assert_in_sync(plain, [weight])


_optimizers = tf.keras.optimizers


@pytest.mark.parametrize(
  "make",
  [
    functools.partial(
      _optimizers.SGD,
      momentum=0.5,
      use_ema=True,
      gradient_accumulation_steps=2,
    ),
    _optimizers.Nadam,  # with a variable that nobody named
    _optimizers.Adafactor,  # with many of one name
  ],
)
def test_all_state_of_optimizers(make: Any, tmp_path: pathlib.Path) -> None:
  """What is saved is all that the optimizer goes on with."""
  made = []
  for seed in (1, 2):
    training = cases.Training(
      testbed.virtual(2),
      [[0], [1]],
      seed,
      make,
      with_own_state=False,
    )
    training.steps(0, seed)
    made.append(training)
  one, other = made
  assert cases.same(one.state(), other.state())
  one.save(tmp_path / "a")
  other.restore(tmp_path / "a")
  assert not cases.same(one.state(), other.state())
  one.steps(5, 7)
  other.steps(5, 7)
  assert not cases.same(one.state(), other.state())


@pytest.mark.parametrize(
  ("where", "kind"),
  [("mirrored", "loss scale"), ("virtual", "new"), ("virtual", "older")],
)
def test_optimizers_of_tf_keras(
  where: str, kind: str, tmp_path: pathlib.Path
) -> None:
  """Beside Keras 3; with a learning rate that changed, and skipped steps."""
  library = pytest.importorskip("tf_keras")
  sharded = importlib.import_module("tf_cross_shard.tf_keras")

  def make(rate: float) -> Any:
    if kind == "older":
      return library.optimizers.legacy.Adam(rate)
    adam = library.optimizers.Adam(rate)
    if kind == "loss scale":
      return library.mixed_precision.LossScaleOptimizer(
        adam, initial_scale=4.0, dynamic_growth_steps=3
      )
    return adam

  made = []
  for seed in (1, 2):
    training = cases.Training(
      STRATEGIES[where](),
      PAIRS,
      seed,
      make,
      with_own_state=False,
      library=library,
      wrapper=functools.partial(
        sharded.CrossShardOptimizer, skip_nonfinite=True
      ),
    )
    training.steps(0, 2 * seed)
    made.append(training)
  one, other = made
  one.optimizer.learning_rate = 0.25
  skipped = one.optimizer.skipped_steps
  cases.spread(skipped, [1, 1, 3, 3])
  one.save(tmp_path / "a")
  other.restore(tmp_path / "a")
  found = replica_state.values(other.optimizer.skipped_steps)
  assert _lists(found) == [1, 1, 3, 3]
  assert float(tf.convert_to_tensor(other.optimizer.learning_rate)) == 0.25
  one.steps(5, 8)
  other.steps(5, 8)
  assert not cases.same(one.state(), other.state())
  replica_state.average(other.optimizer, other.model, slots=True)
  [kernel, *_] = other.model.trainable_variables
  slot = other.optimizer.get_slot(kernel, "m")
  for variable in (kernel, slot):
    bits = [value.tobytes() for value in replica_state.values(variable)]
    assert len(bits) == N
    assert len(set(bits)) == 1


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
