"""Checkpoints of TensorFlow 1, and trainings that go on from them."""
# keras: both
# bazel: size=large timeout=long

import contextlib
import functools
import json
import math
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.support import migration_sessions as sessions
from tests.support import testbed
from tf_cross_shard import CrossShardOptimizer, migration
from tf_cross_shard import __main__ as command
from tf_cross_shard.migration import adapters, counting, slot_names
from tf_cross_shard.replica_state import archive

v1 = tf.compat.v1
BEFORE, AFTER = 7, 27
LIMIT = 1e-6
STATEFUL = [name for name in sessions.PAIRS if name != "SGD"]
OLDER = testbed.IS_TF_KERAS
every_pair = pytest.mark.parametrize("name", sessions.PAIRS)


class Saved(NamedTuple):
  """What version 1 saved, and what it did then."""

  src: str
  at: sessions.Arrays
  losses: list[float]
  after: sessions.Arrays


@functools.cache
def _folder() -> Path:
  kept = tempfile.TemporaryDirectory()
  _folder.kept = kept  # type: ignore[attr-defined]
  return Path(kept.name)


def _train(name: str, folder: Path, **options: Any) -> Saved:
  old = sessions.Sessions(sessions.PAIRS[name].v1, **options)
  old.train(0, BEFORE)
  folder.mkdir(exist_ok=True)
  src, at = old.save(folder / "model.ckpt"), old.values()
  losses = old.train(BEFORE, AFTER)
  return Saved(src, at, losses, old.values())


@functools.cache
def saved(name: str, with_step: bool = True, scope: str = "") -> Saved:
  folder = _folder() / f"{name}-{with_step}-{scope}".replace(" ", "-")
  return _train(name, folder, with_step=with_step, scope=scope)


def _plain(name: str) -> Any:
  return sessions.plain(name)


def _wrapped(name: str) -> Any:
  return CrossShardOptimizer(sessions.plain(name))


def _legacy(name: str) -> Any:
  return sessions.plain(name, tf.keras.optimizers.legacy)


def _wrapped_legacy(name: str) -> Any:
  return CrossShardOptimizer(_legacy(name))


MAKERS: dict[str, Callable[[str], Any]] = {"plain": _plain, "ours": _wrapped}
if OLDER:
  MAKERS |= {"legacy": _legacy, "ours, legacy": _wrapped_legacy}
every_maker = pytest.mark.parametrize("maker", MAKERS)


def _slots(training: sessions.Training, name: str) -> sessions.Arrays:
  """Slots of Keras by version 1's names, and as version 1 has them."""
  pair = sessions.PAIRS[name]
  adapter = adapters.adapter_of(training.optimizer)
  found = {}
  weights = training.model.trainable_variables
  for path, weight in zip(sessions.SHAPES, weights, strict=True):
    slots = adapter.slots(weight)
    for suffix, names in pair.slots.items():
      [slot] = [slots[n] for n in names if n in slots]
      copies = testbed.copies(slot)
      for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])
      found[f"{path}/{suffix}"] = copies[0] / pair.factor
  return found


def _weights(training: sessions.Training) -> sessions.Arrays:
  found = {}
  weights = training.model.weights
  for path, weight in zip(sessions.SHAPES, weights, strict=True):
    copies = testbed.copies(weight)
    for copy in copies:
      np.testing.assert_array_equal(copy, copies[0])
    found[path] = copies[0]
  return found


def _deviation(
  training: sessions.Training, name: str, expected: sessions.Arrays
) -> float:
  found = _weights(training) | _slots(training, name)
  assert len(found) == 4 * (1 + len(sessions.PAIRS[name].slots))
  return max(
    float(np.max(np.abs(value - expected[key]) / (1 + np.abs(value))))
    for key, value in found.items()
  )


def _convert(
  training: sessions.Training, src: Any, dst: Path, **options: Any
) -> migration.Conversion:
  with training.strategy.scope():
    return migration.convert_checkpoint(
      src, str(dst), training.model, training.optimizer, **options
    )


def _left(name: str) -> dict[str, Any]:
  """What plain Keras does without is to be allowed."""
  dropped = [f".*/{slot}" for slot in sessions.PAIRS[name].dropped]
  return {"allow_unmatched": dropped} if dropped else {}


def _goes_on(training: sessions.Training, name: str, old: Saved) -> float:
  losses = training.train(BEFORE, AFTER)
  assert len(losses) == len(old.losses) == 20
  largest = max(
    sessions.largest(losses, old.losses), _deviation(training, name, old.after)
  )
  print(f"largest deviation: {name} {largest:.1e}")
  return largest


# Training goes on.


@every_pair
@every_maker
def test_goes_on_as_version_1(maker: str, name: str, tmp_path: Path) -> None:
  old, before = saved(name), sessions.digests(saved(name).src)
  training = sessions.Training(lambda: MAKERS[maker](name))
  done = _convert(training, old.src, tmp_path / "new", **_left(name))
  assert _deviation(training, name, old.at) < 1e-7
  assert int(training.optimizer.iterations) == BEFORE
  assert _goes_on(training, name, old) < LIMIT
  assert int(training.optimizer.iterations) == AFTER
  assert sessions.digests(old.src) == before
  dropped = sessions.PAIRS[name].dropped
  left = {f"{path}/{slot}" for path in sessions.SHAPES for slot in dropped}
  assert set(done.unmatched_in_checkpoint) == left
  assert done.unmatched_in_model == {}
  assert done.path == str(tmp_path / "new")
  assert len(done.matched) == 4 * (1 + len(sessions.PAIRS[name].slots)) + 1


@pytest.mark.parametrize("name", STATEFUL)
def test_without_slots_it_does_not(name: str, tmp_path: Path) -> None:
  """So that the test above can fail."""
  old = saved(name)
  training = sessions.Training(lambda: _wrapped(name))
  _convert(training, old.src, tmp_path / "new", **_left(name))
  other = sessions.Training(lambda: _wrapped(name))
  other.model.set_weights(training.model.get_weights())
  assert _goes_on(other, name, old) > 1000 * LIMIT


@pytest.mark.slow
@every_pair
@every_maker
def test_restored_elsewhere(maker: str, name: str, tmp_path: Path) -> None:
  old, dst = saved(name), tmp_path / "new"
  first = sessions.Training(lambda: MAKERS[maker](name))
  _convert(first, old.src, dst, **_left(name))
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "new.data-00000-of-00001",
    "new.index",
  ]
  for other in MAKERS:
    if ("legacy" in other) != ("legacy" in maker):
      continue
    training = sessions.Training(functools.partial(MAKERS[other], name))
    adapters.build(training.optimizer, training.model.trainable_variables)
    checkpoint = tf.train.Checkpoint(
      model=training.model, optimizer=training.optimizer
    )
    checkpoint.read(str(dst)).assert_consumed()
    assert _goes_on(training, name, old) < LIMIT


@pytest.mark.slow
@every_pair
def test_goes_on_in_replicas(name: str, tmp_path: Path) -> None:
  strategy = testbed.mirrored()
  training = sessions.Training(lambda: _wrapped(name), strategy)
  src = saved(name).src
  done = _convert(training, src, tmp_path / "new", **_left(name))
  assert len(done.matched) > len(sessions.SHAPES)
  for weight in training.model.weights:
    assert len(testbed.copies(weight)) == testbed.REPLICAS > 1
  assert _goes_on(training, name, saved(name)) < LIMIT


@pytest.mark.parametrize("is_full", [False, True])
def test_what_replicas_sum_up(is_full: bool, tmp_path: Path) -> None:
  """Each has a part of it, and only the sum is what version 1 had."""
  src = _small(tmp_path, {"w": [1.0, 2.0], "seen": 7, "global_step": 3})
  strategy = testbed.mirrored()

  def make() -> Any:
    module = _weight_model()
    module.seen = tf.Variable(
      np.int64(0),
      name="seen",
      trainable=False,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
    )
    return module

  training = sessions.Training(lambda: _wrapped("SGD"), strategy, make)
  seen = training.model.seen
  for i, copy in enumerate(_native_copies(strategy, seen)):
    copy.assign(i + 10)
  if is_full:
    error = tf.errors.ResourceExhaustedError(None, None, "disk is full")
    with mock.patch.object(tf.train.Checkpoint, "write", side_effect=error):
      words = r"`dst` cannot be written"
      _refused(training, src, tmp_path / "new", words, OSError)
    assert [int(c) for c in testbed.copies(seen)] == [10, 11, 12, 13]
    return
  _convert(training, src, tmp_path / "new")
  assert [int(c) for c in testbed.copies(seen)] == [7, 0, 0, 0]
  assert int(seen.read_value()) == 7
  assert testbed.copies(training.model.w)[1].tolist() == [1.0, 2.0]
  # Restored where there are no replicas, it is what it was.
  other = make()
  tf.train.Checkpoint(model=other).read(str(tmp_path / "new"))
  assert int(other.seen) == 7
  # And such a one there is not summed up.
  migration.convert_checkpoint(src, tmp_path / "one", other, _wrapped("SGD"))
  assert int(other.seen) == 7


