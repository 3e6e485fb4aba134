r"""Writes the files that `tests/equivalence/saved_files_test.py` loads.

The files are never written again: they stand for files that users have. Each
folder next to this script was written by one older version of the package:

    0.2.0        commit cd1ad02, the release of 2026-11-22
    2026-11-23   commit af6f8e9, the last one before the package was
                 rearranged and features were removed

To write a folder, put these scripts into a checkout of the commit, so that
`tf_cross_shard` is the older one:

    git worktree add /tmp/old cd1ad02
    cp -r tests/saved_files /tmp/old/tests/
    cd /tmp/old
    python -m tests.saved_files.write 0.2.0 cd1ad02
    TF_USE_LEGACY_KERAS=1 python -m tests.saved_files.write 0.2.0 cd1ad02

The first run writes `0.2.0/keras3.tar.xz` and `0.2.0/keras3.json` next to
the script. The second one writes `tf_keras.tar.xz` and `tf_keras.json`: the
files of programs whose `tf.keras` is tf_keras.

A case of `cases.py` is a training that was saved in several ways. The archive
has a folder for each case, whose files are as the old version wrote them:

    optimizer.pickle     pickle.dumps(optimizer)
    checkpoint.*         tf.train.Checkpoint(model=..., optimizer=...).write
    state.npz            replica_state.save
    best.npz             callbacks.GroupCheckpoint
    model.keras, .h5     model.save
    backup/              callbacks.BackupAndRestore

The JSON file has the versions of the libraries and, for each case, what the
training had when it was saved, and what it had after more training:

    saved                  its state when it was saved
    after                  its state after more calls
    after_dropped_window   the same without the open window of
                           `accumulate_steps`, which only `replica_state` saves
    after_without_feature  the state that a training without the removed feature
                           reaches from `saved`

All of it was read from the training itself, never from a file. A list of values
has one value for each group.
"""

import dataclasses
import functools
import json
import pathlib
import pickle
import sys
import tarfile
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
import tf_keras

import tf_cross_shard
from tests.saved_files import cases
from tests.saved_files.program import Program, fit, strategy
from tf_cross_shard import callbacks, migration, replica_state


def _save(program: Program, folder: pathlib.Path) -> None:
  """Saves a training in the ways of its case."""
  case, both = program.case, (program.optimizer, program.model)
  for way in case.ways:
    if way == "pickle":
      (folder / "optimizer.pickle").write_bytes(pickle.dumps(both[0]))
    elif way == "checkpoint":
      made = tf.train.Checkpoint(model=program.model, optimizer=both[0])
      made.write(str(folder / "checkpoint"))
    elif way == "replica_state":
      replica_state.save(folder / "state.npz", *both)
    elif way == "best":
      callback = callbacks.GroupCheckpoint(folder / "best.npz", "val_loss")
      callback.set_model(program.model)
      callback.on_epoch_end(0, {f"val_loss/group_{i}": 1.0 for i in range(2)})
    else:
      program.model.save(str(folder / f"model.{way}"))


def _write_case(case: cases.Case, folder: pathlib.Path) -> dict[str, Any]:
  """Trains and saves; returns what is expected of the files."""
  expected = _expected(case, folder)
  # Slots by name and the weights of later steps, which depend on everything
  # else, are enough, and short.
  for key, state in expected.items():
    kept = state if key == "saved" else ("weights", "iterations")
    expected[key] = {k: state[k] for k in kept if k != "variables"}
  return expected


def _expected(case: cases.Case, folder: pathlib.Path) -> dict[str, Any]:
  """Trains and saves; returns all that the trainings had."""
  program = Program(case, has_removed=True)
  program.begin()
  program.run(case.calls)
  saved = program.state()
  _save(program, folder)
  assert program.state() == saved
  program.go_on(case.more)
  expected = {"saved": saved, "after": program.state()}
  if case.dropped_window is not None:
    other = Program(case, has_removed=True)
    other.begin()
    other.run(case.dropped_window[0])
    assert other.state() == saved
    other.go_on(case.dropped_window[1])
    expected["after_dropped_window"] = other.state()
  if case in cases.REMOVED.values():
    # From here on, the training continues without the removed feature.
    own = {key: value for key, value in saved.items() if key != "outer"}
    twin = Program(dataclasses.replace(case, outer=None))
    twin.put(own)
    assert twin.state() == own
    twin.go_on(case.dropped_window[1] if case.dropped_window else case.more)
    expected["after_without_feature"] = twin.state()
  return expected


def _write_backup(backup: cases.Backup, folder: pathlib.Path) -> dict[str, Any]:
  """Trains with backups, keeps one; returns what is expected of it."""
  every = 1 if "batch" in backup.kept else "epoch"
  fit(backup, folder / "backup", epochs=2, has_removed=True, every=every)
  own = folder / "backup/worker_0"
  for file in own.iterdir():
    if file.name != backup.kept:
      file.unlink()
  assert (own / backup.kept).exists()
  return {"after": fit(backup, has_removed=True)}


