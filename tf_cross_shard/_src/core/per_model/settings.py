"""Settings of the wrapped optimizer that differ between models.

    models              0      1      2
    weight_decay      0.0    0.01    0.1      [num_groups], a variable

While a replica applies sums, the attribute of the wrapped optimizer (such as
`weight_decay`) is a `PerModelSetting`: a number to Python, and the value of the
replica's group to TensorFlow.
"""

import contextlib
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import settings as settings_lib
from tf_cross_shard._src.core.per_model import variable as variable_lib
from tf_cross_shard._src.core.reduce import engine as engine_lib
from tf_cross_shard._src.core.variables import Optimizer
from tf_cross_shard._src.core.wrapped import overriding


class PerModelSetting(float):
  """A setting whose value is a tensor: the number of the replica's group.

  Keras computes with this object as with a tensor, and compares it as a number,
  to decide whether there is momentum or weight decay. As with Python's numbers,
  what Keras computes from it alone, such as `1 - beta_2`, is float64, and what
  it computes from it and a tensor has the tensor's dtype.
  """

  dtype = float  # For Keras, which asks for it or takes the class.
  _read: Callable[[], tf.Tensor]
  _tensors: dict[Any, tf.Tensor]

  def __new__(
    cls, compared_as: float, read: Callable[[], tf.Tensor]
  ) -> "PerModelSetting":
    """Returns a number with the value that `read` returns, a float64 scalar."""
    made = super().__new__(cls, compared_as)
    made._read, made._tensors = read, {}
    return made

  def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
    # A tensor belongs to one graph, and each branch of a condition is a graph.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph not in self._tensors:
      self._tensors[graph] = self._read()
    return tf.cast(self._tensors[graph], dtype or tf.float32, name=name)


def _operator(name: str) -> Any:
  def operate(number: PerModelSetting, *others: Any) -> Any:
    dtypes = [other.dtype for other in others if tf.is_tensor(other)]
    if dtypes or not all(isinstance(x, (int, float)) for x in others):
      tensor = tf.convert_to_tensor(number, *dtypes)
      return getattr(tensor, name)(*others)

    def read() -> tf.Tensor:
      tensors = [tf.convert_to_tensor(x, tf.float64) for x in others]
      value = tf.convert_to_tensor(number, tf.float64)
      return getattr(value, name)(*tensors)

    try:
      compared_as = getattr(float, name)(float(number), *others)
    except (ArithmeticError, TypeError):
      compared_as = math.nan
    return PerModelSetting(compared_as, read)

  return operate


for _name in ("add", "sub", "mul", "truediv", "pow"):
  setattr(PerModelSetting, f"__{_name}__", _operator(f"__{_name}__"))
  setattr(PerModelSetting, f"__r{_name}__", _operator(f"__r{_name}__"))
PerModelSetting.__neg__ = _operator("__neg__")  # type: ignore[method-assign]


def is_nonzero(number: float) -> tf.Tensor | bool:
  """Returns whether a setting is not 0; a tensor for a PerModelSetting."""
  if isinstance(number, PerModelSetting):
    return tf.not_equal(tf.convert_to_tensor(number, tf.float64), 0.0)
  return number != 0


