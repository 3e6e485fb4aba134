"""Local processes: their TF_CONFIG, their output, and the end of all."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tf_cross_shard_cli import __main__ as command
from tf_cross_shard_cli import launch

PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent.parent

# Its last line has no end.
SHOW = """
import json, os, sys
task = json.loads(os.environ["TF_CONFIG"])["task"]
print(*task.values(), sys.argv[1:], end="")
"""


def _launch(*words: str) -> int:
  return command.main(["launch", *words])


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


NODES = "--nodes=host0:12345,[fe80::1]:9"


@pytest.mark.parametrize(
  ("words", "workers"), [(["--workers=2"], [0, 1]), ([NODES, "--index=1"], [1])]
)
def test_a_command_line(
  words: list[str],
  workers: list[int],
  tmp_path: pathlib.Path,
  capfd: pytest.CaptureFixture[str],
) -> None:
  """All workers of this machine, or one of several machines."""
  program = tmp_path / "program.py"
  program.write_text(SHOW)
  assert _launch(*words, str(program), "--workers=9", "--index=9", "-m") == 0
  lines = capfd.readouterr().out.splitlines()
  assert sorted(line for line in lines if line.startswith("[")) == [
    f"[worker {i}] worker {i} ['--workers=9', '--index=9', '-m']"
    for i in workers
  ]


SLEEP = "import time; time.sleep(900)"

FAIL = """
import json, os, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["index"] == 1: raise SystemExit(3)
time.sleep(900)
"""


def test_a_failure_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
  begin = time.monotonic()
  assert launch.launch([sys.executable, "-c", FAIL], 2, grace=0.5) == 1
  assert time.monotonic() - begin < 300
  assert capfd.readouterr().err.splitlines() == [
    "worker 1 ended with code 3; the other workers have 0.5 s to end",
    "worker 0 ended with code -9",
    "worker 1 ended with code 3",
    "the first failure: worker 1, code 3: no exception was printed",
  ]


RAISE = """
import json, os, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["index"] == 1: time.sleep(1)
raise [KeyError, ValueError][task["index"]](f"in {task['index']}")
"""


def test_the_last_line_is_the_first_exception(
  capfd: pytest.CaptureFixture[str],
) -> None:
  assert launch.launch([sys.executable, "-c", RAISE], 2, grace=20) == 1
  assert capfd.readouterr().err.splitlines()[-1] == (
    "the first failure: worker 0, code 1: KeyError: 'in 0'"
  )


def test_time_that_is_up_ends_all() -> None:
  sleep = [sys.executable, "-c", SLEEP]
  begin = time.monotonic()
  assert launch.launch(sleep, 2, timeout=0.5) == 1
  assert time.monotonic() - begin < 300


# Starts a process, says which, and ends, or does not.
PARENT = """
import subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(900)"]
options = {"start_new_session": sys.argv[1] == "session"}
print("child", subprocess.Popen(child, **options).pid)
time.sleep(float(sys.argv[2]))
"""


def _has_ended(pid: int) -> bool:
  for _ in range(2000):
    try:
      # Nobody may be there to take the status of an orphan.
      if "\nState:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_text():
        return True
    except FileNotFoundError:
      return True
    time.sleep(0.05)
  return False


@pytest.mark.parametrize("kind", ["child", "session"])
def test_a_worker_ends_with_the_processes_it_started(
  kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(launch, "_LAST_LINES", 0.5)
  begin = time.monotonic()
  worker = [sys.executable, "-c", PARENT, kind, "0"]
  assert launch.launch(worker, 1) == 0
  assert time.monotonic() - begin < 300
  child = int(capfd.readouterr().out.split()[-1])
  if kind == "session":  # As a server that is to stay.
    os.kill(child, signal.SIGKILL)
  assert _has_ended(child)


def test_no_worker_outlives_a_killed_launch(tmp_path: pathlib.Path) -> None:
  program = tmp_path / "program.py"
  program.write_text(PARENT)
  words = ["launch", "--workers=2", str(program), "child", "60"]
  with subprocess.Popen(
    [sys.executable, "-m", "tf_cross_shard_cli", *words],
    env={**os.environ, "PYTHONPATH": str(PROJECT)},
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout
    started = [int(process.stdout.readline().split()[-1]) for _ in range(4)]
    process.kill()
  assert all(map(_has_ended, started))


def test_prints_the_command_of_each_machine(
  capsys: pytest.CaptureFixture[str],
) -> None:
  assert _launch(NODES, "train.py", "--name=two words") == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[::3] == ["# On host0:12345:", "# On [fe80::1]:9:"]
  assert lines[2::3] == ["python train.py '--name=two words'"] * 2
  for index, line in enumerate(lines[1::3]):
    shown = subprocess.run(
      ["bash", "-c", f"{line}; echo $TF_CONFIG"],
      capture_output=True,
      check=True,
    )
    assert json.loads(shown.stdout) == {
      "cluster": {"worker": ["host0:12345", "[fe80::1]:9"]},
      "task": {"type": "worker", "index": index},
    }


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["--workers=0", "x.py"], "--workers must be at least 1; got 0"),
    (["--workers=2"], "PROGRAM is missing"),
    (["--nodes=host", "x.py"], "such as host0:12345; got 'host'"),
    (["--nodes=a:1,a:1", "x.py"], "each address once; got a:1,a:1"),
    (["--index=1", "x.py"], "--index needs --nodes. It is the position"),
    (["--nodes=a:1", "--index=1", "x.py"], r"in range(1), since"),
  ],
)
def test_wrong_options(
  words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
  assert _launch(*words) == 2
  assert said in capsys.readouterr().err


def test_an_interrupted_command_says_so(
  monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
  def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt

  monkeypatch.setattr(launch, "wait", interrupt)
  begin = time.monotonic()
  assert _launch("--workers=1", "-m", "timeit", "-n1", "-s", SLEEP) == 130
  assert time.monotonic() - begin < 300
  captured = capfd.readouterr()
  assert captured.err == "interrupted; all workers have ended\n"
  assert _has_ended(int(captured.out.split()[-1]))
