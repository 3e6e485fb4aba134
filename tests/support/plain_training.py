"""Runs a random program with plain Keras and NumPy, and compares the results.

A tape computes the gradients of each replica alone. NumPy scales, clips and
sums them. The plain optimizer applies the sums, once per group. Nothing here
uses a strategy or the package.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tests.support import random_programs, testbed, training
from tests.support.random_programs import Features, Model, Program

_TOLERANCES = {
  "float64": 1e-9,
  "float32": 2e-5,
  "float16": 2e-2,
  "mixed_float16": 2e-2,
  "bfloat16": 0.125,
}


class Gradient(NamedTuple):
  dense: np.ndarray
  # The values and indices of a sparse gradient, with repeated indices.
  rows: tuple[np.ndarray, np.ndarray] | None


Gradients = list[Gradient | None]  # in the order of the variables


def check(
  program: Program, states: Sequence[random_programs.State] | None = None
) -> None:
  """Raises `AssertionError` unless every replica holds what is expected.

  Trains the program unless the states of workers are given.
  """
  if states is None:
    states = random_programs.train(program)
  assert len(states) == program.replicas > 1
  before = [variable.numpy() for variable in Model(program).trained]
  moved = []
  for members in program.groups:
    right, largest = expected(program, members)
    for replica in members:
      found, first = states[replica], states[members[0]]
      where = f"replica {replica} of {members}"
      assert found.skipped == right.skipped, f"{where}: {found.skipped} skipped"
      for i, values in enumerate(
        zip(
          found.variables,
          first.variables,
          right.variables,
          largest,
          strict=True,
        )
      ):
        _compare(*values, program, f"{where}, variable {i}")
    pairs = zip(before, right.variables, strict=False)
    # Gradients that are clipped to the same norm may cancel each other.
    settings = (*program.options, *program.settings)
    is_clipped = any("clip" in name for name in settings)
    is_idle = is_clipped or bool(right.skipped) or program.scales_loss
    moved.append(is_idle or any((a != b).any() for a, b in pairs))
  # In one group, whole numbers may add up to 0 by chance.
  assert any(moved), "nothing was trained"


def _compare(
  mine: np.ndarray,
  first: np.ndarray,
  right: np.ndarray,
  largest: float,
  program: Program,
  what: str,
) -> None:
  """Checks that members have equal bits, and values close to plain Keras'."""
  assert mine.dtype == right.dtype, what
  assert mine.tobytes() == first.tobytes(), f"{what} differs from its group's"
  assert np.isfinite(right.astype("float64")).all(), f"{what}: {right} expected"
  distance = np.abs(mine.astype("float64") - right.astype("float64"))
  worst = np.unravel_index(distance.argmax(), mine.shape) if mine.size else ()
  assert distance.max(initial=0.0) <= tolerance(program) * largest, (
    f"{what}: {mine[worst]} at {[*map(int, worst)]}, {right[worst]} expected"
  )


def tolerance(program: Program) -> float:
  """Returns the allowed error, relative to a variable's largest magnitude."""
  if program.is_exact:
    return 0.0
  coarse = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
  wire = program.options.get("wire_dtype")
  # Collectives in conditions, between workers and on TPUs add in the wire
  # dtype. A window ends in a condition, too.
  is_in_condition = program.mode == "cond" or (
    program.mode != "eager" and "accumulate_steps" in program.options
  )
  if wire and (is_in_condition or program.is_on_workers or program.is_virtual):
    return coarse[wire]
  if wire:
    return _TOLERANCES["float32"]  # The sum is computed in float32.
  return max(_TOLERANCES[dtype] for _, dtype in program.parts)


