"""What is known about the optimizer classes of Keras, by their names."""

from typing import Any, Final

# Keras' classes whose update of an element depends only on that element.
ELEMENTWISE: Final = (
  *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
  *("Ftrl", "Lion", "Nadam", "RMSprop", "SGD"),
)
# Keras' classes whose update uses whole variables.
_NOT_ELEMENTWISE: Final = ("Adafactor", "Lamb", "Muon", "ScheduleFreeAdamW")


def keras_class(optimizer: Any) -> str:
  """Returns the name of an optimizer's class of Keras; "" for other classes."""
  return name_in_keras(type(optimizer))


def name_in_keras(kind: type[Any]) -> str:
  """Returns the name of a class of Keras; "" for other classes."""
  library, *place = kind.__module__.split(".")
  is_keras = library in ("keras", "tf_keras") and len(place) == 3
  is_optimizer = is_keras and place[:2] == ["src", "optimizers"]
  return kind.__name__ if is_optimizer else ""


def check_is_one(optimizer: Any, argument: str) -> None:
  """Raises `ValueError` for a MultiOptimizer, which has several optimizers."""
  if "MultiOptimizer" in map(name_in_keras, type(optimizer).__mro__):
    raise ValueError(
      f"`{argument}` must not be or contain Keras' MultiOptimizer, which passes"
      " gradients on to other optimizers. Wrap each of these optimizers, with"
      " scale_gradients=True, and create a MultiOptimizer of the results."
    )


def check_elementwise(optimizer: Any, argument: str, value: bool | str) -> None:
  """Raises `ValueError` unless the update of each element uses only it."""
  name = keras_class(optimizer)
  if name in _NOT_ELEMENTWISE:
    raise ValueError(
      f"`{argument}` is {value!r}, but {name} uses norms, shapes or settings of"
      f" whole variables, and would compute wrong numbers. Remove `{argument}`."
    )
  if value is True and name not in ELEMENTWISE:
    raise ValueError(
      f"`{argument}` is True, but {type(optimizer).__name__} may use norms or"
      f" shapes of whole variables. Use one of {', '.join(ELEMENTWISE)}, or"
      f' pass {argument}="elementwise" if each element of your class\'s update'
      " depends only on that element."
    )
