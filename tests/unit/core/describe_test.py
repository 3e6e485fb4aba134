"""`describe()` says what steps and variables really are."""

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import VectorizedStrategy, keras3


def _make(
  which: str,
  opt: Any = "Adam",
  shapes: tuple[tuple[int, ...], ...] = ((8, 10), (10,)),
  strategy: Any = None,
  dtypes: tuple[str, ...] = ("float32", "float32"),
  **options: Any,
) -> tuple[Any, list[Any]]:
  """A built optimizer and its variables, on four replicas by default."""
  library, package = training.KERASES[which]
  with (strategy or testbed.mirrored()).scope():
    if isinstance(opt, str):
      opt = getattr(library.optimizers, opt)(0.1)
    optimizer = package.CrossShardOptimizer(opt, **options)
    make = getattr(library, "Variable", tf.Variable)
    weights = [
      make(np.ones(shape), dtype=dtype, name=f"weight{i}")
      for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    ]
    optimizer.build(weights)
  return optimizer, weights


def _reasons(optimizer: Any) -> dict[str, str]:
  content = optimizer.describe().to_dict()
  return {x["asked"]: x["reason"] for x in content["not_in_force"]}


def _kernels(optimizer: Any, weights: list[Any]) -> list[str]:
  """The kernels in a traced step."""

  def step(*grads: tf.Tensor) -> None:
    optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

  specs = [tf.TensorSpec(w.shape, w.dtype) for w in weights]
  function = tf.function(step, autograph=False).get_concrete_function(*specs)
  graph = function.graph.as_graph_def()
  functions = graph.library.function
  nodes = [*graph.node, *(node for f in functions for node in f.node_def)]
  return [n.op for n in nodes if n.op.startswith("ResourceApply")]


# An optimizer, and why it has no kernel.
_REASONS: dict[str, tuple[Callable[[Any], Any], str]] = {
  "Adam": (lambda home: home.Adam(0.1), ""),
  "amsgrad": (
    lambda home: home.Adam(0.1, amsgrad=True),
    "no kernel for Adam with amsgrad",
  ),
  "Nadam": (lambda home: home.Nadam(0.1), "no kernel for Nadam"),
  "subclass": (
    lambda home: type("Mine", (home.Adam,), {})(0.1),
    "Mine is a subclass of Adam",
  ),
}


@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("name", _REASONS)
@training.in_both
def test_kernels_are_those_of_the_traced_step(
  which: str, name: str, fused: bool | None
) -> None:
  make, reason = _REASONS[name]
  opt = make(training.KERASES[which][0].optimizers)
  alone = tf.distribute.get_strategy()
  if fused and reason:
    with pytest.raises(ValueError, match=r"is True, but .*jit_compile=True"):
      _make(which, opt, strategy=alone, fused_update=True)
    return
  optimizer, weights = _make(
    which, opt, ((10,), (3,)), alone, fused_update=fused
  )
  rows = optimizer.describe().rows()
  updated_by = [row["updated_by"] for row in rows]
  assert _kernels(optimizer, weights) == [x for x in updated_by if x != "Keras"]
  for row in rows:
    assert row["reason"] == ("fused_update=False" if fused is False else reason)
    assert bool(row["reason"]) == (row["updated_by"] == "Keras")


def test_tpu_programs_have_no_kernels() -> None:
  strategy = testbed.virtual(2)
  optimizer, weights = _make(
    "keras", strategy=strategy, fused_update=True, lazy_rows=True
  )
  described = optimizer.describe()
  traced: list[str] = []

  def step() -> None:
    optimizer.apply_gradients([(tf.ones(w.shape), w) for w in weights])
    operations = tf.compat.v1.get_default_graph().get_operations()
    traced.extend(operation.type for operation in operations)

  strategy.run(step)
  assert traced
  assert not any(kind.startswith("ResourceApply") for kind in traced)
  for row in described.rows():
    assert row["updated_by"] == "Keras"
    assert row["reason"] == "XLA compiles the whole step"
  assert _reasons(optimizer) == {
    "fused_update=True": "not for all variables: XLA compiles the whole step",
    "lazy_rows=True": (
      "a program without shapes that depend on data changes all rows"
    ),
  }
  assert "CrossReplicaSum" in str(described)


