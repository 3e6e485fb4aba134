"""`describe()` says what steps and variables really are."""

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard._src.core import describe as describe_lib
from tf_cross_shard._src.core.inner import kernels


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


def _one_device() -> Any:
  return tf.distribute.get_strategy()


def _reasons(optimizer: Any) -> dict[str, str]:
  content = optimizer.describe().to_dict()
  return {x["asked"]: x["reason"] for x in content["not_in_force"]}


def _nodes(optimizer: Any, weights: list[Any]) -> tuple[list[str], bool]:
  """The kernels in a traced step, and whether XLA compiles a part of it."""

  def step(*grads: tf.Tensor) -> None:
    optimizer.apply_gradients(list(zip(grads, weights, strict=True)))

  specs = [tf.TensorSpec(w.shape, w.dtype) for w in weights]
  function = tf.function(step, autograph=False).get_concrete_function(*specs)
  graph = function.graph.as_graph_def()
  functions = graph.library.function
  nodes = [*graph.node, *(node for f in functions for node in f.node_def)]
  kernels_here = [n.op for n in nodes if n.op.startswith("ResourceApply")]
  return kernels_here, any(f.attr["_XlaMustCompile"].b for f in functions)


_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
  "Adam": lambda library: library.optimizers.Adam(0.1),
  "momentum": lambda library: library.optimizers.SGD(0.1, momentum=0.5),
  "amsgrad": lambda library: library.optimizers.Adam(0.1, amsgrad=True),
  "RMSprop": lambda library: library.optimizers.RMSprop(0.1),
  "Nadam": lambda library: library.optimizers.Nadam(0.1),
  "subclass": lambda library: type("Mine", (library.optimizers.Adam,), {})(0.1),
}


@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("size", [10, 1_000_000])
@pytest.mark.parametrize("name", _OPTIMIZERS)
@training.in_both
def test_kernels_are_those_of_the_traced_step(
  which: str, name: str, size: int, fused: bool | None
) -> None:
  opt = _OPTIMIZERS[name](training.KERASES[which][0])
  try:
    optimizer, weights = _make(
      which, opt, ((size,), (3,)), _one_device(), fused_update=fused
    )
  except ValueError:
    assert (which, fused) == ("tf_keras", True)
    assert name not in ("Adam", "momentum")
    return
  rows = optimizer.describe().rows()
  operations, is_compiled = _nodes(optimizer, weights)
  described = [row["updated_by"] for row in rows]
  assert operations == [x for x in described if x.startswith("ResourceApply")]
  assert is_compiled == ("XLA" in described)
  assert set(described) - {"XLA", "Keras"} == set(operations)
  for row in rows:
    assert bool(row["reason"]) == (row["updated_by"] in ("XLA", "Keras"))
  if fused is False:
    assert {row["reason"] for row in rows} == {"fused_update=False"}


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("subclass", "Mine is a subclass of Adam"),
    ("amsgrad", "no kernel for Adam with amsgrad"),
    ("RMSprop", "no kernel for RMSprop without momentum"),
    ("Nadam", "no kernel for Nadam"),
  ],
)
@training.in_both
def test_reasons(which: str, name: str, reason: str) -> None:
  opt = _OPTIMIZERS[name](training.KERASES[which][0])
  optimizer, _ = _make(which, opt, strategy=_one_device())
  [of_row] = {row["reason"] for row in optimizer.describe().rows()}
  may_compile = which == "keras" and name != "subclass"
  too_few = "; no XLA, because there are fewer than a million elements"
  assert of_row == reason + (too_few if may_compile else "")


@training.in_both
def test_half_precision_has_no_kernel(which: str) -> None:
  optimizer, weights = _make(
    which, strategy=_one_device(), dtypes=("float16", "float32")
  )
  half, whole = optimizer.describe().rows()
  assert (half["updated_by"], half["dtype"]) == ("Keras", "float16")
  assert half["reason"] == "no kernel for float16"
  assert whole["updated_by"] == "ResourceApplyAdam"
  assert _nodes(optimizer, weights)[0] == ["ResourceApplyAdam"]


def test_elements_for_xla_are_those_of_a_shard() -> None:
  """Four members have too few elements each, though not together."""
  for shard_update, way in ((False, "XLA"), (True, "Keras")):
    optimizer, _ = _make(
      "keras", "Nadam", ((1_000_000,),), shard_update=shard_update
    )
    [row] = optimizer.describe().rows()
    assert row["updated_by"] == way


