"""Tests files of `Models`: restored training has the same bits.

In one process; several workers are in multi_worker_replicas_test.py.
"""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as tf_keras_library

from tests.support import replica_state_cases as cases
from tests.support import testbed, training
from tf_cross_shard import (
  CrossShardOptimizer,
  Models,
  VectorizedStrategy,
  keras3,
  models,
  tf_keras,
)


def _read(path: pathlib.Path) -> tuple[dict[str, np.ndarray], Any]:
  """Returns the arrays in a file of `save`, and what it says about itself."""
  with np.load(path, allow_pickle=False) as file:
    arrays = dict(file)
  return arrays, json.loads(str(arrays.pop("about")))


def _write(
  path: pathlib.Path, arrays: dict[str, np.ndarray], about: Any
) -> None:
  """Writes a file with these arrays, as `save` writes it."""
  dtypes = {name: array.dtype.name for name, array in arrays.items()}
  text = np.array(json.dumps({**about, "dtypes": dtypes}))
  with path.open("wb") as file:
    np.savez(file, about=text, **arrays)


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
    pytest.param(
      *("mirrored", keras3, lambda library: library.optimizers.Adam),
      marks=pytest.mark.fast,
    ),
    ("pair", keras3, _accumulating),
    ("mirrored", tf_keras, _scaled),
    ("virtual", tf_keras, lambda library: library.optimizers.Adam),
  ],
)
def test_restored_training_equals_uninterrupted_training(
  where: str, package: Any, make: Any, tmp_path: pathlib.Path
) -> None:
  """Saves after 10 steps, and compares 5 more steps with a restored run.

  The file holds all state of the optimizer: also a learning rate that changed,
  and the number of skipped steps.
  """
  strategy = cases.STRATEGIES[where]()
  groups = [[0], [1]] if where == "pair" else cases.PAIRS
  # The random numbers of tf_keras are not variables of the model.
  has_own = package is keras3 and where != "pair"
  library = keras if package is keras3 else tf_keras_library
  source, target = (
    cases.Training(
      strategy,
      groups,
      seed,
      make(library),
      with_own_state=has_own,
      library=library,
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
  assert not cases.differing(saved, source.state())
  assert len(cases.differing(saved, target.state())) > (10 if has_own else 4)
  target.restore(tmp_path / "a")
  assert not cases.differing(saved, target.state())
  counts = Models(optimizer=target.optimizer).values(
    target.optimizer.skipped_steps
  )
  assert cases.lists(counts) == [1, 2]
  assert float(tf.convert_to_tensor(target.optimizer.learning_rate)) == 0.25
  for each in (source, target):
    each.steps(10, 15)
  assert not cases.differing(source.state(), target.state())
  Models(target.model, target.optimizer).assert_in_sync()
  [kernel, *_] = target.model.trainable_variables
  first, second = Models(optimizer=target.optimizer).values(kernel)
  assert (first != second).any()
  for mean in target.model.variables:
    if "moving_mean" in mean.name:
      first, second, *_ = testbed.values(mean)
      assert (first != second).any()  # each replica's own, and restored


@pytest.mark.fast
@pytest.mark.parametrize(
  ("source", "where", "groups"),
  [
    ("mirrored", "mirrored", [[2, 3], [0, 1]]),
    ("mirrored", "virtual", [[3, 0], [1, 2]]),
    ("virtual", "virtual", [[0, 2], [3, 1]]),
    ("mirrored", "pair", [[1], [0]]),
  ],
)
def test_groups_are_restored_by_number(
  source: str, where: str, groups: Any, tmp_path: pathlib.Path
) -> None:
  optimizer, weights = cases.simple(source)
  Models(weights, optimizer).save(tmp_path / "a")
  other, others = cases.simple(where, groups)
  for variable in [*others, *other.variables]:
    variable.assign(tf.zeros_like(variable))
  Models(others, other).restore(tmp_path / "a")
  for variable in [*others, *other.variables]:
    found = testbed.values(variable)
    for index, members in enumerate(groups):
      for replica in members:
        assert (found[replica] == 10 * index + 10).all(), (variable, replica)


def test_what_is_in_the_file(tmp_path: pathlib.Path) -> None:
  """A file has each variable once per group, under a number.

  Keras counts layers: those of the second model are dense_2 and dense_3.
  """
  names = []
  for _ in range(2):
    trained = cases.Training(testbed.virtual(cases.N), cases.PAIRS, seed=1)
    with trained.strategy.scope():
      trained.model.compile(trained.optimizer, "mse", metrics=["mae"])
    if not names:
      trained.model.evaluate(np.ones([4, 4]), np.ones([4, 2]), 4, verbose=0)
      assert trained.model.metrics_variables
    trained.save(tmp_path / "a")
    found, about = _read(tmp_path / "a")
    names.append(sorted(found))
    said = about["names"].values()
  assert names[0] == names[1]
  assert len(set(said)) == len(said) > 10
  kinds = {name.rpartition("/")[2] for name in said}
  assert {"iteration", "learning_rate", "seed_generator_state"} <= kinds
  assert not {"total", "count"} & kinds
  assert len(names[0]) == 2 * len(said)


def test_shared_variables_are_saved_once(tmp_path: pathlib.Path) -> None:
  """A variable of both optimizer and model is saved once."""
  with testbed.mirrored().scope():
    trained = tf.Variable([0.0, 0.0], name="trained")
    other = tf.Variable([0.0], name="other", trainable=False)
    optimizer = CrossShardOptimizer("sgd", group_assignment=[[3, 1], [0, 2]])
    optimizer.build([trained])
  cases.spread(trained, [[2.0] * 2, [1.0] * 2, [2.0] * 2, [1.0] * 2])
  cases.spread(other, [[5.0], [6.0], [7.0], [8.0]])
  model = [trained, other, trained, optimizer.iterations.value]
  Models(model, optimizer).save(tmp_path / "a")
  found, _ = _read(tmp_path / "a")
  arrays = {name: array.tolist() for name, array in found.items()}
  assert {n: a for n, a in arrays.items() if "optimizer" not in n} == {
    "model_0/model/0": [1.0, 1.0],
    "model_1/model/0": [2.0, 2.0],
    "model_0/member_0/model/1": [8.0],
    "model_0/member_1/model/1": [6.0],
    "model_1/member_0/model/1": [5.0],
    "model_1/member_1/model/1": [7.0],
  }
  assert {n for n in arrays if n.startswith("model_1/optimizer")} == {
    "model_1/optimizer/0",
    "model_1/optimizer/1",
  }


def _network(seed: int) -> Any:
  """The model of `cases.Training`, without a strategy."""
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      *(tf.keras.Input((4,)), layers.Dense(3)),
      layers.BatchNormalization(momentum=0.5),
      *(layers.Dropout(0.25, seed=seed), layers.Dense(2)),
    ]
  )


