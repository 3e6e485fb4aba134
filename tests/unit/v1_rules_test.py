"""The rules compute what TensorFlow 1's kernels compute, dense and sparse.

The kernels are called themselves, so that no optimizer stands between.
Tolerances are absolute, for float32 values of order 1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tf_cross_shard.migration import v1_rules

STEPS = 50
SHAPE = (6, 3)
BOUND = 1e-6


class Case(NamedTuple):
  """A rule, and the kernels that it is to equal.

  Attributes:
    rule: The function.
    slots: First values of the slots, in the order of the kernel.
    dense: The kernel's name.
    arguments: Hyperparameters by the kernel's names, without the rate's.
    settings: The same by the rule's names.
    flags: Attributes of the kernel.
  """

  rule: Callable[..., Any]
  slots: dict[str, float]
  dense: str
  arguments: dict[str, float]
  settings: dict[str, Any]
  flags: dict[str, bool]


def _momentum(nesterov: bool) -> Case:
  return Case(
    v1_rules.momentum,
    {"accum": 0.0},
    "Momentum",
    {"momentum": 0.875},
    {"momentum": 0.875, "nesterov": nesterov},
    {"use_nesterov": nesterov},
  )


def _rmsprop(centered: bool) -> Case:
  mean = {"mean": 0.0} if centered else {}
  return Case(
    v1_rules.rmsprop,
    {**mean, "rms": 1.0, "mom": 0.0},
    "CenteredRMSProp" if centered else "RMSProp",
    {"rho": 0.8, "momentum": 0.5, "epsilon": 1e-3},
    {"rho": 0.8, "momentum": 0.5, "epsilon": 1e-3},
    {},
  )


def _ftrl(shrinkage: float, power: float, l1: float) -> Case:
  kernel = "FtrlV2" if shrinkage else "Ftrl"
  arguments = {"l1": l1, "l2": 0.25, "lr_power": power}
  if shrinkage:
    arguments["l2_shrinkage"] = shrinkage
  settings = {"power": power, "l1": l1, "l2": 0.25, "shrinkage": shrinkage}
  slots = {"accum": 0.5, "linear": 0.0}
  return Case(
    v1_rules.ftrl, slots, kernel, arguments, {**settings, "beta": 0.0}, {}
  )


CASES = {
  "momentum": _momentum(nesterov=False),
  "nesterov": _momentum(nesterov=True),
  "adagrad": Case(
    v1_rules.adagrad, {"accum": 0.1}, "Adagrad", {}, {"epsilon": 0.0}, {}
  ),
  "rmsprop": _rmsprop(centered=False),
  "centered": _rmsprop(centered=True),
  "adadelta": Case(
    v1_rules.adadelta,
    {"accum": 0.0, "moved": 0.0},
    "Adadelta",
    {"rho": 0.8, "epsilon": 1e-3},
    {"rho": 0.8, "epsilon": 1e-3},
    {},
  ),
  "ftrl": _ftrl(shrinkage=0.0, power=-0.5, l1=0.5),
  "ftrl_shrinkage": _ftrl(shrinkage=0.125, power=-0.5, l1=0.5),
  "ftrl_power": _ftrl(shrinkage=0.125, power=-0.75, l1=0.0),
}


def _kernel(case: Case, sparse: bool) -> Callable[..., Any]:
  infix = "SparseApply" if sparse else "Apply"
  kernel: Callable[..., Any] = getattr(
    tf.raw_ops, f"Resource{infix}{case.dense}"
  )
  return kernel


def _handles(case: Case, variables: list[Any]) -> dict[str, Any]:
  """The variable and the slots, by the kernel's names."""
  names = {
    "Momentum": ("var", "accum"),
    "Adagrad": ("var", "accum"),
    "RMSProp": ("var", "ms", "mom"),
    "CenteredRMSProp": ("var", "mg", "ms", "mom"),
    "Adadelta": ("var", "accum", "accum_update"),
  }.get(case.dense, ("var", "accum", "linear"))
  return {
    name: each.handle for name, each in zip(names, variables, strict=True)
  }


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel(name: str, sparse: bool) -> None:
  case = CASES[name]
  rng = np.random.default_rng(3)
  first = rng.normal(size=SHAPE).astype("float32")
  ours, theirs = (
    [tf.Variable(first)]
    + [tf.Variable(np.full(SHAPE, x, "float32")) for x in case.slots.values()]
    for _ in range(2)
  )
  handles = _handles(case, theirs)
  untouched = 5
  for step in range(STEPS):
    rate = 0.1 if step % 3 else 0.05  # one that changes
    rows = tf.constant(rng.choice(untouched, 3, replace=False))
    shape = (3, SHAPE[1]) if sparse else SHAPE
    grad = tf.constant(rng.normal(size=shape).astype("float32"))
    given = {"grad": grad, "lr": tf.constant(rate)}
    given |= {k: tf.constant(v) for k, v in case.arguments.items()}
    if sparse:
      given["indices"] = rows
    _kernel(case, sparse)(**handles, **given, **case.flags)
    rule = functools.partial(case.rule, rate=rate, **case.settings)
    v1_rules.update(
      rule,
      tf.IndexedSlices(grad, rows) if sparse else grad,
      ours[0],
      dict(zip(case.slots, ours[1:], strict=True)),
    )
  moved = np.abs(ours[0].numpy() - first).max(axis=1)
  assert (moved[:untouched] > 0.01).all()
  assert (moved[untouched:] == 0.0).all() == sparse
  for mine, other in zip(ours, theirs, strict=True):
    scale = max(1.0, float(np.abs(other.numpy()).max()))
    difference = np.abs(mine.numpy() - other.numpy()).max()
    assert difference <= BOUND * scale, (mine.name, difference)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("power", [-0.5, -1.0, -0.75, 0.0])
