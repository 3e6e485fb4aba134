"""TowerOptimizer: the contract's values, its members, and what it encloses."""
# keras: both

import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, towers_bed
from tests.support.towers_bed import (
  MODES,
  TWO,
  batch,
  caller,
  named,
  sgd,
  values,
)
from tf_cross_shard import (
  CrossShardOptimizer,
  TowerOptimizer,
  TowerSpec,
  replicate_model_fn,
)

keras = tf.keras
PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent
PLACES = ("outside", "inside")


class Linear:
  """The contract's model: loss `c * features`, `c` from 10, a rate of 1."""

  def __init__(
    self,
    variable: str = "outside",
    optimizer: str = "outside",
    make: Callable[[], Any] = sgd,
    kind: Callable[..., Any] = tf.Variable,
  ) -> None:
    self.calls = 0
    self._kind = kind
    self._make = make
    self._c = self._variable() if variable == "outside" else None
    self._optimizer = TowerOptimizer(make) if optimizer == "outside" else None

  def _variable(self) -> Any:
    return self._kind(10.0, name="c")

  def __call__(self, features: Any, mode: str) -> TowerSpec:
    self.calls += 1
    c = self._variable() if self._c is None else self._c
    optimizer = self._optimizer or TowerOptimizer(self._make)
    loss = tf.reduce_sum(c * features)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

  def value(self, replicated: Any) -> float:
    """What `c` is now, wherever it was made."""
    c = named(replicated.variables, "c") if self._c is None else self._c
    return float(c.numpy())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", PLACES)
@pytest.mark.parametrize("variable", PLACES)
class TestValues:
  @pytest.mark.parametrize(
    ("reduction", "devices", "c", "loss"),
    [
      ("sum", TWO, 7.0, 30.0),
      ("mean", TWO, 8.5, 15.0),
      ("sum", TWO[:1], 7.0, 30.0),
      ("mean", TWO[1:], 7.0, 30.0),
    ],
  )
  def test_one_step(
    self,
    reduction: str,
    devices: Any,
    c: float,
    loss: float,
    variable: str,
    optimizer: str,
    mode: str,
  ) -> None:
    model = Linear(variable, optimizer)
    replicated = replicate_model_fn(model, reduction, devices)
    spec = caller(replicated, mode)(batch())
    assert float(spec.loss) == loss
    assert int(spec.train_op) == 1
    assert model.value(replicated) == c
    assert model.calls >= len(devices)

  def test_the_same_batch_twice(
    self, variable: str, optimizer: str, mode: str
  ) -> None:
    model = Linear(variable, optimizer)
    replicated = replicate_model_fn(model, "sum", TWO)
    step = caller(replicated, mode)
    assert [float(step(batch()).loss), model.value(replicated)] == [30.0, 7.0]
    assert [float(step(batch()).loss), model.value(replicated)] == [21.0, 4.0]
    # Another batch: nothing is left over of the one before.
    spec = step(batch([1.0], [-3.0]))
    assert [int(spec.train_op), model.value(replicated)] == [3, 6.0]

  def test_with_a_variable_of_keras(
    self, variable: str, optimizer: str, mode: str
  ) -> None:
    model = Linear(variable, optimizer, kind=testbed.variable)
    replicated = replicate_model_fn(model, "mean", TWO)
    step = caller(replicated, mode)
    step(batch())
    step(batch([4.0], [2.0]))
    assert model.value(replicated) == 5.5

  def test_slots_are_kept(
    self, variable: str, optimizer: str, mode: str
  ) -> None:
    model = Linear(variable, optimizer, lambda: sgd(momentum=0.5))
    replicated = replicate_model_fn(model, "sum", TWO)
    step = caller(replicated, mode)
    found = []
    for rows in ([1.0], [2.0]), ([1.0], [1.0]), ([0.0], [0.0]):
      step(batch(*rows))
      found.append(model.value(replicated))
    # velocity 3, 3.5, 1.75
    assert found == [7.0, 3.5, 1.75]

  def test_adam_counts_one_step(
    self, variable: str, optimizer: str, mode: str
  ) -> None:
    model = Linear(variable, optimizer, lambda: keras.optimizers.Adam(0.5))
    replicated = replicate_model_fn(model, "sum", TWO)
    step = caller(replicated, mode)
    plain, c = keras.optimizers.Adam(0.5), testbed.variable(10.0)
    for rows in ([1.0], [2.0]), ([5.0], [-1.0]), ([1.0], [7.0]):
      step(batch(*rows))
      plain.apply_gradients([(tf.constant(rows[0][0] + rows[1][0]), c)])
    assert abs(model.value(replicated) - float(c.numpy())) < 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(testbed.OPTIMIZERS))
