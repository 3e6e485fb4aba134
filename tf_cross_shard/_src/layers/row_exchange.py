"""Looks up rows of a divided table, by two exchanges between the members.

    ids ─ unique ─▶ sort by owner ─ exchange ─▶ owner gathers ─ exchange ─▶ rows

Each id is sent once, to its owner, and each row comes back once. The second
exchange is linear, so its gradient is the reverse exchange: the owner receives
the gradients of the rows that it has sent, and `tf.gather` turns them into the
`tf.IndexedSlices` of its part of the table. A step thus sends, for each
distinct id of a replica, one number forward, and the row forward and back.
"""

from typing import Any

import tensorflow as tf

from tf_cross_shard._src.core import divided_rows
from tf_cross_shard._src.layers import embedding_lookup


def in_replica(
  engine: Any, table: Any, owned: divided_rows.DividedRows, ids: tf.Tensor
) -> tf.Tensor:
  """Returns the rows of ids; all members of the group make this call.

  Args:
    engine: The collectives of the layer's strategy and groups.
    table: The variable whose copies are the parts of the table.
    owned: How the rows are divided.
    ids: `[k]`, int32 or int64. The number k may differ between replicas.

  Returns:
    `[k, width]`.
  """
  ids = _checked(ids, owned.rows)
  members = owned.groups.group_size
  if members == 1:
    return embedding_lookup.embedding_lookup(table, ids)
  unique, places = tf.unique(ids)
  # Sort the ids by their owners, and count the ids of each owner.
  owners = tf.cast(unique % members, tf.int32)
  order = tf.argsort(owners, stable=True)
  # sent[s, r]: how many ids member s sends to member r.
  own_counts = tf.math.bincount(owners, minlength=members, dtype=tf.int32)
  sent = tf.reshape(engine.all_gather_part(own_counts), [members, members])
  # Row numbers within the owner's part, which fit into int32.
  numbers = tf.cast(tf.gather(unique, order) // members, tf.int32)
  asked = engine.exchange_rows(numbers, sent)
  # For each id of the batch, the place of its row among the received rows.
  places = tf.gather(tf.math.invert_permutation(order), places)

  @tf.custom_gradient
  def send_back(rows: tf.Tensor) -> Any:
    received = engine.exchange_rows(rows, tf.transpose(sent))

    def gradient(of_batch: tf.Tensor) -> tf.Tensor:
      # Add up the gradients of equal ids before they are sent.
      of_rows = tf.math.unsorted_segment_sum(
        of_batch, places, tf.shape(unique)[0]
      )
      return engine.exchange_rows(of_rows, sent)

    return tf.gather(received, places), gradient

  result = send_back(embedding_lookup.embedding_lookup(table, asked))
  return tf.ensure_shape(result, [ids.shape[0], table.shape[1]])


def from_parts(
  parts: list[Any], owned: divided_rows.DividedRows, ids: tf.Tensor
) -> tf.Tensor:
  """Returns the rows of ids, read from the parts of all members of a group."""
  ids = _checked(ids, owned.rows)
  owners, numbers = ids % len(parts), ids // len(parts)
  rows = [tf.gather(part, numbers) for part in parts]
  result = rows[0]
  for place, of_part in enumerate(rows[1:], 1):
    result = tf.where((owners == place)[:, tf.newaxis], of_part, result)
  return result


def _checked(ids: tf.Tensor, rows: int) -> tf.Tensor:
  """Returns ids, and fails if one of them is out of range.

  A wrong id could otherwise read or change a row of padding.
  """
  is_in_range = tf.reduce_all((ids >= 0) & (ids < tf.cast(rows, ids.dtype)))
  # Not `tf.debugging.Assert`: it is stateful, so TensorFlow would run it after
  # all stateful operations of the replicas that were traced before. If one of
  # these waits for rows, all replicas would wait forever. Gathering from one
  # zero is stateless. It fails on CPUs if the index is 1, and names itself.
  with tf.device("CPU:0"):
    zero = tf.gather(
      tf.zeros([1], ids.dtype),
      tf.where(is_in_range, 0, 1),
      name=f"ids_of_ShardedEmbedding_must_be_from_0_to_{rows - 1}",
    )
  return ids + zero
