"""Runs the examples as a user runs them, and checks what they print.

examples/multi_worker.py, migration/ and towers.py (with four towers and with
one) run in tests of their own.
"""

import re
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import optuna
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.support import programs

PROJECT = programs.PROJECT
EXAMPLES = PROJECT / "examples"
PNG_START = b"\x89PNG\r\n\x1a\n"


class Row(NamedTuple):
  """A line of the table that the examples end with."""

  run: str
  group: str
  replicas: str
  rate: float | None
  accuracy: float  # in percent
  inside: float | None
  between: float | None


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


def read_table(output: str) -> list[Row]:
  lines = output.splitlines()
  (start,) = (i for i, line in enumerate(lines) if line.startswith("---"))
  rows = []
  for line in lines[start + 1 :]:
    cells = re.split(r"\s{2,}", line)
    if len(cells) != len(Row._fields):
      break
    run, group, replicas, *numbers = cells
    rate, accuracy, inside, between = (
      None if number == "-" else float(number.removesuffix("%"))
      for number in numbers
    )
    assert accuracy is not None
    rows.append(Row(run, group, replicas, rate, accuracy, inside, between))
  return rows


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Returns a folder for the prepared digits, which the tests share."""
  return tmp_path_factory.mktemp("data")


def test_digits_trains_one_model_and_many(data_dir: Path) -> None:
  output = run_example(
    "digits.py",
    data_dir,
    *("--replicas=2", "--epochs=3", "--shard_update"),
    *("--learning_rates=0.0001,0.004,0.004", "--logs=logs"),
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
  for run in ("group_0", "group_1", "group_2", "ensemble"):
    assert list((data_dir / "logs" / run).iterdir())
  content = (data_dir / "digits.png").read_bytes()
  assert content.startswith(PNG_START)
  assert len(content) > 10_000


def test_custom_loop_is_right_with_either_loss(data_dir: Path) -> None:
  output = programs.run(
    [
      "-c",
      f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import custom_loop
custom_loop.flags.FLAGS(sys.argv)
for loss in ("plain", "keras"):
  custom_loop.flags.FLAGS.loss = loss
  custom_loop.tf.keras.utils.set_random_seed(0)
  custom_loop.main([""])
""",
      *("--epochs=2", f"--data_dir={data_dir}"),
    ],
    data_dir,
  )
  start = checked(output).rindex(
    "replica  0  1  2  3"
  )  # Of the second run's output.
  plain, keras = read_table(output[:start]), read_table(output[start:])
  assert [row[:3] for row in plain] == [
    ("plain loss", "0", "0 1"),
    ("plain loss", "1", "2 3"),
    ("plain loss", "all", "their mean prediction"),
  ]
  assert min(row.accuracy for row in plain) >= 85, output
  assert [row.inside for row in plain] == [0, 0, None]
  assert plain[0].between is not None
  assert plain[0].between > 0
  # The clipping was at work, on some replicas and not on others.
  assert re.search(r"; [1-9]\d?% of the gradients clipped", output)
  # The factors are powers of two, so that the weights are equal to the bit.
  for one, other in zip(plain, keras, strict=True):
    assert one.accuracy == other.accuracy
    assert one.between == other.between
  picture = data_dir / "custom_loop.png"
  assert picture.read_bytes().startswith(PNG_START)


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
  picture = data_dir / "recommender.png"
  assert picture.read_bytes().startswith(PNG_START)


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
  rows = read_table(output)
  assert [row[:3] for row in rows] == [
    ("virtual TPU", "0", "0 1 2 3"),
    ("virtual TPU", "1", "4 5 6 7"),
    ("virtual TPU", "all", "their mean prediction"),
  ]
  assert min(row.accuracy for row in rows) >= 80, output
  assert all(row.inside == 0 for row in rows[:2])
  assert all(row.between for row in rows[:2])
  # A line of each epoch has the accuracies; the table has those of the last.
  *_, last = re.findall(r"^val_accuracy: .*", output, re.MULTILINE)
  for row, name in zip(rows, ("group_0", "group_1", "ensemble"), strict=True):
    [shown] = re.findall(rf" {name} ([\d.]+)", last)
    assert float(shown) == round(row.accuracy / 100, 4)
  # The report of the compiler has one merged sum; tpu_program_test.py has more.
  assert "v5e:4x2: 8 replicas on TPU v5 lite\n" in output
  assert re.search(r"^collectives +1$", output, re.MULTILINE)
  assert (data_dir / "tpu.png").read_bytes().startswith(PNG_START)


# Each example in one process, one after the other.
COMMAND_LINES = """
import runpy, sys
from absl import app, flags
app.define_help_flags()
for line in open("lines").read().splitlines():
  file, *arguments = line.split()
  before = set(flags.FLAGS)
  sys.argv = [file, *arguments]
  sys.path.insert(0, file.rpartition("/")[0])
  try:
    runpy.run_path(file, run_name="__main__")
    status = "trained"
  except SystemExit as error:
    status = error.code
  print(f"status of {line}: {status}", flush=True)
  for name in set(flags.FLAGS) - before:
    delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()
  for name in ("command_line", "digits_batches", "group_history"):
    sys.modules.pop(name, None)
  del sys.path[0]
"""


def test_help_succeeds_and_wrong_flags_end_before_training(
  tmp_path: Path,
) -> None:
  names = [
    path.relative_to(EXAMPLES).as_posix()
    for path in sorted(EXAMPLES.rglob("*.py"))
    if "command_line.run(main)" in path.read_text()
  ]
  assert {"tpu.py", "migration/after.py"} < set(names)
  expected = {f"{name} --help": 0 for name in names}
  for name in names:
    if "define_picture(" in (EXAMPLES / name).read_text():
      expected[f"{name} --picture=none/such.png"] = 1
  expected["multi_worker.py --workers=3 --groups=2"] = 1
  expected["multi_worker.py --workers=5"] = 1  # Do not divide the batch.
  lines = "\n".join(f"{EXAMPLES}/{line}" for line in expected)
  (tmp_path / "lines").write_text(lines)
  output = programs.run(["-c", COMMAND_LINES], tmp_path)
  found = dict(re.findall(r"status of (?:\S*?)/examples/(.*): (.*)", output))
  assert found == {line: str(code) for line, code in expected.items()}, output
  assert "must be a file in a folder that exists" in output
  assert "--groups must divide 3, the replicas of all workers" in output


def test_two_processes_share_a_search(data_dir: Path) -> None:
  flags = ["--trials=6", "--models=3", "--epochs=2"]
  path = f"--folder={data_dir}/search"
  command = [str(EXAMPLES / "search_digits.py"), *flags, path]
  command += [f"--data_dir={data_dir}", f"--picture={data_dir}/other.png"]
  with programs.started(command, data_dir) as finish:
    output = run_example("search_digits.py", data_dir, *flags, path)
    finish()
  [(count, best)] = re.findall(
    r"The best of (\d+) trials has ([\d.]+)%", output
  )
  assert 6 <= int(count) <= 12
  assert float(best) > 50
  found = tf.keras.models.load_model(data_dir / "search/best.keras")
  assert found.count_params() == 8_970
  journal = optuna.storages.journal.JournalFileBackend(
    str(data_dir / "search/study.log")
  )
  [study] = optuna.get_all_study_summaries(
    optuna.storages.JournalStorage(journal)
  )
  assert study.n_trials == 12