def test_a_served_model_needs_no_random_numbers(tmp_path: pathlib.Path) -> None:
  """The served model may have fewer dropout layers than the saved one."""
  trained = cases.Training(testbed.mirrored(), [[3, 1], [0, 2]], seed=1)
  trained.steps(0, 2)
  trained.save(tmp_path / "a")
  right = Models(trained.model, trained.optimizer)[1]
  layers = tf.keras.layers
  for dropouts in ([], [layers.Dropout(0.5, seed=9), layers.Dropout(0.5)]):
    plain = tf.keras.Sequential(
      [
        *(tf.keras.Input((4,)), layers.Dense(3)),
        *(layers.BatchNormalization(), *dropouts, layers.Dense(2)),
      ]
    )
    x = np.ones([2, 4], "float32")
    into = Models(trained.model, trained.optimizer).load(1, plain)
    np.testing.assert_array_equal(into(x), right(x))
    plain.set_weights([np.zeros_like(w) for w in plain.get_weights()])
    Models.read(tmp_path / "a", 1, plain)
    np.testing.assert_array_equal(plain(x), right(x))


def test_one_group_of_a_file_without_replicas(tmp_path: pathlib.Path) -> None:
  """The model that `Models(model)[i]` is, to be served on one device."""
  path = tmp_path / "a"
  trained = cases.Training(testbed.mirrored(), [[3, 1], [0, 2]], seed=1)
  trained.steps(0, 2)
  trained.save(path)
  plain = _network(seed=2)
  for i in (1, 0):
    right = Models(trained.model, trained.optimizer)[i]
    assert Models.read(path, i, plain) is plain
    for variable, expected in zip(
      plain.variables, right.variables, strict=True
    ):
      np.testing.assert_array_equal(variable, expected)
    assert len(testbed.copies(plain.variables[0])) == 1
  before = plain.get_weights()
  other = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
  for index, model, words in (
    (2, plain, r"`i` must be an integer from 0 to 1; got 2"),
    (-1, plain, r"`i` must be .* got -1\. .* holds 2 models"),
    (None, plain, r"`i` must be"),
    (0, other, r"contains .*, which the program does not have"),
    (
      0,
      [*plain.variables, tf.Variable(1.0, name="extra")],
      "does not contain .*extra",
    ),
    (0, [tf.Variable([0.0], name="kernel")], r"contains .*gamma.*, which"),
  ):
    with pytest.raises(models.CheckpointError, match=words):
      Models.read(path, index, model)
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(models.CheckpointError, match="is damaged"):
    Models.read(path, 0, plain)
  for array, same in zip(plain.get_weights(), before, strict=True):
    np.testing.assert_array_equal(array, same)


