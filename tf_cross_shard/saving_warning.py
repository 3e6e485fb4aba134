"""Saying, once, that the usual ways of saving keep one group only.

TensorFlow and Keras save the first replica's value of a variable. Where groups
are trained apart, the others' values are lost without a word.
"""

import contextlib
import threading
from collections.abc import Iterator

from absl import logging

_thread = threading.local()


class SavingNotice:
  """Warns when an optimizer with groups is saved in a usual way."""

  def __init__(self, name: str, num_groups: int) -> None:
    """Notes what there is to lose."""
    self._name = name
    self._num_groups = num_groups
    self._is_said = False

  def say(self) -> None:
    """Warns, unless it has, or nothing is lost."""
    is_needed = self._num_groups > 1 and not getattr(_thread, "all_kept", False)
    if not is_needed or self._is_said:
      return
    self._is_said = True
    logging.warning(
      "%s trains %d groups, which differ in weights and slots. Checkpoints,"
      " model files, pickles and copies hold the first replica's only. Use"
      " tf_cross_shard.replica_state.save() and restore(), which keep all.",
      self._name,
      self._num_groups,
    )


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
  """A context for savers that keep every group's values."""
  before = getattr(_thread, "all_kept", False)
  _thread.all_kept = True
  try:
    yield
  finally:
    _thread.all_kept = before
