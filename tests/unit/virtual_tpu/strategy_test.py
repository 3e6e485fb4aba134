"""VirtualTPUStrategy as a user sees it."""

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer, virtual_tpu

N = 3
_strategy = functools.partial(testbed.virtual, N)
MARKS = [1.0, 2.0, 4.0]  # Powers of two tell which replicas are in a sum.
X_Y = tuple(
  np.random.default_rng(3).normal(size=(36, size)).astype("float32")
  for size in (5, 1)
)


class Pair(NamedTuple):
  """A structure of the user's."""

  first: Any
  second: Any


def _values(values: Any) -> Any:
  return testbed.per_replica(_strategy(), values)


def _marks() -> Any:
  return _values(MARKS)


def _own_mark() -> tf.Tensor:
  """Returns this replica's mark, inside `strategy.run`."""
  return tf.constant(MARKS)[testbed.replica_id()]


def _results(value: Any) -> Any:
  return testbed.per_replica_results(_strategy(), value)


def _all_reduce(value: Any, operation: str = "SUM") -> Any:
  return tf.distribute.get_replica_context().all_reduce(operation, value)


def _all_gather(value: Any, axis: int) -> Any:
  return tf.distribute.get_replica_context().all_gather(value, axis)


def _run(fn: Callable[..., Any], *args: Any) -> Any:
  return _strategy().run(fn, args)


def _run_in_function(fn: Callable[..., Any], *args: Any) -> Any:
  return tf.function(lambda *given: _strategy().run(fn, given))(*args)


both_ways = pytest.mark.parametrize("run", [_run, _run_in_function])


def test_number_of_replicas_is_checked() -> None:
  for number in (0, True, 2.0):
    with pytest.raises(ValueError, match=r"`num_replicas` must be an integer"):
      virtual_tpu.VirtualTPUStrategy(number)  # type: ignore[arg-type]


class TestArguments:
  @both_ways
  def test_structures(self, run: Any) -> None:
    eager = tf.constant([0.0, 10.0])
    with _strategy().scope():
      variable = tf.keras.Variable(100.0)

    def replica_fn(pair: Pair, none: None, options: dict[str, Any]) -> Any:
      assert none is None
      scaled = pair.first * options["factor"] + variable
      return Pair(scaled, (pair.second + eager, none))

    shared = np.array([5.0, 6.0], np.float32)
    result = run(replica_fn, Pair(_marks(), shared), None, {"factor": 2.5})
    assert isinstance(result, Pair)
    assert _results(result.first) == [102.5, 105.0, 110.0]
    assert _results(result.second[0]) == [[5.0, 16.0]] * N
    assert result.second[1] is None

  def test_symbolic_tensors_of_the_surrounding_function(self) -> None:
    @tf.function
    def step(x: tf.Tensor, marks: Any) -> Any:
      doubled = 2.0 * x

      def replica_fn(mark: tf.Tensor) -> tf.Tensor:
        return tf.cond(mark > 1.0, lambda: doubled + mark, lambda: doubled)

      result = _strategy().run(replica_fn, (marks,))
      assert [each.shape for each in result.values] == [()] * N
      return result

    for x in (1.0, 5.0):
      result = step(tf.constant(x), _marks())
      assert _results(result) == [2 * x, 2 * x + 2, 2 * x + 4]

  def test_new_shapes(self) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def step(x: tf.Tensor) -> Any:
      return _strategy().run(
        lambda x: (tf.reduce_sum(x) * _own_mark(), x), (x,)
      )

    for rows in (2, 5, 2):
      total, same = step(tf.ones([rows, 2]))
      assert _results(total) == [2.0 * rows * mark for mark in MARKS]
      assert same.values[1].shape == (rows, 2)