def test_names_of_every_kind(name: str, mode: str) -> None:
  """The older optimizers of tf_keras have no `name` to ask for."""
  opt = testbed.OPTIMIZERS[name](name="mine")
  optimizer = TowerOptimizer(opt)
  assert optimizer.get_name() == "mine"
  other = TowerOptimizer(testbed.OPTIMIZERS[name](name="yours"))
  c = tf.Variable([[10.0, 9.0]])
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    towers.append(1)
    odd = len(towers) % 2 == 0
    pairs = [(features * tf.ones([1, 2]), c)]
    (other if odd else optimizer).apply_gradients(pairs)
    return TowerSpec(mode)

  step = caller(replicate_model_fn(model_fn, "sum", TWO), mode)
  with pytest.raises(ValueError, match=r"called \w+\('yours'\) where tower 0"):
    step(batch())
  assert c.numpy().tolist() == [[10.0, 9.0]]


@pytest.mark.parametrize("mode", MODES)
def test_without_replicate_all_is_forwarded(mode: str) -> None:
  c = tf.Variable(10.0)
  optimizer = TowerOptimizer(sgd)

  def step(features: Any) -> Any:
    return optimizer.minimize(lambda: tf.reduce_sum(c * features), var_list=[c])

  assert int(caller(step, mode)(batch())) == 1
  assert float(c) == 7.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_two_optimizers_on_two_variables(mode: str, place: str) -> None:
  def optimizers() -> tuple[Any, Any]:
    return TowerOptimizer(sgd), TowerOptimizer(keras.optimizers.Adam(0.5))

  made = optimizers() if place == "outside" else None
  c, d = tf.Variable(10.0), tf.Variable(10.0)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    first, second = made or optimizers()
    loss = tf.reduce_sum(c * features)
    other = tf.reduce_sum(d * features * features)
    first.minimize(loss, var_list=[c])
    train_op = second.minimize(other, var_list=[d])
    return TowerSpec(mode, loss + other, train_op)

  step = caller(replicate_model_fn(model_fn, "sum", TWO), mode)
  plain, expected = keras.optimizers.Adam(0.5), testbed.variable(10.0)
  for steps, (x, y) in enumerate(((1.0, 2.0), (3.0, -1.0)), 1):
    assert int(step(batch([x], [y])).train_op) == steps
    plain.apply_gradients([(tf.constant(x * x + y * y), expected)])
  assert float(c) == 5.0
  assert abs(float(d) - float(expected.numpy())) < 1e-5
  if made:
    assert [int(each.iterations) for each in made] == [2, 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_two_losses_and_one_optimizer(mode: str, reduction: str) -> None:
  optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    first = tf.reduce_sum(c * features)
    optimizer.minimize(first, var_list=[c])
    # Of the weights before the step, in the last tower too.
    second = tf.reduce_sum(c * c * features)
    return TowerSpec(mode, second, optimizer.minimize(second, var_list=[c]))

  spec = caller(replicate_model_fn(model_fn, reduction, TWO), mode)(batch())
  total = 3.0 + 60.0
  half = 2.0 if reduction == "mean" else 1.0
  assert float(c) == 10.0 - total / half
  assert float(spec.loss) == 300.0 / half
  assert int(spec.train_op) == int(optimizer.iterations) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_rows_that_overlap_add_up(mode: str, reduction: str) -> None:
  table = tf.Variable([[1.0], [2.0], [3.0], [4.0]])
  optimizer = TowerOptimizer(sgd)
  kinds: list[Any] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    rows = tf.gather(table, features["rows"])
    loss = tf.reduce_sum(rows * features["x"])
    pairs = optimizer.compute_gradients(loss, [table])
    kinds.append(type(pairs[0][0]))
    return TowerSpec(mode, loss, optimizer.apply_gradients(pairs))

  features = {
    "rows": tf.constant([0, 1, 1, 2]),
    "x": batch([2.0], [4.0], [8.0], [16.0]),
  }
  caller(replicate_model_fn(model_fn, reduction, TWO), mode)(features)
  half = 2.0 if reduction == "mean" else 1.0
  expected = [[1 - 2 / half], [2 - 12 / half], [3 - 16 / half], [4.0]]
  assert table.numpy().tolist() == expected
  assert set(kinds) == {tf.IndexedSlices}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_gradients_of_other_dtypes_are_cast(mode: str, is_sparse: bool) -> None:
  """Those of a second optimizer too: none has applied when they are seen."""
  c, table = tf.Variable(10.0), tf.Variable([[1.0], [2.0], [3.0]])
  optimizers = [TowerOptimizer(sgd), TowerOptimizer(sgd)]
  dtypes = iter(["float64", "float16"] * 2)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    optimizers[0].apply_gradients([(tf.reduce_sum(features), c)])
    grad: Any = tf.cast(features, next(dtypes))  # of each tower another one
    rows = tf.IndexedSlices(grad, [1], [3, 1])
    grad = rows if is_sparse else tf.pad(grad, [[1, 1], [0, 0]])
    return TowerSpec(mode, None, optimizers[1].apply_gradients([(grad, table)]))

  caller(replicate_model_fn(model_fn, "sum", TWO), mode)(batch())
  assert float(c) == 10.0 - 3.0
  assert table.numpy().tolist() == [[1.0], [2.0 - 3.0], [3.0]]


@pytest.mark.parametrize("mode", MODES)
def test_overlapping_rows_are_one_row_to_adam(mode: str) -> None:
  table = tf.Variable([[1.0], [2.0], [3.0]])
  plain = testbed.variable([[1.0], [2.0], [3.0]])
  optimizer = TowerOptimizer(keras.optimizers.Adam(0.5))
  whole = keras.optimizers.Adam(0.5)

  def loss(table: Any, features: Any) -> Any:
    return tf.reduce_sum(tf.gather(table, features["rows"]) * features["x"])

  def model_fn(features: Any, mode: str) -> TowerSpec:
    train_op = optimizer.minimize(lambda: loss(table, features), None, [table])
    return TowerSpec(mode, loss(table, features), train_op)

  step = caller(replicate_model_fn(model_fn, "sum", TWO), mode)
  for x in (batch([2.0], [4.0]), batch([-1.0], [7.0])):
    features = {"rows": tf.constant([1, 1]), "x": x}
    step(features)
    with tf.GradientTape() as tape:
      total = loss(towers_bed.native(plain), features)
    # Dense: of rows that come twice plain Adam adds up the squares.
    grad = tf.convert_to_tensor(tape.gradient(total, towers_bed.native(plain)))
    whole.apply_gradients([(grad, plain)])
  np.testing.assert_allclose(table.numpy(), plain.numpy(), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_tower_of_dense_and_one_of_sparse_rows(mode: str) -> None:
  table = tf.Variable([[1.0], [2.0]])
  optimizer = TowerOptimizer(sgd)
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    towers.append(len(towers))
    if len(towers) % 2:
      grad: Any = tf.IndexedSlices(features, [1], [2, 1])
    else:
      grad = tf.concat([features, 10.0 * features], axis=0)
    return TowerSpec(mode, None, optimizer.apply_gradients([(grad, table)]))

  caller(replicate_model_fn(model_fn, "sum", TWO), mode)(batch())
  assert table.numpy().tolist() == [[-1.0], [-19.0]]


def test_gradients_of_none() -> None:
  c, d, e = (tf.Variable(10.0) for _ in range(3))
  optimizer = TowerOptimizer(sgd)
  towers: list[int] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    towers.append(len(towers))
    grad = tf.reduce_sum(features)
    pairs = [(grad, c), (grad if len(towers) == 2 else None, d), (None, e)]
    # Another order of the same variables makes no difference.
    pairs = pairs[:: 1 if len(towers) == 1 else -1]
    return TowerSpec(mode, None, optimizer.apply_gradients(pairs))

  replicate_model_fn(model_fn, "sum", TWO)(batch())
  assert values([c, d, e]) == [7.0, 8.0, 10.0]


# One row for each member of the specification's page.
MEMBERS = (
  "__init__",
  "apply_gradients",
  "compute_gradients",
  "get_name",
  "get_slot",
  "get_slot_names",
  "has_been_used",
  "minimize",
  "variables",
  "COLLECTION_FOR_GRAPH_STATES",
  "GATE_GRAPH",
  "GATE_NONE",
  "GATE_OP",
)
ROWS: dict[str, Callable[[], None]] = {}


def _row(function: Callable[[], None]) -> Callable[[], None]:
  """Makes a function the row of the member that it is named after."""
  member = function.__name__.removeprefix("_of_")
  ROWS["__init__" if member == "init" else member] = function
  return function


def _pairs(
  optimizer: Any, c: Any, reduction: str = "sum", mode: str = "eager"
) -> tuple[list[float], Any]:
  """Each tower's own gradient of `c * features`, then one step of them."""
  found: list[Any] = []

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(c * features)
    pairs = optimizer.compute_gradients(loss, [c])
    found.append(pairs[0][0])
    assert pairs[0][1] is c
    train_op = optimizer.apply_gradients(pairs)
    return TowerSpec(mode, loss, train_op, tf.stack([pairs[0][0]]))

  step = caller(replicate_model_fn(model_fn, reduction, TWO), mode)
  spec = step(batch())
  assert len(found) >= 2
  return spec.predictions.numpy().tolist(), spec


@_row
def _of_init() -> None:
  made: list[Any] = []

  def make() -> Any:
    made.append(sgd(0.25))
    return made[-1]

  opt = sgd(0.25)
  assert TowerOptimizer(opt).inner_optimizer is opt
  from_function = TowerOptimizer(make)
  c = tf.Variable(10.0)
  for _ in range(2):
    from_function.apply_gradients([(tf.constant(4.0), c)])
  assert [from_function.inner_optimizer] == made
  assert float(c) == 8.0
  by_class = TowerOptimizer(keras.optimizers.SGD)
  assert type(by_class.inner_optimizer) is type(opt)
  by_name = TowerOptimizer(optimizer_or_optimizer_fn="sgd")
  assert type(by_name.inner_optimizer) is type(opt)
  assert isinstance(by_name, keras.optimizers.Optimizer)


@_row
def _of_compute_gradients() -> None:
  for mode in MODES:
    for reduction, expected in (("sum", [1.0, 2.0]), ("mean", [0.5, 1.0])):
      optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)
      grads, _ = _pairs(optimizer, c, reduction, mode)
      assert grads == expected
  # Outside of towers: the encapsulated optimizer's, whatever the loss is.
  optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)
  [(grad, variable)] = optimizer.compute_gradients(lambda: 3.0 * c)
  assert (float(grad), variable is c) == (3.0, True)
  with tf.GradientTape() as tape:
    loss = 5.0 * c
  [(grad, _)] = optimizer.compute_gradients(loss, c, tape=tape)
  assert float(grad) == 5.0

  @tf.function
  def in_graph() -> Any:
    [(grad, _)] = optimizer.compute_gradients(
      7.0 * c,
      [c],
      gate_gradients=optimizer.GATE_GRAPH,
      aggregation_method=tf.AggregationMethod.ADD_N,
      colocate_gradients_with_ops=True,
      grad_loss=tf.constant(2.0),
    )
    return grad

  assert float(in_graph()) == 14.0
  with pytest.raises(TypeError, match="unexpected keyword argument 'gates'"):
    optimizer.compute_gradients(lambda: c, gates=1)


