"""Runs test files of other projects under one of our strategies."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

Tests = dict[str, dict[str, Any]]


def run(
  files: Sequence[pathlib.Path],
  root: pathlib.Path,
  strategy: str,
  options: Sequence[str] = (),
  environment: Mapping[str, str] | None = None,
  seconds: int = 600,
) -> Tests:
  """Runs tests in a process of their own.

  Args:
    files: The test files.
    root: The folder from which the names of tests start.
    strategy: "vectorized" or "mirrored": see `tests.support.peers`.
    options: More options for pytest.
    environment: More environment variables.
    seconds: After this time, the process is killed.

  Returns:
    For each test by name, its "outcome" and, if it failed, the "error". A test
    that the process did not finish is missing.
  """
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder, "report.json")
    command = [
      *(sys.executable, "-m", "pytest", "-q", "--tb=short"),
      *("-p", "tests.support.peers", f"--peer-strategy={strategy}"),
      f"--peer-report={report}",
      # Use no pytest settings of this project, and write no files next to
      # the tests.
      *("-c", os.devnull, "--rootdir", str(root), "-o", "python_classes="),
      *("--import-mode=importlib", "--assert=plain", "-p", "no:cacheprovider"),
      *options,
      *map(str, files),
    ]
    variables = {
      **os.environ,
      "PYTHONDONTWRITEBYTECODE": "1",
      "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
      "TF_CPP_MIN_LOG_LEVEL": "2",
      **(environment or {}),
    }
    variables.pop("PYTEST_ADDOPTS", None)
    process = subprocess.Popen(
      command,
      cwd=folder,
      env=variables,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    try:
      output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      process.kill()
      output, _ = process.communicate()
    if not report.exists():
      raise RuntimeError(output)
    tests: Tests = json.loads(report.read_text())
  return tests