def test_outside_the_scope_all_replicas_receive_it(tmp_path: Path) -> None:
  strategy = testbed.mirrored()
  training = sessions.Training(lambda: _wrapped("Adam"), strategy)
  migration.convert_checkpoint(
    saved("Adam").src, tmp_path / "new", training.model, training.optimizer
  )
  assert _goes_on(training, "Adam", saved("Adam")) < LIMIT


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_under_a_schedule(nesterov: bool, tmp_path: Path) -> None:
  def rate() -> Any:
    step = v1.train.get_or_create_global_step()
    return v1.train.exponential_decay(0.1, step, 5, 0.5)

  old = sessions.Sessions(
    lambda: v1.train.MomentumOptimizer(rate(), 0.9, use_nesterov=nesterov)
  )
  old.train(0, BEFORE)
  src = old.save(tmp_path / "old")

  def make() -> Any:
    made = migration.from_v1(
      v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=nesterov)
    ).inner_optimizer
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    settings = {**made.get_config(), "learning_rate": schedule}
    return CrossShardOptimizer(type(made).from_config(settings))

  training = sessions.Training(make)
  _convert(training, src, tmp_path / "new")
  losses, expected = training.train(BEFORE, AFTER), old.train(BEFORE, AFTER)
  assert sessions.largest(losses, expected) < LIMIT
  values = old.values()
  for path, value in _weights(training).items():
    np.testing.assert_allclose(value, values[path], atol=LIMIT)
  kept = adapters.adapter_of(training.optimizer)
  weights = training.model.trainable_variables
  for path, weight in zip(sessions.SHAPES, weights, strict=True):
    [slot] = kept.slots(weight).values()
    expected_slot = values[f"{path}/Momentum"]
    np.testing.assert_allclose(
      testbed.copies(slot)[0], expected_slot, atol=1e-5
    )


@pytest.mark.parametrize("name", STATEFUL)
def test_goes_on_in_what_from_v1_makes(name: str, tmp_path: Path) -> None:
  old = saved(name)
  training = sessions.Training(
    lambda: migration.from_v1(sessions.PAIRS[name].v1())
  )
  _convert(training, old.src, tmp_path / "new")
  losses = training.train(BEFORE, AFTER)
  assert sessions.largest(losses, old.losses) < LIMIT
  for path, value in _weights(training).items():
    np.testing.assert_allclose(value, old.after[path], atol=LIMIT)


@pytest.mark.parametrize("name", STATEFUL)
def test_what_from_v1_makes_restored(name: str, tmp_path: Path) -> None:
  """Wrapped or not, by an optimizer of the same class."""
  old = saved(name)

  def wrapped() -> Any:
    return migration.from_v1(sessions.PAIRS[name].v1())

  def alone() -> Any:
    return wrapped().inner_optimizer

  first = sessions.Training(wrapped)
  _convert(first, old.src, tmp_path / "new")
  for make in (wrapped, alone):
    other = sessions.Training(make)
    adapters.build(other.optimizer, other.model.trainable_variables)
    checkpoint = tf.train.Checkpoint(
      model=other.model, optimizer=other.optimizer
    )
    checkpoint.read(str(tmp_path / "new")).assert_consumed()
    losses = other.train(BEFORE, AFTER)
    assert sessions.largest(losses, old.losses) < LIMIT


@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_adam_goes_on_at_a_large_rate(rate: float, tmp_path: Path) -> None:
  """Plain Keras rounds otherwise while beta's powers are close to 1."""
  old = sessions.Sessions(lambda: v1.train.AdamOptimizer(rate))
  old.train(0, BEFORE)
  src = old.save(tmp_path / "old")
  training = sessions.Training(
    lambda: migration.from_v1(v1.train.AdamOptimizer(rate))
  )
  _convert(training, src, tmp_path / "new")
  losses, expected = training.train(BEFORE, AFTER), old.train(BEFORE, AFTER)
  assert sessions.largest(losses, expected) < LIMIT
  for path, value in _weights(training).items():
    np.testing.assert_allclose(value, old.values()[path], atol=LIMIT)


@pytest.mark.parametrize("name", ["Momentum", "Adam"])
def test_a_learning_rate_that_is_a_function(name: str, tmp_path: Path) -> None:
  """Of which no optimizer can tell its settings."""
  make = {
    "Momentum": lambda: v1.train.MomentumOptimizer(lambda: 0.1, 0.9),
    "Adam": lambda: v1.train.AdamOptimizer(lambda: 0.001),
  }[name]
  training = sessions.Training(lambda: migration.from_v1(make()))
  _convert(training, saved(name).src, tmp_path / "new")
  losses = training.train(BEFORE, AFTER)
  assert sessions.largest(losses, saved(name).losses) < LIMIT


@pytest.mark.parametrize("name", ["Momentum", "mine"])
def test_a_momentum_of_0(name: str, tmp_path: Path) -> None:
  """Version 1 keeps it all the same, and Keras does not."""

  def make() -> Any:
    return v1.train.MomentumOptimizer(0.1, 0.0, name=name)

  old = sessions.Sessions(make)
  old.train(0, BEFORE)
  src = old.save(tmp_path / "old")
  training = sessions.Training(lambda: migration.from_v1(make()))
  done = _convert(training, src, tmp_path / "new")
  assert len(done.matched) == 5
  assert done.unmatched_in_checkpoint == done.unmatched_in_model == {}
  losses, expected = training.train(BEFORE, AFTER), old.train(BEFORE, AFTER)
  assert sessions.largest(losses, expected) < LIMIT
  # Of another name it may be anything.
  other = migration.from_v1(v1.train.MomentumOptimizer(0.1, 0.0, name="other"))
  training = sessions.Training(lambda: other)
  if name == "Momentum":
    _convert(training, src, tmp_path / "other")
  else:
    words = r"(?s)in the checkpoint only:\n    one/bias/mine \[3\]"
    _refused(training, src, tmp_path / "other", words)
    _convert(training, src, tmp_path / "other", slots="mine")


def test_a_schedule_is_refused_for_the_momentum_of_keras(
  tmp_path: Path,
) -> None:
  schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
  for library in _libraries():
    training = sessions.Training(
      lambda library=library: sessions.plain(
        "Momentum", library, learning_rate=schedule
      )
    )
    words = r"`optimizer` is SGD.* is a schedule\. .*migration\.from_v1"
    _refused(training, saved("Momentum").src, tmp_path / "new", words)
    rate = sessions.plain("Momentum", library, learning_rate=0.0)
    training = sessions.Training(lambda rate=rate: rate)
    words = r"learning rate that is 0\. .*from_v1"
    _refused(training, saved("Momentum").src, tmp_path / "new", words)
    # Nothing else has the rate in its slots.
    training = sessions.Training(
      lambda library=library: sessions.plain(
        "Adam", library, learning_rate=schedule
      )
    )
    _convert(training, saved("Adam").src, tmp_path / f"{library.__name__}")


def _libraries() -> list[Any]:
  optimizers = tf.keras.optimizers
  return [optimizers, optimizers.legacy] if OLDER else [optimizers]


def test_a_loss_scale_stays(tmp_path: Path) -> None:
  if OLDER:
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
  else:
    scaling = tf.keras.optimizers.LossScaleOptimizer
  old = saved("Adam")
  for i, make in enumerate(
    (
      lambda: scaling(_plain("Adam")),
      lambda: CrossShardOptimizer(scaling(_plain("Adam"))),
      lambda: scaling(_wrapped("Adam")),
    )
  ):
    training = sessions.Training(make)
    done = _convert(training, old.src, tmp_path / f"new{i}")
    assert _deviation(training, "Adam", old.at) < 1e-7
    assert int(training.optimizer.iterations) == BEFORE
    assert done.unmatched_in_model == {}
    other = sessions.Training(make)
    adapters.build(other.optimizer, other.model.trainable_variables)
    tf.train.Checkpoint(model=other.model, optimizer=other.optimizer).read(
      str(tmp_path / f"new{i}")
    ).assert_consumed()
    assert _deviation(other, "Adam", old.at) < 1e-7


# Names.


def test_other_names_of_the_optimizer_and_scopes(tmp_path: Path) -> None:
  for i, (make, options) in enumerate(
    (
      (lambda: v1.train.AdamOptimizer(0.01, name="my_1"), {"slots": "my_1"}),
      (sessions.PAIRS["Adam"].v1, {}),
    )
  ):
    old = sessions.Sessions(make, scope="training" if i else "")
    old.train(0, BEFORE)
    src, at = old.save(tmp_path / f"old{i}"), old.values()
    training = sessions.Training(lambda: _wrapped("Adam"))
    done = _convert(training, src, tmp_path / f"new{i}", **options)
    assert sum("two/bias" in source for source in done.matched.values()) == 3
    assert any(k.startswith(("training/", "two/bias/my_1")) for k in at)
    for path, weight in zip(
      sessions.SHAPES, training.model.weights, strict=True
    ):
      np.testing.assert_array_equal(testbed.copies(weight)[0], at[path])


def test_a_name_with_a_slash(tmp_path: Path) -> None:
  make = functools.partial(v1.train.AdamOptimizer, 0.1, name="my/adam")
  old = _TwoWeights(tmp_path, "", [make])
  made = migration.from_v1(make())
  done = _goes_on_as(old, 0, made, tmp_path / "new", slots="my/adam")
  assert "deep/w/my/adam_1" in done.matched.values()
  assert done.unmatched_in_checkpoint == done.unmatched_in_model == {}


def test_of_a_folder_the_latest(tmp_path: Path) -> None:
  old = saved("Adam")
  training = sessions.Training(lambda: _wrapped("Adam"))
  _convert(training, Path(old.src).parent, tmp_path / "new")
  assert _deviation(training, "Adam", old.at) < 1e-7


