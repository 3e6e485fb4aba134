"""Names and numbers the slots of an optimizer as TensorFlow 1 did.

The slots of a weight "w" are "w/Adam", "w/Adam_1" and so on, in the order in
which the kernel of the optimizer takes them.
"""

from collections.abc import Mapping
from typing import Any

from tf_cross_shard._src.core.inner import kernels, v1


def is_without_momentum(optimizer: Any) -> bool:
  """Returns whether it is an SGD whose slots, which tf_keras creates, idle."""
  _, kind = _kind_of(optimizer)
  is_sgd = kind is not None and kind.keras == "SGD"
  is_v1 = isinstance(optimizer, v1.V1Update)
  return is_sgd and not is_v1 and not float(optimizer.momentum)


def name_and_factor(optimizer: Any) -> tuple[str, float]:
  """Returns TensorFlow 1's name of slots, and the factor of their values."""
  if isinstance(optimizer, v1.V1Update):
    return str(optimizer.name), 1.0  # type: ignore[attr-defined]
  name, kind = _kind_of(optimizer)
  is_momentum = kind is not None and kind.keras == "SGD"
  if not is_momentum or is_without_momentum(optimizer):
    return name, 1.0
  config = optimizer.get_config()
  if isinstance(config["learning_rate"], dict) or config.get("decay"):
    raise ValueError(
      f"`optimizer` is {type(optimizer).__name__}, whose momentum includes"
      " the learning rate of each step, but TensorFlow 1's momentum does not:"
      " it cannot be converted if the learning rate is a schedule. Pass what"
      " tf_cross_shard.migration.from_v1 returns for TensorFlow 1's optimizer."
    )
  # With the gradient g, the weight w and a constant rate:
  #   TensorFlow 1   a = momentum * a + g           w = w - rate * a
  #   Keras          v = momentum * v - rate * g    w = w + v
  # so v = -rate * a in every step.
  return name, -float(config["learning_rate"])


def numbers(optimizer: Any, slots: Mapping[str, Any]) -> dict[str, int]:
  """Returns the number of each slot among the slots of TensorFlow 1.

  It is empty for an optimizer that TensorFlow 1 did not have.
  """
  _, kind = _kind_of(optimizer)
  if kind is None:
    return {}
  centered = "Centered" if getattr(optimizer, "centered", False) else ""
  kernel = kernels.KERNELS[centered + kind.kernel]
  found: dict[str, int] = {}
  # A slot that Keras does not have is counted, too.
  for number, attribute in enumerate(kernel.slots.values()):
    of_all = set(map(id, getattr(optimizer, attribute, None) or ()))
    for name, slot in slots.items():
      if id(getattr(slot, "parts", slot)) in of_all:
        found[name] = number
  return found


def _kind_of(optimizer: Any) -> tuple[str, v1.Kind | None]:
  """Returns TensorFlow 1's name and kind of an optimizer that it also had."""
  for keras_class in type(optimizer).__mro__:
    if keras_class.__module__.split(".")[0] in ("keras", "tf_keras"):
      for v1_class, kind in v1.KINDS.items():
        if kind is not None and kind.keras == keras_class.__name__:
          return v1_class.__name__.removesuffix("Optimizer"), kind
  return "", None
