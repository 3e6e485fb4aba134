"""Lines of `fit` with the metrics of groups, below the progress bar of Keras.

    4/4 ━━━━━━━━━━━━━━━━━━━━ 0s 9ms/step - loss: 0.4511
    val_loss: ensemble 0.3517, lr=0.3 0.5102, lr=0.1 0.3998

Keras shows all logs of an epoch in one line, under the names that they have in
the logs. For four groups with two metrics, this line has over 400 characters.
"""

import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tf_cross_shard._src.fit import keras_fit

_MOST_LINES: Final = 3  # for one metric, in a terminal


def show_in_own_lines(
  prefixes: Sequence[str],
  keys: Sequence[str],
  names: Callable[[], Sequence[str]],
) -> None:
  """Moves metrics of groups from the progress bar to lines of their own.

  Nothing happens in a `fit` without a progress bar (`verbose=0`).

  Args:
    prefixes: How the names of the metrics begin, such as `val_`.
    keys: How the names of each group's metrics end, such as `group_0`.
    names: Returns the name of each group in the epoch that has ended. A group
      with an empty name is not shown.
  """
  bar = keras_fit.progress_bar_of_fit()
  if bar is None:
    return
  show = bar.on_epoch_end

  def show_with_groups(epoch: int, logs: Any = None) -> None:
    """Shows the bar without these metrics, then the lines."""
    labels = {"ensemble": "ensemble"}
    labels |= dict(zip(keys, names(), strict=False))
    others = dict(logs or {})
    rows: dict[str, dict[str, Any]] = {}
    for key in list(others):
      metric, _, run = key.rpartition("/")
      if run in labels and metric.startswith(tuple(prefixes)):
        rows.setdefault(metric, {})[run] = others.pop(key)
    show(epoch, others)
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    for metric, values in rows.items():
      shown = [
        f"{label} {_in_words(values[run])}"
        for run, label in labels.items()
        if label and run in values
      ]
      print(_lines(metric, shown, width))

  # A new bar is created for each `fit`. If the user passes one, the next `fit`
  # finds no metrics of groups left for the outer function, which is harmless.
  bar.on_epoch_end = show_with_groups


def _in_words(value: Any) -> str:
  """Returns a metric as text; some are vectors.

  >>> _in_words(0.123456), _in_words([0.5, 0.123456])
  ('0.1235', '[0.5 0.1235]')
  """
  numbers = [f"{number:.4g}" for number in np.ravel(value)]
  return f"[{' '.join(numbers)}]" if np.ndim(value) else numbers[0]


def _lines(metric: str, shown: Sequence[str], width: int | None) -> str:
  """Returns the values of a metric; at most three lines of a given width.

  >>> print(_lines("loss", ["lr=0.3 0.51", "lr=0.1 0.4", "lr=0.03 0.4"], 20))
  loss: lr=0.3 0.51,
    lr=0.1 0.4,
    lr=0.03 0.4
  >>> print(_lines("loss", ["a 0.51", "b 0.41", "c 0.4", "d 0.41"], 13))
  loss: a 0.51,
    b 0.41,
    +2 more
  """
  for count in range(len(shown), -1, -1):
    left = len(shown) - count
    more = [f"+{left} more"] if left else []
    entries = [*shown[:count], *more]
    text = f"{metric}: {', '.join(entries)}"
    if width is None:
      break
    # Spaces inside an entry do not end a line.
    joined = ", ".join(entry.replace(" ", "\0") for entry in entries)
    lines = textwrap.wrap(f"{metric}: {joined}", width, subsequent_indent="  ")
    text = "\n".join(lines).replace("\0", " ")
    if len(lines) <= _MOST_LINES:
      break
  return text
