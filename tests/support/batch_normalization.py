"""A step of batch normalization: in groups, and plain Keras on one device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

SHAPE = (3, 2, 4, 5)  # of a replica's batch
OPTIONS = {"momentum": 0.75, "epsilon": 0.125, "dtype": "float64"}


def data(replicas: int) -> tuple[np.ndarray, np.ndarray]:
  """Every replica's inputs, and what its outputs count in the loss.

  In float64, and of means far from 0, so that a variance without correct digits
  is seen.
  """
  rng = np.random.default_rng(3)
  shape = (replicas, *SHAPE)
  x = 30.0 + 5.0 * rng.normal(size=shape)
  x += 10.0 * np.arange(replicas).reshape(-1, 1, 1, 1, 1)
  return x, rng.normal(size=shape)


def make(layer: Any, *args: Any, library: Any = tf.keras, **kwargs: Any) -> Any:
  """A built layer whose scale and offset are not the usual ones."""
  constant = library.initializers.Constant
  made = layer(
    *args,
    gamma_initializer=constant(1.5),
    beta_initializer=constant(-0.5),
    **{**OPTIONS, **kwargs},
  )
  made.build((None, *SHAPE[1:]))
  return made


def step(layer: Any, x: Any, counts: Any, **options: Any) -> list[tf.Tensor]:
  """Outputs, and gradients of inputs, scale and offset."""
  x = tf.convert_to_tensor(x)
  with tf.GradientTape() as tape:
    tape.watch(x)
    outputs = layer(x, training=True, **options)
    loss = tf.reduce_sum(outputs * counts)
  return [outputs, *tape.gradient(loss, [x, *layer.trainable_variables])]


def plain(
  x: np.ndarray,
  counts: np.ndarray,
  *,
  library: Any = tf.keras,
  mask: Any = None,
  **options: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Keras on all examples at once: what `step` returns, and the statistics."""
  if not hasattr(library, "Variable"):
    options["fused"] = False  # Its kernel multiplies variances by n / (n - 1).
  layer = make(library.layers.BatchNormalization, library=library, **options)
  masked = {} if mask is None else {"mask": tf.constant(mask)}
  found = step(layer, x, counts, **masked)
  return [np.array(value) for value in found], [
    variable.numpy() for variable in layer.non_trainable_variables
  ]


def check(
  found: Sequence[Sequence[np.ndarray]],
  statistics: Sequence[Sequence[np.ndarray]],
  groups: Sequence[Sequence[int]],
  x: np.ndarray,
  counts: np.ndarray,
  tolerance: float = 1e-9,
  **options: Any,
) -> None:
  """Compares with plain Keras on each group's concatenated batch.

  `found` is what `step` returned, of each replica; `options` are of `plain`.
  """
  assert len(found) == len(statistics) == len(x) > 1
  assert len({value[0].tobytes() for value in found}) == len(x), "same data"
  masks = options.pop("mask", None)
  for members in groups:
    rows = list(members)
    mask = None if masks is None else np.concatenate(masks[rows])
    (outputs, slopes, *weights), moving = plain(
      np.concatenate(x[rows]),
      np.concatenate(counts[rows]),
      mask=mask,
      **options,
    )
    mine = [found[replica] for replica in members]
    pairs = [
      (np.concatenate([each[0] for each in mine]), outputs),
      (np.concatenate([each[1] for each in mine]), slopes),
      *(
        (sum(each[i] for each in mine), weight)
        for i, weight in enumerate(weights, 2)
      ),
      *(
        (statistics[replica][i], value)
        for replica in members
        for i, value in enumerate(moving)
      ),
    ]
    assert len(pairs) == 4 + 2 * len(rows)
    for i, (actual, expected) in enumerate(pairs):
      np.testing.assert_allclose(
        actual, expected, tolerance, tolerance, err_msg=f"{members}, {i}"
      )
