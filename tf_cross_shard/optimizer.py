"""CrossShardOptimizer: a Keras optimizer whose gradients are group sums.

loss -> scale -> gradients -> clip (this replica's own) -> narrow
     -> pack -> all-reduce over the group -> unpack -> widen
     -> the encapsulated optimizer applies once -> variables

The flow is the same in both Kerases. `tf_cross_shard.keras3` and
`tf_cross_shard.tf_keras` make it an optimizer of one of them.
"""

import copy
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import tensorflow as tf

from tf_cross_shard import group_schedule, validation
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.gradients import (
  clipping,
  differentiation,
  indexed_slices,
  loss_factor,
  packing,
)
from tf_cross_shard.inner_optimizer import base
from tf_cross_shard.replica_state import overwritten
from tf_cross_shard.step import (
  accumulation,
  nonfinite,
  reduction,
  replica_checks,
  sharded_update,
)
from tf_cross_shard.step import noise_scale as noise_scale_lib
from tf_cross_shard.wrapper import forwarding

if TYPE_CHECKING:
  import numpy.typing as npt

_forwarded_rate: Final = forwarding.OptimizerWrapper.learning_rate


class CrossShard(forwarding.OptimizerWrapper):
  """Sums or averages gradients over replicas, then lets `opt` apply them.

  With `L_r` the loss of replica `r`, `G` the group it belongs to and `f` the
  factor in the table of `tf_cross_shard.gradients.loss_factor`, every member
  of `G` applies

      g = sum over r in G of clip(grad(f * L_r))

  Members of a group stay equal to the bit. Different groups are trained apart
  from each other, each with its own weights, slots and moving averages.

  >>> from tf_cross_shard import CrossShardOptimizer
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   weight = tf.Variable(1.0)
  ...   optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(1.0))
  ...   optimizer.build([weight])
  >>> @tf.function
  ... def step():
  ...   def replica_step():
  ...     replica = tf.distribute.get_replica_context().replica_id_in_sync_group
  ...     slope = 1.0 + 2.0 * tf.cast(replica, tf.float32)  # 1 and 3
  ...     return optimizer.minimize(lambda: slope * weight, var_list=[weight])
  ...
  ...   return strategy.run(replica_step)
  >>> _ = step()
  >>> float(weight.numpy())  # 1 - (1 + 3) / 2
  -1.0

  References:
    tf.compat.v1.tpu.CrossShardOptimizer, whose members this class keeps.
  """

  @validation.names_arguments
  def __init__(
    self,
    opt: "validation.Optimizer | str | dict[str, Any]",
    reduction: str = loss_factor.MEAN,
    name: str = "CrossShardOptimizer",
    group_assignment: (
      "groups_lib.Groups | Sequence[Sequence[int]] | npt.NDArray[Any]"
      " | tf.Tensor | None"
    ) = None,
    *,
    loss_averaged_over: str | None = None,
    clipnorm: float | None = None,
    global_clipnorm: float | None = None,
    clipvalue: float | None = None,
    wire_dtype: str | tf.DType | None = None,
    skip_nonfinite: bool = False,
    scale_gradients: bool = False,
    fused_update: bool | None = None,
    accumulate_steps: int | None = None,
    shard_update: bool | str = False,
    noise_scale: bool | int = False,
  ) -> None:
    """Encapsulates `opt`. Call it inside `strategy.scope()`.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> optimizer = CrossShardOptimizer("sgd", clipnorm=1.0)
    >>> float(optimizer.learning_rate.numpy())
    0.009999999776482582

    Args:
      opt: A Keras optimizer, or what `tf.keras.optimizers.get` accepts. It
        keeps slots, learning rate, iteration count and all other variables. One
        of `tf.compat.v1.train` is converted, see `migration.from_v1`.
      reduction: `"mean"` or `"sum"` over the group; the spellings of
        `tf.compat.v1.losses.Reduction` and of Keras are accepted.
      name: The name of this optimizer.
      group_assignment: None for one group of all replicas, or int32
        `[num_groups, group_size]`: lists, array, constant tensor or `Groups`.
      loss_averaged_over: `"replica"` if losses are averaged over the
        replica's own examples, `"global"` if over all replicas'. None decides
        by the call: `compute_gradients` and `minimize(callable)` mean
        `"replica"`; Keras' own calls (`fit`, `minimize` with `tape=`) mean
        `"global"`.
      clipnorm: Limit of the norm of each gradient of the scaled loss, on the
        replica, before the sum; None or 0 does not clip. To clip the sum, give
        the argument to `opt`.
      global_clipnorm: The same for the norm of all gradients together.
      clipvalue: The same for the absolute value of each element.
      wire_dtype: `"bfloat16"` or `"float16"`: what wider gradients are rounded
        to where they travel between replicas, which halves the bytes. None
        leaves them exact.
      skip_nonfinite: Whether the whole group skips a step whose sums hold a
        NaN or an infinity, and counts it in `skipped_steps`. A
        LossScaleOptimizer skips such steps anyway; then they are only counted.
      scale_gradients: Whether `apply_gradients` multiplies the gradients by the
        factor of the mean, in place of `compute_gradients`, `minimize` and
        `scale_loss`, which multiply the loss. For loops that you cannot edit;
        `loss_averaged_over` tells of which loss they take gradients, and None
        means `"global"` there.
      fused_update: Whether TensorFlow's kernels update dense variables, in one
        pass over each, where `opt` is exactly one of Keras' classes and a
        kernel has its formula: Adam, AdamW (not amsgrad), SGD, RMSprop with
        momentum, Adamax, Adadelta, Ftrl. The last bits of weights may differ.
        None does so where it can; True raises where it cannot; False leaves
        Keras' operations.
      accumulate_steps: How many calls make one step: each replica adds up its
        own gradients, and their mean over the calls is reduced and applied in
        the last. `gradient_accumulation_steps` of a Keras 3 `opt` does the
        same. None for every call a step.
      shard_update: Whether each member of a group keeps and updates one part of
        the optimizer's state, see `sharding.update`. For optimizers that update
        each element by itself; `"elementwise"` says so of a class of yours.
      noise_scale: Whether each group measures its gradient noise scale, see
        the property: True in every 32nd step, `k` in every k-th. A measurement
        reads all gradients and their sums once more.

    Raises:
      ValueError: If `opt` names no optimizer or is itself a
        CrossShardOptimizer, or if another argument has no valid value.
      NotImplementedError: If the strategy has no synchronous replicas, or
        cannot do what is asked for.
      TypeError: If `opt` is no optimizer, or one that Keras has no equal of.
    """
    opt = self._as_optimizer(opt)
    is_sharded = sharded_update.check(opt, shard_update)
    reduction = loss_factor.canonical_reduction(reduction)
    averaged_over = loss_factor.check_averaged_over(loss_averaged_over)
    validation.check_limits(
      clipnorm=clipnorm, global_clipnorm=global_clipnorm, clipvalue=clipvalue
    )
    super().__init__(
      opt,
      name=name,
      clipnorm=clipnorm,
      global_clipnorm=global_clipnorm,
      clipvalue=clipvalue,
    )
    self._convention = loss_factor.LossConvention(
      reduction, averaged_over, scale_gradients
    )
    self._wire_dtype = packing.as_wire_dtype(wire_dtype)
    self._fused_update = fused_update
    self._inner.fuse(fused_update)
    strategy = self._inner.strategy
    self._place = replica_checks.ReplicaChecks(strategy, group_assignment, name)
    self._accumulation = accumulation.Accumulation(
      accumulate_steps, self._inner, self._place.engine
    )
    self._shard_update = shard_update
    self._sharded: sharded_update.ShardedUpdate | None = None
    if is_sharded and self.groups.group_size > 1:
      self._sharded = sharded_update.ShardedUpdate(
        self._inner, self._place.engine, self._place.groups
      )
    self._guard = nonfinite.NonfiniteGuard(skip_nonfinite, self._place.engine)
    self._noise = noise_scale_lib.NoiseScale(
      noise_scale,
      self._inner,
      self._place.engine,
      self.groups,
      is_mean=reduction == loss_factor.MEAN,
    )
    self._warnings = overwritten.OverwriteWatch(
      name, self.groups, self._place.engine
    )
    group_schedule.bind(opt, self.groups, self._package)
    self._attach_state([])

  def _set_learning_rate(self, value: Any) -> None:
    """Sets that of `opt`, and tells a PerGroup of the groups at once."""
    if "_place" in vars(self):
      if not callable(value):
        group_schedule.check_settable(self.inner_optimizer)
      group_schedule.bind_rate(value, self.groups, self._package)
    _forwarded_rate.__set__(self, value)

  learning_rate = _forwarded_rate.setter(_set_learning_rate)

  @property
  def reduction(self) -> str:
    """`"mean"` or `"sum"`."""
    return self._convention.reduction

  @property
  def loss_averaged_over(self) -> str | None:
    """`"replica"`, `"global"`, or None for the call to decide."""
    return self._convention.averaged_over

  @property
  def wire_dtype(self) -> str | None:
    """The dtype that gradients are rounded to on the wire; None for exact."""
    return None if self._wire_dtype is None else str(self._wire_dtype.name)

  @property
  def scale_gradients(self) -> bool:
    """Whether gradients are scaled in place of the loss."""
    return self._convention.scale_gradients

  @property
  def fused_update(self) -> bool | None:
    """Whether kernels update; None for where there are any."""
    return self._fused_update

  @property
  def shard_update(self) -> bool | str:
    """Whether each member of a group keeps one part of the state."""
    return self._shard_update

  @property
  def accumulate_steps(self) -> int | None:
    """How many calls make one step; None for one."""
    return self._accumulation.steps

  @property
  def skip_nonfinite(self) -> bool:
    """Whether steps with a NaN or an infinity are skipped and counted."""
    return self._guard.is_on

  @property
  def skipped_steps(self) -> Any:
    """How many steps were skipped: a `tf.Variable`, each group with its own.

    It is none of `variables`. None without `skip_nonfinite`.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> optimizer = CrossShardOptimizer("sgd", skip_nonfinite=True)
    >>> weight = tf.Variable(3.0)
    >>> _ = optimizer.apply_gradients([(tf.constant(float("nan")), weight)])
    >>> float(weight.numpy()), int(optimizer.skipped_steps.numpy())
    (3.0, 1)
    """
    return self._guard.count

  @property
  def noise_scale(self) -> Any:
    """How noisy gradients are: a `tf.Variable`, each group with its own.

    Float32, in batches of one replica: times the examples that a replica has
    in a step it is in examples. Batches much smaller give almost as much
    progress for each example; much larger ones hardly more for each step. It
    is `tr(covariance of g_r) / |E g_r|^2` of what is reduced, gradients that
    were clipped if they are, see `gradients.noise_scale`: averages over about
    100 measurements, NaN before the first. A negative one says that noise hides
    the gradient. Steps with a NaN or an infinity do not count.

    It is none of `variables`, and None without the argument. Read all groups'
    with `replica_state.group_values(optimizer.noise_scale, optimizer)`.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...   weight = tf.Variable(0.0)
    ...   optimizer = CrossShardOptimizer("sgd", "sum", noise_scale=1)
    ...   optimizer.build([weight])
    >>> @tf.function
    ... def step():
    ...   def replica_step():
    ...     replica = (
    ...       tf.distribute.get_replica_context().replica_id_in_sync_group
    ...     )
    ...     grad = 3.0 + tf.cast(replica, tf.float32)  # 3 and 4
    ...     return optimizer.apply_gradients([(grad, weight)])
    ...
    ...   return strategy.run(replica_step)
    >>> _ = step()
    >>> S, G2 = (12.5 - 3.5**2) / (1 - 1 / 2), (2 * 3.5**2 - 12.5) / (2 - 1)
    >>> round(float(optimizer.noise_scale.numpy()), 5), round(S / G2, 5)
    (0.04167, 0.04167)
    """
    return self._noise.noise_scale

  @property
  def gradient_norm(self) -> Any:
    """The norm of the group's mean gradient in the last step measured.

    Like `noise_scale`; without the factor of a loss scale. Under `"sum"` it is
    that of the sum divided by the members.
    """
    return self._noise.gradient_norm

  @property
  def group_assignment(self) -> list[list[int]] | None:
    """The groups as lists of replica ids; None for one group of all."""
    assigned = self._place.assigned
    return None if assigned is None else assigned.to_lists()

  @property
  def groups(self) -> groups_lib.Groups:
    """The groups in force, one of all replicas where none were given."""
    return self._place.groups

  def compute_gradients(
    self,
    loss: Callable[[], Any] | tf.Tensor,
    var_list: "validation.Variables | None" = None,
    *,
    tape: tf.GradientTape | None = None,
    **kwargs: Any,
  ) -> differentiation.Pairs:
    """Scales the loss, then takes this replica's own gradients.

    They are not reduced yet, so that each replica can clip or change its own.
    They contain the factor of the mean.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable(3.0)
    >>> optimizer = CrossShardOptimizer("sgd")
    >>> [(grad, _)] = optimizer.compute_gradients(lambda: weight**2)
    >>> float(grad)
    6.0

    Args:
      loss: A function of no arguments, a tensor recorded by `tape`, or a
        tensor of the graph being built. A scalar under `"mean"`.
      var_list: Trainable variables. None means all that the loss touches; Keras
        variables are then known as such only if the optimizer is built.
      tape: The tape that recorded `loss`.
      **kwargs: `gate_gradients`, `aggregation_method`,
        `colocate_gradients_with_ops` and `grad_loss`. Graphs use them, eager
        execution ignores them.

    Returns:
      A list of (gradient, variable); the gradient is None for a variable of
      `var_list` that the loss does not touch.

    Raises:
      RuntimeError: If called in the cross-replica context.
      ValueError: If an argument has no valid value.
      TypeError: If an argument is of the wrong kind.
    """
    return self._gradients(loss, var_list, tape, loss_factor.REPLICA, kwargs)

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[tuple[Any, "validation.Variable"]],
    global_step: "validation.Variable | None" = None,
    name: str | None = None,
  ) -> Any:
    """Sums each gradient over the group, then lets `opt` apply the sums once.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> weight = tf.Variable(3.0)
    >>> optimizer = CrossShardOptimizer(tf.keras.optimizers.SGD(0.5))
    >>> int(optimizer.apply_gradients([(tf.constant(2.0), weight)]))
    1
    >>> float(weight.numpy())
    2.0

    Args:
      grads_and_vars: Pairs of this replica's gradient (dense, row-sparse or
        None) and its variable.
      global_step: An integer variable, incremented by one afterwards.
      name: The name scope of the operations; this optimizer's name if None.

    Returns:
      The iteration count after the step, an int64 tensor; in a version 1
      graph the operation that does the step.

    Raises:
      RuntimeError: If called in the cross-replica context, or under another
        strategy than the optimizer was made in.
      ValueError: If `grads_and_vars` is empty or malformed.
      TypeError: If a variable is none, or `global_step` no integer variable.
    """
    grads, variables = validation.check_pairs(grads_and_vars)
    validation.check_global_step(global_step)
    validation.check_name(name)
    return self._apply(grads, variables, global_step, name)

  def build(self, variables: "Iterable[validation.Variable]") -> None:
    """Makes the slots of `opt`.

    Args:
      variables: All variables that will ever be trained.

    Raises:
      DisagreementError: If another worker has other variables, settings or
        libraries. Before the slots are made: workers wait for each other there.
      ValueError: If what was unpickled has other shapes.
      RuntimeError: If slots would be made by one of several replicas for
        itself.
    """
    variables = list(variables)
    if not self._inner.is_built:
      self._place.agree_to_build(variables, self._settings)
      self._warnings.before_building(_wholes(variables))
    super().build(variables)
    self._accumulation.build(variables)

  def _build_inner(self, variables: list[Any]) -> None:
    """Makes the slots, whole or of this replica's part."""
    if self._sharded is None:
      super()._build_inner(variables)
    else:
      self._sharded.build(variables)

  def get_config(self) -> dict[str, Any]:
    """Everything the constructor needs, in serializable form."""
    opt = self._serialize(self._inner.optimizer)
    return {"opt": opt, "name": self.name, **self._settings()}

  def _settings(self) -> dict[str, Any]:
    """The other arguments of the constructor."""
    return {
      "reduction": self.reduction,
      "group_assignment": self.group_assignment,
      "loss_averaged_over": self.loss_averaged_over,
      "clipnorm": self.clipnorm,
      "global_clipnorm": self.global_clipnorm,
      "clipvalue": self.clipvalue,
      "wire_dtype": self.wire_dtype,
      "skip_nonfinite": self.skip_nonfinite,
      "scale_gradients": self.scale_gradients,
      "fused_update": self.fused_update,
      "accumulate_steps": self.accumulate_steps,
      "shard_update": self.shard_update,
      "noise_scale": self._noise.argument,
    }

  def _differing(self) -> list[str]:
    """The arguments besides `opt` that differ from their defaults."""
    if "_warnings" not in vars(self):  # The constructor is at work.
      return []
    defaults = inspect.signature(CrossShard.__init__).parameters
    return [
      f"{name}={reprlib.repr(value)}"
      for name, value in {**self._settings(), "name": self.name}.items()
      if value != defaults[name].default
    ]

  @classmethod
  def from_config(
    cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
  ) -> "CrossShard":
    """Makes the optimizer that `get_config` described.

    Args:
      config: The result of `get_config`; not changed.
      custom_objects: Classes that `opt` may need, by name.

    Returns:
      A new optimizer, not built.
    """
    # A copy: Keras changes what it is given.
    opt = cls._deserialize(copy.deepcopy(config["opt"]), custom_objects)
    return cls(**{**config, "opt": opt})

  def _before_saving(self) -> None:
    """Warns of what is lost; does nothing while this object is being made."""
    if "_warnings" in vars(self):
      self._warnings.before_saving()

  def finalize_variable_values(self, var_list: Any) -> None:
    """Ends `fit`: writes moving averages into the variables of `opt`'s EMA.

    Args:
      var_list: The trained variables.
    """
    self._warnings.look()
    if forwarding.is_fit_validated():
      self._warnings.blends()
    if self._sharded is None:
      super().finalize_variable_values(var_list)
    else:
      self._sharded.write_averages()

  def _gradients(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: dict[str, Any],
  ) -> differentiation.Pairs:
    """This replica's gradients of the scaled loss."""
    self._place.check()
    return differentiation.compute_for(
      self._inner,
      loss,
      var_list,
      tape,
      scale=lambda seed: self._scale(seed, default),
      options=options,
      scalar=self.reduction == loss_factor.MEAN,
    )

  @tf.autograph.experimental.do_not_convert
  def _scale(self, loss: Any, default: str) -> Any:
    """`loss` times the factor of the mean."""
    groups = self._place.groups
    factor = self._convention.for_loss(
      default,
      groups.num_replicas,
      groups.group_size,
      traced=not tf.executing_eagerly(),
      is_sure=forwarding.is_called_by_keras(),
    )
    return loss if factor == 1 else loss * factor

  def _apply(
    self,
    grads: Sequence[Any],
    variables: Sequence[Any],
    global_step: Any = None,
    name: str | None = None,
    through_apply: bool = False,
    is_reduced: bool = False,
  ) -> Any:
    """Checks everything, makes the slots, and does the step."""
    self._place.check()
    self._place.check_variables(variables)
    # Once more: `opt.learning_rate` may have been assigned, past this class.
    group_schedule.bind(self._inner.optimizer, self.groups, self._package)
    if self._inner.is_built:
      validation.check_known(variables, self._inner.knows)
    groups = self._place.groups
    if not is_reduced:
      self._convention.end_step(
        groups.num_replicas,
        groups.group_size,
        traced=not tf.executing_eagerly(),
        is_divided=self._inner.divides,
        through_apply=through_apply,
        by_keras=through_apply and forwarding.is_called_by_keras(),
      )
    self.build(list(variables))
    self._place.agree_to_step(
      grads, variables, self._settings, self._inner.iterations
    )
    args = grads, variables, global_step, name, through_apply, is_reduced
    if tf.executing_eagerly() or tf.inside_function():
      return self._step(*args)
    # A version 1 graph runs only what is fetched: one operation for all.
    return tf.function(lambda: self._step(*args), autograph=False)().op

  def _step(
    self,
    grads: Sequence[Any],
    variables: Sequence[Any],
    global_step: Any,
    name: str | None,
    through_apply: bool,
    is_reduced: bool,
  ) -> tf.Tensor:
    """Clip, reduce, apply, count: the way of a gradient from here on."""
    engine = self._place.engine
    with tf.name_scope(name or self.get_name()):
      with engine.isolate():
        found = self._warnings.before_step(_wholes(variables))
      window = self._window(variables)
      if window is None and self._sharded is None:
        sums = grads if is_reduced else self._sum(grads, variables)
        self._apply_sums(sums, variables, global_step, through_apply)
      else:
        own = grads
        if not is_reduced:
          own = self._scale_and_clip(self._make_reducible(grads, variables))

        def finish(totals: Sequence[clipping.Gradient]) -> None:
          if self._sharded is not None:
            parts = self._parts(totals, variables, is_reduced)
            self._apply_parts(parts, global_step, through_apply)
            return
          assert window is not None
          calls = window.steps / window.divisor
          sums = totals if is_reduced else self._reduce(totals, calls)
          self._apply_sums(sums, variables, global_step, through_apply)

        if window is None:
          finish(own)
        else:
          window.run(own, variables, engine.isolate, finish)
      with engine.isolate():
        self._warnings.after_step(found)
        return tf.identity(self._inner.iterations())

  def _parts(
    self,
    grads: Sequence[clipping.Gradient],
    variables: Sequence[Any],
    is_reduced: bool,
  ) -> list[tf.Tensor]:
    """This replica's part of what the whole group applies."""
    sharded = self._sharded
    assert sharded is not None
    rows = sharded.rows_of(grads, variables)
    if is_reduced:
      parts = sharded.own_parts(rows)
    else:
      own = self._noise.of_replica([each for row in rows for each in row])
      parts = sharded.scatter(rows, self._wire_dtype, self._wire_scale())
      self._noise.after_scatter(own, parts)
    if self._inner.scales_dynamically or self.skip_nonfinite:
      parts = sharded.alike(parts)
    last = base.innermost(self._inner.optimizer)
    for limit, clip in (
      (last.clipnorm, sharded.clip_each),
      (last.global_clipnorm, sharded.clip),
    ):
      if limit and limit > 0:
        parts = clip(parts, self._inner.scale_limit(limit))
    return parts

  def _apply_parts(
    self, parts: Sequence[tf.Tensor], global_step: Any, through_apply: bool
  ) -> None:
    """Updates this replica's part of the weights, and joins all parts."""
    engine, sharded = self._place.engine, self._sharded
    assert sharded is not None
    with engine.isolate():
      sharded.cut()
    self._apply_sums(parts, sharded.shards, global_step, through_apply)
    joined = sharded.join()
    # Constraints belong to a step: not to one that is left out.
    may_skip = self._inner.scales_dynamically or self.skip_nonfinite
    is_done = nonfinite.all_finite(parts) if may_skip else True
    with engine.isolate():
      sharded.write(joined, is_done)

  def _apply_sums(
    self,
    sums: Sequence[clipping.Gradient],
    variables: Sequence[Any],
    global_step: Any,
    through_apply: bool,
  ) -> None:
    """Lets the encapsulated optimizer apply what the whole group has."""
    engine = self._place.engine
    skips_itself = self._inner.scales_dynamically

    def apply() -> None:
      self._inner.apply_reduced(sums, variables, through_apply)
      if global_step is not None and engine.updates_here(global_step):
        is_one = nonfinite.all_finite(sums) if skips_itself else True
        global_step.assign_add(tf.cast(is_one, global_step.dtype))

    with engine.all_or_nothing(sums), engine.isolate():
      self._guard.apply_if_finite(sums, apply, always=skips_itself)

  @property
  def _own_state(self) -> list[Any]:
    """What `replica_state` saves beside the encapsulated optimizer's."""
    counts = [] if self.skipped_steps is None else [self.skipped_steps]
    return [*counts, *self._member_state, *self._attached]

  @property
  def _member_state(self) -> list[Any]:
    """Of it, what members of a group may have each for themselves."""
    # Norms: the order of their sums depends on the number of a machine's cores.
    return self._accumulation.variables + self._noise.variables

  def _attach_state(self, variables: Sequence[Any]) -> None:
    """Adds what `replica_state` saves too, in place of what was attached."""
    # Keras would track a list that is assigned.
    self.__dict__["_attached"] = list(variables)

  def _window(self, variables: Sequence[Any]) -> accumulation.Window | None:
    """The calls that make one step, if it takes several."""
    window = self._accumulation.window()
    is_asked_for = self.accumulate_steps or self._sharded is not None
    if (window or is_asked_for) and any(
      map(self._inner.takes_value, variables)
    ):
      if is_asked_for:
        raise NotImplementedError(
          "Gradients of variables with `overwrite_with_gradient` (Keras' float8"
          " scales) cannot be accumulated or sharded. Leave `accumulate_steps`"
          " and `shard_update` out."
        )
      return None  # Keras accumulates: it is handed sums in every call.
    return window

  def _sum(
    self, grads: Sequence[Any], variables: Sequence[Any]
  ) -> list[clipping.Gradient]:
    """This replica's gradients to what the whole group applies."""
    grads = self._make_reducible(grads, variables)
    takes_value = [self._inner.takes_value(v) for v in variables]
    if not any(takes_value):
      return self._sum_gradients(grads)
    sums = list(grads)
    for is_value, reduce in (
      (False, self._sum_gradients),
      (True, self._average_values),
    ):
      at = [i for i, each in enumerate(takes_value) if each == is_value]
      for i, total in zip(at, reduce([grads[i] for i in at]), strict=True):
        sums[i] = total
    return sums

  def _sum_gradients(self, grads: Sequence[Any]) -> list[clipping.Gradient]:
    """Scales and clips this replica's gradients, then sums over the group."""
    return self._reduce(self._scale_and_clip(grads))

  def _scale_and_clip(self, grads: Sequence[Any]) -> list[clipping.Gradient]:
    """What this replica does with its own gradients."""
    groups = self._place.groups
    factor = self._convention.for_gradients(
      groups.num_replicas, groups.group_size
    )
    return clipping.clip(
      [indexed_slices.times(grad, factor) for grad in grads],
      clipnorm=self._scaled_limit(self.clipnorm),
      global_clipnorm=self._scaled_limit(self.global_clipnorm),
      clipvalue=self._scaled_limit(self.clipvalue),
      keep_infinite=self._inner.scales_dynamically or self.skip_nonfinite,
    )

  def _make_reducible(
    self, grads: Sequence[Any], variables: Sequence[Any]
  ) -> list[clipping.Gradient]:
    """Gradients of the kinds that the engine reduces here."""
    return reduction.make_reducible(
      grads, variables, self._place.engine, self._place.groups
    )

  def _reduce(
    self, grads: Sequence[Any], calls: float = 1.0
  ) -> list[clipping.Gradient]:
    """Sums over the group; each is the sum of so many calls' gradients."""
    totals = reduction.reduce_gradients(
      grads,
      self._place.engine,
      self._place.groups,
      self._wire_dtype,
      self._wire_scale(),
      beside=self._noise.of_replica(grads, calls),
    )
    return self._noise.after_sum(totals, calls)

  def _wire_scale(self) -> Any:
    """What gradients are multiplied by while they travel in float16."""
    is_half = self._wire_dtype == tf.float16
    return self._inner.wire_scale() if is_half else None

  def _average_values(self, values: Sequence[Any]) -> list[clipping.Gradient]:
    """The group's mean of values that variables take in place of an update."""
    groups = self._place.groups
    sums = reduction.reduce_gradients(values, self._place.engine, groups)
    return [
      indexed_slices.times(each, 1.0 / groups.group_size) for each in sums
    ]

  def _scaled_limit(self, limit: float | None) -> Any:
    """A clipping limit, in the scale that gradients come in."""
    # In Keras a limit of 0 does not clip.
    return self._inner.scale_limit(limit) if limit and limit > 0 else None


def _wholes(variables: Sequence[Any]) -> Iterator[Any]:
  """TensorFlow's variables, each with the copies of all replicas."""
  return map(variables_lib.distributed, map(variables_lib.native, variables))
