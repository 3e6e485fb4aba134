"""The two Kerases, asked for what no public method of theirs tells.

The private names of a Keras stand in the folder of that Keras, `keras3/` or
`tf_keras/`, which registers its `Library` when it is imported.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final


class Library:
  """One Keras; this one knows of nothing private.

  Attributes:
    package: The name of the package, "keras" or "tf_keras".
  """

  package = ""

  def layers(self, model: Any) -> list[Any]:
    """Returns a model and all layers within it, nested ones too."""
    return [model]

  def compile_arguments(self, model: Any) -> dict[str, Any] | None:
    """Returns what a model was compiled with; None if it was not."""
    del model
    return None

  def nested(self, optimizer: Any) -> Sequence[Any]:
    """Returns the optimizers that one keeps for some of its variables each."""
    del optimizer
    return ()

  def learning_rates(self, optimizer: Any) -> list[Any]:
    """Returns what an optimizer keeps as its rate: a variable or a schedule."""
    del optimizer
    return []

  def unlisted(self, optimizer: Any) -> list[Any]:
    """Returns state that an optimizer's own list of variables leaves out."""
    del optimizer
    return []

  def trained(self, optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built on."""
    del optimizer
    return []

  def accumulated(self, optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer adds gradients up in."""
    del optimizer
    return []

  def is_built(self, optimizer: Any) -> bool:
    """Whether the slots exist."""
    return bool(getattr(optimizer, "built", False))


_libraries: Final[dict[str, Library]] = {}


def register(library: Library) -> None:
  """Makes a Keras known."""
  _libraries[library.package] = library


def of(thing: Any) -> Library:
  """Returns the Keras that an optimizer, a layer or a model is of."""
  for kind in type(thing).__mro__:
    library = _libraries.get(kind.__module__.split(".")[0])
    if library is not None:
      return library
  return Library()


@contextlib.contextmanager
def replacing(
  optimizer: Any, method: str, function: Callable[..., Any]
) -> Iterator[None]:
  """Puts a function in the place of an optimizer's method.

  Args:
    optimizer: The optimizer.
    method: The name of its method.
    function: It is handed the method before the method's arguments.
  """
  before = vars(optimizer).get(method)
  vars(optimizer)[method] = functools.partial(
    function, getattr(optimizer, method)
  )
  try:
    yield
  finally:
    del vars(optimizer)[method]
    if before is not None:
      vars(optimizer)[method] = before
