"""Wrong arguments of callbacks are refused by name, value and remedy."""

from typing import Any

import numpy as np
import pytest

from tf_cross_shard import callbacks

X = np.zeros([4, 1], "f")


def given(kind: str) -> dict[str, Any]:
  """Returns the required arguments of a callback."""
  return {
    "BackupAndRestore": {"backup_dir": "unused"},
    "PerModelCheckpoint": {"path": "unused"},
    "PerModelMetrics": {"validation_data": (X, X)},
    "OuterOptimizer": {"every": 4},
  }.get(kind, {})


@pytest.mark.parametrize(
  ("kind", "argument", "value", "error", "words"),
  [
    ("PerModelMetrics", "ensemble", X, TypeError, "Pass all data as one arg"),
    ("PerModelMetrics", "validation_data", iter([]), TypeError, "be a dataset"),
    ("PerModelMetrics", "validation_data", X, TypeError, "Add the targets"),
    ("PerModelMetrics", "name", "a/b", ValueError, "a string without a slash"),
    ("PerModelMetrics", "every", 0, ValueError, "an integer of at least 1"),
    ("PerModelMetrics", "steps", 0, ValueError, "an integer of at least 1"),
    ("PerModelEarlyStopping", "monitor", "val_a/model_0", ValueError, "Remov"),
    ("PerModelEarlyStopping", "patience", "3", ValueError, "at least 0"),
    ("PerModelEarlyStopping", "min_delta", "0", TypeError, "must be a number"),
    ("PerModelCheckpoint", "mode", "least", ValueError, '"min"'),
    ("PerModelReduceLROnPlateau", "factor", 1.0, ValueError, "0 and 1"),
    ("BackupAndRestore", "backup_dir", "", ValueError, "`backup_dir`"),
    ("BackupAndRestore", "every", 0, ValueError, "must be an integer of at"),
    ("BackupAndRestore", "keep", 1, ValueError, "must be an integer of at"),
    ("BackupAndRestore", "on_preemption", all, TypeError, "be True or False"),
    ("OuterOptimizer", "every", 0, ValueError, "an integer of at least 1"),
    ("OuterOptimizer", "warmup", -1, ValueError, "at least 0; got -1"),
    ("OuterOptimizer", "wire_dtype", "int4", ValueError, "`wire_dtype`"),
  ],
)
def test_invalid_arguments_raise_an_error(
  kind: str, argument: str, value: Any, error: type[Exception], words: str
) -> None:
  arguments = {**given(kind), argument: value}
  with pytest.raises(error, match=words) as caught:
    getattr(callbacks, kind)(**arguments)
  assert argument in str(caught.value)


@pytest.mark.parametrize("argument", ["every", "batch_size", "steps"])
def test_without_data_fit_decides_the_rest(argument: str) -> None:
  with pytest.raises(ValueError, match=f"`{argument}` must be .* got 2"):
    callbacks.PerModelMetrics(**{argument: 2})
