"""Files that older versions of the package wrote still load.

`tests/saved_files/write.py` explains which files there are, how they were
written, and what was recorded of the trainings that wrote them. Each test loads
a file with the present package. Weights, slots, iteration count and learning
rate have to be the recorded ones, bit for bit. Then the test trains on and
compares the weights again: bit for bit where the arithmetic is exact on every
machine, else to 1e-6.

Some files have state of features that were removed after the files were
written. The version without the features has to do this:

- `from_config`, unpickling and `load_model` drop `noise_scale` and
  `has_backup`. They replace `wire_dtype="int8"` by None and, if there is
  `accumulate_steps`, `lazy_rows` by False. One WARNING names all arguments
  that were dropped or replaced. Files of older versions have all arguments;
  those at their old defaults are dropped without a warning.
- `replica_state.restore` and `BackupAndRestore` ignore the variables of
  removed features: those of the noise scale, int8 residuals, the length of
  windows, row sums of tables, and the state of fragments of an
  `OuterOptimizer`. One WARNING names at least one of the ignored variables.
  All other variables are restored bit for bit.
- If a file has row sums, its window of `accumulate_steps` begins anew, for
  all variables, as it does in groups of another size. Otherwise the next step
  would use the tables' gradients of some calls only.
- A file of `tf.train.Checkpoint` has no state of these features. It is
  restored without a warning.
"""

import json
import pathlib
import pickle
import shutil
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from packaging import version

import tf_cross_shard
import tf_cross_shard.keras3
import tf_cross_shard.tf_keras
from tests.saved_files import cases
from tests.saved_files import program as programs
from tests.support import testbed, training
from tf_cross_shard import replica_state, schedules

PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent
SAVED = PROJECT / "tests/saved_files"
RECORDS = {
  name: json.loads((SAVED / name / f"{cases.MODE}.json").read_text())
  for name in cases.VERSIONS
}
# All tests of a process share one strategy of each size, since TensorFlow's
# collectives find each other by keys that belong to the process.
programs.mirrored = testbed.mirrored

Place = tuple[str, str]  # a version, and the name of a case

kept = cases.CASES
removed = cases.REMOVED
every = {**kept, **removed}
groups_only = {name: case for name, case in every.items() if case.groups}
models = {
  name: case for name, case in every.items() if {"keras", "h5"} & {*case.ways}
}


def _places(chosen: Mapping[str, Any], way: str = "") -> list[Any]:
  """Returns test parameters: each version's cases that were saved in a way."""
  return [
    pytest.param((name, case), id=f"{name}-{case}")
    for name in cases.VERSIONS
    for case in {**cases.cases_of(name), **cases.backups_of(name)}
    if case in chosen and (not way or way in chosen[case].ways)
  ]


def _left_out_of(case: str) -> list[str]:
  """Returns the features whose variables are in the case's `state.npz`."""
  found = [name for name in removed[case].removed if name != "has_backup"]
  if "rows" in case:
    found = ["lazy_rows"]
  return found + (["outer"] if removed[case].outer_removed else [])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Returns a folder with the files of all versions."""
  folder = tmp_path_factory.mktemp("files")
  for name in cases.VERSIONS:
    with tarfile.open(SAVED / name / f"{cases.MODE}.tar.xz") as archive:
      archive.extractall(folder / name, filter="data")
  return folder


def _expected(place: Place) -> dict[str, Any]:
  name, case = place
  expected: dict[str, Any] = RECORDS[name]["cases"][case]
  return expected


def _skip_if_keras_is_older(place: Place) -> None:
  """Skips the test: Keras need not read configurations of newer versions."""
  about = RECORDS[place[0]]["about"]
  for library in (keras, tf_keras):
    wrote = about[library.__name__]
    if version.Version(library.__version__) < version.Version(wrote):
      pytest.skip(f"{library.__name__} {wrote} wrote this file")


def _case(place: Place) -> cases.Case:
  return every[place[1]]


def _checkpoint(program: programs.Program) -> tf.train.Checkpoint:
  return tf.train.Checkpoint(model=program.model, optimizer=program.optimizer)


def _load_model(case: cases.Case, folder: pathlib.Path) -> Any:
  """Loads a model file in the scope that is open."""
  way = "h5" if "h5" in case.ways else "keras"
  return case.library.models.load_model(str(folder / f"model.{way}"))


def _check_values(
  actual: Any, expected: Any, where: str, is_exact: bool = True
) -> None:
  """Compares nested dictionaries and lists of numbers."""
  if isinstance(expected, dict):
    assert list(actual) == list(expected), where
    for key, value in expected.items():
      _check_values(actual[key], value, f"{where}/{key}", is_exact)
  elif is_exact:
    np.testing.assert_array_equal(actual, expected, where, strict=True)
  else:
    training.assert_close(np.array(actual), np.array(expected), where)


def _of_first_group(state: Any) -> Any:
  """Gives all groups the first one's values, as most files do."""
  if isinstance(state, dict):
    return {key: _of_first_group(value) for key, value in state.items()}
  return [state[0]] * len(state) if isinstance(state, list) else state


