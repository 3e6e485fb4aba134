"""The trainings that older versions of the package saved to files.

`write.py` trains and saves them with an older version. The test loads the files
with the present version. So this module uses public names that all versions
have; only arguments called `removed` belong to the older versions.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import tf_cross_shard.keras3
import tf_cross_shard.tf_keras
from tf_cross_shard import callbacks

# `tf.keras` is tf_keras under TF_USE_LEGACY_KERAS=1.
IS_TF_KERAS_MODE = not hasattr(tf.keras, "Variable")
MODE = "tf_keras" if IS_TF_KERAS_MODE else "keras3"
LIBRARIES = {"keras": keras, "tf_keras": tf_keras}
OURS = {"keras": tf_cross_shard.keras3, "tf_keras": tf_cross_shard.tf_keras}

RELEASE, LAST = VERSIONS = ("0.2.0", "2026-11-23")

PAIR = [[0], [1]]
STRIDED = [[0, 2], [1, 3]]
ALL = ("pickle", "checkpoint", "replica_state", "keras")

# Assigned before the first call, so that it differs from the constructor's.
RATE = 0.25


def sgd(library: Any, **options: Any) -> Any:
  """Returns SGD whose updates are exact: all numbers are powers of two."""
  return library.optimizers.SGD(0.5, momentum=0.5, **options)


def _plain_sgd(library: Any) -> Any:
  """Returns SGD that updates only the rows of a table that occur."""
  return library.optimizers.SGD(0.5)


def _adam(library: Any) -> Any:
  return library.optimizers.Adam(0.5, beta_1=0.5, beta_2=0.75)


def _legacy_sgd(library: Any) -> Any:
  return library.optimizers.legacy.SGD(0.5, momentum=0.5)


def loss_scaled(library: Any, opt: Any = None) -> Any:
  """Returns a LossScaleOptimizer whose scale changes in the first steps."""
  opt = opt or sgd(library)
  if library is keras:
    kind = keras.optimizers.LossScaleOptimizer
    return kind(opt, initial_scale=4.0, dynamic_growth_steps=2)
  kind = tf_keras.mixed_precision.LossScaleOptimizer
  return kind(opt, initial_scale=4.0, dynamic_growth_steps=2)


def _rates(library: Any) -> Any:
  """Returns SGD with a learning rate for each group."""
  decay = library.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.5])
  home = OURS["keras" if library is keras else "tf_keras"]
  return library.optimizers.SGD(home.PerGroup([0.25, decay]), momentum=0.5)


_v1 = tf.compat.v1.train


def v1_momentum(library: Any) -> Any:
  del library  # CrossShardOptimizer converts it, as migration.from_v1 does.
  return _v1.MomentumOptimizer(0.5, momentum=0.5)


def _v1_adam(library: Any) -> Any:
  del library
  return _v1.AdamOptimizer(0.5, beta1=0.5, beta2=0.75)


def _dense(library: Any) -> list[Any]:
  return [
    library.Input((3,)),
    library.layers.Dense(1, name="head", kernel_initializer="ones"),
  ]


def _table(library: Any) -> list[Any]:
  """Returns layers with an embedding table of four rows."""
  return [
    library.Input((1,)),
    library.layers.Embedding(4, 2, name="table", embeddings_initializer="ones"),
    library.layers.Flatten(),
    library.layers.Dense(1, name="head", kernel_initializer="ones"),
  ]


def normalized(library: Any) -> list[Any]:
  """Returns layers that normalize over the examples of a group."""
  home = OURS["keras" if library is keras else "tf_keras"]
  return [
    library.Input((3,)),
    home.SyncBatchNormalization(PAIR, momentum=0.5, name="norm"),
    library.layers.Dense(1, name="head", kernel_initializer="ones"),
  ]


@dataclasses.dataclass(frozen=True)
class Case:
  """A training, and how it was saved.

  Attributes:
    keras: The Keras of the model and the optimizer.
    opt: Makes the wrapped optimizer.
    layers: Makes the layers of the model.
    arguments: Arguments of the CrossShardOptimizer other than its groups.
    removed: Arguments that only the old version has.
    groups: The `group_assignment`.
    replicas: 1 is a training without a strategy.
    kind: The class that wraps `opt`.
    around: Makes an optimizer around the CrossShardOptimizer.
    outer: Arguments of an `OuterOptimizer` that synchronizes the groups; or
      None.
    outer_removed: Its arguments that only the old version has.
    rate: The learning rate that is assigned before the first call.
    calls: The calls of `apply_gradients` before the training is saved.
    more: The calls after that.
    dropped_window: `calls` and `more` of a training that loses the open window
      of `accumulate_steps` when it is saved. None if there is no open window.
    bad_call: A call in which the gradients of the last group are NaN.
    ways: How it is saved.
    since: The first version that can write it.
    in_mode: Whether it is written where `tf.keras` is tf_keras, too.
    is_exact: Whether arithmetic has the same bits on every machine.
  """

  keras: str = "keras"
  opt: Callable[[Any], Any] = sgd
  layers: Callable[[Any], list[Any]] = _dense
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  removed: dict[str, Any] = dataclasses.field(default_factory=dict)
  groups: Any = None
  replicas: int = 2
  kind: str = "CrossShardOptimizer"
  around: Callable[[Any, Any], Any] | None = None
  outer: dict[str, Any] | None = None
  outer_removed: dict[str, Any] = dataclasses.field(default_factory=dict)
  rate: float | None = RATE
  calls: Sequence[int] = (0, 1, 2)
  more: Sequence[int] = (3,)
  dropped_window: tuple[Sequence[int], Sequence[int]] | None = None
  bad_call: int | None = None
  ways: tuple[str, ...] = ALL
  since: str = RELEASE
  in_mode: bool = False
  is_exact: bool = True

  @property
  def library(self) -> Any:
    """The Keras itself."""
    return LIBRARIES[self.keras]


_SETTINGS: dict[str, Any] = {
  "loss_averaged_over": "replica",
  "clipvalue": 4096.0,
  "wire_dtype": "bfloat16",
  "skip_nonfinite": True,
  "scale_gradients": True,
  "fused_update": False,
  "name": "own_name",
}
_WINDOW: dict[str, Any] = {
  "arguments": {"accumulate_steps": 2},
  "calls": (0, 1, 2, 3),
  "more": (4, 5),
}
# Saved after the first of the two calls of the second window.
_OPEN_WINDOW: dict[str, Any] = {
  "arguments": {"accumulate_steps": 2},
  "calls": (0, 1, 2),
  "more": (3,),
  "dropped_window": ((0, 1), (3, 4)),
}
_ISLANDS: dict[str, Any] = {
  "groups": PAIR,
  "outer": {"every": 2},
  "ways": ("replica_state",),
}

CASES: dict[str, Case] = {
  # One group, of one device and of several.
  "one_device": Case(replicas=1),
  "replicas": Case(),
  "settings": Case(groups=PAIR, arguments=_SETTINGS, bad_call=1),
  "averages": Case(
    opt=functools.partial(sgd, use_ema=True, ema_momentum=0.5), groups=PAIR
  ),
  # Groups.
  "groups": Case(groups=STRIDED, replicas=4, ways=(*ALL, "best")),
  "named_groups": Case(
    groups={"assignment": PAIR, "names": ["left", "right"]}, since=LAST
  ),
  "per_group": Case(opt=_rates, groups=PAIR, rate=None),
  "group_settings": Case(
    groups=PAIR,
    arguments={"group_settings": {"momentum": [0.5, 0.25]}},
    since=LAST,
  ),
  "sync_batch_normalization": Case(
    layers=normalized, groups=PAIR, is_exact=False
  ),
  # State in parts, and in windows.
  "shard_update": Case(
    opt=_adam,
    groups=STRIDED,
    replicas=4,
    arguments={"shard_update": True},
    is_exact=False,
  ),
  "by_variable": Case(
    opt=_adam,
    groups=STRIDED,
    replicas=4,
    arguments={"shard_update": "by_variable"},
    since=LAST,
    is_exact=False,
  ),
  "window": Case(groups=STRIDED, replicas=4, **_WINDOW),
  "open_window": Case(groups=STRIDED, replicas=4, **_OPEN_WINDOW),
  "window_of_keras": Case(
    opt=functools.partial(sgd, gradient_accumulation_steps=2), replicas=1
  ),
  "window_of_keras_in_groups": Case(
    opt=functools.partial(sgd, gradient_accumulation_steps=2),
    groups=STRIDED,
    replicas=4,
    ways=("replica_state",),
  ),
  "lazy_rows": Case(
    opt=_adam,
    layers=_table,
    arguments={"lazy_rows": True},
    since=LAST,
    is_exact=False,
  ),
  "islands": Case(**_ISLANDS),
  # Optimizers within and around.
  "loss_scale_within": Case(opt=loss_scaled),
  # Keras loses the slots of such an optimizer in a pickle.
  "loss_scale_around": Case(
    around=loss_scaled, ways=("checkpoint", "replica_state", "keras")
  ),
  "from_v1_momentum": Case(opt=v1_momentum),
  "from_v1_adam": Case(opt=_v1_adam, groups=PAIR, is_exact=False),
  "tower": Case(kind="TowerOptimizer", replicas=1),
  # tf_keras, together with Keras 3 or instead of it.
  "tf_keras": Case(keras="tf_keras", groups=PAIR, in_mode=True),
  "tf_keras_h5": Case(keras="tf_keras", replicas=1, ways=("h5",), in_mode=True),
  "tf_keras_legacy": Case(
    keras="tf_keras", opt=_legacy_sgd, groups=PAIR, in_mode=True
  ),
  "tf_keras_shard_update": Case(
    keras="tf_keras",
    opt=_adam,
    groups=STRIDED,
    replicas=4,
    arguments={"shard_update": True},
    is_exact=False,
  ),
  "tf_keras_open_window": Case(
    keras="tf_keras", groups=STRIDED, replicas=4, **_OPEN_WINDOW
  ),
  "tf_keras_per_group": Case(
    keras="tf_keras", opt=_rates, groups=PAIR, rate=None, in_mode=True
  ),
  "tf_keras_sync_batch_normalization": Case(
    keras="tf_keras", layers=normalized, groups=PAIR, is_exact=False
  ),
  "tf_keras_loss_scale_within": Case(keras="tf_keras", opt=loss_scaled),
  # Neither tf_keras nor this package can pickle it.
  "tf_keras_loss_scale_around": Case(
    keras="tf_keras",
    around=loss_scaled,
    ways=("checkpoint", "replica_state", "keras"),
  ),
  "tf_keras_from_v1": Case(
    keras="tf_keras", opt=v1_momentum, groups=PAIR, in_mode=True
  ),
  "tf_keras_tower": Case(
    keras="tf_keras", kind="TowerOptimizer", replicas=1, in_mode=True
  ),
}

# State of features that were removed after they were written.
REMOVED: dict[str, Case] = {
  "noise_scale": Case(groups=STRIDED, replicas=4, removed={"noise_scale": 1}),
  "tf_keras_noise_scale": Case(
    keras="tf_keras", groups=STRIDED, replicas=4, removed={"noise_scale": 1}
  ),
  "noise_scale_in_window": Case(
    groups=STRIDED, replicas=4, removed={"noise_scale": 1}, **_OPEN_WINDOW
  ),
  "has_backup": Case(groups=PAIR, removed={"has_backup": True}, since=LAST),
  "int8": Case(
    groups=STRIDED, replicas=4, removed={"wire_dtype": "int8"}, since=LAST
  ),
  "int8_in_shards": Case(
    opt=_adam,
    groups=STRIDED,
    replicas=4,
    arguments={"shard_update": True},
    removed={"wire_dtype": "int8"},
    since=LAST,
    is_exact=False,
  ),
  "all_removed": Case(
    groups=STRIDED,
    replicas=4,
    arguments={"skip_nonfinite": True},
    removed={"noise_scale": 1, "has_backup": True, "wire_dtype": "int8"},
    since=LAST,
  ),
  # Row sums of tables. SGD without momentum has them without `lazy_rows`.
  "rows_in_window": Case(
    opt=_adam,
    layers=_table,
    removed={"lazy_rows": True},
    since=LAST,
    is_exact=False,
    **_WINDOW,
  ),
  "rows_in_open_window": Case(
    opt=_adam,
    layers=_table,
    removed={"lazy_rows": True},
    since=LAST,
    is_exact=False,
    **_OPEN_WINDOW,
  ),
  "exact_rows_in_window": Case(
    opt=_plain_sgd, layers=_table, since=LAST, **_WINDOW
  ),
  "exact_rows_in_open_window": Case(
    opt=_plain_sgd, layers=_table, since=LAST, **_OPEN_WINDOW
  ),
  "islands_in_fragments": Case(
    **{**_ISLANDS, "calls": (0, 1, 2)},
    outer_removed={"fragments": 2, "delay": 1},
    since=LAST,
  ),
  "islands_int8": Case(
    **_ISLANDS, outer_removed={"wire_dtype": "int8"}, since=LAST
  ),
}


@dataclasses.dataclass(frozen=True)
class Backup:
  """A `fit` of three epochs of two batches, saved by `BackupAndRestore`.

  Attributes:
    keras: The Keras of the model.
    kept: The name of the one file that is kept.
    arguments: Arguments of the CrossShardOptimizer.
    removed: Those that only the old version has.
    others: Makes callbacks that stay.
    others_removed: Makes callbacks that only the old version has.
  """

  keras: str = "keras"
  kept: str = "epoch_2.npz"
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  removed: dict[str, Any] = dataclasses.field(default_factory=dict)
  others: Callable[[], list[Any]] = list
  others_removed: Callable[[], list[Any]] = list


X = np.array([[i % 3 - 1, i % 2] for i in range(8)], "float32")
Y = np.array([[i % 4 - 1] for i in range(8)], "float32")


def _judges() -> list[Any]:
  """Callbacks with state."""
  return [
    callbacks.GroupMetrics((X, Y)),
    callbacks.GroupEarlyStopping(patience=5),
    callbacks.OuterOptimizer(3),
  ]


def _adaptive() -> list[Any]:
  return [callbacks.AdaptiveAccumulation()]


BACKUPS: dict[str, Backup] = {
  "backup_of_epoch": Backup(others=_judges),
  "backup_of_batch": Backup(kept="epoch_1_batch_1.npz"),
  "tf_keras_backup": Backup(keras="tf_keras"),
}
REMOVED_BACKUPS: dict[str, Backup] = {
  "backup_of_adaptive_accumulation": Backup(
    arguments={"accumulate_steps": 2},
    removed={"noise_scale": 1},
    others_removed=_adaptive,
  ),
  "backup_of_int8": Backup(
    kept="epoch_1_batch_1.npz", removed={"wire_dtype": "int8"}
  ),
}


def cases_of(version: str) -> dict[str, Case]:
  """All cases that a version wrote, in this mode."""
  return {
    name: case
    for name, case in {**CASES, **REMOVED}.items()
    if case.since in (RELEASE, version)
    and (case.in_mode or not IS_TF_KERAS_MODE)
  }


def backups_of(version: str) -> dict[str, Backup]:
  """All backups that a version wrote; those of 0.2.0 are not read."""
  is_here = version == LAST and not IS_TF_KERAS_MODE
  return {**BACKUPS, **REMOVED_BACKUPS} if is_here else {}
