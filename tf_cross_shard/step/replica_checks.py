"""Where an optimizer is used: its strategy, its groups, allowed contexts."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_cross_shard import collectives
from tf_cross_shard import groups as groups_lib
from tf_cross_shard import settings as settings_lib
from tf_cross_shard import variables as variables_lib
from tf_cross_shard.coordination import agreement


class ReplicaChecks:
  """The strategy that an optimizer was made for and the groups in it."""

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    group_assignment: Any,
    name: str,
  ) -> None:
    """Checks the groups, and their number where there are several replicas."""
    self.assigned = settings_lib.as_groups(group_assignment)
    self.engine = collectives.for_strategy(strategy)
    replicas = self.engine.num_replicas
    self.groups = self.assigned or groups_lib.contiguous(replicas, replicas)
    self._name = name
    # Without a strategy the optimizer may have been loaded for inference only;
    # `check` raises before the first step.
    if replicas > 1:
      self.engine.check_groups(self.groups)
      self._check_group_count()

  def check(self) -> None:
    """Raises an error where gradients cannot be reduced."""
    if tf.distribute.in_cross_replica_context():
      raise RuntimeError(
        f"{self._name} was called in the cross-replica context (inside"
        " strategy.scope() but outside strategy.run). Call it inside the"
        " function given to `strategy.run`."
      )
    here, made_in = tf.distribute.get_strategy(), self.engine.strategy
    replicas = here.num_replicas_in_sync, made_in.num_replicas_in_sync
    if here is not made_in and max(replicas) > 1:
      raise RuntimeError(
        f"{self._name} encapsulates an optimizer that was made under"
        f" {type(made_in).__name__} ({replicas[1]} replicas) and is used under"
        f" {type(here).__name__} ({replicas[0]} replicas). Make both inside"
        " `with strategy.scope():` and call it inside `strategy.run`."
      )
    self._check_group_count()
    in_function = tf.executing_eagerly() or tf.inside_function()
    if not in_function and not self.engine.orders_graphs:
      raise RuntimeError(
        f"{self._name} was called in a version 1 graph under"
        f" {type(here).__name__}, where nothing orders the replicas' updates."
        " Put `strategy.run` into a tf.function."
      )

  def check_variables(self, variables: Sequence[Any]) -> None:
    """Raises `ValueError` for a variable made outside the strategy's scope.

    It exists once: each replica would update it, and groups would mix in it.
    """
    strategy = self.engine.strategy
    if self.engine.num_replicas == 1:
      return
    for variable in variables:
      whole = variables_lib.distributed(variables_lib.native(variable))
      if getattr(whole, "distribute_strategy", None) is not strategy:
        name = getattr(variable, "path", None) or variable.name
        raise ValueError(
          f"`grads_and_vars` must hold variables of the"
          f" {type(strategy).__name__} that {self._name} was made under; {name}"
          " was made outside its scope. Make it inside `with"
          " strategy.scope():`."
        )

  def agree_to_build(
    self, variables: Sequence[Any], settings: Callable[[], dict[str, Any]]
  ) -> None:
    """Raises an error unless all workers make the same optimizer."""
    self.engine.agree(
      f"the building of {self._name}",
      lambda: self._settings(settings()) + agreement.variables(variables),
    )

  def agree_to_step(
    self,
    grads: Sequence[Any],
    variables: Sequence[Any],
    settings: Callable[[], dict[str, Any]],
    iterations: Callable[[], tf.Tensor],
  ) -> None:
    """Raises an error unless all workers take the same first step."""
    self.engine.agree(
      f"a step of {self._name}",
      lambda: [
        *self._settings(settings()),
        *agreement.variables(variables),
        *agreement.gradients(grads),
      ],
      # Groups that were trained apart may have skipped other steps.
      lambda: agreement.settings(
        iterations=int(iterations()) if self.groups.num_groups == 1 else "any"
      ),
    )

  def _settings(self, settings: dict[str, Any]) -> list[str]:
    """Lines of settings, with the groups in force."""
    in_force = {**settings, "group_assignment": self.groups.to_lists()}
    return agreement.settings(**in_force)

  def _check_group_count(self) -> None:
    """Raises `ValueError` unless the groups hold the strategy's replicas."""
    replicas = self.engine.num_replicas
    if self.groups.num_replicas != replicas:
      raise ValueError(
        f"`group_assignment` must hold the {replicas} replicas of"
        f" {type(self.engine.strategy).__name__}; it holds"
        f" {self.groups.num_replicas}: {self.groups.to_lists()}. Change"
        " it, or make the optimizer inside the scope of the strategy it is for."
      )
