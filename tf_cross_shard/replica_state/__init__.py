"""Values that differ between groups: read, save, restore, average, compare.

Groups are trained apart, and TensorFlow reads and saves replica 0 of a
variable. Here every group has its say:

    replica        0    1    2    3
    group_values   └─ A ─┘  └─ B ─┘      [A, B]
    save           A, B, once each       restore gives each group its own again
    average        every replica has the mean of all

All functions are called eagerly, outside `strategy.run`; on several machines
by all workers alike.
"""

import pathlib
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import variables as variables_lib
from tf_cross_shard.inner_optimizer import optimizer_state
from tf_cross_shard.replica_state import archive, group_state, replica_values
from tf_cross_shard.replica_state.archive import CheckpointError
from tf_cross_shard.replica_state.group_models import (
  copy_group,
  ensemble,
  load_group,
)
from tf_cross_shard.replica_state.group_state import OutOfSyncError

__all__ = [
  "CheckpointError",
  "OutOfSyncError",
  "assert_in_sync",
  "average",
  "copy_group",
  "ensemble",
  "group_values",
  "load_group",
  "restore",
  "save",
  "values",
]

_SHOWN: Final = 5  # names that an error lists


def values(variable: Any) -> list[archive.Array]:
  """What each replica has of a variable.

  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable([1.0, 2.0])
  >>> values(weight)
  [array([1., 2.], dtype=float32), array([1., 2.], dtype=float32)]

  Of a variable that is summed or averaged on reading, such as a metric, it is
  each replica's own part.

  Args:
    variable: A `tf.Variable`, a `keras.Variable` or a slot.

  Returns:
    One array per replica, in replica order; on several machines those of all
    workers. One alone for a variable that was made outside any scope.

  Raises:
    TypeError: If it is no variable.
    RuntimeError: If called in a tf.function, or by a replica.
    MissingWorkerError: If another worker does not call this too.
    DisagreementError: If another worker asks for something else.
  """
  strategy = replica_values.strategy_of(variable)
  found = replica_values.Copies(strategy or tf.distribute.get_strategy())
  if strategy is None:
    return found.here(variable)[:1]
  found.agree(f"reading values of {_name(variable)}")
  return found.read(variable, range(found.engine.num_replicas))


def group_values(variable: Any, optimizer: Any) -> list[archive.Array]:
  """What each group has of a variable: the values of its first members.

  >>> from tf_cross_shard import CrossShardOptimizer
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable(3.0)
  ...   optimizer = CrossShardOptimizer("sgd", group_assignment=[[0], [1]])
  >>> [float(value) for value in group_values(weight, optimizer)]
  [3.0, 3.0]

  Args:
    variable: A `tf.Variable`, a `keras.Variable` or a slot.
    optimizer: What has the groups. One without has one group of all replicas.

  Returns:
    One array per group, in the order of `optimizer.groups`.

  Raises:
    TypeError: If `variable` is no variable.
    ValueError: If the optimizer is for another number of replicas.
    RuntimeError: If called in a tf.function, or by a replica.
    MissingWorkerError: If another worker does not call this too.
    DisagreementError: If another worker asks for something else.
  """
  strategy = replica_values.strategy_of(variable)
  if strategy is None:
    groups = group_state.groups_of(optimizer, None)
    return values(variable) * groups.num_groups
  found = replica_values.Copies(strategy)
  groups = group_state.groups_of(optimizer, found.engine.num_replicas)
  found.agree(f"reading values of groups of {_name(variable)}")
  return found.read(variable, [members[0] for members in groups])


def assert_in_sync(optimizer: Any, model: Any = None) -> None:
  """Raises an error unless members of each group are equal, to the bit.

  That is so as long as they start equal and only the optimizer changes them.
  Compared are the optimizer's variables and those that the model trains. What
  it does not train, say the statistics of batch normalization, is each
  replica's own.

  >>> weight = tf.Variable(3.0)
  >>> optimizer = tf.keras.optimizers.SGD()
  >>> optimizer.build([weight])
  >>> assert_in_sync(optimizer, [weight])

  Args:
    optimizer: A built optimizer.
    model: A model, or a list of variables; None for the optimizer's only.

  Raises:
    OutOfSyncError: If members differ; names the variable, the group and the
      largest difference. It is an AssertionError.
    TypeError: If `optimizer` or `model` is something else.
    ValueError: If one of them is not built.
    RuntimeError: If called in a tf.function, or by a replica.
    MissingWorkerError: If another worker does not call this too.
    DisagreementError: If another worker has another state.
  """
  found = group_state.GroupCopies(optimizer, model)
  found.agree("assert_in_sync")
  found.apart("assert_in_sync")