def test_keras_accumulates_sums_of_every_call() -> None:
  with testbed.mirrored().scope():
    opt = keras.optimizers.Adam(0.1, gradient_accumulation_steps=3)
  assert _make("keras", opt)[0].describe().to_dict()["calls_per_step"] == 3


@training.in_both
def test_parts_are_those_of_the_shards(which: str) -> None:
  optimizer, _ = _make(which, shard_update=True)
  kernel, bias = optimizer.describe().rows()
  assert kernel["elements"] == [23, 23, 23, 11]
  assert bias["elements"] == [0, 0, 0, 10]
  assert kernel["updated_by"] == "ResourceApplyAdam"
  assert "[0, 0, 0, 10]" in str(optimizer.describe()).splitlines()[-1]


def test_tables() -> None:
  """Members do not divide tables that are updated by rows."""
  for options, updated_by in (
    ({}, "Keras"),
    ({"lazy_rows": True}, "rows"),
    ({"lazy_rows": True, "shard_update": True}, "rows"),
    ({"shard_update": True}, "ResourceApplyAdam"),
    ({"accumulate_steps": 2}, "ResourceApplyAdam"),
  ):
    with testbed.mirrored().scope():
      layer = keras.layers.Embedding(10_000, 100)
      layer.build((None, 2))
      optimizer = keras3.CrossShardOptimizer("adam", **options)
      optimizer.build(layer.trainable_variables)
    content = optimizer.describe().to_dict()
    [row] = content["variables"]
    parts = 4 if options == {"shard_update": True} else 1
    assert row["elements"] == [10**6 // parts] * 4
    assert row["updated_by"] == updated_by
    assert not _reasons(optimizer)


@pytest.mark.parametrize("lazy_rows", [False, True])
@pytest.mark.parametrize("kind", ["virtual", "models"])
def test_tables_in_one_program(
  kind: str, lazy_rows: bool, caplog: pytest.LogCaptureFixture
) -> None:
  """All rows change, which two steps warn of once."""
  is_tpu = kind == "virtual"
  strategy = testbed.virtual(2) if is_tpu else VectorizedStrategy(2)
  with strategy.scope():
    layer = keras.layers.Embedding(10_000, 100)
    layer.build((None, 2))
    optimizer = keras3.CrossShardOptimizer("adam", lazy_rows=lazy_rows)
    optimizer.build(layer.trainable_variables)
  described = optimizer.describe().to_dict()
  assert ("in one XLA program" in str(described["sums"])) == is_tpu
  reasons = list(_reasons(optimizer).values())
  assert len(reasons) == lazy_rows
  assert all(reason.startswith("a program") for reason in reasons)
  rows = tf.IndexedSlices(tf.ones([1, 100]), [7], [10_000, 100])
  pairs = [(rows, layer.weights[0])]
  for _ in range(2):
    training.on_rows(strategy, lambda: optimizer.apply_gradients(pairs))()
  said = [r for r in caplog.records if "changes all rows" in r.getMessage()]
  assert [r.levelname for r in said] == ["WARNING"] * lazy_rows


@pytest.mark.parametrize("name", ["global_clipnorm", "clipnorm"])
@training.in_both
def test_tables_that_opt_clips(which: str, name: str) -> None:
  """Keras 3 makes gradients dense when it clips them by their global norm."""
  library, package = training.KERASES[which]
  table = testbed.variable(np.ones([5, 2]), "embeddings", library)
  opt = library.optimizers.Adam(0.1, **{name: 0.5})
  optimizer = package.CrossShardOptimizer(opt)
  optimizer.build([table])
  rows = tf.IndexedSlices(tf.ones([1, 2]), [3], [5, 2])
  step = tf.function(
    lambda: optimizer.apply_gradients([(rows, table)]), autograph=False
  )
  graph = step.get_concrete_function().graph.as_graph_def()
  [row] = optimizer.describe().rows()
  has_kernel = any(node.op == "ResourceApplyAdam" for node in graph.node)
  assert has_kernel == (row["updated_by"] == "ResourceApplyAdam")
  assert has_kernel == (which == "keras" and name == "global_clipnorm")


class TestNotInForce:
  @pytest.mark.parametrize(
    ("options", "asked", "reason"),
    [
      ({"shard_update": True}, "shard_update=True", "nothing is divided"),
      ({"wire_dtype": "float16"}, "wire_dtype='float16'", "nothing is sent"),
      ({"accumulate_steps": 1}, "accumulate_steps=1", "one call"),
    ],
  )
  def test_on_one_replica_and_in_groups_of_one(
    self, options: dict[str, Any], asked: str, reason: str
  ) -> None:
    singles = [[0], [1], [2], [3]]
    optimizer, _ = _make("keras", group_assignment=singles, **options)
    assert reason in _reasons(optimizer)[asked]
    optimizer, _ = _make(
      "keras", strategy=tf.distribute.get_strategy(), **options
    )
    assert reason in _reasons(optimizer)[asked]
    optimizer, _ = _make("keras", **options)
    assert list(_reasons(optimizer)) == [asked] * ("accumulate" in asked)

  def test_settings(self) -> None:
    optimizer, _ = _make(
      "keras",
      dtypes=("float16", "float16"),
      wire_dtype="bfloat16",
      fused_update=True,
      lazy_rows=True,
      shard_update=True,
      clipnorm=1.0,
      per_model={"clipnorm": [2.0]},
    )
    assert _reasons(optimizer) == {
      "wire_dtype='bfloat16'": "no gradient has a wider dtype",
      "fused_update=True": "not for all variables: no kernel for float16",
      "lazy_rows=True": (
        "no table is known, by `Embedding` or update_by_rows()"
      ),
      "clipnorm=1.0": "`per_model` has a limit for each group",
    }


def test_summary() -> None:
  pairs = [[0, 2], [1, 3]]
  optimizer, _ = _make("keras", group_assignment=pairs, skip_nonfinite=True)
  content = optimizer.describe().to_dict()
  assert content["groups"] == pairs
  assert content["loss_factors"] == {"replica": 0.5, "global": 2.0}
  assert content["nonfinite"] == "skipped and counted"
  assert "  groups           [[0, 2], [1, 3]]\n" in str(optimizer.describe())
  optimizer, _ = _make("keras", reduction="sum", loss_averaged_over="global")
  assert optimizer.describe().to_dict()["loss_factors"] == {"global": 4.0}


@training.in_both
def test_clipping_of_both_optimizers(which: str) -> None:
  library, package = training.KERASES[which]
  sgd = library.optimizers.SGD(clipvalue=0.5)
  optimizer = package.CrossShardOptimizer(sgd, clipnorm=1.0)
  limits = ["clipnorm=1.0 before the sum", "clipvalue=0.5 after the sum"]
  assert optimizer.describe().to_dict()["clipping"] == limits


@training.in_both
def test_before_build_nothing_changes(which: str) -> None:
  _, package = training.KERASES[which]
  with testbed.mirrored().scope():
    optimizer = package.CrossShardOptimizer("adam", shard_update=True)
    before = len(optimizer.variables)
    described = optimizer.describe()
  assert described.rows() == []
  assert len(optimizer.variables) == before
  assert "not built yet" in str(described)


@training.in_both
def test_a_loss_scale_optimizer(which: str) -> None:
  library, package = training.KERASES[which]
  home = library.optimizers if which == "keras" else library.mixed_precision
  inner = home.LossScaleOptimizer(library.optimizers.Adam(0.1))
  optimizer = package.CrossShardOptimizer(inner, skip_nonfinite=True)
  content = optimizer.describe().to_dict()
  assert content["nonfinite"] == "skipped by the LossScaleOptimizer"
  assert "they are only counted" in _reasons(optimizer)["skip_nonfinite=True"]


def test_description_is_json_and_a_copy() -> None:
  optimizer, _ = _make("keras", wire_dtype="bfloat16", lazy_rows=True)
  described = optimizer.describe()
  assert repr(described) == str(described)
  content = json.loads(json.dumps(described.to_dict()))
  assert content == described.to_dict()
  assert content["variables"] == described.rows()
  described.rows()[0]["path"] = "changed"
  assert described.rows()[0]["path"] == "weight0"
