"""Models as plain Keras models, which were created outside any strategy.

replica        0    1    2    3
weights        A    A    B    B
load(1)        a plain model with B
ensemble       a plain model with the mean of A's and B's predictions
copy(1, 0)     B    B    B    B
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.wrapped import keras_private
from tf_cross_shard._src.core.wrapped import nested as nested_lib
from tf_cross_shard._src.models import archive, group_state

_CLONED: Final = "tf_cross_shard>cloned"  # No class of a user has this name.
_FUNCTION: Final = "tf_cross_shard>function of "  # plus a Lambda's name
# Keras' layers that replace the layers of this package in a plain model.
_PLAIN_LAYERS: Final = {
  "tf_cross_shard>Embedding": "Embedding",
  "tf_cross_shard>SyncBatchNormalization": "BatchNormalization",
  "tf_cross_shard>TunableDropout": "Dropout",
}


def load(model: Any, i: int, optimizer: Any, into: Any = None) -> Any:
  """Returns a plain model with the weights of model i; see `Models.load`."""
  keras = keras_private.keras_of(model)
  state = group_state.GroupState(optimizer, model, with_optimizer=False)
  state.compare_workers(f"loading model {i}")
  group_state.warn_if_collapsed(optimizer)
  values = values_of(state, i)
  plain = _clone(keras, model, state) if into is None else into
  assign(state, values, plain)
  return plain


def values_of(
  state: group_state.GroupState, i: int
) -> dict[str, archive.Array]:
  members = state.groups.assignment[i]
  return {
    entry.key: merged(entry, state.copies.read(entry.variable, members))
    for entry in state.entries
  }


def assign(
  state: group_state.GroupState, values: Mapping[str, archive.Array], plain: Any
) -> None:
  """Assigns the values of variables of `state`, by key, to a plain model."""
  for key, variable in receivers(state, plain).items():
    variable.assign(values[key])
  finalize(plain)
  set_rates(dropouts(state.rates, plain), values)


def merged(
  entry: group_state.Entry, values: Sequence[archive.Array]
) -> archive.Array:
  """Returns the value of a group for a plain model."""
  # Equal values are returned as they are: their mean might be rounded.
  if (
    entry.is_shared
    or not group_state.has_mean(entry.variable)
    or replicas_lib.are_alike(values)
  ):
    return values[0]
  return group_state.mean(values)


def finalize(model: Any) -> None:
  """Makes layers recompute what they derive from the assigned values."""
  for layer in keras_private.layers(model):
    if hasattr(layer, "finalize_state"):
      layer.finalize_state()


def copy(source: int, target: int, state: group_state.GroupState) -> None:
  """Gives model `target` the values of model `source`; see `Models.copy`."""
  # For each replica, the replica whose values it receives.
  origins = list(range(state.groups.num_replicas))
  members = state.groups.assignment
  for giver, receiver in zip(members[source], members[target], strict=True):
    origins[receiver] = giver
  state.compare_workers(f"copying model {source} to model {target}")
  group_state.warn_if_collapsed(state.optimizer)
  kept = set(map(id, nested_lib.rate_variables(state.optimizer)))
  here = state.copies.engine.local_replicas
  for entry in state.entries:
    is_integer_model_variable = entry.key.startswith("model/") and (
      not group_state.has_mean(entry.variable)
    )
    if is_integer_model_variable or id(entry.variable) in kept:
      continue
    values = state.copies.read(entry.variable, origins)
    state.copies.write(entry.variable, values[here.start : here.stop])
  group_state.accept_values(state.optimizer)


def ensemble(model: Any, optimizer: Any, stack: bool = False) -> Any:
  """Returns the mean, or the stack, of all models; see `Models.ensemble`."""
  keras = keras_private.keras_of(model)
  groups = group_state.GroupState(optimizer, model, with_optimizer=False).groups
  plain = [load(model, i, optimizer) for i in range(groups.num_groups)]
  with variables_lib.outside_of_strategies():
    inputs = _inputs_of(keras, plain[0])
    outputs = []
    for i, member in enumerate(plain):
      member_inputs = _inputs_of(keras, member)
      group = keras.Model(
        member_inputs, member(member_inputs), name=f"model_{i}"
      )
      outputs.append(group(inputs))
    join = _stack_of if stack else _mean_of
    joined = tf.nest.map_structure(
      lambda *tensors: join(keras, tensors), *outputs
    )
    return keras.Model(inputs, joined, name="ensemble")


def _inputs_of(keras: Any, plain: Any) -> Any:
  """Returns the symbolic inputs of a plain model, in their structure."""
  if not getattr(plain, "inputs", None):
    raise ValueError(
      f"`model` is a {type(plain).__name__}, whose inputs are not known. Inside"
      " `strategy.scope()`, create inputs = keras.Input(...) and pass"
      " keras.Model(inputs, model(inputs))."
    )
  is_sequential = isinstance(plain, keras.Sequential)
  return plain.inputs[0] if is_sequential else plain.input


def _mean_of(keras: Any, tensors: Sequence[Any]) -> Any:
  """Returns the symbolic mean of one output over all groups."""
  dtype = tf.as_dtype(tensors[0].dtype)
  if not group_state.has_mean(tensors[0]):
    raise ValueError(
      f"`model` has an output of dtype {dtype.name}, which has no mean. Pass a"
      " model with its floating-point outputs only,"
      " keras.Model(model.inputs, ...)."
    )
  if len(tensors) == 1:
    return tensors[0]
  return keras.layers.Average(dtype=dtype.name)(list(tensors))


def _stack_of(keras: Any, tensors: Sequence[Any]) -> Any:
  """Returns one output of all groups, with a second axis for the groups."""
  # Operations, and no layer: Keras has none that adds an axis of any shape.
  stack = keras.ops.stack if keras.__name__ == "keras" else tf.stack
  return stack(list(tensors), axis=1)


def _clone(keras: Any, model: Any, state: group_state.GroupState) -> Any:
  """Returns a new, plain model like `model`, which is not compiled."""
  cls = type(model)
  # Keras 3 draws the seeds of initial values from Python's generator. Restore
  # its state afterwards, so that cloning does not change the program's numbers.
  numbers = random.getstate()
  # `clone_model` does not work here: in Keras 3 it loses the names of inputs,
  # and it compiles a second CrossShardOptimizer although there are no replicas.
  try:
    layers = keras_private.layers(model)
    named: dict[str, Any] = {
      type(layer).__name__: type(layer)
      for layer in layers
      if type(layer).__module__.split(".")[0] not in keras_private.KERASES
    }
    # The configuration of a Lambda has the code of its function, but not the
    # names that the code uses. So the clone receives the function itself.
    lambdas = [v for v in layers if isinstance(v, keras.layers.Lambda)]
    named |= {f"{_FUNCTION}{layer.name}": layer.function for layer in lambdas}
    with variables_lib.outside_of_strategies():
      # Like `from_config`, but it accepts lambdas; these come from `model`.
      clone = keras.saving.deserialize_keras_object(
        {
          "module": None,
          "class_name": _CLONED,
          "registered_name": _CLONED,
          "config": _clonable(model.get_config(), named),
        },
        custom_objects={**named, _CLONED: cls},
        safe_mode=False,
      )
      if not clone.built:
        clone.build_from_config(model.get_build_config())
        clone.built = True  # Keras 3 leaves this to the caller.
      _copy_assets(model, clone)
    receivers(state, clone)  # Raises an error if they do not fit.
  except Exception as error:
    raise ValueError(
      f"Keras could not clone `model` from its get_config(): {_reason(error)}"
      f" Create and build a second {cls.__name__} yourself, outside"
      " `strategy.scope()`, and pass it to Models.load as `into`. To"
      " PerModelMetrics, pass a function that returns one as `twin`."
    ) from error
  finally:
    random.setstate(numbers)
  return clone


def _reason(error: Exception) -> str:
  """Returns the sentence of a long error of Keras that names the cause."""
  cause = str(error).split("Exception encountered: ")[-1].strip()
  return " ".join(cause.split("\n\n")[0].split()).rstrip(".") + "."


def _copy_assets(model: Any, clone: Any) -> None:
  """Copies what layers keep besides variables, such as vocabularies."""
  both = map(keras_private.layers, (model, clone))
  for layer, other in zip(*both, strict=True):
    if hasattr(layer, "save_assets"):
      with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        other.load_assets(folder)


def receivers(
  state: group_state.GroupState,
  plain: Any,
  what: str = "The model passed as `into` or `twin`",
  is_exact: bool = False,
) -> dict[str, Any]:
  """Returns a plain model's variables by the keys of those in `state`."""
  remedy = (
    "Create and build it with the same code as `model`, outside"
    " `strategy.scope()`."
  )
  into = group_state.GroupState(None, plain, with_optimizer=False)
  rates = {} if is_exact else dropouts(state.rates, plain)
  entries = [entry for entry in state.entries if entry.key not in rates]
  # A dropout rate of 0 has no random number generator.
  if into.num_seeds != state.num_seeds and not is_exact:
    into.leave_out_seeds()
    entries = [e for e in entries if not variables_lib.is_seed(e.name)]
  if len(into.entries) != len(entries):
    raise ValueError(
      f"{what} has {len(into.entries)} variables,"
      f" but `model` has {len(entries)}. {remedy}"
    )
  place = variables_lib.misplaced(
    [entry.name for entry in into.entries], [entry.name for entry in entries]
  )
  found = {}
  both = zip(into.entries, entries, strict=True)
  for i, (entry, other) in enumerate(both):
    if entry.kind != other.kind or i == place:
      raise ValueError(
        f"{what} has {entry.name}, {entry.kind},"
        f" but `model` has {other.name}, {other.kind}. {remedy}"
      )
    if replicas_lib.strategy_of(entry.variable) is not None:
      raise ValueError(
        f"{what} has replicas: {entry.name} was"
        f" created inside `strategy.scope()`. {remedy}"
      )
    found[other.key] = replicas_lib.native(entry.variable)
  return found


