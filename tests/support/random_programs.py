"""Draws small random training programs, and trains them with the package.

    draw(seed) -> Program -> train: what each replica holds

`plain_training` computes what each group must hold.
"""

import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer, Models, schedules
from tf_cross_shard._src.core.gradients import packing
from tf_cross_shard._src.core.reduce import mirrored

REPLICAS = testbed.REPLICAS
STEPS = 3
Features = dict[str, Any]  # x and y, and ids of rows
_ROWS = 5  # of an embedding

MODES = ("eager", "function", "cond")

# The kinds of variables: the shape, and a loss of two numbers for each example.
_VARIABLES: dict[
  str, tuple[tuple[int, ...], Callable[[Any, Features], Any]]
] = {
  "scalar": ((), lambda v, f: (f["x"][:, :1] * v - f["y"]) ** 2),
  "vector": ((2,), lambda v, f: (f["x"][:, :2] * v - f["y"]) ** 2),
  "matrix": ((3, 2), lambda v, f: (tf.matmul(f["x"], v) - f["y"]) ** 2),
  "rows": ((_ROWS, 2), lambda v, f: (tf.gather(v, f["ids"]) - f["y"]) ** 2),
  "rows_twice": (
    (_ROWS, 2),
    lambda v, f: (
      (tf.gather(v, f["ids"]) - f["y"]) ** 2
      + tf.gather(v, f["ids"][::-1]) * f["x"][:, :2]
    ),
  ),
  "rows_and_whole": (
    (_ROWS, 2),
    lambda v, f: (tf.gather(v, f["ids"]) - f["y"]) ** 2 + v[:1] ** 2,
  ),
  "large": ((40, 30), lambda v, f: f["x"][:, :2] * tf.reduce_sum(v)),
  "unused": ((2,), lambda v, f: tf.zeros_like(f["y"])),
}


def _product(variable: Any, features: Features) -> Any:
  """Returns two numbers for each example, which are linear in the variable."""
  if variable.shape.rank == 2:
    return tf.matmul(features["x"], variable)
  return features["x"][:, : variable.shape.rank + 1] * variable


def _branch(variable: Any, features: Features) -> Any:
  """Takes another branch for other data and for other weights."""
  product, y = _product(variable, features), features["y"]
  return tf.cond(
    tf.reduce_sum(product) > 0,
    lambda: (product - y) ** 2,
    lambda: (2 * product - y) * y,
  )


def _turn(value: Any, count: Any) -> Any:
  """Turns the columns and the sign `count` times, so that no number grows."""

  def body(i: Any, turned: Any) -> Any:
    return i + 1, -tf.reverse(turned, [1])

  return tf.while_loop(lambda i, _: i < count, body, [0, value])[1]


def _loop(variable: Any, features: Features) -> Any:
  return (_turn(_product(variable, features), 3) - features["y"]) ** 2


def _loop_of_data(variable: Any, features: Features) -> Any:
  """Iterates between 0 and 3 times."""
  count = tf.reduce_sum(features["ids"]) % 4
  return (_turn(_product(variable, features), count) - features["y"]) ** 2


def _loop_in_branch(variable: Any, features: Features) -> Any:
  product, count = _product(variable, features), features["ids"][0]
  # The number of iterations also depends on the branch.
  turned = tf.cond(
    tf.reduce_sum(features["ids"]) % 2 > 0,
    lambda: _turn(product, count),
    lambda: _turn(2 * product, count + 1),
  )
  return (turned - features["y"]) ** 2


