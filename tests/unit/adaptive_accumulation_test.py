"""Windows that follow the noise scale, against NumPy and across a crash."""
# bazel: tags=slow

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import replica_state_cases as cases
from tests.support import testbed
from tf_cross_shard import (
  CrossShardOptimizer,
  callbacks,
  replica_state,
  schedules,
)
from tf_cross_shard.callbacks import group_rates
from tf_cross_shard.inner_optimizer import optimizer_state

pytestmark = pytest.mark.slow

GROUPS = [[0, 2], [1, 3]]
LONGEST, BATCHES, EPOCHS, RATE = 8, 6, 9, 0.0625
_RNG = np.random.default_rng(2)
# [epochs, batches, replicas]: clear gradients, then noisy ones, then clear ones
# again. Another noise in each group.
TARGETS = (
  np.repeat([20.0, 0.0, 300.0], [2, 4, 3])[:, np.newaxis, np.newaxis]
  + _RNG.normal(size=(EPOCHS, BATCHES, 4)) * [80, 120, 80, 120]
).astype("f")


def _model(rate: Any = RATE, strategy: Any = None, **options: Any) -> Any:
  options = {
    "accumulate_steps": LONGEST,
    "noise_scale": 1,
    "group_assignment": GROUPS,
    **options,
  }
  with (strategy or testbed.mirrored()).scope():
    model = testbed.one_weight()
    optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(rate), **options)
    model.compile(optimizer, "mse")
  return model


def _data(targets: np.ndarray) -> tf.data.Dataset:
  """Batches of one example for each replica."""
  y = targets.reshape(-1, 1)
  return tf.data.Dataset.from_tensor_slices((np.ones_like(y), y)).batch(4)


def _fit(model: Any, *callbacks_: Any) -> list[int]:
  """Returns the length at the end of each epoch."""
  history = model.fit(
    _data(TARGETS),
    epochs=EPOCHS,
    steps_per_epoch=BATCHES,
    verbose=0,
    callbacks=list(callbacks_),
  )
  return [int(length) for length in history.history["window_length"]]


def _lengths_and_weights(
  shortest: int = 1,
  every: int = BATCHES,
  batch_ratio: float = 1.0,
  rate_power: float = 0.0,
) -> tuple[list[int], list[float]]:
  """What NumPy says."""
  length, lengths = shortest, []
  weights = np.zeros(2)
  averages = np.zeros([2, 2])
  sums, calls = np.zeros(4), 0
  for targets in TARGETS:
    for batch, row in enumerate(targets):
      sums += 2 * (np.tile(weights, 2) - row)
      calls += 1
      if calls >= length:
        means = (sums / calls).reshape(2, 2)  # [member, group]
        variance, mean = means.var(0, ddof=1), means.mean(0)
        averages = 0.99 * averages + 0.01 * np.stack(
          [variance * calls / LONGEST, mean**2 - variance / 2]
        )
        weights -= RATE * (length / LONGEST) ** rate_power * mean
        sums, calls = np.zeros(4), 0
      if (batch + 1) % every == 0 and averages.any():
        batches = averages[0] / averages[1] * LONGEST / 2 * batch_ratio
        aim = np.where(batches > 0, batches, np.inf).min()
        aim = round(float(np.clip(aim, length / 2, 2 * length)))
        length = int(np.clip(aim, shortest, LONGEST))
    lengths.append(length)
  return lengths, list(weights)


@pytest.mark.parametrize(
  ("engine", "arguments"),
  [
    ("mirrored", {}),
    ("virtual", {"rate_power": 0.5}),
    ("mirrored", {"every": 4, "batch_ratio": 0.5, "shortest": 2}),
  ],
)
def test_lengths_and_weights(engine: str, arguments: dict[str, Any]) -> None:
  model = _model(strategy=getattr(testbed, engine)(4))
  lengths = _fit(model, callbacks.AdaptiveAccumulation(**arguments))
  expected, weights = _lengths_and_weights(**arguments)
  changes = np.sign(np.diff(expected))
  assert {-1, 1} <= set(changes), "rises and falls"
  assert lengths == expected
  found = [float(copy[0, 0]) for copy in testbed.copies(model.weights[0])]
  np.testing.assert_allclose(found, weights * 2, rtol=1e-5)
  assert found[0] != found[1]


