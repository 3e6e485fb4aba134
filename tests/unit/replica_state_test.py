"""Values of replicas and groups: read, saved, restored, averaged, compared.

In one process; several workers are in replica_state_workers_test.py.
"""
# bazel: size=large timeout=long

import functools
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import (
  CrossShardOptimizer,
  keras3,
  replica_state,
  tf_keras,
)
from tf_cross_shard.replica_state import archive, group_state, replica_values

N = testbed.REPLICAS
PAIRS = [[0, 1], [2, 3]]
STRATEGIES = {
  **testbed.STRATEGIES,
  "pair": lambda: testbed.virtual(2),
}
ALONE: dict[str, Callable[[], Any]] = {
  "none": tf.distribute.get_strategy,
  "one device": functools.partial(tf.distribute.OneDeviceStrategy, "CPU:1"),
  "one mirrored": functools.partial(tf.distribute.MirroredStrategy, ["CPU:0"]),
}
everywhere = pytest.mark.parametrize("where", ["mirrored", "virtual"])


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
    assert len(groups) * len(members) == (2 if where == "pair" else N)
    for variable in [*weights, *sharded.variables]:
      copies = testbed.copies(variable)
      for replica in members:
        copies[replica] = np.full_like(copies[replica], 10 * index + 10)
      cases.spread(variable, copies)
  return sharded, weights


# ----------------------------------------------------------------------- values


@pytest.mark.parametrize(
  ("where", "dtype"),
  [
    ("mirrored", "float32"),
    ("virtual", "float32"),
    ("mirrored", "bfloat16"),
    ("virtual", "bfloat16"),
    ("mirrored", "bool"),
  ],
)
def test_values_are_bits_and_copies(where: str, dtype: str) -> None:
  """Of each replica; kinds of NaN and the signs of zeros among them."""
  kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
  bits = [[0xFF, 0xFF, 0xFF, 0x7F - i] * 2 + [0] * 3 + [128] for i in range(N)]
  mine = [np.array(each, "uint8").view(kind) for each in bits]
  if dtype == "bool":
    mine = [np.array([True, i > 1]) for i in range(N)]
  with STRATEGIES[where]().scope():
    variable = tf.Variable(mine[0], trainable=False)
  cases.spread(variable, mine)
  expected = [array.tobytes() for array in mine]
  assert len(set(expected)) > 1
  for _ in range(2):
    found = replica_state.values(variable)
    assert [array.dtype for array in found] == [kind] * N
    assert [array.tobytes() for array in found] == expected
    for array in found:
      array[:] = 1


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


def test_group_values_are_in_the_order_of_groups() -> None:
  optimizer, [weight, _] = _simple("mirrored")
  other, _ = _simple("mirrored", [[3], [2], [1], [0]])
  slot = optimizer.get_slot(weight, "momentum")
  alone = tf.Variable([3.0])
  found = replica_state.group_values(weight, other)
  assert _lists(found) == [[20.0] * 2, [20.0] * 2, [10.0] * 2, [10.0] * 2]
  found = replica_state.group_values(slot, optimizer)
  assert _lists(found) == [[10.0] * 2, [20.0] * 2]
  assert _lists(replica_state.values(slot)) == [
    *([[10.0] * 2] * 2),
    *([[20.0] * 2] * 2),
  ]
  plain = tf.keras.optimizers.SGD()
  assert _lists(replica_state.group_values(weight, plain)) == [[10.0, 10.0]]
  with testbed.mirrored().scope():  # made outside of any, it exists once
    assert _lists(replica_state.values(alone)) == [[3.0]]
    assert _lists(replica_state.group_values(alone, optimizer)) == [[3.0]] * 2
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
    lambda: replica_state.restore("/nowhere/a", optimizer, weights),
  )
  for call in calls:
    with pytest.raises(RuntimeError, match=r"eagerly.*between two steps"):
      tf.function(lambda call=call: call(), autograph=False)()
    with pytest.raises(RuntimeError, match=r"outside `strategy\.run`"):
      testbed.mirrored().run(lambda call=call: call() and None)