def expected(
  program: Program, members: Sequence[int]
) -> tuple[random_programs.State, list[float]]:
  """Returns the state that a group of replicas must have after training.

  Also returns the largest magnitude of each variable. The allowed error is
  relative to it.
  """
  model = Model(program)
  group = program.groups.index(list(members))
  optimizer = random_programs.make_optimizer(program, group)
  if program.excluded:
    testbed.base_optimizer(optimizer).exclude_from_weight_decay(
      var_names=program.excluded
    )
  optimizer.build(model.known)
  gradients = _gradients_of(program, model)
  history: list[list[np.ndarray]] = []

  def values() -> list[np.ndarray]:
    variables = [*model.known, *optimizer.variables]
    return [variable.numpy() for variable in variables]

  skipped = 0
  window = program.options.get("accumulate_steps", 1)
  pending: list[list[Gradients]] = []
  is_finite = True
  for replicas in random_programs.data(program):
    loss_scale = _loss_scale(optimizer)
    local: list[Gradients] = [
      _local_gradients(
        program, model, gradients, replicas[replica], members, loss_scale
      )
      for replica in members
    ]
    is_finite &= all(
      np.isfinite(grad.dense).all() for grads in local for grad in grads if grad
    )
    if is_finite:
      local = [_clip(program.options, grads) for grads in local]
    pending.append(local)
    if len(pending) < window:
      continue
    local = [_add_up(calls) for calls in zip(*pending, strict=True)]
    pending, was_finite, is_finite = [], is_finite, True
    skipped += not was_finite
    if not was_finite:
      assert program.options["skip_nonfinite"] or program.scales_loss
      if program.scales_loss:  # Keras halves the scale.
        nan = [
          tf.cast(tf.fill(v.shape, np.nan), v.dtype) for v in model.trained
        ]
        optimizer.apply_gradients(zip(nan, model.trained, strict=True))
      continue
    if len(members) > 1:
      local = [_narrow(program.options, grads) for grads in local]
    # Keras 3 divides gradients by the loss scale; of tf_keras, users do.
    scale = (1.0 if testbed.IS_TF_KERAS else loss_scale) / window
    by_variable = zip(*local, strict=True)
    pairs = [
      (_sum(program, parts, variable, scale), variable)
      for parts, variable in zip(by_variable, model.trained, strict=True)
    ]
    if program.optimizer == "Nadam" and testbed.IS_TF_KERAS:
      # Nadam of tf_keras would take variables for steps after a skipped step.
      base = testbed.base_optimizer(optimizer)
      base._u_product_counter = int(base.iterations) + 1
    if program.options.get("lazy_rows") and not program.is_virtual:
      _apply_lazily(optimizer, pairs)
    else:
      optimizer.apply_gradients(pairs)
    if "wire_dtype" in program.options:
      # A rounding error that was made while a weight was large stays in the
      # weight.
      history.append(values())
  if program.way == "fit":  # Moving averages replace the weights.
    testbed.base_optimizer(optimizer).finalize_variable_values(model.known)
  history.append(values())
  counts = program.options.get("skip_nonfinite")
  state = random_programs.State(history[-1], skipped if counts else None)
  return state, [
    max(float(np.abs(value).max(initial=0.125)) for value in past)
    for past in zip(*history, strict=True)
  ]


def _loss_scale(optimizer: Any) -> float:
  name = "loss_scale" if testbed.IS_TF_KERAS else "dynamic_scale"
  return float(getattr(optimizer, name, 1.0))


