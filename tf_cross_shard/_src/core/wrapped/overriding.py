"""Temporarily overrides attributes of an optimizer.

`docs/design.md` lists every attribute that is overridden during `build` or a
step, and why.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def overriding(target: Any, **attributes: Any) -> Iterator[None]:
  """Overrides attributes of an object inside the context."""
  # In its `__dict__`, so that no property or `__setattr__` of its class runs:
  # Keras tracks what is assigned.
  present = vars(target)
  before = {name: present[name] for name in attributes if name in present}
  present.update(attributes)
  try:
    yield
  finally:
    # Do not remove attributes that the object had, because that would change
    # the order in which `optimizer.slots_at` searches for slots.
    for name in attributes:
      if name in before:
        present[name] = before[name]
      else:
        present.pop(name, None)
