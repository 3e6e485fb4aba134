"""A Keras 3 optimizer that is another one in all but its update step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from tf_cross_shard import validation
from tf_cross_shard.keras3 import adapter
from tf_cross_shard.replica_state import group_models
from tf_cross_shard.wrapper import forwarding, loss_scaling

# Attributes that Keras' constructor makes and that stay the wrapper's own.
_OWN: Final = frozenset(
  ("name", "clipnorm", "global_clipnorm", "clipvalue", "_lock", "_tracker")
)


class Keras3Wrapper(forwarding.OptimizerWrapper, keras.optimizers.Optimizer):
  """A Keras 3 optimizer that is another one in all but its update step."""

  _package = "keras"

  def __init__(self, opt: Any, name: str, **clipping: float | None) -> None:
    # Keras makes a count, a rate and settings of its own. Without them
    # __getattr__ finds the encapsulated optimizer's. A model function in towers
    # would list the two variables among its own.
    with group_models.outside_of_strategies():
      # Not super(), whose next class is the wrapper.
      keras.optimizers.Optimizer.__init__(
        self, learning_rate=0.0, name=name, **clipping
      )
    for attribute in set(vars(self)) - _OWN:
      if hasattr(opt, attribute) and not attribute.startswith("_self_"):
        del self.__dict__[attribute]
    self._encapsulate(adapter.Keras3Optimizer(opt))

  def __setattr__(self, name: str, value: Any) -> None:
    """Writes where the attribute is; notices who encapsulates this one."""
    if name == "loss_scale_factor":
      kind = keras.optimizers.LossScaleOptimizer
      around = loss_scaling.find_caller(self, kind)
      if around is not None:
        apply = functools.partial(_build_and_apply, around, self)
        methods = {"scale_loss": self.scale_loss, "apply": apply}
        self._reduce_before(around, methods)
    super().__setattr__(name, value)

  @tf.autograph.experimental.do_not_convert
  def apply(
    self, grads: Sequence[Any], trainable_variables: Any = None
  ) -> None:
    """Applies gradients as Keras calls it: `apply_gradients` with two lists.

    In your own loop scale the loss with `scale_loss` first. Keras' losses are
    averaged over all replicas' examples, so an ungrouped mean needs no factor.

    Args:
      grads: This replica's gradients; an empty list does nothing.
      trainable_variables: Their variables. None means those that the
        optimizer was built on.

    Raises:
      ValueError: If the lists do not match or the optimizer is not built.
    """
    grads = list(grads)
    if not grads:
      return
    if trainable_variables is None:
      trainable_variables = self._inner.unsharded_state.trainable_variables
    trainable_variables = list(trainable_variables)
    if len(grads) != len(trainable_variables):
      raise ValueError(
        f"`grads` must hold one gradient per variable; got {len(grads)}"
        f" gradients for {len(trainable_variables)} variables. Pass the"
        " variables, or call build(variables) first."
      )
    pairs = zip(grads, trainable_variables, strict=True)
    self._apply_pairs(*validation.check_pairs(pairs))

  # Each kind of wrapper has its way.
  _apply_pairs: Callable[[list[Any], list[Any]], None]


def _build_and_apply(
  around: Any, ours: Any, grads: Any, trainable_variables: Any = None
) -> None:
  """Does what `around.apply` does, which builds it, but reduces first."""
  if not around.built:
    around.build(list(trainable_variables))
  ours.apply(grads, trainable_variables)
