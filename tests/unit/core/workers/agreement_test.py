"""Tests that workers compare what they do, and that all raise a difference."""

import concurrent.futures
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.workers import agreement, errors, key_value_store


def _dense(name: str, units: int = 2, dtype: str = "float32") -> list[Any]:
  layer = tf.keras.layers.Dense(units, name=name, dtype=dtype)
  layer.build((None, 3))
  return list(layer.trainable_variables)


def test_lines_of_settings_and_variables() -> None:
  lines = agreement.setting_lines(
    group_assignment=[[0, 2], [1, 3]], wire_dtype=None
  )
  assert lines == ["group_assignment: [[0, 2], [1, 3]]", "wire_dtype: None"]
  assert agreement.variable_lines(_dense("top", dtype="float64")) == [
    "variable 0: top/kernel float64 [3, 2]",
    "variable 1: top/bias float64 [2]",
    "variables: 2",
  ]
  mine = tf.Variable(tf.zeros([2, 1]), name="weight")
  keras = tf.keras.Variable(tf.zeros([2, 1]), name="weight")
  assert agreement.variable_lines([mine]) == agreement.variable_lines([keras])


@pytest.mark.parametrize(
  "names", [("dense", "dense_1"), ("dense_6", "dense_9")]
)
def test_variable_lines_ignore_automatic_layer_numbers(
  names: tuple[str, str],
) -> None:
  """The order of layers still matters."""
  first, second = _dense(names[0]), _dense(names[1], units=5)
  lines = agreement.variable_lines([*first, *second])
  assert lines == [
    "variable 0: dense/kernel float32 [3, 2]",
    "variable 1: dense/bias float32 [2]",
    "variable 2: dense_1/kernel float32 [3, 5]",
    "variable 3: dense_1/bias float32 [5]",
    "variables: 4",
  ]
  assert lines != agreement.variable_lines([*second, *first])


def test_only_automatic_names_are_renumbered() -> None:
  """Names that Keras derived from a class are renumbered, in both spellings."""
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
    assert agreement.gradient_lines(grads) == [
      "gradient 0: float32",
      "gradient 1: None",
      "gradient 2: bfloat16 rows",
      "gradient 3: float64",
    ]


def test_the_first_worker_waits_longest(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """The other workers give up earlier, because their errors can say more."""
  waited = []

  def wait(key: str, deadline: float, **_: Any) -> None:
    waited.append(deadline - time.monotonic())

  monkeypatch.setattr(key_value_store, "put", lambda *_: None)
  monkeypatch.setattr(key_value_store, "tell", lambda *_: None)
  monkeypatch.setattr(key_value_store, "abort", lambda *_: None)
  monkeypatch.setattr(key_value_store, "wait", wait)
  for index in (0, 1):
    workers = agreement.Workers(("worker 0", "worker 1"), index, 4.0)
    with pytest.raises(errors.MissingWorkerError, match=r"waited [47] s for"):
      agreement.exchange(workers, "the start", "text")
  assert waited[0] > waited[2] + 2.0


_loss = key_value_store._loss


class _Store:
  """A key-value store that is lost when the first worker ends.

  Each worker is a thread, which ends as soon as its function returns.
  """

  def __init__(self) -> None:
    self._values: dict[str, str] = {}
    self._changed = threading.Condition()
    self._is_first = threading.local()
    self._has_ended = False

  def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Exception | None]:
    """Runs the task of each worker; returns its error, if there is one."""
    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
      running = [
        pool.submit(self._run, task, index == 0)
        for index, task in enumerate(tasks)
      ]
      return [future.result() for future in running]

  def _run(self, task: Callable[[], Any], is_first: bool) -> Exception | None:
    self._is_first.here = is_first
    try:
      task()
    except Exception as error:
      return error
    finally:
      if is_first:
        with self._changed:
          self._has_ended = True
          self._changed.notify_all()
    return None

  def stop(self, server: tf.train.ServerDef) -> None:
    """Stops the first worker: what this process writes cannot be read."""
    self._collective_ops_server_def = server  # as in TensorFlow's context
    self._is_first.here = False
    key_value_store.put("text", "is lost")
    self._values.clear()

  def _check(self) -> None:
    if self._has_ended and not self._is_first.here:
      raise tf.errors.UnavailableError(
        *(None, None),
        "Socket closed while calling /tensorflow.CoordinationService to remote"
        " target /job:worker/replica:0/task:0",
      )

  def set_config_key_value(self, key: str, value: str) -> None:
    """Answers late, when the first worker may have ended."""
    with self._changed:
      self._check()
      self._values[key] = value
      self._changed.notify_all()
      if not self._is_first.here:
        self._changed.wait_for(lambda: self._has_ended, 0.1)
        self._check()

  def get_config_key_value(self, key: str, milliseconds: int) -> str:
    with self._changed:
      self._changed.wait_for(
        lambda: key in self._values or self._has_ended, milliseconds / 1000
      )
      self._check()
      if key not in self._values:
        raise tf.errors.DeadlineExceededError(None, None, key)
      return self._values[key]

  def report_error_to_cluster(self, code: int, message: str) -> None:
    """Does nothing, as if the other workers received the error late."""


