"""What differs between Keras 3 and tf_keras when our wrapper is created.

The wrapper calls Keras' constructor, and serializes the user's optimizer.
"""

import abc
import sys
from typing import Any

from tf_cross_shard._src.core.keras_types import Optimizer
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class Binding(abc.ABC):
  """Binds facades to Keras 3 or to tf_keras.

  Attributes:
    package: "keras" or "tf_keras".
  """

  package: str

  @property
  def keras(self) -> Any:
    return sys.modules[self.package]

  @abc.abstractmethod
  def start(
    self, facade: Any, opt: Optimizer, name: str, limits: dict[str, Any]
  ) -> wrapped_lib.WrappedOptimizer:
    """Does what Keras' constructor does; returns `opt`, wrapped."""

  def serialize(self, opt: Optimizer) -> Any:
    return self.keras.saving.serialize_keras_object(opt)

  def deserialize(self, config: Any, custom_objects: Any) -> Any:
    """Returns the optimizer that a dictionary describes, not built."""
    # Do not use optimizers.deserialize, which does not know Lamb in Keras 3.
    return self.keras.saving.deserialize_keras_object(config, custom_objects)
