"""Groups that train independently and are synchronized every few steps."""

import json
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import islands, replica_state_cases, testbed, training
from tests.support.islands import PAIRS, SINGLETONS, STRIDED
from tf_cross_shard import Models, callbacks, keras3

# [steps, replicas, 3] whole numbers: their sums are exact.
GRADS = np.random.default_rng(3).integers(-8, 9, (12, 4, 3)).astype("f")

STEPS = 14
SHAPES = [(3,), (5, 4), ()]
_rng = np.random.default_rng(5)
# Several weights: [steps, replicas, ...] each.
SEVERAL_GRADS = [
  _rng.normal(size=(STEPS, testbed.REPLICAS, *shape)).astype("f")
  for shape in SHAPES
]


def make(outer: Any = None, **options: Any) -> islands.Islands:
  return islands.Islands(outer, [(3,)], **options)


def synchronized(loop: islands.Islands) -> np.ndarray:
  """Returns the weight of all groups, which is their anchor."""
  [anchors] = loop.anchors()
  both = testbed.copies(loop.weights[0]) + anchors
  assert len({value.tobytes() for value in both}) == 1
  assert len(both) == 2 * testbed.REPLICAS
  return both[0]


class Nameless(keras.optimizers.SGD):
  """SGD(1.0), which takes no name."""

  def __init__(self) -> None:
    super().__init__(1.0)

  def get_config(self) -> dict[str, Any]:
    return {}


def sgd(library: Any = keras) -> Any:
  """The outer optimizer of local SGD."""
  return library.optimizers.SGD(1.0)


def make_several(outer: Any, **options: Any) -> islands.Islands:
  return islands.Islands(outer, SHAPES, **options)


def diloco(
  groups: Any, every: int, warmup: int = 0, window: int = 1
) -> list[list[np.ndarray]]:
  """DiLoCo in NumPy: by weight, the values of each group after each call.

  The outer optimizer is the default one, SGD(0.7) with Nesterov momentum 0.9.
  """
  by_weight = []
  for grads in SEVERAL_GRADS:
    shape = grads.shape[2:]
    anchor, velocity = np.zeros(shape, "f"), np.zeros(shape, "f")
    weights = np.zeros([len(groups), *shape], "f")
    values = []
    for call in range(1, STEPS + 1):
      if call % window == 0:
        mean = grads[call - window : call].mean(0)
        sums = np.stack([mean[list(members)].sum(0) for members in groups])
        weights = weights - 0.5 * sums
        step = call // window - warmup
        if step <= 0:
          anchor = weights.mean(0)
        elif step % every == 0:
          outer_gradient = (anchor - weights).mean(0)
          velocity = 0.9 * velocity - 0.7 * outer_gradient
          anchor = anchor + 0.9 * velocity - 0.7 * outer_gradient
        if step <= 0 or step % every == 0:
          weights = np.broadcast_to(anchor, weights.shape)
      values.append(weights)
    by_weight.append(values)
  return by_weight


@pytest.mark.parametrize(
  ("where", "groups", "library", "warmup", "window"),
  [
    ("mirrored", SINGLETONS, tf_keras, 3, 1),
    pytest.param("virtual", STRIDED, keras, 2, 1, marks=pytest.mark.fast),
    ("mirrored", PAIRS, keras, 0, 2),
  ],
)
def test_every_step_equals_numpy(
  where: str, groups: Any, library: Any, warmup: int, window: int
) -> None:
  """Trains several rounds, so that the outer momentum matters."""
  accumulation = {"accumulate_steps": window} if window > 1 else {}
  loop = make_several(
    callbacks.OuterOptimizer(4, warmup=warmup),
    where=where,
    groups=groups,
    library=library,
    **accumulation,
  )
  right = diloco(groups, 4, warmup, window)
  equal_steps = 0
  for step in range(STEPS):
    loop.train(*(rows[step : step + 1] for rows in SEVERAL_GRADS))
    for found, expected in zip(loop.values(), right, strict=True):
      np.testing.assert_allclose(found, expected[step], rtol=1e-5, atol=1e-5)
    equal_steps += (right[0][step] == right[0][step][0]).all()
  assert 1 < equal_steps < STEPS