def _check_saved(
  program: programs.Program, expected: Any, leave_out: Sequence[str] = ()
) -> None:
  """Compares the loaded values with the recorded ones."""
  state = program.state()
  for part in expected.keys() - set(leave_out):
    _check_values(state[part], expected[part], part)


def _check_later(
  program: programs.Program, expected: Any, of_first_group: bool
) -> None:
  """Compares weights and counts after training on."""
  state = {key: program.state()[key] for key in ("weights", "iterations")}
  if of_first_group:  # Other groups continued from group 0.
    state, expected = _first_of(state), _first_of(expected)
  _check_values(state, expected, "later", program.case.is_exact)


def _first_of(state: Any) -> Any:
  """Returns the first group's values."""
  if isinstance(state, dict):
    return {key: _first_of(value) for key, value in state.items()}
  return state[0]


def _assign_weights(program: programs.Program, expected: Any) -> None:
  """Gives all groups the first one's weights, which no pickle has."""
  for name, variable in program.weights().items():
    value = np.array(expected["weights"][name][0], "float32")
    for copy in programs.copies(variable, program.case.replicas):
      copy.assign(value)


def _check_arguments(program: programs.Program) -> None:
  """Compares the arguments of an optimizer with those of the case."""
  case, own = program.case, program.cross
  for name, value in case.arguments.items():
    assert getattr(own, name) == value, name
  groups = case.groups
  if isinstance(groups, dict):
    assert list(own.groups.names) == groups["names"]
    groups = groups["assignment"]
  if case.kind == "CrossShardOptimizer":
    assert own.group_assignment == groups
    assert own.reduction == "sum"


def _check_loaded(
  program: programs.Program, place: Place, said: Sequence[str]
) -> None:
  """Checks that what was removed, and nothing else, is gone with a warning."""
  config = program.cross.get_config()
  lines = said[:]
  assert len(lines) == bool(program.case.removed)
  for name in program.case.removed:
    assert name in lines[0]
    if name == "wire_dtype":  # It stays, without this value.
      assert config[name] is None
    elif name == "lazy_rows":  # It stays, but not with `accumulate_steps`.
      assert config[name] is False
    else:
      assert name not in config
  _check_arguments(program)


