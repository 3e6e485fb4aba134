"""Runs the examples as a user runs them, and checks what they print.

examples/multi_worker.py, migration/ and towers.py (with four towers and with
one) run in tests of their own.
"""

import re
from pathlib import Path
from unittest import mock

import pytest
import tensorflow_datasets as tfds

from tests.support import programs

PROJECT = programs.PROJECT
EXAMPLES = PROJECT / "examples"
PNG_START = b"\x89PNG\r\n\x1a\n"


def run_example(name: str, data_dir: Path, *arguments: str) -> str:
  """Runs an example in a different folder.

  Returns the output, and checks that this package has logged no warning.
  """
  command = [str(EXAMPLES / name), f"--data_dir={data_dir}", *arguments]
  return checked(programs.fork(command, data_dir))


def checked(output: str) -> str:
  """Returns `output`. Checks that it has no warning of this package."""
  own = "|".join(x.name for x in PROJECT.glob("tf_cross_shard/**/*.py"))
  warned = rf"(?m)^(W\d{{4}} .* ({own}):|WARNING:absl)(?!.*evaluate\(\))"
  assert not re.search(warned, output), output
  return output


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns a folder for the prepared digits, which the tests share."""
  return tmp_path_factory.mktemp("data")


def test_digits_trains_one_model_and_many(data_dir: Path) -> None:
  output = run_example(
    "digits.py",
    data_dir,
    *("--replicas=2", "--epochs=3", "--learning_rates=0.0001,0.004,0.004"),
  )
  rows = re.findall(r"(?m)^(.*?) {2,}([\d.]*) +([\d.]+)%", output)
  assert [row[:2] for row in rows] == [
    ("one model, 2 replicas", "0.004"),
    ("model 0 of 3", "0.0001"),
    ("model 1 of 3", "0.004"),
    ("model 2 of 3", "0.004"),
    ("their mean prediction", ""),
  ]
  one, slow, best, same, _ = (float(row[2]) for row in rows)
  assert min(one, best) >= 85 > slow, output
  # All models start with the same weights, and see the same batches.
  assert same == best, output
  one_fit, separate = re.findall(r"(?m)^3 .* fits? +([\d.]+) s$", output)
  assert float(one_fit) > 0
  assert float(separate) > 0
  assert "The best learning rate is 0.004." in output
  content = (data_dir / "digits.png").read_bytes()
  assert content.startswith(PNG_START)
  assert len(content) > 10_000


def test_custom_loop_clips_and_learns(data_dir: Path) -> None:
  output = run_example("custom_loop.py", data_dir, "--epochs=3")
  last = re.findall(r"epoch 3: .* accuracy ([\d.]+)% ([\d.]+)%", output)
  [(first, second)] = last
  assert min(float(first), float(second)) >= 85, output
  assert first != second
  # The clipping was at work, on some replicas and not on others.
  assert re.search(r": [1-9]\d?% of the gradients clipped", output)


def test_recommender_learns(data_dir: Path) -> None:
  flags = ["--replicas=2", "--groups=2", "--items=2000", "--epochs=2"]
  output = run_example("recommender.py", data_dir, *flags)
  assert "59,500 clicks of 200 queries on 2,000 items" in output
  [(plain, first, second)] = re.findall(
    r"plain Keras: .* recall@10 ([\d.]+)%; .*\n(?:.*\n)*"
    r"ours: .* recall@10 ([\d.]+)%, ([\d.]+)%; ",
    output,
  )
  # Ten items at random are right in 0.5 %, the ten most popular in 4 %.
  assert min(float(plain), float(first), float(second)) >= 15, output


def _write_movielens(folder: Path, users: int, movies: int) -> None:
  """Writes the three files of MovieLens 100K that TFDS reads.

  Each user has rated all movies.
  """
  folder.mkdir(parents=True)
  genres = "|".join("1" * 19)
  (folder / "u.item").write_text(
    "".join(
      f"{i}|Movie {i} (1995)|01-Jan-1995||http://x|{genres}\n"
      for i in range(1, movies + 1)
    )
  )
  (folder / "u.user").write_text(
    "".join(f"{i}|24|M|writer|85711\n" for i in range(1, users + 1))
  )
  (folder / "u.data").write_text(
    "".join(
      f"{user}\t{movie}\t3\t881250949\n"
      for user in range(1, users + 1)
      for movie in range(1, movies + 1)
    )
  )


def test_recommender_reads_movielens(tmp_path: Path) -> None:
  """TFDS prepares files in the format of MovieLens; it downloads nothing."""
  _write_movielens(tmp_path / "extracted/ml-100k", users=50, movies=24)
  data_dir = tmp_path / "data"
  data_dir.mkdir()
  builder = tfds.builder("movielens/100k-ratings", data_dir=data_dir)
  with mock.patch.object(
    tfds.download.DownloadManager,
    "download_and_extract",
    return_value=str(tmp_path / "extracted"),
  ):
    builder.download_and_prepare()
  flags = ["--batch_size=64", "--epochs=2"]
  output = run_example("recommender.py", data_dir, *flags)
  assert "No MovieLens found" not in output
  assert "700 clicks of 50 queries on 24 items" in output
  assert re.search(r"ours: loss [\d.]+; recall@10 [\d.]+%;", output), output


def test_tpu_reports_and_trains(data_dir: Path) -> None:
  arguments = ["--virtual=8", "--groups=2", "--epochs=3"]
  output = run_example("tpu.py", data_dir, *arguments)
  found = dict(re.findall(r"(?m)^val_accuracy/(\w+) ([\d.]+)%$", output))
  assert set(found) == {"group_0", "group_1", "ensemble"}
  assert min(map(float, found.values())) >= 80, output
  assert found["group_0"] != found["group_1"]
  # The report of the compiler has one merged sum; tpu_program_test.py has more.
  assert "v5e:4x2: 8 replicas on TPU v5 lite\n" in output
  assert re.search(r"^collectives +1$", output, re.MULTILINE)


# Each example in one process, one after the other.
COMMAND_LINES = """
import runpy, sys
for line in open("lines").read().splitlines():
  file, *arguments = line.split()
  sys.argv = [file, *arguments]
  sys.path.insert(0, file.rpartition("/")[0])
  try:
    runpy.run_path(file, run_name="__main__")
    status = "trained"
  except SystemExit as error:
    status = error.code
  print(f"status of {line}: {status}", flush=True)
  del sys.path[0]