@_row
def _of_apply_gradients() -> None:
  for mode in MODES:
    optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)
    global_step = tf.Variable(5, dtype=tf.int64)
    seen: list[Any] = []

    def model_fn(
      features: Any,
      mode: str,
      optimizer: Any = optimizer,
      c: Any = c,
      seen: Any = seen,
      global_step: Any = global_step,
    ) -> TowerSpec:
      grad = tf.reduce_sum(features)
      count = optimizer.apply_gradients([(grad, c)], global_step, name="step")
      seen.append(count)
      # Earlier towers change nothing, and neither does the last one yet.
      now = tf.stack([c.read_value(), tf.cast(global_step, tf.float32)])
      return TowerSpec(mode, None, count, now[tf.newaxis])

    step = caller(replicate_model_fn(model_fn, "sum", TWO), mode)
    spec = step(batch())
    assert spec.predictions.numpy().tolist() == [[10.0, 5.0]] * 2
    assert [int(spec.train_op), float(c), int(global_step)] == [1, 7.0, 6]
    if mode == "eager":
      assert [int(count) for count in seen] == [0, 0]
    assert int(step(batch()).train_op) == int(optimizer.iterations) == 2
    assert [float(c), int(global_step)] == [4.0, 7]
  optimizer.apply_gradients([(tf.constant(1.0), c)], global_step=global_step)
  assert [float(c), int(global_step)] == [3.0, 8]


