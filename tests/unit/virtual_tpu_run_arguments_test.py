"""How arguments reach the replicas, and results come back."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import virtual_tpu
from tf_cross_shard.virtual_tpu import program, run_arguments

N = 3


def _call(*args: Any, **kwargs: Any) -> run_arguments.RunArguments:
  return run_arguments.RunArguments(args, kwargs, N)


def _marks() -> Any:
  return testbed.per_replica(testbed.virtual(N), [1.0, 2.0, 4.0])


class TestCall:
  def test_sorts_inputs_from_parts_of_the_program(self) -> None:
    call = _call(_marks(), 2, {"a": np.ones([2]), "b": None}, k=tf.constant(5))
    assert [
      [float(tf.reduce_sum(x)) for x in each] for each in call.tensors
    ] == [[1.0, 2.0, 4.0], [2.0] * N, [5.0] * N]
    assert call.specs == [
      tf.TensorSpec([], tf.float32),
      tf.TensorSpec([2], tf.float64),
      tf.TensorSpec([], tf.int32),
    ]

  def test_binds_one_replicas_arguments(self) -> None:
    call = _call(_marks(), 2, {"a": np.ones([2]), "b": None}, k="text")
    args, kwargs = call.bind([each[1] for each in call.tensors])
    assert float(args[0]) == 2.0
    assert args[1] == 2
    assert args[2]["a"].numpy().tolist() == [1.0, 1.0]
    assert args[2]["b"] is None
    assert kwargs == {"k": "text"}

  def test_partly_known_shape(self) -> None:
    rows = [np.ones([i + 1, 2], np.float32) for i in range(N)]
    call = _call(testbed.per_replica(testbed.virtual(N), rows))
    assert call.specs[0].shape.as_list() == [None, 2]
    assert [each.shape[0] for each in call.tensors[0]] == [1, 2, 3]

  def test_to_all(self) -> None:
    tensor = tf.constant(7)
    assert [int(each) for each in _call().to_all(tensor)] == [7] * N

  @pytest.mark.parametrize(
    ("one", "other"),
    [
      ((1,), (1.0,)),
      ((1,), (True,)),
      ((1,), (2,)),
      ((None,), ("",)),
      (([1],), ((1,),)),
      (({"a": 1},), ({"b": 1},)),
      ((np.ones([2]),), (np.ones([3]),)),
      ((np.ones([2]),), (np.ones([2], np.float32),)),
      ((object(),), (object(),)),
    ],
  )
  def test_keys_differ(self, one: Any, other: Any) -> None:
    assert _call(*one).key() == _call(*one).key()
    assert _call(*one).key() != _call(*other).key()

  def test_keys_of_equal_kinds(self) -> None:
    one, other = (
      _call(_marks(), 2, a=np.ones([2])),
      _call(np.float32(3), 2, a=np.zeros([2])),
    )
    assert one.key() == other.key()
    assert hash(one.key()) == hash(other.key())

  def test_another_number_of_replicas(self) -> None:
    two = testbed.per_replica(testbed.virtual(2), [1.0, 2.0])
    with pytest.raises(ValueError, match=r"for 2 replicas.*has 3"):
      _call(two)

  @pytest.mark.parametrize("kind", ["RaggedTensor", "SparseTensor"])
  def test_sparse_and_ragged(self, kind: str) -> None:
    value = {
      "RaggedTensor": lambda: tf.ragged.constant([[1.0], []]),
      "SparseTensor": lambda: tf.sparse.from_dense([1.0, 0.0]),
    }[kind]()
    strategy = testbed.virtual(N)
    distributed = strategy.experimental_distribute_values_from_function(
      lambda context: value
    )
    for argument in (value, distributed):
      with pytest.raises(virtual_tpu.TPUCompileError, match=f"got a {kind}"):
        _call(argument)


class TestCache:
  def test_finds_by_function_and_arguments(self) -> None:
    cache = program.Cache()

    def one() -> None: ...
    def other() -> None: ...

    assert cache.get(one, _call(1)) is None
    cache.add(one, _call(1), "first")
    cache.add(one, _call(2), "second")
    assert cache.get(one, _call(1)) == "first"
    assert cache.get(one, _call(2)) == "second"
    assert cache.get(one, _call(3)) is None
    assert cache.get(other, _call(1)) is None

  def test_methods(self) -> None:
    cache = program.Cache()

    class Owner:
      def one(self) -> None: ...
      def other(self) -> None: ...

    owner, another = Owner(), Owner()
    cache.add(owner.one, _call(), "found")
    assert cache.get(owner.one, _call()) == "found"
    assert cache.get(owner.other, _call()) is None
    assert cache.get(another.one, _call()) is None

  def test_methods_of_equal_owners(self) -> None:
    cache = program.Cache()

    class Owner:
      def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner)

      def __hash__(self) -> int:
        return 7

      def method(self) -> None: ...

    owner, another = Owner(), Owner()
    cache.add(owner.method, _call(), "found")
    assert cache.get(another.method, _call()) is None

  def test_an_argument_that_is_gone_is_not_mistaken(self) -> None:
    cache = program.Cache()

    class Option: ...

    def fn() -> None: ...

    for _ in range(50):
      call = _call(Option())
      assert cache.get(fn, call) is None
      cache.add(fn, call, "found")
      del call

  def test_a_function_takes_its_programs_with_it(self) -> None:
    cache = program.Cache()
    for i in range(3):
      cache.add(lambda x: x, _call(i), object())
    gc.collect()

    def fn() -> None: ...

    cache.add(fn, _call(), "kept")
    assert cache.get(fn, _call()) == "kept"
    assert len(cache._by_owner) == 1


def test_recording_is_this_threads_and_ends() -> None:
  seen: list[Any] = []
  with program.recording(lambda *each: seen.append(each)):
    recorder = program.recorder()
    assert recorder is not None
    recorder("program", "call")  # type: ignore[arg-type]
    elsewhere: list[Any] = []
    thread = threading.Thread(
      target=lambda: elsewhere.append(program.recorder())
    )
    thread.start()
    thread.join()
  assert seen == [("program", "call")]
  assert elsewhere == [None]
  assert program.recorder() is None


class TestOutputs:
  def test_checked(self) -> None:
    found = run_arguments.check_results(
      {"a": (1, None), "b": [np.ones([2])]}, "fn"
    )
    assert found["a"][0].numpy() == 1
    assert found["a"][1] is None
    assert found["b"][0].numpy().tolist() == [1.0, 1.0]

  def test_what_no_program_answers(self) -> None:
    with pytest.raises(TypeError, match=r"my_step, which.*returned <object"):
      run_arguments.check_results([object()], "my_step")

  def test_packed(self) -> None:
    structure = {"a": (1, None), "b": [2]}
    outputs = [
      tuple(tf.constant(10 * k + i) for i in range(N)) for k in range(2)
    ]
    packed = run_arguments.pack_results(structure, outputs)
    results = testbed.per_replica_results
    assert packed["a"][1] is None
    assert results(testbed.virtual(N), packed["a"][0]) == [0, 1, 2]
    assert results(testbed.virtual(N), packed["b"][0]) == [10, 11, 12]

  def test_packed_nothing(self) -> None:
    assert run_arguments.pack_results({"a": (None,), "b": []}, []) == {
      "a": (None,),
      "b": [],
    }


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