def average(optimizer: Any, model: Any, slots: bool = False) -> None:
  """Gives every replica the mean over all replicas, of all groups.

      mean = (value of replica 0 + value of replica 1 + ...) / num_replicas

  added up in float64 in this order, so that all replicas have the same bits,
  under every strategy; where that sum overflows, the values are divided first.
  Averaged are the model's floating variables, the statistics of batch
  normalization among them; not integers, such as the states of random numbers.

  >>> from tf_cross_shard import CrossShardOptimizer
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable(1.0)
  ...   optimizer = CrossShardOptimizer("sgd", group_assignment=[[0], [1]])
  ...   optimizer.build([weight])
  >>> for i, copy in enumerate(strategy.experimental_local_results(weight)):
  ...   _ = copy.assign(10.0 * i)
  >>> average(optimizer, [weight])
  >>> [float(value) for value in values(weight)]
  [5.0, 5.0]

  Args:
    optimizer: A built optimizer.
    model: A model, or a list of variables.
    slots: Average too what the optimizer keeps for each of the model's
      variables, `get_slot(variable, name)` for all of its slot names. Its
      iteration count, learning rate and loss scale stay each group's own in
      either case.

  Raises:
    TypeError: If `optimizer` or `model` is something else.
    ValueError: If one of them is not built, or with `slots` the optimizer is
      no CrossShardOptimizer.
    RuntimeError: If called in a tf.function, or by a replica.
    MissingWorkerError: If another worker does not call this too.
    DisagreementError: If another worker has another state.
  """
  found = group_state.GroupCopies(optimizer, model)
  chosen = [p.variable for p in found.parts if p.name.startswith("model/")]
  if slots:
    chosen += _slots(optimizer, chosen)
  found.agree("averaging with slots" if slots else "averaging")
  num_replicas = found.groups.num_replicas
  for variable in chosen:
    if not group_state.has_mean(variable):
      continue
    mean = group_state.mean(found.copies.read(variable, range(num_replicas)))
    here = found.copies.engine.replicas_here
    found.copies.write(variable, [mean] * len(here))
  for each in group_state.watches_of(optimizer):
    each.accept()


def save(path: Any, optimizer: Any, model: Any = None) -> None:
  """Writes every group's weights and optimizer state to one file.

  Once per group, whatever the number of replicas. What the model does not
  train and members of a group differ in, say the statistics of batch
  normalization, is written once per replica. In the file are `model.variables`,
  states of random numbers among them and metrics not, and all variables of the
  optimizer: slots, iteration count, learning rate, loss scale.

  The file replaces an older one when it is whole: a crash leaves the older one.
  `np.load(path)` shows what is in it, as `group_0/model/...`.

  >>> import tempfile
  >>> weight = tf.Variable(3.0)
  >>> optimizer = tf.keras.optimizers.SGD()
  >>> optimizer.build([weight])
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   save(f"{folder}/state", optimizer, [weight])
  ...   _ = weight.assign(0.0)
  ...   restore(f"{folder}/state", optimizer, [weight])
  >>> float(weight.numpy())
  3.0

  On several machines the first worker writes, and the others wait for it.

  Args:
    path: A file in a folder that is there.
    optimizer: A built optimizer.
    model: A model, or a list of variables; None for the optimizer's only.

  Raises:
    OutOfSyncError: If members of a group differ in what is trained.
    OSError: If the file cannot be written; on all workers.
    TypeError: If an argument is something else.
    ValueError: If `path` is no file's, or optimizer or model is not built.
    RuntimeError: If called in a tf.function, or by a replica.
    MissingWorkerError: If another worker does not call this too.
    DisagreementError: If another worker has another state.
  """
  target = archive.as_path(path)
  found = group_state.GroupCopies(optimizer, model)
  topic = f"saving {target.name}"
  found.agree(topic)
  for each in group_state.watches_of(optimizer):
    each.check()
  found.write(target, topic, found.arrays(found.apart(topic)))


def restore(path: Any, optimizer: Any, model: Any = None) -> None:
  """Gives every group what `save` wrote of it.

  Group i of the file goes to group i of the optimizer, whichever replicas are
  in it: the groups may have other members, or another size, than when they
  were saved. (Where members had values of their own, the j-th member receives
  those of the j-th; then the size has to be the same.)

  Everything is read and compared before anything is changed. Training goes on
  to the bit as if it had not stopped.

  On several machines each worker reads the file, which has to be the same one.

  >>> import tempfile
  >>> sgd = tf.keras.optimizers.SGD(0.5)
  >>> sgd.build([tf.Variable(1.0)])
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   save(f"{folder}/state", sgd)
  ...   sgd.learning_rate = 0.25
  ...   restore(f"{folder}/state", sgd)
  >>> float(sgd.learning_rate.numpy())
  0.5

  Args:
    path: A file that `save` wrote.
    optimizer: A built optimizer.
    model: As for `save`.

  Raises:
    CheckpointError: If the file is damaged, or has another number of groups,
      other variables, shapes or dtypes; if workers read different files. It is
      a ValueError. The error of one worker is raised on all.
    OSError: If the file cannot be read.
    TypeError: If an argument is something else.
    ValueError: If `path` is no file's, or optimizer or model is not built.
    RuntimeError: If called in a tf.function, or by a replica.
    MissingWorkerError: If another worker does not call this too.
  """
  restore_file(archive.as_path(path), optimizer, model)