@_row
def _of_minimize() -> None:
  for mode in MODES:
    for keras_order in (False, True):
      optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)
      global_step = tf.Variable(0)

      def model_fn(
        features: Any,
        mode: str,
        optimizer: Any = optimizer,
        c: Any = c,
        keras_order: bool = keras_order,
        global_step: Any = global_step,
      ) -> TowerSpec:
        if keras_order:
          with tf.GradientTape() as tape:
            loss = tf.reduce_sum(c * features)
          train_op = optimizer.minimize(loss, [c], tape=tape)
        else:
          loss = tf.reduce_sum(c * features)
          train_op = optimizer.minimize(loss, global_step, [c], name="step")
        return TowerSpec(mode, loss, train_op)

      caller(replicate_model_fn(model_fn, "mean", TWO), mode)(batch())
      assert float(c) == 8.5
      assert int(global_step) == (0 if keras_order else 1)
  c, d = tf.Variable(10.0), tf.Variable(10.0, trainable=False)
  assert int(TowerOptimizer(sgd).minimize(lambda: 2.0 * c * d)) == 1
  assert values([c, d]) == [-10.0, 10.0]


@_row
def _of_get_name() -> None:
  assert TowerOptimizer(sgd(name="mine")).get_name() == "mine"


@_row
def _of_get_slot() -> None:
  optimizer = TowerOptimizer(sgd(momentum=0.5))
  c = testbed.variable(10.0, "c")
  assert optimizer.get_slot(c, "momentum") is None
  _pairs(optimizer, c)
  [name] = optimizer.get_slot_names()
  slot = optimizer.get_slot(c, name)
  assert float(slot.numpy()) == -3.0
  assert optimizer.get_slot(c, "none") is None


