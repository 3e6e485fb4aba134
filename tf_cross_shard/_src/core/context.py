"""The settings, the optimizer and the engine, which most stages need."""

import dataclasses

from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core.inner import inner as inner_lib
from tf_cross_shard._src.core.reduce import engine as engine_lib


@dataclasses.dataclass(frozen=True)
class Context:
  """The settings, the wrapped optimizer and the engine, for all stages.

  Attributes:
    settings: The arguments of the CrossShardOptimizer.
    inner: The user's optimizer.
    engine: The engine that sums over the groups of replicas.
  """

  settings: settings_lib.Settings
  inner: inner_lib.Inner
  engine: engine_lib.Engine

  @property
  def may_skip(self) -> bool:
    """Whether a step may be skipped because of a NaN or an infinity."""
    return self.settings.skip_nonfinite or self.inner.skips_overflows


class Stage:
  """A stage of a step.

  Attributes:
    context: The settings, the wrapped optimizer and the engine.
      `StepPipeline.replace` gives stages a new context when the user assigns a
      setting.
  """

  def __init__(self, context: Context) -> None:
    """Creates a stage with this context."""
    self.context = context

  @property
  def settings(self) -> settings_lib.Settings:
    """The arguments in force."""
    return self.context.settings

  @property
  def inner(self) -> inner_lib.Inner:
    """The user's optimizer."""
    return self.context.inner

  @property
  def engine(self) -> engine_lib.Engine:
    """The engine that sums over the groups of replicas."""
    return self.context.engine
