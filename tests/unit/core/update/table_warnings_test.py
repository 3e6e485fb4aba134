"""Tests warnings about tables that are not updated by rows."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed, training

ROWS, WIDTH = 10_000, 100  # as many elements as a table that is warned about
IDS = tf.constant([[1, 4]])


def _whole(table: Any) -> Callable[[Any], Any]:
  return lambda ids: (
    tf.reduce_sum(table) + tf.reduce_sum(tf.cast(ids, "float32"))
  )


def _warnings(
  which: str,
  caplog: pytest.LogCaptureFixture,
  kind: str,
  jit_compile: bool = False,
  rows: int = ROWS,
  mirrored: bool = False,
  **options: Any,
) -> list[str]:
  """Returns the warnings of two traced steps with lazy rows."""
  library, package = training.KERASES[which]
  strategy = testbed.mirrored() if mirrored else tf.distribute.get_strategy()
  with strategy.scope():
    home = package if kind == "ours" else library.layers
    layer = home.Embedding(rows, WIDTH, name="items")
    layer.build((None, 2))
    options = {"lazy_rows": True, **options}
    optimizer = package.CrossShardOptimizer(
      library.optimizers.Adam(0.1), loss_averaged_over="global", **options
    )
    [table] = layer.trainable_variables
    optimizer.build([table])
  call = layer
  if kind == "whole":
    call = _whole(training.native([table])[0])

  def replica_step() -> None:
    training.take_step(
      optimizer, lambda: tf.reduce_sum(call(IDS)), [table], "minimize"
    )

  for _ in range(2):
    tf.function(
      lambda: strategy.run(replica_step),
      autograph=False,
      jit_compile=jit_compile,
    )()
  messages = [record.message for record in caplog.records]
  return [text for text in messages if text.startswith("`lazy_rows`")]


@pytest.mark.parametrize("mirrored", [False, True])
@training.in_both
def test_keras_layer_reads_the_whole_table(
  which: str, caplog: pytest.LogCaptureFixture, mirrored: bool
) -> None:
  if which == "tf_keras" and not mirrored:
    # On one device tf_keras' layer looks up rows of the variable itself.
    assert _warnings(which, caplog, "keras") == []
    return
  [text] = _warnings(which, caplog, "keras", mirrored=mirrored)
  assert "reads all of " in text
  assert "tf_cross_shard.layers.Embedding" in text


@pytest.mark.parametrize("mirrored", [False, True])
@training.in_both
def test_our_layer_is_not_warned_about(
  which: str, caplog: pytest.LogCaptureFixture, mirrored: bool
) -> None:
  assert _warnings(which, caplog, "ours", mirrored=mirrored) == []


@training.in_both
def test_a_dense_gradient(which: str, caplog: pytest.LogCaptureFixture) -> None:
  [text] = _warnings(which, caplog, "whole")
  assert "embeddings" in text
  assert "is dense" in text


@training.in_both
def test_compiled_by_xla(which: str, caplog: pytest.LogCaptureFixture) -> None:
  [text] = _warnings(which, caplog, "ours", jit_compile=True)
  assert "XLA compiles the step" in text


@pytest.mark.parametrize("options", [{"rows": ROWS - 1}, {"lazy_rows": False}])
def test_no_warning_for_small_tables_or_without_lazy_rows(
  caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
  assert _warnings("keras", caplog, "keras", **options) == []