def test_tpu_programs_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
  strategy = testbed.virtual(2)
  optimizer, weights = _make(
    "keras", strategy=strategy, fused_update=True, lazy_rows=True
  )
  used: list[Any] = []
  monkeypatch.setattr(kernels, "apply", lambda *args: used.append(args))
  described = optimizer.describe()
  strategy.run(
    lambda: optimizer.apply_gradients([(tf.ones(w.shape), w) for w in weights])
  )
  assert not used
  for row in described.rows():
    assert (row["updated_by"], row["state_bytes"]) == (
      "Keras",
      8 * sum(row["elements"]) // 2,
    )
    assert row["reason"] == "XLA compiles the whole step"
  assert _reasons(optimizer) == {
    "fused_update=True": "2 of 2 variables: XLA compiles the whole step",
    "lazy_rows=True": (
      "TPU programs have no shapes that depend on data: all rows change"
    ),
  }
  assert "CrossReplicaSum" in str(described)


class TestBytes:
  @pytest.mark.parametrize(
    ("options", "sent"),
    [
      # 2 * 3/4 of 80 and of 10 elements of 4 bytes.
      ({}, [480, 60]),
      # The gradients have 2 bytes.
      ({"wire_dtype": "bfloat16"}, [240, 30]),
      # 3/4 for the gradients, and 3/4 for the weights.
      ({"shard_update": True}, [480, 60]),
      ({"shard_update": "by_variable"}, [480, 60]),
      # 3/4 of 2 bytes, and 3/4 of 4 bytes: the weights are exact.
      ({"shard_update": True, "wire_dtype": "float16"}, [360, 45]),
      # 2 * 1/2 in groups of two.
      ({"group_assignment": [[0, 2], [1, 3]]}, [320, 40]),
      ({"group_assignment": [[0], [1], [2], [3]]}, [0, 0]),
      # Once in three calls.
      ({"accumulate_steps": 3}, [480, 60]),
    ],
  )
  @training.in_both
  def test_sent(
    self, which: str, options: dict[str, Any], sent: list[int]
  ) -> None:
    optimizer, _ = _make(which, **options)
    described = optimizer.describe()
    assert [row["bytes_sent"] for row in described.rows()] == sent
    # Shards have 23 elements: two of 4 * 23 are padding. Owners' parts have 80:
    # 230 of 4 * 80 are padding.
    padding = {
      True: 2 * (3 if "wire_dtype" not in options else 2.25) * 2,
      "by_variable": 230 * 6,
    }.get(options.get("shard_update", False), 0)
    content = described.to_dict()
    assert content["padding_sent"] == padding
    assert content["bytes_sent"] == sum(sent) + padding

  def test_tpu_sends_parts_of_sharded_updates(self) -> None:
    optimizer, _ = _make(
      "keras", strategy=testbed.virtual(4), shard_update=True
    )
    sent = [row["bytes_sent"] for row in optimizer.describe().rows()]
    assert sent == [480, 60]

  def test_keras_accumulates_sums_of_every_call(self) -> None:
    with testbed.mirrored().scope():
      opt = tf.keras.optimizers.Adam(0.1, gradient_accumulation_steps=3)
    content = _make("keras", opt)[0].describe().to_dict()
    assert content["calls_per_step"] == 3
    assert "accumulate_steps=3 of the" in content["notes"][0]

  @pytest.mark.parametrize(
    "options",
    [
      {},
      {"shard_update": "by_variable"},
      {"accumulate_steps": 2, "shard_update": True, "skip_nonfinite": True},
      {"opt": {"gradient_accumulation_steps": 2}},
      {"opt": {"use_ema": True}, "shard_update": True},
    ],
  )
  @training.in_both
  def test_state_is_all_that_was_created(
    self, which: str, options: dict[str, Any]
  ) -> None:
    library, package = training.KERASES[which]
    options = dict(options)
    of_opt = options.pop("opt", {})
    if which == "tf_keras" and "gradient_accumulation_steps" in of_opt:
      return  # Keras 3 only.
    made: list[weakref.ref[Any]] = []

    def record(create: Any, **kwargs: Any) -> Any:
      variable = create(**kwargs)
      made.append(weakref.ref(variable))
      return variable

    with testbed.mirrored().scope():
      make = getattr(library, "Variable", tf.Variable)
      weights = [make(np.ones([8, 10])), make(np.ones([10], "float64"))]
      with tf.variable_creator_scope(record):
        opt = library.optimizers.Adam(0.1, **of_opt)
        optimizer = package.CrossShardOptimizer(opt, **options)
        optimizer.build(weights)
    gc.collect()
    alive = {id(v): v for v in (reference() for reference in made) if v}
    real = sum(testbed.copies(v)[0].nbytes for v in alive.values())
    described = optimizer.describe()
    total = described.to_dict()["state_bytes"]
    assert total == real
    # What is not of one variable: counters, the learning rate and padding.
    of_rows = sum(row["state_bytes"] for row in described.rows())
    assert total - 3 * 2 * 2 * 8 <= of_rows <= total