class PerModelSettings:
  """Holds the optimizer's settings that differ between groups, as variables."""

  def __init__(
    self,
    numbers: Mapping[str, Sequence[float]] | None,
    optimizer: Optimizer,
    engine: engine_lib.Engine,
  ) -> None:
    """Raises `ValueError` for numbers that do not fit."""
    self._optimizer = optimizer
    self._engine = engine
    self.numbers: dict[str, variable_lib.GroupVariable] = {}
    self._read_as_tensors: set[str] = set()
    self.replace(numbers)

  def replace(self, numbers: Mapping[str, Sequence[float]] | None) -> None:
    """Sets the numbers, unless one does not fit: then raises `ValueError`.

    Steps that were traced earlier read new numbers of a setting, but do not
    notice that a setting was added or removed.
    """
    groups = self._engine.groups
    for name, values in (numbers or {}).items():
      if len(values) != groups.num_groups:
        raise ValueError(
          "`per_model` must have a number for each of the"
          f" {groups.num_groups} models (groups {groups.to_lists()});"
          f" {name!r} is {values}."
        )
      if name not in settings_lib.LIMITS:
        _check_setting(self._optimizer, name, values)
    before, self.numbers = self.numbers, {}
    for name, values in (numbers or {}).items():
      if name in before:
        before[name].assign(values)
        self.numbers[name] = before[name]
      else:
        made = variable_lib.GroupVariable(f"per_model/{name}", values)
        made.create(self._engine.strategy)
        self.numbers[name] = made

  def read(self) -> dict[str, list[float]] | None:
    """Returns the present numbers, or None if no setting differs."""
    return {
      name: number.read() for name, number in self.numbers.items()
    } or None

  @property
  def variables(self) -> list[tf.Variable]:
    """The variables that `Models.save` writes."""
    strategy = self._engine.strategy
    found = (number.variable(strategy) for number in self.numbers.values())
    return [variable for variable in found if variable is not None]

  def limits(self, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns clipping limits, those of this replica's group if they differ."""
    return {
      name: self._number(name, 1.0) if name in self.numbers else limit
      for name, limit in limits.items()
    }

  @contextlib.contextmanager
  def in_force(self) -> Iterator[None]:
    """Gives the optimizer the replica's settings, which it must read."""
    numbers = {
      name: self._number(name, float(vars(self._optimizer)[name] or 0.0))
      for name in set(self.numbers) - {*settings_lib.LIMITS}
    }
    with overriding.overriding(self._optimizer, **numbers):
      yield
    for name in sorted(numbers.keys() - self._read_as_tensors):
      kind = type(self._optimizer).__name__
      raise ValueError(
        f"`per_model` contains {name!r}, but the update of {kind} did not read"
        " it as a tensor, so it would be one number for all models. Compute"
        f" with tf.sqrt(self.{name}) rather than with `math` or NumPy, or"
        f" remove {name!r} from `per_model`."
      )

  def _number(self, name: str, compared_as: float) -> PerModelSetting:
    """Returns the number of the calling replica's group."""
    number, group = self.numbers[name], variable_lib.current_group()

    def read() -> tf.Tensor:
      self._read_as_tensors.add(name)
      return tf.gather(number.as_tensor(), group)

    return PerModelSetting(compared_as, read)


# Numbers that an optimizer does not read in its update, but when it is built,
# when it scales the loss, or when it counts calls.
_NOT_IN_UPDATE: Final = (
  "ema_overwrite_frequency",
  "gradient_accumulation_steps",
  "initial_accumulator_value",
  "loss_scale_factor",
)


def _check_setting(
  optimizer: Optimizer, name: str, values: Sequence[float]
) -> None:
  """Raises `ValueError` unless the optimizer's setting can be replaced."""
  kind = type(optimizer).__name__
  if name == "learning_rate":
    raise ValueError(
      "`per_model` contains 'learning_rate', which may be a schedule. Use"
      f" {kind}(schedules.PerModel({values}))."
    )
  if name in _NOT_IN_UPDATE:
    raise ValueError(
      f"`per_model` contains {name!r}: {values}, but only settings that"
      f" {kind} reads in its update can differ between models. Pass"
      f" {kind}({name}=...): this setting has one value for all models."
    )
  if name not in vars(optimizer):
    known = [
      *(x for x in vars(optimizer) if not x.startswith("_")),
      *settings_lib.LIMITS,
    ]
    close = difflib.get_close_matches(name, known, 1)
    remedy = f"Did you mean {close[0]!r}?" if close else f"Use one of {known}."
    raise ValueError(
      f"`per_model` contains {name!r}, but {kind} has no such setting. {remedy}"
    )
  setting = vars(optimizer)[name]
  if isinstance(setting, bool) or not isinstance(setting, (int, float)):
    raise ValueError(
      f"`per_model` contains {name!r}, but {kind}.{name} is"
      f" {setting!r}, and only numeric settings of `opt` can differ between"
      " models. Set"
      f" {kind}({name}=...) to one of the numbers in `per_model`."
    )
  # If the setting is 0, Keras creates no slot (momentum), or traces no
  # operation (weight decay).
  if not setting and any(values):
    raise ValueError(
      f"`per_model` contains {name!r}: {values}, but {kind}.{name} is"
      f" {setting!r}. With 0, Keras does not create the slots or operations"
      " that the other values need. Create `opt` with one of the nonzero"
      " numbers."
    )