# Control flow, which `virtual` draws in place of the variables of one shape.
_FLOWS: dict[str, Callable[[Any, Features], Any]] = {
  "branch": _branch,
  "loop": _loop,
  "loop_of_data": _loop_of_data,
  "loop_in_branch": _loop_in_branch,
}
_FLOW_KINDS = {
  f"{kind}_{name}": (_VARIABLES[kind][0], loss)
  for kind in ("scalar", "vector", "matrix")
  for name, loss in _FLOWS.items()
}
_LOSSES = _VARIABLES | _FLOW_KINDS
# Not tanh: where it saturates, its gradient 1 - y ** 2 is the rounding of y.
_LAYERS: dict[str, Callable[[str], Any]] = {
  "dense layer": lambda dtype: tf.keras.layers.Dense(
    2, "softsign", dtype=dtype
  ),
  "constrained layer": lambda dtype: tf.keras.layers.Dense(
    2, kernel_constraint=tf.keras.constraints.MaxNorm(0.75), dtype=dtype
  ),
  "embedding layer": lambda dtype: tf.keras.layers.Embedding(
    _ROWS, 2, dtype=dtype
  ),
  "norm layer": lambda dtype: tf.keras.layers.LayerNormalization(dtype=dtype),
}
_SPARSE = ("rows", "rows_twice", "embedding layer")
_MIXED = "mixed_float16"  # the dtype of a layer
# Large epsilons: what is left of gradients that cancel is divided by nothing.
_LARGE = {"epsilon": 1e-3}
OPTIMIZERS: dict[str, dict[str, float]] = {
  **{name: {} for name in ("SGD", "Adagrad", "Lion", "Ftrl")},
  **dict.fromkeys(("Adam", "AdamW", "Adamax", "Nadam"), _LARGE),
  **dict.fromkeys(("RMSprop", "Adadelta"), _LARGE),
  "Adafactor": {"epsilon_1": 1e-3},
}


class Program(NamedTuple):
  """One training program. Its text is enough to write the program by hand."""

  seed: int  # of the data and the first weights
  parts: tuple[tuple[str, str], ...]  # kinds of variables, and their dtypes
  is_raw: bool  # whether these are TensorFlow's variables, not Keras'
  is_built: bool  # whether the optimizer is built before the first step
  is_partial: bool  # whether steps leave out the last variable
  grouping: Any
  way: str
  mode: str
  optimizer: str
  settings: dict[str, Any]  # arguments of the wrapped optimizer
  decays: bool  # whether its learning rate is a schedule
  is_per_model: bool  # whether every second group's learning rate is half
  excluded: list[str]  # kinds of variables without weight decay
  options: dict[str, Any]  # arguments of CrossShardOptimizer
  sizes: tuple[int, ...]  # examples of each replica; see `divides_last`
  share: float  # what the mean over a replica's examples is multiplied by
  is_exact: bool  # whether no sum rounds
  bad: tuple[int, int, float] | None  # step, replica, number that is not finite
  bucket_bytes: int
  replicas: int  # four in one process, or two workers
  resumed_at: int | None  # the step before which a second model takes over
  loss_scale: float | None  # the first scale of a LossScaleOptimizer in ours
  repeats_ids: bool  # whether each row is looked up twice
  is_uneven: bool  # whether the loop divides losses by a constant batch size
  is_virtual: bool = False  # whether the replicas are on a virtual TPU

  @property
  def is_on_workers(self) -> bool:
    """Whether each replica is a process of its own."""
    return self.replicas != REPLICAS

  @property
  def divides_last(self) -> bool:
    """Whether only the last batch has `sizes`. In the others, each is 2."""
    return self.way == "fit" or self.is_uneven

  @property
  def is_mixed(self) -> bool:
    """Whether a layer computes in float16, and keeps weights in float32."""
    return any(dtype == _MIXED for _, dtype in self.parts)

  @property
  def scales_loss(self) -> bool:
    """Whether there is a loss scale. `compile` adds one to `is_mixed`."""
    return bool(self.loss_scale) or (self.is_mixed and self.way == "fit")

  @property
  def steps(self) -> int:
    """The number of steps. Accumulation windows of two calls are complete."""
    is_summing = "accumulate_steps" in self.options
    is_summing |= "gradient_accumulation_steps" in self.settings
    return STEPS + 1 if is_summing else STEPS

  @property
  def groups(self) -> list[list[int]]:
    """The groups that are used: `grouping`, or one group if it is None."""
    return testbed.groups_of(self.grouping, self.replicas).to_lists()


class _Dice:
  def __init__(self, seed: int | Sequence[int]) -> None:
    self._rng = np.random.default_rng(seed)

  def chance(self, probability: float) -> bool:
    return bool(self._rng.random() < probability)

  def one(self, choices: Sequence[Any]) -> Any:
    return choices[self._rng.integers(len(choices))]

  def order(self, count: int) -> list[int]:
    return self._rng.permutation(count).tolist()