class TestFunctions:
  @both_ways
  def test_argument_kinds(self, run: Any) -> None:
    class Callee:
      def method(self, x: tf.Tensor) -> tf.Tensor:
        return x + 1.0

      __call__ = method

    callee = Callee()
    for fn in (
      callee.method,
      callee,
      functools.partial(tf.add, 1.0),
      tf.function(callee.method, jit_compile=True),
    ):
      assert _results(run(fn, _marks())) == [2.0, 3.0, 5.0], fn

  def test_an_error_leaves_everything_as_it_was(self) -> None:
    with _strategy().scope():
      variable = tf.Variable(1.0)

    def nested() -> None:
      variable.assign_add(1.0)
      _run(lambda: None)

    for run in (_run, _run_in_function):
      with pytest.raises(RuntimeError, match=r"strategy\.run was called in"):
        run(nested)
      assert testbed.copies(variable) == [1.0] * N
      assert not tf.distribute.has_strategy()

  def test_traced_again_with_the_variables_that_it_makes(self) -> None:
    """Keras asks in Python whether the optimizer's state has been made.

    This also works if Python deletes as many other variables as the trace
    creates.
    """
    made: list[Any] = []
    with _strategy().scope():
      gone = [tf.Variable(1.0)]

    def replica_fn() -> tf.Tensor:
      if not made:
        made.append(tf.Variable(1.0))
        gone.clear()
        gc.collect()
        return tf.zeros([0])
      return made[0] + tf.ones([2])

    assert _results(_run(replica_fn)) == [[2.0, 2.0]] * N

  def test_variables_of_others(self) -> None:
    plain = tf.Variable(1.0, name="plain")
    with testbed.virtual(2).scope():
      foreign = tf.Variable(1.0, name="foreign")
    for variable in (plain, foreign):
      words = rf"not on the virtual TPU.*{variable.name}.*strategy\.scope"
      with pytest.raises(virtual_tpu.TPUCompileError, match=words):
        _run(lambda v=variable: v + 1.0)


class TestResults:
  def test_variable_kinds(self) -> None:
    def replica_fn(x: tf.Tensor) -> Any:
      constant = tf.constant(5)
      return {
        "same": (x, x),
        "none": None,
        "constants": [3, constant, constant, np.float32(2)],
        "empty": tf.zeros([0, 3]),
        "rows": tf.IndexedSlices(x[None], testbed.replica_id()[None]),
        "nothing": (),
      }

    result = _run(replica_fn, _marks())
    assert [_results(value) for value in result["same"]] == [MARKS] * 2
    constants = [_results(value) for value in result["constants"]]
    assert constants == [[3] * N, [5] * N, [5] * N, [2.0] * N]
    assert (result["none"], result["nothing"]) == (None, ())
    assert [own.shape for own in result["empty"].values] == [(0, 3)] * N
    for i, own in enumerate(result["rows"].values):
      assert own.indices.numpy().tolist() == [i]
      assert own.values.numpy().tolist() == [MARKS[i]]
    assert _run(lambda: None) is None

  def test_dtypes(self) -> None:
    names = "bool uint8 int8 int32 int64 bfloat16 half float64 complex64"
    values = {
      name: [tf.cast([i, 1], name) for i in range(N)] for name in names.split()
    }
    given = {name: _values(own) for name, own in values.items()}
    result = _run_in_function(
      lambda x: tf.nest.map_structure(tf.identity, x), given
    )
    for name, own in values.items():
      assert {x.dtype for x in result[name].values} == {tf.as_dtype(name)}
      assert _results(result[name]) == [x.numpy().tolist() for x in own]


