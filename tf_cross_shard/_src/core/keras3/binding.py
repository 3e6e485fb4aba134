"""Makes our wrapper an optimizer of Keras 3; see `facade.binding`."""

from typing import Any, Final

import keras

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.facade import binding
from tf_cross_shard._src.core.keras3 import adapter
from tf_cross_shard._src.core.keras_types import Optimizer

# Attributes from Keras' constructor that the facade keeps.
_KEPT: Final = frozenset(
  ("name", "clipnorm", "global_clipnorm", "clipvalue", "_lock", "_tracker")
)


class Keras3Binding(binding.Binding):
  """Binds facades to Keras 3."""

  package = "keras"

  def start(
    self, facade: Any, opt: Optimizer, name: str, limits: dict[str, Any]
  ) -> adapter.Keras3Adapter:
    # Keras' constructor creates an iteration count, a learning rate and
    # settings. They are deleted below, so that `__getattr__` finds those of
    # `opt`. Create the two variables outside all strategies: otherwise, a
    # model function in towers would list them among its own variables.
    with variables_lib.outside_of_strategies():
      keras.optimizers.Optimizer.__init__(
        facade, learning_rate=0.0, name=name, **limits
      )
    for attribute in set(vars(facade)) - _KEPT:
      if hasattr(opt, attribute) and not attribute.startswith("_self_"):
        del facade.__dict__[attribute]
    return adapter.Keras3Adapter(opt)


BINDING: Final = Keras3Binding()
