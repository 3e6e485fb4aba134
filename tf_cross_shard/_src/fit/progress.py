"""Lines of `fit` with the metrics of groups, below the progress bar of Keras.

    4/4 ━━━━━━━━━━━━━━━━━━━━ 0s 9ms/step - loss: 0.4511
    val_loss: ensemble 0.3517, lr=0.3 0.5102, lr=0.1 0.3998

Keras shows all logs of an epoch in one line, under the names that they have in
the logs. For four groups with two metrics, this line has over 400 characters.
"""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from tf_cross_shard._src.core.internals import keras_private


def show_in_own_lines(prefixes: Sequence[str], names: Sequence[str]) -> None:
  """Moves metrics of groups from the progress bar to one line for each metric.

  Nothing happens in a `fit` without a progress bar (`verbose=0`).

  Args:
    prefixes: How the names of the metrics begin, such as `val_`.
    names: The names of the groups, for the lines.
  """
  bar = keras_private.progress_bar_of_fit()
  if bar is None:
    return
  show = bar.on_epoch_end
  labels = {"ensemble": "ensemble"}
  labels |= {f"group_{i}": name for i, name in enumerate(names)}

  def show_with_groups(epoch: int, logs: Any = None) -> None:
    """Shows the bar without these metrics, then the lines."""
    others = dict(logs or {})
    rows: dict[str, dict[str, float]] = {}
    for key in list(others):
      metric, _, run = key.rpartition("/")
      if run in labels and metric.startswith(tuple(prefixes)):
        rows.setdefault(metric, {})[labels[run]] = others.pop(key)
    show(epoch, others)
    width = shutil.get_terminal_size().columns
    for metric, values in rows.items():
      ordered = {n: values[n] for n in labels.values() if n in values}
      print(_line(metric, ordered, width))

  # A new bar is created for each `fit`. If the user passes one, the next `fit`
  # finds no metrics of groups left for the outer function, which is harmless.
  bar.on_epoch_end = show_with_groups


def _line(metric: str, values: Mapping[str, float], width: int) -> str:
  """Returns a line of at most `width` characters, if one value fits.

  >>> _line("val_loss", {"lr=0.3": 0.51, "lr=0.1": 0.4, "lr=0.03": 0.45}, 42)
  'val_loss: lr=0.3 0.51, lr=0.1 0.4, +1 more'
  """
  shown = [f"{name} {value:.4g}" for name, value in values.items()]
  line = f"{metric}: {', '.join(shown)}"
  for left in range(1, len(shown)):
    if len(line) <= width:
      break
    line = f"{metric}: {', '.join(shown[:-left])}, +{left} more"
  return line