def test_restore_builds_the_optimizer(tmp_path: pathlib.Path) -> None:
  """`restore` builds on the trainable variables of a model or of a list."""
  optimizer, weights = cases.simple("mirrored")
  Models(weights, optimizer).save(tmp_path / "a")
  trained = cases.Training(testbed.mirrored(), cases.PAIRS, seed=1)
  trained.steps(0, 2)
  trained.save(tmp_path / "b")
  for path, right, model in (
    ("a", optimizer, weights),
    ("b", trained.optimizer, trained.model),
  ):
    with testbed.mirrored().scope():
      momentum = tf.keras.optimizers.SGD(0.5, momentum=0.5)
      inner = momentum if path == "a" else tf.keras.optimizers.Adam(0.01)
      fresh = CrossShardOptimizer(inner, group_assignment=cases.PAIRS)
    Models(model, fresh).restore(tmp_path / path)
    for variable, same in zip(fresh.variables, right.variables, strict=True):
      assert cases.values(variable) == cases.values(same)


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_restore_builds_the_optimizer_on_one_device(
  package: Any, tmp_path: pathlib.Path
) -> None:
  """Variables of OneDeviceStrategy do not know their strategy."""
  library = keras if package is keras3 else tf_keras_library

  def make() -> tuple[Any, Any, tf.distribute.Strategy]:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
      inner = library.optimizers.SGD(1.0, momentum=0.5)
      return (
        package.CrossShardOptimizer(inner, accumulate_steps=2),
        tf.Variable(0.0, name="weight"),
        strategy,
      )

  def train(optimizer: Any, weight: Any, gradients: tuple[float, ...]) -> float:
    for gradient in gradients:
      optimizer.apply_gradients([(tf.constant(gradient), weight)])
    return float(weight.numpy())

  optimizer, weight, strategy = make()
  with strategy.scope():
    optimizer.build([weight])
  strategy.run(lambda: train(optimizer, weight, (2.0, 4.0, 6.0)))
  Models([weight], optimizer).save(tmp_path / "a")
  optimizer, weight, strategy = make()
  Models([weight], optimizer).restore(tmp_path / "a")
  assert strategy.run(lambda: train(optimizer, weight, ())) == -3.0
  # (6 + 2) / 2 and half of the step before, which was 3.
  assert strategy.run(lambda: train(optimizer, weight, (2.0,))) == -8.5


@pytest.mark.parametrize("is_scaled", [False, True])
def test_state_that_fit_created_in_tf_keras_restores_into_a_new_program(
  is_scaled: bool, tmp_path: pathlib.Path
) -> None:
  """A step of tf_keras puts its name scopes into the names of slots."""
  library = tf_keras_library

  def compiled() -> Any:
    # A loss scale of tf_keras refuses a VectorizedStrategy.
    strategy = testbed.mirrored(2) if is_scaled else VectorizedStrategy(2)
    with strategy.scope():
      model = library.Sequential([library.Input((3,)), library.layers.Dense(2)])
      adam = library.optimizers.Adam(0.1)
      if is_scaled:
        adam = library.mixed_precision.LossScaleOptimizer(adam)
      model.compile(adam, "mse")
    return model

  model, other = compiled(), compiled()
  model.fit(np.ones([4, 3]), np.ones([4, 2]), verbose=0)
  Models(model).save(tmp_path / "a")
  Models(other).restore(tmp_path / "a")
  states = [cases.saved(each.optimizer, each) for each in (model, other)]
  # `fit` gives them other names than `build` does.
  np.testing.assert_equal(*[list(state[0].values()) for state in states])
  assert len(states[0][0]) >= 7


def test_restore_builds_an_optimizer_of_keras_that_accumulates(
  tmp_path: pathlib.Path,
) -> None:
  """The optimizer's `iterations` is a tensor, not a variable."""

  def build() -> Any:
    return training.build(
      "keras",
      lambda library: library.optimizers.SGD(
        1.0, gradient_accumulation_steps=2
      ),
      {"weight": 1.0},
    )

  weights, optimizer = build()
  training.train(weights, optimizer, [np.ones((3, 4), "f")])
  Models(weights, optimizer).save(tmp_path / "a")
  with testbed.mirrored().scope():
    new_weights = training.make_weights("keras", {"weight": 1.0})
    fresh = keras3.CrossShardOptimizer(
      keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), "sum"
    )
  Models(new_weights, fresh).restore(tmp_path / "a")
  for right, found in zip(
    training.state_of(weights, optimizer),
    training.state_of(new_weights, fresh),
    strict=True,
  ):
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("package", [keras3, tf_keras])
@pytest.mark.parametrize("is_built", [False, True])
def test_a_loss_scale_of_sharded_windows(
  package: Any, is_built: bool, tmp_path: pathlib.Path
) -> None:
  """`restore` creates all variables that steps would create."""
  library = keras if package is keras3 else tf_keras_library
  strategy = testbed.mirrored(2)

  def make(is_built: bool) -> tuple[Any, Any, Callable[[float], None]]:
    with strategy.scope():
      weight = tf.Variable([0.0, 0.0], name="weight")
      scaled = package.CrossShardOptimizer(
        library.mixed_precision.LossScaleOptimizer(
          library.optimizers.SGD(1.0, momentum=0.5), initial_scale=4.0
        ),
        "sum",
        accumulate_steps=2,
        shard_update=True,
      )
      if is_built:
        scaled.build([weight])

    def replica_step(gradient: float) -> None:
      own = gradient * tf.cast(testbed.replica_id() + 1, tf.float32)
      # Keras 3's divides gradients itself.
      scale = 4.0 if package is keras3 else 1.0
      pair = scale * tf.stack([own, 2 * own]), weight
      scaled.apply_gradients([pair])

    def step(gradient: float) -> None:
      strategy.run(replica_step, (gradient,))

    return scaled, weight, step

  scaled, weight, step = make(is_built=True)
  for gradient in (2.0, 4.0, 6.0):
    step(gradient)
  Models([weight], scaled).save(tmp_path / "a")
  again, other, go_on = make(is_built)
  Models([other], again).restore(tmp_path / "a")
  assert cases.values(other) == [[-9.0, -18.0]] * 2
  for one_step, updated in ((step, weight), (go_on, other)):
    one_step(2.0)
    # (6 + 2) / 2 of 1 + 2 replicas, and half of the step before, which was 9.
    assert cases.values(updated) == [[-25.5, -51.0]] * 2


@pytest.mark.parametrize("package", [keras3, tf_keras])
def test_restore_builds_nothing_under_another_strategy(
  package: Any, tmp_path: pathlib.Path
) -> None:
  """The other strategy may have the same size."""
  optimizer, weights = cases.simple("mirrored")
  Models(weights, optimizer).save(tmp_path / "a")
  config = package.CrossShardOptimizer("sgd").get_config()
  with testbed.virtual(cases.N).scope():
    other = package.CrossShardOptimizer.from_config(config)
  outside = package.CrossShardOptimizer.from_config(config)
  for made in (other, outside):
    before = len(made.variables)
    with pytest.raises(models.CheckpointError, match="of one strategy"):
      Models(weights, made).restore(tmp_path / "a")
    assert len(made.variables) == before


