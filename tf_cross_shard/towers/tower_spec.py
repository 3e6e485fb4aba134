"""What a model function answers, and several of them merged into one."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from tf_cross_shard.gradients import loss_factor
from tf_cross_shard.towers import batch_split


class ModeKeys:
  """What a model function is called for, spelled as in TensorFlow 1.

  >>> ModeKeys.PREDICT
  'infer'

  Attributes:
    TRAIN: To train.
    EVAL: To evaluate.
    PREDICT: To predict.
  """

  TRAIN: Final = "train"
  EVAL: Final = "eval"
  PREDICT: Final = "infer"


class TowerSpec(NamedTuple):
  """What a model function answers; `EstimatorSpec` for TensorFlow 2.

  >>> spec = TowerSpec("train", loss=tf.constant(2.0))
  >>> float(spec.loss), spec.predictions
  (2.0, None)

  Attributes:
    mode: One of `ModeKeys`.
    loss: A tensor. Merged: the sum or mean over the towers.
    train_op: What the optimizer answered. Merged: what the last optimizer
      answered after the update.
    predictions: A tensor or nest, the examples along axis 0. Merged: all
      towers' in order.
    metrics: A dictionary of `tf.keras.metrics.Metric` objects that the tower
      has updated. Merged: their results, once over all towers.
    export_outputs: Like `predictions`.
  """

  mode: str
  loss: Any = None
  train_op: Any = None
  predictions: Any = None
  metrics: Any = None
  export_outputs: Any = None


def check(spec: Any, tower: int, mode: Any) -> TowerSpec:
  """Raises an error unless a tower returned what can be merged."""
  if not isinstance(spec, TowerSpec):
    raise TypeError(
      f"`model_fn` must return a TowerSpec; in tower {tower} it returned"
      f" {spec!r}. Return TowerSpec(mode, loss=loss, ...)."
    )
  if spec.mode != mode:
    raise ValueError(
      f"`model_fn` must return a TowerSpec of the mode it is called for,"
      f" {mode!r}; in tower {tower} it returned {spec.mode!r}."
      " Return TowerSpec(mode, ...)."
    )
  metrics = {} if spec.metrics is None else spec.metrics
  if not isinstance(metrics, Mapping) or not all(
    hasattr(metric, "update_state") for metric in metrics.values()
  ):
    raise TypeError(
      "`metrics` must be a dictionary of tf.keras.metrics.Metric objects; got"
      f" {metrics!r}. Update a Metric in model_fn and return it by a name."
    )
  return spec


def merge(specs: Sequence[TowerSpec], reduction: str) -> TowerSpec:
  """One spec of all towers' specs.

  >>> towers = [TowerSpec("train", tf.constant(x)) for x in (1.0, 2.0)]
  >>> float(merge(towers, "mean").loss)
  1.5
  """
  first, last = specs[0], specs[-1]
  has_loss = [spec.loss is not None for spec in specs]
  if len(set(has_loss)) > 1:
    raise ValueError(
      "`loss` must be given by every tower or by none; towers"
      f" {[i for i, has in enumerate(has_loss) if not has]} gave None. Return"
      " TowerSpec(mode, loss=loss) whatever part of the batch the tower got."
    )
  names = [sorted(spec.metrics or {}) for spec in specs]
  if any(each != names[0] for each in names):
    raise ValueError(
      f"`metrics` must have the same names in every tower; got {names}."
    )
  loss = None
  if has_loss[0]:
    loss = tf.add_n([tf.convert_to_tensor(spec.loss) for spec in specs])
    if reduction == loss_factor.MEAN:
      loss = loss / tf.cast(len(specs), loss.dtype)
  metrics = first.metrics
  if metrics is not None:
    # The towers update the same variables: any of them has the result of all.
    metrics = {name: last.metrics[name].result() for name in metrics}
  return TowerSpec(
    first.mode,
    loss,
    last.train_op,
    batch_split.concatenate("predictions", [s.predictions for s in specs]),
    metrics,
    batch_split.concatenate(
      "export_outputs", [s.export_outputs for s in specs]
    ),
  )
