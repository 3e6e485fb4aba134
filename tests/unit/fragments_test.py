"""Fragments that groups join in turn and late, and differences in int8."""
# bazel: tags=slow

import contextlib
import pathlib
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import int8_oracle, islands, replica_state_cases, testbed
from tests.support.islands import PAIRS, SINGLETONS, STRIDED
from tf_cross_shard import callbacks
from tf_cross_shard.callbacks import fragments as fragments_lib

pytestmark = pytest.mark.slow

SHAPES = [(3,), (2, 130), (5, 4), ()]
# Fragments by bytes, the largest first, by how many there are.
FRAGMENTS = {1: [[0, 1, 2, 3]], 2: [[1], [0, 2, 3]], 3: [[1], [2], [0, 3]]}
STEPS = 14
_rng = np.random.default_rng(5)
# By weight: [steps, replicas, ...]. The second weight's differ most.
GRADS = [
  scale * _rng.normal(size=(STEPS, testbed.REPLICAS, *shape)).astype("f")
  for scale, shape in zip((1.0, 8.0, 2.0, 1.0), SHAPES, strict=True)
]


def make(outer: callbacks.OuterOptimizer, **options: Any) -> islands.Islands:
  """Weights that groups train apart."""
  return islands.Islands(outer, SHAPES, **options)


def train(loop: islands.Islands, steps: range) -> None:
  """Trains on those of the gradients above."""
  loop.train(*(rows[steps.start : steps.stop] for rows in GRADS))


def oracle(
  groups: Any,
  every: int,
  count: int = 1,
  delay: int = 0,
  alpha: float = 0.5,
  warmup: int = 0,
  window: int = 1,
  is_int8: bool = False,
) -> list[list[np.ndarray]]:
  """The weights of each group after each step, by DiLoCo's outer optimizer."""
  size = sum(int(np.prod(shape)) for shape in SHAPES)
  cuts = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
  flat = np.concatenate(
    [rows.reshape(STEPS, testbed.REPLICAS, -1) for rows in GRADS], axis=2
  )
  places = np.split(np.arange(size), cuts)
  parts = [
    np.concatenate([places[i] for i in rows]) for rows in FRAGMENTS[count]
  ]
  anchor, velocity = np.zeros(size, "f"), np.zeros(size, "f")
  weights = np.zeros([len(groups), size], "f")
  sent, kept = np.zeros_like(weights), np.zeros_like(weights)
  result = []

  def meet(at: np.ndarray, share: float) -> None:
    travelled = sent[:, at]
    if is_int8:
      travelled = np.stack([int8_oracle.rounded(row) for row in travelled])
      kept[:, at] = sent[:, at] - travelled
    mean = travelled.mean(0)
    velocity[at] = 0.9 * velocity[at] - 0.7 * mean
    anchor[at] += 0.9 * velocity[at] - 0.7 * mean
    weights[:, at] = share * weights[:, at] + (1 - share) * anchor[at]

  for call in range(1, STEPS + 1):
    if call % window == 0:
      rows = flat[call - window : call].mean(0)
      weights -= 0.5 * np.stack([rows[list(m)].sum(0) for m in groups])
      step = call // window - warmup
      if step <= 0:
        anchor[:] = weights.mean(0)
        weights[:] = anchor
      for i, at in enumerate(parts):
        begin = every * (i + 1) // count
        if (
          delay
          and step - delay >= begin
          and ((step - delay - begin) % every == 0)
        ):
          meet(at, alpha)
        if step >= begin and (step - begin) % every == 0:
          sent[:, at] = anchor[at] - weights[:, at] + kept[:, at]
          if not delay:
            meet(at, 0.0)
    rows = np.split(weights.copy(), cuts, axis=1)
    result.append(
      [row.reshape(-1, *s) for row, s in zip(rows, SHAPES, strict=True)]
    )
  return result