def _draw_settings(dice: _Dice, name: str, is_exact: bool) -> dict[str, Any]:
  settings: dict[str, Any] = dict(OPTIMIZERS[name])
  settings["learning_rate"] = 0.5 if is_exact else 0.0625
  if name in ("SGD", "RMSprop") and dice.chance(0.6):
    settings["momentum"] = 0.5
  if name == "SGD" and "momentum" in settings and dice.chance(0.5):
    settings["nesterov"] = True
  if name in ("Adam", "AdamW") and dice.chance(0.3):
    settings["amsgrad"] = True
  if name == "RMSprop" and dice.chance(0.3):
    settings["centered"] = True
  if dice.chance(0.2):
    settings["clipvalue"] = 0.25 if is_exact else 0.3
  if is_exact:
    return settings
  if "clipvalue" not in settings and dice.chance(0.3):
    settings[dice.one(["clipnorm", "global_clipnorm"])] = 0.7
  if dice.chance(0.25):
    settings["weight_decay"] = 0.125
  if dice.chance(0.2):
    settings |= {"use_ema": True, "ema_momentum": 0.5}
    settings["ema_overwrite_frequency"] = dice.one([None, 1, 2])
  if not testbed.IS_TF_KERAS and dice.chance(0.15):
    settings["gradient_accumulation_steps"] = 2
  return settings


def _draw_options(dice: _Dice, is_exact: bool) -> dict[str, Any]:
  options: dict[str, Any] = {"reduction": dice.one(["mean", "sum"])}
  options["loss_averaged_over"] = dice.one([None, "replica", "global"])
  options["scale_gradients"] = dice.chance(0.25)
  options["skip_nonfinite"] = dice.chance(0.3)
  if dice.chance(0.3):
    name = dice.one(["clipvalue", "clipnorm", "global_clipnorm"])
    if name == "clipvalue" or not is_exact:
      options[name] = 0.5 if is_exact else 0.7
  if not is_exact and dice.chance(0.1):
    options["wire_dtype"] = dice.one(["bfloat16", "float16"])
  if dice.chance(0.15):
    options["accumulate_steps"] = 2
  options["fused_update"] = dice.one([None, False])
  options["shard_update"] = dice.chance(0.25)
  return options


def _draw_parts(
  dice: _Dice, kinds: Sequence[str], dtypes: Sequence[str]
) -> tuple[tuple[str, str], ...]:
  """Draws one to four kinds of variables, at least one of which is used."""
  drawn = ["unused"]
  while set(drawn) == {"unused"}:
    drawn = [dice.one(kinds) for _ in range(dice.one([1, 2, 3, 4]))]
  return tuple(
    (kind, "float32" if kind in _LAYERS else dice.one(dtypes)) for kind in drawn
  )


