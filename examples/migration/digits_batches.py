"""The batches of both programs. A step has the same batch in both."""

import functools

import numpy as np
from sklearn import datasets

NUM_FEATURES = 64
NUM_CLASSES = 10
BATCH_SIZE = 64
_LARGEST_PIXEL = 16


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the examples of one step.

  Args:
    step: The number of the step, from 0.

  Returns:
    float32 pixels in [0, 1] of shape [64, 64], and int32 labels [64].
  """
  images, labels = _digits()
  chosen = np.random.default_rng(step).choice(len(images), BATCH_SIZE, False)
  pixels = (images[chosen] / _LARGEST_PIXEL).astype(np.float32)
  return pixels, labels[chosen].astype(np.int32)


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
  """Returns all images and their labels."""
  images, labels = datasets.load_digits(return_X_y=True)
  return images, labels