@pytest.mark.parametrize("l1", [0.0, 0.25])
@pytest.mark.parametrize("shrinkage", [0.0, 0.125])
def test_ftrl_where_nothing_was_seen_yet(
  shrinkage: float, l1: float, power: float, rate: float, sparse: bool
) -> None:
  """An accumulator of 0 and a gradient of 0 would divide 0 by 0."""
  if sparse and rate == 0.0:
    pytest.skip("which the kernel refuses")
  case = _ftrl(shrinkage, power, l1)
  case.arguments["l2"] = case.settings["l2"] = 0.0
  # Gradients, values, and linear terms, in all combinations with 0.
  given = np.array(
    [(g, w, z) for g in (0, 0.5, -2) for w in (0, 1, -1) for z in (0, 0.5, -1)],
    "float32",
  ).T[..., None]
  ours, theirs = (
    [
      tf.Variable(given[1]),
      tf.Variable(np.zeros_like(given[1])),
      tf.Variable(given[2]),
    ]
    for _ in range(2)
  )
  grad = tf.constant(given[0])
  rows = tf.range(len(given[0]))
  rule = functools.partial(v1_rules.ftrl, rate=rate, **case.settings)
  for _ in range(3):
    arguments = {"grad": grad, "lr": tf.constant(rate)}
    arguments |= {k: tf.constant(v) for k, v in case.arguments.items()}
    if sparse:
      arguments["indices"] = rows
    _kernel(case, sparse)(**_handles(case, theirs), **arguments)
    v1_rules.update(
      rule,
      tf.IndexedSlices(grad, rows) if sparse else grad,
      ours[0],
      dict(zip(case.slots, ours[1:], strict=True)),
    )
    if sparse:  # That kernel divides 0 by 0; the dense one never does.
      lost = np.isnan(theirs[0].numpy())
      assert lost.any() or power == 0.0
      assert not ours[0].numpy()[lost].any()
      theirs[0].assign(np.where(lost, 0.0, theirs[0]))
    for mine, other in zip(ours, theirs, strict=True):
      np.testing.assert_allclose(mine, other, rtol=BOUND, atol=BOUND)


def test_beta_is_added_to_the_root() -> None:
  """The kernels know no beta: version 1 puts it into l2."""
  slots = {"accum": tf.constant(4.0), "linear": tf.constant(1.0)}

  def after(l2: float, beta: float) -> float:
    var, _ = v1_rules.ftrl(
      tf.constant(2.0),
      tf.constant(0.5),
      slots,
      rate=0.25,
      power=-0.5,
      l1=0.5,
      l2=l2,
      shrinkage=0.0,
      beta=beta,
    )
    return float(var)

  # beta / (2 * rate) is 6.
  assert after(0.5, beta=3.0) == after(6.5, beta=0.0) != after(0.5, beta=0.0)


def test_all_is_read_before_anything_is_written() -> None:
  weight, slot = tf.Variable([1.0, 2.0]), tf.Variable([10.0, 20.0])

  def swap(
    grad: tf.Tensor, var: tf.Tensor, slots: v1_rules.Values
  ) -> tuple[tf.Tensor, v1_rules.Values]:
    return slots["s"] + grad, {"s": var}

  v1_rules.update(swap, tf.constant([0.5, 0.5]), weight, {"s": slot})
  assert weight.numpy().tolist() == [10.5, 20.5]
  assert slot.numpy().tolist() == [1.0, 2.0]
  one = tf.IndexedSlices(tf.constant([1.0]), tf.constant([1]))
  v1_rules.update(swap, one, weight, {"s": slot})
  assert weight.numpy().tolist() == [10.5, 3.0]
  assert slot.numpy().tolist() == [1.0, 20.5]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_of_variables(dtype: str) -> None:
  weight = tf.Variable(np.ones([2], dtype))
  accum = tf.Variable(np.ones([2], dtype))
  rule = functools.partial(v1_rules.momentum, rate=0.1, momentum=0.5)
  v1_rules.update(rule, tf.constant([1.0, 1.0]), weight, {"accum": accum})
  theirs = tf.Variable(np.ones([2], dtype))
  slot = tf.Variable(np.ones([2], dtype))
  tf.raw_ops.ResourceApplyMomentum(
    var=theirs.handle,
    accum=slot.handle,
    grad=tf.ones([2], dtype),
    # Numbers are float32 in version 1, whatever the variable is.
    **{
      name: tf.cast(tf.constant(value, tf.float32), dtype)
      for name, value in (("lr", 0.1), ("momentum", 0.5))
    },
  )
  assert weight.dtype == dtype
  assert weight.numpy().tolist() == theirs.numpy().tolist() != [1.0, 1.0]


