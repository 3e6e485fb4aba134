"""Checks that run before a step: where it runs, and whether workers agree."""

import os
from collections.abc import Sequence

import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core import single_program, validation
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core import workers as workers_lib
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.variables import Gradient, Variable
from tf_cross_shard._src.core.wrapped import optimizer as wrapped_lib


class Checks:
  """Checks of the strategy, the groups, the variables and the workers."""

  def __init__(
    self,
    settings: settings_lib.Settings,
    wrapped: wrapped_lib.WrappedOptimizer,
    engine: engine_lib.Engine,
  ) -> None:
    """Raises an error if the groups or the workers do not fit the strategy."""
    self._settings = settings
    self._wrapped = wrapped
    self._engine = engine
    self._name = settings.name
    if tf.distribute.has_strategy():
      self._check_strategy()
    self._configuration_error = self._find_configuration_error()
    # On one replica, the optimizer may have been loaded only for inference,
    # where its groups do not matter. `check_place` raises the error before the
    # first step.
    if self._configuration_error and engine.num_replicas > 1:
      raise ValueError(self._configuration_error)

  def check_place(self) -> None:
    """Raises an error where gradients cannot be reduced."""
    if tf.distribute.in_cross_replica_context():
      raise RuntimeError(
        f"{self._name} was called in the cross-replica context (inside"
        " strategy.scope() but outside strategy.run). Call it inside the"
        " function given to `strategy.run`."
      )
    self._check_strategy()
    if self._configuration_error:
      raise ValueError(self._configuration_error)
    is_ordered = tf.executing_eagerly() or tf.inside_function()
    # The operations of one replica, or of one program, have an order anyway.
    is_one = self._engine.num_replicas == 1 or self._engine.is_single_program
    if not is_ordered and not is_one:
      raise RuntimeError(
        f"{self._name} was called in a TensorFlow 1 graph under"
        f" {type(tf.distribute.get_strategy()).__name__}, where the replicas'"
        " updates would run in no defined order. Call `strategy.run` inside a"
        " tf.function."
      )

  def check_variables(self, variables: Sequence[Variable]) -> None:
    """Raises `ValueError` for a variable that a step cannot update."""
    if self._wrapped.is_built:
      validation.check_known(variables, self._wrapped.knows)
    strategy = self._engine.strategy
    if self._engine.num_replicas == 1:
      return
    for variable in variables:
      # A variable of no scope exists once: the updates of all groups would mix.
      whole = variables_lib.distributed(variable)
      if getattr(whole, "distribute_strategy", None) is not strategy:
        name = getattr(variable, "path", None) or variable.name
        raise ValueError(
          f"`grads_and_vars` must contain variables of the"
          f" {type(strategy).__name__} that {self._name} was created under;"
          f" {name} was created outside its scope. Create it inside `with"
          " strategy.scope():`."
        )

  def compare_workers_before_build(self, variables: Sequence[Variable]) -> None:
    topic = f"the building of {self._name}"
    self._engine.compare_workers(topic, variables, (), self._setting_lines)

  def compare_workers_before_step(
    self, grads: Sequence[Gradient], variables: Sequence[Variable]
  ) -> None:
    def lines() -> list[str]:
      # Different groups may have skipped different steps.
      is_equal = self._engine.groups.num_groups == 1
      count = int(self._wrapped.iterations()) if is_equal else "any"
      return [*self._setting_lines(), f"iterations: {count}"]

    topic = f"a step of {self._name}"
    self._engine.compare_workers(topic, variables, grads, lines)

  def check_strategy_of(self, variables: Sequence[Variable]) -> None:
    """Raises an error for variables of another strategy than the optimizer."""
    made_in = self._engine.strategy
    for variable in variables:
      other = replicas_lib.strategy_of(variable) or made_in
      if self._is_foreign(other):
        raise RuntimeError(
          f"{self._name} was created under"
          f" {validation.strategy_in_words(made_in)}, but"
          f" {variables_lib.path_of(variable)} under"
          f" {validation.other_in_words(other, made_in)}. Create the model and"
          " the optimizer, and call model.compile, inside the same `with"
          " strategy.scope():`."
        )

  def _check_strategy(self) -> None:
    """Raises `RuntimeError` under a strategy other than the optimizer's."""
    here, made_in = tf.distribute.get_strategy(), self._engine.strategy
    if not self._is_foreign(here):
      return
    where = (
      f"{self._name} wraps an optimizer that was created under"
      f" {validation.strategy_in_words(made_in)} but is used under"
      f" {validation.other_in_words(here, made_in)}."
    )
    if tf.distribute.has_strategy():
      raise RuntimeError(
        f"{where} Create the optimizer and {self._name} inside the"
        " `strategy.scope()` in which they train."
      )
    raise RuntimeError(
      f"{where} For fit, create the model inside `with strategy.scope():`, too:"
      f" fit runs under the strategy of the model. Otherwise, call {self._name}"
      " inside `strategy.run`."
    )

  def _is_foreign(self, strategy: tf.distribute.Strategy) -> bool:
    made_in = self._engine.strategy
    copies = map(single_program.num_copies, (strategy, made_in))
    return strategy is not made_in and max(copies) > 1

  def _setting_lines(self) -> list[str]:
    config = self._settings.to_config()
    del config["name"]
    config["group_assignment"] = self._engine.groups.to_lists()
    return workers_lib.setting_lines(**config)

  def _find_configuration_error(self) -> str:
    """Returns why the groups or the workers do not fit the strategy, or ""."""
    strategy, groups = self._engine.strategy, self._engine.groups
    where = validation.strategy_in_words(strategy)
    if groups.num_replicas != self._engine.num_replicas:
      return (
        f"`group_assignment` covers {groups.num_replicas} replicas,"
        f" {groups.to_lists()}, but the optimizer was created under {where}."
        " Change `group_assignment`, or create the optimizer inside the scope"
        " of its strategy. To load a file of a model with groups on one"
        " device, save a plain model, Models(model)[i]."
      )
    if single_program.are_models(strategy) and groups.group_size > 1:
      return (
        "`group_assignment` must have groups of one under VectorizedStrategy:"
        f" its replicas are models; got {groups.to_lists()}. For replicas that"
        " share a model, use local_strategy or VirtualTPUStrategy."
      )
    # Each host of a TPU runs its own program, but they share one strategy.
    program = single_program.of_strategy(strategy)
    is_one_of_many = program is not None or isinstance(
      strategy, tf.distribute.MultiWorkerMirroredStrategy
    )
    # TensorFlow would try to read an empty string.
    if not is_one_of_many and os.environ.get("TF_CONFIG"):
      resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
      with workers_lib.naming_tf_config():
        tasks = [
          task[:2] for task in workers_lib.tasks(resolver.cluster_spec())
        ]
      # A task that only evaluates is not among the tasks that train.
      is_here = (resolver.task_type, resolver.task_id) in tasks
      if is_here and len(tasks) > 1:
        return (
          f"TF_CONFIG lists {len(tasks)} workers, but the optimizer was created"
          f" under {where}, so each worker would train a separate model. Use"
          " tf_cross_shard.multi_worker.MultiWorkerStrategy(), or unset"
          " TF_CONFIG."
        )
    return ""