# ------------------------------------------------------------ save and restore


def _older(library: Any) -> Any:
  return library.optimizers.legacy.Adam


def _scaled(library: Any) -> Any:
  return lambda rate: library.mixed_precision.LossScaleOptimizer(
    library.optimizers.Adam(rate), initial_scale=4.0, dynamic_growth_steps=3
  )


def _accumulating(library: Any) -> Any:
  return functools.partial(
    library.optimizers.SGD,
    momentum=0.5,
    use_ema=True,
    gradient_accumulation_steps=2,
  )


@pytest.mark.parametrize(
  ("where", "package", "make"),
  [
    ("mirrored", keras3, lambda library: library.optimizers.Adam),
    ("virtual", keras3, lambda library: library.optimizers.Adam),
    ("pair", keras3, _accumulating),
    ("mirrored", tf_keras, _scaled),
    ("virtual", tf_keras, _older),
  ],
)
def test_a_restored_run_goes_on_to_the_bit(
  where: str, package: Any, make: Any, tmp_path: pathlib.Path
) -> None:
  """10 steps, saved, 5 more; against 5 more after restoring elsewhere.

  What is saved is all that the optimizer goes on with; also a learning rate
  that changed, and skipped steps.
  """
  strategy = STRATEGIES[where]()
  groups = [[0], [1]] if where == "pair" else PAIRS
  # The random numbers of tf_keras are not variables of the model.
  has_own = package is keras3 and where != "pair"
  source, target = (
    cases.Training(
      strategy,
      groups,
      seed,
      make(package.keras),
      with_own_state=has_own,
      library=package.keras,
      wrapper=functools.partial(
        package.CrossShardOptimizer, skip_nonfinite=True
      ),
    )
    for seed in (1, 2)
  )
  source.steps(0, 10)
  target.steps(0, 3)
  cases.spread(
    source.optimizer.skipped_steps,
    [source.optimizer.groups.index_of(r) + 1 for r in range(source.replicas)],
  )
  source.optimizer.learning_rate = 0.25
  saved = source.state()
  source.save(tmp_path / "a")
  assert not cases.same(saved, source.state())
  assert len(cases.same(saved, target.state())) > (10 if has_own else 4)
  target.restore(tmp_path / "a")
  assert not cases.same(saved, target.state())
  counts = replica_state.group_values(
    target.optimizer.skipped_steps, target.optimizer
  )
  assert _lists(counts) == [1, 2]
  assert float(tf.convert_to_tensor(target.optimizer.learning_rate)) == 0.25
  for training in (source, target):
    training.steps(10, 15)
  assert not cases.same(source.state(), target.state())
  replica_state.assert_in_sync(target.optimizer, target.model)
  [kernel, *_] = target.model.trainable_variables
  first, second = replica_state.group_values(kernel, target.optimizer)
  assert (first != second).any()
  for mean in target.model.variables:
    if "moving_mean" in mean.name:
      first, second, *_ = replica_state.values(mean)
      assert (first != second).any()  # each replica's own, and restored
  if package is tf_keras:
    replica_state.average(target.optimizer, target.model, slots=True)
    for variable in (kernel, target.optimizer.get_slot(kernel, "m")):
      bits = [value.tobytes() for value in replica_state.values(variable)]
      assert len(bits) == N
      assert len(set(bits)) == 1


@pytest.mark.parametrize(
  ("source", "where", "groups"),
  [
    ("mirrored", "mirrored", [[2, 3], [0, 1]]),
    ("mirrored", "virtual", [[3, 0], [1, 2]]),
    ("virtual", "virtual", [[0, 2], [3, 1]]),
    ("mirrored", "pair", [[1], [0]]),
  ],
)
def test_group_i_goes_to_group_i(
  source: str, where: str, groups: Any, tmp_path: pathlib.Path
) -> None:
  optimizer, weights = _simple(source)
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


