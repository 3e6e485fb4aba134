"""Makes the losses of `compile` what `fit` assumes about them.

In `fit`, the factor of the mean assumes that Keras has divided the loss by the
number of replicas. Keras does not divide every loss: see
`LossConvention.for_compiled`. Only the model knows its losses one by one; the
optimizer receives their sum. And Keras never tells an optimizer its model.
So `compile` of Keras' models is extended: if a model is compiled with
a CrossShardOptimizer, each loss that is undivided is multiplied by a number.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf
from absl import logging
from tensorflow.python.eager import record

from tf_cross_shard._src.core import (
  loss_scale,
  optimizer_state,
  single_program,
)
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib

# Marks the extended method.
_MARK: Final = "_is_of_tf_cross_shard"
# A model's attribute: whether every replica gets the whole batch.
WHOLE_BATCH: Final = "_tf_cross_shard_whole_batch"


class CompiledLoss:
  """A loss of `compile`, multiplied so that the optimizer's factor is right."""

  def __init__(
    self, loss: Any, model: Any, is_divided: Callable[..., bool]
  ) -> None:
    """Wraps a loss object; `is_divided` is whether Keras divides its value."""
    self.loss = loss
    self._model = model
    self._is_divided = is_divided

  @property
  def name(self) -> Any:
    return self.loss.name

  @property
  def reduction(self) -> Any:
    return self.loss.reduction

  def get_config(self) -> Any:
    return self.loss.get_config()

  def __call__(
    self, y_true: Any, y_pred: Any, sample_weight: Any = None
  ) -> Any:
    """Returns the value of the loss, times a number if it is undivided."""
    loss, pipeline = self.loss, _pipeline_of(self._model)
    here = tf.distribute.get_strategy().num_replicas_in_sync
    if pipeline is None or here == 1:
      return loss(y_true, y_pred, sample_weight=sample_weight)
    # Only a training step differentiates its loss. Outside of replicas, Keras
    # builds the loss.
    in_replica = not tf.distribute.in_cross_replica_context()
    if in_replica and not record.could_possibly_record():
      pipeline.warnings.before_evaluating()
    values = []

    def call(*args: Any) -> Any:
      values.append(loss.call(*args))
      return values[-1]

    # Keras reduces what `call` returns, which tells whether this is a number.
    # `copy.copy` would save and load the loss.
    listening = object.__new__(type(loss))
    vars(listening).update(vars(loss), call=call)
    value = listening(y_true, y_pred, sample_weight=sample_weight)
    # A class that overrides `__call__` need not call `call`.
    value_of_call = values[-1] if values else value
    shape = getattr(value_of_call, "shape", ())
    factor = pipeline.convention.for_compiled(
      loss.name,
      reduction=getattr(loss.reduction, "value", loss.reduction),
      is_number=tf.TensorShape(shape).rank == 0,
      is_of_whole_batch=getattr(self._model, WHOLE_BATCH, False),
      is_divided=bool(values)
      and self._is_divided(loss, value_of_call, y_pred, sample_weight),
    )
    return value if factor == 1 else value * tf.cast(factor, value.dtype)


# Wraps the losses of a compiled model of a Keras.
wrap_losses: "Final[dict[str, Callable[[Any], None]]]" = {}
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
  kinds = sys.modules[package].Model.__mro__
  owner = next(kind for kind in kinds if "compile" in vars(kind))
  if not hasattr(owner.compile, _MARK):
    owner.compile = _watched(package, owner.compile, owner.compute_loss)


def _watched(package: str, keras_compile: Any, compute_loss: Any) -> Any:
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
    pipeline = _pipeline_of(self)
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
    wrap_losses[package](self)
    if type(self).compute_loss is not compute_loss:
      pipeline.convention.warn_of_own_loss(type(self).__name__)

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


def _pipeline_of(model: Any) -> Any:
  """Returns the pipeline of the model's CrossShardOptimizer, or None."""
  optimizer = getattr(model, "optimizer", None)
  return next(iter(optimizer_state.pipelines_of(optimizer)), None)