def objects(version: str) -> dict[str, Callable[[], Any]]:
  """Makers of other objects that a version can pickle."""
  three, two = cases.OURS["keras"], cases.OURS["tf_keras"]
  decay = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
  made: dict[str, Callable[[], Any]] = {
    "per_group": lambda: three.PerGroup([0.25, decay]),
    "tf_keras_per_group": lambda: two.PerGroup([0.25, 0.5]),
    "per_group_in_use": _per_group_in_use,
    "groups": lambda: tf_cross_shard.Groups(cases.STRIDED),
    "unbuilt": lambda: three.CrossShardOptimizer("sgd", clipnorm=2.0),
    "loss_scale_around": lambda: cases.loss_scaled(
      keras, three.CrossShardOptimizer(cases.sgd(keras), clipnorm=2.0)
    ),
    "from_v1": lambda: migration.from_v1(cases.v1_momentum(None)),
    "layer": lambda: three.SyncBatchNormalization(cases.PAIR, momentum=0.5),
  }
  if version == cases.LAST:
    made["named_groups"] = lambda: tf_cross_shard.Groups(
      cases.PAIR, names=["l", "r"]
    )
    made["table"] = _table_of_trials
  return made


def _per_group_in_use() -> Any:
  """A PerGroup that knows its groups."""
  own = strategy(2)
  assert own is not None
  with own.scope():
    rates = cases.OURS["keras"].PerGroup([0.25, 0.5])
    opt = keras.optimizers.SGD(rates)
    cases.OURS["keras"].CrossShardOptimizer(opt, group_assignment=cases.PAIR)
  return rates


def _table_of_trials() -> Any:
  """A table of three trials, of which one was trained."""
  table = tf_cross_shard.trials.Table(
    [{"learning_rate": rate} for rate in (0.5, 0.25, 0.125)], cases.PAIR
  )
  table.judge_by("val_loss", -1.0)
  for loss in (2.0, 1.0, 1.5):
    table.note(1, {"val_loss": loss})
  return table


def _write_objects(version: str, folder: pathlib.Path) -> None:
  """Pickles objects; the test knows what is expected of them."""
  for name, make in objects(version).items():
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(make()))


def _write(target: pathlib.Path, version: str) -> dict[str, Any]:
  """Writes the files of a version; returns what is expected of them."""
  writers: dict[str, Callable[[pathlib.Path], Any]] = {
    name: functools.partial(_write_case, case)
    for name, case in cases.cases_of(version).items()
  }
  for name, backup in cases.backups_of(version).items():
    writers[name] = functools.partial(_write_backup, backup)
  if not cases.IS_TF_KERAS_MODE:
    writers["objects"] = functools.partial(_write_objects, version)
  expected = {}
  for name, write in writers.items():
    print(name, flush=True)
    tf.keras.utils.set_random_seed(1)
    (target / name).mkdir()
    expected[name] = write(target / name)
  return expected


def _check_package(root: pathlib.Path) -> None:
  """Raises an error if a module came from an installed version."""
  for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "tf_cross_shard":
      file = pathlib.Path(str(module.__file__))
      assert file.is_relative_to(root), f"{name} is {file}, not of {root}"


_dumps = functools.partial(json.dumps, separators=(",", ":"))


def _as_text(about: Any, expected: dict[str, Any]) -> str:
  """Returns JSON with one line for each value of a case."""
  texts = [
    f'"{name}": {{\n'
    + ",\n".join(f'"{key}":{_dumps(value)}' for key, value in case.items())
    + "}"
    for name, case in expected.items()
    if case
  ]
  text = ",\n".join(texts)
  return f'{{"about": {json.dumps(about)},\n"cases": {{\n{text}}}}}\n'


def _main(version: str, commit: str) -> None:
  """Writes an archive of files, and what is expected of them."""
  root = pathlib.Path(tf_cross_shard.__file__).parent
  cpu = tf.config.list_physical_devices("CPU")[0]
  devices = [tf.config.LogicalDeviceConfiguration()] * 4
  tf.config.set_logical_device_configuration(cpu, devices)
  assert version in cases.VERSIONS
  target = pathlib.Path(__file__).parent / version
  target.mkdir(exist_ok=True)
  about = {
    "commit": commit,
    "tensorflow": tf.__version__,
    "keras": keras.__version__,
    "tf_keras": tf_keras.__version__,
  }
  with tempfile.TemporaryDirectory() as place:
    expected = _write(pathlib.Path(place), version)
    _check_package(root)
    with tarfile.open(
      target / f"{cases.MODE}.tar.xz", "w:xz", preset=9
    ) as archive:
      archive.add(place, ".", filter=_without_owner)
  (target / f"{cases.MODE}.json").write_text(_as_text(about, expected))


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
  """Leaves out who wrote a file, and when."""
  info.uid = info.gid = info.mtime = 0
  info.uname = info.gname = ""
  return info


if __name__ == "__main__":
  _main(*sys.argv[1:])
