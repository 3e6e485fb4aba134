"""Images of handwritten digits without a download, and a model for them.

scikit-learn contains the test part of UCI's "Optical Recognition of Handwritten
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

# In each class, every fifth image is in the test split: 1433 training images
# and 364 test images. No random numbers: every machine has the same split.
_TEST_EVERY = 5


class BundledDigits(tfds.core.GeneratorBasedBuilder):
  """The digits of scikit-learn, split 80 : 20 in each class."""

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
  Configure logical devices before you call this: preparing the files
  initializes TensorFlow's devices.

  Args:
    batch_size: Training images in a batch. A smaller last batch is dropped,
      because replicas need shares of the same size.
    data_dir: The folder for the prepared files. None: the user's cache.
    seed: Determines the order of the training images, new in each epoch.
  """
  cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  builder = _prepare(data_dir or f"{Path(cache).expanduser()}/tf_cross_shard")
  train, test = (
    builder.as_dataset(split=split, as_supervised=True)
    .map(lambda image, label: (tf.cast(image, tf.float32) / 16, label))
    .cache()
    for split in ("train", "test")
  )
  train = train.shuffle(len(train), seed=seed)
  train = train.batch(batch_size, drop_remainder=True)
  return train, test.batch(len(test), drop_remainder=True)


def make_model() -> Any:
  """Returns a small convolutional network from images to logits.

  The network has no batch normalization, because its moving statistics would
  differ between the replicas of a group.
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


def _prepare(data_dir: str) -> tfds.core.DatasetBuilder:
  """Returns the builder; writes its files if they are missing."""
  builder = BundledDigits(data_dir=data_dir)
  if builder.data_path.exists():
    return builder
  builder.data_path.parent.mkdir(parents=True, exist_ok=True)
  tfds.disable_progress_bar()
  # tfds names its temporary folder by Python's global random numbers. Two
  # processes with the same seed would use the same folder, so each process gets
  # its own folder.
  with tempfile.TemporaryDirectory(dir=data_dir) as folder:
    fresh = BundledDigits(data_dir=folder)
    # Suppress the message "Downloading": nothing is downloaded here.
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