def _continue_training(
  program: programs.Program, place: Place, of_first_group: bool = True
) -> None:
  """Trains on from a file that has no open window, and compares."""
  case, expected = program.case, _expected(place)
  calls, key = case.more, "after"
  if case.dropped_window is not None:
    calls, key = case.dropped_window[1], "after_dropped_window"
  if place[1] in removed:
    key = "after_without_feature"
  program.go_on(calls)
  _check_later(program, expected[key], of_first_group)


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("place", _places(every, "pickle"))
def test_pickle(place: Place, files: pathlib.Path, said: list[str]) -> None:
  """A pickle has the first group's slots, counts and learning rate."""
  _skip_if_keras_is_older(place)
  case, expected = _case(place), _expected(place)
  path = files.joinpath(*place, "optimizer.pickle")
  with programs.scope_of(case):
    optimizer = pickle.loads(path.read_bytes())
  home = cases.OURS[case.keras]
  assert type(optimizer) is getattr(home, case.kind)
  program = programs.Program(case, optimizer=optimizer)
  _check_loaded(program, place, said)
  _assign_weights(program, expected["saved"])
  leave_out = ["skipped_steps"] if place[1] in removed else []
  _check_saved(program, _of_first_group(expected["saved"]), leave_out)
  _continue_training(program, place)


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("place", _places(every, "checkpoint"))
def test_checkpoint(place: Place, files: pathlib.Path, said: list[str]) -> None:
  """A TensorFlow checkpoint has the first group's weights and slots."""
  case, expected = _case(place), _expected(place)
  program = programs.Program(case)
  status = _checkpoint(program).read(str(files.joinpath(*place, "checkpoint")))
  status.assert_existing_objects_matched()
  status.assert_consumed()
  assert said == []
  saved = _of_first_group(expected["saved"])
  _check_saved(program, saved, leave_out=["skipped_steps"])
  _continue_training(program, place)


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("place", _places(kept, "replica_state"))
def test_replica_state(
  place: Place, files: pathlib.Path, said: list[str]
) -> None:
  """A file of `replica_state` has every group's state, windows included."""
  case, expected = _case(place), _expected(place)
  path = files.joinpath(*place, "state.npz")
  program = programs.Program(case)
  replica_state.restore(path, program.optimizer, program.model)
  assert said == []
  _check_saved(program, expected["saved"])
  if "best" in case.ways:  # A file of GroupCheckpoint has the same state.
    again = programs.Program(case)
    best = path.with_name("best.npz")
    replica_state.restore(best, again.optimizer, again.model)
    assert said == []
    _check_saved(again, expected["saved"])
  program.go_on(case.more)
  _check_later(program, expected["after"], of_first_group=False)


@pytest.mark.parametrize("place", _places(groups_only, "replica_state"))
def test_read_group(place: Place, files: pathlib.Path, said: list[str]) -> None:
  """A plain model on one device reads one group's weights, and no more."""
  case, expected = _case(place), _expected(place)
  path = files.joinpath(*place, "state.npz")
  for group in range(2):
    model = case.library.Sequential(case.layers(case.library))
    replica_state.read_group(path, group, model)
    names = expected["saved"]["weights"]
    for layer_weight, rows in zip(
      [w for layer in model.layers for w in layer.weights],
      names.values(),
      strict=True,
    ):
      np.testing.assert_array_equal(layer_weight.numpy(), rows[group])
  assert said == []


@pytest.mark.tf_keras_mode
@pytest.mark.parametrize("place", _places(models))
def test_model_file(place: Place, files: pathlib.Path, said: list[str]) -> None:
  """A model file has the first group's weights and slots."""
  _skip_if_keras_is_older(place)
  case, expected = _case(place), _expected(place)
  with programs.scope_of(case):
    model = _load_model(case, files.joinpath(*place))
  program = programs.Program(case, model=model)
  if case.around is None:
    kind = getattr(cases.OURS[case.keras], case.kind)
    assert type(program.optimizer) is kind
  _check_loaded(program, place, said)
  leave_out = ["skipped_steps"]
  if case.keras == "tf_keras":  # Its own model files have no loss scale.
    leave_out.append("loss_scale")
  _check_saved(program, _of_first_group(expected["saved"]), leave_out)
  _continue_training(program, place)


@pytest.mark.parametrize(
  "place", [p for p in _places(models) if p.values[0][1] in kept]
)
def test_model_file_on_one_device(
  place: Place, files: pathlib.Path, said: list[str]
) -> None:
  """A model of groups can be loaded where there are no replicas."""
  _skip_if_keras_is_older(place)
  case, expected = _case(place), _expected(place)
  model = _load_model(case, files.joinpath(*place))
  assert said == []
  weights = [w for layer in model.layers for w in layer.weights]
  for weight, rows in zip(
    weights, expected["saved"]["weights"].values(), strict=True
  ):
    np.testing.assert_array_equal(weight.numpy(), rows[0])