@_row
def _of_get_slot_names() -> None:
  optimizer = TowerOptimizer(keras.optimizers.Adam())
  assert optimizer.get_slot_names() == []
  c = testbed.variable(10.0, "c")
  _pairs(optimizer, c)
  names = ["m", "v"] if testbed.IS_TF_KERAS else ["momentum", "velocity"]
  assert optimizer.get_slot_names() == names


@_row
def _of_variables() -> None:
  opt = sgd(momentum=0.5)
  optimizer, c = TowerOptimizer(opt), testbed.variable(10.0, "c")
  _pairs(optimizer, c)
  mine, plain = optimizer.variables, testbed.variables_of(opt)
  assert [id(v) for v in mine] == [id(v) for v in plain]
  assert [id(v) for v in optimizer.variables()] == [id(v) for v in mine]
  assert -3.0 in values(mine)


@_row
def _of_has_been_used() -> None:
  # In a program of its own: in this one others have used it.
  program = """
import tensorflow as tf
from tf_cross_shard import (TowerOptimizer, CrossShardOptimizer)
c = tf.Variable(1.0)
optimizer = TowerOptimizer("sgd")
found = [TowerOptimizer.has_been_used()]
CrossShardOptimizer("sgd").minimize(lambda: 2.0 * c)
optimizer.compute_gradients(lambda: 2.0 * c)
found += [optimizer.has_been_used()]
optimizer.minimize(lambda: 2.0 * c)
print(found + [TowerOptimizer.has_been_used()])
"""
  run = subprocess.run(
    [sys.executable, "-c", program],
    cwd=PROJECT,
    env={**os.environ, "PYTHONPATH": str(PROJECT)},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert run.stdout.splitlines()[-1:] == ["[False, False, True]"], run.stderr
  c = tf.Variable(1.0)
  TowerOptimizer(sgd).minimize(lambda: 2.0 * c)
  assert TowerOptimizer.has_been_used()


@_row
def _of_COLLECTION_FOR_GRAPH_STATES() -> None:  # noqa: N802  # the member's
  name = TowerOptimizer.COLLECTION_FOR_GRAPH_STATES
  assert name == "replicate_model_fn_graph_states"


@_row
def _of_GATE_NONE() -> None:  # noqa: N802
  assert TowerOptimizer.GATE_NONE == 0


@_row
def _of_GATE_OP() -> None:  # noqa: N802
  assert TowerOptimizer.GATE_OP == 1


@_row
def _of_GATE_GRAPH() -> None:  # noqa: N802
  assert TowerOptimizer.GATE_GRAPH == 2


@pytest.mark.parametrize("member", MEMBERS)
def test_member(member: str) -> None:
  assert hasattr(TowerOptimizer, member)
  ROWS[member]()


def test_no_row_without_a_member() -> None:
  assert set(ROWS) == set(MEMBERS)


class TestState:
  def test_config(self) -> None:
    optimizer = TowerOptimizer(lambda: sgd(0.25, momentum=0.5))
    config = optimizer.get_config()
    again = TowerOptimizer.from_config(dict(config))
    assert again.get_config() == config
    assert float(again.learning_rate) == 0.25
    assert again.inner_optimizer.momentum == 0.5

  def test_pickle(self) -> None:
    optimizer, c = TowerOptimizer(sgd(momentum=0.5)), testbed.variable(10.0)
    _pairs(optimizer, c)
    again = pickle.loads(pickle.dumps(optimizer))
    testbed.build(again, [c])
    assert type(again) is TowerOptimizer
    assert values(again.variables) == values(optimizer.variables)
    _pairs(again, c)
    assert float(c.numpy()) == 7.0 - 4.5
    assert int(again.iterations) == 2

  @pytest.mark.parametrize("written", ["with", "without"])
  def test_checkpoint(self, written: str, tmp_path: pathlib.Path) -> None:
    def make(encapsulated: bool) -> Any:
      opt = keras.optimizers.Adam(0.5)
      return TowerOptimizer(opt) if encapsulated else opt

    c = testbed.variable(10.0, "c")
    first = make(written == "with")
    first.apply_gradients([(tf.constant(4.0), c)])
    path = tf.train.Checkpoint(optimizer=first).save(str(tmp_path / "ckpt"))
    second = make(written != "with")
    testbed.build(second, [c])
    assert values(testbed.variables_of(second)) != values(
      testbed.variables_of(first)
    )
    status = tf.train.Checkpoint(optimizer=second).restore(path)
    status.assert_consumed()
    assert values(testbed.variables_of(second)) == values(
      testbed.variables_of(first)
    )

  def test_fit_and_a_model_file(self, tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(8, 3)).astype("float32")
    y = rng.normal(size=(8, 2)).astype("float32")
    start = [rng.normal(size=(3, 2)), rng.normal(size=(2,))]
    weights = []
    for optimizer in (
      keras.optimizers.Adam(0.1),
      TowerOptimizer(keras.optimizers.Adam(0.1)),
    ):
      model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      model.set_weights(start)
      model.compile(optimizer, "mse")
      model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
      weights.append(model.get_weights())
    assert np.abs(weights[0][0] - start[0]).max() > 0.1
    for plain, towers in zip(*weights, strict=True):
      np.testing.assert_array_equal(plain, towers)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is type(model.optimizer) is TowerOptimizer
    assert values(again.optimizer.variables) == values(
      model.optimizer.variables
    )
    for each in (model, again):
      each.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for one, other in zip(
      model.get_weights(), again.get_weights(), strict=True
    ):
      np.testing.assert_array_equal(one, other)

  @pytest.mark.parametrize("mode", MODES)
  def test_learning_rate(self, mode: str) -> None:
    optimizer, c = TowerOptimizer(sgd), tf.Variable(10.0)

    def model_fn(features: Any, mode: str) -> TowerSpec:
      loss = tf.reduce_sum(c * features)
      return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=[c]))

    step = caller(replicate_model_fn(model_fn, "sum", TWO), mode)
    step(batch())
    optimizer.learning_rate = 2.0
    assert float(optimizer.learning_rate) == 2.0
    assert float(optimizer.inner_optimizer.learning_rate) == 2.0
    step(batch())
    assert float(c) == 1.0

  def test_clipping_of_the_sum(self) -> None:
    optimizer, c = TowerOptimizer(sgd(clipvalue=2.5)), tf.Variable(10.0)
    grads, _ = _pairs(optimizer, c)
    assert grads == [1.0, 2.0]
    assert float(c) == 7.5