def test_what_is_in_the_file(tmp_path: pathlib.Path) -> None:
  """Each variable once per group, by a name that numbers do not change.

  Keras counts layers: the second model's are called dense_2, dense_3.
  """
  names = []
  for _ in range(2):
    training = cases.Training(testbed.virtual(N), PAIRS, seed=1)
    with training.strategy.scope():
      training.model.compile("sgd", "mse", metrics=["mae"])
    if not names:
      training.model.evaluate(np.ones([4, 4]), np.ones([4, 2]), verbose=0)
      assert training.model.metrics_variables
    training.save(tmp_path / "a")
    with archive.reading(tmp_path / "a") as found:
      names.append(sorted(found))
      said = found.about["names"]
  assert names[0] == names[1]
  assert len(set(said)) == len(said) > 10
  assert "model/sequential/dense_1/kernel" in said
  assert "optimizer/adam/sequential/dense_1/kernel/velocity" in said
  kinds = {name.rpartition("/")[2] for name in said}
  assert {"iteration", "learning_rate", "seed_generator_state"} <= kinds
  assert not {"total", "count"} & kinds
  assert len(names[0]) == 2 * len(said)


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
  assert {n: a for n, a in arrays.items() if "optimizer" not in n} == {
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


def _network(seed: int) -> Any:
  """What `cases.Training` trains, without a strategy."""
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      *(tf.keras.Input((4,)), layers.Dense(3)),
      layers.BatchNormalization(momentum=0.5),
      *(layers.Dropout(0.25, seed=seed), layers.Dense(2)),
    ]
  )


def test_one_group_of_a_file_without_replicas(tmp_path: pathlib.Path) -> None:
  """As `load_group` has it: to be served on one device."""
  path = tmp_path / "a"
  training = cases.Training(testbed.mirrored(), [[3, 1], [0, 2]], seed=1)
  training.steps(0, 2)
  training.save(path)
  plain = _network(seed=2)
  for i in (1, 0):
    right = replica_state.load_group(i, training.optimizer, training.model)
    assert replica_state.read_group(path, i, plain) is plain
    for variable, expected in zip(
      plain.variables, right.variables, strict=True
    ):
      np.testing.assert_array_equal(variable, expected)
    assert len(testbed.copies(plain.variables[0])) == 1
  before = plain.get_weights()
  other = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
  for index, model, words in (
    (2, plain, r"`group` must be an integer from 0 to 1; got 2"),
    (-1, plain, r"`group` must be .* got -1\. .*\[\[3, 1\], \[0, 2\]\]"),
    (None, plain, r"`group` must be"),
    (0, other, r"has, and the program has not, model/.*"),
    (0, [*plain.variables, tf.Variable(1.0, name="extra")], "lacks .*extra"),
    (0, [tf.Variable([0.0], name="kernel")], "lacks model/kernel"),
  ):
    with pytest.raises(replica_state.CheckpointError, match=words):
      replica_state.read_group(path, index, model)
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(replica_state.CheckpointError, match="is damaged"):
    replica_state.read_group(path, 0, plain)
  for array, same in zip(plain.get_weights(), before, strict=True):
    np.testing.assert_array_equal(array, same)


def test_restore_builds_the_optimizer(tmp_path: pathlib.Path) -> None:
  """On what a model trains, or on what can be trained of a list."""
  optimizer, weights = _simple("mirrored")
  replica_state.save(tmp_path / "a", optimizer, weights)
  training = cases.Training(testbed.mirrored(), PAIRS, seed=1)
  training.steps(0, 2)
  training.save(tmp_path / "b")
  for path, right, model in (
    ("a", optimizer, weights),
    ("b", training.optimizer, training.model),
  ):
    strategy = replica_values.strategy_of(right.iterations)
    assert strategy is not None
    with strategy.scope():
      momentum = tf.keras.optimizers.SGD(0.5, momentum=0.5)
      inner = momentum if path == "a" else tf.keras.optimizers.Adam(0.01)
      fresh = CrossShardOptimizer(inner, group_assignment=PAIRS)
    replica_state.restore(tmp_path / path, fresh, model)
    for variable, same in zip(fresh.variables, right.variables, strict=True):
      assert _lists(replica_state.values(variable)) == _lists(
        replica_state.values(same)
      )