@pytest.mark.parametrize("every", ["epoch", 4])
def test_a_crash_changes_nothing(every: Any, tmp_path: pathlib.Path) -> None:
  """To the bit: lengths, rates, an open window, and what they lead to."""
  states, lengths = [], []
  for crashes in (False, True):
    model = _model(schedules.PerGroup([RATE, RATE / 2]))

    def fit(model: Any = model, *others: Any) -> Any:
      adapt = callbacks.AdaptiveAccumulation(
        every=every, batch_ratio=4.0, rate_power=0.5
      )
      return model.fit(
        _data(TARGETS[2]),
        epochs=5,
        verbose=0,
        callbacks=[adapt, *others],
      ).history["window_length"]

    if crashes:
      folder = tmp_path / "backups"
      crash = testbed.Interruption(2, 4)
      with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks.BackupAndRestore(folder, every=3), crash)
      model = _model(schedules.PerGroup([RATE, RATE / 2]))
      lengths.append(fit(model, callbacks.BackupAndRestore(folder, every=3)))
    else:
      lengths.append(fit())
    variables = [
      *model.variables,
      *(v for _, v in optimizer_state.state_variables(model.optimizer)),
    ]
    copies = map(testbed.copies, variables)
    states.append({str(i): values for i, values in enumerate(copies)})
  assert lengths[0][-3:] == lengths[1]
  assert len(set(lengths[0])) > 2
  assert cases.same(*states) == []


def test_rates_follow_the_length() -> None:
  """Those given are of `accumulate_steps`; each group has its own."""
  model = _model(schedules.PerGroup([0.5, 0.125]))
  adapt = callbacks.AdaptiveAccumulation(shortest=2, rate_power=1.0)
  adapt.set_model(model)
  adapt.on_train_begin()
  assert group_rates.read(model) == [0.125, 0.03125]
  adapt.adapt()  # Nothing is measured yet.
  adapt.on_train_begin()
  assert adapt.length == 2
  assert group_rates.read(model) == [0.125, 0.03125]


def test_groups_of_different_lengths() -> None:
  """As from a file in which each is at its best, with its own rate."""
  model = _model(schedules.PerGroup([0.5, 0.125]))
  adapt = callbacks.AdaptiveAccumulation(rate_power=1.0)
  adapt.set_model(model)
  step = model.optimizer._step
  for variable, values in (
    (step.window_length(), [4, 2, 4, 2]),
    (model.optimizer.noise_scale, [1.0] * 4),
  ):
    copies = testbed.mirrored().experimental_local_results(variable)
    for copy, value in zip(copies, values, strict=True):
      copy.assign(value)
  adapt.on_train_begin()
  assert testbed.copies(step.window_length()) == [4] * 4
  assert group_rates.read(model) == [0.5, 0.25]


def test_a_model_that_fit_builds() -> None:
  with testbed.mirrored().scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    sgd = tf.keras.optimizers.SGD(0.125)
    optimizer = CrossShardOptimizer(sgd, accumulate_steps=2, noise_scale=1)
    model.compile(optimizer, "mse")
  adapt = callbacks.AdaptiveAccumulation(rate_power=1.0)
  model.fit(_data(TARGETS[0]), verbose=0, callbacks=[adapt])
  assert float(optimizer.learning_rate.numpy()) == 0.0625 * adapt.length


def test_groups_of_another_size_keep_the_length(tmp_path: pathlib.Path) -> None:
  """Windows begin anew there, and are as long as they were."""
  model = _model(group_assignment=[[0, 1, 2, 3]])
  lengths = _fit(model, callbacks.AdaptiveAccumulation(3))
  assert lengths[-1] >= 3
  replica_state.save(tmp_path / "state", model.optimizer, model)
  other = _model(group_assignment=[[0, 1]], strategy=testbed.mirrored(2))
  adapt = callbacks.AdaptiveAccumulation()
  adapt.set_model(other)
  replica_state.restore(tmp_path / "state", other.optimizer, other)
  adapt.on_train_begin()
  assert adapt.length == lengths[-1]


def test_files_have_a_length_only_where_it_varies() -> None:
  names = []
  for varies in (False, True):
    model = _model()
    model.optimizer.build(model.trainable_variables)
    if varies:
      for _ in range(2):
        callbacks.AdaptiveAccumulation().set_model(model)
    names.append(dict(optimizer_state.state_variables(model.optimizer)))
  assert set(names[1]) - set(names[0]) == {"window_length"}
  assert len(names[1]) == len(names[0]) + 1


# --------------------------------------------------------------------- errors


@pytest.mark.parametrize(
  "options", [{"accumulate_steps": None}, {"noise_scale": False}]
)
def test_optimizers_that_do_not_measure_or_accumulate(options: Any) -> None:
  with pytest.raises(ValueError, match=r"Use .*accumulate_steps=16, noise_sca"):
    callbacks.AdaptiveAccumulation().set_model(_model(**options))


def test_shortest_is_longer_than_the_longest() -> None:
  with pytest.raises(
    ValueError, match=r"`shortest` .* accumulate_steps=8 .* 9"
  ):
    callbacks.AdaptiveAccumulation(9).set_model(_model())


def test_beside_what_counts_windows() -> None:
  both = callbacks.OuterOptimizer(2), callbacks.AdaptiveAccumulation()
  with pytest.raises(ValueError, match="OuterOptimizer counts windows"):
    _fit(_model(), *both)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
