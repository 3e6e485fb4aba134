"""The history of each group: a Keras callback, a table and a plot."""

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
  """Records the accuracy of each group and how far weights differ.

  Put it after `callbacks.GroupMetrics`, which computes the accuracies. In a
  loop without `fit`, call `set_model` and `on_epoch_end` of both callbacks.

  Attributes:
    groups: The groups of replicas.
    names: A name for each group, for the table.
    accuracy: Test accuracy, by epoch and group.
    ensemble: Test accuracy of the mean prediction of all groups, by epoch.
    inside: The largest difference of a weight between the replicas of a group,
      by epoch and group.
    between: The largest difference of a weight between the first replicas of
      all groups, by epoch.
  """

  def __init__(
    self, groups: groups_lib.Groups, names: Sequence[str] | None = None
  ) -> None:
    super().__init__()
    self.groups = groups
    self.names = names or [""] * groups.num_groups
    self.accuracy: list[list[float]] = []
    self.ensemble: list[float] = []
    self.inside: list[list[float]] = []
    self.between: list[float] = []

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Records the accuracies, and compares the weights of all replicas."""
    self.accuracy.append(
      [logs[f"val_accuracy/group_{i}"] for i in range(self.groups.num_groups)]
    )
    if self.groups.num_groups > 1:
      self.ensemble.append(logs["val_accuracy/ensemble"])
    weights = replicas.weights_of_replicas(self.model)
    flat = np.array([np.concatenate([*map(np.ravel, w)]) for w in weights])
    first = [members[0] for members in self.groups]
    self.between.append(float(np.ptp(flat[first], axis=0).max()))
    self.inside.append(
      [float(np.ptp(flat[list(m)], axis=0).max()) for m in self.groups]
    )


def table(runs: Mapping[str, GroupHistory]) -> str:
  """Returns a table of the last epoch, with a line for each run and group."""
  rows = [
    ["", "", "", "", "test", "weights differ", "weights differ"],
    ["run", "group", "replicas", "learning rate", "accuracy"]
    + ["inside group", "between groups"],
  ]
  for name, run in runs.items():
    several = run.groups.num_groups > 1
    between = f"{run.between[-1]:.4f}" if several else "-"
    for group, members in enumerate(run.groups):
      rows.append(
        [name, str(group), _ids(members), run.names[group] or "-"]
        + [f"{run.accuracy[-1][group]:.2%}", f"{run.inside[-1][group]:g}"]
        + [between]
      )
    if several:
      rows.append([name, "all", "their mean prediction", "-"])
      rows[-1] += [f"{run.ensemble[-1]:.2%}", "-", "-"]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  rows.insert(2, ["-" * width for width in widths])
  return "\n".join(
    "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
  )


def draw(runs: Mapping[str, GroupHistory], path: str) -> None:
  """Draws a PNG of test accuracy and of the groups' differences by epoch."""
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
    axes[0].set_ylim(0, 100.5)
    axes[0].legend(loc="lower right")
    for run in several[:1]:
      for label, values, color in (
        ("between groups", run.between, _COLORS[3]),
        ("inside a group", np.max(run.inside, axis=1), "#333333"),
      ):  # Before the first epoch, all groups have equal weights.
        axes[1].plot([0.0, *values], "o-", color=color, label=label)
      axes[1].set(title="Groups drift apart, members stay equal")
      axes[1].set(xlabel="epoch", ylabel="largest difference of a weight")
      axes[1].legend(loc="center right")
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _draw_accuracy(axes: Any, name: str, run: GroupHistory) -> None:
  """Draws a line for each group.

  A run without groups has one broad line. The mean prediction of all groups has
  a dashed line.
  """
  percents = 100 * np.array(run.accuracy)  # [epoch, group]
  epochs = range(1, len(percents) + 1)
  for group, members in enumerate(run.groups):
    what = f"rate {run.names[group]}" if run.names[group] else name
    label = f"{what}, replicas {_ids(members)}: {percents[-1, group]:.1f} %"
    look = {"color": _COLORS[group % len(_COLORS)], "marker": "o"}
    if run.groups.num_groups == 1:
      label = f"{name}, rate {run.names[0]}: {percents[-1, 0]:.1f} %"
      look = {"color": "#BBBBBB", "linewidth": 6}
    axes.plot(epochs, percents[:, group], label=label, **look)
  if run.groups.num_groups > 1:
    mean = 100 * np.array(run.ensemble)
    label = f"the groups' mean prediction: {mean[-1]:.1f} %"
    axes.plot(epochs, mean, "k--", label=label)


def _ids(members: Sequence[int]) -> str:
  return " ".join(map(str, members))