@pytest.mark.parametrize("kind", ["ours", "rows", "shards", "Keras"])
def test_a_window_begins_anew_in_groups_of_another_size(
  kind: str, tmp_path: pathlib.Path
) -> None:
  """Sums of other members would count twice; of two calls one would do."""
  is_keras = kind == "Keras"

  def make(groups: Any) -> tuple[Any, Any, Callable[[], Any]]:
    strategy = testbed.mirrored(2 * len(groups[0]))
    with strategy.scope():
      weight = tf.Variable(tf.zeros([3, 1]), name="weight")
      optimizer = CrossShardOptimizer(
        tf.keras.optimizers.SGD(
          1.0, gradient_accumulation_steps=2 if is_keras else None
        ),
        "sum",
        group_assignment=groups,
        accumulate_steps=None if is_keras else 2,
        shard_update=kind == "shards",
      )
      optimizer.build([weight])
    grad: Any = tf.constant([[0.0], [1.0], [0.0]])
    if kind == "rows":
      grad = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1]), [3, 1])

    @tf.function
    def step() -> None:
      strategy.run(lambda: optimizer.apply_gradients([(grad, weight)]))

    return optimizer, weight, step

  path = tmp_path / "a"
  for before, after in (([[0], [1]], PAIRS), (PAIRS, [[0], [1]])):
    optimizer, weight, step = make(before)
    for _ in range(3):
      step()
    expected = -float(len(before[0]))
    assert testbed.copies(weight)[0][1, 0] == expected
    replica_state.save(path, optimizer, [weight])
    optimizer, weight, step = make(after)
    replica_state.restore(path, optimizer, [weight])
    step()
    assert testbed.copies(weight)[0][1, 0] == expected
    step()
    assert testbed.copies(weight)[0][1, 0] == expected - len(after[0])


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


