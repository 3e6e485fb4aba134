"""TowerOptimizer: gathers the gradients of all towers, applies their sum once.

    in a tower of several          loss / n -> gradients -> collect
    when the last has returned     sum over towers -> the encapsulated optimizer
    anywhere else                  the encapsulated optimizer

`tf_cross_shard.towers` says what a tower is.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients import (
  differentiation,
  indexed_slices,
)
from tf_cross_shard.optimizer import CrossShard
from tf_cross_shard.step import nonfinite
from tf_cross_shard.towers import gradient_collector
from tf_cross_shard.wrapper import forwarding


class Tower(forwarding.OptimizerWrapper):
  """Gathers gradients across the towers of a model function.

  In a function made by `replicate_model_fn`, which has the formula, the
  encapsulated optimizer applies their sum, once, after all towers have
  returned. In one tower, and outside of towers, it is called at once.

  Several optimizers, of the same or of different losses, may be used. Each
  tower has to call the same ones in the same order. An optimizer may be made
  inside the model function; its variables are shared as the others are. With a
  `CrossShardOptimizer` within, towers add up first and replicas then.

  References:
    tf.contrib.estimator.TowerOptimizer, whose members this class keeps.
  """

  COLLECTION_FOR_GRAPH_STATES = "replicate_model_fn_graph_states"
  _argument = "optimizer_or_optimizer_fn"
  _was_used = False

  def __init__(
    self,
    optimizer_or_optimizer_fn: (
      "validation.Optimizer | str | dict[str, Any]"
      " | Callable[[], validation.Optimizer]"
    ),
  ) -> None:
    """Encapsulates an optimizer, or the one that a function makes.

    Args:
      optimizer_or_optimizer_fn: An optimizer, or its name, or a function of no
        arguments that returns one, which is called now, once.

    Raises:
      ValueError: If it names no optimizer or is itself a TowerOptimizer.
      TypeError: If it is no optimizer.
    """
    opt = optimizer_or_optimizer_fn
    opt = self._as_optimizer(opt() if callable(opt) else opt)
    super().__init__(
      gradient_collector.variables().optimizer(opt),
      name="TowerOptimizer",
      clipnorm=None,  # Clipping is the encapsulated optimizer's.
      global_clipnorm=None,
      clipvalue=None,
    )

  @staticmethod
  def has_been_used() -> bool:
    """Whether any TowerOptimizer applied gradients in this program."""
    return Tower._was_used

  def get_name(self) -> str:
    """The encapsulated optimizer's name."""
    return self._inner.name

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[Any],
    global_step: Any = None,
    name: str | None = None,
    **kwargs: Any,
  ) -> Any:
    """Collects gradients; they are applied when the last tower has returned.

    Args:
      grads_and_vars: Pairs of a gradient (dense, row-sparse or None) and its
        variable.
      global_step: An integer variable, incremented by one afterwards.
      name: The name scope of the operations, where the encapsulated optimizer
        takes one.
      **kwargs: What else the encapsulated optimizer takes.

    Returns:
      The iteration count after the update; in a tower of several, where the
      update is still to come, the count as it is.

    Raises:
      ValueError: If `grads_and_vars` is empty or malformed, or if this tower
        does other things than the first.
      TypeError: If a variable is none, `global_step` no integer variable, or
        the encapsulated optimizer takes no such argument.
    """
    grads, variables = validation.check_pairs(grads_and_vars)
    validation.check_global_step(global_step)
    # Now: found later, other optimizers would have applied.
    inspect.signature(self._inner.optimizer.apply_gradients).bind((), **kwargs)
    options = {"name": name, **kwargs}
    apply = functools.partial(
      self._apply, global_step=global_step, options=options
    )
    return self._collect_or(apply, grads, variables)

  @classmethod
  def _check_wrapper_within(
    cls, wrapper: forwarding.OptimizerWrapper, opt: Any
  ) -> None:
    """Allows towers of replicas, not towers of towers."""
    if isinstance(wrapper, Tower):
      super()._check_wrapper_within(wrapper, opt)
    elif wrapper is not opt:
      kind = type(opt).__name__
      raise ValueError(
        f"`{cls._argument}` must not be a {kind} around a CrossShardOptimizer,"
        " whose factor of the mean would be left out. Put it innermost:"
        f" TowerOptimizer(CrossShardOptimizer({kind}(...)))."
      )

  def build(self, variables: Any) -> None:
    """Makes the encapsulated optimizer's slots, once."""
    # Outside of the tower's scope, which tf_keras would name slots after.
    with gradient_collector.variables().paused(), tf.name_scope(""):
      super().build(variables)

  def check_known(self, variables: Sequence[Any]) -> None:
    """Raises an error if this cannot update variables; changes nothing."""
    optimizer = self._inner.optimizer
    if isinstance(optimizer, CrossShard):
      optimizer._checks.check_place()
    if self._inner.is_built:
      validation.check_known(variables, self._inner.knows)

  @tf.autograph.experimental.do_not_convert
  def prepare(self, variables: Sequence[Any]) -> None:
    """Makes the slots for all that a step updates, unless they are there."""
    if not self._inner.is_built:
      distinct = {id(variables_lib.native(v)): v for v in variables}
      self.build(list(distinct.values()))

  def _gradients(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: differentiation.GraphOptions,
  ) -> differentiation.Pairs:
    """Gradients, times the towers' factor."""
    towers = self._towers()
    factor = self._factor()
    own = None if towers is None else towers.tape
    tape = own if tape is None and tf.is_tensor(loss) else tape
    optimizer = self._inner.optimizer
    with own.stop_recording() if own else contextlib.nullcontext():
      if isinstance(optimizer, CrossShard):
        pairs = optimizer._gradients(loss, var_list, tape, default, options)
      else:
        pairs = differentiation.differentiate(
          self._inner,
          loss,
          var_list,
          tape,
          scale=lambda seed: seed,
          options=options,
          scalar=False,
        )
    # Not the loss, which no tape may be recording any more.
    is_overwritten = self._inner.is_overwritten
    return [
      (indexed_slices.times(grad, 1.0 if is_overwritten(v) else factor), v)
      for grad, v in pairs
    ]

  def _collect_or(
    self,
    apply: gradient_collector.Apply,
    grads: list[Any],
    variables: list[Any],
  ) -> Any:
    """Leaves `apply` to the last tower; does it now where there is but one."""
    towers = self._towers()

    def applied(grads: list[Any], variables: list[Any]) -> Any:
      result = apply(grads, variables)
      Tower._was_used = True
      return result

    if towers is None or towers.count == 1:
      self.check_known(variables)
      self.prepare(variables)
      with gradient_collector.variables().paused():
        return applied(grads, variables)
    towers.collect(gradient_collector.Call(self, grads, variables, applied))
    return tf.identity(self._inner.iterations())

  def _towers(self) -> gradient_collector.Towers | None:
    """The towers that this is called in, which have to train."""
    towers = gradient_collector.current()
    if towers is not None and not towers.trains:
      raise ValueError(
        '`model_fn` must call optimizers in the mode "train" only; it called'
        f" {self.get_name()} in another. Nothing was applied. Look at `mode`"
        " first."
      )
    return towers

  @tf.autograph.experimental.do_not_convert
  def _apply(
    self,
    grads: Sequence[Any],
    variables: Sequence[Any],
    global_step: Any,
    options: dict[str, Any],
  ) -> Any:
    """Lets the encapsulated optimizer apply."""
    optimizer = self._inner.optimizer
    if isinstance(optimizer, CrossShard):
      pairs = zip(grads, variables, strict=True)
      return optimizer.apply_gradients(pairs, global_step, **options)
    self._hand_on(grads, [self._inner.as_built(v) for v in variables], options)
    if global_step is not None:
      skips = self._inner.scales_dynamically
      is_step = nonfinite.all_finite(grads) if skips else True
      global_step.assign_add(tf.cast(is_step, global_step.dtype))
    return tf.identity(self._inner.iterations())

  def _factor(self) -> float:
    """The factor of the loss in this tower."""
    towers = gradient_collector.current()
    return 1.0 if towers is None else towers.scale(self._inner.optimizer)

  def _hand_on(
    self,
    grads: Sequence[Any],
    variables: Sequence[Any],
    options: dict[str, Any],
  ) -> None:
    """Calls the encapsulated optimizer; each Keras has its way."""
    raise NotImplementedError

  def _reduce_before(self, around: Any, methods: Any) -> None:
    """Refuses a loss scaling optimizer, which would see one tower only."""
    kind = type(around).__name__
    raise ValueError(
      f"{kind} must not encapsulate a TowerOptimizer: by the gradients of one"
      " tower it would decide whether a step has overflowed, not by their sum."
      f" Put it inside: TowerOptimizer({kind}(...)), and turn compile's own off"
      " with auto_scale_loss=False."
    )
