"""Local processes: their TF_CONFIG, their output, and the end of all."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tf_cross_shard.multi_worker import launch

SHOW = """
import json, os, sys
print(*json.loads(os.environ["TF_CONFIG"])["task"].values(), sys.argv[1:])
"""


def test_a_cluster_on_ports_of_its_own() -> None:
  configs = [json.loads(each["TF_CONFIG"]) for each in launch.cluster(3, True)]
  addresses = [a for those in configs[0]["cluster"].values() for a in those]
  assert len(set(addresses)) == 3
  assert [each["cluster"] for each in configs] == [configs[0]["cluster"]] * 3
  assert [tuple(each["task"].values()) for each in configs] == [
    ("chief", 0),
    ("worker", 0),
    ("worker", 1),
  ]


def test_a_command_line(
  tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
  program = tmp_path / "program.py"
  program.write_text(SHOW)
  assert launch.main(["--workers=2", str(program), "--workers=9", "-m"]) == 0
  lines = capfd.readouterr().out.splitlines()
  for i in range(2):
    assert f"[worker {i}] worker {i} ['--workers=9', '-m']" in lines
  assert launch.main(["--workers=1", "-m", "this"]) == 0
  assert "[worker 0] The Zen of Python" in capfd.readouterr().out


FAIL = """
import json, os, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["index"] == 1: raise SystemExit(3)
time.sleep(60)
"""


def test_a_failure_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
  begin = time.monotonic()
  assert launch.launch([sys.executable, "-c", FAIL], 2, grace=0.5) == 1
  assert time.monotonic() - begin < 30
  said = capfd.readouterr().err
  assert "worker 1 ended with 3" in said
  assert "worker 0 ended with -9" in said


def test_time_that_is_up_ends_all() -> None:
  sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
  begin = time.monotonic()
  assert launch.launch(sleep, 2, timeout=0.5) == 1
  assert time.monotonic() - begin < 30


def test_an_interrupt_ends_all() -> None:
  """As when somebody presses Ctrl-C."""
  process = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(60)"]
  )
  with pytest.raises(KeyboardInterrupt), launch.killed_at_end([process]):
    raise KeyboardInterrupt
  assert process.returncode == -9
  with pytest.raises(ProcessLookupError):
    os.kill(process.pid, 0)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