@pytest.mark.parametrize("shard_update", [False, True])
def test_a_window_begins_anew_in_groups_of_another_size(
  shard_update: bool, tmp_path: pathlib.Path
) -> None:
  """Otherwise gradients of former members would count twice."""

  def make(groups: Any) -> tuple[Any, Any, Callable[[], Any]]:
    strategy = testbed.mirrored(2 * len(groups[0]))
    with strategy.scope():
      weight = tf.Variable([0.0], name="weight")
      optimizer = CrossShardOptimizer(
        tf.keras.optimizers.SGD(1.0),
        "sum",
        group_assignment=groups,
        accumulate_steps=2,
        shard_update=shard_update,
      )
      optimizer.build([weight])
    step = training.stepper([weight], optimizer, strategy)
    ones = np.ones([2 * len(groups[0]), 1], "f")
    return optimizer, weight, functools.partial(step, ones)

  path = tmp_path / "a"
  for before, after in (([[0], [1]], cases.PAIRS), (cases.PAIRS, [[0], [1]])):
    optimizer, weight, step = make(before)
    for _ in range(3):
      step()
    expected = -float(len(before[0]))
    assert testbed.copies(weight)[0][0] == expected
    Models([weight], optimizer).save(path)
    optimizer, weight, step = make(after)
    Models([weight], optimizer).restore(path)
    step()
    assert testbed.copies(weight)[0][0] == expected
    step()
    assert testbed.copies(weight)[0][0] == expected - len(after[0])


# ----------------------------------------------- files that do not fit


def _assert_refused(
  optimizer: Any, weights: Any, path: Any, words: str
) -> None:
  """A `CheckpointError` with these words, and nothing changed."""
  variables = [*(weights or []), *optimizer.variables]
  before = [testbed.copies(variable) for variable in variables]
  with pytest.raises(models.CheckpointError, match=words) as info:
    Models(weights, optimizer).restore(path)
  assert isinstance(info.value, ValueError)
  assert str(path) in str(info.value)
  after = [testbed.copies(variable) for variable in variables]
  for mine, then in zip(before, after, strict=True):
    assert [a.tobytes() for a in mine] == [a.tobytes() for a in then]


def test_variables_that_do_not_match_raise_an_error(
  tmp_path: pathlib.Path,
) -> None:
  path = tmp_path / "a"
  optimizer, weights = cases.simple("mirrored")
  first, scale = weights
  Models(weights, optimizer).save(path)
  singles = cases.simple("mirrored", [[0], [1], [2], [3]])
  adam = cases.simple("mirrored", make=tf.keras.optimizers.Adam)
  with testbed.mirrored().scope():
    extra = tf.keras.Variable(0.0, name="extra")
    longer = tf.keras.Variable([0.0] * 3, name="scale")
    half = tf.keras.Variable(0.0, name="scale", dtype="float16")
  outside = tf.Variable([4.0, 4.0], name="weight")
  kind = r"`scale` as float32 \[\]; .* "
  for other, chosen, words in (
    (*singles, r"2 groups, \[\[0, 1\], .* has 4, .*with 2 groups"),
    (*adam, "not contain .*weight_velocity, "),
    (optimizer, None, "contains weight, scale, .*with a `model`"),
    (
      optimizer,
      [first],
      "contains scale, which the program does not have",
    ),
    (optimizer, [first, scale, extra], "does not contain extra"),
    (optimizer, [first, longer], kind + r"float32 \[3\]"),
    (optimizer, [first, half], kind + r"float16 \[\]"),
    (optimizer, [outside, scale], "`weight`.*exists once"),
  ):
    _assert_refused(other, chosen, path, words)
  Models(optimizer=optimizer).save(path)
  _assert_refused(optimizer, weights, path, "not contain weight.*without a")
  # What exists once is every group's.
  Models([outside, scale], optimizer).save(path)
  outside.assign([0.0, 0.0])
  Models([outside, scale], optimizer).restore(path)
  assert outside.numpy().tolist() == [4.0, 4.0]