def draw(seed: int, replicas: int = REPLICAS) -> Program:
  """Returns the program that belongs to a seed.

  Plain Keras could run this program, too. If there are two replicas, each
  replica is a worker.
  """
  dice = _Dice(seed)
  # A second generator, for settings that were added later, so that older
  # programs do not change.
  more = _Dice([seed, 3])
  is_on_workers = replicas != REPLICAS
  ways = [way for way in training.WAYS if way != "fit" or not is_on_workers]
  way, mode = dice.one(ways), dice.one(MODES)
  is_exact = dice.chance(0.3)
  order = dice.order(replicas)
  size = dice.one([0, 1, 2, replicas])
  grouping = [order[i : i + size] for i in range(0, replicas, size or replicas)]
  options = _draw_options(dice, is_exact)
  if more.chance(0.4 if is_on_workers else 0.05):
    options |= {"accumulate_steps": 2, "skip_nonfinite": True}
  # Other optimizers magnify small differences, and lose exact whole numbers.
  plain_sgd = is_exact or "wire_dtype" in options
  name = "SGD" if plain_sgd or dice.chance(0.2) else dice.one(list(OPTIMIZERS))
  settings = _draw_settings(dice, name, is_exact)
  if name == "Lion":  # It takes the sign.
    options.pop("clipnorm", None)
    options.pop("global_clipnorm", None)
    # Rows of one index that are clipped to c and -c cancel, up to rounding.
    settings.pop("clipvalue", None)
  if "wire_dtype" in options:
    settings = {"learning_rate": 0.0625}
  if "accumulate_steps" in options:
    settings.pop("gradient_accumulation_steps", None)
  bad = None
  if options.get("skip_nonfinite"):
    number = dice.one([float("nan"), float("inf")])
    bad = dice.one(range(STEPS)), dice.one(range(replicas)), number

  dtypes = ["float32", "float32", "float64"]
  # Half precision cannot represent the epsilon of other optimizers.
  if name in ("SGD", "Lion") and not plain_sgd:
    # TensorFlow cannot broadcast first values of bfloat16 between workers.
    dtypes += ["float16"] if is_on_workers else ["float16", "bfloat16"]
  # Keras adds up squares of one dtype only, and Nadam of tf_keras refuses two.
  has_one_dtype = name == "Nadam" and testbed.IS_TF_KERAS
  if has_one_dtype or "global_clipnorm" in settings:
    dtypes = ["float32"]
  kinds = list(_VARIABLES) + ([] if is_exact else list(_LAYERS))
  if "wire_dtype" in options:
    kinds.remove("rows_twice")
  parts = _draw_parts(dice, kinds, dtypes)
  if "float64" in dtypes and more.chance(0.2):
    parts = (("vector", "float64"), *parts, ("matrix", "float32"))

  sizes: tuple[int, ...] = tuple(dice.one([1, 2, 4]) for _ in range(replicas))
  if way == "fit":
    sizes = (2,) * replicas
  if way == "fit" and mode == "cond":
    mode = "steps_per_execution"
  if way == "fit" and dice.chance(0.3):
    sizes = (2, 2, 2, 1)  # As the strategy cuts the seven that are left.
  is_decayed = "weight_decay" in settings
  is_built = mode == "cond" or dice.chance(0.7)
  # tf_keras builds it on variables in another order than they are listed in.
  is_built |= way == "fit" and testbed.IS_TF_KERAS
  is_used = any(kind != "unused" for kind, _ in parts[:-1])
  is_partial = is_built and is_used and way != "fit" and dice.chance(0.2)
  if options.get("shard_update"):
    is_whole = is_partial or any(kind == "unused" for kind, _ in parts)
    is_whole |= name == "Adafactor"
    # tf_keras' Lion rounds the betas of rows otherwise than those of a whole.
    is_whole |= any(k in _SPARSE and "16" in dtype for k, dtype in parts)
    is_whole |= bool({"clipnorm", "gradient_accumulation_steps"} & {*settings})
    options["shard_update"] = not is_whole
    is_built |= "use_ema" in settings and bool(options["shard_update"])
  is_whole = name == "Adafactor"
  # In branches, in windows and in shards rows are made dense.
  is_whole |= mode == "cond" or "gradient_accumulation_steps" in settings
  if not (is_whole or options.get("shard_update")):
    # No dice, so that the other programs stay as they were. Averages move in
    # all rows, which `plain_training` would restore.
    is_lazy = not {"accumulate_steps", "use_ema"} & {*options, *settings}
    options["lazy_rows"] = bool(seed % 3) and is_lazy
  is_raw = way != "fit" and dice.chance(0.3)
  # Keras' Adafactor names slots after `variable.name`. A function that is being
  # traced refuses the colon in the name of a `tf.Variable`.
  is_built |= is_raw and name == "Adafactor"
  resumed_at = more.one([1, 2]) if way != "fit" and more.chance(0.25) else None
  loss_scale = None
  if way != "bare" and more.chance(0.3):
    loss_scale = more.one([4.0, 64.0])
    number = more.one([None, float("nan"), float("inf")])
    if bad is None and number is not None:
      bad = more.one(range(STEPS)), more.one(range(replicas)), number
  if more.chance(0.5) and "wire_dtype" not in options and not is_exact:
    parts = tuple(
      (kind, _MIXED if kind in _LAYERS else dtype) for kind, dtype in parts
    )
    if way == "fit":  # `compile` adds a loss scale, but not to shards.
      parts = (*parts, ("dense layer", _MIXED))
      loss_scale = loss_scale or (64.0 if options["shard_update"] else None)
  repeats_ids = more.chance(0.5) and "wire_dtype" not in options
  is_uneven = way != "fit" and more.chance(0.25)
  if is_uneven:
    sizes = tuple(more.order(4)[:replicas])
  elif way == "fit" and more.chance(0.2):
    sizes = (2, 2, 1, 0)  # As the strategy cuts five.
  return Program(
    seed=seed,
    parts=parts,
    is_raw=is_raw,
    is_built=is_built,
    is_partial=is_partial,
    grouping=grouping if size else None,
    way=way,
    mode=mode,
    optimizer=name,
    settings=settings,
    decays=not is_exact and dice.chance(0.2),
    excluded=[parts[0][0]] if is_decayed and dice.chance(0.5) else [],
    options=options,
    sizes=sizes,
    share=0.25 if way == "fit" or dice.chance(0.3) else 1.0,
    is_exact=is_exact,
    bad=bad,
    bucket_bytes=dice.one([1, 16, 64, 1 << 20]),
    is_per_model=dice.chance(0.25),
    replicas=replicas,
    resumed_at=resumed_at,
    loss_scale=loss_scale,
    repeats_ids=repeats_ids,
    is_uneven=is_uneven,
  )