class TestObjects:
  """Pickles of other objects."""

  @pytest.fixture(params=cases.VERSIONS)
  def folder(
    self, files: pathlib.Path, request: pytest.FixtureRequest
  ) -> pathlib.Path:
    """Returns the folder with the pickles of a version."""
    name: str = request.param
    _skip_if_keras_is_older((name, "objects"))
    return files / name / "objects"

  @staticmethod
  def _load(folder: pathlib.Path, name: str) -> Any:
    return pickle.loads((folder / f"{name}.pickle").read_bytes())

  def test_per_group(self, folder: pathlib.Path) -> None:
    rates = self._load(folder, "per_group")
    assert type(rates) is tf_cross_shard.keras3.PerGroup
    assert rates.values(step=2) == [0.25, 0.125]
    rates = self._load(folder, "tf_keras_per_group")
    assert type(rates) is tf_cross_shard.tf_keras.PerGroup
    assert rates.values(step=2) == [0.25, 0.5]

  def test_per_group_knows_its_groups(self, folder: pathlib.Path) -> None:
    rates = self._load(folder, "per_group_in_use")
    strategy = testbed.mirrored(2)
    found = strategy.run(lambda: rates(0))
    assert testbed.per_replica_results(strategy, found) == [0.25, 0.5]

  def test_groups(self, folder: pathlib.Path) -> None:
    groups = self._load(folder, "groups")
    assert groups == tf_cross_shard.Groups(cases.STRIDED)
    assert type(groups) is tf_cross_shard.Groups
    assert groups.names is None
    assert groups.index_of(3) == 1
    path = folder / "named_groups.pickle"
    if path.exists():
      assert self._load(folder, "named_groups").names == ("l", "r")

  def test_table(self, folder: pathlib.Path) -> None:
    if not (folder / "table.pickle").exists():
      assert folder.parent.name == cases.RELEASE  # It had no tables.
      return
    table = self._load(folder, "table")
    assert [trial.settings["learning_rate"] for trial in table] == [
      0.5,
      0.25,
      0.125,
    ]
    assert table.best.number == 1
    assert (table.best.best, table.best.best_epoch) == (1.0, 1)
    assert table.best.history == {"val_loss": [2.0, 1.0, 1.5]}
    assert table.monitor == "val_loss"
    with schedules.as_group(1):
      assert float(table.value("learning_rate")) == 0.25

  def test_optimizers(self, folder: pathlib.Path) -> None:
    optimizer = self._load(folder, "unbuilt")
    assert type(optimizer) is tf_cross_shard.keras3.CrossShardOptimizer
    assert optimizer.clipnorm == 2.0
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # Keras' pickles lose variables.
      around = self._load(folder, "loss_scale_around")
    assert type(around) is keras.optimizers.LossScaleOptimizer
    inner = around.inner_optimizer
    assert type(inner) is tf_cross_shard.keras3.CrossShardOptimizer
    assert inner.clipnorm == 2.0
    converted = self._load(folder, "from_v1").inner_optimizer
    assert type(converted).__name__ == "V1Momentum"

  def test_layer(self, folder: pathlib.Path) -> None:
    layer = self._load(folder, "layer")
    assert type(layer) is tf_cross_shard.keras3.SyncBatchNormalization
    assert layer.group_assignment == cases.PAIR
    assert layer.momentum == 0.5


# The first program does not import the package, the second one only its root.
_LOADS_PICKLES = """
import pathlib, pickle, sys, warnings
warnings.simplefilter("ignore")
for name in sys.argv[1:]:
  pickle.loads(pathlib.Path(name).read_bytes())
print("loaded", len(sys.argv[1:]))
"""
_LOADS_MODELS = """
import sys
import keras
import tf_cross_shard
for name in sys.argv[1:]:
  model = keras.models.load_model(name)
  assert "tf_cross_shard" in str(model.get_compile_config())
print("loaded", len(sys.argv[1:]))
"""
_MODELS_OF_KERAS3 = (
  *("one_device", "groups", "per_group", "from_v1_momentum", "tower"),
  *("sync_batch_normalization", "loss_scale_around"),
)