def test_a_file_of_another_number_of_models(tmp_path: pathlib.Path) -> None:
  """The user has passed no groups, which the error must not name."""

  def make(count: int) -> tuple[Any, list[Any]]:
    with VectorizedStrategy(count).scope():
      weights = [tf.Variable([0.0], name="weight")]
      optimizer = tf.keras.optimizers.SGD()
      optimizer.build(weights)
    return optimizer, weights

  path = tmp_path / "a"
  optimizer, weights = make(3)
  Models(weights, optimizer).save(path)
  words = r"holds 3 models, but .*Strategy \(2 models\)\. .*Strategy\(3\)"
  _assert_refused(*make(2), path, words)


@pytest.mark.fast
def test_malformed_files(tmp_path: pathlib.Path) -> None:
  """Each byte of a file is in archive_test.py."""
  path = tmp_path / "a"
  optimizer, weights = cases.simple("mirrored")
  Models(weights, optimizer).save(path)
  data = path.read_bytes()
  arrays, about = _read(path)
  _write(path, {"x": np.zeros(2)}, {})
  _assert_refused(optimizer, weights, path, "was not written by Models")
  path.write_bytes(data[:-1])
  _assert_refused(optimizer, weights, path, "is damaged.*Nothing was changed")
  for wrong in ({"group_assignment": 3}, {"names": None}):
    _write(path, arrays, {**about, **wrong})
    _assert_refused(optimizer, weights, path, "is damaged.*Nothing was changed")
  # Of the last group alone: all is read before anything is changed.
  for wrong, words in (
    (np.zeros([3], "float32"), r"float32 \[3\]; the program has float32 \[2\]"),
    (np.zeros([2], "float64"), "as float64"),
  ):
    _write(path, {**arrays, "model_1/model/0": wrong}, about)
    _assert_refused(optimizer, weights, path, words)
  del arrays["model_1/model/1"]
  _write(path, arrays, about)
  _assert_refused(optimizer, weights, path, "is damaged.*model_1/model/1")
  path.write_bytes(data)
  real = np.lib.npyio.NpzFile.__getitem__

  def read(file: Any, name: str) -> Any:
    if name == "model_1/model/1":
      raise OSError(5, "Input/output error")
    return real(file, name)

  weights[0].assign([1.0, 1.0])
  with (
    mock.patch.object(np.lib.npyio.NpzFile, "__getitem__", read),
    pytest.raises(OSError, match="Input/output"),
  ):
    Models(weights, optimizer).restore(path)
  assert cases.values(weights[0]) == [[1.0, 1.0]] * cases.N
  Models(weights, optimizer).restore(path)
  found = Models(optimizer=optimizer).values(weights[0])
  assert cases.lists(found) == [[10.0, 10.0], [20.0, 20.0]]


def test_unbuilt_and_other_objects_raise_an_error(
  tmp_path: pathlib.Path,
) -> None:
  path = tmp_path / "a"
  optimizer, weights = cases.simple("mirrored")
  with testbed.mirrored().scope():
    fresh = CrossShardOptimizer("adam")
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
  with pytest.raises(ValueError, match=r"not built.*Call build\(model"):
    Models(weights, fresh).save(path)
  with pytest.raises(ValueError, match=r"`model` has no variables yet\. B"):
    Models(model, optimizer).save(path)
  with pytest.raises(TypeError, match="`optimizer` must be a Keras optimizer"):
    Models(weights, "adam").save(path)
  for wrong in (3, "model"):
    with pytest.raises(TypeError, match=r"`model` must be .*; got (int|str)"):
      Models(wrong, optimizer).save(path)
  with pytest.raises(TypeError, match="`path` must be"):
    Models(optimizer=optimizer).save(None)
  with pytest.raises(ValueError, match="different strategies"):
    Models(cases.simple("virtual")[1], optimizer).save(path)
  assert not path.exists()
