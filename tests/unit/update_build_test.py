"""What a `# bazel:` line may say; what is written of it is in build_test.py."""
# bazel: size=small

from pathlib import Path

import pytest

from tools import update_build

FILE = Path("tests/b_test.py")
LINES = "# bazel: size=large data=//:sources\n# bazel: deps=//a:b,//c\n"


def test_lines_add_up() -> None:
  assert update_build.options(FILE, LINES) == {
    "size": "large",
    "data": "//:sources",
    "deps": "//a:b,//c",
  }


@pytest.mark.parametrize(
  ("line", "error"),
  [
    ("size=small", r"b_test.py: .* size= to 'large' and to 'small'\. Write"),
    ("sise=small", r"b_test.py: 'sise=small' .* not one of size="),
    ("size=", r"b_test.py: 'size=' .* not one of size="),
  ],
  ids=["twice", "unknown", "empty"],
)
def test_lines_that_are_refused(line: str, error: str) -> None:
  with pytest.raises(update_build.Error, match=error):
    update_build.options(FILE, f"{LINES}# bazel: {line}\n")


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