class TestControlFlow:
  def test_sums_in_conditionals_and_loops(self) -> None:
    """Tests a loop on the TPU inside a loop on the host."""
    with _strategy().scope():
      optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(1.0), "sum")
      weight = tf.Variable(0.0)
      optimizer.build([weight])

    def replica_fn(x: tf.Tensor) -> Any:
      everywhere = tf.constant(1.0) > 0.0
      in_cond = tf.cond(everywhere, lambda: _all_reduce(x), lambda: x)
      for i in tf.range(3):
        x = _all_reduce(x) + tf.cast(i, tf.float32)
        optimizer.apply_gradients([(x, weight)])
      return in_cond, x

    @tf.function
    def host(marks: Any) -> Any:
      for _ in tf.range(2):
        _strategy().run(replica_fn, (marks,))
      return _strategy().run(replica_fn, (marks,))

    in_cond, in_loop = host(_marks())
    assert _results(in_cond) == [7.0] * N
    steps = [7.0, 7.0 * 3 + 1, (7.0 * 3 + 1) * 3 + 2]
    assert _results(in_loop) == steps[-1:] * N
    assert testbed.copies(weight) == [3 * N * -sum(steps)] * N
    assert int(optimizer.iterations.numpy()) == 9


class TestCollectives:
  def test_all_reduce(self) -> None:
    def reduce(x: tf.Tensor) -> Any:
      constant = tf.constant([2], x.dtype)
      return [
        _all_reduce({"sum": x})["sum"],
        _all_reduce([x], "MEAN")[0],
        _all_reduce(constant),
        _all_reduce(constant[:0]),
      ]

    dtypes = ("float32", "float64", "half", "bfloat16", "int32")
    sums = _run(
      lambda given: list(map(reduce, given)),
      [
        _values([tf.cast([3 * i, 3], dtype) for i in range(N)])
        for dtype in dtypes
      ],
    )
    expected = [[[9, 9]] * N, [[3, 3]] * N, [[2 * N]] * N, [[]] * N]
    for results in sums:
      assert [_results(result) for result in results] == expected

  def test_float64_keeps_its_digits_next_to_words(self) -> None:
    numbers = [2.0**60 + 2.0**10 * i for i in range(N)]
    number, word = _run(
      lambda x, y: (_all_reduce(x), _all_reduce(y)),
      _values([tf.constant(each, tf.float64) for each in numbers]),
      _values([tf.constant([i, 7], tf.uint32) for i in range(N)]),
    )
    assert _results(number) == [sum(numbers)] * N
    assert _results(word) == [[3, 21]] * N

  def test_gradient_of_a_sum(self) -> None:
    def replica_fn(x: tf.Tensor) -> Any:
      with tf.GradientTape() as tape:
        tape.watch(x)
        y = _all_reduce(x) * _own_mark()
      return tape.gradient(y, x)

    assert _results(_run(replica_fn, _marks())) == [7.0] * N

  def test_all_gather_of_every_bit(self) -> None:
    rows = [[[i, np.inf, 1.5, -0.0]] for i in range(N)]
    names = "float64 float8_e5m2 bfloat16 bool int64"
    values = {
      name: [tf.cast(row, name) for row in rows] for name in names.split()
    }
    values["complex"] = [tf.constant([[complex(i, -0.0)]]) for i in range(N)]
    values["NaN"] = [tf.constant([[i, np.nan]]) for i in range(N)]
    given = {name: _values(own) for name, own in values.items()}
    gathered, columns = _run(
      lambda x: (_all_gather(x, 0), _all_gather(x["int64"], 1)), given
    )
    for name, own in values.items():
      expected = np.concatenate(own).view(np.uint8).tolist()
      for result in gathered[name].values:
        assert result.dtype == own[0].dtype
        assert result.numpy().view(np.uint8).tolist() == expected, name
    assert _results(columns) == [np.hstack(values["int64"]).tolist()] * N

  @pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
  def test_all_to_all(self, dtype: str) -> None:
    sent = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 1 << 20]], dtype)
    all_to_all = _strategy().extended.all_to_all
    received = _run(lambda x: all_to_all(x, [[0, 1, 2]]), _values(list(sent)))
    np.testing.assert_array_equal(_results(received), sent.T)

  def test_merge_call(self) -> None:
    with _strategy().scope():
      variable = tf.Variable(1.0)

    def merge(strategy: Any, x: Any) -> Any:
      total = strategy.reduce("SUM", x, axis=None)
      strategy.extended.update(
        variable, lambda v, value: v.assign_add(value), args=(total,)
      )
      return total

    def replica_fn(x: tf.Tensor) -> Any:
      context = tf.distribute.get_replica_context()
      return context.merge_call(merge, args=(x,))

    assert _results(_run(replica_fn, _marks())) == [7.0] * N
    assert testbed.copies(variable) == [8.0] * N


