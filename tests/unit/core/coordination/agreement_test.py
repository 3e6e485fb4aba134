"""Lines are alike where workers do the same, and differ where they do not."""

import time
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.coordination import (
  agreement,
  errors,
  key_value_store,
)


def _dense(name: str, units: int = 2, dtype: str = "float32") -> list[Any]:
  """The weights of a layer of that name."""
  layer = tf.keras.layers.Dense(units, name=name, dtype=dtype)
  layer.build((None, 3))
  return list(layer.trainable_variables)


def test_lines_of_settings_and_variables() -> None:
  lines = agreement.settings(group_assignment=[[0, 2], [1, 3]], wire_dtype=None)
  assert lines == ["group_assignment: [[0, 2], [1, 3]]", "wire_dtype: None"]
  assert agreement.variables(_dense("top", dtype="float64")) == [
    "variable 0: top/kernel float64 [3, 2]",
    "variable 1: top/bias float64 [2]",
    "variables: 2",
  ]
  mine = tf.Variable(tf.zeros([2, 1]), name="weight")
  keras = tf.keras.Variable(tf.zeros([2, 1]), name="weight")
  assert agreement.variables([mine]) == agreement.variables([keras])


@pytest.mark.parametrize(
  "names", [("dense", "dense_1"), ("dense_6", "dense_9")]
)
def test_how_many_there_were_before_does_not_matter(
  names: tuple[str, str],
) -> None:
  """But their order does."""
  first, second = _dense(names[0]), _dense(names[1], units=5)
  lines = agreement.variables([*first, *second])
  assert lines == [
    "variable 0: dense/kernel float32 [3, 2]",
    "variable 1: dense/bias float32 [2]",
    "variable 2: dense_1/kernel float32 [3, 5]",
    "variable 3: dense_1/bias float32 [5]",
    "variables: 4",
  ]
  assert lines != agreement.variables([*second, *first])


def test_names_that_the_user_chose_stay_as_they_are() -> None:
  """What Keras called after a class, in either of its spellings, does not."""
  for name, expected in (
    ("head_5/dense_3/kernel", "head_5/dense/kernel"),
    ("batch_normalization_4/gamma", "batch_normalization/gamma"),
    (
      "bidirectional_2/forward_lstm_7/kernel",
      "bidirectional/forward_lstm/kernel",
    ),
    (
      "seed_generator_9/seed_generator_state",
      "seed_generator/seed_generator_state",
    ),
    ("adam_2/iteration", "adam/iteration"),
    ("variable_8", "variable"),
    ("block_2_1/w", "block_2_1/w"),
  ):
    assert variables_lib.renumbered([name]) == [expected]


def test_gradients_show_their_kind_and_no_shape() -> None:
  """The number of rows may differ; the variables' shapes are compared."""
  for rows in (1, 2):
    values = tf.zeros([rows, 2], tf.bfloat16)
    sparse = tf.IndexedSlices(values, tf.range(rows))
    grads = [tf.ones([1]), None, sparse, tf.ones([1], tf.float64)]
    assert agreement.gradients(grads) == [
      "gradient 0: float32",
      "gradient 1: None",
      "gradient 2: bfloat16 rows",
      "gradient 3: float64",
    ]


def test_the_first_worker_waits_longest(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """The others compare their variables with its own, and can tell more."""
  waited = []

  def wait(key: str, deadline: float, sender: int) -> None:
    waited.append(deadline - time.monotonic())

  monkeypatch.setattr(key_value_store, "put", lambda *_: None)
  monkeypatch.setattr(key_value_store, "report", lambda *_: None)
  monkeypatch.setattr(key_value_store, "wait", wait)
  for index in (0, 1):
    workers = agreement.Workers(("worker 0", "worker 1"), index, 4.0)
    with pytest.raises(errors.MissingWorkerError, match=r"waited [47] s for"):
      agreement.exchange(workers, "the start", "text")
  assert waited[0] > waited[2] + 2.0


def test_a_worker_that_has_read_may_end(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """It raises what it read, and its process ends: the first raises it, too."""

  def wait(key: str, deadline: float, sender: int) -> str:
    if "/read/" in key:
      raise errors.WorkerLostError("worker 1 was lost")
    return f"text of {key.rpartition('/')[2]}"

  monkeypatch.setattr(key_value_store, "put", lambda *_: None)
  monkeypatch.setattr(key_value_store, "wait", wait)
  workers = agreement.Workers(("worker 0", "worker 1"), 0)
  with pytest.raises(errors.DisagreementError, match="worker 1 has `text of 1"):
    agreement.agree(workers, "the start", [])