STRATEGIES: dict[str, Callable[[], Any]] = {
  "mirrored": testbed.mirrored,
  "virtual": lambda: testbed.virtual(testbed.REPLICAS),
}


def _train_replicas(
  strategy: Any, optimizer: Any, weights: Any, task: Any, reduction: str
) -> Any:
  """Two towers in each replica; every tower has other examples."""

  def model_fn(features: Any, labels: Any, mode: str) -> TowerSpec:
    assert features.shape[0] == task.examples // 2
    loss = task.loss(weights, features, labels)
    return TowerSpec(mode, loss, optimizer.minimize(loss, var_list=weights))

  replicated = replicate_model_fn(model_fn, reduction, ["", ""])

  def step(x: Any, y: Any) -> Any:
    def replica_step() -> Any:
      mine = testbed.replica_id()
      return replicated(tf.gather(x, mine), tf.gather(y, mine)).loss

    return strategy.run(replica_step)

  return step


# Which eager runs and which combinations a strategy has to do.
_CASES = [
  ("mirrored", "function", grouping, towers, replicas)
  for grouping in testbed.GROUPINGS
  for towers in ("sum", "mean")
  for replicas in ("sum", "mean")
] + [
  ("mirrored", "eager", "strided", "mean", "mean"),
  ("mirrored", "eager", "ungrouped", "sum", "sum"),
  ("virtual", "function", "strided", "mean", "mean"),
  ("virtual", "function", "ungrouped", "mean", "mean"),
  ("virtual", "eager", "contiguous", "sum", "mean"),
]