class TestReduceAndGather:
  def test_reduce(self) -> None:
    rows = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    values = _values([m * rows for m in MARKS])
    for axis, total, mean in (
      (None, [[7, 14], [21, 28]], [[7 / 3, 14 / 3], [7, 28 / 3]]),
      (0, [28, 42], [28 / 6, 7]),
      (-1, [21, 49], [3.5, 49 / 6]),
      ([0, 1], 70, 70 / 12),
    ):
      reduce = functools.partial(_strategy().reduce, value=values, axis=axis)
      for found in (reduce, tf.function(reduce)):
        np.testing.assert_array_equal(found("SUM"), total)
        np.testing.assert_allclose(found("mean"), mean, rtol=1e-6)

  def test_uneven_values_are_weighted_by_rows(self) -> None:
    strategy = _strategy()
    rows = [np.full([i + 1], m, np.float32) for i, m in enumerate(MARKS)]
    uneven = _values(rows)
    mean = strategy.reduce("MEAN", uneven, axis=0)
    np.testing.assert_allclose(mean, (1 + 2 * 2 + 3 * 4) / 6, rtol=1e-6)
    joined = strategy.gather(uneven, axis=0)
    assert joined.numpy().tolist() == [1, 2, 2, 4, 4, 4]
    counts = _values([[[3]], [[6]], [[12]]])
    result = strategy.reduce("SUM", {"counts": [counts]}, axis=None)
    assert result["counts"][0].numpy().tolist() == [[21]]
    assert strategy.reduce("MEAN", counts, axis=0).numpy() == 7
    assert float(strategy.reduce("SUM", 2.0, axis=None)) == 2.0 * N
    assert strategy.gather(counts, axis=1).numpy().tolist() == [[3, 6, 12]]

  def test_mean_of_integers_as_mirrored(self) -> None:
    found = []
    for strategy in (_strategy(), testbed.mirrored(N)):
      counts = testbed.per_replica(strategy, [[0, 1], [1, 2], [1, 3]])
      in_run = tf.function(
        lambda s=strategy, x=counts: s.run(_all_reduce, (x, "MEAN"))
      )()
      for mean in (
        strategy.reduce("MEAN", counts, axis=None),
        strategy.reduce("MEAN", counts, axis=0),
        *strategy.experimental_local_results(in_run),
      ):
        found.append((mean.dtype, mean.numpy().tolist()))
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert found[0] == (tf.float64, [2 / 3, 2.0])

  def test_reduce_by_a_replica(self) -> None:
    with pytest.raises(RuntimeError, match=r"get_replica_context\(\)"):
      _run(lambda x: _strategy().reduce("SUM", x, axis=None), _marks())


