"""A strategy for replicas on this machine, created in one call.

On logical CPUs, it also works around a bug of TensorFlow 2.21. The iterator
of a distributed dataset has a tuning thread for each device, which sleeps for
up to a minute at a time. To delete the iterator, TensorFlow waits for these
threads, and does not always wake them. Then `fit` waits after each epoch. The
strategy creates its iterators without these threads.
"""

import functools
import importlib
import threading
from collections.abc import Iterator
from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.core import validation, versions

try:
  from tensorflow.python.data.ops import debug_mode
except ImportError:  # A private module: then `fit` may wait, as without us.
  debug_mode = None

_debug_mode: Final = threading.RLock()


def local_strategy(
  num_replicas: int, *, vectorized: bool = True
) -> tf.distribute.Strategy:
  """Returns a strategy with a given number of replicas on this machine.

  Use it to try a data-parallel program without several GPUs. To train several
  models, use `VectorizedStrategy`, whose models all see the whole batch. If
  this machine has a GPU for each replica, you get a MirroredStrategy on GPUs.
  Otherwise, even with some GPUs, you get a `VectorizedStrategy` with
  `split_batches=True`, whose replicas are one program on one device.

  >>> import tensorflow as tf
  >>> import tf_cross_shard
  >>> strategy = tf_cross_shard.local_strategy(4)
  >>> with strategy.scope():
  ...   optimizer = tf_cross_shard.CrossShardOptimizer(
  ...     tf.keras.optimizers.Adam(0.01), group_assignment=[[0, 1], [2, 3]]
  ...   )
  >>> strategy.num_replicas_in_sync
  4

  With `vectorized=False`, each replica is a thread on its own logical CPU. This
  is slower, and it needs no vectorizer: any TensorFlow program runs. TensorFlow
  fixes its logical devices when it runs its first operation, so make this call
  at the start of the program. If TensorFlow has already started with enough
  devices, the function uses the first `num_replicas` of them. This strategy
  avoids a TensorFlow bug, through which `fit` under other MirroredStrategies
  can wait for up to minutes after each epoch. To do so, it turns off
  `options.autotune` in your datasets, so `tf.data.AUTOTUNE` stands for a fixed
  number of parallel calls, and the devices do not prefetch batches.

  Args:
    num_replicas: The number of replicas, at least 1.
    vectorized: Whether replicas without a GPU of their own become one program.
      False gives logical CPUs.

  Returns:
    A `VectorizedStrategy` or a `tf.distribute.MirroredStrategy`.

  Raises:
    ValueError: `num_replicas` is not a positive integer.
    RuntimeError: `vectorized` is False, and TensorFlow has already started with
      fewer devices.
  """
  num_replicas = validation.check_integer(
    "num_replicas", num_replicas, "Pass, for example, 4."
  )
  kind = "GPU" if _count("GPU") >= num_replicas else "CPU"
  if kind == "CPU" and vectorized:
    with versions.needing_private_modules("local_strategy"):
      # Only programs that need it load the vectorizer.
      home = importlib.import_module("tf_cross_shard._src.vectorized.strategy")
    return home.VectorizedStrategy(num_replicas, split_batches=True)
  if _count(kind) < num_replicas:
    _divide_cpu(num_replicas)
  devices = [f"{kind}:{i}" for i in range(num_replicas)]
  if kind == "CPU" and debug_mode is not None:
    return LocalStrategy(devices)
  return tf.distribute.MirroredStrategy(devices)


class LocalStrategy(tf.distribute.MirroredStrategy):
  """A MirroredStrategy on CPUs, whose iterators have no tuning threads."""

  def experimental_distribute_dataset(self, *args: Any, **kwargs: Any) -> Any:
    distribute = super().experimental_distribute_dataset
    return _untuned(distribute(*args, **kwargs))

  def distribute_datasets_from_function(self, *args: Any, **kwargs: Any) -> Any:
    distribute = super().distribute_datasets_from_function
    return _untuned(distribute(*args, **kwargs))


# `describe` and errors show the class that users know.
LocalStrategy.__name__ = LocalStrategy.__qualname__ = "MirroredStrategy"


def _untuned(distributed: Any) -> Any:
  """Makes a distributed dataset create its iterators without tuning threads.

  Its class must remain a subclass, because Keras and AutoGraph check it.
  """
  base: Any = type(distributed)
  distributed.__class__ = _untuned_class(base)
  return distributed


@functools.cache
def _untuned_class(base: Any) -> Any:
  """Returns a subclass that turns off tuning while it creates an iterator.

  TensorFlow's debug mode is the only switch that reaches the datasets which
  TensorFlow creates for each device. It must be off again before the program
  creates other datasets, since it runs their functions in Python.
  """

  class Untuned(base):
    """A distributed dataset that is not tuned."""

    def __iter__(self) -> Iterator[Any]:
      # One thread at a time: another would take this mode for the user's own,
      # and restore it for ever.
      with _debug_mode:
        before = debug_mode.DEBUG_MODE
        debug_mode.toggle_debug_mode(True)
        try:
          return super().__iter__()
        finally:
          debug_mode.toggle_debug_mode(before)

  Untuned.__name__ = Untuned.__qualname__ = base.__name__
  return Untuned


def _count(kind: str) -> int:
  """Returns how many logical devices there are, without starting TensorFlow."""
  divided = tf.config.get_logical_device_configuration
  visible = tf.config.get_visible_devices(kind)
  # A device that nobody has divided is one logical device.
  return sum(len(divided(device) or [device]) for device in visible)


def _divide_cpu(count: int) -> None:
  """Divides the CPU into logical devices, unless TensorFlow has started."""
  [cpu, *_] = tf.config.list_physical_devices("CPU")
  try:
    tf.config.set_logical_device_configuration(
      cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
  except RuntimeError:
    raise RuntimeError(
      f"local_strategy({count}, vectorized=False) needs {count} devices, but"
      f" TensorFlow has already started with only {_count('CPU')}. Call it"
      " before all other TensorFlow operations; in a notebook, restart the"
      " kernel first. Without vectorized=False, no devices are needed."
    ) from None
