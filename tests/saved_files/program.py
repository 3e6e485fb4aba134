"""Makes the training of a case, runs it on given gradients and reads its state.

`write.py` uses this module with an older version of the package, the test uses
it with the present one. So it calls public names that all versions have.
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

import tf_cross_shard
from tests.saved_files import cases
from tf_cross_shard import callbacks, replica_state


@functools.cache
def mirrored(replicas: int) -> tf.distribute.MirroredStrategy:
  """MirroredStrategy over logical CPUs."""
  devices = [f"CPU:{i}" for i in range(replicas)]
  # The keys of TensorFlow's collectives belong to the process, so that
  # strategies of two sizes would take each other's.
  meet = tf.distribute.ReductionToOneDevice()
  return tf.distribute.MirroredStrategy(devices, cross_device_ops=meet)


def strategy(replicas: int) -> tf.distribute.Strategy | None:
  """The strategy of so many replicas; None for one."""
  return None if replicas == 1 else mirrored(replicas)


def copies(variable: Any, replicas: int) -> list[Any]:
  """Each replica's copy of a variable, which can be assigned."""
  native = getattr(variable, "value", variable)
  native = variable if callable(native) else native
  scope = strategy(replicas)
  if scope is None:
    return [native]
  return list(scope.experimental_local_results(native))


def scope_of(case: cases.Case) -> Any:
  """The scope of a case's strategy; the default one for one replica."""
  own = strategy(case.replicas) or tf.distribute.get_strategy()
  return own.scope()


class Program:
  """A model that is trained by given gradients.

  Attributes:
    model: The compiled model.
    optimizer: Its optimizer.
    cross: The CrossShardOptimizer or TowerOptimizer in it, or itself.
  """

  def __init__(
    self,
    case: cases.Case,
    *,
    has_removed: bool = False,
    model: Any = None,
    optimizer: Any = None,
  ) -> None:
    """Makes what is not given, and builds the optimizer.

    Args:
      case: The training.
      has_removed: Whether to use what only the old version has.
      model: A compiled model, as from a file.
      optimizer: An optimizer, as from a pickle.
    """
    self.case = case
    library = case.library
    with scope_of(case):
      if model is None:
        model = library.Sequential(case.layers(library))
        optimizer = optimizer or self._make(has_removed)
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
    self.model = model
    self.optimizer = model.optimizer if optimizer is None else optimizer
    self.cross = self.optimizer
    if case.around is not None:
      self.cross = self.optimizer.inner_optimizer
    self.outer: Any = None
    if case.outer is not None:
      given = {**case.outer, **(case.outer_removed if has_removed else {})}
      with scope_of(case):
        self.outer = callbacks.OuterOptimizer(
          optimizer=library.optimizers.SGD(0.5, momentum=0.5), **given
        )
        self.outer.build(self.optimizer, model)

  def _make(self, has_removed: bool) -> Any:
    """Makes the optimizer."""
    case = self.case
    home, opt = cases.OURS[case.keras], case.opt(case.library)
    if case.kind == "TowerOptimizer":
      return home.TowerOptimizer(opt)
    groups = case.groups
    if isinstance(groups, dict):
      groups = tf_cross_shard.Groups(**groups)
    optimizer = home.CrossShardOptimizer(
      opt,
      "sum",
      group_assignment=groups,
      **{**case.arguments, **(case.removed if has_removed else {})},
    )
    return case.around(case.library, optimizer) if case.around else optimizer

  def begin(self) -> None:
    """Gives the weights and the learning rate values of their own."""
    for variable in self.weights().values():
      value = np.arange(np.prod(variable.shape)).reshape(variable.shape) + 1
      for copy in copies(variable, self.case.replicas):
        copy.assign(value.astype("float32"))
    if self.case.rate is not None:
      self.cross.learning_rate = self.case.rate

  def weights(self) -> dict[str, Any]:
    """The variables of the model, by names that no program numbers."""
    found = {}
    for layer in self.model.layers:
      for variable in layer.weights:
        name = getattr(variable, "path", variable.name)
        found[f"{layer.name}/{name.split('/')[-1].split(':')[0]}"] = variable
    return found

  def variables(self) -> list[Any]:
    """The optimizer's variables, which are a method in legacy ones."""
    own = self.optimizer.variables
    return list(own if isinstance(own, (list, tuple)) else own())

  def run(self, calls: Iterable[int]) -> None:
    """Applies the gradients of some calls, on all replicas."""
    scope = strategy(self.case.replicas)
    for call in calls:
      if scope is None:
        self._apply(call, 0)
        continue

      def replica_step(call: int = call) -> None:
        context = tf.distribute.get_replica_context()
        self._apply(call, int(context.replica_id_in_sync_group))

      scope.run(replica_step)
      if self.outer is not None:
        self.outer.step()

  def _apply(self, call: int, replica: int) -> None:
    """Applies the gradients of one replica in one call."""
    variables = self.model.trainable_variables
    grads = [self._gradient(v, call, replica) for v in variables]
    self.optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

  def _gradient(self, variable: Any, call: int, replica: int) -> Any:
    """Small integers that differ between elements, calls and replicas."""
    shape = tuple(variable.shape)
    pattern = np.arange(np.prod(shape)).reshape(shape) % 3 - 1
    grad = (pattern * (call + 1) + 2 * replica + 1).astype("float32")
    last = replica == self.case.replicas - 1
    if call == self.case.bad_call and last:
      grad = np.full(shape, np.nan, "float32")
    name = getattr(variable, "path", variable.name)
    if "embeddings" not in name:
      return tf.constant(grad)
    # Two rows of the table occur in a call, one of them twice.
    rows = [call % 4, (call + replica + 1) % 4, call % 4]
    return tf.IndexedSlices(
      tf.constant(grad[:3]), tf.constant(rows, tf.int64), tf.constant(shape)
    )

  def normalize(self) -> None:
    """Updates the statistics of batch normalization once."""
    rows = np.arange(12, dtype="float32").reshape([4, 3])

    def replica_step() -> None:
      context = tf.distribute.get_replica_context()
      replica = tf.cast(context.replica_id_in_sync_group, tf.float32)
      self.model(tf.constant(rows) * (replica + 1.0), training=True)

    scope = strategy(self.case.replicas)
    assert scope is not None
    scope.run(tf.function(replica_step, autograph=False))

  def go_on(self, calls: Iterable[int]) -> None:
    """Trains on."""
    self.run(calls)
    if self.case.layers is cases.normalized:
      self.normalize()

  def state(self) -> dict[str, Any]:
    """All values of all groups, as JSON knows them."""
    cross = self.cross

    def values(variable: Any) -> list[Any]:
      if not hasattr(variable, "assign"):  # Keras' count of its windows.
        return [np.asarray(variable).tolist()]
      found = replica_state.group_values(variable, cross)
      return [np.asarray(value).tolist() for value in found]

    state: dict[str, Any] = {
      "weights": {name: values(v) for name, v in self.weights().items()},
      "slots": {
        name: {
          slot: values(cross.get_slot(variable, slot))
          for slot in cross.get_slot_names()
          if cross.get_slot(variable, slot) is not None
        }
        for name, variable in self.weights().items()
        if variable.trainable
      },
      "iterations": values(cross.iterations),
      "learning_rate": float(as_number(cross.learning_rate)),
      "variables": [values(variable) for variable in self.variables()],
    }
    skipped = getattr(cross, "skipped_steps", None)
    if skipped is not None:
      state["skipped_steps"] = values(skipped)
    for layer in (self.optimizer, getattr(cross, "inner_optimizer", None)):
      for name in ("dynamic_scale", "loss_scale"):
        if hasattr(layer, name):
          state["loss_scale"] = float(as_number(getattr(layer, name)))
    if self.outer is not None:
      own = self.outer.optimizer.variables
      state["outer"] = {str(i): values(v) for i, v in enumerate(own)}
    return state

  def put(self, state: dict[str, Any]) -> None:
    """Gives every group's variables the values of `state`."""
    rows = [
      *zip(self.weights().values(), state["weights"].values(), strict=True),
      *zip(self.variables(), state["variables"], strict=True),
    ]
    if "skipped_steps" in state:
      rows.append((self.cross.skipped_steps, state["skipped_steps"]))
    if self.case.rate is not None:  # tf_keras does not list it.
      self.cross.learning_rate = state["learning_rate"]
    groups = self.cross.groups
    for variable, values in rows:
      mine = [values[groups.index_of(r)] for r in range(groups.num_replicas)]
      dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
      arrays = [np.array(value, dtype) for value in mine]
      if hasattr(variable, "set_copies"):  # a slot in parts
        variable.set_copies(arrays)
        continue
      for copy, array in zip(
        copies(variable, self.case.replicas), arrays, strict=True
      ):
        copy.assign(array)