def _in_parts(folder: Path, is_in_parts: bool, version: int) -> str:
  """Of a variable that is partitioned, or not, in either kind of file."""
  with tf.Graph().as_default(), v1.Session() as session:
    parts = v1.fixed_size_partitioner(2) if is_in_parts else None
    with v1.variable_scope("emb", partitioner=parts):
      w = v1.get_variable("w", initializer=tf.reshape(tf.range(8.0), (4, 2)))
    step = v1.train.get_or_create_global_step()
    loss = tf.reduce_sum(tf.convert_to_tensor(w) ** 2)
    momentum = v1.train.MomentumOptimizer(0.5, 0.5)
    train = momentum.minimize(loss, global_step=step)
    session.run(v1.global_variables_initializer())
    session.run(train)
    return v1.train.Saver(write_version=version).save(
      session, str(folder / "old"), write_meta_graph=False
    )


@pytest.mark.parametrize(("is_in_parts", "version"), [(1, 2), (0, 1), (0, 2)])
def test_partitions_and_kinds_of_files(
  is_in_parts: bool, version: int, tmp_path: Path
) -> None:
  src = _in_parts(tmp_path, is_in_parts, version)
  assert Path(src).exists() == (version == 1)
  before = sessions.digests(src)
  weight = tf.Variable(tf.zeros((4, 2)), name="emb/w")
  sgd = tf.keras.optimizers.SGD(0.5, momentum=0.5)
  migration.convert_checkpoint(src, tmp_path / "new", [weight], sgd)
  # The gradient is twice the weight: all of it is gone, and sums up.
  assert weight.numpy().tolist() == np.zeros((4, 2)).tolist()
  [slot] = adapters.adapter_of(sgd).slots(weight).values()
  expected = -0.5 * 2 * np.arange(8.0).reshape(4, 2)
  assert testbed.copies(slot)[0].tolist() == expected.tolist()
  after = sessions.digests(src)
  assert {name: after[name] for name in before} == before


def test_partitions_in_the_oldest_kind_of_file(tmp_path: Path) -> None:
  src = _in_parts(tmp_path, True, 1)
  weight = tf.Variable(tf.zeros((4, 2)), name="emb/w")
  sgd = tf.keras.optimizers.SGD(0.5, momentum=0.5)
  words = r"`src` holds emb/w.* in parts that TensorFlow 2 cannot read: .*V2"
  _refuses_one(
    src, tmp_path / "new", words, sgd, archive.CheckpointError, weight
  )


class _TwoWeights:
  """A partitioned weight and another, trained by version 1's optimizers."""

  def __init__(
    self,
    folder: Path,
    scope: str,
    makers: list[Callable[[], Any]],
    parts: int = 1,
    is_mixed: bool = True,
  ) -> None:
    self._graph = tf.Graph()
    with self._graph.as_default():
      self.weights = []
      shapes = {"deep/emb": (4, 2), "deep/w": (3, 2)}
      for i, (name, shape) in enumerate(shapes.items()):
        is_whole = is_mixed and i == 1
        weight = v1.get_variable(
          name,
          shape,
          initializer=v1.random_uniform_initializer(-1, 1, seed=i),
          partitioner=None if is_whole else v1.fixed_size_partitioner(parts),
        )
        self.weights.append(tf.convert_to_tensor(weight))
      step = v1.train.get_or_create_global_step()
      loss = _loss(*self.weights)
      around = v1.variable_scope(scope) if scope else contextlib.nullcontext()
      with around:
        self._train = [
          make().minimize(loss, global_step=step) for make in makers
        ]
      self._session = v1.Session()
      self._session.run(v1.global_variables_initializer())
      self.train(range(len(makers)), 5)
      self.src = v1.train.Saver().save(self._session, str(folder / "old"))

  def train(self, which: Any, steps: int) -> list[Any]:
    for _ in range(steps):
      for i in which:
        self._session.run(self._train[i])
    return list(self._session.run(self.weights))


def _loss(emb: Any, w: Any) -> Any:
  return tf.reduce_sum(tf.sin(emb) ** 2) + tf.reduce_sum(emb[:3] * w + w**2)


def _goes_on_as(
  old: _TwoWeights, which: int, optimizer: Any, dst: Path, **options: Any
) -> migration.Conversion:
  """Both train for ten steps more."""
  weights = [
    tf.Variable(tf.zeros((4, 2)), name="deep/emb"),
    tf.Variable(tf.zeros((3, 2)), name="deep/w"),
  ]
  done = migration.convert_checkpoint(
    old.src, dst, weights, optimizer, **options
  )
  for _ in range(10):
    with tf.GradientTape() as tape:
      loss = _loss(*weights)
    optimizer.apply_gradients(
      zip(tape.gradient(loss, weights), weights, strict=True)
    )
  for weight, expected in zip(weights, old.train([which], 10), strict=True):
    np.testing.assert_allclose(weight.numpy(), expected, atol=LIMIT)
  return done


@pytest.mark.slow
# One letter is left of the name, all of it, more than it, and of the scope too.
@pytest.mark.parametrize(
  ("scope", "head"),
  [
    ("", "deep/emb"),
    ("d", "deep/emb/0"),
    ("dn", "deep/emb/_0"),
    ("dnn", "deep/emb/t_0"),
    ("dnnn", "deep/emb/rt_0"),
    ("a/bcd", "deep/emb/art_0"),
    ("a/bcde", "deep/emb/part_0"),
    ("a/bcdef", "deep/emb//part_0"),
    ("training", "deep/emb/b/part_0"),
    ("a_scope_as_long", "deep/emb/deep/emb/part_0"),
    ("a_scope/as_long_", "deep/emb//deep/emb/part_0"),
    ("a_scope/as_long/too", "deep/emb/too/deep/emb/part_0"),
  ],
)
@pytest.mark.parametrize("is_mixed", [True, False])
def test_partitions_in_a_scope(
  is_mixed: bool, scope: str, head: str, tmp_path: Path
) -> None:
  make = functools.partial(v1.train.AdamOptimizer, 0.1)
  old = _TwoWeights(tmp_path, scope, [make], is_mixed=is_mixed)
  for i, options in enumerate(({}, {"slots": "Adam"})):
    if i:  # It has gone on.
      (tmp_path / "again").mkdir()
      old = _TwoWeights(tmp_path / "again", scope, [make], is_mixed=is_mixed)
    done = _goes_on_as(
      old, 0, migration.from_v1(make()), tmp_path / f"new{i}", **options
    )
    sources = set(done.matched.values())
    assert {f"{head}/Adam", f"{head}/Adam_1"} <= sources
    if is_mixed:
      assert f"{scope}/deep/w/Adam".removeprefix("/") in sources
    assert set(done.unmatched_in_checkpoint) <= {
      f"{scope}/beta{n}_power" for n in (1, 2)
    }
    assert done.unmatched_in_model == {}


def test_several_parts_in_a_scope(tmp_path: Path) -> None:
  """Then none of the slots is whole, and none is taken."""
  make = functools.partial(v1.train.AdagradOptimizer, 0.1)
  old = _TwoWeights(tmp_path, "dnn", [make], parts=2)
  weights = [
    tf.Variable(tf.zeros((4, 2)), name="deep/emb"),
    tf.Variable(tf.zeros((3, 2)), name="deep/w"),
  ]
  words = (
    r"(?s)only:\n    deep/emb/t_0/Adagrad \[4, 2\]\n    deep/emb/t_1/Adagrad"
    r".*optimizer only:\n    deep/emb/accumulator"
  )
  with pytest.raises(ValueError, match=words):
    migration.convert_checkpoint(
      old.src, tmp_path / "new", weights, migration.from_v1(make())
    )


ADAMS = [
  functools.partial(v1.train.AdamOptimizer, rate, beta)
  for rate, beta in ((0.1, 0.9), (0.01, 0.8), (0.02, 0.7))
]
MOMENTA = [
  functools.partial(v1.train.MomentumOptimizer, 0.01, momentum)
  for momentum in (0.9, 0.8, 0.7)
]


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["", "dnn"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("makers", [ADAMS, MOMENTA], ids=["Adam", "Momentum"])
def test_one_of_three_of_one_class(
  makers: list[Any], which: int, scope: str, tmp_path: Path
) -> None:
  count, name = (2, "Adam") if makers is ADAMS else (1, "Momentum")
  slots = [name, *(f"{name}_{i}" for i in range(1, 3 * count))]
  mine = slots[count * which : count * (which + 1)]
  others = [f".*/{slot}" for slot in slots if slot not in mine]
  powers = [
    f".*beta[12]_power{suffix}"
    for i, suffix in enumerate(("", "_1", "_2"))
    if i != which and count == 2
  ]
  # All steps are in the global one, and each Adam's own in its powers.
  powers += ["global_step"] if count == 2 else []
  for i, options in enumerate(
    (
      {"allow_unmatched": [*others, *powers]},
      {"allow_unmatched": [*others, *powers], "slots": mine[0]},
      {"allow_unmatched": [f".*/{name}.*", *powers], "slots": mine[0]},
    )
  ):
    (tmp_path / f"{i}").mkdir()
    old = _TwoWeights(tmp_path / f"{i}", scope, makers)
    made = migration.from_v1(makers[which]())
    done = _goes_on_as(old, which, made, tmp_path / f"new{i}", **options)
    ends = {s.split("/")[-1] for s in done.matched.values() if name in s}
    assert ends == set(mine)
    left = {s.split("/")[-1] for s in done.unmatched_in_checkpoint if name in s}
    assert left == set(slots) - set(mine)
    assert done.unmatched_in_model == {}


def _renamed() -> Any:
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input((4,)),
      layers.Dense(3, activation="tanh", name="first"),
      layers.Dense(2, name="two"),
    ],
    name="net",
  )


