"""`layers.ShardedEmbedding`: a Keras layer with a divided table.

`ShardedTable` has all that the layers of Keras 3 and tf_keras have in common.
"""

import abc
import functools
import types
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_cross_shard._src.core import divided_rows, reduce, settings, variables
from tf_cross_shard._src.core import replicas as replicas_lib
from tf_cross_shard._src.layers import row_exchange
from tf_cross_shard._src.replica_state import group_state, paths

# Rows are initialized in blocks of this size, each with its own seed. So the
# initial table does not depend on the number of members, and never exists as a
# whole.
_BLOCK: Final = 8192
# Keras' initializers whose values do not depend on the shape of the variable.
_INITIALIZERS: Final = (
  "Constant",
  "Ones",
  "RandomNormal",
  "RandomUniform",
  "TruncatedNormal",
  "Zeros",
)
_REFUSED: Final = (
  "assign",
  "assign_add",
  "assign_sub",
  "scatter_add",
  "scatter_sub",
  "scatter_update",
)
_COMBINERS: Final = (None, "sum", "mean", "sqrtn")


# `ShardedEmbedding` of each Keras derives from this class, then from `Layer`.
class ShardedTable(abc.ABC):
  """An embedding table whose rows are divided among the members of a group.

  With n members, the member at place p stores the rows p, p + n, p + 2n, and so
  on, with the optimizer's slots of these rows: one n-th of the memory. A lookup
  sends each distinct id to its owner, and receives the row. In the backward
  pass, the gradients of the rows return to the owners, which update the rows
  with the formula of your optimizer, as with `lazy_rows=True`.

  Create the layer inside `strategy.scope()`, and train it with
  a `CrossShardOptimizer`. Results equal those of `layers.Embedding` with
  `lazy_rows=True`. See *Divided embedding tables* for costs and limits.

  Args:
    input_dim: The number of rows, an int.
    output_dim: The width of a row, an int.
    embeddings_initializer: One of Keras' initializers that do not depend on the
      shape: "uniform", "normal", "truncated_normal", "zeros", "ones" or
      a constant. Each block of rows has its own seed, so the initial table is
      the same for every number of replicas.
    mask_zero: Whether id 0 is padding, which later layers mask, as in Keras'
      `Embedding`.
    combiner: None returns a row for each id. "sum", "mean" or "sqrtn" (the sum
      divided by the square root of the number of ids) combines the rows of the
      last axis of ids, or of each row of ragged ids. Sparse ids need
      a combiner, and so do weights of ids: `layer(ids, weights=w)`.
    group_assignment: The groups of the optimizer. The replicas of each group
      divide a table of their own. None means one group of all replicas.
    seed: The seed of the initial table. None means the seed of the
      initializer, or 0.
    **kwargs: Other arguments of a Keras layer, such as `name` and `dtype`.

  Raises:
    ValueError: If an argument is invalid.
    NotImplementedError: Under a strategy that cannot divide tables.
  """

  _keras: types.ModuleType  # keras or tf_keras
  built: bool
  name: str
  embeddings: Any
  dtype: Any
  compute_dtype: Any
  supports_masking: bool

  def __init__(
    self,
    input_dim: int,
    output_dim: int,
    embeddings_initializer: Any = "uniform",
    mask_zero: bool = False,
    combiner: str | None = None,
    group_assignment: Any = None,
    seed: int | None = None,
    **kwargs: Any,
  ) -> None:
    """Creates the layer; `build` creates the table."""
    initializer = self._keras.initializers.get(embeddings_initializer)
    if type(initializer).__name__ not in _INITIALIZERS:
      raise ValueError(
        "`embeddings_initializer` must not depend on the shape of the whole"
        f" table; got {embeddings_initializer!r}. Use one of"
        f" {', '.join(_INITIALIZERS)}."
      )
    if combiner not in _COMBINERS or (combiner and mask_zero):
      raise ValueError(
        f"`combiner` must be one of {_COMBINERS}, and None with `mask_zero`;"
        f" got {combiner!r}."
      )
    groups = settings.as_groups(group_assignment)
    self._strategy = tf.distribute.get_strategy()
    self._engine = reduce.for_strategy(self._strategy, groups)
    members = self._engine.groups.group_size
    if not self._engine.supports_sparse:
      self._engine.exchange_rows(tf.zeros([0]), tf.zeros([0]))  # Raises.
    if min(input_dim, output_dim) < 1 or input_dim < members:
      raise ValueError(
        "`input_dim` and `output_dim` must be positive, and `input_dim` at"
        f" least the number of members ({members}); got {input_dim!r} and"
        f" {output_dim!r}. Use layers.Embedding for a small table."
      )
    super().__init__(**kwargs)
    self.input_dim, self.output_dim = input_dim, output_dim
    self.embeddings_initializer = initializer
    self.mask_zero, self.combiner, self.seed = mask_zero, combiner, seed
    self.supports_masking = mask_zero
    self._has_groups = groups is not None
    # In a partial, so that Keras does not track and save the tf.function.
    self._run_lookup = functools.partial(
      self._strategy.run,
      tf.function(
        self._exchange_in_group_0, autograph=False, reduce_retracing=True
      ),
    )
    self._owned = divided_rows.DividedRows(input_dim, self._engine.groups)
    self._is_filled = False

  @abc.abstractmethod
  def _make_table(self, shape: tuple[int, int]) -> None:
    """Creates the variable of zeros, `embeddings`."""

  @property
  def group_assignment(self) -> list[list[int]] | None:
    """The groups as lists of replica ids; None means one group of all."""
    return self._owned.groups.to_lists() if self._has_groups else None

  def build(self, input_shape: Any = None) -> None:
    """Creates this process' parts of the table, and initializes them."""
    del input_shape
    if self.built:
      return
    if tf.distribute.get_strategy() is not self._strategy:
      raise RuntimeError(
        "A ShardedEmbedding must be built under the strategy in whose scope it"
        " was created. Build the model inside `with strategy.scope():`."
      )
    self._make_table((self._owned.part_rows, self.output_dim))
    divided_rows.mark(self.embeddings, self._owned)
    self.built = True
    self._fill()

  def call(self, inputs: Any, weights: Any = None) -> Any:
    """Returns the rows of the ids, in the compute dtype of the layer.

    Args:
      inputs: Dense or ragged ids, or sparse ids of shape `[examples, k]` if
        there is a combiner.
      weights: A factor for the row of each id, of the shape of the ids, if
        there is a combiner. None means 1.
    """
    if self.combiner is None:
      if weights is not None:
        raise ValueError(
          "`weights` needs a combiner. Pass combiner='sum' to the layer, or"
          " multiply the rows yourself."
        )
      if isinstance(inputs, tf.SparseTensor):
        raise TypeError(
          "Sparse ids need a combiner. Pass combiner='sum' to the layer, or"
          " pass tf.RaggedTensor.from_sparse(ids)."
        )
    inputs, weights = _as_ragged(inputs), _as_ragged(weights)
    if inputs.dtype not in (tf.int32, tf.int64):
      inputs = tf.cast(inputs, tf.int32)
    rows = tf.ragged.map_flat_values(self._rows_of, inputs)
    if self.combiner is not None:
      rows = _combine(rows, inputs, weights, self.combiner)
    return tf.cast(rows, self.compute_dtype)

  def lookup(self, ids: Any) -> tf.Tensor:
    """Returns rows outside `strategy.run`, from the parts of group 0.

    On several workers, all workers call it with the same ids.

    >>> import tensorflow as tf
    >>> from tf_cross_shard import layers
    >>> layer = layers.ShardedEmbedding(10, 2, "ones")
    >>> layer.build()
    >>> layer.lookup([3, 7]).shape
    TensorShape([2, 2])

    Args:
      ids: int32 or int64 of any shape.

    Returns:
      The rows, of the dtype of the table and the shape
      `ids.shape + [output_dim]`.
    """
    ids = tf.convert_to_tensor(ids)
    self._fill()
    flat = tf.reshape(ids, [-1])
    engine, native = self._engine, variables.native(self.embeddings)
    if len(engine.replicas_here) == engine.num_replicas:
      copies = self._strategy.experimental_local_results(native)
      first = engine.groups.members_of(engine.groups.assignment[0][0])
      parts = [copies[replica] for replica in first]
      rows = row_exchange.from_parts(parts, self._owned, flat)
    else:
      results = self._run_lookup((flat,))
      rows = self._strategy.experimental_local_results(results)[0]
    return self._shaped(rows, ids)

  def export(self, path: Any) -> None:
    """Writes a SavedModel with the table of group 0, for serving.

    Plain TensorFlow loads the SavedModel on one device, without this package.
    The signature `serving_default` takes `ids`, int64 of any shape, and returns
    `rows`, of the dtype of the table and the shape `ids.shape + [output_dim]`.
    The signature ignores a combiner: it returns a row for each id.

    On several workers, all workers make this call, and the first one writes. It
    has the whole table in memory twice while it writes.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> from tf_cross_shard import layers
    >>> layer = layers.ShardedEmbedding(10, 2, "ones")
    >>> layer.build()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   layer.export(folder)
    ...   served = tf.saved_model.load(folder).signatures["serving_default"]
    ...   served(ids=tf.constant([3, 7], tf.int64))["rows"].shape
    TensorShape([2, 2])

    Args:
      path: A folder, for example "tables/items" or "gs://bucket/items".

    Raises:
      OSError: If the folder cannot be written; raised on all workers.
    """
    target = paths.as_path(path)
    copies = replicas_lib.Copies(self._strategy)
    topic = f"exporting {target.name}"
    nbytes = 4 * self.input_dim * self.output_dim
    copies.compare_workers(topic, [f"{self.input_dim} {self.output_dim}"])
    with group_state.raising_on_all(copies.workers, topic, nbytes):
      table = self._whole_table(is_wanted=copies.is_first)
      if copies.is_first:
        with paths.as_os_errors(str(target)):
          _write_saved_model(str(target), table, self.name)

  def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
    """Returns which ids are not padding, with `mask_zero`."""
    del mask
    return tf.not_equal(inputs, 0) if self.mask_zero else None

  def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
    """Returns the shape of the rows, combined or not."""
    kept = list(input_shape)[: -1 if self.combiner else None]
    return (*kept, self.output_dim)

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments of the constructor in serializable form."""
    config: dict[str, Any] = super().get_config()  # type: ignore[misc]
    return {
      **config,
      "input_dim": self.input_dim,
      "output_dim": self.output_dim,
      "embeddings_initializer": self._keras.initializers.serialize(
        self.embeddings_initializer
      ),
      "mask_zero": self.mask_zero,
      "combiner": self.combiner,
      "group_assignment": self.group_assignment,
      "seed": self.seed,
    }

  def save_own_variables(self, store: Any) -> None:
    """Writes the whole table of group 0, as Keras' `Embedding` does.

    On several workers, all workers make this call.
    """
    store["0"] = self._whole_table()

  def load_own_variables(self, store: Any) -> None:
    """Gives all groups a table that this layer or an `Embedding` wrote."""
    self._assign_rows(iter([(0, np.asarray(store["0"]))]))

  def get_weights(self) -> list[Any]:
    """Returns a list with the whole table of group 0."""
    store: dict[str, Any] = {}
    self.save_own_variables(store)
    return [store["0"]]

  def set_weights(self, weights: Any) -> None:
    """Gives all groups the table that is the only item of `weights`."""
    [table] = weights
    self.load_own_variables({"0": table})

  def _whole_table(self, is_wanted: bool = True) -> Any:
    """Returns the table of group 0, or no rows where it is not wanted."""
    self._fill()
    copies = replicas_lib.Copies(self._strategy)
    members = sorted(self._owned.groups.assignment[0])
    dtype = variables.native(self.embeddings).dtype.as_numpy_dtype
    whole = np.empty([self.input_dim * is_wanted, self.output_dim], dtype)
    for place, replica in enumerate(members):
      own = whole[place :: len(members)]
      for block in copies.blocks(self.embeddings, replica):
        own[: len(block)] = block[: len(own)]
        own = own[len(block) :]
    # If this is the last call of a program, no worker ends before all workers
    # have all rows.
    copies.compare_workers("reading a divided table")
    return whole

  def _rows_of(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of ids of any shape."""
    flat = tf.reshape(ids, [-1])
    table = variables.native(self.embeddings)
    if not isinstance(table, tf.Variable):
      # Keras only wants to know shapes, and has not created the variable yet.
      rows = tf.zeros([tf.size(ids), self.output_dim], self.dtype)
    elif self._is_in_replica():
      self._fill()
      rows = self._exchange(flat)
    else:
      rows = self.lookup(flat)
    return self._shaped(rows, ids)

  def _shaped(self, rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Reshapes rows `[k, width]` to the shape of their ids and the width."""
    shape = tf.concat([tf.shape(ids), [self.output_dim]], axis=0)
    return tf.ensure_shape(
      tf.reshape(rows, shape), [*ids.shape, self.output_dim]
    )

  def _exchange(self, flat: tf.Tensor) -> tf.Tensor:
    """Returns the rows of the ids in a vector of shape `[k]`.

    Call it in a replica.
    """
    table = variables.native(self.embeddings)
    return row_exchange.in_replica(self._engine, table, self._owned, flat)

  def _exchange_in_group_0(self, flat: tf.Tensor) -> tf.Tensor:
    """Returns the rows of group 0 on the replicas of all groups."""
    rows, groups = self._exchange(flat), self._owned.groups
    if groups.group_size == groups.num_replicas:
      return rows
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    is_sender = tf.equal(replica, groups.assignment[0][0])
    everyone = reduce.for_strategy(self._strategy, None)
    [rows] = everyone.all_reduce_sum(
      [tf.where(is_sender, rows, tf.zeros_like(rows))]
    )
    return rows

  def _is_in_replica(self) -> bool:
    """Returns whether this is a replica of the layer's strategy."""
    here = tf.distribute.get_strategy() is self._strategy
    return here and not tf.distribute.in_cross_replica_context()

  def _fill(self) -> None:
    """Initializes the table, if this is possible and not done yet."""
    table = variables.native(self.embeddings)
    if self._is_filled or not isinstance(table, tf.Variable):
      return
    with tf.init_scope():
      self._assign_rows(self._initial_blocks())

  def _guard(self, table: Any) -> None:
    """Makes calls that treat the variable as a whole table raise an error.

    Optimizers of this package write the copies of replicas. Plain Keras would
    average the parts of different members, and would read the part of one
    member as if it were the table. A `tf.train.Checkpoint` saves and restores
    the whole table.
    """

    def refuse(*_: Any, **__: Any) -> Any:
      raise RuntimeError(
        f"{table.name} is divided among replicas, so it cannot be read or"
        " assigned as a whole. Train it with a CrossShardOptimizer. Use"
        " get_weights and set_weights of its layer, not of the model."
      )

    # Keras updates the copies. TensorFlow also updates the variable itself.
    copies = self._strategy.experimental_local_results(table)
    for variable in (table, *copies):
      for name in _REFUSED:
        setattr(variable, name, refuse)
    table.numpy = refuse  # For `model.get_weights()`.
    # The two methods by which tf.train.Checkpoint saves and restores.
    table._serialize_to_tensors = lambda: {  # noqa: SLF001
      "VARIABLE_VALUE": tf.constant(self.get_weights()[0])
    }
    table._restore_from_tensors = lambda restored: self.set_weights(  # noqa: SLF001
      [restored["VARIABLE_VALUE"].numpy()]
    )

  def _initial_blocks(self) -> Iterator[tuple[int, Any]]:
    """Yields the first id of each block, and the initial rows of the block."""
    config = self.embeddings_initializer.get_config()
    kind = type(self.embeddings_initializer)
    base = self.seed
    if base is None:
      base = config.get("seed") if isinstance(config.get("seed"), int) else 0
    for number, start in enumerate(range(0, self.input_dim, _BLOCK)):
      if "seed" in config:
        # A Python integer that differs between blocks and between seeds.
        config["seed"] = (base * 1_000_003 + number) % (1 << 31)
      rows = kind.from_config(config)((_BLOCK, self.output_dim), "float32")
      yield start, np.asarray(rows)[: self.input_dim - start]

  def _assign_rows(self, blocks: Iterator[tuple[int, Any]]) -> None:
    """Writes blocks of rows into the parts of this process."""
    native = variables.native(self.embeddings)
    if not self._is_filled:
      divided_rows.mark(native, self._owned)
      if self._owned.groups.group_size > 1:
        self._guard(native)
    groups, engine = self._owned.groups, self._engine
    copies = self._strategy.experimental_local_results(native)
    dtype = copies[0].dtype.as_numpy_dtype
    for start, rows in blocks:
      if start == 0 and rows.shape[1:] != (self.output_dim,):
        raise ValueError(
          f"The rows must have {self.output_dim} columns; got {rows.shape}."
        )
      for replica, copy in zip(engine.replicas_here, copies, strict=True):
        members = groups.members_of(replica)
        # The first id of this block that the replica owns.
        place, n = members.index(replica), len(members)
        first = (place - start) % n
        own = rows[first::n].astype(dtype)
        numbers = (start + first) // n + np.arange(len(own))
        tf.raw_ops.ResourceScatterUpdate(
          resource=copy.handle,
          indices=tf.constant(numbers, tf.int64),
          updates=tf.constant(own, dtype),
        )
    self._is_filled = True


def _write_saved_model(path: str, table: Any, name: str) -> None:
  """Writes a SavedModel whose signature returns rows of a table."""
  module = tf.Module()
  with variables.outside_of_strategies(), tf.device("CPU:0"):
    module.embeddings = tf.Variable(table, name=f"{name}/embeddings")

    def serve(ids: tf.Tensor) -> dict[str, tf.Tensor]:
      return {"rows": tf.gather(module.embeddings, ids)}

    spec = tf.TensorSpec(None, tf.int64, "ids")
    serve = tf.function(serve, input_signature=[spec], autograph=False)
    tf.saved_model.save(module, path, signatures=serve)


def _as_ragged(values: Any) -> Any:
  """Converts ids or weights to a tensor.

  Sparse values become a ragged tensor.
  """
  if values is None or isinstance(values, tf.RaggedTensor):
    return values
  if isinstance(values, tf.SparseTensor):
    examples = values.dense_shape[0]
    return tf.RaggedTensor.from_value_rowids(
      values.values, values.indices[:, 0], examples
    )
  return tf.convert_to_tensor(values)


def _combine(rows: Any, ids: Any, weights: Any, combiner: str) -> tf.Tensor:
  """Returns the weighted sum or mean of rows over the last axis of ids.

      sum     s = sum over k of w[k] * rows[k]
      mean    s / sum over k of w[k]
      sqrtn   s / sqrt(sum over k of w[k]^2)

  The result for an example without ids is zero.
  """
  axis = len(ids.shape) - 1
  if weights is None:
    weights = tf.ones_like(ids, rows.dtype)
  weights = tf.cast(weights, rows.dtype)
  total = tf.reduce_sum(
    tf.ragged.map_flat_values(
      lambda row, weight: row * weight[..., tf.newaxis], rows, weights
    ),
    axis=axis,
  )
  if combiner == "sum":
    return total
  if combiner == "mean":
    divisor = tf.reduce_sum(weights, axis=axis)
  else:
    divisor = tf.sqrt(tf.reduce_sum(tf.square(weights), axis=axis))
  return tf.math.divide_no_nan(total, divisor[..., tf.newaxis])
