"""Real handwritten digits, with no download, and a model to read them.

scikit-learn ships the test part of UCI's "Optical Recognition of Handwritten
Digits": 1,797 images of 8x8 pixels, written by 13 people.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from sklearn import datasets

NUM_CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)

# Each class gives one image in five to the test split: 1433 and 364 images.
# Counting needs no random numbers, so every machine has the same split.
_TEST_EVERY = 5
_LARGEST_PIXEL = 16


class BundledDigits(tfds.core.GeneratorBasedBuilder):
  """The digits that come with scikit-learn, split 80 : 20 in each class."""

  VERSION = tfds.core.Version("1.0.0")

  def _info(self) -> tfds.core.DatasetInfo:
    features = {
      "image": tfds.features.Image(shape=IMAGE_SHAPE),
      "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES),
    }
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(features),
      supervised_keys=("image", "label"),
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    return {
      "train": self._generate_examples(test=False),
      "test": self._generate_examples(test=True),
    }

  def _generate_examples(self, test: bool) -> Iterator[tuple[int, Any]]:
    digits = datasets.load_digits()
    seen = np.zeros(NUM_CLASSES, int)
    for key, (image, label) in enumerate(
      zip(digits.images, digits.target, strict=True)
    ):
      if (seen[label] % _TEST_EVERY == 0) == test:
        pixels = image.astype(np.uint8)[..., np.newaxis]
        yield key, {"image": pixels, "label": int(label)}
      seen[label] += 1


def load(
  batch_size: int, data_dir: str | None = None, seed: int = 0
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
  """Returns training batches and the test split as one batch.

  Both hold float32 images [batch, 8, 8, 1] in [0, 1] and int64 labels [batch].
  `seed` decides the order of the training examples, another one in each epoch.
  Call it after the logical devices are set: to prepare the files, in `data_dir`
  or in the user's cache, initializes TensorFlow's devices.
  """
  cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  builder = _prepare(data_dir or f"{Path(cache).expanduser()}/tf_cross_shard")
  train, test = (
    builder.as_dataset(split=split, as_supervised=True).map(_scale).cache()
    for split in ("train", "test")
  )
  # Replicas need shares of one size, so a smaller last batch is left out.
  train = train.shuffle(len(train), seed=seed)
  train = train.batch(batch_size, drop_remainder=True)
  return train, test.batch(len(test))


def make_model() -> Any:
  """Returns a small convolutional network from images to logits.

  It has no batch normalization, whose moving statistics would differ between
  the members of a group.
  """
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.Input(IMAGE_SHAPE),
      layers.Conv2D(32, 3, padding="same", activation="relu"),
      layers.Conv2D(64, 3, padding="same", activation="relu"),
      layers.MaxPooling2D(),
      layers.Flatten(),
      layers.Dropout(0.25),
      layers.Dense(NUM_CLASSES),
    ]
  )


def _scale(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  return tf.cast(image, tf.float32) / _LARGEST_PIXEL, label


def _prepare(data_dir: str) -> tfds.core.DatasetBuilder:
  """Returns the builder, after writing its files unless they are there."""
  builder = BundledDigits(data_dir=data_dir)
  if builder.data_path.exists():
    return builder
  builder.data_path.parent.mkdir(parents=True, exist_ok=True)
  tfds.disable_progress_bar()
  # tfds names the folder that it fills by Python's global random numbers, so
  # two processes with one seed would fill the same one. Each gets its own.
  with tempfile.TemporaryDirectory(dir=data_dir) as folder:
    fresh = BundledDigits(data_dir=folder)
    # tfds prints "Downloading", which it does not do here.
    with contextlib.redirect_stdout(None):
      fresh.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
      )
    try:
      os.rename(fresh.data_path, builder.data_path)
    except OSError:  # Another process was faster.
      if not builder.data_path.exists():
        raise
  return BundledDigits(data_dir=data_dir)
