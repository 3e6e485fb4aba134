"""The optimizers of `tf.compat.v1.train`, as optimizers of Keras 3."""

from typing import Any, Final

import keras

from tf_cross_shard._src.core.wrapped import v1

_register: Final = keras.saving.register_keras_serializable("tf_cross_shard")
_Schedule: Final[Any] = keras.optimizers.schedules.LearningRateSchedule


class _Update(v1.V1Update):
  """Mixin that updates by TensorFlow 1's kernels, in Keras 3."""

  def add_variable_from_reference(
    self, reference_variable: Any, name: Any = None, initializer: Any = "zeros"
  ) -> Any:
    """Creates a slot; RMSprop's mean of squares starts at 1 in TensorFlow 1."""
    if (self.kind.keras, name) == ("RMSprop", "velocity"):
      initializer = "ones"
    return super().add_variable_from_reference(
      reference_variable, name=name, initializer=initializer
    )

  def _backend_update_step(self, *args: Any) -> None:
    super()._backend_update_step(*args)  # type: ignore[misc]
    self._multiply_powers()

  def _index(self, variable: Any) -> int:
    return self._get_variable_index(variable)  # type: ignore[attr-defined]

  def _add_one(self, name: str) -> Any:
    return self.add_variable(  # type: ignore[attr-defined]
      (), "ones", "float32", name=name
    )


class V1Function(v1.Function, _Schedule):
  """A learning rate that is read in every step."""


for _name, _kind in v1.named_kinds():
  _bases = (_Update, getattr(keras.optimizers, _kind.keras))
  _body = {"__module__": __name__, "__doc__": f"`{_name[2:]}Optimizer`."}
  globals()[_name] = _register(type(_name, _bases, {**_body, "kind": _kind}))