@pytest.mark.parametrize(
  ("place", "mode", "grouping", "towers", "replicas"), _CASES
)
def test_towers_of_replicas(
  place: str, mode: str, grouping: str, towers: str, replicas: str
) -> None:
  if testbed.IS_TF_KERAS and place == "virtual" and mode == "eager":
    pytest.skip("slow")
  strategy, groups = STRATEGIES[place](), testbed.GROUPINGS[grouping]
  task = testbed.Regression()
  assert task.examples == 2
  # Each tower has its own example.
  first = task.x.reshape(-1, task.examples, 3)
  assert not (first[:, 0] == first[:, 1]).all()
  with strategy.scope():
    weights = task.variables()
    optimizer = TowerOptimizer(
      CrossShardOptimizer(
        testbed.OPTIMIZERS["Momentum"](), replicas, group_assignment=groups
      )
    )
    testbed.build(optimizer, weights)
  step = caller(
    _train_replicas(strategy, optimizer, weights, task, towers), mode
  )
  for x, y in zip(task.x, task.y, strict=True):
    step(tf.constant(x), tf.constant(y))
  members_of = testbed.groups_of(groups)
  for members in members_of.to_lists():
    factor = (2 if towers == "sum" else 1) * (
      len(members) if replicas == "sum" else 1
    )
    expected = testbed.train_plain(
      task, members, testbed.OPTIMIZERS["Momentum"](), float(factor)
    )
    for variable, value in zip(weights, expected, strict=True):
      copies = testbed.copies(variable)
      assert len(copies) == testbed.REPLICAS
      for replica in members:
        testbed.assert_close(copies[replica], value, f"{place} {replica}")


def _scaled(opt: Any) -> Any:
  """A loss scaling optimizer that starts from a scale of 8."""
  if testbed.IS_TF_KERAS:
    kind = keras.mixed_precision.LossScaleOptimizer
  else:
    kind = keras.optimizers.LossScaleOptimizer
  return kind(opt, initial_scale=8.0)


