"""The end of a worker in mid-step, in words."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tf_cross_shard.multi_worker import errors


@contextlib.contextmanager
def naming_lost_workers() -> Iterator[None]:
  """Turns TensorFlow's errors about lost workers into `WorkerLostError`.

  Put it around the training:

  >>> with naming_lost_workers():
  ...   pass  # model.fit(...), or a loop of your own

  Yields:
    None.

  Raises:
    WorkerLostError: If a worker was lost; names it.
    DisagreementError: If a worker ended because it was about to do something
      else than the others; says what.
  """
  try:
    yield
  except tf.errors.OpError as error:
    _raise_what_it_means(error)
    raise


def _raise_what_it_means(error: tf.errors.OpError) -> None:
  """Raises the error in words, if it is one about workers."""
  meant = errors.of_message(str(error.message))
  if meant is not None:
    raise meant from error