class TestDatasets:
  def test_batches_are_split(self) -> None:
    """Also those in dictionaries, and with None in them."""
    data = tf.data.Dataset.range(12).batch(6, drop_remainder=True)
    data = data.map(lambda x: ({"x": x, "pairs": tf.stack([x, -x], 1)}, None))
    distribute = _strategy().experimental_distribute_dataset
    [(first, nothing), (last, _)] = distribute(data)
    assert _results(first["x"]) == [[0, 1], [2, 3], [4, 5]]
    assert _results(last["pairs"])[0] == [[6, -6], [7, -7]]
    assert nothing is None

  def test_from_a_function(self) -> None:
    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
      size = context.get_per_replica_batch_size(6)
      return tf.data.Dataset.range(12).batch(size, drop_remainder=True)

    data = _strategy().distribute_datasets_from_function(make)
    elements = list(map(_results, data))
    assert elements[1] == [[6, 7], [8, 9], [10, 11]]

  @pytest.mark.parametrize(
    ("data", "words"),
    [
      (tf.data.Dataset.range(12).batch(7, True), r"\(7,\), which 3 replicas"),
      (tf.data.Dataset.range(12).batch(6), r"\(None,\), but batches of a TPU"),
      (tf.data.Dataset.range(3), r"\(\), which 3 replicas"),
    ],
  )
  def test_what_replicas_cannot_share(self, data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words}.*drop_remainder=True"):
      _strategy().experimental_distribute_dataset(data)

  def test_what_is_not_dense_or_of_no_known_shape(self) -> None:
    ragged = tf.ragged.constant([[1], [2, 3], [4]])
    data = tf.data.Dataset.from_tensors({"x": ragged})
    with pytest.raises(ValueError, match=r"'x' is a RaggedTensorSpec"):
      _strategy().experimental_distribute_dataset(data)
    unknown = tf.data.Dataset.range(12).batch(2)
    with pytest.raises(ValueError, match=r"drop_remainder=True"):
      _strategy().distribute_datasets_from_function(lambda _: unknown)


@training.in_both
@pytest.mark.parametrize("size", [7, 10])
def test_batches_that_do_not_divide(which: str, size: int) -> None:
  """With 7, the last batch is smaller; with 10, none can be shared."""
  home, _ = training.KERASES[which]
  x, y = np.ones([10, 5], "f"), np.ones([10, 1], "f")
  with _strategy().scope():
    model = home.Sequential([home.Input((5,)), home.layers.Dense(1)])
    model.compile("sgd", "mse")
  before = model.get_weights()
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
  acts: list[Callable[[], Any]] = [
    lambda: model.fit(x, y, batch_size=size, verbose=0),
    lambda: model.fit(data, verbose=0),
    lambda: model.evaluate(x, y, batch_size=size, verbose=0),
    lambda: model.predict(x, batch_size=size, verbose=0),
    lambda: _strategy().experimental_distribute_dataset(data),
  ]
  if which == "tf_keras":  # In Keras 3, each replica has the whole batch.
    acts += [
      lambda: model.train_on_batch(x[:size], y[:size]),
      lambda: model.test_on_batch(x[:size], y[:size]),
    ]
  for act in acts:
    with pytest.raises(ValueError, match=r"drop_remainder=True"):
      act()
  np.testing.assert_equal(model.get_weights(), before)


@pytest.mark.parametrize(
  ("fn", "words"),
  [
    (lambda x: tf.py_function(lambda y: y, [x], "float32"), "py_function"),
    (lambda x: tf.print(x), r"tf\.print"),
    (lambda x: tf.constant("text"), "strings, files"),
    (lambda x: tf.strings.length(tf.as_string(x)), "AsString"),
    (lambda x: tf.boolean_mask(x, x > 1), "must not depend.*boolean_mask"),
    (lambda x: tf.where(x > 1), "tf.where with three arguments"),
  ],
)
def test_what_tpus_cannot_do(fn: Any, words: str) -> None:
  with pytest.raises(virtual_tpu.TPUCompileError, match=words):
    _run(fn, _values([[m, 1.0] for m in MARKS]))