def virtual(program: Program) -> Program:
  """Returns the program for a virtual TPU, whose batches have one size."""
  sizes = (program.sizes[0] or 2,) * program.replicas
  dice = _Dice([program.seed, 4])
  # tf_keras refuses loss scales there, and XLA rounds float16 elsewhere.
  if testbed.IS_TF_KERAS:
    is_skipping = program.options["skip_nonfinite"]
    bad = program.bad if is_skipping else None
    program = program._replace(loss_scale=None, bad=bad)
  is_mixed = program.optimizer == "SGD" and not testbed.IS_TF_KERAS
  parts = tuple(
    # `excluded` names a part by the start of its variable's name.
    (f"{kind}_{dice.one(list(_FLOWS))}", dtype)
    if f"{kind}_branch" in _FLOW_KINDS and dice.chance(0.7)
    else (kind, "float32" if dtype == _MIXED and not is_mixed else dtype)
    for kind, dtype in program.parts
  )
  return program._replace(
    is_virtual=True, sizes=sizes, is_uneven=False, parts=parts
  )


class Model(tf.keras.Model):
  """Returns a loss for each example: the sum of all parts' losses."""

  def __init__(self, program: Program) -> None:
    # `compile` adds a loss scale if the model has the policy.
    policy = _MIXED if program.is_mixed else "float32"
    super().__init__(autocast=False, dtype=policy)
    rng = np.random.default_rng([program.seed, 1])
    self.kinds = [kind for kind, _ in program.parts]
    self.values: list[Any] = []
    self.known: list[Any] = []  # to the optimizer
    for i, (kind, dtype) in enumerate(program.parts):
      if kind in _LAYERS:
        value = _LAYERS[kind](dtype)
        value.build((None,) if kind == "embedding layer" else (None, 3))
        for variable in value.trainable_variables:
          start = tf.constant(_numbers(rng, program, tuple(variable.shape)))
          limit = getattr(variable, "constraint", None)  # Each call applies it.
          variable.assign(start if limit is None else limit(start))
        self.known += value.trainable_variables
      else:
        start = _numbers(rng, program, _LOSSES[kind][0])
        value = self._variable(
          tf.constant(start, dtype), f"{kind}_{i}", program
        )
        self.known.append(value)
      self.values.append(value)
    self.trained = self.known[: -1 if program.is_partial else None]

  def _variable(self, start: tf.Tensor, name: str, program: Program) -> Any:
    if program.is_raw:
      return tf.Variable(start, name=name)
    return self.add_weight(
      name=name,
      shape=start.shape,
      dtype=start.dtype.name,
      initializer=lambda *_, **__: start,
    )

  def call(self, features: Features) -> tf.Tensor:
    """Returns the losses, float32 [examples]."""
    total = tf.zeros(tf.shape(features["x"])[:1])
    # Keras tries models with numbers of any dtype before it fits them.
    ids = tf.cast(features["ids"], tf.int32)
    for kind, value in zip(self.kinds, self.values, strict=True):
      if kind in _LAYERS:
        inputs = ids if kind == "embedding layer" else features["x"]
        outputs = tf.cast(value(inputs)[:, :2], tf.float32)
        loss = (outputs - features["y"]) ** 2
      else:
        [variable] = training.native([value])
        narrow = {k: tf.cast(features[k], variable.dtype) for k in ("x", "y")}
        loss = _LOSSES[kind][1](variable, narrow | {"ids": ids})
      total += tf.cast(tf.reduce_sum(loss, axis=1), tf.float32)
    return total

  def loss_of(self, program: Program, features: Features) -> tf.Tensor:
    """Returns the loss that a replica differentiates in a custom loop."""
    losses = self(features)
    count = 2 if program.is_uneven else tf.size(losses)
    total = tf.reduce_sum(losses)
    return program.share * tf.math.divide_no_nan(
      total, tf.cast(count, tf.float32)
    )


