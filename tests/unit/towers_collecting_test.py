"""Gradients of all towers are kept, compared, summed and applied once."""

import threading
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard.towers import gradient_collector


class Recorder:
  """Stands for an optimizer: remembers what it was to apply."""

  def __init__(self, name: str = "SGD('sgd')") -> None:
    self.name = name
    self.applied: list[Any] = []
    self.checked: list[Any] = []
    self.prepared: list[Any] = []

  def call(self, *pairs: tuple[Any, Any]) -> gradient_collector.Call:
    """What it would hand in."""
    grads, variables = zip(*pairs, strict=True)
    return gradient_collector.Call(
      *(self, self.name, grads, variables),
      *(self._apply, self.checked.extend, self.prepared.extend),
    )

  def _apply(self, grads: list[Any], variables: list[Any]) -> int:
    self.applied.append((grads, variables))
    return len(self.applied)


def _run(
  towers: gradient_collector.Towers, *calls: list[gradient_collector.Call]
) -> gradient_collector.Towers:
  """One list of calls for each tower."""
  for each in calls:
    with towers.one():
      assert gradient_collector.current() is towers
      for call in each:
        towers.collect(call)
  assert gradient_collector.current() is None
  return towers


def _number(value: float) -> tf.Tensor:
  return tf.constant(value)


def test_sums_are_applied_once_in_order() -> None:
  first, second = Recorder(), Recorder("Adam('adam')")
  c, d = tf.Variable(1.0), tf.Variable(2.0)
  towers = gradient_collector.Towers(3, "sum")
  _run(
    towers,
    *(
      [
        first.call((_number(10.0 * i), c), (_number(1.0 * i), d)),
        second.call((_number(7.0 * i), d)),
      ]
      for i in (1, 2, 3)
    ),
  )
  assert towers.has_calls
  assert first.applied == second.applied == []
  assert towers.apply() == 1
  [(grads, variables)] = first.applied
  assert [float(grad) for grad in grads] == [60.0, 6.0]
  assert [v is w for v, w in zip(variables, (c, d), strict=True)] == [True] * 2
  [(grads, variables)] = second.applied
  assert [float(grad) for grad in grads] == [42.0]


def test_the_order_of_variables_is_the_last_tower_s() -> None:
  recorder, c, d = Recorder(), tf.Variable(1.0), tf.Variable(2.0)
  towers = _run(
    gradient_collector.Towers(2, "sum"),
    [recorder.call((_number(1.0), c), (_number(10.0), d))],
    [recorder.call((_number(20.0), d), (_number(2.0), c))],
  )
  towers.apply()
  [(grads, variables)] = recorder.applied
  assert {
    v._unique_id: float(g) for g, v in zip(grads, variables, strict=True)
  } == {c._unique_id: 3.0, d._unique_id: 30.0}


def test_rows_stay_rows() -> None:
  recorder, table = Recorder(), tf.Variable(tf.zeros([4, 1]))
  rows = [
    tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant(ids), [4, 1])
    for ids in ([0, 1], [1, 3])
  ]
  towers = _run(
    gradient_collector.Towers(2, "sum"),
    *([recorder.call((g, table))] for g in rows),
  )
  towers.apply()
  [([total], _)] = recorder.applied
  assert isinstance(total, tf.IndexedSlices)
  found = zip(total.indices.numpy(), total.values.numpy(), strict=True)
  assert sorted((int(i), float(v[0])) for i, v in found) == [
    (0, 1.0),
    (1, 3.0),
    (3, 2.0),
  ]


def test_rows_and_dense_become_dense() -> None:
  recorder, table = Recorder(), tf.Variable(tf.zeros([2, 1]))
  rows = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([1]), [2, 1])
  towers = _run(
    gradient_collector.Towers(3, "sum"),
    [recorder.call((rows, table))],
    [recorder.call((tf.constant([[10.0], [20.0]]), table))],
    [recorder.call((None, table))],
  )
  towers.apply()
  [([total], _)] = recorder.applied
  assert total.numpy().tolist() == [[10.0], [21.0]]


def test_none_in_all_towers_stays_none() -> None:
  recorder, c, d = Recorder(), tf.Variable(1.0), tf.Variable(2.0)
  towers = _run(
    gradient_collector.Towers(2, "sum"),
    *([recorder.call((None, c), (_number(x), d))] for x in (1.0, 4.0)),
  )
  towers.apply()
  [(grads, _)] = recorder.applied
  assert grads[0] is None
  assert float(grads[1]) == 5.0


@pytest.mark.parametrize(
  ("count", "reduction", "factor"),
  [(1, "mean", 1.0), (4, "mean", 0.25), (4, "sum", 1.0), (2, "mean", 0.5)],
)
def test_the_factor(count: int, reduction: str, factor: float) -> None:
  assert gradient_collector.Towers(count, reduction).factor == factor


