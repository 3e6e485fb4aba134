"""All variables of an optimizer, and the pipelines of its optimizers.

Satellites save, restore and compare an optimizer by these functions. Keras' own
lists of variables are not complete: the list of tf_keras leaves out the
learning rate and the loss scale.
"""

from tf_cross_shard._src.core import pipeline as pipeline_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core import warnings as warnings_lib
from tf_cross_shard._src.core.per_model import schedule as per_model_lib
from tf_cross_shard._src.core.variables import Optimizer, Variable
from tf_cross_shard._src.core.wrapped import keras_private, nested
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


def find_pipeline(optimizer: Optimizer) -> pipeline_lib.GradientPipeline | None:
  """Returns the pipeline of a complete CrossShardOptimizer, else None."""
  found = getattr(optimizer, "__dict__", {}).get("_pipeline")
  return found if isinstance(found, pipeline_lib.GradientPipeline) else None


def pipeline_of(optimizer: Optimizer) -> pipeline_lib.GradientPipeline:
  """Returns the pipeline of a CrossShardOptimizer; `TypeError` for others."""
  pipeline = find_pipeline(optimizer)
  if pipeline is None:
    raise TypeError(
      "`optimizer` must be a CrossShardOptimizer; got"
      f" {type(optimizer).__name__}. Wrap it in a CrossShardOptimizer."
    )
  return pipeline


def pipelines_of(optimizer: Optimizer) -> list[pipeline_lib.GradientPipeline]:
  all_nested = nested.nested_optimizers(optimizer)
  return list(filter(None, map(find_pipeline, all_nested)))


def group_warnings_of(
  optimizer: Optimizer,
) -> list[warnings_lib.GroupWarnings]:
  return [pipeline.warnings for pipeline in pipelines_of(optimizer)]


def windows(optimizer: Optimizer) -> list[Variable]:
  """Returns the state of unfinished windows, which members do not share."""
  return [
    v for pipeline in pipelines_of(optimizer) for v in pipeline.window_state
  ]


def rows_of_models(optimizer: Optimizer) -> list[Variable]:
  """Returns the variables that each hold one number for every model."""
  rows = []
  for each in optimizer if isinstance(optimizer, list) else [optimizer]:
    if per_model_lib.rates_of(each) is not None:
      rows += nested.rate_variables(each)
    for pipeline in pipelines_of(each):
      rows += pipeline.per_model.variables
  return rows


def state_variables(optimizer: Optimizer) -> list[Variable]:
  """Returns the variables of a built optimizer and of all optimizers inside."""
  nested.check_optimizer(optimizer)
  if not nested.is_built(optimizer):
    raise ValueError(
      "`optimizer` is not built, so it has no state: got"
      f" {type(optimizer).__name__}. Call build(model.trainable_variables)"
      " inside `with strategy.scope():` first."
    )
  variables: list[Variable] = []
  is_sharded = False  # Then an optimizer inside lists shards of the slots.
  for each in nested.nested_optimizers(optimizer):
    if not is_sharded:
      variables += keras_private.listed(each)
    wrapped = wrapped_lib.find(each)
    is_sharded |= wrapped is not None and wrapped.sharded_state is not None
    variables += nested.own_rate_variables(each)
    variables += keras_private.unlisted(each)
  # At the end, because plain optimizers have none.
  for pipeline in pipelines_of(optimizer):
    variables += pipeline.state
  return variables_lib.each_once(variables)