def _numbers(
  rng: np.random.Generator, program: Program, shape: tuple[int, ...]
) -> np.ndarray:
  """Returns integers if sums must be exact, else normal random numbers."""
  if program.is_exact:
    return rng.integers(-2, 3, shape).astype("float32")
  return rng.normal(size=shape).astype("float32")


def data(program: Program) -> list[list[Features]]:
  """Returns the examples of each step and replica, all of them different."""
  rng = np.random.default_rng([program.seed, 2])
  steps = []
  for step in range(program.steps):
    # Keras wants a first batch that divides.
    is_whole = program.divides_last and step < program.steps - 1
    replicas = []
    for replica in range(program.replicas):
      size = 2 if is_whole else program.sizes[replica]
      y = _numbers(rng, program, (size, 2))
      y[:1, 0] += 5 * replica  # Whole numbers differ by 4 at most.
      if program.bad and program.bad[:2] == (step, replica):
        y[:1, 0] = program.bad[2]
      x = _numbers(rng, program, (size, 3))
      ids = rng.integers(0, _ROWS, size).astype("int32")
      if "wire_dtype" in program.options:  # Each row of its own is rounded.
        ids = rng.permutation(_ROWS)[:size].astype("int32")
      if program.repeats_ids:
        ids = np.repeat(ids, 2)[:size]
      replicas.append({"x": x, "y": y, "ids": ids})
    targets = {features["y"].tobytes() for features in replicas}
    assert len(targets) == program.replicas > 1
    steps.append(replicas)
  return steps


def as_tensors(features: Features) -> Features:
  return {name: tf.constant(value) for name, value in features.items()}


def _rate_of(program: Program, group: int) -> Any:
  """Returns the learning rate of a group, a number or a schedule."""
  rate = program.settings["learning_rate"]
  if program.is_per_model and group % 2:
    rate /= 2
  if program.decays:
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay(
      [0, 1], [rate, rate / 2, rate / 4]
    )
  return rate


def make_optimizer(program: Program, group: int | None = None) -> Any:
  """Returns the optimizer to wrap.

  If `group` is given, returns the optimizer of plain Keras for this group.
  """
  settings = dict(program.settings)
  del settings["learning_rate"]
  rate = _rate_of(program, group or 0)
  if group is None and program.is_per_model:
    count = len(program.groups)
    rate = schedules.PerModel([_rate_of(program, i) for i in range(count)])
  elif program.is_per_model and not program.decays:
    # A schedule, too: Keras would make a variable of a number.
    constant = tf.keras.optimizers.schedules.PiecewiseConstantDecay
    rate = constant([0], [rate, rate])
  kind = getattr(tf.keras.optimizers, program.optimizer)
  made = kind(learning_rate=rate, **settings)
  scaler = tf.keras.mixed_precision.LossScaleOptimizer
  if program.loss_scale:
    # Scales grow after two finite steps.
    return scaler(
      made, initial_scale=program.loss_scale, dynamic_growth_steps=2
    )
  return scaler(made) if program.scales_loss and group is not None else made


def chosen_seeds(default: Sequence[int]) -> Sequence[int]:
  """Returns the seeds START:STOP in RANDOM_SEEDS; `default` if it is unset."""
  bounds = os.environ.get("RANDOM_SEEDS")
  return range(*map(int, bounds.split(":"))) if bounds else default


class State(NamedTuple):
  """The values of one replica, or of plain Keras, after training."""

  variables: list[np.ndarray]  # the model's, then those of the optimizer
  skipped: int | None