def _apply_lazily(optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
  """Applies gradients; rows of tables without a gradient keep all their bits.

  Plain Keras changes these rows, and their slots. They are restored afterwards.
  """
  kept: list[tuple[Any, np.ndarray, np.ndarray]] = []
  for grad, table in pairs:
    if isinstance(grad, tf.IndexedSlices):
      rows = np.setdiff1d(np.arange(table.shape[0]), grad.indices)
      name = table.name.split(":")[0].rpartition("/")[2]
      kept += [
        (each, rows, each.numpy()[rows])
        for each in (table, *optimizer.variables)
        if name in each.name and tuple(each.shape) == tuple(table.shape)
      ]
  optimizer.apply_gradients(pairs)
  for each, rows, values in kept:
    whole = each.numpy()
    whole[rows] = values
    each.assign(whole)


def _add_up(calls: Sequence[Gradients]) -> Gradients:
  """Sums one replica's gradients over a window; rows become dense."""
  if len(calls) == 1:
    return calls[0]
  return [
    None
    if parts[0] is None
    else Gradient(sum(part.dense for part in parts), None)
    for parts in zip(*calls, strict=True)
  ]


def factor(program: Program, group_size: int) -> float:
  """Returns the factor by which each replica's gradients are multiplied."""
  options = program.options
  is_mean = options["reduction"] == "mean"
  if program.way == "bare" and not options["scale_gradients"]:
    return 1.0
  default = training.WAYS[program.way]
  if options["scale_gradients"]:
    default = "global"
  is_global = (options["loss_averaged_over"] or default) == "global"
  copies = program.replicas if is_global else 1
  return copies / group_size if is_mean else float(copies)


def _gradients_of(
  program: Program, model: Model
) -> Callable[[Features, Any], list[Any]]:
  """Returns a function from a replica's examples to TensorFlow's gradients.

  Its second argument multiplies the loss.

  It is traced like the program: where `tanh` saturates, TensorFlow rounds
  traced gradients differently.
  """

  def gradients(features: Features, seed: Any) -> list[Any]:
    variables = training.native(model.trained)
    with tf.GradientTape() as tape:
      loss = seed * model.loss_of(program, features)
    found: list[Any] = tape.gradient(loss, variables)
    return found

  if program.mode == "eager":
    return gradients
  traced: Callable[[Features, Any], list[Any]] = tf.function(
    gradients, autograph=False
  )
  return traced


def _local_gradients(
  program: Program,
  model: Model,
  gradients: Callable[[Features, Any], list[Any]],
  features: Features,
  members: Sequence[int],
  loss_scale: float,
) -> Gradients:
  variables = training.native(model.trained)
  times = factor(program, len(members))
  seed = loss_scale * (1.0 if program.options["scale_gradients"] else times)
  grads = gradients(random_programs.as_tensors(features), tf.constant(seed))
  found: Gradients = []
  for variable, grad in zip(variables, grads, strict=True):
    dense, rows = np.zeros(variable.shape), None
    if grad is None:
      found.append(None)
      continue
    if isinstance(grad, tf.IndexedSlices):
      indices = grad.indices.numpy()
      values = grad.values.numpy().astype("float64")
      np.add.at(dense, indices, values)
      rows = values * (times / seed), indices
    else:
      dense += grad.numpy().astype("float64")
    found.append(Gradient(dense * (times / seed), rows))
  return found


def _clip(options: dict[str, Any], grads: Gradients) -> Gradients:
  """Clips one replica's gradients as the arguments of the wrapper say."""
  norms = [np.linalg.norm(grad.dense) if grad else 0.0 for grad in grads]

  def clip(dense: np.ndarray, norm: float) -> np.ndarray:
    if "clipvalue" in options:
      return np.clip(dense, -options["clipvalue"], options["clipvalue"])
    limit = options.get("clipnorm")
    if "global_clipnorm" in options:
      limit, norm = options["global_clipnorm"], float(np.linalg.norm(norms))
    return dense if limit is None or norm <= limit else dense * (limit / norm)

  if not {"clipvalue", "clipnorm", "global_clipnorm"} & {*options}:
    return grads
  clipped: Gradients = []
  for grad, norm in zip(grads, norms, strict=True):
    if grad is None:
      clipped.append(None)
      continue
    dense, rows = clip(grad.dense, norm), None
    if grad.rows is not None:  # Each row once.
      indices = np.unique(grad.rows[1])
      rows = dense[indices], indices
    clipped.append(Gradient(dense, rows))
  return clipped


def _narrow(options: dict[str, Any], grads: Gradients) -> Gradients:
  wire = options.get("wire_dtype")
  if wire is None:
    return grads

  def narrow(dense: np.ndarray) -> np.ndarray:
    return tf.cast(dense, wire).numpy().astype("float64")

  return [
    grad
    and Gradient(
      narrow(grad.dense),
      grad.rows and (narrow(grad.rows[0]), grad.rows[1]),
    )
    for grad in grads
  ]


def _sum(
  program: Program,
  grads: Sequence[Gradient | None],
  variable: Any,
  scale: float,
) -> Any:
  """Returns the sum as a tensor, or as the rows of all members.

  Some options add up rows of the same index, of which plain Keras would square
  each. On TPUs, gradients are dense.
  """
  parts = [grad for grad in grads if grad is not None]
  if not parts:
    return None
  assert len(parts) == len(grads)
  dense, dtype = scale * sum(part.dense for part in parts), variable.dtype
  if parts[0].rows is None or program.is_virtual:
    return tf.constant(dense, dtype)
  values, indices = map(
    np.concatenate, zip(*(p.rows for p in parts), strict=True)
  )
  values, options = scale * values, program.options
  is_sharded = options.get("shard_update") and len(grads) > 1
  is_sharded &= not _updates_rows(program, variable)
  if is_sharded or options.get("lazy_rows") or options.get("fused_update"):
    indices = np.unique(indices)
    values = dense[indices]
  return tf.IndexedSlices(
    tf.constant(values, dtype),
    tf.constant(indices, tf.int32),
    tf.constant(dense.shape),
  )


def _updates_rows(program: Program, variable: Any) -> bool:
  """Whether plain Keras updates only the rows in the batch.

  So does the package, with `shard_update`, too.
  """
  kinds = ["Adagrad"] if testbed.IS_TF_KERAS else ["Adagrad", "SGD"]
  is_embedding = variable.name.split(":")[0].endswith("embeddings")
  is_moving = {"momentum", "weight_decay"} & {*program.settings}
  return is_embedding and program.optimizer in kinds and not is_moving
