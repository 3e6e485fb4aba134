"""Groups as models: one taken out, one copied to another, all in one.

    replica             0    1    2    3
                        └─ A ─┘  └─ B ─┘
    load_group(1)       a plain model with B
    ensemble            a plain model with the mean of what A and B predict
    copy_group(1, 0)    └─ B ─┘  └─ B ─┘

Plain models are Keras' own, made outside of any strategy.
"""

import contextlib
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard import groups as groups_lib
from tf_cross_shard.inner_optimizer import libraries, optimizer_state
from tf_cross_shard.replica_state import archive, group_state, replica_values

_CLONED: Final = "tf_cross_shard>cloned"  # a name that no class of users has
_FUNCTION: Final = "tf_cross_shard>function of "  # a Lambda of this name


def load_group(group: int, optimizer: Any, model: Any, into: Any = None) -> Any:
  """Returns a plain model with the weights of one group.

  Plain means made outside of any strategy and not compiled, so that it
  predicts, is saved and is trained as a model that never had replicas. What is
  not trained and members of the group differ in, say the statistics of batch
  normalization, is the mean over the members; of integers, such as the states
  of random numbers, the first member's. Moving averages of weights that the
  optimizer keeps are not looked at.

  Args:
    group: Which group, counted from 0 in the order of `optimizer.groups`.
    optimizer: An optimizer with groups. Others have one of all replicas.
    model: A built Keras model; also accepted before the other two.
    into: A plain model of the same architecture, which receives the weights and
      is returned. None lets Keras clone `model`, which it can if it is
      sequential or functional, or its class has `get_config`.

  Returns:
    The plain model, on every worker.

  Raises:
    ValueError: If there is no such group, if Keras cannot clone `model`, or if
      `into` does not fit. Nothing is changed then.
  """
  optimizer, model = group_state.in_order(optimizer, model)
  if hasattr(group, "variables"):  # The order of older programs.
    group, model = model, group
  keras = libraries.keras_of(model)
  state = group_state.GroupCopies(optimizer, model, is_whole=False)
  members = _members_of(state.groups, group, "group")
  if into is None:
    plain = _clone(keras, model, state)
  else:
    plain = into
    _check_fits(state, into)
  state.agree(f"loading group {group}")
  group_state.check_values(optimizer)
  values = [
    merged(part, state.copies.read(part.variable, members))
    for part in state.parts
  ]
  assign(plain, values)
  return plain


def assign(plain: Any, values: Sequence[archive.Array]) -> None:
  """Gives a plain model values, in the order of its variables."""
  for variable, value in zip(
    group_state.variables_of(plain), values, strict=True
  ):
    replica_values.native(variable).assign(value)
  finalize(plain)


def merged(
  part: group_state.Part, values: Sequence[archive.Array]
) -> archive.Array:
  """Returns what a plain model receives of the values of a group's members."""
  # Not the mean of equal values, which may be rounded.
  if (
    part.is_shared
    or not group_state.has_mean(part.variable)
    or replica_values.are_alike(values)
  ):
    return values[0]
  return group_state.mean(values)


def finalize(model: Any) -> None:
  """Lets layers compute with the values that they were given."""
  for layer in libraries.layers(model):
    if hasattr(layer, "finalize_state"):
      layer.finalize_state()


def copy_group(source: int, target: int, optimizer: Any, model: Any) -> None:
  """Gives one group the weights and the optimizer state of another.

  From here on the target is trained as the source would be with the target's
  data and learning rate. Copied is what `save` writes, moving averages, window
  sums and the loss scale among it, except for

  - the learning rate;
  - the model's integers, such as the states of random numbers.

  Where members of a group have values of their own, the j-th member receives
  those of the j-th. No other group changes.

  Args:
    source: The group that is copied, in the order of `optimizer.groups`.
    target: The group that receives it.
    optimizer: A built optimizer.
    model: A model, or a list of variables.

  Raises:
    ValueError: If there is no such group.
  """
  state = group_state.GroupCopies(optimizer, model)
  origins = list(range(state.groups.num_replicas))
  for giver, receiver in zip(
    _members_of(state.groups, source, "source"),
    _members_of(state.groups, target, "target"),
    strict=True,
  ):
    origins[receiver] = giver
  state.agree(f"copying group {source} to group {target}")
  group_state.check_values(state.optimizer)
  kept = set(map(id, optimizer_state.learning_rates(state.optimizer)))
  here = state.copies.engine.replicas_here
  for part in state.parts:
    is_own = part.name.startswith("model/") and (
      not group_state.has_mean(part.variable)
    )
    if is_own or id(part.variable) in kept:
      continue
    values = state.copies.read(part.variable, origins)
    state.copies.write(part.variable, values[here.start : here.stop])
  group_state.accept_values(state.optimizer)


