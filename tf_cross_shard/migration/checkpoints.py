"""A checkpoint of TensorFlow 1 becomes one of TensorFlow 2 and Keras.

    TensorFlow 1, by name                     Keras, by object
    dense/kernel                         ──▶  model's weight
    dense/kernel/Adam, .../Adam_1        ──▶  its slots, momentum and velocity
    global_step, beta1_power             ──▶  optimizer.iterations

Training goes on with the numbers that it would have had.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from tf_cross_shard.migration import (
  adapters,
  matching,
  models,
  planning,
  v1_file,
  writing,
)
from tf_cross_shard.replica_state import replica_values


@dataclasses.dataclass(frozen=True)
class Conversion:
  """What `convert_checkpoint` did.

  Attributes:
    path: The prefix of the checkpoint that was written.
    matched: For each variable that received a value, by its name, the
      checkpoint's name of the value. A slot stands under its variable's name
      and its own, as "dense/kernel/momentum"; the optimizer's count of steps is
      "iterations".
    unmatched_in_checkpoint: What nothing received: names and shapes.
    unmatched_in_model: Variables of the model and the optimizer that are as
      they were: names and shapes.
  """

  path: str
  matched: Mapping[str, str]
  unmatched_in_checkpoint: Mapping[str, tuple[int, ...]]
  unmatched_in_model: Mapping[str, tuple[int, ...]]

  def __str__(self) -> str:
    """A table."""
    width = max(map(len, self.matched), default=0)
    lines = [f"{self.path}: {len(self.matched)} variables"]
    lines += [f"  {n:<{width}}  {s}" for n, s in self.matched.items()]
    for where, shapes in (
      ("in the checkpoint only", self.unmatched_in_checkpoint),
      ("in model and optimizer only", self.unmatched_in_model),
    ):
      if shapes:
        lines.append(f"{where}:")
        lines += [f"  {name} {list(shapes[name])}" for name in sorted(shapes)]
    return "\n".join(lines)


def convert_checkpoint(
  src: Any,
  dst: Any,
  model: Any,
  optimizer: Any,
  *,
  names: matching.Names = None,
  allow_unmatched: bool | Collection[str] = False,
  slots: str | None = None,
) -> Conversion:
  """Brings weights, slots and the count of steps over from TensorFlow 1.

  Model and optimizer hold the values afterwards, on every replica, so that
  training can go on at once. Elsewhere the new checkpoint is restored by

      tf.train.Checkpoint(model=model, optimizer=optimizer).read(dst)

  around an optimizer of the same class, built on the same variables. Whether it
  stands in a CrossShardOptimizer, there or here, makes no difference. The class
  does, and TensorFlow does not notice: what was converted for the optimizer
  that `from_v1` makes of MomentumOptimizer belongs into such a one only, and
  what was converted for a plain SGD into a plain SGD only. Their slots have the
  same name; those of the second are those of the first times minus the learning
  rate. `model.save` writes other formats.

  >>> import os, tempfile
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

  Weights are matched by the names of the variables, also without the model's
  own name before them. Slots are found beside the weights, under the name that
  version 1 gave to such an optimizer, or under `optimizer`'s own, which is
  version 1's where `from_v1` made it; any other is to be told in `slots`.
  Nothing is guessed: what names do not tell is an error, before anything is
  changed or built. An optimizer that cannot be made a second time from its
  settings, or keeps more than slots and the count of steps (Nadam), is the
  exception: it is built as soon as the weights fit.

  Only state is converted. Learning rate, betas, epsilon and the like, a loss
  scale too, stay what the optimizer was made with: give it what version 1 had.
  Keras' SGD has the learning rate in its momentum, so that it continues alike
  as long as that rate stays as it is; the optimizers that `from_v1` makes keep
  momentum as version 1 did, and continue alike under any schedule. Where their
  momentum is 0, they have none, and leave out what version 1 kept of it.

  On several machines convert on one, and restore on all.

  Args:
    src: The prefix of version 1's checkpoint, or a folder, of which the latest
      is taken. It is only read.
    dst: The prefix of the new one, in a folder that is there.
    model: A Keras model or tf.Module with its variables made, or a list of
      variables. Under a strategy call this in its scope.
    optimizer: A CrossShardOptimizer or another optimizer of Keras 3 or
      tf_keras. One that is not built is built on the trainable variables.
    names: For weights that have another name now: a dictionary from names in
      the model to names in the checkpoint, or a function, which may answer
      None. A second variable of the same name is known as "name#2". In a
      dictionary "iterations" is the count of steps, which is "global_step"
      otherwise.
    allow_unmatched: What need not have a counterpart: True for anything, or
      names and regular expressions that match whole names, of either side.
      Where several values might be meant, as the global steps of two
      optimizers, those that are listed here are not.
    slots: The name that version 1's optimizer had, where it was given one: for
      "dense/kernel/my_adam" it is "my_adam". Of several optimizers of one name,
      the first slot of the one that is meant, such as "Adam_2".

  Returns:
    What was matched and what was not.

  Raises:
    ValueError: If something has no counterpart, another shape or dtype, or
      more than one; if not one weight has a value, whatever is allowed; if
      counts of steps disagree; if `src` is damaged or of TensorFlow 2 (a
      CheckpointError); if `model` has no variables; if `dst` is `src`; if a
      learning rate that changes would spoil the momentum.
    TypeError: If an argument is something else.
    FileExistsError: If there is a checkpoint at `dst`.
    FileNotFoundError: If there is none at `src`, or no folder for `dst`.
    OSError: If `dst` cannot be written; nothing of it is left, and model and
      optimizer have the values that they had.
    RuntimeError: If called in a tf.function, or by a replica.
  """
  source = v1_file.prefix_of(src)
  prefix = writing.check_target(dst, src)
  # Raises an error in a tf.function and in a replica.
  replica_values.Copies(tf.distribute.get_strategy())
  allowed = matching.Allowed(allow_unmatched)
  weights = models.weights_of(model)
  adapter = adapters.adapter_of(optimizer)
  if not isinstance(slots, (str, type(None))) or slots == "":
    raise TypeError(
      "`slots` must be the name of version 1's optimizer, such as"
      f' "my_adam", or None; got {slots!r}.'
    )
  file = v1_file.V1File(source)

  def plan_with(kept: adapters.Kept | None) -> planning.Plan:
    return planning.Plan(file, model, optimizer, kept, names, allowed, slots)

  trained = models.trained_of(model)
  if not adapter.is_built:
    # An optimizer is built once: on what will be refused, it would be spoilt.
    plan_with(planning.foreseen(optimizer, trained))
    adapters.build(optimizer, trained, replica_values.strategy_of(weights[0]))
  plan = plan_with(adapters.kept(optimizer, weights))
  pairs = [(a.variable, a.value) for a in plan.assignments]
  shown = adapters.rate_after(optimizer, plan.steps)
  with writing.assigned([*pairs, *([shown] if shown else [])]):
    writing.write(prefix, model, optimizer)
  return Conversion(
    prefix,
    {each.name: each.source for each in plan.assignments},
    plan.unmatched_in_checkpoint,
    plan.unmatched_in_model,
  )
