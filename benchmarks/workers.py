"""Starts a benchmark as several workers on this machine."""

import json
import pathlib
import sys
import tempfile
from typing import Any

from tf_cross_shard_cli import launch


def start(count: int, timeout: float) -> dict[str, Any]:
  """Starts this program as workers; returns what the first of them measured.

  Each worker has the arguments of this process. The first worker writes its
  results to the file of the flag `--json`.

  Args:
    count: The number of workers.
    timeout: Seconds until the workers are killed as hung.

  Raises:
    RuntimeError: If the workers failed or were killed.
  """
  with tempfile.TemporaryDirectory() as folder:
    result = pathlib.Path(folder, "result.json")
    command = [sys.executable, *sys.argv, f"--json={result}"]
    launch.launch(command, count, timeout=timeout)
    if not result.exists():
      raise RuntimeError(
        f"The {count} workers failed or were killed; see their output above."
      )
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured
