"""CrossShardOptimizer: a Keras optimizer whose gradients are group sums.

What a user sees: arguments, properties, and Keras' methods. `step.flow` has the
way of a gradient; `tf_cross_shard.keras3` and `tf_cross_shard.tf_keras` make
this an optimizer of one Keras.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_cross_shard import group_schedule, validation
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import settings as settings_lib
from tf_cross_shard.gradients import differentiation, loss_factor
from tf_cross_shard.step import flow, replica_checks
from tf_cross_shard.wrapper import forwarding

if TYPE_CHECKING:
  import numpy.typing as npt


class CrossShard(settings_lib.Arguments, forwarding.OptimizerWrapper):
  """Sums or averages gradients over replicas, then lets `opt` apply them.

  With `L_r` the loss of replica `r`, `G` the group it belongs to and `f` the
  factor that `reduction` and `loss_averaged_over` ask for, every member of `G`
  applies

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
    lazy_rows: bool | str = False,
    group_settings: "Mapping[str, Sequence[float]] | None" = None,
    has_backup: bool = False,
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
        replica, before the sum; None or 0 for none. `opt`'s clips the sum.
      global_clipnorm: The same for the norm of all gradients together.
      clipvalue: The same for the absolute value of each element.
      wire_dtype: `"bfloat16"` or `"float16"`, to which wider gradients are
        rounded where they travel between replicas, or `"int8"` in blocks of 256
        with a scale each, whose rounding errors each replica adds to its next
        gradient; see `step.int8_wire`. None leaves gradients exact.
      skip_nonfinite: Whether the whole group skips a step whose sums hold a
        NaN or an infinity, and counts it in `skipped_steps`. A
        LossScaleOptimizer skips such steps anyway; then they are only counted.
      scale_gradients: Whether `apply_gradients` multiplies the gradients by the
        factor of the mean, in place of all that multiplies the loss. For loops
        that you cannot edit; `loss_averaged_over=None` means `"global"` there.
      fused_update: Whether TensorFlow's kernels update dense variables where
        `opt` is exactly one of Keras' classes and a kernel has its formula:
        Adam, AdamW (not amsgrad), SGD, RMSprop with momentum, Adamax, Adadelta,
        Ftrl. In functions XLA compiles the update where there is no kernel:
        with None, that of Keras 3's Nadam, Adagrad, Lion, RMSprop and amsgrad,
        for a million elements or more on CPUs; with True, of any class of
        Keras 3. True raises where neither can be; False leaves Keras'
        operations. The last bits of weights may differ.
      accumulate_steps: How many calls make one step: each replica adds up its
        own gradients, and their mean over the calls is reduced and applied in
        the last. `gradient_accumulation_steps` of a Keras 3 `opt` does the
        same. None for every call a step.
      shard_update: Whether each member of a group updates one part of the
        weights. `"elementwise"`: equal parts of all elements, and of the
        optimizer's state, see `step.flat_update`. `"by_variable"`: whole
        variables, for any class, see `step.owner_update`. True chooses by the
        class, if it is Keras'.
      noise_scale: Whether each group measures its gradient noise scale, see
        the property: True in every 32nd step, `k` in every k-th.
      lazy_rows: Whether a row-sparse gradient, as of an embedding, updates the
        rows that occur and no others, see `step.row_update`. SGD without
        momentum and Adagrad, without weight decay, do so anyway: there the
        numbers are plain Keras'. `"elementwise"` vouches for a class of yours.
      group_settings: A number for each group, by the names of settings of `opt`
        (`"weight_decay"`, `"momentum"`, `"beta_1"`, ...) or of the limits here.
        `opt` itself has one that is not 0. Learning rates have
        `schedules.PerGroup`.
      has_backup: Whether you go on from a backup when one of several machines
        is lost. Then variables are updated as their sums come in; without, all
        wait for all sums, so that who is left has no step half applied. On
        CPUs nothing was gained.

    Raises:
      ValueError: If `opt` names no optimizer or is itself a
        CrossShardOptimizer, or if another argument has no valid value.
      NotImplementedError: If the strategy has no synchronous replicas.
      RuntimeError: If `opt` was made outside of the scope that is open.
      TypeError: If `opt` is no optimizer, or one that Keras has no equal of.
    """
    opt = self._as_optimizer(opt)
    settings = settings_lib.Settings.of(locals())
    super().__init__(opt, name=name, **settings.limits)
    self._inner.fuse(fused_update)
    self._checks = replica_checks.ReplicaChecks(self._inner, settings)
    self._step = flow.Step(settings, self._inner, self._checks)
    group_schedule.bind(opt, self.groups, self._package)

  learning_rate = group_schedule.bound(
    forwarding.OptimizerWrapper.learning_rate
  )

  @property
  def skipped_steps(self) -> Any:
    """How many steps were skipped: a `tf.Variable`, each group with its own.

    None without `skip_nonfinite`.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> optimizer = CrossShardOptimizer("sgd", skip_nonfinite=True)
    >>> weight = tf.Variable(3.0)
    >>> _ = optimizer.apply_gradients([(tf.constant(float("nan")), weight)])
    >>> float(weight.numpy()), int(optimizer.skipped_steps.numpy())
    (3.0, 1)
    """
    return self._step.guard.count

  @property
  def noise_scale(self) -> Any:
    """How noisy gradients are: a `tf.Variable`, each group with its own.

    `tr(covariance of g_r) / |E g_r|^2`, float32, in batches of one replica;
    `step.noise_scale` has the formula and an example. Batches much smaller give
    almost as much progress for each example, much larger ones hardly more for
    each step. NaN before the first measurement, None without the argument.
    """
    return self._step.noise.noise_scale

  @property
  def gradient_norm(self) -> Any:
    """The norm of the group's mean gradient in the last step measured.

    Like `noise_scale`; without the factor of a loss scale.
    """
    return self._step.noise.gradient_norm

  @property
  def groups(self) -> groups_lib.Groups:
    """The groups in force, one of all replicas where none were given."""
    return self._checks.groups

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
    return self._perform(flow.Call(grads, variables, global_step, name))

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
    trained = list(variables)
    if not self._inner.is_built:
      self._checks.agree_to_build(trained)
    super().build(trained)

  def update_by_rows(
    self,
    var_list: "Iterable[validation.Variable] | None" = None,
    var_names: Iterable[str] | None = None,
  ) -> None:
    """Says which variables are tables. Call it before `build`.

    Only `accumulate_steps` and `shard_update` need it, and only for tables
    that are not the weights of a Keras `Embedding`: they make room for
    gradients before there are any.

    Args:
      var_list: Tables.
      var_names: Parts of the paths of tables.

    Raises:
      ValueError: If `opt` updates all rows in each step.
      RuntimeError: If the optimizer is built.
    """
    if self._inner.is_built:
      raise RuntimeError(
        "`update_by_rows` was called after `build`, which laid out the weights."
        " Call it before."
      )
    self._step.tables.add(list(var_list or ()), list(var_names or ()))

  def finalize_variable_values(self, var_list: Any) -> None:
    """Ends `fit`: writes moving averages into the variables of `opt`'s EMA."""
    self._step.watch.end_fit()
    self._step.update.write_averages(var_list)

  def _gradients(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: differentiation.GraphOptions,
  ) -> differentiation.Pairs:
    """Returns this replica's gradients of the scaled loss."""
    self._checks.check_place()
    return self._step.differentiate(loss, var_list, tape, default, options)

  def _perform(self, call: flow.Call) -> Any:
    """Checks everything, makes the slots, and does the step."""
    self._checks.check_place()
    self._checks.check_variables(call.variables)
    # Once more: `opt.learning_rate` may have been assigned, past this class.
    group_schedule.bind(self._inner.optimizer, self.groups, self._package)
    if not call.is_reduced:
      self._step.convention.check_was_scaled(
        call.through_apply, self._inner.divides
      )
    self.build(call.variables)
    self._checks.agree_to_step(call.grads, call.variables)
    if tf.executing_eagerly() or tf.inside_function():
      return self._step.perform(call)
    # A version 1 graph runs only what is fetched: one operation for all.
    return tf.function(lambda: self._step.perform(call), autograph=False)().op

  def _build_inner(self, variables: Sequence[Any]) -> None:
    """Makes the variables of all stages."""
    self._step.build(variables)

  def _config(self) -> dict[str, Any]:
    """The arguments besides `opt`, in serializable form."""
    return self._step.settings.to_config()

  def _before_saving(self) -> None:
    """Warns of what is lost; does nothing while this object is being made."""
    if "_step" in vars(self):
      whole = self._inner.unsharded_state
      saved = [*whole.trainable_variables, *self._inner.state]
      self._step.watch.before_saving(saved)

  def _differing(self) -> dict[str, Any]:
    """The arguments besides `opt` that differ from their defaults."""
    is_made = "_step" in vars(self)
    return self._step.settings.differing() if is_made else {}
