"""The facade as an optimizer of Keras 3."""

from typing import Any, Final

import keras

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.facade import facade

# Attributes from Keras' constructor that the facade keeps.
_KEPT: Final = frozenset(
  ("name", "clipnorm", "global_clipnorm", "clipvalue", "_lock", "_tracker")
)


class Keras3Facade(facade.Facade, keras.optimizers.Optimizer):
  """A Keras 3 optimizer that forwards everything except its step."""

  _package = "keras"

  def _start(self, opt: Any, name: str, limits: dict[str, Any]) -> None:
    # Keras' constructor creates an iteration count, a learning rate and
    # settings. They are deleted below, so that `__getattr__` finds those of
    # `opt`. Create the two variables outside all strategies: otherwise, a
    # model function in towers would list them among its own variables.
    with variables_lib.outside_of_strategies():
      keras.optimizers.Optimizer.__init__(
        self, learning_rate=0.0, name=name, **limits
      )
    for attribute in set(vars(self)) - _KEPT:
      if hasattr(opt, attribute) and not attribute.startswith("_self_"):
        del self.__dict__[attribute]