class TestSharding:
  @training.in_both
  def test_parts_are_those_of_the_shards(self, which: str) -> None:
    optimizer, _ = _make(which, shard_update=True)
    kernel, bias = optimizer.describe().rows()
    assert kernel["elements"] == [23, 23, 23, 11]
    assert bias["elements"] == [0, 0, 0, 10]
    slots = [v for v in optimizer.inner_optimizer.variables if len(v.shape)]
    assert [list(v.shape) for v in slots] == [[23], [23]]
    # A shard and two slots: 12 bytes for an element, a quarter of them here.
    assert (kernel["state_bytes"], bias["state_bytes"]) == (240, 30)
    assert kernel["owner"] is bias["owner"] is None
    assert kernel["updated_by"] == "ResourceApplyAdam"
    table = str(optimizer.describe())
    assert "part 0-3" in table
    assert "part 3" in table.splitlines()[-1]

  @training.in_both
  def test_owners_update_and_others_do_not(self, which: str) -> None:
    optimizer, weights = _make(
      which, shapes=((2,), (9,), (4,)), dtypes=("float32",) * 3,
      shard_update="by_variable", group_assignment=[[0, 2], [1, 3]],
    )  # fmt: skip
    rows = optimizer.describe().rows()
    testbed.run(
      lambda: optimizer.apply_gradients(
        [(tf.ones(w.shape), w) for w in weights]
      )
    )
    for row, size in zip(rows, (2, 9, 4), strict=True):
      [slot, *_] = [
        v for v in optimizer.inner_optimizer.variables if v.shape == (size,)
      ]
      is_updated = [bool(copy.any()) for copy in testbed.copies(slot)]
      # Member i of each group: replicas 0 and 1 are the first ones.
      member = row["owner"]
      assert is_updated == [member == 0] * 2 + [member == 1] * 2
      assert row["elements"] == [size * (i == member) for i in range(2)]
      assert row["state_bytes"] == 2 * 4 * size
    assert {row["owner"] for row in rows} == {0, 1}


class TestTables:
  def _make(self, which: str, opt: str = "Adam", **options: Any) -> Any:
    library, package = training.KERASES[which]
    with testbed.mirrored().scope():
      layer = library.layers.Embedding(10_000, 100)
      layer.build((None, 2))
      optimizer = package.CrossShardOptimizer(
        getattr(library.optimizers, opt)(0.1), **options
      )
      optimizer.build(layer.trainable_variables)
    return optimizer

  @training.in_both
  def test_large_tables_have_a_remedy(self, which: str) -> None:
    described = self._make(which).describe()
    [row] = described.rows()
    assert row["reason"] == "no kernel for row-sparse gradients"
    assert row["bytes_sent"] is None
    *_, note = described.to_dict()["notes"]
    assert "updates all rows of " in note
    assert "lazy_rows=True" in note
    assert "tf_cross_shard.layers.Embedding" in note
    assert "by batch" in str(described)

  @pytest.mark.parametrize("name", ["global_clipnorm", "clipnorm", "clipvalue"])
  @training.in_both
  def test_tables_that_opt_clips(self, which: str, name: str) -> None:
    """Keras 3 makes gradients dense when it clips them by their global norm."""
    library, package = training.KERASES[which]
    table = testbed.variable(np.ones([5, 2]), "embeddings", library)
    optimizer = package.CrossShardOptimizer(
      library.optimizers.Adam(0.1, **{name: 0.5})
    )
    optimizer.build([table])

    @tf.function(autograph=False)
    def step() -> None:
      rows = tf.IndexedSlices(tf.ones([1, 2]), [3], [5, 2])
      optimizer.apply_gradients([(rows, table)])

    graph = step.get_concrete_function().graph.as_graph_def()
    [row] = optimizer.describe().rows()
    has_kernel = any(node.op == "ResourceApplyAdam" for node in graph.node)
    assert has_kernel == (row["updated_by"] == "ResourceApplyAdam")
    assert has_kernel == (which == "keras" and name == "global_clipnorm")

  @training.in_both
  def test_the_remedy_helps(self, which: str) -> None:
    for options in ({"lazy_rows": True}, {"opt": "Adagrad"}):
      optimizer = self._make(which, **options)
      [row] = optimizer.describe().rows()
      assert row["updated_by"] == "rows"
      [note] = optimizer.describe().to_dict()["notes"]
      assert note.startswith("Replicas also send")
      assert not _reasons(optimizer)

  @pytest.mark.parametrize(
    ("options", "text"),
    [
      ({"opt": "Adafactor"}, "use a different `opt`: `lazy_rows` is True, but"),
      ({"accumulate_steps": 2}, "Accumulated gradients are dense"),
      ({"shard_update": True}, "pass lazy_rows=True"),
    ],
  )
  def test_other_ways(self, options: dict[str, Any], text: str) -> None:
    [note] = [
      note
      for note in self._make("keras", **options).describe().to_dict()["notes"]
      if "updates all rows" in note
    ]
    assert text in note

  def test_tables_are_not_divided(self) -> None:
    optimizer = self._make("keras", lazy_rows=True, shard_update=True)
    [row] = optimizer.describe().rows()
    assert (row["updated_by"], row["elements"]) == ("rows", [1_000_000] * 4)


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
    optimizer, _ = _make("keras", strategy=_one_device(), **options)
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
      group_settings={"clipnorm": [2.0]},
    )
    assert _reasons(optimizer) == {
      "wire_dtype='bfloat16'": "no gradient has a wider dtype",
      "fused_update=True": "2 of 2 variables: no kernel for float16",
      "lazy_rows=True": (
        "no variable is known to be a table, so all are divided; call"
        " update_by_rows() before build()"
      ),
      "clipnorm=1.0": "`group_settings` has a limit for each group",
      "group_settings={'clipnorm': [2.0]}": (
        "there is one group, which has these numbers"
      ),
    }

  def test_everything_is_in_force(self) -> None:
    optimizer, _ = _make(
      "keras", wire_dtype="bfloat16", fused_update=True, shard_update=True,
      accumulate_steps=2, skip_nonfinite=True,
      group_assignment=[[0, 1], [2, 3]], group_settings={"clipnorm": [1, 2]},
    )  # fmt: skip
    assert _reasons(optimizer) == {}