def test_sgd_takes_the_average() -> None:
  """SGD(1.0) sets the mean weights. Each group keeps its slots."""

  def opt(library: Any) -> Any:
    return library.optimizers.SGD(0.5, momentum=0.5)

  outer = callbacks.OuterOptimizer(3, sgd())
  synchronizing = make(outer, opt=opt, shard_update=True)
  other = make(opt=opt, shard_update=True)
  for first in range(0, 9, 3):
    for loop in (synchronizing, other):
      loop.train(GRADS[first : first + 2])
    one, another = synchronizing.values()[0]
    assert (one != another).any()
    for loop in (synchronizing, other):
      loop.train(GRADS[first + 2 : first + 3])
    Models(other.weights, other.optimizer).average()
    np.testing.assert_array_equal(
      synchronized(synchronizing), other.values()[0][0]
    )
  for mine, its in zip(
    synchronizing.optimizer.variables, other.optimizer.variables, strict=True
  ):
    found = Models(optimizer=synchronizing.optimizer).values(mine)
    expected = Models(optimizer=other.optimizer).values(its)
    np.testing.assert_array_equal(found, expected)
  assert (found[0] != found[1]).any()  # The momentum is the last.


def test_groups_add_in_the_same_order() -> None:
  """All groups have the same bits, although one pair is reversed."""
  strategy = testbed.virtual(6)
  grads = np.random.default_rng(0).normal(size=[3, 50]).astype("f")
  [weight], optimizer = training.build(
    *("keras", lambda library: library.optimizers.SGD(1.0)),
    *({"weight": np.zeros(50, "f")}, strategy),
    group_assignment=[[0, 5], [1, 4], [2, 3]],
  )
  outer = callbacks.OuterOptimizer(1)
  outer.build(optimizer, [weight])
  rows = grads[np.newaxis, [0, 1, 2, 2, 1, 0]]
  training.train([weight], optimizer, [rows], strategy=strategy)
  outer.step()
  found = testbed.copies(weight)
  assert len({value.tobytes() for value in found}) == 1
  np.testing.assert_allclose(found[0], -1.33 * 2 * grads.mean(0), rtol=1e-4)


def test_collectives_between_groups() -> None:
  """Groups exchange weights once in H steps, in the wire dtype."""
  strategy = testbed.virtual(testbed.REPLICAS)
  travels: list[tuple[str, list[int], Any]] = []
  add = strategy.extended.cross_replica_sum

  def record(tensor: tf.Tensor, groups: Any) -> tf.Tensor:
    travels.append((tensor.dtype.name, tensor.shape.as_list(), groups))
    return add(tensor, groups)

  outer = callbacks.OuterOptimizer(5, wire_dtype="bfloat16")
  with mock.patch.object(
    type(strategy.extended), "cross_replica_sum", staticmethod(record)
  ):
    loop = make(outer, where="virtual")
    loop.train(GRADS[:4])
    assert travels == [("float32", [3], PAIRS)]
    travels.clear()
    loop.train(GRADS[4:5])
    assert travels == [("bfloat16", [3], STRIDED)]


def test_groups_that_skip_steps_are_synchronized_in_one_step() -> None:
  outer = callbacks.OuterOptimizer(3, Nameless())
  loop = make(outer=outer, skip_nonfinite=True)
  rows = GRADS[:3].copy()
  rows[1, 0] = np.nan
  loop.train(rows)
  counts = Models(optimizer=loop.optimizer).values(loop.optimizer.iterations)
  assert [int(count) for count in counts] == [2, 3]
  one = -0.5 * rows[[0, 2]][:, :2].sum((0, 1))
  other = -0.5 * rows[:, 2:].sum((0, 1))
  np.testing.assert_array_equal(synchronized(loop), (one + other) / 2)


