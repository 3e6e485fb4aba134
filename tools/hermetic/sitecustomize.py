"""Hides the installed copy of this project from Bazel's tests.

A test shall see what its target depends on and no more, but .venv holds an
editable installation, and its finder supplies any module of the package that
is missing in the runfiles: `tf_cross_shard` comes from there, a forgotten
`tf_cross_shard.groups` from the sources, and the test passes.

Python imports a module of this name when it starts, right after the .pth files
of .venv. Doing this in conftest.py would come too late for what a test imports
at its top, and not at all for the processes that a test starts.
"""
# bazel: imports=.

import os
import sys

_PACKAGE = "tf_cross_shard"
_RUNFILES = os.environ.get("TEST_SRCDIR", "")

if _RUNFILES:
  sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if f"__editable___{_PACKAGE}" not in getattr(finder, "__module__", "")
  ]
  sys.path[:] = [
    entry
    for entry in sys.path
    if entry.startswith(_RUNFILES)
    or not os.path.exists(os.path.join(entry, _PACKAGE, "__init__.py"))
  ]