@pytest.mark.parametrize("how", ["short", "full", "function"])
def test_renamed_layers(how: str, tmp_path: Path) -> None:
  old = saved("Adam")
  training = sessions.Training(lambda: _wrapped("Adam"), model=_renamed)
  full = "first" if OLDER else "net/first"
  head = full if how == "full" else "first"
  names: Any = {
    f"{head}/kernel": "one/kernel",
    f"{head}/bias": "one/bias",
  }
  if how == "function":

    def names(name: str) -> str | None:
      short = name.removeprefix("net/")
      return short.replace("first", "one") if "first" in name else None

  done = _convert(training, old.src, tmp_path / "new", names=names)
  assert done.matched[f"{full}/kernel"] == "one/kernel"
  assert _goes_on(training, "Adam", old) < LIMIT


def test_modules_lists_and_equal_names(tmp_path: Path) -> None:
  old = _small(tmp_path, {"w": [1.0, 2.0], "c": [3.0, 4.0], "global_step": 5})
  weights = [tf.Variable([0.0, 0.0], name="w") for _ in range(2)]
  sgd = tf.keras.optimizers.SGD(0.5)
  with pytest.raises(ValueError, match=r"`w` of the model may be `w` of the"):
    migration.convert_checkpoint(old, tmp_path / "new", weights, sgd)
  done = migration.convert_checkpoint(
    old, tmp_path / "new", weights, sgd, names={"w": "c", "w#2": "w"}
  )
  assert done.matched == {"w": "c", "w#2": "w", "iterations": "global_step"}
  assert [w.numpy().tolist() for w in weights] == [[3.0, 4.0], [1.0, 2.0]]

  module = tf.Module()
  module.w, module.c = weights[0], tf.Variable([0.0, 0.0], name="c")
  migration.convert_checkpoint(
    old, tmp_path / "other", module, tf.keras.optimizers.SGD(0.5)
  )
  assert module.w.numpy().tolist() == [1.0, 2.0]
  assert module.c.numpy().tolist() == [3.0, 4.0]


def test_weights_that_are_not_trained(tmp_path: Path) -> None:
  """Statistics are weights; states of random numbers and metrics are not."""
  layers = tf.keras.layers

  def make() -> Any:
    model = tf.keras.Sequential(
      [
        tf.keras.Input((2,)),
        layers.BatchNormalization(name="norm"),
        layers.Dropout(0.5, seed=1),
        layers.Dense(2, name="frozen", trainable=False),
        layers.Dense(1, name="dense"),
      ],
      name="net",
    )
    model.compile("sgd", "mse", metrics=["mae"])
    return model

  values: dict[str, Any] = {
    "norm/gamma": [1.0, 2.0],
    "norm/beta": [3.0, 4.0],
    "norm/moving_mean": [5.0, 6.0],
    "norm/moving_variance": [7.0, 8.0],
    "frozen/kernel": [[1.0, 2.0], [3.0, 4.0]],
    "frozen/bias": [1.0, 2.0],
    "dense/kernel": [[1.0], [2.0]],
    "dense/bias": [9.0],
    "global_step": 3,
  }
  trained = ["norm/gamma", "norm/beta", "dense/kernel", "dense/bias"]
  for name in trained:
    values[f"{name}/Momentum"] = values[name]
  strategy = testbed.mirrored()
  training = sessions.Training(lambda: _wrapped("Momentum"), strategy, make)
  done = _convert(training, _small(tmp_path, values), tmp_path / "new")
  assert len(done.matched) == len(values)
  for weight in training.model.weights:
    path = str(getattr(weight, "path", weight.name)).split(":")[0]
    for copy in testbed.copies(weight):
      assert copy.tolist() == values[path.removeprefix("net/")]


def test_the_result_can_be_read(tmp_path: Path) -> None:
  training = sessions.Training(lambda: _wrapped("Momentum"))
  done = _convert(
    training,
    saved("Adam").src,
    tmp_path / "new",
    allow_unmatched=True,
  )
  lines = str(done).splitlines()
  head = "" if OLDER else "net/"
  assert lines[0] == f"{tmp_path}/new: 5 variables"
  assert lines[1].split() == [f"{head}one/kernel", "one/kernel"]
  slot = "m" if OLDER else "momentum"
  assert f"  {head}one/bias/{slot} [3]" in lines
  assert "in the checkpoint only:" in lines
  assert "  one/kernel/Adam_1 [4, 3]" in lines
  with pytest.raises(AttributeError):
    done.path = "other"  # type: ignore[misc]


# Counts of steps.


@pytest.mark.parametrize("name", ["Adam", "Momentum"])
def test_without_global_step(name: str, tmp_path: Path) -> None:
  old = saved(name, with_step=False)
  training = sessions.Training(lambda: _wrapped(name))
  if name == "Momentum":
    words = r"(?s)in model and optimizer only:\n    iterations \[\]\nGive"
    _refused(training, old.src, tmp_path / "new", words)
    done = _convert(
      training, old.src, tmp_path / "new", allow_unmatched=["iterations"]
    )
    assert done.unmatched_in_model == {"iterations": ()}
    assert int(training.optimizer.iterations) == 0
  else:
    done = _convert(training, old.src, tmp_path / "new")
    assert done.matched["iterations"] == "beta1_power"
    assert int(training.optimizer.iterations) == BEFORE
    assert _goes_on(training, name, old) < LIMIT


def _power(beta: float, steps: int) -> np.float32:
  """As version 1 multiplies, one step after the other."""
  power = np.float32(beta)
  for _ in range(steps):
    power = np.float32(power * np.float32(beta))
  return power


@pytest.mark.parametrize("steps", [0, 1, 2, 100, 600, 700, 5000, 40000])
@pytest.mark.parametrize("beta", [0.9, 0.999, 0.99])
def test_steps_of_powers(beta: float, steps: int) -> None:
  power = counting.Power("power", _power(beta, steps), beta)
  if power.value > counting.SMALLEST:
    assert power.steps() == steps
    assert power.fits(steps)
    assert not power.fits(steps + 1)
    assert steps == 0 or not power.fits(steps - 1)
  else:
    assert power.steps() is None
    assert not power.is_useful
    assert power.fits(steps)
    assert not power.fits(10)


def test_powers_that_are_none() -> None:
  half_way = np.float32(math.sqrt(0.9**3 * 0.9**4))
  assert counting.Power("power", half_way, 0.9).steps() is None
  assert not counting.Power("power", half_way, 0.9).fits(2)
  assert counting.Power("power", np.float32(0.0), 0.0).fits(3)
  # One whose products were rounded elsewhere.
  near = np.float32(0.9**51 * (1 + 1e-6))
  assert counting.Power("power", near, 0.9).steps() == 50
  # Errors as large as steps prove nothing.
  far = np.float32(_power(0.999, 40000) * np.float32(1.0002))
  power = counting.Power("power", far, 0.999)
  assert power.steps() is None
  assert power.fits(40000)


ADAM = {
  "w": [1.0, 2.0],
  "w/Adam": [0.5, 0.25],
  "w/Adam_1": [0.1, 0.2],
}


def _one_adam(
  folder: Path, values: dict[str, Any], **options: Any
) -> tuple[int, migration.Conversion]:
  weight = tf.Variable([0.0, 0.0], name="w")
  adam = tf.keras.optimizers.Adam(0.5)
  done = migration.convert_checkpoint(
    _small(folder, values), folder / "new", [weight], adam, **options
  )
  assert weight.numpy().tolist() == [1.0, 2.0]
  slots = adapters.adapter_of(adam).slots(weight)
  assert [testbed.copies(s)[0].tolist() for s in slots.values()] == [
    np.float32(ADAM["w/Adam"]).tolist(),
    np.float32(ADAM["w/Adam_1"]).tolist(),
  ]
  return int(adam.iterations), done


@pytest.mark.parametrize(
  ("counts", "options", "steps", "source"),
  [
    ({"global_step": np.int32(9)}, {}, 9, "global_step"),
    ({"deep/global_step": 9}, {}, 9, "deep/global_step"),
    # The first underflows in float32.
    (
      {"beta1_power": _power(0.9, 3000), "beta2_power": _power(0.999, 3000)},
      {},
      3000,
      "beta2_power",
    ),
    (
      {"deep/beta1_power_1": _power(0.9, 8)},
      {},
      8,
      "deep/beta1_power_1",
    ),
    (
      {
        "global_step": 3000,
        "beta1_power": _power(0.9, 3000),
        "beta2_power": _power(0.999, 3000),
      },
      {},
      3000,
      "global_step",
    ),
    # Two optimizers, and one of them is meant.
    (
      {"beta1_power": _power(0.9, 8), "beta1_power_1": _power(0.9, 4)},
      {"allow_unmatched": ["beta1_power"]},
      4,
      "beta1_power_1",
    ),
    (
      {"global_step": 12, "beta1_power": _power(0.9, 8)},
      {"allow_unmatched": ["beta._power"]},
      12,
      "global_step",
    ),
    (
      {"global_step": 12, "beta1_power": _power(0.9, 8)},
      {"allow_unmatched": ["global_step"]},
      8,
      "beta1_power",
    ),
    (
      {"global_step": 12, "a/global_step": 2},
      {"allow_unmatched": ["a/.*"]},
      12,
      "global_step",
    ),
    (
      {"beta1_power": _power(0.9, 8), "beta1_power_1": _power(0.9, 4)},
      {"allow_unmatched": True},
      0,
      None,
    ),
  ],
)
def test_counts(
  counts: dict[str, Any],
  options: dict[str, Any],
  steps: int,
  source: str | None,
  tmp_path: Path,
) -> None:
  found, done = _one_adam(tmp_path, ADAM | counts, **options)
  assert found == steps
  assert done.matched.get("iterations") == source