def as_number(value: Any) -> Any:
  """Returns the number in a variable or tensor."""
  return value.numpy() if hasattr(value, "numpy") else value


def fit(
  backup: cases.Backup,
  folder: Any = None,
  *,
  epochs: int = 3,
  has_removed: bool = False,
  every: Any = "epoch",
) -> dict[str, Any]:
  """Trains, with backups in a folder; returns what came of it."""
  library, home = cases.LIBRARIES[backup.keras], cases.OURS[backup.keras]
  own = strategy(4 if "noise_scale" in backup.removed else 2)
  assert own is not None
  groups = cases.STRIDED if own.num_replicas_in_sync == 4 else cases.PAIR
  with own.scope():
    model = library.Sequential(
      [
        library.Input((2,)),
        library.layers.Dense(1, name="head", kernel_initializer="ones"),
      ]
    )
    optimizer = home.CrossShardOptimizer(
      library.optimizers.SGD(0.125, momentum=0.5),
      group_assignment=groups,
      **{**backup.arguments, **(backup.removed if has_removed else {})},
    )
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
  listed = [*backup.others(), *(backup.others_removed() if has_removed else [])]
  if folder is not None:
    listed.append(
      callbacks.BackupAndRestore(folder, delete_checkpoint=False, every=every)
    )
  history = model.fit(
    *(cases.X, cases.Y),
    batch_size=4,
    shuffle=False,
    epochs=epochs,
    verbose=0,
    callbacks=listed,
  )
  return {
    "epochs": list(history.epoch),
    "history": {
      name: values[-1]
      for name, values in history.history.items()
      if name == "loss" or "group" in name
    },
    "weights": [
      [np.asarray(a).tolist() for a in replica_state.group_values(v, optimizer)]
      for v in (*model.trainable_variables, *optimizer.variables)
    ],
  }