@pytest.mark.parametrize(
  ("where", "groups", "library", "options", "window"),
  [
    ("mirrored", PAIRS, keras, {}, 1),
    ("mirrored", SINGLETONS, tf_keras, {"warmup": 3}, 1),
    ("mirrored", PAIRS, keras, {"fragments": 2}, 1),
    ("mirrored", STRIDED, tf_keras, {"delay": 3}, 1),
    ("virtual", STRIDED, keras, {"fragments": 3, "delay": 2, "warmup": 2}, 1),
    ("mirrored", PAIRS, keras, {"fragments": 2, "delay": 1, "alpha": 0.0}, 2),
    ("mirrored", SINGLETONS, tf_keras, {"fragments": 2, "int8": True}, 1),
    ("virtual", PAIRS, keras, {"delay": 2, "alpha": 0.25, "int8": True}, 1),
  ],
)
def test_numpy(
  where: str, groups: Any, library: Any, options: dict[str, Any], window: int
) -> None:
  """After every step, over several joins of each fragment."""
  own = dict(options)
  wire = "int8" if own.pop("int8", False) else None
  outer = callbacks.OuterOptimizer(4, wire_dtype=wire, **own)
  accumulation = {"accumulate_steps": window} if window > 1 else {}
  loop = make(
    outer, where=where, groups=groups, library=library, **accumulation
  )
  own["count"] = own.pop("fragments", 1)
  right = oracle(groups, 4, window=window, is_int8=wire is not None, **own)
  joined = 0
  for step in range(STEPS):
    train(loop, range(step, step + 1))
    for found, expected in zip(loop.values(), right[step], strict=True):
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)
    joined += (right[step][1] == right[step][1][0]).all()
  assert joined < STEPS


def test_replicas_of_one_process_need_no_collectives() -> None:
  """In `fit`, beside the threads of its data, those of int32 hung."""
  outer = callbacks.OuterOptimizer(2, wire_dtype="int8")
  loop = make(outer)
  [part] = outer._parts
  graph = part._exchange_and_apply.get_concrete_function().graph
  kinds = {operation.type for operation in graph.get_operations()}
  assert "Bitcast" in kinds
  assert not [kind for kind in kinds if "Collective" in kind]
  train(loop, range(2))


def test_each_fragment_has_its_count_of_updates() -> None:
  """Adam's first step, and Nadam's, is as long for the last fragment."""
  for library, name in ((keras, "Adam"), (tf_keras, "Adam"), (keras, "Nadam")):
    adam = getattr(library.optimizers, name)(0.125)
    outer = callbacks.OuterOptimizer(3, adam, fragments=3)
    loop = make(outer, library=library)
    first = make(
      callbacks.OuterOptimizer(
        3, getattr(library.optimizers, name)(0.125), delay=0
      ),
      library=library,
    )
    train(loop, range(3))
    train(first, range(3))
    # The last fragment joins in step 3, as all do without fragments.
    for i in FRAGMENTS[3][2]:
      np.testing.assert_array_equal(loop.values()[i], first.values()[i])
    states = [part._own for part in outer._parts]
    assert all(int(own[0].numpy()) == 1 for own in states)


def make_adam(library: Any) -> Any:
  return library.optimizers.Adam(0.1)


@pytest.mark.parametrize(
  ("where", "library"), [("mirrored", tf_keras), ("virtual", keras)]
)
def test_goes_on_from_a_file_in_mid_delay(
  where: str, library: Any, tmp_path: pathlib.Path
) -> None:
  path = tmp_path / "state"

  def start() -> islands.Islands:
    outer = callbacks.OuterOptimizer(
      4, make_adam(library), fragments=2, delay=3, wire_dtype="int8"
    )
    return make(outer, where=where, library=library, opt=make_adam)

  islands.check_resumes(start, GRADS, 8, path)
  with np.load(path) as file:
    assert file["group_0/optimizer/outer_sent"].tolist() == [6, 8]
    assert "group_1/optimizer/fragment0_sent0" in file
    assert (
      file["group_0/optimizer/fragment0_kept0"]
      != file["group_1/optimizer/fragment0_kept0"]
    ).any()


def test_differences_that_are_not_finite(
  caplog: pytest.LogCaptureFixture,
) -> None:
  """Nothing changes, in any group, and a warning says so once.

  What is kept stays finite.
  """
  outer = callbacks.OuterOptimizer(2, delay=1, wire_dtype="int8")
  loop = make(outer)
  train(loop, range(3))
  [part] = outer._parts
  kept = [testbed.copies(variable) for variable in part.kept]
  assert any(np.abs(value).max() > 0 for values in kept for value in values)
  rows = np.zeros([4, 5, 4], "f")
  rows[2:, 1, 1] = np.nan
  replica_state_cases.spread(loop.weights[2], rows)
  state = [*outer._anchors, *outer.optimizer.variables]
  before = [testbed.copies(v) for v in state]
  train(loop, range(3, 7))
  np.testing.assert_equal([testbed.copies(v) for v in state], before)
  np.testing.assert_equal([testbed.copies(v) for v in part.kept], kept)
  assert int(outer.optimizer.skipped_steps.numpy()) == 2
  assert caplog.text.count("Groups were not joined after 5 steps") == 1
  replica_state_cases.spread(loop.weights[2], np.ones([4, 5, 4], "f"))
  train(loop, range(7, 9))
  assert np.isfinite(np.concatenate([np.ravel(v) for v in loop.values()])).all()
  assert int(outer.optimizer.skipped_steps.numpy()) == 2


