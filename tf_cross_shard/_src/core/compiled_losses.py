"""Extends `compile` of Keras' models, for their losses and the loss scale.

In `fit`, the factor of the mean assumes that Keras has divided the loss by the
number of replicas. Keras does not divide sums. Only the model knows its losses
one by one, and Keras never tells an optimizer its model: `compile` wraps them.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from absl import logging
from tensorflow.python.eager import record

from tf_cross_shard._src.core import (
  loss_scale,
  optimizer_state,
  single_program,
)
from tf_cross_shard._src.core import pipeline as pipeline_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

# Marks the extended method.
_MARK: Final = "_is_of_tf_cross_shard"
# A model's attribute: whether every replica gets the whole batch.
WHOLE_BATCH: Final = "_tf_cross_shard_whole_batch"


class CompiledLoss:
  """A loss of `compile`, multiplied so that the optimizer's factor is right."""

  def __init__(
    self,
    model: Any,
    pipelines: Sequence[pipeline_lib.GradientPipeline],
    is_all: bool,
    loss: Any,
  ) -> None:
    """Wraps a loss object; `is_all`: the model's loss has no other terms."""
    self._model, self._pipelines, self._is_all = model, pipelines, is_all
    self._loss, self.name, self.reduction = loss, loss.name, loss.reduction

  def __call__(
    self, y_true: Any, y_pred: Any, sample_weight: Any = None
  ) -> Any:
    """Returns the value of the loss, times a number if it is a sum."""
    loss, pipeline = self._loss, self._pipelines[0]
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
      return loss(y_true, y_pred, sample_weight=sample_weight)
    # Only a training step differentiates its loss. Outside of replicas, Keras
    # builds the loss.
    if not tf.distribute.in_cross_replica_context():
      if record.could_possibly_record():
        for each in self._pipelines:
          each.convention.is_in_fit |= self._is_all
      else:
        pipeline.warnings.before_evaluating()
    is_mean = loss.reduction not in ("sum", "none", None)
    ranks = []

    def call(*args: Any) -> Any:
      values = loss.call(*args)
      ranks.append(tf.TensorShape(getattr(values, "shape", ())).rank)
      # Keras 3 divides a mean of several values by the number of replicas, but
      # not a number, which tf_keras divides, too: make an array of it.
      if is_mean and ranks[-1] == 0:
        values = tf.reshape(values, [1, 1])
      return values

    # `copy.copy` would save and load the loss.
    listening = object.__new__(type(loss))
    vars(listening).update(vars(loss), call=call)
    value = listening(y_true, y_pred, sample_weight=sample_weight)
    is_number = (ranks or [tf.TensorShape(value.shape).rank])[-1] == 0
    factor = pipeline.convention.for_compiled(
      self.name,
      is_sum=not is_mean and (loss.reduction == "sum" or not is_number),
      is_number=is_number,
      # A class that overrides `__call__` need not call `call`. Then Keras 3
      # does not divide; tf_keras divides the result.
      is_divided=is_mean
      and (bool(ranks) or pipeline.wrapped.package == "tf_keras"),
      is_of_whole_batch=getattr(self._model, WHOLE_BATCH, False),
    )
    return value if factor == 1 else value * tf.cast(factor, value.dtype)


# Wraps the losses of a compiled model of a Keras, once Keras has created them.
wrap_losses: "Final[dict[str, Callable[[Any, Any], None]]]" = {}
# Lets a model be built from the batch of one replica, as tf_keras does.
build_from_one: "Final[dict[str, Callable[[Any], None]]]" = {}


def watch_compile(package: str) -> None:
  """Extends `compile` of the models of a Keras, once.

  Call it when the package is imported. Python looks `compile` up before it
  evaluates the arguments of the call, so in `model.compile(CrossShardOptimizer(
  "adam"))` the constructor would be too late.
  """
  # The class that defines `compile`: to see whether a user has overridden it,
  # Keras compares the method with the one of this class.
  kind = sys.modules[package].Model
  owner = next(each for each in kind.__mro__ if "compile" in vars(each))
  if not hasattr(owner.compile, _MARK):
    owner.compile = _watched(package, kind, owner.compile)


def _watched(package: str, kind: Any, keras_compile: Any) -> Any:
  """Returns `compile` with checks, and with wrapped losses."""

  @functools.wraps(keras_compile)
  def compile_model(self: Any, *args: Any, **kwargs: Any) -> None:
    [optimizer, *_] = [*args, kwargs.get("optimizer")]
    wrapped = wrapped_lib.find(optimizer)
    if wrapped is not None and wrapped.package != package:
      home = "keras3" if package == "keras" else package
      raise TypeError(
        f"`optimizer` wraps an optimizer of {wrapped.package}, but the model"
        f" is of {package}. Use the class for this Keras: from"
        f" tf_cross_shard.{home} import {type(optimizer).__name__}"
      )
    with _scope_of(self), loss_scale.compiling(optimizer):
      keras_compile(self, *args, **kwargs)
    loss_scale.move_inside(self)
    pipelines = optimizer_state.pipelines_of(self.optimizer)
    pipeline = next(iter(pipelines), None)
    if pipeline is not None and pipeline.settings.lazy_rows:
      _warn_of_tables(self)
    strategy = self.distribute_strategy
    if pipeline is not None:
      strategy = pipeline.engine.strategy
    is_ours = pipeline is not None or single_program.of_strategy(strategy)
    if is_ours and single_program.num_copies(strategy) > 1:
      build_from_one.get(package, lambda _: None)(self)
    if pipeline is None or strategy.num_replicas_in_sync == 1:
      return
    if self.jit_compile and not pipeline.engine.is_single_program:
      raise ValueError(
        "`jit_compile` must be False in compile under"
        f" {type(strategy).__name__}: XLA cannot compile the sum over its"
        " replicas. Leave it out."
      )
    is_all = type(self).compute_loss is kind.compute_loss
    has_loss = len(args) > 1 or kwargs.get("loss") is not None
    steps_by_keras = is_all and type(self).train_step is kind.train_step
    for each in pipelines:
      # A loss of `compile` notices when Keras computes it; `add_loss` does not.
      each.convention.is_in_fit = steps_by_keras and not has_loss
    wrap = functools.partial(CompiledLoss, self, pipelines, is_all)
    wrap_losses[package](self, wrap)

  setattr(compile_model, _MARK, True)
  return compile_model


def _scope_of(model: Any) -> contextlib.AbstractContextManager[Any]:
  """Returns the scope in which a model's metrics must be created.

  One copy of a metric would add up the numbers of all models.
  """
  here = tf.distribute.get_strategy()
  strategy: Any = getattr(model, "distribute_strategy", here)
  if strategy is here or not single_program.are_models(strategy):
    return contextlib.nullcontext()
  return strategy.scope()


def _warn_of_tables(model: Any) -> None:
  """Warns of layers that read whole tables, of which a step updates rows."""
  kind = keras_private.keras_of(model).layers.Embedding
  tables = [v.name for v in keras_private.layers(model) if type(v) is kind]
  if tables:
    logging.warning(
      "lazy_rows=True updates only the rows in the batch, but Keras' Embedding"
      " (%s) copies its whole table in each step. Use"
      " tf_cross_shard.layers.Embedding, which reads the rows alone.",
      ", ".join(tables),
    )
