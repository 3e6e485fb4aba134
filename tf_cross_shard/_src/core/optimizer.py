"""CrossShardOptimizer: a Keras optimizer that reduces gradients over groups.

This module contains the public members: arguments, properties and Keras'
methods. `pipeline` contains the path of a gradient through a step. The
subclasses in `keras3.classes` and `tf_keras.classes` are also Keras optimizers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from tf_cross_shard._src.core import describe as describe_lib
from tf_cross_shard._src.core import groups as groups_lib
from tf_cross_shard._src.core import (
  loss_factor,
  optimizer_state,
  reduce,
  single_program,
  validation,
)
from tf_cross_shard._src.core import pipeline as pipeline_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core.facade import arguments, facade
from tf_cross_shard._src.core.gradients import differentiate
from tf_cross_shard._src.core.per_model import schedule as per_model_lib
from tf_cross_shard._src.core.wrapped import keras_private

if TYPE_CHECKING:
  import numpy.typing as npt


# Makes the properties `clipnorm`, `wire_dtype` and so on: one for each field of
# `settings.Settings`.
@settings_lib.with_properties
class CrossShardOptimizer(facade.Facade):
  """Wraps a Keras optimizer for training on several replicas, or in groups.

  Use it with `model.compile` and `fit`, or in a training loop, on one device or
  under MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy and
  VectorizedStrategy. It averages (or sums) the gradients over all replicas, and
  `opt` applies the result. Options reduce the cost of the update, accumulate
  gradients, or clip them on each replica. With `group_assignment`, gradients
  are reduced within groups of replicas only: each group trains a separate model
  with its own weights, slots and moving averages, and can have its own learning
  rate.

  In a formula: let `L_r` be the loss of replica `r`, `G` a group of replicas,
  and `f` a factor that depends on `reduction` and `loss_averaged_over`. All
  members (replicas) of `G` apply the same gradient, so their weights are always
  identical:

      g = sum over r in G of clip(grad(f * L_r))

  Train a model on two replicas. Only the `CrossShardOptimizer` is new:

  >>> import numpy as np
  >>> import tensorflow as tf
  >>> from tf_cross_shard import CrossShardOptimizer
  >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  >>> with strategy.scope():
  ...   model = tf.keras.Sequential(
  ...     [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
  ...   )
  ...   optimizer = CrossShardOptimizer(tf.keras.optimizers.Adam(0.1))
  ...   model.compile(optimizer, "mse")
  >>> x = np.ones([8, 1], "float32")
  >>> history = model.fit(x, 5 * x, batch_size=4, epochs=3, verbose=0)
  >>> history.history["loss"][-1] < history.history["loss"][0]
  True

  References:
    tf.compat.v1.tpu.CrossShardOptimizer. This class has all of its members.
  """

  @arguments.suggesting
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
    loss_averaged_over: Literal["replica", "global"] | None = None,
    clipnorm: float | None = None,
    global_clipnorm: float | None = None,
    clipvalue: float | None = None,
    wire_dtype: Literal["bfloat16", "float16"] | tf.DType | None = None,
    skip_nonfinite: bool = False,
    scale_gradients: bool = False,
    fused_update: bool | None = None,
    accumulate_steps: int | None = None,
    shard_update: bool | Literal["elementwise"] = False,
    lazy_rows: bool | Literal["elementwise"] = False,
    per_model: "Mapping[str, Sequence[float]] | None" = None,
  ) -> None:
    """Wraps `opt`. Create both optimizers inside `strategy.scope()`.

    >>> from tf_cross_shard import CrossShardOptimizer
    >>> optimizer = CrossShardOptimizer("sgd", clipnorm=1.0)
    >>> float(optimizer.learning_rate.numpy())
    0.009999999776482582

    Args:
      opt: A Keras optimizer, or a value that `tf.keras.optimizers.get` accepts,
        such as `"adam"`. It keeps slots, learning rate, iteration count and all
        other variables. An optimizer of `tf.compat.v1.train` becomes the
        Keras class with the same formula; see `migration.from_v1`.
      reduction: `"mean"` or `"sum"` over the group. The spellings of
        `tf.compat.v1.losses.Reduction` and of Keras are also accepted.
      name: The name of this optimizer.
      group_assignment: The groups of replicas, of shape `[num_groups,
        group_size]` and dtype int32: lists, an array, a constant tensor or
        `Groups`. None for one group of all replicas or, under a
        VectorizedStrategy, a group for each model.
      loss_averaged_over: `"replica"` if the loss is averaged over the examples
        of one replica, `"global"` if it is averaged over the examples of all
        replicas. None chooses by the method that you call: `"replica"` for
        `compute_gradients` and `minimize(callable)`, `"global"` for Keras' own
        calls (`fit`, and `minimize` with `tape=`). In `fit`, None is right for
        every loss of `compile`, also for summed ones; you get a warning if that
        cannot be known. docs/training.md shows how to check your own loop.
      clipnorm: Each replica clips its gradient of each variable to this norm,
        before gradients are summed. None or 0 does not clip. `clipnorm` of
        `opt` clips after the sum. Set at most one of the three limits.
      global_clipnorm: Like `clipnorm`, for the norm of all gradients together.
      clipvalue: Like `clipnorm`, for the absolute value of each element.
      wire_dtype: `"bfloat16"` or `"float16"`. Gradients of wider dtypes are
        rounded to this dtype when they are sent between replicas. None leaves
        gradients exact.
      skip_nonfinite: Whether the whole group skips a step whose sums contain a
        NaN or an infinity, and counts the step in `skipped_steps`. With
        a LossScaleOptimizer, which skips such steps anyway, this only counts
        them.
      scale_gradients: If True, the factor `f` is applied to the gradients in
        `apply_gradients` rather than to the loss. Use this if you cannot change
        the training loop to call `scale_loss`. `loss_averaged_over=None` then
        means `"global"`.
      fused_update: Whether to update each dense variable with one fused
        TensorFlow kernel instead of Keras' separate operations. Kernels exist
        for Adam, AdamW (both without amsgrad), SGD, RMSprop with momentum,
        Adamax, Adadelta and Ftrl; subclasses of these do not qualify. Kernels
        may change the last bits of the weights. A step that XLA compiles
        (`jit_compile=True`) uses Keras' operations.

        - None, the default: use a kernel where there is one, and Keras'
          operations elsewhere.
        - True: raise an error if there is no kernel. Row-sparse gradients that
          are not updated by rows become dense, and use the kernel, too.
        - False: keep Keras' operations.
      accumulate_steps: The number of calls that make one step (gradient
        accumulation). Each replica adds up its own gradients. In the last call,
        their mean over the calls is reduced and applied.
        None makes every call a step. A gradient that is None in one call must
        be None in all calls; otherwise use zeros. With
        `gradient_accumulation_steps` of a Keras 3 `opt` instead, gradients are
        reduced in every call, and Keras accumulates the sums.
      shard_update: Whether each member of a group updates only one part of the
        weights: an equal number of elements, of which it alone keeps the
        optimizer state. `opt` must treat every element independently, as most
        of Keras' classes do. Pass `"elementwise"` to promise that your own
        optimizer class does.
      lazy_rows: Whether a row-sparse gradient, such as that of an embedding,
        updates only the rows in the batch. If False, only Adagrad and Keras 3's
        SGD without momentum, both without weight decay, do so, as in plain
        Keras. Pass `"elementwise"` to promise that your own optimizer class
        treats every element independently. On TPUs and under
        VectorizedStrategy, whose programs have no shapes that depend on data,
        all rows change.
      per_model: A dictionary of lists with a number for each model. Its
        keys are names of settings of `opt` (`"weight_decay"`, `"momentum"`,
        `"beta_1"`, ...) or of the clipping limits above. If a setting
        is nonzero in any model, create `opt` with a nonzero value for this
        setting (that of any such model), because Keras uses it to decide which
        slots to create. Each list is a variable that every step reads: assign
        a dictionary with other numbers to `optimizer.per_model`, and the
        next step uses them. For learning rates, use `schedules.PerModel`.

    Raises:
      ValueError: If `opt` is an unknown name or already a
        CrossShardOptimizer, if another argument is invalid, or if a subclass
        overrides a method of a step other than `apply_gradients`.
      NotImplementedError: If the strategy has no synchronous replicas.
      RuntimeError: If `opt` was created outside the current
        `strategy.scope()`.
      TypeError: If `opt` is not an optimizer, or is an optimizer of TensorFlow
        1 that Keras has no class for.
    """
    opt = self._as_optimizer(opt)
    # All arguments but `opt`: each field of `Settings` has an argument's name.
    settings = settings_lib.Settings.of(locals())
    super().__init__(opt, name=name, **settings.limits)
    self._wrapped.fuse(fused_update)
    engine = reduce.for_strategy(
      self._wrapped.strategy, settings.group_assignment
    )
    per_model_lib.prepare_all(opt, engine.groups, self._wrapped.package)
    vars(self)["_pipeline"] = pipeline_lib.GradientPipeline(
      settings, self._wrapped, engine
    )

  @property
  def learning_rate(self) -> Any:
    """The learning rate of the wrapped optimizer.

    In a replica, a `schedules.PerModel` is the rate of the replica's group.
    """
    pipeline = optimizer_state.find_pipeline(self)
    if pipeline is None:
      return None
    with pipeline.in_my_group():
      return pipeline.wrapped.optimizer.learning_rate

  @learning_rate.setter
  def learning_rate(self, value: Any) -> None:
    pipeline = optimizer_state.find_pipeline(self)
    if pipeline is None:  # Keras' constructor is running.
      return
    opt = pipeline.wrapped.optimizer
    if not callable(value) and per_model_lib.rates_of(opt) is not None:
      raise TypeError(
        "PerModel holds a learning rate for each group, so one number cannot"
        " replace it. Use callbacks.PerModelReduceLROnPlateau instead of"
        " ReduceLROnPlateau, and a PerModel of schedules instead of"
        " LearningRateScheduler."
      )
    wrapped = pipeline.wrapped
    per_model_lib.prepare(value, wrapped.strategy, self.groups, wrapped.package)
    opt.learning_rate = value

  @property
  def update_step(self) -> Any:
    """Keras' update of one variable, by the wrapped optimizer.

    An optimizer of your own around this one may call it if there is one group.
    """
    pipeline = optimizer_state.find_pipeline(self)
    wrapped = self._wrapped.optimizer
    if pipeline is None or (
      pipeline.engine.groups.num_groups == 1
      or single_program.are_models(pipeline.engine.strategy)
    ):
      return wrapped.update_step

    def refuse(*args: Any, **kwargs: Any) -> None:
      raise RuntimeError(
        f"update_step of {self.name} was called by another optimizer, which"
        f" sums gradients over all {pipeline.engine.num_replicas} replicas, and"
        " so mixes the groups. Let the other optimizer call apply_gradients, or"
        f" wrap it: CrossShardOptimizer(outer({type(wrapped).__name__}(...)))."
      )

    return refuse

  @property
  def skipped_steps(self) -> Any:
    """The number of steps that were skipped because of a NaN or an infinity.

    An int64 `tf.Variable`; each replica holds the count of its own group. None
    unless `skip_nonfinite` is set.

    >>> import tensorflow as tf
    >>> from tf_cross_shard import CrossShardOptimizer
    >>> optimizer = CrossShardOptimizer("sgd", skip_nonfinite=True)
    >>> weight = tf.Variable(3.0)
    >>> _ = optimizer.apply_gradients([(tf.constant(float("nan")), weight)])
    >>> float(weight.numpy()), int(optimizer.skipped_steps.numpy())
    (3.0, 1)
    """
    return self._pipeline.guard.skipped_steps

  @property
  def groups(self) -> groups_lib.Groups:
    """The groups of replicas.

    Without `group_assignment`, all replicas form one group or, under a
    VectorizedStrategy, each model is a group.
    """
    return self._pipeline.engine.groups

  def describe(self) -> describe_lib.Description:
    """Returns what this optimizer does to each variable in a step.

    You can call it anywhere, before or after `build`; it changes nothing. With
    `print` you get a table. Ask it which variables TensorFlow's kernels update,
    which settings have no effect and why, and where gradients are clipped.

    >>> import tensorflow as tf
    >>> from tf_cross_shard import CrossShardOptimizer
    >>> optimizer = CrossShardOptimizer("adam", shard_update=True)
    >>> optimizer.build([tf.Variable([1.0, 2.0], name="weight")])
    >>> [row] = optimizer.describe().rows()
    >>> row["path"], row["updated_by"], row["elements"]
    ('weight', 'ResourceApplyAdam', [2])
    >>> optimizer.describe().to_dict()["not_in_force"][0]["reason"]
    'there is one replica, so nothing is divided'

    Gradients are known only inside a step. So this method assumes that the
    gradients of `Embedding` weights, and of variables that you passed to
    `update_by_rows`, are row-sparse, that all others are dense, and that the
    step runs inside `fit` or a `tf.function` without `jit_compile`.

    Returns:
      An object with the methods `rows()`, which returns a list with
      a dictionary for each variable, and `to_dict()`, which returns everything
      in types that JSON has. A row has these keys:

      - `path`, `shape`, `dtype`: the variable.
      - `updated_by`: TensorFlow's kernel, such as `"ResourceApplyAdam"`;
        `"Adam in parts"` for three smaller kernels; `"Keras"` for Keras'
        operations; `"rows"` for Keras' operations on the rows in the batch.
      - `reason`: why it is not the optimizer's kernel.
      - `elements`: how many elements each member of a group updates.
    """
    return describe_lib.describe(self._pipeline, repr(self))

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[tuple[Any, "validation.Variable"]],
    global_step: "validation.Variable | None" = None,
    name: str | None = None,
  ) -> Any:
    """Reduces the gradients over the group, and applies the result with `opt`.

    >>> import tensorflow as tf
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
      The iteration count after the step, an int64 tensor; in a TensorFlow
      1 graph, the operation that takes the step.

    Raises:
      RuntimeError: If you call it in the cross-replica context, under
        a different strategy from the one in which it was created, or in two
        threads at once.
      ValueError: If `grads_and_vars` is empty or malformed.
      TypeError: If `grads_and_vars` contains something that is not a variable,
        or if `global_step` is not an integer variable.
    """
    grads, variables = validation.check_pairs(grads_and_vars)
    validation.check_global_step(global_step)
    return self._perform(pipeline_lib.Call(grads, variables, global_step, name))

  def update_by_rows(
    self,
    var_list: "Iterable[validation.Variable] | None" = None,
    var_names: Iterable[str] | None = None,
  ) -> None:
    """Declares variables as embedding tables. Call it before `build`.

    You need this method only with `shard_update`, and only for tables that are
    not the weights of a Keras `Embedding`: `shard_update` divides the weights
    before it has seen a gradient, and does not divide tables.

    Args:
      var_list: The tables.
      var_names: Parts of the paths of tables, such as `"user_table"`.

    Raises:
      ValueError: If `opt` updates all rows in each step.
      RuntimeError: If the optimizer is built.
    """
    if self._wrapped.is_built:
      raise RuntimeError(
        "`update_by_rows` was called after `build`, which has divided the"
        " weights among the members. Call it before `build`."
      )
    self._pipeline.tables.add(list(var_list or ()), list(var_names or ()))

  def finalize_variable_values(self, var_list: Any) -> None:
    """Overwrites variables with the moving averages of `opt`, if any.

    Keras calls this method when `fit` ends.

    Args:
      var_list: The variables.
    """
    pipeline = self._pipeline
    is_sharded = pipeline.wrapped.sharded_state is not None
    pipeline.warnings.end_fit(is_sharded and bool(self._wrapped.averages))
    pipeline.update.write_averages(var_list)

  def _gradients(
    self,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None,
    default: str,
    options: differentiate.GraphOptions,
  ) -> differentiate.Pairs:
    return self._pipeline.differentiate(loss, var_list, tape, default, options)

  def _apply_pairs(self, grads: list[Any], variables: list[Any]) -> None:
    self._perform(pipeline_lib.Call(grads, variables, through_apply=True))

  def _perform(self, call: pipeline_lib.Call) -> Any:
    """Checks the call, and takes the step."""
    pipeline = self._pipeline
    pipeline.checks.check_place()
    pipeline.checks.check_variables(call.variables)
    if not call.is_reduced:
      pipeline.convention.check_was_scaled(self._wrapped.divides_gradients)
    self.build(call.variables)
    pipeline.checks.compare_workers_before_step(call.grads, call.variables)
    if tf.executing_eagerly() or tf.inside_function():
      return pipeline.take(call)
    # A TensorFlow 1 graph runs only what is fetched: return one operation
    # that takes the whole step.
    return tf.function(lambda: pipeline.take(call), autograph=False)().op

  def _build_slots(self, variables: Sequence[Any]) -> None:
    checks = self._pipeline.checks
    # Creating slots waits for all workers. Compare first, so that a difference
    # raises an error instead of a hang.
    if not self._wrapped.is_built:
      checks.compare_workers_before_build(variables)
    checks.check_strategy_of(variables)
    self._pipeline.build(variables)

  def _config(self) -> dict[str, Any]:
    return self._pipeline.current_settings().to_config()

  def _before_saving(self) -> None:
    pipeline = optimizer_state.find_pipeline(self)
    if pipeline is not None:
      whole = self._wrapped.whole
      loss_scale = keras_private.loss_scale(self._wrapped.optimizer)
      pipeline.warnings.before_saving(
        [*whole.trainable_variables, *whole.variables, *loss_scale]
      )

  def _differing(self) -> dict[str, Any]:
    return self._pipeline.current_settings().non_default()