def test_what_does_not_belong_to_the_program(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a"
  optimizer, weights = _simple("mirrored")
  first, scale = weights
  replica_state.save(path, optimizer, weights)
  singles = _simple("mirrored", [[0], [1], [2], [3]])
  adam = _simple("mirrored", make=tf.keras.optimizers.Adam)
  with testbed.mirrored().scope():
    extra = tf.keras.Variable(0.0, name="extra")
    longer = tf.keras.Variable([0.0] * 3, name="scale")
    half = tf.keras.Variable(0.0, name="scale", dtype="float16")
  outside = tf.Variable([4.0, 4.0], name="weight")
  kind = r"`model/scale` as float32 \[\]; .* "
  for other, chosen, words in (
    (*singles, r"2 groups, \[\[0, 1\], .* has 4, .*as many groups"),
    (*adam, "lacks optimizer/adam/iteration, .* and 1 more"),
    (optimizer, None, "has not, model/weight, model/scale.*given then"),
    (optimizer, [first], "has, and the program has not, model/scale"),
    (optimizer, [first, scale, extra], "lacks model/extra"),
    (optimizer, [first, longer], kind + r"float32 \[3\]"),
    (optimizer, [first, half], kind + r"float16 \[\]"),
    (optimizer, [outside, scale], "`model/weight`.*exists once"),
  ):
    _assert_refused(other, chosen, path, words)
  replica_state.save(path, optimizer)
  _assert_refused(optimizer, weights, path, "lacks model/weight.*None then")
  # What exists once is every group's.
  replica_state.save(path, optimizer, [outside, scale])
  outside.assign([0.0, 0.0])
  replica_state.restore(path, optimizer, [outside, scale])
  assert outside.numpy().tolist() == [4.0, 4.0]


def test_malformed_files(tmp_path: pathlib.Path) -> None:
  """Each byte of a file is in archive_test.py."""
  path = tmp_path / "a"
  optimizer, weights = _simple("mirrored")
  replica_state.save(path, optimizer, weights)
  data = path.read_bytes()
  with archive.reading(path) as found:
    about, arrays = dict(found.about), dict(found)
  archive.write(path, {"x": np.zeros(2)}, {})
  _assert_refused(optimizer, weights, path, "holds something else")
  path.write_bytes(data[:-1])
  _assert_refused(optimizer, weights, path, "is damaged.*Nothing was changed")
  for wrong in ({"group_assignment": 3}, {"names": None}):
    archive.write(path, arrays, {**about, **wrong})
    _assert_refused(optimizer, weights, path, "is damaged.*Nothing was changed")
  # Of the last group alone: all is read before anything is changed.
  for wrong, words in (
    (np.zeros([3], "float32"), r"float32 \[3\]; the program has float32 \[2\]"),
    (np.zeros([2], "float64"), "as float64"),
  ):
    archive.write(path, {**arrays, "group_1/model/weight": wrong}, about)
    _assert_refused(optimizer, weights, path, words)
  del arrays["group_1/model/scale"]
  archive.write(path, arrays, about)
  _assert_refused(optimizer, weights, path, "is damaged.*group_1/model/scale")
  path.write_bytes(data)
  real = archive.Archive.__getitem__

  def read(file: Any, name: str) -> Any:
    if name == "group_1/model/scale":
      raise OSError(5, "Input/output error")
    return real(file, name)

  weights[0].assign([1.0, 1.0])
  with (
    mock.patch.object(archive.Archive, "__getitem__", read),
    pytest.raises(OSError, match="Input/output"),
  ):
    replica_state.restore(path, optimizer, weights)
  assert _lists(replica_state.values(weights[0])) == [[1.0, 1.0]] * N
  replica_state.restore(path, optimizer, weights)
  found = replica_state.group_values(weights[0], optimizer)
  assert _lists(found) == [[10.0, 10.0], [20.0, 20.0]]


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
  with pytest.raises(TypeError, match="not iterable"):
    replica_state.save(path, optimizer, 3)
  with pytest.raises(TypeError, match="`path` must be"):
    replica_state.save(None, optimizer)
  with pytest.raises(ValueError, match="different strategies"):
    replica_state.save(path, optimizer, _simple("virtual")[1])
  assert not path.exists()


# ------------------------------------------------------------ average, compare


@pytest.mark.parametrize(
  ("where", "slots"), [("mirrored", True), ("virtual", False)]
)
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


def test_means_are_added_in_order_in_float64() -> None:
  """So that they have the same bits everywhere, as tf.distribute's have not."""
  # In float32 the ones are lost, in any order but from the last.
  arrays = np.float32([[2.0**24, 0.1], [1.0, 0.2], [1.0, 0.3], [1.0, 0.7]])
  total = np.zeros(2)
  for array in arrays:
    total = total + array
  expected = (total / N).astype("float32")
  assert expected[0] > 2.0**22
  assert group_state.mean(list(arrays)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_means_of_large_values_do_not_overflow(dtype: str) -> None:
  kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
  largest = tf.as_dtype(dtype).max
  rows = np.array(
    [
      [largest, largest, 1.0, np.inf],
      [largest, -largest, 2.0, 1.0],
      [largest, largest, 2.0, 1.0],
      [largest, -largest, 3.0, 1.0],
    ]
  ).astype(kind)
  expected = np.array([largest, 0.0, 2.0, np.inf]).astype(kind)
  assert group_state.mean(list(rows)).tobytes() == expected.tobytes()


class _Dicts(tf.keras.optimizers.SGD):  # type: ignore[misc]
  """Keeps slots in dicts, in three of the ways that there are."""

  def build(self, variables: Any) -> None:
    super().build(variables)
    new = self.add_variable_from_reference
    self._slots = {"trace": [new(v, "trace") for v in variables]}
    self._by_path = {v.path: new(v, "seen") for v in variables[:1]}
    self._by_key = {
      self._var_key(v): {"a": new(v), "b": new(v)} for v in variables
    }


def test_average_reaches_slots_in_dicts() -> None:
  with testbed.mirrored().scope():
    weights = [tf.keras.Variable([0.0], name=name) for name in ("a", "a_b")]
    optimizer = CrossShardOptimizer(_Dicts(0.5), group_assignment=PAIRS)
    optimizer.build(weights)
  slots = [v for v in optimizer.variables if v.shape == (1,)]
  assert len(slots) == 2 + 1 + 4
  for slot in slots:
    cases.spread(slot, [[10.0], [10.0], [20.0], [20.0]])
  names = [*optimizer.get_slot_names()]
  assert names == ["trace", "seen", "var", "var#2"]
  assert optimizer.get_slot(weights[1], "seen") is None
  replica_state.average(optimizer, weights[1:], slots=True)
  mine = [optimizer.get_slot(weights[1], n) for n in ("trace", "var", "var#2")]
  for slot in slots:
    is_mine = any(slot is each for each in mine)
    expected = [15.0] * N if is_mine else [10.0, 10.0, 20.0, 20.0]
    assert [float(v[0]) for v in replica_state.values(slot)] == expected


@pytest.mark.parametrize("is_within", [True, False])
def test_average_reaches_slots_of_a_multi_optimizer(
  is_within: bool, tmp_path: pathlib.Path
) -> None:
  """One that is encapsulated, and one around several that encapsulate."""
  optimizers = tf.keras.optimizers
  if not hasattr(optimizers, "MultiOptimizer"):
    pytest.skip("this Keras has no MultiOptimizer")
  outer, inner = (
    functools.partial(CrossShardOptimizer, group_assignment=PAIRS),
    lambda optimizer: optimizer,
  )[:: 1 if is_within else -1]
  with testbed.mirrored().scope():
    weights = [tf.keras.Variable([0.0], name=name) for name in "ab"]
    optimizer = outer(
      optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
          inner(optimizers.SGD(0.5, momentum=0.5)),
          {"b": inner(optimizers.Adam(0.5))},
        )
      )
    )
    optimizer.build(weights)
  slots = [v for v in optimizer.variables if v.shape == (1,)]
  assert len(slots) == 1 + 2
  for variable in (*slots, *weights):
    cases.spread(variable, [[10.0], [10.0], [20.0], [20.0]])
  replica_state.save(tmp_path / "a", optimizer, weights)
  replica_state.average(optimizer, weights, slots=True)
  for variable in (*slots, *weights):
    assert _lists(replica_state.values(variable)) == [[15.0]] * N
  replica_state.restore(tmp_path / "a", optimizer, weights)
  for variable in (*slots, *weights):
    found = replica_state.group_values(variable, optimizer)
    assert _lists(found) == [[10.0], [20.0]]


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