@pytest.mark.parametrize(
  ("counts", "words"),
  [
    (
      {"global_step": 9, "beta1_power": _power(0.9, 8)},
      r"disagree: `global_step` is 9; `beta1_power` is 0\.38742\d*, with a beta"
      r" of 0\.9 that of 8 steps\. Keras has one count",
    ),
    (
      {"beta1_power": _power(0.9, 9), "beta2_power": _power(0.999, 8)},
      r"no `global_step` is used; .* of 9 steps; .* of 8 steps\.",
    ),
    (
      {"beta1_power": _power(0.8, 9)},
      r"`beta1_power` is .* of no whole number of steps\. .* the betas of",
    ),
    (
      {"global_step": 4, "beta2_power": _power(0.99, 4)},
      r"`global_step` is 4; `beta2_power` is",
    ),
    (
      {"global_step": 4, "beta1_power": np.float32(0.0)},
      r"`global_step` is 4; `beta1_power` is 0\.0, .* no whole number",
    ),
    (
      {"beta1_power": _power(0.9, 8), "beta1_power_1": _power(0.9, 4)},
      r"`beta1_power` may be `beta1_power` or `beta1_power_1` of the",
    ),
    (
      {"global_step": 4, "a/global_step": 4},
      r"`global_step` may be `a/global_step` or `global_step` of the"
      r" checkpoint\. .* `allow_unmatched`, as \['global_step'\]",
    ),
    ({}, r"(?s)in model and optimizer only:\n    iterations \[\]"),
    (
      {"beta1_power": np.float32(0.0)},
      r"(?s)in the checkpoint only:\n    beta1_power \[\]\n.*iterations",
    ),
    ({"global_step": np.float32(4.0)}, r"(?s)only:\n    global_step \[\]"),
  ],
)
def test_counts_that_do_not_tell(
  counts: dict[str, Any], words: str, tmp_path: Path
) -> None:
  src = _small(tmp_path, ADAM | counts)
  _refuses_one(src, tmp_path / "new", words, tf.keras.optimizers.Adam(0.5))


# Errors.


def _small(folder: Path, values: dict[str, Any]) -> str:
  """A checkpoint of version 1 with these values."""
  with tf.Graph().as_default(), v1.Session() as session:
    for name, value in values.items():
      if isinstance(value, int):
        value = np.int64(value)
      elif not isinstance(value, np.generic):
        value = np.array(value, "float32")
      v1.get_variable(name, initializer=value)
    session.run(v1.global_variables_initializer())
    return v1.train.Saver().save(
      session, str(folder / "small"), write_meta_graph=False
    )


def _refused(
  training: sessions.Training,
  src: Any,
  dst: Path,
  words: str,
  error: type[Exception] = ValueError,
  **options: Any,
) -> None:
  """An error, and all is as it was."""
  variables = training.model.trainable_variables
  adapters.build(training.optimizer, variables)
  before = sessions.state(training.model, training.optimizer)
  there = sorted(dst.parent.rglob("*"))
  with pytest.raises(error, match=words):
    _convert(training, src, dst, **options)
  assert sessions.state(training.model, training.optimizer) == before
  assert sorted(dst.parent.rglob("*")) == there


def _refuses_one(
  src: Any,
  dst: Any,
  words: str,
  optimizer: Any = None,
  error: type[Exception] = ValueError,
  weight: Any = None,
  **options: Any,
) -> None:
  """The same for one weight, `w` of two numbers."""
  if weight is None:
    weight = tf.Variable([0.0, 0.0], name="w")
  optimizer = optimizer or tf.keras.optimizers.SGD(0.5)
  adapters.build(optimizer, [weight])
  before = sessions.state([weight], optimizer)
  there = sorted(Path(src).parent.glob("*"))
  with pytest.raises(error, match=words):
    migration.convert_checkpoint(src, dst, [weight], optimizer, **options)
  assert sessions.state([weight], optimizer) == before
  assert sorted(Path(src).parent.glob("*")) == there


def _weight_model() -> Any:
  """A module with `w`, of the Keras that is tested."""
  module = tf.Module()
  module.w = tf.Variable([0.0, 0.0], name="w")
  return module


