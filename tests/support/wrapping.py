"""A pytest plugin that wraps every optimizer that a test makes.

    python -m pytest -p tests.support.wrapping \
        --encapsulation-report=report.json .../keras/src/optimizers/sgd_test.py

Use this plugin for test files of other projects, such as Keras' own. In these
files, `SGD(...)` makes `CrossShardOptimizer(SGD(...), reduction="sum")`, for
every subclass of Keras' optimizer, whoever calls it: the test, `optimizers.get`
or `model.compile("sgd")`. That is done in `__new__`, which may return an object
of another class. Replacing the names `SGD` etc. would not be enough: test files
keep the classes in tables, and `isinstance` and `SGD.from_config` need the
classes themselves. A LossScaleOptimizer is wrapped as a whole:
`CrossShardOptimizer(LossScaleOptimizer(SGD()))`. Of a MultiOptimizer, the inner
optimizers are wrapped.

The plugin gives two settings of the optimizer to the CrossShardOptimizer: the
name, and the clipping limits, which both Keras 3 and CrossShardOptimizer apply
before they sum over the replicas. If a test mocks a method of the
CrossShardOptimizer, the method is mocked on the optimizer that does the
updates.

Do not import this module in other tests. It must run in a separate process.
"""

import contextlib
import json
import pathlib
from collections.abc import Generator, Iterator
from typing import Any
from unittest import mock

import keras
import pytest
from keras.src.optimizers import base_optimizer

import tf_cross_shard
from tests.support import testbed

# Keras' losses are averaged over the examples of all replicas. For such a loss,
# reduction="sum" gives N times the gradient on N replicas. So in tests that
# call `fit` on several replicas, use "mean", which gives the gradient of plain
# Keras.
_TRAINS_BY_FIT_ON_REPLICAS = (
  "keras/src/backend/tensorflow/distribute_test.py",
)

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


class Encapsulation:
  """Wraps every optimizer that Keras' tests create, and counts them.

  Attributes:
    made: The number of optimizers that were wrapped since the last test
      began.
  """

  def __init__(self) -> None:
    self._paused = True
    self._reduction = "sum"
    # MultiOptimizer is new.
    self._composite = getattr(keras.optimizers, "MultiOptimizer", ())
    self.made = 0
    base = base_optimizer.BaseOptimizer
    assert "__new__" not in vars(base), "Keras defines it itself now"
    # Do not remove this `__new__` afterwards: if a class has had a `__new__`
    # that was removed, Python accepts no constructor arguments for it
    # (https://github.com/python/cpython/issues/49572).
    base.__new__ = lambda cls, *args, **kwargs: self._new(cls, args, kwargs)

  @contextlib.contextmanager
  def active(self, nodeid: str) -> Iterator[None]:
    """Wraps until the `with` block, which runs one test, ends."""
    by_fit = nodeid.startswith(_TRAINS_BY_FIT_ON_REPLICAS)
    self._reduction = "mean" if by_fit else "sum"
    ours = tf_cross_shard.CrossShardOptimizer
    from_config = ours.from_config.__func__
    self.made = 0
    with (
      mock.patch.object(ours, "from_config", self._pausing(from_config)),
      mock.patch.object(mock.patch, "object", _patch_innermost),
      self._set_paused(False),
    ):
      yield

  def _new(self, cls: type[Any], args: Any, kwargs: Any) -> Any:
    """Replaces `__new__` of an optimizer class; returns a wrapped optimizer.

    Python does not call `__init__` if `__new__` returns an object of another
    class. So this method calls it.
    """
    optimizer = object.__new__(cls)
    ours = tf_cross_shard.CrossShardOptimizer
    # The base class trains nothing: Keras makes one to list its attributes.
    is_base = cls is keras.optimizers.Optimizer
    if self._paused or is_base or issubclass(cls, (ours, self._composite)):
      return optimizer
    if issubclass(cls, keras.optimizers.LossScaleOptimizer):
      inside = args[0] if args else kwargs["inner_optimizer"]
      if not isinstance(inside, ours):  # of a MultiOptimizer
        return optimizer
      args = (inside.inner_optimizer, *args[1:])
    optimizer.__init__(*args, **kwargs)
    own = {name: getattr(optimizer, name) for name in _CLIPPING}
    for name in _CLIPPING:
      setattr(optimizer, name, None)
    self.made += 1
    return ours(
      optimizer, reduction=self._reduction, name=optimizer.name, **own
    )

  def _pausing(self, method: Any) -> Any:
    """Wraps `from_config`, so that its result is not wrapped again."""

    def paused(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
      with self._set_paused(True):
        return method(cls, *args, **kwargs)

    return classmethod(paused)

  @contextlib.contextmanager
  def _set_paused(self, paused: bool) -> Iterator[None]:
    before, self._paused = self._paused, paused
    try:
      yield
    finally:
      self._paused = before


_patch_object = mock.patch.object


def _patch_innermost(target: Any, *args: Any, **kwargs: Any) -> Any:
  """Replaces `mock.patch.object`.

  If the target is a CrossShardOptimizer, patches the optimizer that does the
  updates.
  """
  if isinstance(target, tf_cross_shard.CrossShardOptimizer):
    target = testbed.base_optimizer(target)
  return _patch_object(target, *args, **kwargs)


class Plugin:
  """Wraps optimizers while a test runs, and records its result."""

  def __init__(self, report: pathlib.Path) -> None:
    self._encapsulation = Encapsulation()
    self._report = report
    self._tests: dict[str, dict[str, Any]] = {}

  def _test(self, nodeid: str) -> dict[str, Any]:
    return self._tests.setdefault(nodeid, {"outcome": "passed", "made": 0})

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
    with self._encapsulation.active(item.nodeid):
      try:
        return (yield)
      finally:
        self._test(item.nodeid)["made"] = self._encapsulation.made

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    test = self._test(report.nodeid)
    if report.failed:
      test.update(outcome="failed", error=report.longreprtext)
    elif report.skipped and test["outcome"] == "passed":
      test["outcome"] = "skipped"

  def pytest_collectreport(self, report: pytest.CollectReport) -> None:
    if report.failed:  # a file that cannot be imported
      test = self._test(report.nodeid)
      test.update(outcome="failed", error=report.longreprtext)

  def pytest_sessionfinish(self) -> None:
    self._report.write_text(json.dumps(self._tests))


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--encapsulation-report", type=pathlib.Path)


def pytest_configure(config: pytest.Config) -> None:
  report = config.getoption("--encapsulation-report")
  config.pluginmanager.register(Plugin(report))