def _run(program: str, paths: Sequence[pathlib.Path]) -> None:
  """Runs a program with paths, which prints how many it has loaded."""
  run = subprocess.run(
    [sys.executable, "-c", program, *map(str, paths)],
    cwd=PROJECT,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert run.stdout == f"loaded {len(paths)}\n", run.stderr[-4000:]
  assert len(paths) > 5


@pytest.mark.parametrize(
  "name",
  list(cases.VERSIONS),
)
def test_pickles_import_the_package(name: str, files: pathlib.Path) -> None:
  _skip_if_keras_is_older((name, "objects"))
  folder = files / name
  _run(
    _LOADS_PICKLES,
    [*sorted(folder.glob("objects/*.pickle")), *_on_one_device(folder)],
  )


def test_the_package_alone_registers_classes(files: pathlib.Path) -> None:
  """Keras 3 finds the classes in model files by their registered names."""
  for name in cases.VERSIONS:
    _skip_if_keras_is_older((name, "objects"))
  _run(
    _LOADS_MODELS,
    [
      files / name / case / "model.keras"
      for name in cases.VERSIONS
      for case in _MODELS_OF_KERAS3
    ],
  )


def _on_one_device(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the pickles of optimizers that need no replicas."""
  return [
    folder / name / "optimizer.pickle"
    for name, case in cases.cases_of(folder.name).items()
    if name in kept and case.replicas == 1 and "pickle" in case.ways
  ]


# --------------------------------------------------------------------- backups


def _check_backup(
  place: Place, backup: cases.Backup, files: pathlib.Path, folder: pathlib.Path
) -> None:
  """Trains on from a backup; compares with a `fit` that was not stopped."""
  shutil.copytree(files.joinpath(*place, "backup"), folder / "backup")
  found = programs.fit(backup, folder / "backup")
  expected = _expected(place)["after"]
  first = 1 if "batch" in backup.kept else 2
  assert found["epochs"] == list(range(first, 3))
  assert sorted(found["history"]) == sorted(expected["history"])
  for name, value in expected["history"].items():
    assert found["history"][name] == pytest.approx(value, rel=1e-5), name
  for mine, right in zip(found["weights"], expected["weights"], strict=True):
    training.assert_close(np.array(mine), np.array(right), "weights")


@pytest.mark.parametrize("place", _places(cases.BACKUPS))
def test_backup(
  place: Place, files: pathlib.Path, said: list[str], tmp_path: pathlib.Path
) -> None:
  """Backups of 0.2.0 are not read; see the changelog."""
  _check_backup(place, cases.BACKUPS[place[1]], files, tmp_path)
  assert said == []


# --------------------------------------------------------------------- removed


def _left_out(path: pathlib.Path, program: programs.Program) -> list[str]:
  """Returns the names in a file that the present version does not save."""
  again = path.with_name("again.npz")
  replica_state.save(again, program.optimizer, program.model)
  names = []
  for file in (path, again):
    with np.load(file) as entries:
      names.append(json.loads(entries["about"].item())["names"])
  return [name for name in names[0] if name not in names[1]]


class TestRemoved:
  """State of removed features that only these files have."""

  @pytest.mark.parametrize("place", _places(removed, "replica_state"))
  def test_replica_state(
    self, place: Place, files: pathlib.Path, said: list[str]
  ) -> None:
    case, expected = _case(place), _expected(place)
    path = files.joinpath(*place, "state.npz")
    program = programs.Program(case)
    replica_state.restore(path, program.optimizer, program.model)
    lines = said[:]
    left_out = _left_out(path, program)
    assert bool(left_out) == bool(_left_out_of(place[1]))
    if left_out:
      [line] = lines
      assert any(name.removeprefix("optimizer/") in line for name in left_out)
    else:
      assert lines == []
    saved = expected["saved"]
    _check_saved(program, saved, leave_out=["outer"])
    if case.outer is not None:
      self._check_synchronized(program, place, path)
    elif "noise_scale" in case.removed and case.dropped_window is not None:
      program.go_on(case.more)  # The open window is continued.
      _check_later(program, expected["after"], of_first_group=False)
    else:
      _continue_training(program, place, of_first_group=False)

  @staticmethod
  def _check_synchronized(
    program: programs.Program, place: Place, path: pathlib.Path
  ) -> None:
    """Checks that the next step synchronizes groups from the saved anchor."""
    expected = _expected(place)
    program.go_on(program.case.more)
    # The weights of groups that are not synchronized.
    independent = expected["after_without_feature"]["weights"]
    with np.load(path) as entries:
      for i, (name, rows) in enumerate(independent.items()):
        anchor = entries[f"group_0/optimizer/anchor{i}"]
        momentum = entries[f"group_0/optimizer/outer/anchor{i}_momentum"]
        gradient = np.mean(anchor - np.float32(rows), axis=0)
        synchronized = anchor + 0.5 * momentum - 0.5 * gradient  # SGD(0.5, 0.5)
        state = program.state()["weights"][name]
        training.assert_close(
          np.array(state), np.array([synchronized] * 2), name
        )

  @pytest.mark.parametrize("place", _places(cases.REMOVED_BACKUPS))
  def test_backup(
    self,
    place: Place,
    files: pathlib.Path,
    said: list[str],
    tmp_path: pathlib.Path,
  ) -> None:
    """`fit` restores twice within an epoch, and warns once."""
    backup = cases.REMOVED_BACKUPS[place[1]]
    shutil.copytree(files.joinpath(*place, "backup"), tmp_path / "backup")
    with np.load(tmp_path / "backup/worker_0" / backup.kept) as entries:
      saved = [
        [entries[f"group_{i}/model/sequential/head/{name}"] for i in range(2)]
        for name in ("kernel", "bias")
      ]
    is_of_epoch = "batch" not in backup.kept
    # Nothing is left to do after two epochs.
    found = programs.fit(
      backup, tmp_path / "backup", epochs=2 if is_of_epoch else 3
    )
    assert found["epochs"] == ([] if is_of_epoch else [1, 2])
    [line] = said
    assert ("window_length" if is_of_epoch else "wire_residual") in line
    if is_of_epoch:
      for i, name in enumerate(("kernel", "bias")):
        _check_values(found["weights"][i], np.array(saved[i]).tolist(), name)

  @pytest.mark.parametrize("which", ["keras", "tf_keras"])
  @pytest.mark.parametrize(
    "given",
    [
      {"noise_scale": 8},
      {"has_backup": True},
      {"wire_dtype": "int8"},
      {"noise_scale": True, "has_backup": True, "wire_dtype": "int8"},
    ],
  )
  def test_from_config(
    self, which: str, given: dict[str, Any], said: list[str]
  ) -> None:
    config = self._config(which)
    made = cases.OURS[which].CrossShardOptimizer.from_config(
      {**config, **given}
    )
    assert made.get_config() == config
    [line] = said
    assert all(name in line for name in given)

  @pytest.mark.parametrize("which", ["keras", "tf_keras"])
  def test_from_config_with_old_defaults(
    self, which: str, said: list[str]
  ) -> None:
    """Files of older versions have all arguments."""
    kind, config = cases.OURS[which].CrossShardOptimizer, self._config(which)
    old = {"noise_scale": False, "has_backup": False}
    assert kind.from_config({**config, **old}).get_config() == config
    assert said == []

  @pytest.mark.parametrize("which", ["keras", "tf_keras"])
  @pytest.mark.parametrize("lazy_rows", [True, "elementwise"])
  def test_from_config_with_rows_in_windows(
    self, which: str, lazy_rows: Any, said: list[str]
  ) -> None:
    kind, config = cases.OURS[which].CrossShardOptimizer, self._config(which)
    window = {**config, "accumulate_steps": 2}
    made = kind.from_config({**window, "lazy_rows": lazy_rows})
    assert made.get_config() == window
    [line] = said
    assert "lazy_rows" in line

  @pytest.mark.parametrize("which", ["keras", "tf_keras"])
  def test_from_config_with_rows_or_windows(
    self, which: str, said: list[str]
  ) -> None:
    """`accumulate_steps` or `lazy_rows` alone is kept."""
    kind, config = cases.OURS[which].CrossShardOptimizer, self._config(which)
    for given in ({"lazy_rows": True}, {"accumulate_steps": 2}):
      made = kind.from_config({**config, **given})
      assert made.get_config() == {**config, **given}
    assert said == []

  @staticmethod
  def _config(which: str) -> dict[str, Any]:
    opt = cases.LIBRARIES[which].optimizers.SGD()
    config: dict[str, Any] = (
      cases.OURS[which].CrossShardOptimizer(opt).get_config()
    )
    return config


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