class TestOddTowers:
  def _fails(self, *calls: list[gradient_collector.Call]) -> str:
    towers = gradient_collector.Towers(len(calls), "sum")
    with pytest.raises(ValueError, match="in every tower") as caught:
      _run(towers, *calls)
    text = str(caught.value)
    assert text.startswith("`model_fn` must call the same optimizers in the")
    assert gradient_collector.current() is None
    return text

  def test_words(self) -> None:
    a, b, c = Recorder("A('a')"), Recorder("B('b')"), tf.Variable(1.0)
    d = tf.Variable(1.0, name="d")
    one, two = a.call((_number(1.0), c)), b.call((_number(1.0), c))
    assert (
      "tower 1 called 1 optimizers, tower 0 called 2: B('b') is missing"
      in self._fails([one, two], [one])
    )
    assert "tower 2 called B('b'), which tower 0 did not call" in self._fails(
      [one], [one], [one, two]
    )
    assert "tower 1 called B('b') where tower 0 called A('a')" in self._fails(
      [one, two], [two, one]
    )
    other = a.call((_number(1.0), d))
    assert "tower 1 called A('a') with the variables ['d" in self._fails(
      [one], [other]
    )

  def test_two_objects_of_one_kind(self) -> None:
    first, second = Recorder("A('a')"), Recorder("A('a_1')")
    c = tf.Variable(1.0)
    calls = [each.call((_number(1.0), c)) for each in (first, second)]
    assert "tower 1 called A('a_1') where" in self._fails(
      calls, list(reversed(calls))
    )
    assert "tower 1 called A('a_1') where" in self._fails(calls[:1], calls[1:])

  def test_each_tower_may_make_its_own(self) -> None:
    c = tf.Variable(1.0)
    towers = gradient_collector.Towers(2, "sum")
    made = []
    for i in (1, 2):
      with towers.one():
        for name in ("a", "b"):
          made.append(Recorder(f"A('{name}_{i}')"))
          gradient_collector.note_made(made[-1])
          towers.collect(made[-1].call((_number(float(i)), c)))
    towers.apply()
    assert [len(each.applied) for each in made] == [0, 0, 1, 1]
    assert [float(each.applied[0][0][0]) for each in made[2:]] == [3.0, 3.0]

  def test_its_own_of_another_name(self) -> None:
    c = tf.Variable(1.0)
    towers = gradient_collector.Towers(2, "sum")

    def tower(name: str) -> None:
      with towers.one():
        made = Recorder(f"A('{name}')")
        gradient_collector.note_made(made)
        towers.collect(made.call((_number(1.0), c)))

    tower("a_1")
    with pytest.raises(ValueError, match="tower 1 called A"):
      tower("b_1")


def test_an_error_ends_the_tower() -> None:
  towers = gradient_collector.Towers(2, "sum")
  with pytest.raises(KeyError), towers.one():
    raise KeyError
  assert gradient_collector.current() is None
  assert towers.tape is None


def test_other_threads_are_in_no_tower() -> None:
  found: list[Any] = []
  with gradient_collector.Towers(2, "sum").one():
    thread = threading.Thread(
      target=lambda: found.append(gradient_collector.current())
    )
    thread.start()
    thread.join()
    assert gradient_collector.current() is not None
  assert found == [None]


def test_a_tape_runs_in_eager_towers_only() -> None:
  towers = gradient_collector.Towers(2, "sum")
  c = tf.Variable(3.0)
  with towers.one():
    loss = c * c
    with gradient_collector.not_recording():
      hidden = 5.0 * c
    assert towers.tape is not None
    assert float(towers.tape.gradient(loss, c)) == 6.0
    assert towers.tape.gradient(hidden, c) is None

  @tf.function
  def traced() -> None:
    with towers.one():
      assert towers.tape is None

  traced()
  with gradient_collector.not_recording():  # Outside it does nothing.
    pass


def test_who_may_be_called_in_a_tower() -> None:
  gradient_collector.check_outside("mine")
  with gradient_collector.Towers(1, "sum").one():
    gradient_collector.check_outside("mine")
  with (
    gradient_collector.Towers(3, "sum").one(),
    pytest.raises(ValueError, match="through a TowerOptimizer") as caught,
  ):
    gradient_collector.check_outside("mine")
  assert "it calls mine" in str(caught.value)
  assert "each of the 3 towers by themselves" in str(caught.value)
  assert "Use TowerOptimizer(mine)" in str(caught.value)


def test_use_is_noted() -> None:
  gradient_collector.note_use()
  assert gradient_collector.has_been_used() is True


def test_gradients_of_a_branch_cannot_leave_it() -> None:
  recorder, c = Recorder(), tf.Variable(1.0)

  @tf.function(autograph=False)
  def step(x: Any) -> Any:
    towers = gradient_collector.Towers(2, "sum")

    def collect() -> Any:
      towers.collect(recorder.call((x, c)))
      return x

    with towers.one():
      return tf.cond(x > 0.0, collect, lambda: x)

  with pytest.raises(ValueError, match=r"was called inside tf\.cond"):
    step(tf.constant(1.0))


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