COSINE: dict[str, Any] = {
  "initial_learning_rate": 0.5,
  "decay_steps": 10,
  "num_periods": 1.5,
  "alpha": 0.125,
  "beta": 0.01,
}


def test_linear_cosine_equals_version_1() -> None:
  settings = dict(COSINE)
  step = tf.Variable(0)
  theirs = tf.compat.v1.train.linear_cosine_decay(
    settings.pop("initial_learning_rate"), step, **settings
  )
  seen = set()
  for at in (*range(12), 1000):
    step.assign(at)
    ours = float(v1_rules.linear_cosine(at, **COSINE))
    assert abs(ours - float(theirs())) <= 1e-7, at
    seen.add(round(ours, 6))
  assert len(seen) == 11  # 10 steps, and from then on one


def test_noise_is_of_the_step_and_has_the_variance() -> None:
  # The wave is 1 everywhere, so that the noise is all that is left.
  settings = {**COSINE, "decay_steps": 4000, "num_periods": 0.0}

  def line(step: int, **noise: float) -> float:
    return float(v1_rules.linear_cosine(step, **settings, **noise))

  noisy = functools.partial(line, initial_variance=4.0, variance_decay=0.0)
  steps = range(0, 4000, 4)
  noise = np.array([(noisy(i) - line(i)) / 0.5 for i in steps])
  assert [noisy(i) for i in (0, 4)] == [noisy(i) for i in (0, 4)]
  assert abs(noise.mean()) < 0.2
  assert abs(noise.std() - 2.0) < 0.2
  less = functools.partial(line, initial_variance=4.0, variance_decay=0.5)
  ratio = (less(15) - line(15)) / (noisy(15) - line(15))
  assert ratio == pytest.approx(0.5, rel=1e-4)  # (1 + 15) ** (-0.5 / 2)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
def test_powers_are_multiplied_up(beta: float) -> None:
  factor, product, products = np.float32(beta), np.float32(1.0), []
  for _ in range(300):
    product = np.float32(product * factor)
    products.append(product)
  found = [v1_rules.power(beta, tf.constant(i, tf.int64)) for i in (0, 7, 299)]
  # To the bit, until they no longer matter beside 1.
  for i, power in zip((0, 7, 299), found, strict=True):
    if products[i] > 1e-7:
      assert power.numpy() == products[i]
    assert np.float32(1.0) - power.numpy() == np.float32(1.0) - products[i]


def test_powers_go_on_beyond_the_table() -> None:
  steps = tf.constant(1_000_000, tf.int64)
  assert float(v1_rules.power(0.9, steps)) == 0.0
  expected = float(np.float32(0.999999)) ** 1_000_001
  assert float(v1_rules.power(0.999999, steps)) == pytest.approx(
    expected, rel=1e-5
  )


def _constants(function: Any) -> int:
  """How many bytes the tables have in a function's graph, branches included."""
  graph = function.get_concrete_function().graph.as_graph_def()
  nodes = [
    *graph.node,
    *(n for f in graph.library.function for n in f.node_def),
  ]
  sizes = [n.attr["value"].tensor.ByteSize() for n in nodes if n.op == "Const"]
  return sum(size for size in sizes if size > 1000)


def test_tables_stand_once_in_a_graph() -> None:
  steps = tf.Variable(5, dtype=tf.int64)

  def powers(count: int) -> list[tf.Tensor]:
    betas = (0.9, 0.999) * count
    return [v1_rules.power(beta, tf.convert_to_tensor(steps)) for beta in betas]

  one, many = (
    _constants(tf.function(functools.partial(powers, count), autograph=False))
    for count in (1, 50)
  )
  assert one == many > 4 * 17000
  np.testing.assert_array_equal(
    tf.function(powers, autograph=False)(2), powers(2)
  )


def test_tables_in_branches_and_graphs() -> None:
  """A table in a branch is out of reach of what is beside it."""

  def power(steps: tf.Tensor) -> tf.Tensor:
    branch = tf.cond(
      steps > 0,
      lambda: v1_rules.power(0.9, steps),
      lambda: v1_rules.power(0.9, steps + 1),
    )
    return branch + v1_rules.power(0.9, steps) + v1_rules.power(0.9, steps)

  steps = tf.constant(3, tf.int64)
  expected = float(power(steps))
  assert expected == pytest.approx(3 * 0.9**4, rel=1e-6)
  for jit in (False, True):
    assert float(tf.function(power, jit_compile=jit)(steps)) == expected
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    # Control flow of version 1, as its graphs have it.
    tf.compat.v1.disable_control_flow_v2()
    try:
      result = power(tf.constant(3, tf.int64))
    finally:
      tf.compat.v1.enable_control_flow_v2()
    assert float(session.run(result)) == expected
    tf.compat.v1.train.export_meta_graph()


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
