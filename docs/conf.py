"""Sphinx makes a site of README.md and docs/: `bash tools/docs.sh`.

The source directory is the project's root, so that pages read the same there
and in a checkout: their links lead to the same files.
"""

import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Before TensorFlow.

_ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(_ROOT))

import tf_cross_shard  # noqa: E402  # after the path above

project = "tf_cross_shard"
copyright = "the developers of tf_cross_shard"
version = release = tf_cross_shard.__version__

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**"]
exclude_patterns = ["docs/_templates", "docs/conf.py", "**/BUILD"]
nitpicky = False  # TensorFlow and Keras publish no inventory of their names.

html_theme = "furo"
html_title = "tf_cross_shard"
html_search_scorer = str(_ROOT / "docs" / "search_scorer.js")
copybutton_exclude = ".linenos, .gp, .go"  # No prompts and outputs.
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}

myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
suppress_warnings = ["myst.header"]  # CHANGELOG's sections begin at level 3.

# Docstrings are Google's, with `names` in single backquotes.
default_role = "code"
autoclass_content = "both"  # A constructor's arguments, too.
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # `Args` says it in words, with the shapes.
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def _skips(
  app: Any, what: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
  """Leaves out what TensorFlow's and Keras' classes bring along."""
  del app, what, options
  function = getattr(member, "fget", member)
  home = getattr(function, "__module__", None) or "tf_cross_shard"
  if name.startswith("_") or not home.startswith("tf_cross_shard"):
    return True
  return skip or None


def setup(app: Any) -> None:
  """Called by Sphinx."""
  app.connect("autodoc-skip-member", _skips)
