"""Each of n models with a layer of Keras trains as one plain model does.

The wheel of Keras 3.15 contains the tests of its layers. This file takes one
case for each class of layers. `tests.support.layer_conformance` explains how it
is trained, and runs all cases: `python -m tests.support.layer_conformance
--all`.
"""

import keras
import pytest
from packaging import version

from tests.support import layer_conformance, testbed

# Rounding may decide the numbers of plain fits of these classes.
MAY_ROUND = {
  # It moves the darkest and the brightest number of an image to 0 and 255, up
  # to rounding, and cuts off what is outside. Rounding decides whether these
  # two numbers have a gradient.
  "AutoContrast",
}
# The Keras that this is about. Others have other layers, or ship no tests.
IS_LISTED_FOR = version.Version(keras.__version__).release[:2] == (3, 15)
# Fewer means that tests are gone, or no longer found.
LEAST_CLASSES = 120

pytestmark = pytest.mark.skipif(
  testbed.IS_TF_KERAS or not (IS_LISTED_FOR or layer_conformance.files_of()),
  reason="this Keras ships no tests of its layers",
)


@pytest.mark.parametrize("name", layer_conformance.files_of())
def test_equals_plain_fits(name: str) -> None:
  result = layer_conformance.run_class(name)
  if result.outcome == "cannot train" and not IS_LISTED_FOR:
    pytest.skip(result.why)
  allowed = {"equal", "rounding"} if name in MAY_ROUND else {"equal"}
  assert result.outcome in allowed, f"{result.test}: {result.why}"


def test_most_classes_are_found() -> None:
  names = set(layer_conformance.files_of())
  assert names >= MAY_ROUND
  if IS_LISTED_FOR:
    assert len(names) >= LEAST_CLASSES