"""


def test_help_succeeds_and_wrong_flags_end_before_training(
  tmp_path: Path,
) -> None:
  names = [
    path.relative_to(EXAMPLES).as_posix()
    for path in sorted(EXAMPLES.rglob("*.py"))
    if "__main__" in path.read_text()
  ]
  assert {"tpu.py", "migration/after.py"} < set(names)
  expected = {f"{name} --help": "0" for name in names}
  expected["digits.py --picture=none/such.png"] = "2"
  expected["towers.py --epochs=0"] = "2"
  expected["migration/after.py --folder=x --replicas=3"] = "2"
  divide = "--groups must divide {}, the replicas of all workers, and .*"
  expected["multi_worker.py --workers=3 --groups=2"] = divide.format(3)
  expected["multi_worker.py --workers=5"] = divide.format(5)  # Nor the batch.
  lines = "\n".join(f"{EXAMPLES}/{line}" for line in expected)
  (tmp_path / "lines").write_text(lines)
  output = programs.run(["-c", COMMAND_LINES], tmp_path)
  found = dict(re.findall(r"status of (?:\S*?)/examples/(.*): (.*)", output))
  assert found.keys() == expected.keys(), output
  for line, status in expected.items():
    assert re.fullmatch(status, found[line]), output
  assert "must be a file in a folder that exists" in output
  assert "must be at least 1; got 0" in output
