"""Wrapping alone does not change training with repeated ids.

A batch looks up the same row of a table several times. Keras 3 squares the
gradient of each lookup, and tf_keras the sum of the gradients.
"""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import VectorizedStrategy

ROWS, WIDTH, LOOKUPS = 8, 2, 16
_RNG = np.random.default_rng(0)
TABLE = _RNG.normal(size=(ROWS, WIDTH)).astype("float32")
# Three steps. No batch has row 5, 6 or 7.
IDS = _RNG.integers(0, 5, (3, LOOKUPS)).astype("int32")
GRADS = _RNG.normal(size=(3, LOOKUPS, WIDTH)).astype("float32")
SETTINGS: tuple[dict[str, Any], ...] = (
  {},
  {"global_clipnorm": 1.0},
  {"clipvalue": 0.3},
  {"weight_decay": 0.1},
)
VECTORIZED = VectorizedStrategy(2)
DEFAULT: dict[str, Any] = {"reduction": "sum"}
UNFUSED = DEFAULT | {"fused_update": False}


def _train(which: str, make: Any, strategy: Any = None, **options: Any) -> Any:
  """Returns the table after three steps; wraps the optimizer if `options`."""
  library, ours = training.KERASES[which]
  strategy = strategy or tf.distribute.get_strategy()
  replicas = strategy.num_replicas_in_sync
  with strategy.scope():
    table = testbed.variable(TABLE, "embeddings", library)
    optimizer = make()
    if options:
      optimizer = ours.CrossShardOptimizer(optimizer, **options)
    optimizer.build([table])

  @tf.function(autograph=False)
  def step(ids: tf.Tensor, rows: tf.Tensor) -> None:
    def apply() -> None:
      context = tf.distribute.get_replica_context()
      here = tf.cast(context.replica_id_in_sync_group, tf.int32) % replicas
      mine = [tf.split(x, replicas) for x in (rows, ids)]
      rows_here, ids_here = (tf.stack(x)[here] for x in mine)
      shape = tf.constant([ROWS, WIDTH])
      grad = tf.IndexedSlices(rows_here, ids_here, shape)
      optimizer.apply_gradients([(grad, table)])

    strategy.run(apply)

  for ids, rows in zip(IDS, GRADS, strict=True):
    step(tf.constant(ids), tf.constant(rows))
  return table.numpy()


@pytest.mark.parametrize(
  ("which", "kind"),
  [
    (which, kind)
    for which, (library, _) in training.KERASES.items()
    for kind in testbed.optimizers_of(library)
  ],
)
def test_default_is_plain_keras(which: str, kind: str) -> None:
  make = testbed.optimizers_of(training.KERASES[which][0])[kind]
  for settings in SETTINGS:
    make_one = functools.partial(make, **settings)
    plain = _train(which, make_one)
    cases = [(DEFAULT, None), (DEFAULT, VECTORIZED)]
    # The other settings change numbers alike on each strategy.
    if not settings or "global_clipnorm" in settings:
      cases += [(DEFAULT, testbed.mirrored())]
      cases += [(UNFUSED, None), (UNFUSED, VECTORIZED)]
    for options, strategy in cases:
      found = _train(which, make_one, strategy, **options)
      # A kernel updates where `global_clipnorm` makes gradients dense.
      np.testing.assert_allclose(
        found,
        plain,
        rtol=0,
        atol=1e-5,
        err_msg=f"{settings} {options} {strategy}",
      )


@pytest.mark.parametrize(
  "options", [{"lazy_rows": True}, {"fused_update": True}]
)
def test_rows_are_summed_first_if_asked(options: dict[str, Any]) -> None:
  """Then a row's second moment is that of the sum of its gradients."""
  table = keras.Variable(TABLE, name="embeddings")
  optimizer = training.KERASES["keras"][1].CrossShardOptimizer(
    keras.optimizers.Adam(0.05), **options
  )
  optimizer.build([table])
  shape = tf.constant([ROWS, WIDTH])
  grad = tf.IndexedSlices(tf.constant(GRADS[0]), tf.constant(IDS[0]), shape)
  optimizer.apply_gradients([(grad, table)])
  dense = np.zeros((ROWS, WIDTH))
  np.add.at(dense, IDS[0], GRADS[0])
  [velocity] = [
    v for v in optimizer.inner_optimizer.variables if "velocity" in v.path
  ]
  np.testing.assert_allclose(velocity.numpy(), 0.001 * dense**2, rtol=1e-4)