def restore_file(target: pathlib.Path, optimizer: Any, model: Any) -> Any:
  """Restores; returns the values that a worker's own file holds, else None."""
  found = group_state.GroupCopies(optimizer, model)
  plan: list[list[archive.Array]] = []
  own_values, checksum = None, 0
  error: Exception | None = None
  try:
    with archive.reading(target) as file:
      own_values = file.about.get("values")
      checksum = file.checksum if own_values is None else 0
      _check(file, found)
      plan = [_values_here(file, found, part) for part in found.parts]
  except (OSError, CheckpointError) as failure:
    error = failure
  except Exception as failure:  # of any kind, from what is not as written
    error = archive.damaged(target, failure)
  found.conclude(f"restoring {target.name}", error, checksum)
  for part, arrays in zip(found.parts, plan, strict=True):
    found.copies.write(part.variable, arrays)
  for each in group_state.watches_of(optimizer):
    each.accept()
  return own_values


def _name(variable: Any) -> str:
  """What all workers call a variable."""
  return variables_lib.renumbered([variables_lib.path_of(variable)])[0]


def _slots(optimizer: Any, variables: list[Any]) -> list[Any]:
  """What the optimizer keeps for each of the variables."""
  layers = list(optimizer_state.nested_optimizers(optimizer))
  inner = [vars(each)["_inner"] for each in layers if "_inner" in vars(each)]
  if not inner:
    raise ValueError(
      "`slots` needs a CrossShardOptimizer, which knows its slots; got"
      f" {type(optimizer).__name__}. Leave `slots` False."
    )
  found = [
    s for v in variables for each in inner for s in each.slots(v).values()
  ]
  return list({id(slot): slot for slot in found}.values())


def _check(file: archive.Archive, found: group_state.GroupCopies) -> None:
  """Raises `CheckpointError` unless the file fits."""
  about, where = file.about, f"The checkpoint {file.path}"
  if about.get("format") != group_state.FORMAT:
    raise CheckpointError(
      f"{where} holds something else: {about.get('format')!r}. Name a file that"
      " replica_state.save wrote."
    )
  saved = about["group_assignment"]
  # A worker's own file has the values of its own groups only.
  is_own = "values" in about and len(saved) > 1
  if len(saved) != found.groups.num_groups or (
    is_own and saved != found.groups.to_lists()
  ):
    raise CheckpointError(
      f"{where} holds {len(saved)} groups, {saved}; the optimizer has"
      f" {found.groups.num_groups}, {found.groups.to_lists()}. Give it a"
      " `group_assignment` of as many groups, or call replica_state.average"
      " and save the model with TensorFlow to start others from it."
    )
  ours = [part.name for part in found.parts]
  has_model = any(name.startswith("model/") for name in about["names"])
  for names, others, what in (
    (ours, about["names"], "lacks"),
    (about["names"], ours, "has, and the program has not,"),
  ):
    absent = [name for name in names if name not in set(others)]
    if absent:
      more = f" and {len(absent) - _SHOWN} more" if absent[_SHOWN:] else ""
      raise CheckpointError(
        f"{where} {what} {', '.join(absent[:_SHOWN])}{more}. Restore with the"
        " same optimizer and model as were saved; `model` was"
        f" {'given' if has_model else 'None'} then."
      )


def _values_here(
  file: archive.Archive, found: group_state.GroupCopies, part: group_state.Part
) -> list[archive.Array]:
  """Returns a variable's values for the replicas of this process.

  Raises `CheckpointError` unless they fit.
  """
  where = f"The checkpoint {file.path} holds"
  saved_size = len(file.about["group_assignment"][0])
  is_resized = found.groups.group_size != saved_size
  read: dict[str, archive.Array] = {}
  mine = []
  for replica in found.copies.engine.replicas_here:
    index = found.groups.index_of(replica)
    member = found.groups.assignment[index].index(replica)
    apart = [
      j
      for j in range(saved_size)
      if group_state.key(part.name, index, j) in file
    ]
    if apart and is_resized and "values" not in file.about:
      raise CheckpointError(
        f"{where} values of `{part.name}` for each of {saved_size} members of a"
        f" group; groups have {found.groups.group_size} now. Restore with"
        " groups of the same size, or average() before saving."
      )
    if apart and member not in apart:
      member = apart[member % len(apart)]
    key = group_state.key(part.name, index, member if apart else None)
    if key not in read:
      read[key] = file[key]
    mine.append(read[key])
  dtype = tf.as_dtype(part.variable.dtype).name
  shape = tuple(map(int, part.variable.shape))
  for array in read.values():
    if (array.dtype.name, array.shape) != (dtype, shape):
      raise CheckpointError(
        f"{where} `{part.name}` as {array.dtype.name} {list(array.shape)}; the"
        f" program has {dtype} {list(shape)}. Restore with the same model."
      )
  exists_once = replica_values.strategy_of(part.variable) is None
  if exists_once and len({array.tobytes() for array in mine}) > 1:
    raise CheckpointError(
      f"{where} other values of `{part.name}` for each group; here it exists"
      " once. Make it inside `with strategy.scope():`."
    )
  return mine