def test_loss_scaling() -> None:
  with testbed.mirrored().scope():
    weight = keras.Variable(np.zeros(3, "f"))
    optimizer = keras3.CrossShardOptimizer(
      keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 2.0),
      "sum",
      group_assignment=PAIRS,
    )
    optimizer.build([weight])
  outer = callbacks.OuterOptimizer(2, sgd())
  outer.build(optimizer, [weight])

  step = training.stepper([weight], optimizer)
  for row in GRADS[:2]:
    step(2.0 * row)
    outer.step()
  expected = -0.5 * GRADS[:2].sum((0, 1)) / 2
  for copy in testbed.copies(weight):
    np.testing.assert_array_equal(copy, expected)


def test_windows_of_keras_count_once() -> None:
  loop = make(
    opt=lambda library: library.optimizers.SGD(
      0.5, gradient_accumulation_steps=2
    ),
    outer=callbacks.OuterOptimizer(2, sgd()),
  )
  loop.train(GRADS[:3])
  one, another = loop.values()[0]
  assert (one != another).any()
  loop.train(GRADS[3:4])
  np.testing.assert_array_equal(
    synchronized(loop), -0.5 * GRADS[:4].sum((0, 1)) / 2 / 2
  )


# -------------------------------------------------------------------------- fit


def fit(
  strategy: Any, library: Any, make: Callable[[Any], Any], **options: Any
) -> Any:
  """Trains a model on two epochs of three batches; returns it."""
  task = training.Regression()
  with strategy.scope():
    model = library.Sequential([library.Input((3,)), library.layers.Dense(2)])
    model.set_weights(task.initial)
    optimizer = make(library.optimizers.SGD(0.125))
    execution = options.pop("steps_per_execution", 1)
    model.compile(optimizer, "mse", steps_per_execution=execution)
  data = tf.data.Dataset.from_tensor_slices(
    (task.x.reshape(-1, 3), task.y.reshape(-1, 2))
  ).batch(8, drop_remainder=True)
  model.fit(data, epochs=2, verbose=0, **options)
  return model


def test_fit_synchronized_in_every_step(
  caplog: pytest.LogCaptureFixture,
) -> None:
  """The weights equal plain Keras', and no warning is logged."""
  model = fit(
    testbed.STRATEGIES["virtual"](),
    keras,
    lambda opt: keras3.CrossShardOptimizer(opt, group_assignment=PAIRS),
    callbacks=[callbacks.OuterOptimizer(1, sgd())],
  )
  plain = fit(tf.distribute.get_strategy(), keras, lambda opt: opt)
  for mine, its in zip(model.weights, plain.weights, strict=True):
    copies = testbed.copies(mine)
    assert len(copies) == testbed.REPLICAS
    for copy in copies:
      training.assert_close(copy, its.numpy(), mine.name)
  # Keras' own functions may be traced again: one for each of these tests.
  text = "".join(m for m in caplog.messages if "TensorFlowTrainer" not in m)
  assert not [w for w in ("apart", "retracing", "joined") if w in text], text


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_fit_of_several_steps_at_once(library: Any) -> None:
  """Groups synchronize after the execution in which the count passes H."""
  found: list[bool] = []

  def record(*_: Any, **__: Any) -> None:
    copies = testbed.copies(after.model.trainable_variables[0])
    found.append(len({copy.tobytes() for copy in copies}) == 1)

  _, package = training.KERASES[islands.NAMES[library]]
  after = library.callbacks.LambdaCallback(on_train_batch_end=record)
  fit(
    testbed.STRATEGIES["virtual"](),
    library,
    lambda opt: package.CrossShardOptimizer(opt, group_assignment=PAIRS),
    steps_per_execution=2,
    callbacks=[callbacks.OuterOptimizer(3, sgd(library)), after],
  )
  # After steps 2, 3, 5 and 6: the last execution of an epoch has one batch.
  assert found == [False, True, False, True]