def dropouts(rates: Mapping[str, int], plain: Any) -> dict[str, Any]:
  """Returns Keras' Dropouts that stand for TunableDropouts, by the weights."""
  layers = dict(enumerate(keras_private.layers(plain)))
  return {
    key: layers[i]
    for key, i in rates.items()
    if isinstance(getattr(layers.get(i), "rate", None), (int, float))
  }


def set_rates(
  layers: Mapping[str, Any], values: Mapping[str, archive.Array]
) -> None:
  for key, dropout in layers.items():
    dropout.rate = float(str(values[key]))  # 0.1, not 0.10000000149011612


def _clonable(config: Any, named: Mapping[str, Any]) -> Any:
  """Returns a configuration of Keras' layers with the functions in `named`."""
  if type(config) is list:
    return [_clonable(value, named) for value in config]
  if not isinstance(config, dict):
    return config
  plain = _PLAIN_LAYERS.get(str(config.get("registered_name")))
  if plain:
    arguments = dict(config["config"])
    arguments.pop("group_assignment", None)
    if "rate" in arguments:
      # Keras' Dropout(0.0) has no random state. `assign` sets the rate.
      arguments["rate"] = 0.5
    config = {
      **config,
      "module": "keras.layers",
      "class_name": plain,
      "config": arguments,
      "registered_name": None,
    }
  name = f"{_FUNCTION}{config.get('name')}"
  return {
    key: {"class_name": "function", "config": name, "registered_name": name}
    if key == "function" and name in named and isinstance(value, dict)
    else _clonable(value, named)
    for key, value in config.items()
    if key != "compile_config"  # Loading it would need this package.
  }