def test_weights_that_are_set_end_a_delay() -> None:
  """Else a difference from other weights would be applied to these."""
  outer = callbacks.OuterOptimizer(4, delay=2, wire_dtype="int8")
  loop = make(outer)
  train(loop, range(9))  # Sent in step 8.
  assert outer._sent.numpy().tolist() == [8]
  for weight in loop.weights:
    replica_state_cases.spread(weight, np.full([4, *weight.shape], 512.0, "f"))
  outer.build(loop.optimizer, loop.weights)
  assert outer._sent.numpy().tolist() == [0]
  train(loop, range(9, 11))
  for anchor in outer._anchors:
    np.testing.assert_array_equal(
      testbed.copies(anchor)[0], np.full(anchor.shape, 512.0)
    )
  assert not any(testbed.copies(kept)[0].any() for kept in outer._parts[0].kept)


def test_joined_weights_keep_what_rounding_left() -> None:
  """They are the anchors, so that nothing has set them since."""
  outer = callbacks.OuterOptimizer(4, wire_dtype="int8")
  loop = make(outer)
  train(loop, range(4))
  [part] = outer._parts
  kept = [testbed.copies(variable) for variable in part.kept]
  assert any(value.any() for values in kept for value in values)
  outer.build(loop.optimizer, loop.weights)
  np.testing.assert_equal([testbed.copies(v) for v in part.kept], kept)


def test_several_dtypes() -> None:
  """Each weight keeps its own; what travels is alike on all members."""
  outer = callbacks.OuterOptimizer(
    2, keras.optimizers.SGD(1.0), fragments=2, delay=1, wire_dtype="int8"
  )
  dtypes = ("float64", "float32", "float16", "float64")
  loop = make(outer, dtypes=dtypes)
  train(loop, range(4))
  assert [weight.dtype for weight in loop.weights] == list(dtypes)
  for anchor in outer._anchors:
    assert len({copy.tobytes() for copy in testbed.copies(anchor)}) == 1
    assert testbed.copies(anchor)[0].any()


def test_steps_at_once() -> None:
  """What is due in an execution comes at its end: a late result first."""
  outer = callbacks.OuterOptimizer(4, delay=2, fragments=2)
  loop, events = make(outer), []

  def recording(part: Any, verb: str, text: str) -> Any:
    run = getattr(part, verb)

    def record() -> Any:
      events.append(text)
      return run()

    return mock.patch.object(part, verb, record)

  with contextlib.ExitStack() as stack:
    for i, part in enumerate(outer._parts):
      for verb in ("send", "join"):
        stack.enter_context(recording(part, verb, f"{verb} {i}"))
    for calls, expected in (
      (1, []),
      (1, ["send 0"]),
      (2, ["join 0", "send 1"]),
      (5, ["send 0", "join 1", "send 1"]),
      (1, ["join 0", "send 0"]),  # Due again before the delay is over.
      (1, ["join 1"]),
    ):
      outer._count(calls)
      assert events == expected
      events.clear()
  train(loop, range(2))


def test_split() -> None:
  """By bytes; none is empty, also beside one that is larger than all others."""
  sizes = [1000, 1, 1, 2, 2]
  found = fragments_lib.split([tf.zeros(size) for size in sizes], 4)
  assert found == [[0], [3], [4], [1, 2]]
  for count, rows in FRAGMENTS.items():
    weights = [tf.zeros(shape) for shape in SHAPES]
    assert fragments_lib.split(weights, count) == rows
  wide = [tf.zeros(3), tf.zeros(2, tf.float64), tf.zeros(5, tf.float16)]
  assert fragments_lib.split(wide, 2) == [[1], [0, 2]]


def test_more_fragments_than_weights() -> None:
  with pytest.raises(ValueError, match="is 5, and `model` trains 4 variables"):
    make(callbacks.OuterOptimizer(5, fragments=5))


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