@pytest.mark.fast
def test_weights_that_are_set_are_the_next_anchor() -> None:
  """The outer optimizer does not use an assignment as a gradient."""
  outer = callbacks.OuterOptimizer(2)
  loop = make(outer=outer)
  loop.train(GRADS[:3])  # one more than a round
  momentum = [testbed.copies(v) for v in outer.optimizer.variables]
  loop.weights[0].assign(np.full(3, 512.0, "f"))
  outer.build(loop.optimizer, loop.weights)
  np.testing.assert_array_equal(synchronized(loop), [512.0] * 3)
  outer.on_train_begin()  # `fit`
  loop.weights[0].assign(np.full(3, 1024.0, "f"))  # by another callback
  outer.on_train_batch_begin(0)
  np.testing.assert_array_equal(synchronized(loop), [1024.0] * 3)
  after = [testbed.copies(v) for v in outer.optimizer.variables]
  np.testing.assert_equal(after, momentum)
  loop.train(GRADS[3:4])
  assert (np.abs(synchronized(loop) - 1024.0) < 100).all()
  # In the middle of a round, where groups differ, nothing is done.
  loop.train(GRADS[4:5])
  before = loop.anchors()
  outer.build(loop.optimizer, loop.weights)
  np.testing.assert_equal(loop.anchors(), before)


@pytest.mark.fast
def test_executions_of_several_steps() -> None:
  """An execution synchronizes once at most, also after the warm-up.

  Keras calls the callback with the number of steps that `fit` takes.
  """
  with testbed.mirrored().scope():
    model = testbed.one_weight()
    optimizer = keras3.CrossShardOptimizer("sgd", group_assignment=PAIRS)
    model.compile(optimizer, "mse", steps_per_execution=9)
  outer = callbacks.OuterOptimizer(4, keras.optimizers.SGD(0.5), warmup=3)
  outer.set_model(model)
  [weight] = model.trainable_variables
  for calls, expected in (
    (1, "average"),
    (5, "average"),  # up to step 6, which is the third after the warm-up
    (1, "outer step"),
    (3, "nothing"),
    (9, "outer step"),  # up to step 19, past the ends of two rounds
    (4, "outer step"),
  ):
    weight.assign([[0.0]])
    outer.set_params({"steps": calls})
    outer.on_train_begin()
    outer.on_train_batch_begin(0)
    replica_state_cases.spread(weight, [[[1.0]], [[1.0]], [[3.0]], [[3.0]]])
    outer.on_train_batch_end(calls - 1)
    right = {
      "average": [2.0] * 4,
      "outer step": [1.0] * 4,
      "nothing": [1.0, 1.0, 3.0, 3.0],
    }[expected]
    assert np.ravel(testbed.copies(weight)).tolist() == right, calls


def test_several_dtypes() -> None:
  """Each weight and its anchor keep their dtype."""
  outer = callbacks.OuterOptimizer(2, sgd())
  dtypes = ("float64", "float32", "float16")
  loop = make_several(outer, dtypes=dtypes)
  loop.train(*(rows[:2] for rows in SEVERAL_GRADS))
  assert [weight.dtype for weight in loop.weights] == list(dtypes)
  for weight, anchors in zip(loop.weights, loop.anchors(), strict=True):
    both = [*testbed.copies(weight), *anchors]
    assert len({copy.tobytes() for copy in both}) == 1
    assert both[0].any()


# ----------------------------------------------------------------- saved state