def _scale_of(optimizer: Any) -> Any:
  return getattr(
    optimizer, "loss_scale" if testbed.IS_TF_KERAS else "dynamic_scale"
  )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_loss_scale_within(mode: str, bad: int) -> None:
  optimizer, c = TowerOptimizer(_scaled(sgd(momentum=0.5))), tf.Variable(10.0)
  global_step = tf.Variable(0)

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(c * features)
    train_op = optimizer.minimize(loss, global_step, [c])
    return TowerSpec(mode, loss, train_op)

  step = caller(replicate_model_fn(model_fn, "sum", TWO), mode)
  step(batch())
  assert [float(c), int(global_step)] == [7.0, 1]
  scale = _scale_of(optimizer.inner_optimizer)
  assert float(tf.convert_to_tensor(scale)) == 8.0
  # Only one tower overflows; all of the step is left out.
  slots = values(optimizer.variables)
  rows = [[3.0], [3.0]]
  rows[bad] = [float("inf")]
  step(batch(*rows))
  assert [float(c), int(global_step)] == [7.0, 1]
  # tf_keras counts the steps that it leaves out too.
  assert int(optimizer.iterations) == (2 if testbed.IS_TF_KERAS else 1)
  scale = _scale_of(optimizer.inner_optimizer)
  assert float(tf.convert_to_tensor(scale)) == 4.0
  assert 4.0 in values(optimizer.variables) or testbed.IS_TF_KERAS
  changed = [
    (a, b)
    for a, b in zip(slots, values(optimizer.variables), strict=True)
    if a != b
  ]
  # The scale, and the count of steps since it last changed.
  counted = {(1, 2)} if testbed.IS_TF_KERAS else {(1, 0)}
  assert set(changed) <= {(8.0, 4.0)} | counted
  step(batch([2.0], [1.0]))
  assert [float(c), int(global_step)] == [7.0 - 1.5 - 3.0, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_scale_within_replicas(mode: str) -> None:
  strategy = testbed.mirrored()
  with strategy.scope():
    c = tf.Variable(10.0)
    global_step = tf.Variable(0)
    scaled = _scaled(sgd())
    optimizer = TowerOptimizer(
      CrossShardOptimizer(scaled, "sum", group_assignment=[[0, 1], [2, 3]])
    )
    testbed.build(optimizer, [c])

  def model_fn(features: Any, mode: str) -> TowerSpec:
    loss = tf.reduce_sum(c * features)
    train_op = optimizer.minimize(loss, global_step, [c])
    return TowerSpec(mode, loss, train_op)

  replicated = replicate_model_fn(model_fn, "sum", ["", ""])

  def step(rows: Any) -> Any:
    return strategy.run(lambda x: replicated(x).loss, args=(rows,))

  run = caller(step, mode)
  # The second tower of the last replica overflows: its group alone skips.
  run(
    testbed.per_replica(
      strategy,
      [
        [[1.0], [2.0]],
        [[3.0], [-1.0]],
        [[1.0], [1.0]],
        [[2.0], [float("inf")]],
      ],
    )
  )
  assert testbed.copies(c) == [5.0, 5.0, 10.0, 10.0]
  assert testbed.copies(global_step) == [1, 1, 0, 0]
  run(
    testbed.per_replica(
      strategy,
      [[[1.0], [2.0]], [[0.0], [1.0]], [[1.0], [1.0]], [[2.0], [0.5]]],
    )
  )
  assert testbed.copies(c) == [1.0, 1.0, 5.5, 5.5]
  assert testbed.copies(global_step) == [2, 2, 1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_scale_around(mode: str) -> None:
  c = tf.Variable(10.0)
  optimizer = _scaled(TowerOptimizer(sgd()))

  def model_fn(features: Any, mode: str) -> TowerSpec:
    grad = tf.reduce_sum(8.0 * features)
    if testbed.IS_TF_KERAS:
      grad = grad / 8.0  # Keras 3 divides in apply_gradients.
    optimizer.apply_gradients([(grad, c)])
    return TowerSpec(mode, grad)

  untouched = towers_bed.Untouched([c])
  step = caller(replicate_model_fn(model_fn, "sum", TWO), mode)
  with pytest.raises(ValueError, match="encapsulates a Tower") as caught:
    step(batch())
  for words in (
    " encapsulates a TowerOptimizer",
    "the gradients of one tower, not at their sum",
    "TowerOptimizer(LossScaleOptimizer(...))",
  ):
    assert words in str(caught.value)
  untouched.check()
  # In one tower there is but one to look at. (Keras has built the optimizer of
  # before in a trace that failed: it is of no use any more.)
  optimizer = _scaled(TowerOptimizer(sgd()))
  caller(replicate_model_fn(model_fn, "sum", TWO[:1]), mode)(batch())
  assert float(c) == 7.0


def test_a_loss_scale_around_replicas() -> None:
  with pytest.raises(ValueError, match="must not encapsulate") as caught:
    _scaled(TowerOptimizer(CrossShardOptimizer("sgd")))
  for words in (
    " must not encapsulate a TowerOptimizer of a CrossShardOptimizer",
    "Put it innermost",
    "TowerOptimizer(CrossShardOptimizer(LossScaleOptimizer",
  ):
    assert words in str(caught.value)


def _adversaries(x: Any, weights: Any) -> tuple[Any, Any]:
  """What a generator and a discriminator of one weight each want."""
  generator, discriminator = weights
  fake = generator * x
  wants = tf.reduce_mean((discriminator * fake - 1.0) ** 2)
  tells = tf.reduce_mean(
    (discriminator * x - 1.0) ** 2 + (discriminator * fake) ** 2
  )
  return wants, tells


@pytest.mark.parametrize("mode", MODES)
def test_two_networks_against_each_other(mode: str) -> None:
  starts = (0.5, -0.25)
  weights = [tf.Variable(value) for value in starts]
  makers: list[Callable[[], Any]] = [
    lambda: keras.optimizers.Adam(0.125),
    lambda: keras.optimizers.RMSprop(0.25),
  ]
  optimizers = [TowerOptimizer(make) for make in makers]

  def model_fn(features: Any, mode: str) -> TowerSpec:
    losses = _adversaries(features, weights)
    ops = [
      optimizer.minimize(loss, var_list=[weight])
      for optimizer, loss, weight in zip(
        optimizers, losses, weights, strict=True
      )
    ]
    return TowerSpec(mode, losses[0], ops[-1])

  step = caller(replicate_model_fn(model_fn, "mean", TWO), mode)
  plain = [testbed.variable(value) for value in starts]
  plain_optimizers = [make() for make in makers]
  rng = np.random.default_rng(5)
  for _ in range(4):
    x = tf.constant(rng.normal(size=(6, 1)), tf.float32)
    step(x)
    with tf.GradientTape(persistent=True) as tape:
      losses = _adversaries(x, plain)
    grads = [
      tape.gradient(loss, towers_bed.native(weight))
      for loss, weight in zip(losses, plain, strict=True)
    ]
    for each, grad, weight in zip(plain_optimizers, grads, plain, strict=True):
      each.apply_gradients([(grad, weight)])
  for weight, expected, start in zip(weights, plain, starts, strict=True):
    assert abs(float(weight) - start) > 0.02
    assert abs(float(weight) - float(expected.numpy())) < 1e-5
  assert [int(each.iterations) for each in optimizers] == [4, 4]


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
