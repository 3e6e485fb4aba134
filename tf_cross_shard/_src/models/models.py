"""`Models`, one object for all models of a program."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.models import (
  archive,
  checkpoint,
  group_state,
  initial_values,
  plain_models,
  predictions,
)


class Models(Sequence[Any]):
  """The models that one Keras model trains: a sequence of plain Keras models.

  Under `VectorizedStrategy(n)`, a Keras model has the weights of n models. On
  other strategies, each group of a CrossShardOptimizer trains a model. Keras
  and TensorFlow read and save the values of model 0 only; `Models` reads and
  sets the values of every model. `models[i]` is a plain Keras model with the
  weights of model i, which needs neither a strategy nor this package.

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import Models, VectorizedStrategy
  >>> def build():
  ...   return tf.keras.Sequential(
  ...     [tf.keras.Input((2,)), tf.keras.layers.Dense(1)]
  ...   )
  >>> with VectorizedStrategy(4).scope():
  ...   model = build()
  ...   model.compile("adam", "mse")
  >>> models = Models(model)
  >>> models.initialize(build, seeds=range(4))
  >>> x = np.ones([8, 2], "float32")
  >>> _ = model.fit(x, x[:, :1], verbose=0)
  >>> models.predict(x).shape
  (4, 8, 1)
  >>> bool(np.allclose(models.predict(x)[3], models[3].predict(x, verbose=0)))
  True
  >>> models.assign(model.weights[1], [[0.0], [1.0], [2.0], [3.0]])
  >>> [float(plain.get_weights()[1][0]) for plain in models]
  [0.0, 1.0, 2.0, 3.0]

  Call the methods eagerly and outside `strategy.run`; elsewhere they raise a
  RuntimeError. On several machines, call them on all workers and with the same
  arguments; otherwise all workers raise a MissingWorkerError or a
  DisagreementError.
  """

  def __init__(self, model: Any = None, optimizer: Any = None) -> None:
    """Finds the models.

    Args:
      model: A built Keras model, or a list of variables; None for the
        optimizer's variables alone.
      optimizer: The optimizer that trains the model; None for the optimizer
        that the model is compiled with, if it is. Its `group_assignment`, or
        the strategy, says which models there are. Without either, there is one.

    Raises:
      TypeError: If an argument is of another kind, or both are None.
    """
    if hasattr(model, "apply_gradients"):
      raise TypeError(
        f"`model` is an optimizer, {type(model).__name__}. Call Models(model,"
        " optimizer), or Models(optimizer=optimizer) for its variables alone."
      )
    if model is None and optimizer is None:
      raise TypeError("`model` and `optimizer` are None. Pass at least one.")
    if optimizer is None:
      optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
      nested_lib.check_optimizer(optimizer)
    if model is not None and not hasattr(model, "variables"):
      group_state.variables_of(model)  # Raises the error for another object.
    self._model = model
    self._optimizer = optimizer

  def __repr__(self) -> str:
    owner = self._optimizer if self._model is None else self._model
    name = getattr(owner, "name", None) or type(owner).__name__
    return f"<{len(self)} models of {name}>"

  def __len__(self) -> int:
    """The number of models."""
    return self._groups.num_groups

  def __getitem__(self, i: Any) -> Any:
    """Returns a plain Keras model with the weights of model i.

    A slice returns a list. See `load`.
    """
    if isinstance(i, slice):
      return [self.load(j) for j in range(len(self))[i]]
    return self.load(self._index("i", i, IndexError))

  def __iter__(self) -> Iterator[Any]:
    return map(self.load, range(len(self)))

  def load(self, i: int, into: Any = None) -> Any:
    """Returns a plain model with the weights of model i, as `models[i]` does.

    The plain model is created outside any strategy and is not compiled. It
    predicts, saves and trains like a model that never had replicas. If Keras
    clones a sequential or functional model, the layers of
    `tf_cross_shard.layers` become Keras' own layers, so that files of the plain
    model load without this package.

    Variables that are not trained and that differ between members of a group,
    such as the statistics of batch normalization, receive the mean over the
    members; integer variables, such as the states of random number generators,
    receive the value of the first member. If `into` has another number of
    random number generators, it keeps their states, because predictions need
    none. The method ignores moving averages of weights that the optimizer
    keeps.

    Args:
      i: The number of the model. A negative number counts from the end.
      into: A plain model of the same architecture, which receives the weights
        and is returned. None lets Keras clone the model, which works if it is
        sequential or functional, or if its class defines `get_config`.

    Returns:
      The plain model, on every worker.

    Raises:
      ValueError: If there is no such model, if Keras cannot clone the model, or
        if `into` does not fit. Nothing is changed in that case.
    """
    return plain_models.load(
      self._keras_model, self._index("i", i), self._optimizer, into
    )

  def initialize(self, build: Callable[[], Any], seeds: Sequence[int]) -> None:
    """Gives each model the initial values that its seed gives to a plain model.

    Model i starts as a plain model starts after

        keras.utils.set_random_seed(seeds[i])
        build()

    with the weights, the other variables and the states of random number
    generators, such as those of dropout. So an ensemble trains as separate fits
    do. What a layer learned by `adapt`, and what `assign` has set, stays. The
    optimizer's slots and its count of steps get the initial values that it
    gives to the new weights; learning rates do not change. The random states of
    the program (of Python, NumPy, TensorFlow and Keras) are as before.

    Args:
      build: A function without arguments that returns a new, built model with
        the same variables. It is called outside of the strategy, once for each
        model.
      seeds: An integer for each model. Models with the same seed start alike.

    Raises:
      TypeError: If `build` does not return a Keras model, or `seeds` is no
        list.
      ValueError: If there is not one seed for each model, or if `build` makes
        other variables. Nothing is changed in that case.
    """
    initial_values.initialize(self._keras_model, build, seeds, self._optimizer)

  def assign(self, variable: Any, values: Any) -> None:
    """Sets a variable to a value of its own in each model.

    A number that differs between models, such as a mask, a dropout rate or a
    weight in a loss, is a variable: a non-trainable weight of a layer, or a
    `tf.Variable` that was created in the strategy's scope.

    Args:
      variable: A weight, a slot, `optimizer.learning_rate`, or a `tf.Variable`.
      values: An array `[num_models, ...]`, or what NumPy converts to one.

    Raises:
      TypeError: If `variable` is not a variable. The learning rates of
        `schedules.PerModel` are set by its own `assign`.
      ValueError: If `values` has another shape or a dtype that does not fit, or
        if `variable` was created outside of the scope, so that all models have
        one value. Nothing is changed in that case.
    """
    native = replicas_lib.native(variable)
    copies, groups = self._copies_of(variable)
    shape = [groups.num_groups, *native.shape]
    dtype = tf.as_dtype(native.dtype).as_numpy_dtype
    given = np.asarray(values)
    fits = given.dtype == dtype or np.can_cast(given.dtype, dtype, "same_kind")
    is_shape = tf.TensorShape(shape).is_compatible_with(given.shape)
    if not (fits and is_shape):
      raise ValueError(
        f"`values` must be {np.dtype(dtype).name} {shape}, with a row for each"
        f" model; got {given.dtype.name} {list(given.shape)}."
      )
    arrays = [row.astype(dtype) for row in given]
    if replicas_lib.strategy_of(variable) is None and not (
      replicas_lib.are_alike(arrays)
    ):
      raise ValueError(
        f"`variable` is {native.name}, which was created outside of the"
        " strategy's scope, so all models have one value of it. Create it"
        " inside `with strategy.scope():`."
      )
    copies.compare_workers(f"assigning values of {_kind(variable)}")
    here = copies.engine.local_replicas
    copies.write(variable, [arrays[groups.index_of(r)] for r in here])
    initial_values.keep(native)
    group_state.accept_values(self._optimizer)

  def values(self, variable: Any) -> archive.Array:
    """Returns the values of a variable in all models.

    Args:
      variable: A weight, a slot, `optimizer.learning_rate`, or a `tf.Variable`.

    Returns:
      An array `[num_models, ...]` of the variable's dtype. Members of a group
      have the same value, or you get the value of the first member.
    """
    copies, groups = self._copies_of(variable)
    copies.compare_workers(f"reading values of {_kind(variable)}")
    group_state.warn_if_collapsed(self._optimizer)
    if replicas_lib.strategy_of(variable) is None:
      return np.stack(copies.here(variable)[:1] * groups.num_groups)
    return np.stack(copies.read(variable, [members[0] for members in groups]))

  def set_weights(self, i: int, weights: Any) -> None:
    """Sets the weights of model i; other models keep theirs.

    Args:
      i: The number of the model. A negative number counts from the end.
      weights: A list of arrays, as `get_weights` returns it, or a plain model
        of the same architecture.

    Raises:
      ValueError: If there is no such model, or if the weights have another
        number or other shapes. Nothing is changed in that case.
    """
    model = self._keras_model
    members = self._groups.assignment[self._index("i", i)]
    state = self._state(with_optimizer=False)
    if hasattr(weights, "variables"):
      plain = plain_models.receivers(
        state, weights, what="`weights` is a model that"
      )
      values = {key: variable.numpy() for key, variable in plain.items()}
      for key, dropout in plain_models.dropouts(state.rates, weights).items():
        values[key] = dropout.rate
      entries = [entry for entry in state.entries if entry.key in values]
      pairs = [(entry.variable, values[entry.key]) for entry in entries]
    else:
      targets, arrays = model.weights, list(map(np.asarray, weights))
      shapes = [list(v.shape) for v in targets]
      if [list(array.shape) for array in arrays] != shapes:
        raise ValueError(
          f"`weights` must have the shapes {shapes}; got"
          f" {[list(array.shape) for array in arrays]}."
        )
      pairs = list(zip(targets, arrays, strict=True))
    state.compare_workers(f"setting the weights of model {i}")
    for variable, array in pairs:
      copies = state.copies.here(variable)
      for place, replica in enumerate(state.copies.engine.local_replicas):
        if replica in members:
          copies[place] = np.asarray(array, copies[place].dtype)
      state.copies.write(variable, copies)
    group_state.accept_values(self._optimizer)

  def predict(self, x: Any, batch_size: int = 32) -> Any:
    """Returns the predictions of every model.

    Model i predicts as `models[i].predict(x)` does. Under VectorizedStrategy,
    one program predicts with all models, also with models that Keras cannot
    clone. Under other strategies, the models predict one after the other.

    Args:
      x: An array, or a structure of arrays as the model takes it, or a
        `tf.data.Dataset` of batches of inputs.
      batch_size: The number of rows in one call of the model; ignored for a
        dataset.

    Returns:
      A NumPy array `[num_models, rows, ...]`, in the structure that the model
      returns; on every worker.

    Raises:
      TypeError: If `x` is a list of numbers, a generator or another object.
      ValueError: If `x` is empty or has no end or, under other strategies than
        VectorizedStrategy, if Keras cannot clone the model.
    """
    return predictions.predict(
      self._keras_model, x, self._optimizer, batch_size
    )

  def ensemble(self, stack: bool = False) -> Any:
    """Returns a plain model that averages the predictions of all models.

        output = (output of model 0 + output of model 1 + ...) / num_models

    for each of the model's outputs or, if `stack`, the outputs of all models as
    `[rows, num_models, ...]`. The ensemble consists of the plain models, named
    `model_0`, `model_1`, ..., and of Keras' own Average layer, so you can save,
    export and load it without this package. If a model ends with softmax, the
    ensemble averages probabilities; if it returns logits, the ensemble averages
    logits.

    Args:
      stack: Whether to return all predictions instead of their mean, for
        example for their standard deviation.

    Returns:
      A functional Keras model with the inputs and outputs of one model, on
      every worker. It is not compiled.

    Raises:
      ValueError: If Keras cannot clone the model, if its inputs are not known,
        or if an output has a dtype without a mean and `stack` is False.
    """
    return plain_models.ensemble(self._keras_model, self._optimizer, stack)

  def copy(self, source: int, target: int) -> None:
    """Gives one model the weights and the optimizer state of another model.

    After the copy, the target trains as the source would with the target's
    data, learning rate and `per_model` settings. The method copies all values
    that `save` writes, including moving averages, accumulated gradients and the
    loss scale, except for

    - the learning rate and the settings in `per_model`;
    - the model's integer variables, such as the states of random number
      generators.

    Where members of a group have different values, member j of the target
    receives the values of member j of the source. No other model changes.

    Args:
      source: The number of the model to copy.
      target: The number of the model that receives the copy.

    Raises:
      ValueError: If there is no such model.
    """
    indices = self._index("source", source), self._index("target", target)
    plain_models.copy(*indices, self._state())

  def save(self, path: Any) -> None:
    """Writes the weights and the optimizer state of every model to one file.

    Each model is written once, whatever its number of replicas. Variables that
    the model does not train and that differ between members of a group, such as
    the statistics of batch normalization, are written once per replica. The
    file contains `model.variables`, including the states of random number
    generators but without metrics, and all variables of the optimizer: slots,
    iteration count, learning rate and loss scale.

    The file is replaced atomically: a crash leaves the previous file unchanged.
    `np.load(path)` shows the arrays, under names such as `model_0/model/...`.
    On several machines, the first worker writes and the other workers wait for
    it.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> from tf_cross_shard import Models
    >>> weight = tf.Variable(3.0)
    >>> optimizer = tf.keras.optimizers.SGD()
    >>> optimizer.build([weight])
    >>> models = Models([weight], optimizer)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   models.save(f"{folder}/state")
    ...   _ = weight.assign(0.0)
    ...   models.restore(f"{folder}/state")
    ...   [plain] = Models.read(f"{folder}/state", 0, [tf.Variable(0.0)])
    >>> float(weight.numpy()), float(plain.numpy())
    (3.0, 3.0)

    Args:
      path: A file in an existing folder: a path that `etils.epath` takes, such
        as `gs://...`.

    Raises:
      OutOfSyncError: If members of a group differ in trained weights or in
        optimizer state that they share.
      OSError: If the file cannot be written; raised on all workers.
      ValueError: If `path` ends with `.keras` or `.h5`, or if an optimizer
        without a model is not built.
    """
    target = archive.as_path(path)
    archive.check_not_keras(target)
    if hasattr(self._model, "optimizer"):
      checkpoint.build(self._optimizer, self._model)
    state, topic = self._state(), f"saving {target.name}"
    state.write(target, topic, state.arrays(topic))

  def restore(self, path: Any) -> None:
    """Gives every model the values that `save` wrote for it.

    The groups may consist of different replicas than before, and may have a
    different size. Where members of a group have different values, member j of
    the new group receives the values of member j of the saved group. If the
    size of the groups has changed, all members receive the mean of these
    values, and an unfinished window of `accumulate_steps` starts again.

    The method reads and compares everything before it changes anything. With
    groups of the same size, training continues exactly as if it had not been
    interrupted. An optimizer that is not built is built on the model's
    trainable variables. On several machines, each worker reads the file, and
    all workers have to read the same file.

    Args:
      path: A file that `save` or `PerModelCheckpoint` wrote.

    Raises:
      CheckpointError: If the file is damaged, or has another number of models,
        or other variables, shapes or dtypes; if workers read different files;
        or if optimizer and model belong to different strategies. It is a
        ValueError. An error of one worker is raised on all workers.
      OSError: If the file cannot be read.
    """
    checkpoint.restore(archive.as_path(path), self._optimizer, self._model)

  @staticmethod
  def read(path: Any, i: int, into: Any) -> Any:
    """Gives a plain model the weights of one model in a file.

    Use this to serve or inspect a model on one device. It needs no strategy, no
    optimizer and no other model. For variables that are not trained, `into`
    receives the same values as from `load`. It may have different random number
    generators than the file, for example none because it has no dropout. In
    this case the states of all generators are ignored, because predictions need
    no random numbers. Where the file has a `TunableDropout`, `into` may have
    Keras' `Dropout`, which receives the rate. The method reads and compares
    everything before it changes anything.

    Args:
      path: A file that `save` or `PerModelCheckpoint` wrote.
      i: The number of the model, from 0.
      into: A built model that was created by the same code outside any
        strategy, or a list of variables.

    Returns:
      `into`.

    Raises:
      CheckpointError: If the file is damaged, has no such model, or has other
        variables, shapes or dtypes. It is a ValueError.
      OSError: If the file cannot be read.
    """
    return checkpoint.read(archive.as_path(path), i, into)

  def average(self) -> None:
    """Gives every replica the mean over all replicas of all models.

        mean = (value of replica 0 + value of replica 1 + ...) / num_replicas

    The sum is computed in float64 and in this order, so that all replicas
    receive the same bits under every strategy. If the sum overflows, the values
    are divided before they are added.

    The method averages the model's floating-point variables, including the
    statistics of batch normalization. Integer variables, such as the states of
    random number generators, do not change, nor does the optimizer's state.
    """
    state = self._state(with_optimizer=False)
    state.compare_workers("averaging")
    replicas, here = (
      state.groups.num_replicas,
      state.copies.engine.local_replicas,
    )
    for entry in state.entries:
      if group_state.has_mean(entry.variable):
        values = state.copies.read(entry.variable, range(replicas))
        mean = group_state.mean(values)
        state.copies.write(entry.variable, [mean] * len(here))
    group_state.accept_values(self._optimizer)

  def assert_in_sync(self) -> None:
    """Raises an error unless members of each group have exactly equal values.

    Members of a group stay equal as long as they start equal and only the
    optimizer changes them. The method compares the optimizer's variables and
    the trainable variables of the model. Other variables of the model, such as
    the statistics of batch normalization, may differ between members.

    Raises:
      OutOfSyncError: If members differ. The error names the variable, the group
        and the largest difference. It is an AssertionError.
    """
    state = self._state()
    state.compare_workers("assert_in_sync")
    state.keys_that_differ("assert_in_sync")  # Raises the error.

  @property
  def _groups(self) -> groups_lib.Groups:
    strategy = None
    if self._model is not None:
      strategy = self._state(with_optimizer=False).copies.engine.strategy
    return nested_lib.groups_of(self._optimizer, strategy)

  @property
  def _keras_model(self) -> Any:
    if self._model is None:
      raise TypeError(
        "This method needs the model: call Models(model, optimizer)."
      )
    return self._model

  def _state(self, with_optimizer: bool = True) -> group_state.GroupState:
    return group_state.GroupState(self._optimizer, self._model, with_optimizer)

  def _copies_of(
    self, variable: Any
  ) -> tuple[replicas_lib.Copies, groups_lib.Groups]:
    strategy = replicas_lib.strategy_of(variable)
    groups = self._groups
    if strategy is None:
      return replicas_lib.Copies(tf.distribute.get_strategy()), groups
    copies = replicas_lib.Copies(strategy)
    return copies, nested_lib.groups_of(self._optimizer, copies.engine.strategy)

  def _index(
    self, argument: str, i: Any, kind: type[Exception] = ValueError
  ) -> int:
    """Returns the number of a model, from 0."""
    count = len(self)
    is_number = isinstance(i, (int, np.integer)) and not isinstance(i, bool)
    if not is_number or i not in range(-count, count):
      got = i if i is None or np.isscalar(i) else type(i)
      raise kind(
        f"`{argument}` must be an integer from 0 to {count - 1}; got {got!r}."
      )
    return int(range(count)[i])


def _kind(variable: Any) -> str:
  native = replicas_lib.native(variable)
  return f"a variable {tf.as_dtype(native.dtype).name} {list(native.shape)}"
