"""The wrapper as an optimizer of Keras 3."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from tf_cross_shard._src.core import validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.facade import loss_scaler
from tf_cross_shard._src.core.facade import wrapper as wrapper_lib
from tf_cross_shard._src.core.keras3 import adapter, v1_optimizers

# Attributes from Keras' constructor that the wrapper keeps.
_OWN: Final = frozenset(
  ("name", "clipnorm", "global_clipnorm", "clipvalue", "_lock", "_tracker")
)


class Keras3Wrapper(wrapper_lib.OptimizerWrapper, keras.optimizers.Optimizer):
  """A Keras 3 optimizer that forwards everything except its step."""

  _package = "keras"
  _v1_classes = v1_optimizers

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    # Keras' constructor creates an iteration count, a learning rate and
    # settings. They are deleted below, so that `__getattr__` finds those of
    # `opt`. Create the two variables outside all strategies: otherwise, a
    # model function in towers would list them among its own variables.
    with variables_lib.outside_of_strategies():
      # Not super(), whose next class is the wrapper.
      keras.optimizers.Optimizer.__init__(
        self, learning_rate=0.0, name=name, **clipping
      )
    for attribute in set(vars(self)) - _OWN:
      if hasattr(opt, attribute) and not attribute.startswith("_self_"):
        del self.__dict__[attribute]
    self._wrap(adapter.Keras3Adapter(opt))

  def __setattr__(self, name: str, value: Any) -> None:
    """Forwards the assignment.

    The constructor of a LossScaleOptimizer around this optimizer assigns
    `loss_scale_factor`. Ours then replace its methods.
    """
    if name == "loss_scale_factor":
      kind = keras.optimizers.LossScaleOptimizer
      outer_loss_scaler = loss_scaler.find_caller(self, kind)
      if outer_loss_scaler is not None:
        apply = functools.partial(_build_and_apply, outer_loss_scaler, self)
        methods = {"scale_loss": self.scale_loss, "apply": apply}
        self._reduce_before(outer_loss_scaler, methods)
    super().__setattr__(name, value)

  @tf.autograph.experimental.do_not_convert
  def apply(
    self, grads: Sequence[Any], trainable_variables: Any = None
  ) -> None:
    """Takes a step, like `apply_gradients`, but with two lists; Keras calls it.

    In a custom loop, scale the loss with `scale_loss` first. Keras' losses are
    averaged over all replicas' examples, so a mean without groups needs no
    factor.

    Args:
      grads: This replica's gradients. An empty list does nothing.
      trainable_variables: The variables of the gradients. None means the
        variables that the optimizer was built on.

    Raises:
      ValueError: If the lists do not match or the optimizer is not built.
    """
    grads = list(grads)
    if not grads:
      return
    if trainable_variables is None:
      trainable_variables = self._wrapped.whole.trainable_variables
    trainable_variables = list(trainable_variables)
    if len(grads) != len(trainable_variables):
      raise ValueError(
        f"`grads` must contain one gradient per variable; got {len(grads)}"
        f" gradients for {len(trainable_variables)} variables. Pass the"
        " variables, or call build(variables) first."
      )
    pairs = zip(grads, trainable_variables, strict=True)
    self._apply_pairs(*validation.check_pairs(pairs))

  # Each kind of wrapper implements this method.
  _apply_pairs: Callable[[list[Any], list[Any]], None]


def _build_and_apply(
  outer_loss_scaler: Any, ours: Any, grads: Any, trainable_variables: Any = None
) -> None:
  """Builds the LossScaleOptimizer, then calls ours, which reduces first."""
  if not outer_loss_scaler.built:
    outer_loss_scaler.build(list(trainable_variables))
  ours.apply(grads, trainable_variables)
