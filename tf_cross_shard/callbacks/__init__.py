"""Keras callbacks that treat every group as a model of its own.

Keras' own callbacks see one model: the first replica's weights, and metrics
that are means over groups. These see each group:

    fit ─▶ GroupMetrics            logs["val_loss/group_0"], ["…/group_1"]
        ─▶ GroupEarlyStopping      stops when none improves; each at its best
        ─▶ GroupReduceLROnPlateau  lowers each group's own rate
        ─▶ GroupCheckpoint         a file with each group at its best
        ─▶ GroupTensorBoard        a run for each group

In this order, since the others read what `GroupMetrics` writes. A loop of one's
own calls `set_model(model)`, `on_epoch_end(epoch, logs)` with one dictionary
for all callbacks, and `on_train_end()`; the model is compiled. On several
machines all workers do.

`OuterOptimizer` needs none of them: it joins the groups every few steps. Nor
do `BackupAndRestore`, which makes a `fit` go on after a crash, and
`AdaptiveAccumulation`, which makes batches as large as they are worth.

>>> outer = OuterOptimizer(every=100)  # model.fit(data, callbacks=[outer])
"""

from tf_cross_shard.callbacks.adaptive_accumulation import AdaptiveAccumulation
from tf_cross_shard.callbacks.backup import BackupAndRestore
from tf_cross_shard.callbacks.group_checkpoint import GroupCheckpoint
from tf_cross_shard.callbacks.group_early_stopping import GroupEarlyStopping
from tf_cross_shard.callbacks.group_metrics import GroupMetrics
from tf_cross_shard.callbacks.group_reduce_lr import GroupReduceLROnPlateau
from tf_cross_shard.callbacks.group_tensorboard import GroupTensorBoard
from tf_cross_shard.callbacks.halving import Halving
from tf_cross_shard.callbacks.outer_optimizer import OuterOptimizer
from tf_cross_shard.callbacks.population import Population

__all__ = [
  "AdaptiveAccumulation",
  "BackupAndRestore",
  "GroupCheckpoint",
  "GroupEarlyStopping",
  "GroupMetrics",
  "GroupReduceLROnPlateau",
  "GroupTensorBoard",
  "Halving",
  "OuterOptimizer",
  "Population",
]


def __dir__() -> list[str]:
  """Returns the public names."""
  return sorted(__all__)