@training.in_both
def test_groups_and_factors(which: str) -> None:
  pairs = [[0, 2], [1, 3]]
  optimizer, _ = _make(which, group_assignment=pairs)
  content = optimizer.describe().to_dict()
  assert (content["groups"], content["group_size"]) == (pairs, 2)
  assert content["loss_factors"] == {"replica": 0.5, "global": 2.0}
  text = str(optimizer.describe())
  assert "2 x 2 replicas: [[0, 2], [1, 3]]" in text
  assert 'mean: loss times 0.5 for "replica" or 2 for "global"' in text
  optimizer, _ = _make(
    which, reduction="sum", loss_averaged_over="global", scale_gradients=True
  )
  assert 'sum: gradients times 4 for "global"\n' in str(optimizer.describe())


@pytest.mark.parametrize("options", [{}, {"shard_update": True}])
@training.in_both
def test_before_build_nothing_changes(
  which: str, options: dict[str, Any]
) -> None:
  library, package = training.KERASES[which]
  with testbed.mirrored().scope():
    optimizer = package.CrossShardOptimizer(
      library.optimizers.Adam(0.1), **options
    )
    before = len(optimizer.variables)
    described = optimizer.describe()
  assert described.rows() == []
  assert len(optimizer.variables) == before
  assert optimizer.get_slot_names() == []
  content = described.to_dict()
  assert not content["is_built"]
  assert content["bytes_sent"] is content["state_bytes"] is None
  [note] = content["notes"]
  assert note.startswith("The variables are not known yet.")
  assert "not known before build" in str(described)


@pytest.mark.parametrize("place", ["inside", "around"])
@training.in_both
def test_loss_scale_optimizers(which: str, place: str) -> None:
  library, package = training.KERASES[which]
  home = library.optimizers if which == "keras" else library.mixed_precision
  scale = home.LossScaleOptimizer
  with testbed.mirrored().scope():
    adam = library.optimizers.Adam(0.1)
    inner = scale(adam) if place == "inside" else adam
    optimizer = package.CrossShardOptimizer(inner, skip_nonfinite=True)
    whole = scale(optimizer) if place == "around" else optimizer
    make = getattr(library, "Variable", tf.Variable)
    whole.build([make([1.0, 2.0])])
  described = optimizer.describe()
  [row] = described.rows()
  assert (row["updated_by"], row["state_bytes"]) == ("ResourceApplyAdam", 16)
  assert described.to_dict()["nonfinite"] == "skipped by the LossScaleOptimizer"
  assert "they are only counted" in _reasons(optimizer)["skip_nonfinite=True"]


def test_description_is_json_and_a_copy() -> None:
  optimizer, _ = _make("keras", wire_dtype="bfloat16", lazy_rows=True)
  described = optimizer.describe()
  assert isinstance(described, describe_lib.Description)
  assert repr(described) == str(described)
  content = json.loads(json.dumps(described.to_dict()))
  assert content == described.to_dict()
  assert content["variables"] == described.rows()
  described.rows()[0]["path"] = "changed"
  assert described.rows()[0]["path"] == "weight0"