class TestErrors:
  @pytest.fixture
  def src(self, tmp_path: Path) -> str:
    return _small(tmp_path, {"w": [1.0, 2.0], "global_step": 1})

  def test_targets(self, src: str, tmp_path: Path) -> None:
    _refuses_one(src, src, r"`dst` must not be `src`: got '.*small' for both")
    same = f"{tmp_path}/../{tmp_path.name}/small"
    _refuses_one(src, same, r"`dst` must not be `src`")
    words = r"`dst` is '.*/small', of which there is small\.data-0.* already"
    _refuses_one(tmp_path, src, words, error=FileExistsError)
    _refuses_one(src, f"{tmp_path}/", r"`dst` must be the prefix of a")
    words = r"`dst` is '.*/away/new', and the folder '.*/away' is not there\."
    away = tmp_path / "away" / "new"
    _refuses_one(src, away, words, error=FileNotFoundError)
    for left in ("new.index", "new.data-00000-of-00001", "new"):
      (tmp_path / left).touch()
      words = rf"`dst` is '.*/new', of which there is {left} already\. Name"
      _refuses_one(src, tmp_path / "new", words, error=FileExistsError)
      (tmp_path / left).unlink()
    for name in ("a[b]", "a[b", "[b]/new", "a\\b"):
      words = (
        r"`dst` must have no \[ or \\ in it, .* cannot read; got .*\. Name"
      )
      _refuses_one(src, f"{tmp_path}/{name}", words)
    words = r"`dst` must have no character NUL in it; got '.*/a\\x00b'\. Name"
    _refuses_one(src, f"{tmp_path}/a\0b", words)
    words = r"`src` must have no character NUL in it"
    with pytest.raises(ValueError, match=words):
      migration.convert_checkpoint(
        "a\0b", tmp_path / "new", [tf.Variable(1.0)], tf.keras.optimizers.SGD()
      )
    words = r"`dst` must be a string or a path; got 7\. Name the prefix"
    _refuses_one(src, 7, words, error=TypeError)

  def test_sources(self, src: str, tmp_path: Path) -> None:
    new = tmp_path / "new"
    words = r"`src` names no checkpoint: got '.*/none'\. Name the prefix of"
    _refuses_one(tmp_path / "none", new, words, error=FileNotFoundError)
    words = r"`src` must be a string or a path; got None"
    with pytest.raises(TypeError, match=words):
      migration.convert_checkpoint(None, new, [tf.Variable(1.0)], "sgd")
    (tmp_path / "empty").mkdir()
    words = r"`src` is the folder .*/empty, in which the file named"
    _refuses_one(tmp_path / "empty", new, words, error=FileNotFoundError)
    second = tf.train.Checkpoint(w=tf.Variable([1.0])).write(
      str(tmp_path / "second")
    )
    words = r"must be a checkpoint of TensorFlow 1; .*/second is one of"
    _refuses_one(second, new, words, error=archive.CheckpointError)

  def test_sources_that_are_one_file_of_several(
    self, src: str, tmp_path: Path
  ) -> None:
    Path(f"{src}.meta").touch()
    for end in ("index", "meta", "data-00000-of-00001"):
      words = rf"`src` names one file .*\.{end}'\. Name .*: '{src}'\."
      for allow in (False, True):
        _refuses_one(
          f"{src}.{end}",
          tmp_path / "new",
          words,
          error=FileNotFoundError,
          allow_unmatched=allow,
        )

  def test_not_one_weight(self, src: str, tmp_path: Path) -> None:
    weight = tf.Variable(0.0, name="v")
    words = r"`src` has no value for any weight of `model`: .* global_step, w\."
    _refuses_one(
      src, tmp_path / "new", words, weight=weight, allow_unmatched=True
    )
    # The oldest kind of checkpoint is any file, and this has no names in it.
    other = tmp_path / "renamed"
    other.write_bytes(Path(f"{src}.index").read_bytes())
    words = r"`src` has no value for any weight of `model`: .* holds nothing\."
    _refuses_one(other, tmp_path / "new", words, allow_unmatched=True)

  @pytest.mark.parametrize("part", ["index", "data-00000-of-00001", "gone"])
  def test_damaged_sources(self, part: str, src: str, tmp_path: Path) -> None:
    file = Path(f"{src}.{part}")
    if part == "gone":
      Path(f"{src}.data-00000-of-00001").unlink()
    elif part == "index":
      file.write_bytes(file.read_bytes()[:-20])
    else:
      data = bytearray(file.read_bytes())
      data[len(data) // 2] ^= 1
      file.write_bytes(bytes(data))
    words = r"`src` cannot be read: .*/small is damaged or no checkpoint: .*"
    _refuses_one(src, tmp_path / "new", words, error=archive.CheckpointError)

  def test_not_built(self, src: str, tmp_path: Path) -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
    words = r"`model` has no variables yet: got Sequential\. Build it with"
    with pytest.raises(ValueError, match=words):
      migration.convert_checkpoint(
        src, tmp_path / "new", model, tf.keras.optimizers.SGD()
      )
    with pytest.raises(ValueError, match=r"`model` has no variables yet"):
      migration.convert_checkpoint(
        src, tmp_path / "new", [], tf.keras.optimizers.SGD()
      )

  def test_other_things(self, src: str, tmp_path: Path) -> None:
    new, weight = tmp_path / "new", tf.Variable([0.0, 0.0], name="w")
    for model, optimizer, words in (
      (7, tf.keras.optimizers.SGD(), r"`model` must be a Keras model.*got int"),
      ([7], tf.keras.optimizers.SGD(), r"got a list with int in it"),
      ([weight], "adam", r"`optimizer` must be a Keras optimizer; got str\."),
      ([weight], weight, r"`optimizer` must be a Keras optimizer"),
    ):
      with pytest.raises(TypeError, match=words):
        migration.convert_checkpoint(src, new, model, optimizer)
    for allow in ("w", 7, [7], b"w"):
      words = r"`allow_unmatched` must be True, False, or names and regular"
      _refuses_one(src, new, words, error=TypeError, allow_unmatched=allow)
    words = r"`names` must be a dictionary from names in the model .*got 7\."
    _refuses_one(src, new, words, error=TypeError, names=7)

  def test_names(self, tmp_path: Path) -> None:
    src = _small(tmp_path, {"w": [1.0, 2.0], "b": [1.0, 2.0], "global_step": 1})
    new = tmp_path / "new"
    words = r"`names` has keys that the model has not: v\. Its variables are w"
    _refuses_one(src, new, words, names={"v": "w"})
    words = r"`names` has values that the checkpoint has not: \{'w': 'v'\}\. It"
    _refuses_one(src, new, words, names={"w": "v"})
    weights = [tf.Variable([0.0, 0.0], name=name) for name in ("w", "b")]
    words = r"`w` of the checkpoint would be the value of all of w, b\. Say"
    with pytest.raises(ValueError, match=words):
      migration.convert_checkpoint(
        src, new, weights, tf.keras.optimizers.SGD(), names={"b": "w"}
      )

  @pytest.mark.skipif(OLDER, reason="names have no model's name before them")
  def test_with_and_without_the_models_name(self, tmp_path: Path) -> None:
    values: dict[str, Any] = {
      f"{head}dense/{name}": np.zeros(shape, "float32").tolist()
      for head in ("", "net/")
      for name, shape in {"kernel": (1, 1), "bias": (1,)}.items()
    }
    src = _small(tmp_path, values | {"global_step": 1})
    dense = tf.keras.layers.Dense(1, name="dense")
    model = tf.keras.Sequential([tf.keras.Input((1,)), dense], name="net")
    words = r"may be `net/dense/kernel` or `dense/kernel` of the checkpoint"
    with pytest.raises(ValueError, match=words):
      migration.convert_checkpoint(
        src, tmp_path / "new", model, tf.keras.optimizers.SGD()
      )

  def test_shapes_and_dtypes(self, tmp_path: Path) -> None:
    src = _small(tmp_path, {"w": [1.0, 2.0, 3.0], "global_step": 1})
    words = (
      r"differ:\n  w is float32 \[2\]; w in the checkpoint is float32 \[3\]\n"
    )
    _refuses_one(src, tmp_path / "new", words)
    src = _small(tmp_path, {"w": 1, "global_step": 1})
    words = r"w is float32 \[2\]; w in the checkpoint is int64 \[\]"
    _refuses_one(src, tmp_path / "new", words)
    slots = {**ADAM, "w/Adam_1": [1.0], "global_step": 1}
    src = _small(tmp_path, slots)
    slot = "v" if OLDER else "velocity"
    words = rf"w/{slot} is float32 \[2\]; w/Adam_1 in the checkpoint is .*\[1\]"
    _refuses_one(src, tmp_path / "new", words, tf.keras.optimizers.Adam(0.5))

  def test_unmatched_on_both_sides(self, tmp_path: Path) -> None:
    src, new = saved("Momentum").src, tmp_path / "new"
    training = sessions.Training(lambda: _plain("Adam"), model=_renamed)
    head = "" if OLDER else "net/"
    slots = ("m", "v") if OLDER else ("momentum", "velocity")
    words = rf"""Not everything has a counterpart:
  in the checkpoint only:
    one/bias [3]
    one/bias/Momentum [3]
    one/kernel [4, 3]
    one/kernel/Momentum [4, 3]
    two/bias/Momentum [2]
    two/kernel/Momentum [3, 2]
  in model and optimizer only:
    {head}first/bias [3]
    {head}first/bias/{slots[0]} [3]
    {head}first/bias/{slots[1]} [3]
    {head}first/kernel [4, 3]
    {head}first/kernel/{slots[0]} [4, 3]
    {head}first/kernel/{slots[1]} [4, 3]
    {head}two/bias/{slots[0]} [2]
    {head}two/bias/{slots[1]} [2]
    {head}two/kernel/{slots[0]} [3, 2]
    {head}two/kernel/{slots[1]} [3, 2]
Give"""
    for character in "[]":
      words = words.replace(character, f"\\{character}")
    _refused(training, src, new, words)
    words = r"(?s)in the checkpoint only:\n    one/bias \[3\]\n    one/kernel"
    allowed = [".*/Momentum", rf"{head}(one|two|first)/.*"]
    if not OLDER:
      _refused(training, src, new, words, allow_unmatched=allowed)
    done = _convert(
      training, src, new, allow_unmatched=[*allowed, "one/bias", "one/kernel"]
    )
    assert next(iter(done.unmatched_in_checkpoint)) == "one/bias"
    assert len(done.unmatched_in_checkpoint) == 6
    assert len(done.unmatched_in_model) == 10
    assert len(done.matched) == 3

  @pytest.mark.parametrize(
    ("name", "keras"),
    [
      ("RMSProp", "Adam"),
      ("Adadelta", "Adam"),
      ("Adam", "RMSProp momentum"),
      ("Adagrad", "Momentum"),
      ("Momentum", "Adagrad"),
      ("Adam", "Adadelta"),
      ("Momentum", "SGD"),
      ("SGD", "Momentum"),
      ("RMSProp centered", "RMSProp momentum"),
      ("RMSProp momentum", "RMSProp centered"),
    ],
  )
  def test_slots_of_another_optimizer(
    self, name: str, keras: str, tmp_path: Path
  ) -> None:
    training = sessions.Training(lambda: _wrapped(keras))
    words = r"Not everything has a counterpart"
    _refused(training, saved(name).src, tmp_path / "new", words)

  def test_optimizers_that_version_1_had_not(self, tmp_path: Path) -> None:
    training = sessions.Training(lambda: tf.keras.optimizers.Adamax(0.1))
    words = r"(?s)only:.*one/bias/Adam \[3\].*optimizer only:.*one/bias/"
    _refused(training, saved("Adam").src, tmp_path / "new", words)
    training = sessions.Training(lambda: sessions.plain("Adam", amsgrad=True))
    words = r"(?s)only:\n    (net/)?one/bias/v(elocity_)?hat \[3\]"
    _refused(training, saved("Adam").src, tmp_path / "new", words)

  def test_slots_of_two(self, tmp_path: Path) -> None:
    values = {
      "w": [1.0, 2.0],
      "w/Momentum": [1.0, 1.0],
      "w/other": [2.0, 2.0],
      "w/ExponentialMovingAverage": [3.0, 3.0],
      "global_step": 1,
      "training/w/Momentum": [4.0, 4.0],
    }
    src, new = _small(tmp_path, values), tmp_path / "new"
    average = "w/ExponentialMovingAverage"

    def sgd() -> Any:
      return tf.keras.optimizers.SGD(0.5, momentum=0.5)

    second = "training/w/Momentum"
    words = rf"first slot may be `{second}` or `w/Momentum` of the checkpoint"
    _refuses_one(src, new, words, sgd())
    _refuses_one(src, new, words, sgd(), allow_unmatched=True)
    words = rf"(?s)only:\n    {average} \[2\]\n    w/other \[2\]\nGive"
    _refuses_one(src, new, words, sgd(), allow_unmatched=[second])
    words = rf"(?s)only:\n    {second} \[2\]\n    w/Exp.*\n    w/Momentum"
    _refuses_one(src, new, words, sgd(), slots="other")
    weight = tf.Variable([0.0, 0.0], name="w")
    left = [second, "w/other", average]
    done = migration.convert_checkpoint(
      src, new, [weight], sgd(), allow_unmatched=left
    )
    assert "w/Momentum" in done.matched.values()
    assert done.unmatched_in_checkpoint == dict.fromkeys(left, (2,))

  def test_two_of_one_class(self, tmp_path: Path) -> None:
    numbers = range(4)
    slots = ["w/Adam", *(f"w/Adam_{i}" for i in numbers[1:])]
    values: dict[str, Any] = {s: [i, i + 0.5] for i, s in enumerate(slots)}
    values |= {"w": [1.0, 2.0], "w/Momentum": [1.0, 1.0], "global_step": 1}
    values["w/Momentum_1"] = [2.0, 2.0]
    src, new = _small(tmp_path, values), tmp_path / "new"
    optimizers = tf.keras.optimizers

    def adam() -> Any:
      return optimizers.Adam(0.5)

    words = (
      r"first slot may be `w/Adam` or `w/Adam_2` of the checkpoint\. Say"
      r" `slots='Adam'` or `slots='Adam_2'`, or list in `allow_unmatched` the"
      r" slots of the others, as \['w/Adam_2', 'w/Adam_3'\]\."
    )
    _refuses_one(src, new, words, adam())
    _refuses_one(src, new, words, adam(), allow_unmatched=True)
    words = r"may be `w/Momentum` or `w/Momentum_1` of the .*as \['w/Mo.*_1'\]"
    sgd = optimizers.SGD(0.5, momentum=0.5)
    _refuses_one(src, new, words, sgd, allow_unmatched=["w/Adam.*"])
    # What is left of the other has no counterpart.
    allowed = ["w/Momentum.*"]
    words = r"(?s)the checkpoint only:\n    w/Adam \[2\]\n    w/Adam_1 \[2\]\nG"
    _refuses_one(
      src, new, words, adam(), slots="Adam_2", allow_unmatched=allowed
    )
    words = r"(?s)the checkpoint only:\n    w/Adam_3 \[2\]\nG"
    allowed.append("w/Adam_2")
    _refuses_one(src, new, words, adam(), allow_unmatched=allowed)
    # No optimizer starts there.
    for asked in ("Adam_1", "Adam_3", "Adam_4", "Adam_02"):
      words = rf"`slots` is '{asked}', .* as many as Adam has\. It holds"
      _refuses_one(src, new, words, adam(), slots=asked, allow_unmatched=True)

  def test_what_may_be_no_slot(self, tmp_path: Path) -> None:
    """An average of another name looks like a momentum."""
    values = {"w": [1.0, 2.0], "w/avg": [3.0, 4.0], "global_step": 1}
    src, new = _small(tmp_path, values), tmp_path / "new"
    optimizers = tf.keras.optimizers

    def v1_momentum(name: str = "Momentum") -> Any:
      return migration.from_v1(v1.train.MomentumOptimizer(0.5, 0.5, name=name))

    for make, usual in (
      (lambda: optimizers.SGD(0.5, momentum=0.5), "Momentum"),
      (lambda: optimizers.Adagrad(0.5), "Adagrad"),
      (v1_momentum, "Momentum"),
    ):
      words = (
        r"first slot may be `w/avg` of the checkpoint, and the name tells not:"
        rf" it is neither '{usual}' nor .*\. Say `slots='avg'` if these"
      )
      _refuses_one(src, new, words, make())
      _refuses_one(src, new, words, make(), allow_unmatched=True)
      words = r"(?s)counterpart:\n  in model and optimizer only:\n    w/"
      _refuses_one(src, new, words, make(), allow_unmatched=["w/avg"])
    words = r"`slots` is 'other', and beside no weight .*It holds .*w/avg"
    _refuses_one(src, new, words, v1_momentum(), slots="other")
    words = r"`slots` is 'avg', .* as many as Adam has"
    _refuses_one(src, new, words, optimizers.Adam(), slots="avg")
    for wrong in ("", 7):
      words = r"`slots` must be the name of version 1's optimizer"
      _refuses_one(src, new, words, error=TypeError, slots=wrong)
    weight = tf.Variable([0.0, 0.0], name="w")
    for i, (made, options) in enumerate(
      ((v1_momentum(), {"slots": "avg"}), (v1_momentum("avg"), {}))
    ):
      done = migration.convert_checkpoint(
        src, tmp_path / f"new{i}", [weight], made, **options
      )
      assert "w/avg" in done.matched.values()
      [slot] = adapters.adapter_of(made).slots(weight).values()
      assert testbed.copies(slot)[0].tolist() == [3.0, 4.0]

  def test_what_is_refused_builds_nothing(self, tmp_path: Path) -> None:
    """So that the right model can be tried with the same optimizer."""
    optimizers = tf.keras.optimizers
    makers: dict[str, Callable[[], Any]] = {
      "plain": lambda: optimizers.Adam(0.5),
      "ours": lambda: CrossShardOptimizer(optimizers.Adam(0.5)),
      "v1": lambda: migration.from_v1(v1.train.AdamOptimizer(0.5)),
      "function": lambda: migration.from_v1(
        v1.train.AdamOptimizer(lambda: 0.5)
      ),
      "schedule": lambda: optimizers.Adam(
        optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
      ),
    }
    if OLDER:
      makers["legacy"] = lambda: optimizers.legacy.Adam(0.5)
    good = {**ADAM, "global_step": 3}
    faults: dict[str, dict[str, Any]] = {
      "weight": {**good, "w": [1.0, 2.0, 3.0]},
      "dtype": {**good, "w": 3},
      "slot": {**good, "w/Adam_1": [1.0]},
      "steps": {**good, "beta1_power": _power(0.9, 8)},
      "slots": {name: good[name] for name in ("w", "global_step")},
    }
    (tmp_path / "good").mkdir()
    right = _small(tmp_path / "good", good)
    for kind, make in makers.items():
      for strategy in (None, testbed.mirrored()):
        training = sessions.Training(make, strategy, _weight_model)
        optimizer = training.optimizer
        adapters.adapter_of(optimizer)  # makes the older kind's iterations
        count = len(testbed.variables_of(optimizer))
        for fault, values in faults.items():
          (tmp_path / fault).mkdir(exist_ok=True)
          src = _small(tmp_path / fault, values)
          with pytest.raises(ValueError, match=r"differ|disagree|counterpart"):
            _convert(training, src, tmp_path / "new")
          assert len(testbed.variables_of(optimizer)) == count
        name = f"{kind}-{strategy is None}"
        done = _convert(training, right, tmp_path / name)
        assert len(done.matched) == 4
        assert len(testbed.variables_of(optimizer)) == count + 2

  def test_what_cannot_be_made_twice(self, tmp_path: Path) -> None:
    """Then at least the weights have to fit before it is built."""

    class Mine(tf.keras.optimizers.Adam):  # type: ignore[misc]
      def __init__(self, secret: Any) -> None:
        super().__init__(secret + 0.5)

    good = {**ADAM, "global_step": 3}
    adam = Mine(0.0)
    count = len(testbed.variables_of(adam))
    for i, wrong in enumerate(([1.0], 3)):
      (tmp_path / f"{i}").mkdir()
      src = _small(tmp_path / f"{i}", {**good, "w": wrong})
      with pytest.raises(ValueError, match=r"Shapes or dtypes differ"):
        migration.convert_checkpoint(
          src, tmp_path / "new", [tf.Variable([0.0, 0.0], name="w")], adam
        )
    src = _small(tmp_path, good)
    other = [tf.Variable([0.0, 0.0], name=name) for name in ("w", "b")]
    with pytest.raises(
      ValueError, match=r"(?s)optimizer only:\n    b \[2\]\nG"
    ):
      migration.convert_checkpoint(src, tmp_path / "new", other, adam)
    assert len(testbed.variables_of(adam)) == count
    done = migration.convert_checkpoint(src, tmp_path / "new", other[:1], adam)
    assert len(done.matched) == 4

  def test_in_a_function_and_in_a_replica(self, tmp_path: Path) -> None:
    training = sessions.Training(
      lambda: _wrapped("SGD"), strategy=testbed.mirrored()
    )
    src = saved("SGD").src

    def call() -> None:
      _convert(training, src, tmp_path / "new")

    with pytest.raises(RuntimeError, match=r"read and set eagerly"):
      tf.function(call, autograph=False)()
    with pytest.raises(RuntimeError, match=r"outside `strategy\.run`"):
      training.strategy.run(
        lambda: migration.convert_checkpoint(
          src, tmp_path / "new", training.model, training.optimizer
        )
      )
    assert list(tmp_path.iterdir()) == []

  @pytest.mark.parametrize("when", ["written", "moved", "assigned"])
  def test_while_writing(self, when: str, tmp_path: Path) -> None:
    broken: Any
    if when == "written":

      def broken(self: Any, path: str) -> None:
        Path(f"{path}.data-00000-of-00001").write_bytes(b"half")
        raise tf.errors.ResourceExhaustedError(None, None, "disk is full")

      patch = mock.patch.object(tf.train.Checkpoint, "write", broken)
    elif when == "moved":
      rename = tf.io.gfile.rename

      def broken(src: str, dst: str) -> None:
        if dst.endswith(".index"):
          raise tf.errors.ResourceExhaustedError(None, None, "disk is full")
        rename(src, dst)

      patch = mock.patch.object(tf.io.gfile, "rename", broken)
    else:

      def broken(self: Any, path: str) -> None:
        raise KeyboardInterrupt

      patch = mock.patch.object(tf.train.Checkpoint, "write", broken)
    strategy = testbed.mirrored()
    training = sessions.Training(lambda: _wrapped("Adam"), strategy)
    with strategy.scope():
      adapters.build(training.optimizer, training.model.trainable_variables)
    # Every replica has its own back.
    bias = training.model.weights[1]
    for i, copy in enumerate(_native_copies(strategy, bias)):
      copy.assign(tf.fill([3], float(i)))
    error = KeyboardInterrupt if when == "assigned" else OSError
    words = "" if when == "assigned" else r"`dst` cannot be written: .* is full"
    with patch:
      _refused(
        training,
        saved("Adam").src,
        tmp_path / "new",
        words,
        error,  # type: ignore[arg-type]
      )
    assert [c[0] for c in testbed.copies(bias)] == [0.0, 1.0, 2.0, 3.0]


def _native_copies(strategy: Any, variable: Any) -> Any:
  value = getattr(variable, "value", variable)
  value = variable if callable(value) else value
  return strategy.experimental_local_results(value)


# Names of slots.


def test_families() -> None:
  names = ["a/w/Adam", "a/w/Adam_1", "b/Adam", "b/Adam_1", "w/Adam", "w/Adam_2"]
  found = slot_names.families("Adam", ["w", "b"], names)
  assert found == {
    slot_names.Family("", "Adam"): {"b": 2},
    slot_names.Family("a/", "Adam"): {"w": 2},
  }
  # What stands beside another variable is not in a scope.
  names.append("a/w")
  found = slot_names.families("Adam", ["w", "b"], names)
  assert found == {slot_names.Family("", "Adam"): {"b": 2}}
  # Two of one name made four.
  names = ["w/Adam", "w/Adam_1", "w/Adam_2", "w/Adam_3"]
  assert slot_names.families("Adam", ["w"], names) == {}


def test_families_that_are_asked_for() -> None:
  names = ["w/Adam", "w/Adam_1", "w/a/Mom", "b/a/Mom", "w/Adagrad"]
  for asked, found in (
    ("a/Mom", {slot_names.Family("", "a/Mom"): {"w": 1, "b": 1}}),
    ("Adagrad", {slot_names.Family("", "Adagrad"): {"w": 1}}),
    ("Adam", {}),  # two slots
    ("Mom", {}),
    (None, {}),
  ):
    assert slot_names.families("SGD", ["w", "b"], names, asked) == found


def test_families_of_several_of_one_name() -> None:
  Family = slot_names.Family  # noqa: N806
  names = ["w/Adam", "w/Adam_1", "w/Adam_2", "w/Adam_3", "b/Adam", "b/Adam_1"]
  both = {
    Family("", "Adam"): {"w": 2, "b": 2},
    Family("", "Adam", 2): {"w": 2},
  }
  first, second = ({family: counts} for family, counts in both.items())

  def found(*left_out: str, **options: Any) -> slot_names.Families:
    return slot_names.families(
      "Adam",
      ["w", "b"],
      names,
      is_left_out=left_out.__contains__,
      **options,
    )

  assert found(known=["Adam"]) == both
  assert [f.called for f in both] == ["Adam", "Adam_2"]
  assert [f.slot("w", 1) for f in both] == ["w/Adam_1", "w/Adam_3"]
  # Of a name that tells nothing they may be anything.
  assert found() == found(known=["other"]) == {Family("", "Adam"): {"b": 2}}
  assert found("w/Adam_2", "w/Adam_3") == first
  assert found(asked="Adam") == found(*names, asked="Adam") == first
  assert found(asked="Adam_2") == found(*names, asked="Adam_2") == second
  # Where there is one only, it is meant whatever is left out.
  assert found(*names) == {Family("", "Adam"): {"b": 2}}
  # Two that do not belong together.
  assert found("w/Adam", "w/Adam_3") == {Family("", "Adam"): {"b": 2}}
  assert found(asked="Adam_1") == {}
  names[:] = ["w/my_1", "w/my_1_1", "w/a/my_2", "w/a/my_3"]
  assert found(asked="my_1") == {Family("", "my_1"): {"w": 2}}
  assert found(asked="a/my_2") == {Family("", "a/my", 2): {"w": 2}}
  # A momentum's, and then Adam's.
  names[:] = ["w/my", "w/my_1", "w/my_2"]
  assert found(asked="my_1") == {}
  assert found("w/my", asked="my_1") == found("w/my")
  assert found("w/my") == {Family("", "my", 1): {"w": 2}}
  for size, numbers in {2: (0, 2, 4), 3: (0, 3)}.items():
    names[:] = ["w/R", *(f"w/R_{i}" for i in range(1, 6))]
    assert slot_names.families(
      "RMSprop", ["w"], names, known=["R"], size=size
    ) == {Family("", "R", n): {"w": size} for n in numbers}


def test_families_of_partitioned_variables() -> None:
  Family = slot_names.Family  # noqa: N806

  def found(*names: str, owners: str = "w b") -> slot_names.Families:
    return slot_names.families("SGD", owners.split(), names)

  # Scopes that differ are two optimizers, and the same one is one.
  one = {Family("dnn/", "M"): {"b": 1, "w": 1}}
  assert found("dnn/b/M", "w/t_0/M") == one
  assert [f.slot("w", 0) for f in found("dnn/b/M", "w/t_0/M")] == ["w/t_0/M"]
  assert list(found("b/t_0/M", "w/t_0/M").values()) == [{"b": 1, "w": 1}]
  assert len(found("dn/b/M", "w/t_0/M")) == 2
  assert len(found("b/_0/M", "w/t_0/M")) == 2
  assert len(found("dnn/b/M", "abc/b/M", "w/t_0/M")) == 3
  # Of long scopes the end is known.
  long = "w/1/w/part_0/M"
  assert found("12345678_1/b/M", long) == {
    Family("12345678_1/", "M"): {"b": 1, "w": 1}
  }
  assert len(found("12345678_2/b/M", long)) == 2
  assert len(found("w/2/w/part_0/M", long)) == 2
  # Other names, other variables, several parts.
  for names in (
    ["w/part_1/M"],
    ["w/x_0/M"],
    ["w//M"],
    ["w/t_0", "w/t_0/M"],
    ["w/t_0/M", "w/t_1/M"],
  ):
    assert "M" not in {f.name for f in found(*names, owners="w")}


def test_how_many_slots_an_optimizer_has() -> None:
  for centered, size in ((True, 3), (False, 2)):
    made = tf.keras.optimizers.RMSprop(0.1, centered=centered)
    assert slot_names.size_of("RMSprop", made) == size
  assert slot_names.size_of("SGD", tf.keras.optimizers.SGD()) == 1


def test_every_kind_that_is_known_is_tested() -> None:
  kinds = {slot_names.kind_of(_plain(name)) for name in sessions.PAIRS}
  assert kinds == {"SGD", "Adam", "Adagrad", "Adadelta", "RMSprop", "Ftrl"}
  assert slot_names.kind_of(tf.keras.optimizers.Nadam()) is None
  assert slot_names.kind_of(tf.keras.optimizers.AdamW()) == "Adam"


# The command line.

PROGRAM = """
  import tensorflow as tf
  from tests import migration_sessions as sessions
  from tf_cross_shard import (CrossShardOptimizer)

  def momentum():
    return sessions.network(), CrossShardOptimizer(sessions.plain("Momentum"))

  def adam():
    return sessions.network(), sessions.plain("Adam")

  def nothing():
    pass

  number = 7
"""


class TestCommandLine:
  @pytest.fixture(autouse=True)
  def program(
    self,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
  ) -> Iterator[str]:
    self.module = f"program_of_{request.node.name.split('[')[0]}"
    file = tmp_path / f"{self.module}.py"
    file.write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    return self.module

  def _main(
    self, capsys: pytest.CaptureFixture[str], *words: str
  ) -> tuple[int, str, str]:
    status = command.main(["convert-checkpoint", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err

  def test_converts(
    self, capsys: pytest.CaptureFixture[str], tmp_path: Path
  ) -> None:
    old, dst = saved("Momentum"), str(tmp_path / "new")
    words = [old.src, dst, "--program", f"{self.module}:momentum"]
    status, out, err = self._main(capsys, *words)
    assert (status, err) == (0, "")
    assert out.startswith(f"{dst}: 9 variables\n")
    training = sessions.Training(lambda: _plain("Momentum"))
    adapters.build(training.optimizer, training.model.trainable_variables)
    checkpoint = tf.train.Checkpoint(
      model=training.model, optimizer=training.optimizer
    )
    checkpoint.read(dst).assert_consumed()
    assert _goes_on(training, "Momentum", old) < LIMIT

  def test_options(
    self, capsys: pytest.CaptureFixture[str], tmp_path: Path
  ) -> None:
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"one/bias": "one/bias"}))
    words = [saved("Adam").src, "new", "--program", f"{self.module}:momentum"]
    options = ["--names", str(names), "--allow-unmatched"]
    status, out, err = self._main(capsys, *words, *options)
    assert (status, err) == (0, "")
    assert "in the checkpoint only:\n  beta1_power []\n" in out
    assert (tmp_path / "new.index").exists()

  def test_slots_of_another_name(
    self, capsys: pytest.CaptureFixture[str], tmp_path: Path
  ) -> None:
    old = sessions.Sessions(
      lambda: v1.train.MomentumOptimizer(0.1, 0.9, name="mine")
    )
    src = old.save(tmp_path / "old")
    words = [src, "new", "--program", f"{self.module}:momentum"]
    status, _, err = self._main(capsys, *words)
    assert status == 2
    assert "Say `slots='mine'`" in err
    status, out, err = self._main(capsys, *words, "--slots", "mine")
    assert (status, err) == (0, "")
    assert "one/kernel/mine\n" in out

  @pytest.mark.parametrize(
    ("options", "words"),
    [
      (["--program", "none"], "--program must be named MODULE:FUNCTION; got"),
      (["--program", "none_such:f"], "No module named 'none_such'"),
      (["--program", "MODULE:other"], "has no function 'other'."),
      (["--program", "MODULE:number"], "must name a function; got int: 7."),
      (["--program", "MODULE:"], "must be named MODULE:FUNCTION; got"),
      (
        ["--program", "MODULE:adam", "--names", "list.json"],
        "--names must be a file such as",
      ),
      (
        ["--program", "MODULE:adam", "--names", "nested.json"],
        "nested.json: 'w' has ['w'], which is no name.",
      ),
      (
        ["--program", "MODULE:momentum", "--slots", "mine"],
        "`slots` is 'mine', and beside no weight",
      ),
      (["--program", "MODULE:nothing"], "must return a model and an optimizer"),
      (["--program", "MODULE:adam"], "Not everything has a counterpart:"),
      (
        ["--program", "MODULE:adam", "--names", "broken.json"],
        "--names must be a file such as",
      ),
      (["--program", "MODULE:adam", "--names", "none.json"], "none.json"),
    ],
  )
  def test_errors(
    self,
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
  ) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text('["w"]')
    (tmp_path / "nested.json").write_text('{"w": ["w"]}')
    options = [text.replace("MODULE", self.module) for text in options]
    src = saved("Momentum").src
    status, out, err = self._main(capsys, src, "new", *options)
    assert (status, out) == (2, "")
    assert err.startswith("python -m tf_cross_shard: ")
    assert words in err
    assert not list(tmp_path.glob("new*"))


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
