"""Converts a checkpoint of TensorFlow 1 to one of TensorFlow 2 and Keras.

    TensorFlow 1, by name                     Keras, by object
    dense/kernel                         ──▶  weight of the model
    dense/kernel/Adam, .../Adam_1        ──▶  its slots momentum and velocity
    global_step                          ──▶  optimizer.iterations

Training continues with the numbers that it would have had in TensorFlow 1.
`conversion_plan` decides which variable receives which value, by names alone.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.inner import inner as inner_lib
from tf_cross_shard._src.core.inner import keras_private
from tf_cross_shard._src.migration import conversion_plan
from tf_cross_shard._src.replica_state import paths as paths_lib


@dataclasses.dataclass(frozen=True)
class Conversion:
  """Result of `convert_checkpoint`; printing it gives a table.

  Attributes:
    path: The prefix of the checkpoint that was written.
    matched: For each variable that received a value, the name of that value in
      the checkpoint. The keys are the names of variables. A slot is named after
      its variable, such as "dense/kernel/momentum"; the optimizer's number of
      steps is named "iterations".
    unmatched_in_checkpoint: Names and shapes of the values that no variable
      received.
    unmatched_in_model: Names and shapes of the variables of the model and the
      optimizer that kept their values.
  """

  path: str
  matched: Mapping[str, str]
  unmatched_in_checkpoint: Mapping[str, tuple[int, ...]]
  unmatched_in_model: Mapping[str, tuple[int, ...]]

  def __str__(self) -> str:
    """Returns a table."""
    width = max(map(len, self.matched), default=0)
    lines = [f"{self.path}: {len(self.matched)} variables"]
    lines += [f"  {n:<{width}}  {s}" for n, s in self.matched.items()]
    lines += conversion_plan.unmatched_lines(
      self.unmatched_in_checkpoint, self.unmatched_in_model
    )
    return "\n".join(lines)


def convert_checkpoint(
  src: str | os.PathLike[str],
  dst: str | os.PathLike[str],
  model: Any,
  optimizer: Any,
  *,
  names: conversion_plan.Names | None = None,
  iterations: int | None = None,
) -> Conversion:
  """Converts weights, slots and the number of steps from TensorFlow 1.

  Afterwards, the model and the optimizer hold the values on every replica, and
  `dst` is a checkpoint of TensorFlow 2. Another program reads the checkpoint by

      tf.train.Checkpoint(model=model, optimizer=optimizer).read(dst)

  The optimizer of that program must have the same class and must be built on
  the same variables, inside a CrossShardOptimizer or not. TensorFlow does not
  notice a different class, although the momentum of an optimizer that `from_v1`
  makes differs from the momentum of a plain Keras SGD.

  >>> import os, tempfile
  >>> import tensorflow as tf
  >>> v1 = tf.compat.v1
  >>> folder = tempfile.TemporaryDirectory()
  >>> src = os.path.join(folder.name, "v1")
  >>> with tf.Graph().as_default(), v1.Session() as session:
  ...   old = v1.get_variable("w", initializer=[1.0, 2.0])
  ...   step = v1.train.get_or_create_global_step()
  ...   adam = v1.train.AdamOptimizer(0.5)
  ...   train = adam.minimize(tf.reduce_sum(old), global_step=step)
  ...   session.run(v1.global_variables_initializer())
  ...   for _ in range(3):
  ...     session.run(train)
  ...   src = v1.train.Saver().save(session, src)
  >>> weight = tf.Variable([0.0, 0.0], name="w")
  >>> adam = tf.keras.optimizers.Adam(0.5, epsilon=1e-8)
  >>> dst = os.path.join(folder.name, "v2")
  >>> done = convert_checkpoint(src, dst, [weight], adam)
  >>> weight.numpy().round(3), int(adam.iterations)
  (array([-0.5,  0.5], dtype=float32), 3)
  >>> done.matched["iterations"]
  'global_step'
  >>> folder.cleanup()

  Variables are matched by these names only:

  - A weight by its own name, with or without the name of the model before it.
  - A slot by the name that TensorFlow 1 used, such as `weight/Adam` and
    `weight/Adam_1`.
  - A slot of a class that TensorFlow 1 did not have, such as Lamb or a class
    of your own, by its own name, such as "dense/kernel/adam_m".
  - The number of steps by the name `global_step`.

  If a name has no counterpart, you get an error before any value changes. The
  error lists both sides and shows which argument to add.

  Only state is converted. Give the new optimizer the learning rate, the betas
  and the other hyperparameters that the old one had. The momentum of a Keras
  SGD contains the learning rate, so training continues unchanged as long
  as the learning rate does not change.

  With several machines, convert on one machine and restore on all.

  Args:
    src: The prefix of the old checkpoint, or a folder, which stands for its
      latest checkpoint. The old checkpoint is only read.
    dst: The prefix of the new checkpoint. Its folder is created if necessary.
    model: A Keras model or a tf.Module with its variables created, or a list
      of variables.
    optimizer: A CrossShardOptimizer or another optimizer of Keras 3 or
      tf_keras, but not of `tf_keras.optimizers.legacy`. If it is not built, it
      is built on the trainable variables.
    names: Entries for everything that is not found by itself. They map names
      in the model and the optimizer ("dense/kernel", "dense/kernel/momentum",
      "iterations") to names in the checkpoint. A second variable of the same
      name is called "name#2". "{}" stands for every weight: {"{}": "scope/{}"}
      finds the weights, and {"{}/momentum": "{}/my_adam"} finds a slot, where
      the second "{}" is the name of the weight in the checkpoint. Map a
      name of either side to None to skip the name. There, "{}" matches any
      text, as in {"{}/ExponentialMovingAverage": None}.
    iterations: The number of steps that the old program had made. None (the
      default) reads the only `global_step` of the checkpoint.

  Returns:
    The names that were matched and those that were not.

  Raises:
    ValueError: If a name has no counterpart or more than one; if a shape or
      dtype differs; if an entry of `names` fits nothing; if `src` is a
      checkpoint of TensorFlow 2; if `model` has no variables; if the momentum
      contains a learning rate that is a schedule.
    tf.errors.OpError: If there is no checkpoint at `src`.
    FileExistsError: If there is a checkpoint at `dst`.
    TypeError: If `optimizer` is one of `tf_keras.optimizers.legacy`.
    RuntimeError: If called in a tf.function.
  """
  if not tf.executing_eagerly():
    raise RuntimeError(
      "A checkpoint is converted eagerly; this is in a tf.function or a graph."
      " Convert it before training."
    )
  target = os.fspath(paths_lib.as_path(dst, "dst"))
  if tf.io.gfile.exists(f"{target}.index"):
    raise FileExistsError(
      f"`dst` is {target!r}, but a checkpoint with this name already exists."
      " Choose a different prefix, or delete the existing checkpoint."
    )
  plan = conversion_plan.ConversionPlan(
    _checkpoint_prefix(src), model, {} if names is None else names
  )
  weights = plan.find_weights(model)
  _build(optimizer, plan.trained, weights)
  plan.find_state(optimizer, iterations)
  plan.check()
  # Read all values first: a damaged file is an error before any value changes.
  values = {name: plan.value(name) for name in plan.matched}
  for name, value in values.items():
    variable = plan.wanted[name]
    with _scope(variable):
      variable.assign(value)
  tf.train.Checkpoint(model=model, optimizer=optimizer).write(target)
  return Conversion(
    target,
    plan.matched,
    plan.unmatched_in_checkpoint,
    plan.unmatched_in_model,
  )


def _checkpoint_prefix(src: Any) -> str:
  """Returns the prefix of a checkpoint; for a folder, that of its latest."""
  path = os.fspath(paths_lib.as_path(src, "src"))
  is_prefix = tf.io.gfile.exists(f"{path}.index")
  latest = None if is_prefix else tf.train.latest_checkpoint(path)
  return latest or path


def _build(optimizer: Any, trained: Sequence[Any], weights: Any) -> None:
  """Creates the slots of the optimizer unless it is built."""
  innermost = inner_lib.innermost(optimizer)
  modules = [kind.__module__ for kind in type(innermost).__mro__]
  if any("optimizers.legacy" in module for module in modules):
    raise TypeError(
      f"`optimizer` is {type(innermost).__name__}, one of"
      " tf_keras.optimizers.legacy. Pass an optimizer of tf_keras.optimizers,"
      " or convert TensorFlow 1's optimizer with"
      " tf_cross_shard.migration.from_v1."
    )
  if not keras_private.is_built(innermost):
    with _scope(weights[0]):
      optimizer.build(list(trained))


def _scope(variable: Any) -> contextlib.AbstractContextManager[Any]:
  """Returns the scope of the strategy that a variable belongs to."""
  strategy = getattr(
    variables_lib.native(variable), "distribute_strategy", None
  )
  return strategy.scope() if strategy else contextlib.nullcontext()
