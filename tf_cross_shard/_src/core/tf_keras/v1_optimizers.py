"""The optimizers of `tf.compat.v1.train`, as optimizers of tf_keras."""

from typing import Any, Final

import tensorflow as tf
import tf_keras

from tf_cross_shard._src.core.gradients import row_sparse
from tf_cross_shard._src.core.wrapped import v1

_register: Final = tf_keras.saving.register_keras_serializable("tf_cross_shard")
_Schedule: Final[Any] = tf_keras.optimizers.schedules.LearningRateSchedule


class _Update(v1.V1Update):
  """Mixin that updates by TensorFlow 1's kernels, in tf_keras."""

  def add_variable_from_reference(
    self,
    model_variable: Any,
    variable_name: str,
    shape: Any = None,
    initial_value: Any = None,
  ) -> Any:
    """Creates a slot; RMSprop's mean of squares starts at 1 in TensorFlow 1."""
    if (self.kind.keras, variable_name) == ("RMSprop", "velocity"):
      # Under mixed precision `dtype` is the dtype for computations.
      dtype = getattr(model_variable, "true_dtype", model_variable.dtype)
      initial_value = tf.ones(model_variable.shape, dtype)
    return super().add_variable_from_reference(
      model_variable, variable_name, shape, initial_value
    )

  def _deduplicate_sparse_grad(self, grads: Any) -> list[Any]:
    """Keeps merged rows: merging them a second time would fail under XLA."""
    return list(map(row_sparse.merge_duplicates, grads))

  def _internal_apply_gradients(self, *args: Any) -> Any:
    done = super()._internal_apply_gradients(*args)  # type: ignore[misc]
    self._multiply_powers()
    return done

  def _index(self, variable: Any) -> int:
    key = self._var_key(variable)  # type: ignore[attr-defined]
    return self._index_dict[key]  # type: ignore[attr-defined]

  def _add_one(self, name: str) -> Any:
    return self.add_variable(  # type: ignore[attr-defined]
      [], tf.float32, "ones", name
    )


class V1Function(v1.Function, _Schedule):
  """A learning rate that is read in every step."""


for _name, _kind in v1.named_kinds():
  _bases = (_Update, getattr(tf_keras.optimizers, _kind.keras))
  _body = {"__module__": __name__, "__doc__": f"`{_name[2:]}Optimizer`."}
  globals()[_name] = _register(type(_name, _bases, {**_body, "kind": _kind}))
  # HDF5 files look for a class by its bare name.
  tf_keras.saving.get_custom_objects()[_name] = globals()[_name]
