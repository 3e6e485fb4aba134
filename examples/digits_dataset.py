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
    """What an example looks like."""
    features = {
      "image": tfds.features.Image(shape=IMAGE_SHAPE),
      "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES),
    }
    return tfds.core.DatasetInfo(
      builder=self,
      description=__doc__,
      features=tfds.features.FeaturesDict(features),
      supervised_keys=("image", "label"),
      homepage="https://archive.ics.uci.edu/dataset/80",
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    """The two splits; `dl_manager` has nothing to download."""
    return {
      "train": self._generate_examples(test=False),
      "test": self._generate_examples(test=True),
    }

  def _generate_examples(
    self, test: bool
  ) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (key, example) of one split."""
    digits = datasets.load_digits()
    seen = np.zeros(NUM_CLASSES, int)
    for key, (image, label) in enumerate(
      zip(digits.images, digits.target, strict=True)
    ):
      if (seen[label] % _TEST_EVERY == 0) == test:
        pixels = image.astype(np.uint8)[..., np.newaxis]
        yield key, {"image": pixels, "label": int(label)}
      seen[label] += 1


def default_data_dir() -> str:
  """The folder for prepared data in the user's cache."""
  cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return str(Path(cache).expanduser() / "tf_cross_shard")


def load(
  batch_size: int, data_dir: str | None = None, seed: int = 0
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
  """Prepares the digits where that is not done yet, and reads them.

  Call it after the logical devices are set, since preparing makes TensorFlow
  initialize its devices.

  Args:
    batch_size: Training examples per step, over all replicas.
    data_dir: A folder to keep the prepared files in, `default_data_dir()` if
      None.
    seed: Decides the order of the training examples.

  Returns:
    The training batches, in another order each epoch and all of the same size,
    and the test split as one batch. Both hold float32 images [batch, 8, 8, 1]
    in [0, 1] and int64 labels [batch].
  """
  builder = _prepare(data_dir or default_data_dir())
  train, test = (
    builder.as_dataset(split=split, as_supervised=True).map(_scaled).cache()
    for split in ("train", "test")
  )
  # Replicas need shares of one size, so a smaller last batch is left out.
  train = train.shuffle(len(train), seed=seed)
  train = train.batch(batch_size, drop_remainder=True)
  return train, test.batch(len(test))


def make_model() -> Any:
  """A small convolutional network that answers logits.

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


def _scaled(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """The pixels as float32 in [0, 1]."""
  return tf.cast(image, tf.float32) / _LARGEST_PIXEL, label


def _prepare(data_dir: str) -> tfds.core.DatasetBuilder:
  """The dataset's builder, after writing its files unless they are there."""
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