class TestKeras:
  def _train(
    self, strategy: Any, data: tuple[Any, Any], built: bool, **options: Any
  ) -> Any:
    """The copies of the weights, and what fit, evaluate and predict return."""
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)]
    with strategy.scope():
      model = tf.keras.Sequential(
        [tf.keras.Input((5,)), *layers] if built else layers
      )
      model.compile(
        tf.keras.optimizers.SGD(0.05), "mse", metrics=["mae"], **options
      )
    fit = functools.partial(model.fit, validation_data=data[1], verbose=0)
    history = fit(data[0], epochs=2).history
    evaluated = model.evaluate(data[1], verbose=0)
    predicted = model.predict(X_Y[0], batch_size=12, verbose=0)
    weights = [testbed.copies(variable) for variable in model.weights]
    return weights, [*history.values(), evaluated, predicted[:, 0]]

  def test_fit_learns_what_plain_keras_learns(self) -> None:
    rows = tf.data.Dataset.from_tensor_slices(X_Y)
    whole, parts = rows.batch(12, True), rows.batch(4, True)
    plain = tf.distribute.get_strategy()
    expected, expected_results = self._train(plain, (whole, whole), True)
    dealt = _strategy().distribute_datasets_from_function(lambda _: parts)
    # Three steps an epoch: the last execution of two is cut short.
    for data, built, options in (
      (whole, False, {"steps_per_execution": 2}),
      (dealt, True, {"run_eagerly": True}),
    ):
      weights, results = self._train(
        _strategy(), (data, whole), built, **options
      )
      for actual, numbers in zip(results, expected_results, strict=True):
        np.testing.assert_allclose(actual, numbers, rtol=1e-5)
      for copies, [number] in zip(weights, expected, strict=True):
        assert len(copies) == N
        for copy in copies:
          np.testing.assert_allclose(copy, number, rtol=1e-4, atol=1e-6)
          np.testing.assert_array_equal(copy, copies[0])

  def test_an_update_on_the_host_is_the_replicas_own(self) -> None:
    """Keras does this with moving averages when `fit` ends."""
    with _strategy().scope():
      weight, average = tf.keras.Variable(0.0), tf.keras.Variable(0.0)
    _run(lambda: average.assign(_own_mark()))
    _strategy().extended.update(
      weight.value, lambda copy, value: copy.assign(value), args=(average,)
    )
    assert testbed.copies(weight) == MARKS

  @pytest.mark.parametrize("jit_compile", [False, True])
  def test_metrics_of_batches_in_tf_keras(self, jit_compile: bool) -> None:
    """tf_keras computes the results of a batch's metrics in each replica."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=[12, 2]).astype("f")
    y = x.sum(1, keepdims=True) + draw.normal(size=[12, 1]) > 0

    def train(strategy: Any, jit_compile: bool) -> Any:
      with strategy.scope():
        model = tf_keras.Sequential(
          [tf_keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
        )
        kinds = tf_keras.metrics
        metrics = [kinds.AUC(num_thresholds=5), kinds.Precision()]
        model.compile("sgd", "mse", metrics=metrics, jit_compile=jit_compile)
      batches = [
        model.train_on_batch(x, y),
        model.train_on_batch(x[:6], y[:6], reset_metrics=False),
        model.test_on_batch(x, y),
      ]
      history = model.fit(x, y, batch_size=6, shuffle=False, verbose=0).history
      return [*np.ravel(batches), *np.ravel([*history.values()])]

    found = train(_strategy(), jit_compile)
    plain = train(tf.distribute.get_strategy(), False)
    np.testing.assert_allclose(found, plain, rtol=1e-5)

  def test_what_auto_stands_for(self) -> None:
    """As in MirroredStrategy."""
    kinds = tf.VariableSynchronization
    with _strategy().scope():
      assert tf.Variable(1.0).synchronization == kinds.ON_WRITE
      read = tf.Variable(1.0, synchronization=kinds.ON_READ)
      assert read.synchronization == kinds.ON_READ


def test_gradients_on_the_host() -> None:
  with _strategy().scope():
    variable = tf.Variable(3.0)
    with tf.GradientTape() as tape:
      inside = variable * variable
    assert float(tape.gradient(inside, variable)) == 6.0
  _run(lambda: variable.assign(_own_mark() + 1.0))
  with tf.GradientTape() as tape:
    outside = variable * variable
  assert float(tape.gradient(outside, variable)) == 4.0
  assert testbed.copies(variable) == [2.0, 3.0, 5.0]
