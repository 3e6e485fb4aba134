"""Converts an optimizer of TensorFlow 1 to a CrossShardOptimizer."""
# ruff: noqa: SLF001  # TensorFlow 1's CrossShardOptimizer has no public fields.

import importlib
from typing import Any, Literal

from tf_cross_shard._src.core import loss_factor, versions
from tf_cross_shard._src.core.wrapped import v1


def from_v1(
  opt: Any, loss_averaged_over: Literal["replica", "global"] | None = None
) -> Any:
  """Converts an optimizer of TensorFlow 1 to a CrossShardOptimizer.

  The new optimizer is of one of Keras' own classes, with the arguments that
  give the formula of `opt`. Call `from_v1` inside `strategy.scope()`. `opt` is
  an optimizer of `tf.compat.v1.train`, or a
  `tf.compat.v1.tpu.CrossShardOptimizer` around one.

  GradientDescent and Momentum become `SGD`; Adam, Adagrad, RMSProp, Adadelta
  and Ftrl become the classes of that name. You get a warning where Keras has no
  equal formula: the average of squares of RMSProp starts at 0, and not at 1,
  and the momentum of SGD adds up gradients times learning rates, which differs
  under a schedule.

  With row-sparse gradients, TensorFlow 1 changed only the rows in the batch,
  except for Adam. `CrossShardOptimizer(opt, lazy_rows=True)` does so, too.

  The slots of `opt` are not converted. To keep them, save a checkpoint of `opt`
  and call `convert_checkpoint`.

  In eager execution, `tf.compat.v1.train.exponential_decay` and similar
  functions return a schedule. It becomes the Keras schedule of the same name,
  which follows `iterations`; these start at the current `global_step`.

  `use_locking` is dropped, because there are no data races. A `/` in a name
  becomes `_`.

  >>> import tensorflow as tf
  >>> from tf_cross_shard import migration
  >>> optimizer = migration.from_v1(
  ...   tf.compat.v1.tpu.CrossShardOptimizer(
  ...     tf.compat.v1.train.MomentumOptimizer(0.5, momentum=0.5),
  ...     reduction=tf.compat.v1.losses.Reduction.SUM,
  ...   )
  ... )
  >>> optimizer.reduction
  'sum'
  >>> weight = tf.Variable(1.0)
  >>> for _ in range(2):
  ...   _ = optimizer.apply_gradients([(tf.constant(1.0), weight)])
  >>> float(weight.numpy())  # 1 - 0.5 * 1 - 0.5 * (0.5 * 1 + 1)
  -0.25

  Args:
    opt: An optimizer of one of the seven classes above, but not of a class that
      you derived from one; or a `tf.compat.v1.tpu.CrossShardOptimizer` around
      such an optimizer, whose `reduction`, `group_assignment` and name are
      kept.
    loss_averaged_over: The argument of CrossShardOptimizer. Losses of
      TensorFlow 1 were averaged over a `"replica"`. Leave it None (the default)
      for `fit` of Keras.

  Returns:
    A CrossShardOptimizer of the Keras that `tf.keras` refers to. Its
    reduction is `"mean"` if `opt` is not a CrossShardOptimizer.

  Raises:
    TypeError: If `opt` is not an optimizer of TensorFlow 1; if Keras has no
      such optimizer; if the learning rate is a schedule that Keras lacks.
    ValueError: If a hyperparameter is a variable or a function, whose value may
      change.
  """
  if not isinstance(opt, v1.V1Optimizer):
    raise TypeError(
      "`opt` must be an optimizer of tf.compat.v1.train; got"
      f" {type(opt).__module__}.{type(opt).__qualname__}: {opt!r}. Pass a Keras"
      " optimizer to CrossShardOptimizer as it is."
    )
  arguments: dict[str, Any] = {"reduction": loss_factor.MEAN}
  if type(opt) is v1.V1CrossShard:
    arguments = {
      "reduction": opt._reduction,
      "name": v1.name_of(opt),
      "group_assignment": opt._group_assignment,
    }
    opt = opt._opt
  kind = "tf_keras" if versions.uses_tf_keras() else "keras3"
  package = importlib.import_module(f"tf_cross_shard.{kind}")
  return package.CrossShardOptimizer(
    opt, loss_averaged_over=loss_averaged_over, **arguments
  )