def ensemble(
  optimizer: Any, model: Any, members: Sequence[int] | None = None
) -> Any:
  """Returns a plain model that predicts the mean of what groups predict.

      output = (output of group 0 + output of group 1 + ...) / number of groups

  for each of the model's outputs. It is made of `load_group` models under the
  names `group_0`, `group_1`, ... and of Keras' own Average layer, so that it is
  saved, exported and loaded without this package. Of a model that ends with
  softmax it is the mean of probabilities; of one that returns logits, the mean
  of logits.

  Args:
    optimizer: An optimizer with groups. Others have one of all replicas.
    model: A built Keras model that Keras can clone, see `load_group`, with
      known inputs.
    members: The groups that take part, each once; None for all.

  Returns:
    A functional Keras model with the inputs and outputs of `model`, on every
    worker; not compiled.

  Raises:
    ValueError: If there is no such group, if `model` cannot be cloned, its
      inputs are not known, or an output has no mean.
  """
  optimizer, model = group_state.in_order(optimizer, model)
  keras = libraries.keras_of(model)
  groups = group_state.GroupCopies(optimizer, model, is_whole=False).groups
  chosen = list(range(groups.num_groups) if members is None else members)
  for i in chosen:
    _members_of(groups, i, "members")
  if not chosen or len(set(chosen)) < len(chosen):
    raise ValueError(
      f"`members` must name at least one group, and each once; got {members!r}."
    )
  plain = [load_group(i, optimizer, model) for i in chosen]
  with outside_of_strategies():
    inputs = _inputs_of(keras, plain[0])
    outputs = []
    for i, member in zip(chosen, plain, strict=True):
      own = _inputs_of(keras, member)
      group = keras.Model(own, member(own), name=f"group_{i}")
      outputs.append(group(inputs))
    means = tf.nest.map_structure(
      lambda *tensors: _mean_of(keras, tensors), *outputs
    )
    return keras.Model(inputs, means, name="ensemble")


def _inputs_of(keras: Any, plain: Any) -> Any:
  """Returns the symbolic inputs of a plain model, in their structure."""
  if not getattr(plain, "inputs", None):
    raise ValueError(
      f"`model` is a {type(plain).__name__}, whose inputs are not known. Inside"
      " `strategy.scope()` make inputs = keras.Input(...) and hand in"
      " keras.Model(inputs, model(inputs))."
    )
  is_sequential = isinstance(plain, keras.Sequential)
  return plain.inputs[0] if is_sequential else plain.input


def _mean_of(keras: Any, tensors: Sequence[Any]) -> Any:
  """Returns the symbolic mean of all groups' tensors of an output."""
  dtype = tf.as_dtype(tensors[0].dtype)
  if not group_state.has_mean(tensors[0]):
    raise ValueError(
      f"`model` has an output of dtype {dtype.name}, which has no mean. Make a"
      " model of its floating outputs, keras.Model(model.inputs, ...), and hand"
      " that in."
    )
  if len(tensors) == 1:
    return tensors[0]
  return keras.layers.Average(dtype=dtype.name)(list(tensors))


def _members_of(
  groups: groups_lib.Groups, group: Any, argument: str
) -> Sequence[int]:
  """Returns a group's replicas; raises `ValueError` where there is none."""
  if isinstance(group, (bool, float)) or group not in range(groups.num_groups):
    raise ValueError(
      f"`{argument}` must be an integer from 0 to {groups.num_groups - 1}; got"
      f" {group!r}. The groups are {groups.to_lists()}."
    )
  return groups.assignment[group]