@pytest.mark.parametrize(
  ("where", "library", "steps"),
  [
    ("mirrored", tf_keras, 2),
    pytest.param("virtual", keras, 9, marks=pytest.mark.fast),
  ],
)
def test_resumes_from_a_file(
  where: str, library: Any, steps: int, tmp_path: pathlib.Path
) -> None:
  """Saves during the warm-up, and in the middle of a round."""
  path = tmp_path / "state"

  def adam(library: Any) -> Any:
    return library.optimizers.Adam(0.1)

  def start() -> islands.Islands:
    outer = callbacks.OuterOptimizer(4, adam(library), warmup=3)
    return make_several(outer, where=where, library=library, opt=adam)

  islands.check_resumes(start, SEVERAL_GRADS, steps, path)
  with np.load(path) as file:
    names = json.loads(str(file["about"]))["names"].items()
    keys = {name.split(":")[0]: key for key, name in names}
    assert file[f"model_0/{keys['outer_calls']}"] == steps
    anchors = [file[f"model_{i}/{keys['anchor1']}"] for i in range(2)]
  np.testing.assert_array_equal(*anchors)


# ------------------------------------------------------------------ not finite


@pytest.mark.fast
def test_an_outer_gradient_that_is_not_finite(
  caplog: pytest.LogCaptureFixture,
) -> None:
  """No group changes, and one warning is logged."""
  outer = callbacks.OuterOptimizer(2)
  loop = make_several(outer)

  def train(first: int, last: int) -> None:
    loop.train(*(rows[first:last] for rows in SEVERAL_GRADS))

  train(0, 3)
  rows = np.zeros([4, 5, 4], "f")
  rows[2:, 1, 1] = np.nan
  replica_state_cases.spread(loop.weights[1], rows)

  def state() -> list[Any]:
    return [*loop.anchors(), *map(testbed.copies, outer.optimizer.variables)]

  before = state()
  train(3, 7)
  np.testing.assert_equal(state(), before)
  assert int(outer.optimizer.skipped_steps.numpy()) == 2
  assert caplog.text.count("Groups were not synchronized after 4 steps") == 1
  assert caplog.text.count("not synchronized") == 1
  assert len({v.tobytes() for v in loop.values()[0]}) == 2
  replica_state_cases.spread(loop.weights[1], np.ones([4, 5, 4], "f"))
  train(7, 8)
  for values in loop.values():
    assert np.isfinite(values).all()
    assert len({value.tobytes() for value in values}) == 1
  assert int(outer.optimizer.skipped_steps.numpy()) == 2


# ----------------------------------------------------------------------- errors


def test_invalid_uses_raise_an_error() -> None:
  loop = make()
  outer = callbacks.OuterOptimizer(2)
  with pytest.raises(RuntimeError, match=r"Call build\(optimizer, model\)"):
    outer.step()
  with pytest.raises(TypeError, match="must be a CrossShardOptimizer"):
    outer.build(keras.optimizers.SGD(), loop.weights)
  with testbed.mirrored().scope():
    one = keras3.CrossShardOptimizer("sgd")
    model = keras.Sequential([keras.layers.Dense(1)])
  with pytest.raises(ValueError, match="must have several groups"):
    outer.build(one, loop.weights)
  with pytest.raises(ValueError, match="nothing to train"):
    outer.build(loop.optimizer, model)
  wrong = callbacks.OuterOptimizer(2, tf_keras.optimizers.SGD())
  with pytest.raises(ValueError, match="interpret optimizer identifier"):
    wrong.build(loop.optimizer, loop.weights)
  outer.build(loop.optimizer, loop.weights)
  with pytest.raises(ValueError, match="belongs to another"):
    outer.build(loop.optimizer, [*loop.weights, *loop.weights])
  with pytest.raises(RuntimeError, match="between two steps"):
    tf.function(outer.step, autograph=False)()


def test_groups_that_start_with_different_weights() -> None:
  loop = make()
  loop.train(GRADS[:1])
  before = loop.values()[0]
  outer = callbacks.OuterOptimizer(2)
  with pytest.raises(ValueError, match=r"weight0 differs.*Models\(mod"):
    outer.build(loop.optimizer, loop.weights)
  np.testing.assert_array_equal(loop.values()[0], before)
  assert outer.optimizer is None
  Models(loop.weights, loop.optimizer).average()
  outer.build(loop.optimizer, loop.weights)
