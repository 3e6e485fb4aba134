"""What became of each group: a Keras callback, a table and a picture."""
# bazel: deps=:replicas

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import replicas
import tensorflow as tf

from tf_cross_shard import groups as groups_lib

mpl.use("Agg")  # Draws into files: no screen is needed.
from matplotlib import pyplot as plt
from matplotlib import ticker

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_INK = "#333333"
_STYLE = {
  "axes.axisbelow": True,
  "axes.edgecolor": _INK,
  "axes.grid": True,
  "axes.spines.right": False,
  "axes.spines.top": False,
  "axes.titlelocation": "left",
  "axes.titlepad": 12,
  "axes.titleweight": "bold",
  "font.size": 11,
  "grid.alpha": 0.3,
  "legend.frameon": False,
  "lines.linewidth": 1.8,
  "lines.markersize": 4,
}


class GroupHistory(tf.keras.callbacks.Callback):
  """Evaluates every group's own weights after each epoch.

  `validation_data` of `fit` would not do: each replica would judge its share
  of the test images by its own weights, and the groups' results be mixed.
  A loop without `fit` calls `set_model` and the methods itself.

  Attributes:
    seconds: Of each epoch, evaluation not counted.
    accuracy: [epoch][group], on the test split.
    inside: [epoch][group], the largest absolute difference between a weight's
      copies on the members of the group.
    between: [epoch], the same over one member of each group.
    drift: [epoch], the root mean square of that difference over all weights.
  """

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    groups: groups_lib.Groups,
    twin: Any,
    test: tf.data.Dataset,
  ) -> None:
    """Makes an empty history.

    Args:
      strategy: The strategy in whose scope the model was made.
      groups: The groups of `CrossShardOptimizer`.
      twin: A model of the same shape, made outside the scope, to try each
        group's weights in.
      test: The test split as one batch of (images, labels).
    """
    super().__init__()
    self.strategy, self.groups, self.twin = strategy, groups, twin
    self.images, self.labels = next(iter(test))
    self.seconds: list[float] = []
    self.accuracy: list[list[float]] = []
    self.inside: list[list[float]] = []
    self.between: list[float] = []
    self.drift: list[float] = []

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Starts the clock."""
    self._start = time.perf_counter()

  def on_epoch_end(
    self, epoch: int, logs: dict[str, float] | None = None
  ) -> None:
    """Stops the clock, then looks at every group.

    Args:
      epoch: Counted from 0.
      logs: Gets the groups' accuracies, which `fit` then prints.
    """
    self.seconds.append(time.perf_counter() - self._start)
    weights = replicas.weights_of_replicas(self.model)
    flat = np.array(
      [np.concatenate([w.ravel() for w in copies]) for copies in weights]
    )
    first = [row[0] for row in self.groups]
    spread = np.ptp(flat[first], axis=0)
    self.between.append(float(spread.max()))
    self.drift.append(float(np.sqrt(np.mean(spread**2))))
    self.inside.append(
      [float(np.ptp(flat[list(row)], axis=0).max()) for row in self.groups]
    )
    self.accuracy.append([self._evaluate(weights[r]) for r in first])
    if logs is not None:
      for group, accuracy in enumerate(self.accuracy[-1]):
        logs[f"test_{group}"] = accuracy

  def _evaluate(self, weights: Sequence[np.ndarray]) -> float:
    """The share of test images that these weights name rightly."""
    self.twin.set_weights(weights)
    answers = np.argmax(self.twin(self.images, training=False), axis=-1)
    return float(np.mean(answers == self.labels))


def table(runs: Mapping[str, GroupHistory]) -> str:
  """One line per run and group, after the last epoch.

  Args:
    runs: The history of each run by its name.

  Returns:
    Text in columns.
  """
  rows = [
    ["", "", "", "test", "seconds", "weights differ", "weights differ"],
    ["run", "group", "replicas", "accuracy", "per epoch"]
    + ["inside group", "between groups"],
  ]
  for name, run in runs.items():
    # The first epoch also traces the step.
    seconds = statistics.median(run.seconds[1:] or run.seconds)
    for group, members in enumerate(run.groups):
      rows.append(
        [name, str(group), _ids(members)]
        + [f"{run.accuracy[-1][group]:.2%}", f"{seconds:.2f}"]
        + [f"{run.inside[-1][group]:g}"]
        + [f"{run.between[-1]:.4f}" if run.groups.num_groups > 1 else "-"]
      )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  rows.insert(2, ["-" * width for width in widths])
  lines = [
    "  ".join(
      cell.ljust(width) if column < 3 else cell.rjust(width)
      for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    for row in rows
  ]
  return "\n".join(line.rstrip() for line in lines)


def draw(runs: Mapping[str, GroupHistory], path: str) -> None:
  """Draws test accuracy over the epochs and how far groups drift apart.

  Args:
    runs: The history of each run by its name.
    path: The PNG file to write.
  """
  several = [run for run in runs.values() if run.groups.num_groups > 1]
  columns = 2 if several else 1
  with plt.rc_context(_STYLE):
    figure, axes = plt.subplots(
      1, columns, figsize=(6.2 * columns, 4.8), squeeze=False, layout="tight"
    )
    _draw_accuracy(axes[0, 0], runs)
    if several:
      _draw_drift(axes[0, 1], several[0])
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def _ids(members: Sequence[int]) -> str:
  """Replica ids in a few characters."""
  first, last = min(members), max(members)
  if len(members) > 2 and last - first + 1 == len(members):
    return f"{first}-{last}"
  return " ".join(map(str, members))


def _draw_accuracy(axes: Any, runs: Mapping[str, GroupHistory]) -> None:
  """The learning curves, one line per run and group."""
  lowest = 100.0
  for name, run in runs.items():
    percents = 100 * np.array(run.accuracy)  # [epoch, group]
    epochs = range(1, len(percents) + 1)
    lowest = min(lowest, percents[len(percents) // 8 :].min())
    for group, members in enumerate(run.groups):
      whole = run.groups.num_groups == 1
      noun = "replica" if len(members) == 1 else "replicas"
      axes.plot(
        epochs,
        percents[:, group],
        # Broad and pale, it shows where another line covers it.
        color="#BBBBBB" if whole else _COLORS[group % len(_COLORS)],
        linewidth=6 if whole else None,
        marker=None if whole and len(epochs) > 1 else "o",
        label=f"{name}, {noun} {_ids(members)}: {percents[-1, group]:.1f} %",
      )
  axes.set(
    title="Each group's own weights on the test images",
    xlabel="epoch",
    ylabel="accuracy (%)",
    # The first epochs would press everything else against the top.
    ylim=(np.floor(lowest) - 1, 100.5),
  )
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.legend(loc="lower right")


def _draw_drift(axes: Any, run: GroupHistory) -> None:
  """The differences between groups, all of which began with equal weights."""
  epochs = range(len(run.between) + 1)
  for label, values, color in (
    ("between groups, largest", run.between, _COLORS[3]),
    ("between groups, root mean square", run.drift, _COLORS[2]),
    ("inside a group, largest", np.max(run.inside, axis=1), _INK),
  ):
    axes.plot(epochs, [0.0, *values], color=color, marker="o", label=label)
  axes.set(
    title="Groups drift apart, members stay equal",
    xlabel="epoch",
    ylabel="absolute difference of a weight",
    # Leaves room for the legend above the curves.
    ylim=(-0.02 * max(run.between), 1.35 * max(run.between)),
  )
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.legend(loc="upper left")
