"""Optimizers of TensorFlow 1 as a CrossShardOptimizer."""

from typing import Any

from tf_cross_shard.gradients import loss_factor
from tf_cross_shard.migration import v1


def from_v1(opt: Any) -> Any:
  """Makes a CrossShardOptimizer that computes what `opt` computed.

  `opt` is an optimizer of `tf.compat.v1.train`, or one in a
  `tf.compat.v1.tpu.CrossShardOptimizer`. Call it inside `strategy.scope()`.
  Both make the same numbers of the same gradients:

  | version 1 | Keras | what is different from plain Keras |
  |---|---|---|
  | GradientDescent | SGD | nothing |
  | Adam | of Adam | rounding: `1 - beta^t` has few digits at first |
  | Adagrad | of Adagrad | the epsilon is 0; sparse gradients |
  | Momentum | of SGD | `accum = momentum * accum + grad`; |
  |          |        | `var -= learning_rate * accum` |
  | RMSProp | of RMSprop | the average of squares starts at 1 |
  | Adadelta | of Adadelta | sparse gradients |
  | Ftrl | of Ftrl | sparse gradients; 0 where Keras has NaN, if accumulator |
  |      |         | and gradient are 0 |

  Keras' momentum sums up `learning_rate * grad`, which is another number as
  soon as the learning rate changes. Adagrad and the last four touch the rows of
  a sparse gradient only, in the variable and in the slots; Keras decays or
  moves all, or divides by 0 in them.
  Slots hold what version 1's hold, under Keras' names of them. They are not
  carried over from `opt`: checkpoints are.

  A learning rate that is a variable or a function is read in every step. Assign
  the variable to change it: to set `optimizer.learning_rate` to a number is an
  error, and `ReduceLROnPlateau` of tf_keras has no effect. Such an optimizer
  cannot be saved until its learning rate is a schedule of Keras. A TPU, or any
  program that XLA compiles, reads variables, and cannot call a function that
  answers Python's numbers or tensors made of them.

  What `tf.compat.v1.train.exponential_decay` and its siblings answer in eager
  execution becomes that schedule of Keras; it follows the optimizer's
  `iterations` from then on, which start from the present `global_step`. That
  variable is not looked at again. In version 1 it may be assigned, or count
  other than once per `apply_gradients`: then rates differ.

  Adam's betas must be Python's numbers or float32: of others version 1 has
  other powers. A `/` in a name becomes `_`.

  `use_locking` is dropped: updates here never race.

  >>> import tensorflow as tf
  >>> optimizer = from_v1(
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
    opt: An optimizer of `tf.compat.v1.train`, whose class is one of those in
      the table itself and none derived from it, or a
      `tf.compat.v1.tpu.CrossShardOptimizer` around such a one, whose
      `reduction`, `group_assignment` and name are kept.

  Returns:
    A CrossShardOptimizer of the Keras that `tf.keras` is; its reduction is
    `"mean"` if `opt` had none.

  Raises:
    TypeError: If `opt` is no version 1 optimizer, or one that no optimizer of
      Keras equals.
    ValueError: If a setting has no value yet, is NaN, or is one that Keras
      would not follow.
  """
  if not v1.is_v1(opt):
    raise TypeError(f"`opt` must be a version 1 optimizer; {_instead(opt)}")
  arguments: dict[str, Any] = {"reduction": loss_factor.MEAN}
  if v1.is_cross_shard(opt):
    opt, arguments = v1.within(opt)
  import tf_cross_shard  # Not at import: that would be a circle.

  return tf_cross_shard.CrossShardOptimizer(opt, **arguments)


def _instead(opt: Any) -> str:
  """What was handed over, and what to do with it."""
  found = f"got {type(opt).__module__}.{type(opt).__qualname__}"
  if isinstance(opt, str):
    return f"got {opt!r}. Pass it to CrossShardOptimizer as it is."
  if hasattr(opt, "apply_gradients"):
    return (
      f"{found}, which is a Keras optimizer already."
      " Pass it to CrossShardOptimizer as it is."
    )
  return f"{found}. Pass one such as tf.compat.v1.train.AdamOptimizer(0.001)."