class _Rounds(threading.local):
  """Counts exchanges for each thread, as `_rounds` does for each process."""

  def __init__(self) -> None:
    self._count = itertools.count()

  def __next__(self) -> int:
    return next(self._count)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
  found = _Store()
  monkeypatch.setattr(key_value_store.context, "context", lambda: found)
  monkeypatch.setattr(key_value_store, "_loss", lambda sender: None)
  monkeypatch.setattr(agreement, "_rounds", _Rounds())
  return found


def _workers(count: int, timeouts: Sequence[float]) -> list[agreement.Workers]:
  names = tuple(f"worker {i}" for i in range(count))
  return [
    agreement.Workers(names, index, timeout)
    for index, timeout in enumerate(timeouts)
  ]


@pytest.mark.parametrize("count", [2, 4])
def test_all_workers_raise_what_differs_although_the_first_ends_at_once(
  count: int, store: _Store
) -> None:
  def compare_workers(workers: agreement.Workers) -> None:
    agreement.compare_workers(
      workers, "the start", [f"odd: {workers.index == 1}"]
    )

  found = store.run(
    [
      functools.partial(compare_workers, each)
      for each in _workers(count, [5.0] * count)
    ]
  )
  for error in found:
    assert isinstance(error, errors.DisagreementError), error
    assert "worker 1 has `odd: True` where worker 0 has `odd: False`" in str(
      error
    )
  assert len(found) == count


def test_others_name_the_worker_that_the_first_missed(
  store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The other workers started to wait later, and must not wait longer."""
  monkeypatch.setattr(agreement, "_LONGER", 0.0)
  found = store.run(
    [
      functools.partial(agreement.exchange, each, "the start", "text")
      for each in _workers(4, [2.5, 20.0, 20.0])
    ]
  )
  for error in found:
    assert isinstance(error, errors.MissingWorkerError), error
    assert "worker 0 waited 2.5 s for worker 3 at: the start" in str(error)
  assert len(found) == 3


def test_a_first_worker_that_does_not_answer_is_lost(
  store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The first worker's process is stopped, so TensorFlow would wait forever."""
  server = tf.train.ServerDef()
  for name, count in (("chief", 1), ("worker", 1)):
    job = server.cluster.job.add(name=name)
    for index in range(count):
      job.tasks[index] = "host:1"
  monkeypatch.setattr(key_value_store, "_LONGEST", 0.1)
  monkeypatch.setattr(key_value_store, "_loss", _loss)
  store.stop(server)
  with pytest.raises(errors.WorkerLostError, match=r"^chief 0 was lost: it "):
    key_value_store.wait("text", time.monotonic() + 60, sender=1)


def test_no_worker_ends_before_all_have_read_the_difference(
  store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The first worker waits until every worker has read the difference."""
  ended = threading.Event()
  read = key_value_store.wait

  def wait(key: str, *args: Any, **kwargs: Any) -> str | None:
    if threading.current_thread() is slow and key == "round/1/0":
      assert not ended.wait(0.5)
    return read(key, *args, **kwargs)

  slow: threading.Thread | None = None
  monkeypatch.setattr(key_value_store, "wait", wait)

  def compare_workers(workers: agreement.Workers) -> None:
    nonlocal slow
    if workers.index == 2:
      slow = threading.current_thread()
    try:
      agreement.compare_workers(
        workers, "the start", [f"odd: {workers.index == 1}"]
      )
    finally:
      ended.set()

  for error in store.run(
    [
      functools.partial(compare_workers, each)
      for each in _workers(3, [5.0] * 3)
    ]
  ):
    assert isinstance(error, errors.DisagreementError), error


def test_worker_may_end_after_it_has_read_the_difference(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """The first worker still raises the difference after a worker has ended."""

  def wait(key: str, deadline: float, **_: Any) -> str:
    if "/done/" in key:
      raise errors.WorkerLostError("worker 1 was lost")
    return f"text of {key.rpartition('/')[2]}"

  monkeypatch.setattr(key_value_store, "put", lambda *_: None)
  monkeypatch.setattr(key_value_store, "wait", wait)
  workers = agreement.Workers(("worker 0", "worker 1"), 0)
  with pytest.raises(errors.DisagreementError, match="worker 1 has `text of 1"):
    agreement.compare_workers(workers, "the start", [])
