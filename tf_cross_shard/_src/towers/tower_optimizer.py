"""TowerOptimizer: sums gradients over towers and applies the sum once.

in one of several towers     loss / n (for a mean) ─▶ gradients ─▶ collect
after the last tower         sum over towers ─▶ wrapped optimizer
one tower, or outside towers gradients ─▶ wrapped optimizer
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import optimizer_state, validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.facade import facade as facade_lib
from tf_cross_shard._src.core.gradients import (
  clipping,
  differentiate,
  row_sparse,
)
from tf_cross_shard._src.core.optimizer import CrossShardOptimizer
from tf_cross_shard._src.towers import gradient_collector


class TowerOptimizer(facade_lib.Facade):
  """Sums gradients over the towers of a model function and applies them once.

  Inside a function created by `replicate_model_fn`, which documents the
  formula, `apply_gradients` collects gradients. After all towers have returned,
  the wrapped optimizer applies their sum once. With one tower, and outside
  towers, the wrapped optimizer is called immediately.

  A model function may use several optimizers, for the same loss or for
  different losses. Each tower must call the same optimizers in the same order.
  You may create an optimizer inside the model function: its variables are
  shared by all towers, like all other variables. If you wrap a
  `CrossShardOptimizer`, gradients are summed first over towers and then
  over replicas.

  References:
    tf.contrib.estimator.TowerOptimizer, whose members this class keeps.
  """

  COLLECTION_FOR_GRAPH_STATES = "replicate_model_fn_graph_states"
  _argument = "optimizer_or_optimizer_fn"
  _was_used = False

  # The wrapped optimizer clips.
  clipnorm = facade_lib.forwarded("clipnorm")
  global_clipnorm = facade_lib.forwarded("global_clipnorm")
  clipvalue = facade_lib.forwarded("clipvalue")

  def __init__(
    self,
    optimizer_or_optimizer_fn: (
      "validation.Optimizer | str | dict[str, Any]"
      " | Callable[[], validation.Optimizer]"
    ),
  ) -> None:
    """Wraps an optimizer, or the optimizer that a function returns.

    Args:
      optimizer_or_optimizer_fn: An optimizer, its name, or a function without
        arguments that returns an optimizer. The function is called once, now.

    Raises:
      ValueError: If the name is unknown, or if the optimizer is itself a
        TowerOptimizer.
      TypeError: If it is not an optimizer.
    """
    opt = optimizer_or_optimizer_fn
    opt = self._as_optimizer(opt() if callable(opt) else opt)
    super().__init__(
      gradient_collector.variables().optimizer(opt),
      name="TowerOptimizer",
      clipnorm=None,
      global_clipnorm=None,
      clipvalue=None,
    )

  @staticmethod
  def has_been_used() -> bool:
    """Returns whether any TowerOptimizer applied gradients in this program."""
    return TowerOptimizer._was_used

  def get_name(self) -> str:
    return self._wrapped.name

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[Any],
    global_step: Any = None,
    name: str | None = None,
    **kwargs: Any,
  ) -> Any:
    """Collects gradients, which are applied after the last tower has returned.

    Args:
      grads_and_vars: Pairs of a gradient (dense, row-sparse or None) and its
        variable.
      global_step: An integer variable that is incremented by one after the
        update, or None.
      name: The name scope of the operations, if the wrapped optimizer
        accepts a name.
      **kwargs: More arguments of the wrapped optimizer's
        `apply_gradients`.

    Returns:
      The iteration count after the update. In one of several towers, it is the
      iteration count before the update, which happens later.

    Raises:
      ValueError: If `grads_and_vars` is empty or malformed, or if this tower
        differs from the first tower.
      TypeError: If `grads_and_vars` contains something that is not a variable,
        if `global_step` is not an integer variable, or if the wrapped
        optimizer does not accept an argument.
    """
    grads, variables = validation.check_pairs(grads_and_vars)
    validation.check_global_step(global_step)
    # Check the arguments now: when they are used, other optimizers of the step
    # may have been applied already.
    inspect.signature(self._wrapped.optimizer.apply_gradients).bind(
      (), **kwargs
    )
    options = {"name": name, **kwargs}
    apply = functools.partial(
      self._apply, global_step=global_step, options=options
    )
    return self._collect_or_apply(apply, grads, variables)

  @classmethod
  def _check_facade_within(cls, facade: facade_lib.Facade, opt: Any) -> None:
    if isinstance(facade, TowerOptimizer) or facade is not opt:
      super()._check_facade_within(facade, opt)

  def build(self, variables: Any) -> None:
    """Creates the slots of the wrapped optimizer, once.

    Args:
      variables: The variables that the optimizer updates.
    """
    # Slots are not part of the variables that towers share by order. The empty
    # name scope keeps tf_keras from naming them after the tower.
    with gradient_collector.variables().paused(), tf.name_scope(""):
      super().build(variables)

  def check_known(self, variables: Sequence[Any]) -> None:
    """Raises an error if the optimizer cannot update variables."""
    optimizer = self._wrapped.optimizer
    if isinstance(optimizer, CrossShardOptimizer):
      optimizer_state.pipeline_of(optimizer).checks.check_place()
    if self._wrapped.is_built:
      validation.check_known(variables, self._wrapped.knows)

  @tf.autograph.experimental.do_not_convert
  def prepare(self, variables: Sequence[Any]) -> None:
    """Builds the optimizer for all variables of a step, unless it is built."""
    if not self._wrapped.is_built:
      distinct = {id(variables_lib.native(v)): v for v in variables}
      self.build(list(distinct.values()))

  def _gradients(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: differentiate.GraphOptions,
  ) -> differentiate.Pairs:
    """Computes this tower's gradients, times the factor of its loss."""
    collector = self._collector()
    of_tower = None if collector is None else collector.tape
    tape = of_tower if tape is None and tf.is_tensor(loss) else tape
    optimizer = self._wrapped.optimizer
    # The tower's tape must not record the computation of gradients.
    with of_tower.stop_recording() if of_tower else contextlib.nullcontext():
      if isinstance(optimizer, CrossShardOptimizer):
        pairs = optimizer_state.pipeline_of(optimizer).differentiate(
          loss, var_list, tape, default, options
        )
      else:
        pairs = differentiate.differentiate(
          self._wrapped,
          loss,
          var_list,
          tape,
          scale=lambda seed: seed,
          options=options,
          requires_scalar=False,
        )
    # Multiply the gradients, not the loss: the user's tape may have stopped
    # recording, and would not see the product.
    factor = self._factor()
    return [(row_sparse.times(grad, factor), v) for grad, v in pairs]

  def _collect_or_apply(
    self,
    apply: gradient_collector.Apply,
    grads: list[Any],
    variables: list[Any],
  ) -> Any:
    """Collects a call in one of several towers; else calls `apply` now."""
    collector = self._collector()

    def apply_and_record(grads: list[Any], variables: list[Any]) -> Any:
      result = apply(grads, variables)
      TowerOptimizer._was_used = True
      return result

    if collector is None or collector.count == 1:
      self.check_known(variables)
      self.prepare(variables)
      with gradient_collector.variables().paused():
        return apply_and_record(grads, variables)
    optimizer = self._wrapped.optimizer
    collector.collect(
      gradient_collector.CollectedCall(
        self, optimizer, grads, variables, apply_and_record
      )
    )
    return tf.identity(self._wrapped.iterations())

  def _apply_pairs(self, grads: list[Any], variables: list[Any]) -> None:
    # Not by `apply`: `fit` calls `apply_gradients`, which the user's class may
    # override.
    self._collect_or_apply(self._wrapped.apply, grads, variables)

  def _collector(self) -> gradient_collector.GradientCollector | None:
    """Returns the collector of the current tower; checks that it trains."""
    collector = gradient_collector.current()
    if collector is not None and not collector.is_training:
      raise ValueError(
        f'`model_fn` must call {self.get_name()} in the mode "train" only.'
        ' Nothing was applied; call it if mode == "train".'
      )
    return collector

  @tf.autograph.experimental.do_not_convert
  def _apply(
    self,
    grads: Sequence[Any],
    variables: Sequence[Any],
    global_step: Any,
    options: dict[str, Any],
  ) -> Any:
    """Applies summed gradients through the wrapped optimizer."""
    optimizer = self._wrapped.optimizer
    if isinstance(optimizer, CrossShardOptimizer):
      pairs = zip(grads, variables, strict=True)
      return optimizer.apply_gradients(pairs, global_step, **options)
    self._wrapped.apply(grads, variables, **options)
    if global_step is not None:
      # A dynamic loss scale skips a step that overflows; such a step does not
      # count.
      skips = self._wrapped.skips_overflows
      is_step = clipping.all_finite(grads) if skips else True
      global_step.assign_add(tf.cast(is_step, global_step.dtype))
    return tf.identity(self._wrapped.iterations())

  def _factor(self) -> float:
    collector = gradient_collector.current()
    return (
      1.0 if collector is None else collector.scale(self._wrapped.optimizer)
    )