def test_bits_are_compared() -> None:
  optimizer, weights = _simple("mirrored")
  for bits, words in (
    ([0x7FC00001, 0x7FC00001], None),
    ([0x7FC00001, 0x7FC00002], "differ in bits only"),
    ([0x00000000, 0x80000000], "differ in bits only"),
    ([0x7F800000, 0x3F800000], "differ by up to inf"),
  ):
    pair = [np.array(one, "uint32").view("float32") for one in bits]
    cases.spread(weights[1], pair + [np.float32(1.0)] * 2)
    if words is None:
      replica_state.assert_in_sync(optimizer, weights)
    else:
      with pytest.raises(replica_state.OutOfSyncError, match=words):
        replica_state.assert_in_sync(optimizer, weights)


# ---------------------------------------------------- optimizers of other kinds


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
  with pytest.raises(ValueError, match="`slots` needs a CrossShardOptimizer"):
    replica_state.average(plain, [weight], slots=True)
  cases.spread(weight, [[1.0, 2.0]] * 3 + [[1.0, 3.0]])
  with pytest.raises(AssertionError, match=r"group 0 \[0, 1, 2, 3\].*up to 1"):
    replica_state.assert_in_sync(plain, [weight])
  replica_state.average(plain, [weight])
  replica_state.assert_in_sync(plain, [weight])


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