def train(
  program: Program,
  strategy: Any = None,
  folder: pathlib.Path | None = None,
) -> list[State]:
  """Trains a program, and returns the state of each replica.

  Workers pass their strategy, and a folder that all workers can read; each
  worker returns the state of its own replica.
  """
  if program.is_virtual:
    strategy = testbed.virtual(REPLICAS)
  strategy = strategy or testbed.mirrored()
  with (
    tempfile.TemporaryDirectory() as own_folder,
    mock.patch.object(mirrored, "_MERGE_BUCKET_BYTES", program.bucket_bytes),
    mock.patch.object(packing, "BUCKET_BYTES", program.bucket_bytes),
  ):
    path = (folder or pathlib.Path(own_folder)) / f"state_{program.seed}"
    model, optimizer = _train(program, strategy, path)
  values = [
    testbed.copies(variable)
    for variable in [*model.known, *optimizer.variables]
  ]
  counts: list[Any] = [None] * len(values[0])
  if program.options.get("skip_nonfinite"):
    counts = list(map(int, testbed.copies(optimizer.skipped_steps)))
  return [
    State([copies[replica] for copies in values], count)
    for replica, count in enumerate(counts)
  ]


def _train(
  program: Program, strategy: Any, path: pathlib.Path
) -> tuple[Model, Any]:
  model, optimizer = _make(program, strategy)
  if program.way == "fit":
    _train_by_fit(program, strategy, model, optimizer)
    return model, optimizer
  steps = data(program)
  at = program.resumed_at or 0
  _train_by_loop(program, strategy, model, optimizer, steps[:at])
  if at:
    # Keras numbers the layers of the second model differently.
    Models(model.known, optimizer).save(path)
    model, optimizer = _make(program, strategy)
    Models(model.known, optimizer).restore(path)
  _train_by_loop(program, strategy, model, optimizer, steps[at:])
  return model, optimizer


def _make(program: Program, strategy: Any) -> tuple[Model, Any]:
  with strategy.scope():
    model = Model(program)
    optimizer = CrossShardOptimizer(
      make_optimizer(program),
      group_assignment=program.grouping,
      **program.options,
    )
    if program.excluded:
      optimizer.exclude_from_weight_decay(var_names=program.excluded)
    if program.is_built:
      optimizer.build(model.known)
  return model, optimizer


def _train_by_fit(
  program: Program, strategy: Any, model: Model, optimizer: Any
) -> None:
  """Trains with `model.fit`, where the strategy divides the batches."""
  parts = [features for step in data(program) for features in step]
  whole = {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}
  dataset = tf.data.Dataset.from_tensor_slices(
    (whole, np.zeros(len(whole["x"]), "float32"))
  )
  several = program.mode == "steps_per_execution"
  with strategy.scope():
    model.compile(
      optimizer,
      lambda _, losses: losses,
      run_eagerly=program.mode == "eager",
      steps_per_execution=program.steps if several else 1,
    )
  # The dataset repeats without end, so that replicas need not check for data.
  batches = dataset.batch(2 * REPLICAS, program.is_virtual).repeat()
  model.fit(batches, steps_per_epoch=program.steps, shuffle=False, verbose=0)


def _train_by_loop(
  program: Program,
  strategy: Any,
  model: Model,
  optimizer: Any,
  steps: Sequence[Sequence[Features]],
) -> None:
  variables = model.trained

  def replica_step(features: Features) -> tf.Tensor:
    return training.take_step(
      optimizer,
      lambda: model.loss_of(program, features),
      variables,
      program.way,
    )

  def in_cond(features: Features) -> tf.Tensor:
    return tf.cond(
      tf.constant(True),  # All replicas enter, as they must to exchange values.
      lambda: replica_step(features),
      lambda: tf.constant(0, tf.int64),
    )

  def step(features: Any) -> None:
    run = in_cond if program.mode == "cond" else replica_step
    strategy.run(run, args=(features,))

  call = step
  if program.mode != "eager":
    call = tf.function(step, autograph=False)
  for replicas in steps:
    call(
      strategy.experimental_distribute_values_from_function(
        lambda context, replicas=replicas: as_tensors(
          replicas[context.replica_id_in_sync_group]
        )
      )
    )
