"""The history of each group: a Keras callback, a table and a picture."""
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

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLE = {
  **{"axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False},
  **{"axes.spines.right": False, "axes.spines.top": False},
  **{"axes.titleweight": "bold", "axes.titlelocation": "left", "font.size": 11},
}


class GroupHistory(tf.keras.callbacks.Callback):
  """Evaluates every group's own weights after each epoch.

  `validation_data` of `fit` would mix the groups: each replica evaluates its
  share of the images by its own weights. A loop without `fit` calls `set_model`
  and the methods itself. `twin` is a model of the same shape, made outside the
  strategy's scope, and `test` the test split as one batch.
  """

  def __init__(
    self, groups: groups_lib.Groups, twin: Any, test: tf.data.Dataset
  ) -> None:
    super().__init__()
    self.groups, self.twin = groups, twin
    self.images, self.labels = next(iter(test))
    self.seconds: list[float] = []  # Of each epoch, without this evaluation.
    self.accuracy: list[list[float]] = []  # [epoch][group]
    # The largest difference of a weight: between the members of a group, in
    # [epoch][group], and between the first members of all groups, in [epoch].
    self.inside: list[list[float]] = []
    self.between: list[float] = []

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Starts the clock."""
    self._start = time.perf_counter()

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Stops the clock, then compares and evaluates the groups' weights."""
    self.seconds.append(time.perf_counter() - self._start)
    weights = replicas.weights_of_replicas(self.model)
    flat = np.array([np.concatenate([*map(np.ravel, w)]) for w in weights])
    first = [members[0] for members in self.groups]
    self.between.append(float(np.ptp(flat[first], axis=0).max()))
    self.inside.append(
      [float(np.ptp(flat[list(m)], axis=0).max()) for m in self.groups]
    )
    self.accuracy.append([self._evaluate(weights[r]) for r in first])
    if logs is not None:  # `fit` prints what is in them.
      for group, accuracy in enumerate(self.accuracy[-1]):
        logs[f"test_{group}"] = accuracy

  def _evaluate(self, weights: Sequence[np.ndarray]) -> float:
    """Returns the share of test images that these weights classify rightly."""
    self.twin.set_weights(weights)
    classes = np.argmax(self.twin(self.images, training=False), axis=-1)
    return float(np.mean(classes == self.labels))


def table(runs: Mapping[str, GroupHistory]) -> str:
  """Returns one line per run and group, as of the last epoch."""
  rows = [
    ["", "", "", "test", "seconds", "weights differ", "weights differ"],
    ["run", "group", "replicas", "accuracy", "per epoch"]
    + ["inside group", "between groups"],
  ]
  for name, run in runs.items():
    # The first epoch also traces the step.
    seconds = statistics.median(run.seconds[1:] or run.seconds)
    between = f"{run.between[-1]:.4f}" if run.groups.num_groups > 1 else "-"
    for group, members in enumerate(run.groups):
      rows.append(
        [name, str(group), _ids(members), f"{run.accuracy[-1][group]:.2%}"]
        + [f"{seconds:.2f}", f"{run.inside[-1][group]:g}", between]
      )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  rows.insert(2, ["-" * width for width in widths])
  return "\n".join(
    "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
  )


def draw(runs: Mapping[str, GroupHistory], path: str) -> None:
  """Draws test accuracy, and how groups differ, over the epochs into a PNG."""
  several = [run for run in runs.values() if run.groups.num_groups > 1]
  columns = 2 if several else 1
  with plt.rc_context(_STYLE):
    figure, [axes] = plt.subplots(
      1, columns, figsize=(6.2 * columns, 4.8), squeeze=False, layout="tight"
    )
    for name, run in runs.items():
      _draw_accuracy(axes[0], name, run)
    axes[0].set(title="Each group's own weights on the test images")
    axes[0].set(xlabel="epoch", ylabel="accuracy (%)")
    # The first epochs would press everything else against the top.
    late = [run.accuracy[len(run.accuracy) // 8 :] for run in runs.values()]
    axes[0].set_ylim(np.floor(100 * min(map(np.min, late))) - 1, 100.5)
    axes[0].legend(loc="lower right")
    for run in several[:1]:
      for label, values, color in (
        ("between groups", run.between, _COLORS[3]),
        ("inside a group", np.max(run.inside, axis=1), "#333333"),
      ):  # All groups began with equal weights.
        axes[1].plot([0.0, *values], "o-", color=color, label=label)
      axes[1].set(title="Groups drift apart, members stay equal")
      axes[1].set(xlabel="epoch", ylabel="largest difference of a weight")
      axes[1].legend(loc="center right")
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _draw_accuracy(axes: Any, name: str, run: GroupHistory) -> None:
  """Draws one line per group; that of all replicas is broad and pale."""
  percents = 100 * np.array(run.accuracy)  # [epoch, group]
  for group, members in enumerate(run.groups):
    label = f"{name}, replicas {_ids(members)}: {percents[-1, group]:.1f} %"
    look = {"color": _COLORS[group % len(_COLORS)], "marker": "o"}
    if run.groups.num_groups == 1:
      look = {"color": "#BBBBBB", "linewidth": 6}
    axes.plot(range(1, len(percents) + 1), percents[:, group], **look)
    axes.lines[-1].set_label(label)


def _ids(members: Sequence[int]) -> str:
  return " ".join(map(str, members))