def _clone(keras: Any, model: Any, state: group_state.GroupCopies) -> Any:
  """Returns a new model like `model`, outside of strategies, not compiled."""
  kind = type(model)
  numbers = random.getstate()  # Keras 3 draws seeds of initial values.
  # Not `clone_model`: in Keras 3 it loses names of inputs, and it compiles a
  # second CrossShardOptimizer, for replicas that are not there.
  try:
    layers = libraries.layers(model)
    own: dict[str, Any] = {
      type(layer).__name__: type(layer)
      for layer in layers
      if type(layer).__module__.split(".")[0] not in libraries.KERASES
    }
    # Of a lambda a configuration has the code, without the names that it uses.
    lambdas = [v for v in layers if isinstance(v, keras.layers.Lambda)]
    own |= {f"{_FUNCTION}{layer.name}": layer.function for layer in lambdas}
    with outside_of_strategies():
      # Keras' way to `from_config` that takes lambdas, which come from here.
      clone = keras.saving.deserialize_keras_object(
        {
          "module": None,
          "class_name": _CLONED,
          "registered_name": _CLONED,
          "config": _clonable(model.get_config(), own),
        },
        custom_objects={**own, _CLONED: kind},
        safe_mode=False,
      )
      if not clone.built:
        clone.build_from_config(model.get_build_config())
        clone.built = True  # Keras 3 leaves that to who calls.
      _copy_assets(model, clone)
    _check_fits(state, clone)
  except Exception as error:
    raise ValueError(
      f"`model` cannot be cloned: Keras made no second {kind.__name__} with the"
      " same variables from its get_config(). Make one with your own code,"
      " outside of `strategy.scope()`, build it, and hand it in as `into` of"
      " load_group; GroupMetrics takes a function that makes it, `twin`."
    ) from error
  finally:
    random.setstate(numbers)
  return clone


def _copy_assets(model: Any, clone: Any) -> None:
  """Gives layers what they keep beside variables, such as vocabularies."""
  both = map(libraries.layers, (model, clone))
  for layer, other in zip(*both, strict=True):
    if hasattr(layer, "save_assets"):
      with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        other.load_assets(folder)


def _check_fits(state: group_state.GroupCopies, plain: Any) -> None:
  """Raises `ValueError` unless a plain model can receive the variables."""
  remedy = (
    "Make it by the same code as `model`, outside of `strategy.scope()`, and"
    " build it."
  )
  into = group_state.GroupCopies(None, plain, is_whole=False)
  if len(into.parts) != len(state.parts):
    raise ValueError(
      f"`into`, or `twin`, has {len(into.parts)} variables, and `model` has"
      f" {len(state.parts)}. {remedy}"
    )
  known = {part.name for part in state.parts}
  for part, other in zip(into.parts, state.parts, strict=True):
    # Keras numbers states of random numbers in the order in which it makes
    # them, which in a clone may be another.
    is_numbered = part.name not in known or not group_state.has_mean(
      part.variable
    )
    if part.kind != other.kind or not (is_numbered or part.name == other.name):
      raise ValueError(
        f"`into`, or `twin`, has {part.name}, {part.kind}, where `model` has"
        f" {other.name}, {other.kind}. {remedy}"
      )
    if replica_values.strategy_of(part.variable) is not None:
      raise ValueError(
        f"`into`, or `twin`, has replicas: {part.name} was made inside"
        f" `strategy.scope()`. {remedy}"
      )


def _clonable(config: Any, own: Mapping[str, Any]) -> Any:
  """Returns a configuration whose Lambdas have the functions in `own`.

  No model in it is compiled: optimizers would need this package where the clone
  is loaded.
  """
  if type(config) is list:
    return [_clonable(value, own) for value in config]
  if not isinstance(config, dict):
    return config
  name = f"{_FUNCTION}{config.get('name')}"
  return {
    key: {"class_name": "function", "config": name, "registered_name": name}
    if key == "function" and name in own and isinstance(value, dict)
    else _clonable(value, own)
    for key, value in config.items()
    if key != "compile_config"
  }


@contextlib.contextmanager
def outside_of_strategies() -> Iterator[None]:
  """A context in which no strategy's scope is open."""
  # TensorFlow notes open scopes in the default graph, eagerly too.
  with tf.Graph().as_default(), tf.__internal__.eager_context.eager_mode():
    yield
