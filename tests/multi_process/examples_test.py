"""The examples run as a user runs them, and end with what they promise."""
# bazel: timeout=long
# bazel: deps=//examples:custom_loop,//examples:digits,//examples:tpu

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = Path(__file__).absolute().parent.parent.parent
EXAMPLES = PROJECT / "examples"
PNG_START = b"\x89PNG\r\n\x1a\n"


class Row(NamedTuple):
  """A line of the table that both examples end with."""

  run: str
  group: int
  replicas: str
  accuracy: float  # in percent
  seconds: float
  inside: float
  between: float | None


def run_example(name: str, data_dir: Path, *arguments: str) -> str:
  """Runs an example in another folder than its own; returns its output."""
  # The folder of the test's own copy first, then whatever Bazel set.
  path = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
  environment = dict(os.environ)
  # Bazel sets it for tests; it would hide an example's siblings from it.
  environment.pop("PYTHONSAFEPATH", None)
  environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
  done = subprocess.run(
    [sys.executable, EXAMPLES / name, f"--data_dir={data_dir}", *arguments],
    cwd=data_dir,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=200,
    check=False,
  )
  assert done.returncode == 0, done.stdout
  return done.stdout


def read_table(output: str) -> list[Row]:
  """Returns the rows of the only table in `output`."""
  lines = output.splitlines()
  (start,) = (i for i, line in enumerate(lines) if line.startswith("---"))
  rows = []
  for line in lines[start + 1 :]:
    if not line:
      break
    run, group, replicas, accuracy, seconds, inside, between = re.split(
      r"\s{2,}", line
    )
    rows.append(
      Row(
        run=run,
        group=int(group),
        replicas=replicas,
        accuracy=float(accuracy.removesuffix("%")),
        seconds=float(seconds),
        inside=float(inside),
        between=None if between == "-" else float(between),
      )
    )
  return rows


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A folder for the prepared digits, shared by the tests."""
  return tmp_path_factory.mktemp("data")


def test_digits_trains_ungrouped_and_in_groups(
  data_dir: Path, tmp_path: Path
) -> None:
  picture = tmp_path / "curves.png"
  output = run_example(
    "digits.py", data_dir, "--epochs=5", f"--picture={picture}"
  )
  rows = read_table(output)
  assert [row[:3] for row in rows] == [
    ("ungrouped", 0, "0-3"),
    ("grouped", 0, "0 1"),
    ("grouped", 1, "2 3"),
  ]
  assert rows[0].accuracy >= 95, output
  assert min(row.accuracy for row in rows) >= 90, output
  assert all(row.seconds > 0 for row in rows)
  assert [row.inside for row in rows] == [0, 0, 0]
  assert rows[0].between is None
  assert rows[1].between == rows[2].between
  assert rows[1].between is not None
  assert rows[1].between > 0
  assert "Epoch 5/5" in output
  content = picture.read_bytes()
  assert content.startswith(PNG_START)
  assert len(content) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
  ("num_replicas", "expected"),
  [
    (1, [("ungrouped", 0, "0")]),
    # Two do not divide three, so that each is a group of its own.
    (
      3,
      [
        ("ungrouped", 0, "0-2"),
        ("grouped", 0, "0"),
        ("grouped", 1, "1"),
        ("grouped", 2, "2"),
      ],
    ),
  ],
)
def test_digits_takes_any_number_of_replicas(
  data_dir: Path,
  tmp_path: Path,
  num_replicas: int,
  expected: list[tuple[str, int, str]],
) -> None:
  picture = tmp_path / "curves.png"
  output = run_example(
    "digits.py",
    data_dir,
    f"--replicas={num_replicas}",
    "--epochs=1",
    f"--picture={picture}",
  )
  rows = read_table(output)
  assert [row[:3] for row in rows] == expected
  assert all(row.inside == 0 for row in rows)
  assert all(row.between for row in rows[1:])
  assert picture.read_bytes().startswith(PNG_START)


@pytest.mark.slow
def test_custom_loop_is_right_with_either_loss(data_dir: Path) -> None:
  outputs = {
    loss: run_example(
      "custom_loop.py", data_dir, "--epochs=3", f"--loss={loss}"
    )
    for loss in ("plain", "keras")
  }
  plain, keras = (read_table(output) for output in outputs.values())
  assert [row[:3] for row in plain] == [
    ("plain loss", 0, "0 1"),
    ("plain loss", 1, "2 3"),
  ]
  assert min(row.accuracy for row in plain) >= 88, outputs["plain"]
  assert [row.inside for row in plain] == [0, 0]
  assert plain[0].between is not None
  assert plain[0].between > 0
  # The clipping was at work, on some replicas and not on others.
  assert re.search(r"; [1-9]\d?% of the gradients clipped", outputs["plain"])
  # The factors are powers of two, so that the weights are equal to the bit.
  for one, other in zip(plain, keras, strict=True):
    assert one.accuracy == other.accuracy
    assert one.between == other.between


@pytest.mark.slow
@pytest.mark.parametrize(
  ("num_groups", "groups", "members"),
  [
    (1, "all 8", ["0-7"]),
    (2, "2 of 4: [0, 1, 2, 3], ...", ["0-3", "4-7"]),
  ],
)
def test_tpu_reports_and_trains(
  data_dir: Path,
  monkeypatch: pytest.MonkeyPatch,
  num_groups: int,
  groups: str,
  members: list[str],
) -> None:
  monkeypatch.syspath_prepend(EXAMPLES)
  import digits_dataset

  arguments = ["--virtual=8", f"--groups={num_groups}"]
  output = run_example("tpu.py", data_dir, *arguments)
  rows = read_table(output)
  assert [row[:3] for row in rows] == [
    ("virtual TPU", group, each) for group, each in enumerate(members)
  ]
  assert min(row.accuracy for row in rows) >= 95, output
  assert all(row.inside == 0 for row in rows)
  if num_groups == 1:
    assert rows[0].between is None
  else:
    assert all(row.between for row in rows)
  # Each epoch's line has the groups' accuracies, the last one the table's.
  *_, last = re.findall(r"^22/22 .*", output, re.MULTILINE)
  shown = [float(x) for x in re.findall(r"test_\d: ([\d.]+)", last)]
  assert shown == [round(row.accuracy / 100, 4) for row in rows]
  # One merged sum of every gradient, float32, in the groups asked for.
  num_bytes = 4 * digits_dataset.make_model().count_params()
  assert num_bytes == 116_264
  assert "v5e:4x2: 8 replicas on TPU v5 lite\n" in output
  (all_reduce,) = re.findall(r"^all-reduce .*", output, re.MULTILINE)
  kind, dtype, size, _, shown_groups = re.split(r"\s{2,}", all_reduce)
  assert (kind, dtype, size) == ("all-reduce", "f32", f"{num_bytes:,}")
  assert shown_groups == groups
  assert re.search(r"^collectives +1$", output, re.MULTILINE)
  assert re.search(rf"^wire bytes +{num_bytes:,}$", output, re.MULTILINE)


@pytest.mark.slow
def test_tpu_goes_on_without_the_compiler(
  data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  # Python takes the first that it finds for the one that is installed.
  metadata = tmp_path / "libtpu-0.0.1.dist-info" / "METADATA"
  metadata.parent.mkdir()
  metadata.write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.1\n")
  path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
  output = run_example("tpu.py", data_dir, "--virtual=8", "--epochs=1")
  assert "No report: " in output
  assert "found libtpu 0.0.1" in output
  assert "pip install 'tf-cross-shard[tpu-compiler]'" in output
  assert "all-reduce" not in output
  assert [row[:3] for row in read_table(output)] == [("virtual TPU", 0, "0-7")]


@pytest.mark.slow
def test_tpu_without_a_slice_for_its_replicas(data_dir: Path) -> None:
  output = run_example(
    "tpu.py", data_dir, "--virtual=4", "--groups=4", "--epochs=1"
  )
  assert "No report: --topology names no slice of 4." in output
  rows = read_table(output)
  assert [row.replicas for row in rows] == ["0", "1", "2", "3"]
  # Each was trained on its own share of the images.
  assert len({row.accuracy for row in rows}) > 1
  assert all(row.between for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--tpu=local", "--virtual=8"], "At most one of (tpu, virtual)"),
    (["--virtual=8", "--groups=3"], "--groups must divide 8, the replicas."),
    (["--topology=v5p:2x2x1"], "Choose a topology of 8 devices"),
  ],
)
def test_tpu_refuses(data_dir: Path, arguments: list[str], said: str) -> None:
  with pytest.raises(AssertionError, match=re.escape(said)):
    run_example("tpu.py", data_dir, *arguments)


def test_the_split_is_stratified_and_fixed(
  data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.syspath_prepend(EXAMPLES)
  import digits_dataset

  train, test = digits_dataset.load(1433, str(data_dir))
  (train_images, train_labels), *more = train
  assert not more
  ((test_images, test_labels),) = test
  for images, labels in [
    (train_images, train_labels),
    (test_images, test_labels),
  ]:
    assert images.shape[1:] == (8, 8, 1)
    assert images.dtype == "float32"
    assert labels.dtype == "int64"
    assert images.numpy().min() == 0
    assert images.numpy().max() == 1
  counts = np.array([np.bincount(y) for y in (train_labels, test_labels)])
  assert counts.sum() == 1797
  assert np.all(np.abs(counts[1] - counts.sum(axis=0) / 5) < 1)
  # Prepared anew elsewhere, the test split is the same, image by image.
  ((again, labels_again),) = digits_dataset.load(64, str(tmp_path))[1]
  assert np.array_equal(test_images, again)
  assert np.array_equal(test_labels, labels_again)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
