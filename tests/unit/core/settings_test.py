"""The arguments of an optimizer: checked, kept in its configuration, shown."""

import json
import re
from typing import Any

import pytest
import tensorflow as tf

from tests.support import testbed, training
from tf_cross_shard import CrossShardOptimizer

PAIRS = [[0, 1], [2, 3]]
NUMBER = "must be a number of at least 0, or None; got"
DICTIONARY = "must map each setting name to a list"


@pytest.mark.parametrize(
  ("name", "value", "error", "words"),
  [
    (
      *("reduction", "max", ValueError),
      "must be one of .*'mean',.* 'sum',.*'weighted_mean',.*got 'max'",
    ),
    ("reduction", None, ValueError, "must be one of .*got None"),
    ("reduction", ["mean"], ValueError, r"must be one of .*got \['mean'\]"),
    ("loss_averaged_over", "all", ValueError, '"replica" .*"global".*\'all\''),
    ("loss_averaged_over", 0, ValueError, '"replica" .*"global".*got 0'),
    ("group_assignment", [[0, 1], [1, 0]], ValueError, "must .* twice"),
    ("wire_dtype", "bf16", ValueError, "'bf16'"),
    ("skip_nonfinite", "yes", TypeError, "must be True or False; got 'yes'"),
    ("scale_gradients", 1, TypeError, "must be True or False; got 1"),
    ("fused_update", "no", TypeError, "must be None, True or False; got 'no'"),
    ("clipnorm", -1.0, ValueError, f"{NUMBER} -1.0"),
    ("global_clipnorm", float("nan"), ValueError, f"{NUMBER} nan"),
    ("clipvalue", [1.0], ValueError, f"{NUMBER} \\[1.0\\]"),
    ("shard_update", "yes", ValueError, 'must be True, False or "elem'),
    ("lazy_rows", "yes", ValueError, 'must be True, False or "elementwise'),
    ("accumulate_steps", 0, ValueError, "integer of at least 1; got 0"),
    ("accumulate_steps", True, ValueError, "must be an integer"),
    ("per_model", ["momentum"], ValueError, DICTIONARY),
    ("per_model", {"momentum": 0.5}, ValueError, DICTIONARY),
    ("per_model", {"rho": [0.5, float("nan")]}, ValueError, "'rho' is"),
  ],
)
def test_invalid_arguments_raise_an_error(
  name: str, value: Any, error: type[Exception], words: str
) -> None:
  with pytest.raises(error, match=f"`{name}` .*{words}"):
    CrossShardOptimizer("sgd", **{name: value})


def test_at_most_one_clipping_limit() -> None:
  """Keras would refuse to load the configuration of such an optimizer."""
  limits = r"At most one .* got \{'clipnorm': 1.0, 'clipvalue': 2.0\}"
  with pytest.raises(ValueError, match=limits):
    CrossShardOptimizer("sgd", clipnorm=1.0, clipvalue=2.0)
  optimizer = CrossShardOptimizer("sgd", clipnorm=1.0)
  with pytest.raises(ValueError, match=limits):
    optimizer.clipvalue = 2.0
  optimizer.clipnorm = None
  optimizer.clipvalue = 2.0
  copied = CrossShardOptimizer.from_config(optimizer.get_config())
  assert (copied.clipnorm, copied.clipvalue) == (None, 2.0)


@pytest.mark.parametrize(
  ("spelling", "canonical"),
  [
    ("mean", "mean"),
    ("Weighted_Mean", "mean"),
    ("sum_over_batch_size", "mean"),
    ("SUM", "sum"),
    (tf.compat.v1.losses.Reduction.MEAN, "mean"),
    (tf.compat.v1.losses.Reduction.SUM, "sum"),
  ],
)
def test_spellings_of_reductions(spelling: Any, canonical: str) -> None:
  assert CrossShardOptimizer("sgd", spelling).reduction == canonical


def test_limits_of_groups_are_numbers() -> None:
  with pytest.raises(ValueError, match=f"`clipnorm` {NUMBER} -1.0"):
    CrossShardOptimizer("sgd", per_model={"clipnorm": [0.1, -1.0]})


def test_groups_are_known_when_the_program_is_built() -> None:
  @tf.function
  def make(groups: tf.Tensor) -> None:
    CrossShardOptimizer("sgd", group_assignment=groups)

  with pytest.raises(ValueError, match="known when the program is built"):
    make(tf.constant([[0]]))


# Of each a value that is not the default, as get_config has it.
VALUES: dict[str, Any] = {
  "reduction": "sum",
  "name": "mine",
  "group_assignment": PAIRS,
  "loss_averaged_over": "global",
  "clipnorm": 0.5,
  "wire_dtype": "float16",
  "skip_nonfinite": True,
  "scale_gradients": True,
  "fused_update": False,
  "shard_update": "elementwise",
  "lazy_rows": True,
  "per_model": {"momentum": [0.5, 0.25]},
}


@training.in_both
def test_a_configuration_keeps_what_is_not_the_default(which: str) -> None:
  library, package = training.KERASES[which]
  with testbed.mirrored().scope():
    sgd = library.optimizers.SGD(momentum=0.5)
    optimizer = package.CrossShardOptimizer(sgd, **VALUES)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = type(optimizer).from_config(config)
  for name, value in VALUES.items():
    assert config[name] == again.get_config()[name] == value
    assert getattr(optimizer, name) == value
    assert re.search(rf"\b{name}={re.escape(repr(value))}", repr(again))
  given = package.CrossShardOptimizer("sgd", wire_dtype=tf.float16)
  assert given.get_config()["wire_dtype"] == "float16"
  plain = package.CrossShardOptimizer("sgd")
  assert plain.wire_dtype is plain.accumulate_steps is None
  assert repr(plain) == "CrossShardOptimizer(SGD)"
